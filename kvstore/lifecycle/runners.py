"""Where a node's collections run: in a process of its own, or, for a store that lives in this process, here."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Protocol

import msgspec

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.config import Settings
from kvstore.errors import Closed, Unavailable
from kvstore.lifecycle.collector import Collector, CollectSettings, Progress, Watch
from kvstore.lifecycle.direct import told
from kvstore.lifecycle.messages import BEAT_S, MAX_LINE, Ended, Event, Failed, Job, Progressed, Setup, Spent
from kvstore.payer import NOBODY
from kvstore.repo import Repo

log = logging.getLogger(__name__)
_SILENCE_S: Final = 20 * BEAT_S
_END_S: Final = 5.0


class Runner(Protocol):
    """Does one collection at a time."""

    async def run(self, job: Job, watch: Watch) -> api.Collected | None:
        """Collect. None where another node had just done it. Raises `KVTierError`."""
        ...

    async def rest(self) -> None:
        """There is nothing to do for now."""
        ...

    async def aclose(self) -> None:
        """End what runs."""
        ...


class InProcess:
    """On this event loop.

    Args:
        repo: The repository of the moment; raises `Unavailable` until it is reached.
        settings: How.
    """

    def __init__(self, repo: Callable[[], Repo], settings: CollectSettings) -> None:
        self._repo, self._settings = repo, settings
        self._made: tuple[Repo, Collector] | None = None

    async def run(self, job: Job, watch: Watch) -> api.Collected | None:
        """See `Runner`."""
        repo = self._repo()
        if self._made is None or self._made[0] is not repo:
            self._made = (repo, Collector(repo, self._settings))
        collector = self._made[1]
        if job.fresh_s and await collector.fresh(job.fresh_s):
            return None
        return await collector.run(job.request, watch=watch)

    async def rest(self) -> None:
        """See `Runner`. It takes nothing while it rests."""

    async def aclose(self) -> None:
        """See `Runner`. Nothing runs on its own."""


class Subprocess:
    """In a process at low priority, which remembers from run to run what has not changed. Started when there is something to do.

    Args:
        settings: The node's.
        keep: Whether the process stays between runs.
        accounts: Where what it asks of the store is counted, as the node's own work.
    """

    def __init__(self, settings: Settings, *, keep: bool, accounts: Accounts | None = None) -> None:
        self._setup = Setup(settings=told(settings), log_level=logging.getLevelName(log.getEffectiveLevel()))
        self._keep, self._accounts, self._counted = keep, accounts or Accounts(), Spent()
        self._process: asyncio.subprocess.Process | None = None
        self._closed = False

    async def run(self, job: Job, watch: Watch) -> api.Collected | None:
        """See `Runner`. A process that dies or falls silent is `Unavailable`, and the next run starts another.

        One that was kept and had died before it heard of this job, unnoticed as yet, is replaced at once.
        """
        kept = self._process
        process = await self._started()
        try:
            return await self._work(process, job, watch)
        except _DeafError:
            await self._end()
            if process is not kept:
                raise
        return await self.run(job, watch)

    async def _work(self, process: asyncio.subprocess.Process, job: Job, watch: Watch) -> api.Collected | None:
        heard = False
        try:
            await _send(process, job)
            while True:
                event = await _event(process, heard=heard)
                heard = True
                if isinstance(event, Progressed):
                    fields = msgspec.structs.asdict(event)
                    self._count(fields.pop("spent"))
                    watch(Progress(**fields))
                elif isinstance(event, Failed):
                    raise event.problem.error()
                else:
                    return event.collected
        except _DeafError:
            raise
        except (asyncio.CancelledError, _LostError):
            await self._end()
            raise

    def _count(self, spent: Spent) -> None:
        before, self._counted = self._counted, spent
        account = self._accounts.of(*NOBODY)
        account.requests.update({verb: count - before.requests.get(verb, 0) for verb, count in spent.requests.items()})
        account.sent += spent.sent - before.sent
        account.fetched += spent.fetched - before.fetched

    async def rest(self) -> None:
        """See `Runner`."""
        if not self._keep:
            await self._end()

    async def aclose(self) -> None:
        """See `Runner`."""
        self._closed = True
        await self._end()

    async def _started(self) -> asyncio.subprocess.Process:
        if self._closed:
            raise Closed("this node is stopping")
        if self._process is not None and self._process.returncode is None:
            return self._process
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvstore.lifecycle.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            start_new_session=True,  # Ctrl-C in the terminal is for the node, which then ends it
        )
        self._counted = Spent()
        log.info("the collector runs as process %d", self._process.pid)
        await _send(self._process, self._setup)
        return self._process

    async def _end(self) -> None:
        """Close its input, which ends it; kill it where that takes long."""
        process, self._process = self._process, None
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(_END_S):
                await process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class _LostError(Unavailable):
    """The process is of no more use."""


class _DeafError(_LostError):
    """It ended before it said anything about the job."""


async def _send(process: asyncio.subprocess.Process, message: msgspec.Struct) -> None:
    assert process.stdin is not None
    try:
        process.stdin.write(msgspec.json.encode(message) + b"\n")
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        raise _DeafError("the collector's process ended when it was given work") from None


async def _event(process: asyncio.subprocess.Process, *, heard: bool) -> Event:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_SILENCE_S):
            line = await process.stdout.readline()
    except TimeoutError:
        process.kill()
        raise _LostError(f"the collector's process said nothing for {_SILENCE_S:.0f} s, and was killed") from None
    if not line:
        status = await process.wait()
        lost = _LostError if heard else _DeafError
        raise lost(f"the collector's process ended with status {status}; what it did so far stays, and the next run goes on")
    try:
        event: Event = msgspec.json.decode(line, type=Progressed | Ended | Failed)
    except msgspec.DecodeError as error:
        process.kill()
        raise _LostError(f"the collector's process said something else than events: {error}") from None
    return event
