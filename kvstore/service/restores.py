"""Restores: bring a session's blocks into a tier, answering at once and reporting progress.

A restore takes exactly the path of a request (`Stack.get_many`), only earlier. It is never needed for correctness. Interactive ones
count as requests; speculative ones give way to everybody (:mod:`kvstore.lifecycle.prestage`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from blake3 import blake3

from kvstore import api
from kvstore.clock import Clock, Ids
from kvstore.config import PrestageSettings
from kvstore.errors import KVTierError, NotFound, Overloaded
from kvstore.lifecycle.prestage import Rates, Ticket
from kvstore.service.plane import Plane
from kvstore.service.stager import Stager
from kvstore.service.staging import Plan, Resolved
from tiering import Histogram

log = logging.getLogger(__name__)
Resolve = Callable[[str, api.Restore], Awaitable[Resolved]]
_UNDER_WAY: Final = {"resolving", "staging"}


class Restoring:
    """One restore: its status, who watches it, the task that works.

    Attributes:
        key: Its tenant, and a digest of what makes another request the same.
        ticket: Its place among others.
        due: The point on the monotonic clock by which it should be done; None where nobody said.
        started: When it began.
    """

    def __init__(
        self,
        key: tuple[str, bytes],
        status: api.RestoreStatus,
        request: api.Restore,
        ticket: Ticket,
        started: float,
        due: float | None,
    ) -> None:
        self.key, self.tenant = key, key[0]
        self.status, self.request, self.ticket, self.started, self.due = status, request, ticket, started, due
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether it came to an end."""
        return self.status.state not in _UNDER_WAY


class Restores:
    """All restores that run or are remembered.

    Args:
        resolve: Finds a session's version; it waits for commits of that session that this node still has to land.
        plane: The tiers, and whose turn it is.
        settings: Of what is brought in ahead of its use.
        limit: Restores of one tenant that are remembered; running ones beyond it are refused.
        longest: Seconds a restore works when it names no deadline.
    """

    def __init__(
        self,
        resolve: Resolve,
        plane: Plane,
        clock: Clock,
        ids: Ids,
        *,
        node: str,
        settings: PrestageSettings,
        limit: int,
        longest: float,
    ) -> None:
        self._resolve, self._plane, self._clock, self._ids = resolve, plane, clock, ids
        self._node, self._settings, self._limit, self._longest = node, settings, limit, longest
        self._all: dict[str, Restoring] = {}
        self._of: Counter[str] = Counter()  # how many of them are a tenant's
        self._ended: defaultdict[str, deque[str]] = defaultdict(deque)  # by tenant, in the order in which they are forgotten
        self._active: dict[tuple[str, bytes], Restoring] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # also those that were stopped and are winding down
        self._speculative: OrderedDict[str, Restoring] = OrderedDict()  # those at work or waiting
        self._order = 0
        self.rates = Rates()
        self.lateness: defaultdict[str, Histogram] = defaultdict(Histogram)
        self.outcomes: Counter[str] = Counter()
        self._stager = Stager(plane, clock, self.rates, settings)

    @property
    def running(self) -> int:
        """Restores at work or waiting."""
        return len(self._active)

    def start(self, tenant: str, request: api.Restore, *, due: float | None = None) -> api.RestoreStatus:
        """Begin, or join the same restore where it is under way, making it interactive if this one is. Does no I/O.

        Args:
            tenant: Whose.
            request: What.
            due: When it should be done, on the monotonic clock, where that is before its deadline.
        """
        key = (tenant, blake3(msgspec.msgpack.encode(msgspec.structs.replace(request, priority="interactive"))).digest())
        same = self._active.get(key)
        if same is not None:
            if request.priority == "interactive":
                self.promote(same)
            return self._timed(same)
        self._make_room(tenant, request)
        now = self._clock.monotonic()
        deadline = now + (request.deadline_ms / 1000 or self._longest)
        restore_id = self._ids.new()
        status = api.RestoreStatus(
            restore_id=restore_id, id=request.id, state="resolving", node=self._node, tier=request.tier, priority=request.priority
        )
        self._order += 1
        ticket = Ticket(deadline, self._order, speculative=request.priority == "speculative", tenant=tenant)
        restore = Restoring(key, status, request, ticket, now, due or (deadline if request.deadline_ms else None))
        self._all[restore_id] = restore
        self._of[tenant] += 1
        if ticket.speculative and self._waiting(tenant) >= self._settings.waiting:
            self._drop(restore, f"{self._waiting(tenant)} speculative restores wait; prestage.waiting allows no more of a tenant")
            return restore.status
        self._active[key] = restore
        if ticket.speculative:
            self._speculative[restore_id] = restore
        restore.task = asyncio.create_task(self._work(restore))
        self._tasks.add(restore.task)
        restore.task.add_done_callback(partial(self._gone, restore))
        return status

    def promote(self, restore: Restoring) -> None:
        """Somebody waits for it now."""
        if self._speculative.pop(restore.status.restore_id, None) is not None:
            self._plane.turns.promote(restore.ticket, restore.ticket.deadline)
            self._set(restore, priority="interactive")

    def speculative(self, tenant: str, request: api.OfSession) -> list[Restoring]:
        """Speculative restores of a session that are under way."""
        wanted = (tenant, request.id, request.namespace, request.lane)
        return [
            one
            for one in self._speculative.values()
            if (one.tenant, one.request.id, one.request.namespace, one.request.lane) == wanted
        ]

    def _waiting(self, tenant: str) -> int:
        return sum(one.tenant == tenant for one in self._speculative.values())

    def _make_room(self, tenant: str, request: api.Restore) -> None:
        ended = self._ended[tenant]
        while self._of[tenant] >= self._limit and ended:
            self._forget(tenant, ended.popleft())
        if self._of[tenant] >= self._limit:
            oldest = next((one for one in self._speculative.values() if one.tenant == tenant), None)
            if request.priority == "speculative" or oldest is None:
                raise Overloaded(f"{self._of[tenant]} restores are running; limits.restores allows {self._limit} of a tenant")
            self._drop(oldest, "it gave way to a restore that somebody waits for")
            self._forget(tenant, ended.pop())

    def _forget(self, tenant: str, restore_id: str) -> None:
        del self._all[restore_id]
        self._of[tenant] -= 1

    def _drop(self, restore: Restoring, why: str) -> None:
        self._set(restore, state="dropped", error=why)
        if restore.task is not None:
            restore.task.cancel()

    def _gone(self, restore: Restoring, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        restore.task = None  # thousands of them are remembered
        self._set(restore, state="cancelled")  # before its first step; otherwise it has said how it ended

    def _find(self, tenant: str, restore_id: str) -> Restoring:
        restore = self._all.get(restore_id)
        if restore is None or restore.tenant != tenant:
            raise NotFound(f"restore {restore_id!r} is not known to this node; restores are forgotten some time after they end")
        return restore

    def status(self, tenant: str, restore_id: str) -> api.RestoreStatus:
        """How far it has come. Raises `NotFound`."""
        return self._timed(self._find(tenant, restore_id))

    async def wait(self, tenant: str, restore_id: str, seconds: float) -> api.RestoreStatus:
        """Its status when it ends, or after that long. Raises `NotFound`."""
        restore = self._find(tenant, restore_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not restore.over:
                    await restore.changed.wait()
        return self._timed(restore)

    async def watch(self, tenant: str, restore_id: str) -> AsyncIterator[api.RestoreStatus]:
        """Every change of its status, the last one included. Raises `NotFound`."""
        restore = self._find(tenant, restore_id)
        while True:
            changed = restore.changed
            yield self._timed(restore)
            if restore.over:
                return
            await changed.wait()

    async def cancel(self, tenant: str, restore_id: str) -> api.RestoreStatus:
        """Stop it; what is staged stays, and is not held any more. Stopping one that ended changes nothing."""
        restore = self._find(tenant, restore_id)
        if restore.task is not None and not restore.over:
            restore.task.cancel()
            await asyncio.gather(restore.task, return_exceptions=True)
        return self._timed(restore)

    async def aclose(self) -> None:
        """Stop them all."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _timed(self, restore: Restoring) -> api.RestoreStatus:
        if restore.over:
            return restore.status
        return msgspec.structs.replace(restore.status, elapsed_ms=(self._clock.monotonic() - restore.started) * 1000)

    def _set(self, restore: Restoring, **changes: object) -> None:
        if restore.over:
            return
        elapsed = (self._clock.monotonic() - restore.started) * 1000
        restore.status = msgspec.structs.replace(restore.status, elapsed_ms=elapsed, **changes)
        if restore.status.state not in _UNDER_WAY:
            self._active.pop(restore.key, None)
            self._speculative.pop(restore.status.restore_id, None)
            self._ended[restore.tenant].append(restore.status.restore_id)
            restore.request = msgspec.structs.replace(restore.request, tokens=[], shards=())
            self.outcomes[f"{restore.status.priority} {restore.status.state}"] += 1
        changed, restore.changed = restore.changed, asyncio.Event()
        changed.set()

    async def _work(self, restore: Restoring) -> None:
        request, deadline = restore.request, restore.ticket.deadline
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                found = await self._resolve(restore.tenant, request)
            await self._stage(restore, found)
        except asyncio.CancelledError:
            self._set(restore, state="cancelled")
            raise
        except TimeoutError:
            self._set(restore, state="partial", error="the deadline passed before the session was found")
        except KVTierError as error:
            self._set(restore, state="failed", error=error.message, kind=error.kind)
        except Exception:  # the task's last line of defence: a restore that dies silently would be waited for for ever
            log.exception("restore %s failed", restore.status.restore_id)
            self._set(restore, state="failed", error="internal error; the node's log has the details", kind="internal")

    async def _stage(self, restore: Restoring, found: Resolved) -> None:
        request, session = restore.request, found.session
        plan = Plan(found, request.tokens, request.shards)
        self._set(
            restore,
            state="staging",
            namespace=session.namespace,
            lane=session.lane,
            version=session.version,
            branch=session.branch,
            tokens=plan.tokens,
            bytes=plan.size,
        )
        if request.tier == "bucket":
            self._set(restore, state="ready", eta_ms=0.0)
            return
        report = partial(self._set, restore)
        end = await self._stager.stage(plan, found.owner, restore.tenant, request, restore.ticket, report)
        late = None
        if restore.due is not None and (end.cut or not end.why):
            rest = self.rates.seconds({"bucket": plan.size - restore.status.staged_bytes}) if end.cut else 0.0
            late = max(0.0, self._clock.monotonic() - restore.due) + rest
            self.lateness[restore.status.priority].observe(late)
        state = "ready" if not end.why else "dropped" if end.crowded and not restore.status.staged_bytes else "partial"
        self._set(restore, state=state, eta_ms=0.0, late_ms=None if late is None else late * 1000, error=end.why)
