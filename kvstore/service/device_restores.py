"""Restores to a device: each is one to memory, with its turns, holds and deadlines, and a task that takes up what arrives."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final

import msgspec

from kvstore import api
from kvstore.clock import Clock
from kvstore.errors import KVTierError
from kvstore.service.calls import Service
from kvstore.service.staging import Plan, Step
from kvstore.service.wants import leading_run
from tiering import DeviceLease, Lease, Reach, Want

log = logging.getLogger(__name__)
_REMEMBERED: Final = 4096  # restores whose end is remembered
_WAIT_MS: Final = 60_000
_UNDER_WAY: Final = {"resolving", "staging"}
_STAGED: Final = {"ready", "partial"}

Read = Callable[[Sequence[Want]], Coroutine[Any, Any, tuple[list[Lease], str]]]
Bring = Callable[[Sequence[Want], Read], Awaitable[tuple[list[DeviceLease], str]]]


class _Staging:
    """A restore on its way up."""

    def __init__(self) -> None:
        self.tokens = self.nbytes = 0
        self.why = ""
        self.task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        return self.task is None or self.task.done()

    def came(self, step: Step, run: Sequence[DeviceLease], why: str) -> None:
        """A step's leading run is on the device."""
        whole = len(run) // len(step.rows[0])
        self.tokens += sum(link.tokens for link in step.links[:whole])
        self.nbytes += sum(want.size for row in step.rows[:whole] for want in row)
        self.why = why


class DeviceRestores:
    """One tenant's.

    Args:
        service: Of the node below.
        tenant: Whose.
        clock: For deadlines.
        bring: Brings the leading run of blocks up.
        window: Bytes of blocks brought together.
    """

    def __init__(self, service: Service, tenant: str, clock: Clock, bring: Bring, window: int) -> None:
        self._service, self._tenant, self._clock, self._bring, self._window = service, tenant, clock, bring, window
        self._all: OrderedDict[str, _Staging] = OrderedDict()

    async def aclose(self) -> None:
        """Stop them."""
        tasks = [each.task for each in self._all.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def start(self, request: api.Restore) -> api.RestoreStatus:
        """Begin one, or join it where it is under way. Raises as the call does."""
        below = msgspec.structs.replace(request, tier="dram")
        status = await self._service.restore(self._tenant, below)
        staging = self._all.get(status.restore_id)
        if staging is None or staging.over:
            staging = self._all[status.restore_id] = _Staging()
            staging.task = asyncio.create_task(self._work(staging, status.restore_id, below))
            self._all.move_to_end(status.restore_id)
        for restore_id in list(self._all)[:-_REMEMBERED]:
            if self._all[restore_id].over:
                del self._all[restore_id]
        return _from_above(status, staging)

    async def get(self, request: api.GetRestore) -> api.RestoreStatus:
        """As the call: how far it has come, or its end where that comes in time."""
        staging = self._all.get(request.restore_id)
        began = self._clock.monotonic()
        status = await self._service.get_restore(self._tenant, request)
        if staging is None:
            return status
        if staging.task is not None and not staging.over and request.wait_ms:
            left = request.wait_ms / 1000 - (self._clock.monotonic() - began)
            await asyncio.wait((staging.task,), timeout=max(0.0, left))
        return _from_above(status, staging)

    async def cancel(self, request: api.OfRestore) -> api.RestoreStatus:
        """As the call: what is staged stays."""
        staging = self._all.get(request.restore_id)
        if staging is not None and staging.task is not None and not staging.over:
            staging.why = "it was cancelled"
            staging.task.cancel()
            await asyncio.wait((staging.task,))
        status = await self._service.cancel_restore(self._tenant, request)
        return status if staging is None else _from_above(status, staging)

    async def _work(self, staging: _Staging, restore_id: str, request: api.Restore) -> None:
        try:
            await self._stage(staging, restore_id, request)
        except KVTierError as error:
            staging.why = error.message
        except Exception:  # the task's last line of defence: its end is looked at, its error is not
            log.exception("restore %s to the device failed", restore_id)
            staging.why = "internal error; the log has the details"

    async def _stage(self, staging: _Staging, restore_id: str, request: api.Restore) -> None:
        service, speculative = self._service, request.priority == "speculative"
        deadline = self._clock.monotonic() + (request.deadline_ms / 1000 or float(service.settings.limits.restore))
        if speculative:  # it must not ask for bytes as a request does: what has come to memory by then goes up
            waiting = api.GetRestore(restore_id=restore_id, wait_ms=_WAIT_MS)
            while (await service.get_restore(self._tenant, waiting)).state in _UNDER_WAY:
                pass
        found = await service.resolve(self._tenant, request)
        plan = Plan(found, request.tokens, request.shards)
        end = plan.within(request.max_bytes) if request.max_bytes else len(plan.blocks)
        stack, reach = service.plane.tiers(self._tenant).stack, Reach.DRAM if speculative else Reach.ORIGIN

        async def read(wants: Sequence[Want]) -> tuple[list[Lease], str]:
            return leading_run(await stack.get_many(wants, deadline=deadline, reach=reach, ahead=speculative))

        held: list[DeviceLease] = []  # to its end: it must not evict its own beginning
        first, why = 0, ""
        try:
            while first < end and not why:
                step = plan.step(first, end, self._window)
                run, why = await self._bring(step.wants, read)
                held += run
                staging.came(step, run, why)
                first += len(step.links)
        finally:
            for lease in held:
                lease.release()


def _from_above(status: api.RestoreStatus, staging: _Staging) -> api.RestoreStatus:
    """A restore to memory, as one to the device that is at work behind it."""
    changes: dict[str, object] = {"tier": "device"}
    if status.state in _STAGED or status.state in _UNDER_WAY:
        changes |= {"staged_tokens": staging.tokens, "staged_bytes": staging.nbytes}
    if status.state in _STAGED and not staging.over:
        changes |= {"state": "staging", "late_ms": None}
    elif status.state == "ready" and staging.why:
        changes |= {"state": "partial", "error": f"on the device: {staging.why}"}
    return msgspec.structs.replace(status, **changes)
