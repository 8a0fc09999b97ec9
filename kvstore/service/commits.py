"""Commits accepted by this node: in order per session, to the durability that was asked for.

`bucket` is answered when the protocol has acknowledged it. `nvme` is answered when the blocks and the intent to commit them are on
this machine's disk; the intent is replayed before the node is ready again. `dram` is answered at once and lost with the process.
Behind the last two, one task per session commits in order. It gives a promise up only where the protocol has decided that it cannot
land, or where it was built on another node's promise that nobody keeps; whatever else goes wrong (the store, its credentials, this
node's memory, a defect) is waited out.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Protocol

import msgspec

from kvstore import api
from kvstore.clock import Clock, Ids
from kvstore.errors import Conflict, KVTierError, Overloaded, Unavailable, Unsupported
from kvstore.ids import Namespace
from kvstore.repo.branches import means
from kvstore.service.promises import Intent, Journal, Line, Outcomes, Place, promise_of
from kvstore.service.tries import Tries
from tiering import JournalFull

log = logging.getLogger(__name__)
MAX_PENDING: Final = 4096
PATIENCE_S: Final = 60.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 10.0
_UNMADE: Final = 12  # times, in about a minute, that a promise looks for the one it was built on; it may be lost with its node
_DECIDED: Final = frozenset({"conflict", "gone", "already_exists", "not_found", "invalid", "too_many_branches"})


class Local(Protocol):
    """See :class:`kvstore.service.local.LocalCommits`."""

    async def apply(self, tenant: str, request: api.Commit) -> api.Receipt:
        """The protocol's commit."""
        ...

    async def secure(self, tenant: str, request: api.Commit, *, promised: bool = False) -> bool:
        """Make its blocks outlive a kill -9. Raises `Overloaded` where they are too many, unless it was promised before."""
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


class Commits:
    """Runs commits.

    Args:
        local: What a commit does on this node and in the bucket.
        journal: Keeps intents; None where there is no disk tier.
        pending_bytes: Memory that pending commits of one tenant may take; a single one always may.
    """

    def __init__(self, local: Local, journal: Journal | None, clock: Clock, ids: Ids, *, pending_bytes: int) -> None:
        self._local, self._journal, self._clock, self._ids = local, journal, clock, ids
        self._limit = pending_bytes
        self._lines: dict[Place, Line] = {}
        self._tries = Tries()
        self._made = Outcomes()
        self._pending: Counter[str] = Counter()  # by tenant
        self._bytes: Counter[str] = Counter()
        self._closing = False
        self.outcomes: Counter[str] = Counter()

    @property
    def pending(self) -> int:
        """Commits acknowledged locally and not yet in the bucket."""
        return self._pending.total()

    @property
    def pending_bytes(self) -> int:
        """About how much memory they take."""
        return self._bytes.total()

    async def commit(self, tenant: str, request: api.Commit, durability: api.Durability) -> api.Receipt:
        """One commit. Asked for again under its write id while it is under way, it is the same one.

        Raises:
            Conflict: Somebody else moved the session.
            Gone: The session that it was built on is no more, or never came to be.
            Overloaded: Too many commits wait for the store, or hold too much of a disk that tenants share.
            Unavailable: Kind `promise_pending`: it was built on what another node has promised and, it seems, not yet made.
            Unsupported: `nvme` without a disk tier.
        """
        request = msgspec.structs.replace(request, write_id=request.write_id or self._ids.new(), durability=durability)
        if durability != "bucket":
            return await self._promise(tenant, request, durability)
        key = (Place.of(tenant, request), request.write_id)
        return await self._tries.run(key, request, lambda: self._to_the_bucket(tenant, request))

    async def _to_the_bucket(self, tenant: str, request: api.Commit) -> api.Receipt:
        if not await self.settle(tenant, request.id, self._clock.monotonic() + PATIENCE_S):
            raise Unavailable(f"earlier commits of session {request.id!r} still wait for the bucket", kind="timeout")
        receipt = await self._counted(self._local.apply(tenant, self._made.after(tenant, request)))
        return msgspec.structs.replace(receipt, durability="bucket")

    async def _promise(self, tenant: str, request: api.Commit, durability: api.Durability) -> api.Receipt:
        async with self._entered(Place.of(tenant, request)) as line:
            for pending in line.intents:
                if pending.request.write_id == request.write_id:
                    return _promised(pending, durability)  # a retry: it is the same commit
            if line.intents:
                last = line.intents[-1]
                at = last.request.base_version + 1
                if request.base_version != at:
                    raise Conflict(f"session {request.id!r} is at version {at} on this node", current=at)
                if not _may_follow(request.branch, last.session):  # it must not fall with what it was not built on
                    raise Unavailable(f"commits on another session {request.id!r} wait for the bucket: retry when they are decided")
                request = msgspec.structs.replace(request, branch=request.branch or last.session)
            promise = promise_of(tenant, request)
            if not line.intents:
                request, line.broken = self._made.after(tenant, request), False
            fields = await self._local.fields(tenant, request.namespace)
            intent = Intent(tenant=tenant, request=request, fields=fields, at=self._clock.now(), promise=promise)
            self._admit(intent)
            try:
                if durability == "nvme":
                    intent = await self._keep(intent)
            except BaseException:
                self._dismiss(intent)
                raise
            line.intents.append(intent)
            self._start(line)
        return _promised(intent, durability)

    def _admit(self, intent: Intent) -> None:
        pending, nbytes = self._pending[intent.tenant], self._bytes[intent.tenant]
        if self._closing or pending >= MAX_PENDING or (pending and nbytes + intent.bytes > self._limit):
            self.outcomes["overloaded"] += 1
            raise Overloaded(
                f"{pending} commits of {nbytes} bytes wait for the store; "
                f"at most {MAX_PENDING} and {self._limit} bytes of a tenant (limits.pending_commits)"
            )
        self._count(intent, 1)

    def _dismiss(self, intent: Intent) -> None:
        self._count(intent, -1)

    def _count(self, intent: Intent, sign: int) -> None:
        self._pending[intent.tenant] += sign
        self._bytes[intent.tenant] += sign * intent.bytes

    @asynccontextmanager
    async def _entered(self, key: Place) -> AsyncIterator[Line]:
        line = self._lines.setdefault(key, Line())
        line.entering += 1
        try:
            async with line.entrance:
                yield line
        finally:
            line.entering -= 1
            self._forget(key, line)

    async def _keep(self, intent: Intent) -> Intent:
        if self._journal is None:
            raise Unsupported("durability 'nvme' needs a disk tier: set [nvme] path")
        if not await self._local.secure(intent.tenant, intent.request):
            raise Unavailable("a block of this commit is in no local tier and not in the bucket: publish the blocks again")
        try:
            await self._journal.put(intent.request.write_id.encode(), msgspec.msgpack.encode(intent))
            intent = await self._said(intent, self._made.before(intent.tenant, intent.request) or "")  # may have landed meanwhile
        except BaseException as error:
            await self._local.release(intent.tenant, intent.request)
            if isinstance(error, JournalFull):
                raise Overloaded(f"too many promised commits wait for the store: {error}") from None
            if isinstance(error, OSError):
                raise Unavailable(f"the disk tier did not take the promise: {error.strerror}") from error
            raise
        return intent

    def _start(self, line: Line) -> None:
        if line.task is None:
            line.task = asyncio.create_task(self._work(line))

    async def _work(self, line: Line) -> None:
        key = Place.of(line.intents[0].tenant, line.intents[0].request)
        while line.intents and await self._land(line):
            self._dismiss(line.intents.popleft())
            async with line.moved:
                line.moved.notify_all()
        line.task = None
        self._forget(key, line)

    def _forget(self, key: Place, line: Line) -> None:
        if not line.intents and not line.entering and self._lines.get(key) is line:
            del self._lines[key]

    async def _land(self, line: Line) -> bool:
        """Commit the first of a line until it is decided. False when the node closes first; a journal keeps the intent."""
        intent, wait, line.unmade = line.intents[0], _FIRST_WAIT, 0
        while (branch := await self._decided(line, intent)) is None:
            if self._closing:
                return False
            await self._clock.sleep(wait * (0.5 + self._ids.jitter()))
            wait = min(wait * 2, _LONGEST_WAIT)
        line.broken = not branch
        self._made.note(intent, branch)
        await self._hand_on(line, branch)
        if self._journal is not None and intent.request.durability == "nvme":
            try:
                await self._journal.remove(intent.request.write_id.encode())
            except OSError as error:  # the next life makes it again, which changes nothing
                log.warning("a commit that has landed stays in the journal: %s", error)
            await self._local.release(intent.tenant, intent.request)
        return True

    async def _hand_on(self, line: Line, branch: str) -> None:
        """What was promised on top of a commit belongs to the session that this one is of, also after a crash."""
        line.intents[0] = line.intents[0].on(branch)
        if len(line.intents) > 1:
            line.intents[1] = await self._said(line.intents[1], branch)

    async def _said(self, intent: Intent, branch: str) -> Intent:
        """A promise, now that it is known which session it was built on. The journal tells where the promise did not."""
        told = intent.request.branch
        if not branch or told not in {"", intent.promise}:
            return intent
        intent = intent.on(branch)
        if self._journal is not None and intent.request.durability == "nvme" and not means(branch, told):
            try:
                await self._journal.put(intent.request.write_id.encode(), msgspec.msgpack.encode(intent))
            except (OSError, JournalFull) as error:  # then only this life knows
                log.warning("the journal does not say which session a promised commit was built on: %s", error)
        return intent

    async def _decided(self, line: Line, intent: Intent) -> str | None:
        """Commit once. Returns the session that it is a version of, "" where it cannot land, None where it still may."""
        if line.broken:
            log.warning("a commit acknowledged with durability %s was dropped with the one before", intent.request.durability)
            self.outcomes["gone"] += 1
            return ""
        try:
            request = self._made.after(intent.tenant, intent.request)
            receipt = await self._counted(self._local.apply(intent.tenant, request))
        except KVTierError as error:
            line.unmade += error.kind == "promise_pending"
            if error.kind not in _DECIDED and line.unmade < _UNMADE:
                log.warning("commit of a session waits: %s", error)
                return None
            # It cannot land, or not in sight, and whoever committed has its answer already.
            log.warning("a commit acknowledged with durability %s was dropped: %s", intent.request.durability, error)
            return ""
        except Exception:  # a defect must not end the task: whoever waits for this session would wait for ever
            log.exception("commit of a session failed, and is tried again")
            self.outcomes["internal"] += 1
            return None
        return receipt.branch

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
        lines: dict[Place, Line] = {}
        async with AsyncExitStack() as entered:
            for intent in found:  # without waiting for anything: what is committed from now on comes behind them
                self._local.learn(intent.fields)
                session = Place.of(intent.tenant, intent.request)
                if session not in lines:
                    lines[session] = await entered.enter_async_context(self._entered(session))
                lines[session].intents.append(intent)
                self._count(intent, 1)
            for intent in found:
                await self._local.secure(intent.tenant, intent.request, promised=True)
            for line in lines.values():
                self._start(line)
        return len(found)

    async def drain(self, seconds: float) -> int:
        """Stop: give what is pending that long to land. Returns how many did not; the journal keeps those promised `nvme`."""
        tasks: list[asyncio.Task[Any]] = [line.task for line in self._lines.values() if line.task is not None]
        tasks += self._tries.tasks
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=seconds)
            self._closing = True
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._closing = True
        return self.pending


def _may_follow(said: str, last: str) -> bool:
    """Whether what was built on the session `said` was built on `last`; "" where nobody knows which it is."""
    return not said or not last or means(said, last) or means(last, said)


def _age(intent: Intent) -> tuple[float, int]:
    return intent.at, intent.request.base_version


def _promised(intent: Intent, durability: api.Durability) -> api.Receipt:
    request = intent.request
    return api.Receipt(
        id=request.id,
        namespace=request.namespace,
        lane=request.lane or api.MAIN,
        version=request.base_version + 1,
        tokens=sum(link.tokens for link in request.blocks),
        blocks=len(request.blocks),
        durability=durability,
        branch=intent.session,
    )
