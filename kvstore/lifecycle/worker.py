"""A node's collections: on request and periodically, one at a time; and what is known of them and of the bucket's size."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

import msgspec

from kvstore import api
from kvstore.clock import Clock
from kvstore.errors import KVTierError, Unavailable
from kvstore.lifecycle.collector import Progress
from kvstore.lifecycle.hints import MOST_USAGE, UsageHint, read_hint
from kvstore.lifecycle.messages import Job
from kvstore.lifecycle.runners import Runner
from kvstore.payer import NOBODY, Paying
from kvstore.repo import Repo

log = logging.getLogger(__name__)
_FRESH: Final = 0.5  # of an interval: so long a collection by another node stands for one of ours
_LOOK_AGAIN_S: Final = 5.0


class Collections:
    """Runs them and counts.

    Args:
        runner: Where they run.
        repo: The repository of the moment, for what earlier collections left there; raises `Unavailable` until it is reached.
        clock: This host's.
        interval: Seconds between periodic ones; 0: none.
    """

    def __init__(self, runner: Runner, repo: Callable[[], Repo], clock: Clock, interval: int) -> None:
        self._runner, self._repo, self._clock, self._interval = runner, repo, clock, interval
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[api.Collected | None]] = set()
        self._runs: Counter[str] = Counter()
        self._progress = Progress()
        self._running = False
        self._deleted = self._freed = 0
        self._last_success, self._error = 0.0, ""
        self._due = clock.monotonic() + interval
        self._usage: list[api.Usage] = []
        self._usage_known = False

    async def collect(self, request: api.Collect) -> api.Collected:
        """One now; it waits for the one that runs, and goes on when whoever asked has left. Raises `KVTierError`."""
        done = await self._run(Job(request=request))
        assert done is not None  # only a job that says `fresh_s` may be skipped
        return done

    async def keep(self) -> None:
        """Learn the bucket's size, then collect periodically. Whoever supervises starts it again where it raises."""
        while not self._usage_known:
            await self._learn_usage()
        while self._interval:
            await self._clock.sleep(max(0.0, self._due - self._clock.monotonic()))
            await self._run(Job(request=api.Collect(), fresh_s=self._interval * _FRESH))
            self._due = self._clock.monotonic() + self._interval

    async def _learn_usage(self) -> None:
        try:
            root = self._repo().root
        except Unavailable:
            await self._clock.sleep(_LOOK_AGAIN_S)  # the node says what is wrong, and keeps trying
            return
        hint = await read_hint(root, root.keys.usage_hint, UsageHint)
        if hint is not None and not self._usage:
            self._usage = hint.usage
        self._usage_known = True

    def stats(self, tenant: str) -> api.CollectorStats:
        """As it stands, for a tenant."""
        return api.CollectorStats(
            running=self._running,
            heads=self._progress.heads,
            listed=self._progress.listed,
            deleted=self._deleted + (self._progress.deleted if self._running else 0),
            freed=self._freed + (self._progress.freed if self._running else 0),
            runs=dict(self._runs),
            last_success=self._last_success,
            late_s=max(0.0, self._clock.monotonic() - self._due) if self._interval else 0.0,
            error=self._error,
            usage=[usage for usage in self._usage if usage.tenant == tenant],
        )

    @property
    def usage(self) -> list[api.Usage]:
        """Live blocks of all tenants, as of the last collection by any node; another list after each.

        Of a namespace that is not in it nothing is known, though nothing was alive of it then: it may have come since.
        """
        return self._usage

    async def aclose(self) -> None:
        """Stop what runs: a collection may stop anywhere."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.aclose()

    async def _run(self, job: Job) -> api.Collected | None:
        task = asyncio.create_task(self._one(job))
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return await asyncio.shield(task)

    def _over(self, task: asyncio.Task[api.Collected | None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # looked at: whoever asked may have left

    async def _one(self, job: Job) -> api.Collected | None:
        async with self._lock:
            self._running, self._progress = True, Progress()
            try:
                with Paying(*NOBODY):  # whoever asked for it
                    done = await self._runner.run(job, self._watch)
            except KVTierError as error:
                self._runs[error.kind] += 1
                self._error = f"{error.kind}: {error.message}"
                raise
            finally:
                self._running = False
                self._deleted += self._progress.deleted
                self._freed += self._progress.freed
                await self._runner.rest()
            self._runs["ok" if done is not None else "skipped"] += 1
            self._error = ""
            if done is None or not done.dry_run:
                self._last_success = self._clock.now()
            if done is not None and not done.dry_run:
                self._usage = _and_gone(done.usage, self._usage)
                log.info("collected: %d blocks and %d bytes deleted", done.blocks_deleted, done.bytes_deleted)
            for warning in done.warnings if done is not None else ():
                log.warning("%s", warning)
            return done

    def _watch(self, progress: Progress) -> None:
        self._progress = msgspec.structs.replace(progress)


def _and_gone(usage: list[api.Usage], before: list[api.Usage]) -> list[api.Usage]:
    """What is alive, and nothing of what was before and is not any more; at most as many as a collection tells apart."""
    here = {(each.tenant, each.namespace) for each in usage}
    gone = [msgspec.structs.replace(each, blocks=0, bytes=0) for each in before if (each.tenant, each.namespace) not in here]
    return usage + gone[: max(0, MOST_USAGE - len(usage))]
