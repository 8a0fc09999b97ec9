"""Commits accepted by this node: in order per session, to the durability that was asked for.

`bucket` is answered when the protocol has acknowledged it. `nvme` is answered when the blocks and the intent to commit them are on
this machine's disk; the intent is replayed before the node is ready again. `dram` is answered at once and lost with the process.
Behind the last two, one task per session commits in order. It gives a promise up only where the protocol has decided that it cannot
land; whatever else goes wrong (the store, its credentials, this node's memory, a defect) is waited out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final, Protocol

import msgspec

from kvstore import api
from kvstore.clock import Clock, Ids
from kvstore.errors import Conflict, KVTierError, Overloaded, Unavailable, Unsupported
from kvstore.ids import Namespace
from tiering import JournalFull

log = logging.getLogger(__name__)
MAX_PENDING: Final = 4096
PATIENCE_S: Final = 60.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0
_DECIDED: Final = frozenset({"conflict", "gone", "already_exists", "not_found", "invalid", "too_many_branches"})


class Journal(Protocol):
    """Where intents survive a kill -9: the index of the disk tier."""

    async def put(self, key: bytes, body: bytes) -> None:
        """Durable when it returns."""
        ...

    def items(self) -> Sequence[tuple[bytes, bytes]]:
        """What was put and not removed."""
        ...

    async def remove(self, key: bytes) -> None:
        """Forget it."""
        ...


class Local(Protocol):
    """See :class:`kvstore.service.local.LocalCommits`."""

    async def apply(self, tenant: str, request: api.Commit) -> api.Receipt:
        """The protocol's commit."""
        ...

    async def secure(self, tenant: str, request: api.Commit) -> bool:
        """Make its blocks outlive a kill -9."""
        ...

    def learn(self, fields: Namespace) -> None:
        """A namespace that an intent brings along."""
        ...

    async def fields(self, tenant: str, namespace: str) -> Namespace:
        """A namespace's."""
        ...

    async def release(self, tenant: str, request: api.Commit) -> None:
        """End what `secure` began."""
        ...


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that was promised: enough to make it again after a crash, under the same write id."""

    tenant: str
    request: api.Commit
    fields: Namespace
    at: float


class _Line:
    """The pending commits of one session, and those that are about to be promised: one at a time, each checked against the last."""

    def __init__(self) -> None:
        self.intents: deque[Intent] = deque()
        self.task: asyncio.Task[None] | None = None
        self.moved = asyncio.Condition()
        self.entrance = asyncio.Lock()
        self.entering = 0

    def empty(self) -> bool:
        """Whether nothing of this session is pending."""
        return not self.intents


class Commits:
    """Runs commits.

    Args:
        local: What a commit does on this node and in the bucket.
        journal: Keeps intents; None where there is no disk tier.
    """

    def __init__(self, local: Local, journal: Journal | None, clock: Clock, ids: Ids) -> None:
        self._local, self._journal, self._clock, self._ids = local, journal, clock, ids
        self._lines: dict[tuple[str, str, str, str], _Line] = {}
        self._pending = 0
        self._closing = False
        self.outcomes: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Commits acknowledged locally and not yet in the bucket."""
        return self._pending

    async def commit(self, tenant: str, request: api.Commit, durability: api.Durability) -> api.Receipt:
        """One commit.

        Raises:
            Conflict: Somebody else moved the session.
            Overloaded: Too many commits wait for the store.
            Unsupported: `nvme` without a disk tier.
        """
        request = msgspec.structs.replace(request, write_id=request.write_id or self._ids.new(), durability=durability)
        if durability == "bucket":
            if not await self.settle(tenant, request.id, self._clock.monotonic() + PATIENCE_S):
                raise Unavailable(f"earlier commits of session {request.id!r} still wait for the bucket", kind="timeout")
            receipt = await self._counted(self._local.apply(tenant, request))
            return msgspec.structs.replace(receipt, durability="bucket")
        async with self._entered(_key(tenant, request)) as line:
            if any(pending.request == request for pending in line.intents):
                return _promised(request, durability)  # a retry: it is the same commit
            last = line.intents[-1].request.base_version + 1 if line.intents else None
            if last is not None and request.base_version != last:
                raise Conflict(f"session {request.id!r} is at version {last} on this node", current=last)
            if self._closing or self._pending >= MAX_PENDING:
                raise Overloaded(f"{self._pending} commits wait for the store; at most {MAX_PENDING}")
            self._pending += 1
            try:
                fields = await self._local.fields(tenant, request.namespace)
                intent = Intent(tenant=tenant, request=request, fields=fields, at=self._clock.now())
                if durability == "nvme":
                    await self._keep(intent)
            except BaseException:
                self._pending -= 1
                raise
            line.intents.append(intent)
            self._start(line)
        return _promised(request, durability)

    @asynccontextmanager
    async def _entered(self, key: tuple[str, str, str, str]) -> AsyncIterator[_Line]:
        line = self._lines.setdefault(key, _Line())
        line.entering += 1
        try:
            async with line.entrance:
                yield line
        finally:
            line.entering -= 1
            self._forget(key, line)

    async def _keep(self, intent: Intent) -> None:
        if self._journal is None:
            raise Unsupported("durability 'nvme' needs a disk tier: set [nvme] path")
        if not await self._local.secure(intent.tenant, intent.request):
            raise Unavailable("a block of this commit is in no local tier and not in the bucket: publish the blocks again")
        try:
            await self._journal.put(intent.request.write_id.encode(), msgspec.msgpack.encode(intent))
        except BaseException as error:
            await self._local.release(intent.tenant, intent.request)
            if isinstance(error, JournalFull):
                raise Overloaded(f"too many promised commits wait for the store: {error}") from None
            if isinstance(error, OSError):
                raise Unavailable(f"the disk tier did not take the promise: {error.strerror}") from error
            raise

    def _start(self, line: _Line) -> None:
        if line.task is None:
            line.task = asyncio.create_task(self._work(line))

    async def _work(self, line: _Line) -> None:
        key = _key(line.intents[0].tenant, line.intents[0].request)
        while line.intents and await self._land(line.intents[0]):
            line.intents.popleft()
            self._pending -= 1
            async with line.moved:
                line.moved.notify_all()
        line.task = None
        self._forget(key, line)

    def _forget(self, key: tuple[str, str, str, str], line: _Line) -> None:
        if not line.intents and not line.entering and self._lines.get(key) is line:
            del self._lines[key]

    async def _land(self, intent: Intent) -> bool:
        """Commit until it is decided. False when the node closes first; the journal, where there is one, keeps the intent."""
        wait = _FIRST_WAIT
        while not await self._decided(intent):
            if self._closing:
                return False
            await self._clock.sleep(wait * (0.5 + self._ids.jitter()))
            wait = min(wait * 2, _LONGEST_WAIT)
        if self._journal is not None and intent.request.durability == "nvme":
            try:
                await self._journal.remove(intent.request.write_id.encode())
            except OSError as error:  # the next life makes it again, which changes nothing
                log.warning("a commit that has landed stays in the journal: %s", error)
            await self._local.release(intent.tenant, intent.request)
        return True

    async def _decided(self, intent: Intent) -> bool:
        """Commit once; False where it may still land later."""
        try:
            await self._counted(self._local.apply(intent.tenant, intent.request))
        except KVTierError as error:
            if error.kind not in _DECIDED:
                log.warning("commit of a session waits: %s", error)
                return False
            # It cannot land, and whoever committed has its answer already.
            log.warning("a commit acknowledged with durability %s was dropped: %s", intent.request.durability, error)
        except Exception:  # a defect must not end the task: whoever waits for this session would wait for ever
            log.exception("commit of a session failed, and is tried again")
            self.outcomes["internal"] += 1
            return False
        return True

    async def _counted(self, commit: Awaitable[api.Receipt]) -> api.Receipt:
        try:
            receipt = await commit
        except KVTierError as error:
            self.outcomes[error.kind] += 1
            raise
        self.outcomes["cut" if receipt.cut else "ok"] += 1
        return receipt

    async def settle(self, tenant: str, session: str, deadline: float | None) -> bool:
        """Wait until what this node acknowledged for a session is in the bucket. False when the deadline (monotonic) came first."""
        lines = [line for key, line in self._lines.items() if key[:2] == (tenant, session)]
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock.monotonic())):
                for line in lines:
                    async with line.moved:
                        await line.moved.wait_for(line.empty)
        except TimeoutError:
            return False
        return True

    async def settled(self) -> None:
        """Wait until nothing is pending."""
        for line in list(self._lines.values()):
            async with line.moved:
                await line.moved.wait_for(line.empty)

    async def replay(self) -> int:
        """Take up what an earlier life of this node promised. Returns how many intents were found."""
        found = []
        for key, body in self._journal.items() if self._journal is not None else ():
            try:
                found.append(msgspec.msgpack.decode(body, type=Intent))
            except (msgspec.MsgspecError, KVTierError) as error:  # it stays there for whoever can read it
                log.warning("a commit promised by an earlier life cannot be read (%s): %s", key.decode(errors="replace"), error)
                self.outcomes["unreadable"] += 1
        found.sort(key=_age)
        lines: dict[tuple[str, str, str, str], _Line] = {}
        async with AsyncExitStack() as entered:
            for intent in found:  # without waiting for anything: what is committed from now on comes behind them
                self._local.learn(intent.fields)
                session = _key(intent.tenant, intent.request)
                if session not in lines:
                    lines[session] = await entered.enter_async_context(self._entered(session))
                lines[session].intents.append(intent)
                self._pending += 1
            for intent in found:
                await self._local.secure(intent.tenant, intent.request)
            for line in lines.values():
                self._start(line)
        return len(found)

    async def drain(self, seconds: float) -> int:
        """Stop: give what is pending that long to land. Returns how many did not; the journal keeps those promised `nvme`."""
        tasks = [line.task for line in self._lines.values() if line.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            self._closing = True
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._closing = True
        return self._pending


def _key(tenant: str, request: api.Commit) -> tuple[str, str, str, str]:
    return tenant, request.id, request.namespace, request.lane


def _age(intent: Intent) -> tuple[float, int]:
    return intent.at, intent.request.base_version


def _promised(request: api.Commit, durability: api.Durability) -> api.Receipt:
    return api.Receipt(
        id=request.id,
        namespace=request.namespace,
        lane=request.lane or api.MAIN,
        version=request.base_version + 1,
        tokens=sum(link.tokens for link in request.blocks),
        blocks=len(request.blocks),
        durability=durability,
    )
