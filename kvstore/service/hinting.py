"""Hints: what is about to happen to a session, and what a node does about it. Advice only: any of it may be dropped."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Hashable
from typing import Any, Final

from kvstore import api
from kvstore.clock import Clock
from kvstore.config import PrestageSettings
from kvstore.errors import Invalid, KVTierError, Overloaded
from kvstore.service.plane import Plane
from kvstore.service.restores import Resolve, Restores
from kvstore.service.staging import Plan, Resolved

log = logging.getLogger(__name__)
_HORIZON_S: Final = 7 * 86400.0
_RESOLVING: Final = 8  # sessions looked up at once on behalf of hints
_MARGIN, _MARGIN_S = 1.5, 1.0  # of what staging is thought to take
_GRACE_S: Final = 10.0  # staging that is late goes on for that long: whoever comes late finds more of it
_SHORTEST_S: Final = 0.05  # a sleep


class Hints:
    """Hints that are being followed, or scheduled. They end with the node.

    Args:
        restores: Where staging is done.
        resolve: Finds a session's version.
        plane: The tiers.
        clock: Time.
        settings: Bounds.

    Attributes:
        counts: By event; also `dropped` and `failed`.
    """

    def __init__(self, restores: Restores, resolve: Resolve, plane: Plane, clock: Clock, settings: PrestageSettings) -> None:
        self._restores, self._resolve, self._plane, self._clock, self._settings = restores, resolve, plane, clock, settings
        self._tasks: dict[tuple[Hashable, api.Event], asyncio.Task[None]] = {}
        self._of_tenant: Counter[str] = Counter()
        self._looking = asyncio.Semaphore(_RESOLVING)
        self.counts: Counter[str] = Counter()

    @property
    def scheduled(self) -> int:
        """Sessions that will be staged for a time that is known."""
        return sum(event == "resume_at" for _, event in self._tasks)

    def take(self, tenant: str, request: api.Hint) -> api.Hinted:
        """Follow a hint. Does no I/O. Raises `Invalid` for a time that is missing, out of place, or more than a week off."""
        due = self._due(request)
        self.counts[request.event] += 1
        session = (tenant, request.id, request.namespace, request.lane)
        if request.event == "tool_return":
            return self._stage_now(session, tenant, request)
        if request.event == "final":
            self._stop(session, "resume_at")
            self._stop(session, "tool_start")
        self._stop(session, request.event)
        if self._of_tenant[tenant] >= self._settings.hints:
            self.counts["dropped"] += 1
            return api.Hinted(id=request.id, event=request.event, taken=False)
        match request.event:
            case "resume_at":
                work = self._stage_before(tenant, request, due)
            case "tool_start":
                work = self._hold(tenant, request)
            case _:
                work = self._demote(tenant, request)
        self._run(session, tenant, request.event, work)
        return api.Hinted(id=request.id, event=request.event, taken=True)

    async def aclose(self) -> None:
        """Follow none any more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _due(self, request: api.Hint) -> float:
        """When, on the monotonic clock."""
        named = [when for when in (request.at, request.in_s) if when is not None]
        if len(named) != (request.event == "resume_at"):
            raise Invalid("resume_at needs exactly one of at and in_s, and no other event takes one")
        seconds = request.in_s if request.at is None else request.at - self._clock.now()
        if seconds is None:
            return self._clock.monotonic()
        if not -_HORIZON_S <= seconds <= _HORIZON_S:
            raise Invalid(f"resume_at is {seconds:.0f} s from now; it must be within {_HORIZON_S:.0f} s")
        return self._clock.monotonic() + max(0.0, seconds)

    def _run(self, session: Hashable, tenant: str, event: api.Event, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[session, event] = asyncio.create_task(self._follow(work))
        self._of_tenant[tenant] += 1

        def over(_: asyncio.Task[None]) -> None:
            self._of_tenant[tenant] -= 1
            if self._tasks.get((session, event)) is task:
                del self._tasks[session, event]
            work.close()  # where the task was cancelled before its first step

        task.add_done_callback(over)

    async def _follow(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except KVTierError as error:
            self.counts["failed"] += 1
            log.debug("a hint was not followed: %s", error)
        except Exception:  # nobody waits for a hint: what goes wrong is counted, and told in the log
            self.counts["failed"] += 1
            log.exception("a hint was not followed")

    def _stop(self, session: Hashable, event: api.Event) -> None:
        task = self._tasks.pop((session, event), None)
        if task is not None:
            task.cancel()

    def _stage_now(self, session: Hashable, tenant: str, request: api.Hint) -> api.Hinted:
        """What is being staged ahead becomes urgent; otherwise staging begins."""
        self._stop(session, "resume_at")
        under_way = self._restores.speculative(tenant, request)
        try:
            if under_way:
                self._restores.promote(under_way[-1])
                status = under_way[-1].status
            else:
                status = self._restores.start(tenant, self._restore(request))
        except Overloaded:
            self.counts["dropped"] += 1
            return api.Hinted(id=request.id, event=request.event, taken=False)
        return api.Hinted(id=request.id, event=request.event, taken=True, restore_id=status.restore_id)

    async def _stage_before(self, tenant: str, request: api.Hint, due: float) -> None:
        """Wait until it is just time enough, looking again now and then at how much there is to do and how fast it goes."""
        plan = Plan(await self._look(tenant, request))
        lead = await self._lead(tenant, plan)
        while (left := due - lead - self._clock.monotonic()) > 0:
            await self._clock.sleep(min(left, max(left / 2, _SHORTEST_S)))
            lead = await self._lead(tenant, plan)
        left = max(0.0, due - self._clock.monotonic())
        wanted = self._restore(
            request,
            priority="speculative",
            deadline_ms=int((left + _GRACE_S) * 1000),
            hold_ms=int((left + float(self._settings.hold)) * 1000),
        )
        self._restores.start(tenant, wanted, due=due)

    async def _lead(self, tenant: str, plan: Plan) -> float:
        """Seconds that staging what is not in memory will take, with a margin."""
        stack = self._plane.tiers(tenant).stack
        missing: Counter[str] = Counter()
        for step in plan.steps():
            wants = step.wants
            for want, tier in zip(wants, stack.locate([want.key for want in wants]), strict=True):
                missing[tier or "bucket"] += want.size
            await asyncio.sleep(0)
        del missing[stack.dram.name]
        return self._restores.rates.seconds(missing) * _MARGIN + _MARGIN_S

    async def _hold(self, tenant: str, request: api.Hint) -> None:
        """Spare what is in memory, in prefix order. Under pressure it goes after all; the disk and the bucket still have it."""
        found = await self._look(tenant, request)
        dram, seconds = self._plane.tiers(tenant).dram, float(self._settings.tool_hold)
        for step in Plan(found).steps():
            keys = [want.key for want in step.wants]
            if dram.hold(("tool", found.owner), keys, seconds=seconds, yielding=False) < len(keys):
                return
            await asyncio.sleep(0)

    async def _demote(self, tenant: str, request: api.Hint) -> None:
        """Let its blocks be the first to make way. What other sessions share comes up again with their next use."""
        for restore in self._restores.speculative(tenant, request):
            await self._restores.cancel(tenant, restore.status.restore_id)
        found = await self._look(tenant, request)
        dram = self._plane.tiers(tenant).dram
        dram.let_go(found.owner)
        dram.let_go(("tool", found.owner))
        for step in Plan(found).steps():
            dram.demote([want.key for want in step.wants])
            await asyncio.sleep(0)

    async def _look(self, tenant: str, request: api.Hint) -> Resolved:
        async with self._looking:
            return await self._resolve(tenant, self._restore(request))

    @staticmethod
    def _restore(request: api.Hint, **fields: Any) -> api.Restore:
        return api.Restore(id=request.id, namespace=request.namespace, lane=request.lane, **fields)
