"""Device memory above a tenant's hierarchy, inside the engine's process: blocks handed out there, and restores that go up to it.

Bytes take the path of every request into the arena, and from there to the device window by window: while one is being copied, the
next one is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any, Final, Self

import msgspec

from kvstore import api, codec
from kvstore.clock import Clock
from kvstore.errors import Invalid, KVTierError
from kvstore.ids import Link, Namespace, Shard
from kvstore.keys import check_id
from kvstore.repo import BlockWant
from kvstore.service.calls import Service
from kvstore.service.plane import block_wants, leading_run
from kvstore.service.staging import Plan, Step
from kvstore.service.stats import place_stats
from tiering import DeviceLease, DeviceTier, Lease, Reach, Want

log = logging.getLogger(__name__)
WINDOW: Final = 32 << 20  # of blocks read, and then copied, together
_REMEMBERED: Final = 4096  # restores whose end is remembered
_WAIT_MS: Final = 60_000
_UNDER_WAY: Final = {"resolving", "staging"}
_STAGED: Final = {"ready", "partial"}

Read = Callable[[Sequence[Want]], Coroutine[Any, Any, tuple[list[Lease], str]]]


def layer_ends(want: Want) -> Sequence[int]:
    """Where each layer of a block ends in its object; the last one takes the token ids along."""
    assert isinstance(want.ref, BlockWant)
    plan = codec.layout(want.ref.namespace, want.ref.name.shard, want.ref.name.tokens)
    starts = (*plan.offsets, plan.payload_bytes)
    ends = [plan.header_bytes + starts[(layer + 1) * plan.per_layer] for layer in range(len(plan.layers))]
    return (*ends[:-1], want.size)


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


class OnDevice:
    """One tenant's blocks on one device.

    Attributes:
        tier: The device's memory.
    """

    def __init__(self, tier: DeviceTier, service: Service, tenant: str, clock: Clock) -> None:
        self.tier = tier
        self._service, self._tenant, self._clock = service, tenant, clock
        self._restores: OrderedDict[str, _Staging] = OrderedDict()

    @classmethod
    @asynccontextmanager
    async def open(cls, service: Service, tenant: str, clock: Clock, *, device: str, nbytes: int) -> AsyncIterator[Self]:
        """Open a device tier above a running node.

        Raises:
            Invalid: There is no such device.
        """
        plane = service.plane
        opening = DeviceTier.open("device", nbytes, device, plane.run, arena=plane.tiers(tenant).dram.memory, cut=layer_ends)
        async with AsyncExitStack() as lifetime:
            try:
                tier = await lifetime.enter_async_context(opening)
            except ValueError as error:
                raise Invalid(
                    str(error), remedy="pip install 'kvtier[torch]', and name a device of this machine, or cpu"
                ) from error
            here = cls(tier, service, tenant, clock)
            lifetime.push_async_callback(here.aclose)
            yield here

    async def aclose(self) -> None:
        """Stop what is on its way up."""
        tasks = [each.task for each in self._restores.values() if each.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """One call: this node's, but for restores to the device, and its place in the statistics."""
        if isinstance(request, api.Restore) and request.tier == "device":
            check_id(request.id, "session id")
            return await self.restore(request)
        if isinstance(request, api.GetRestore):
            return await self.get_restore(request)
        if isinstance(request, api.OfRestore):
            return await self.cancel_restore(request)
        answer = await self._service.call(self._tenant, name, request)
        if isinstance(answer, api.Stats):
            return msgspec.structs.replace(answer, tiers={self.tier.name: place_stats(self.tier), **answer.tiers})
        return answer

    # --- blocks ---

    async def get(
        self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int
    ) -> tuple[list[DeviceLease], str]:
        """Lease the longest leading run of blocks on the device, bringing up what is not there; the word says why it ended.

        Their copies may still run (`DeviceLease.wait`).
        """
        wants = block_wants(namespace, shard, links)
        deadline = self._clock.monotonic() + deadline_ms / 1000

        async def read(window: Sequence[Want]) -> tuple[list[Lease], str]:
            left_ms = max(1, int((deadline - self._clock.monotonic()) * 1000)) if deadline_ms else 0
            get = self._service.plane.get
            return await get(self._tenant, namespace.id, shard, list(map(_link, window)), deadline_ms=left_ms, reach="bucket")

        run, _ = leading_run(await self.tier.get_many(wants))
        why = ""
        try:
            async with aclosing(self._up(windows(wants[len(run) :]), read)) as arriving:
                async for more, why in arriving:  # noqa: B007  the last word counts
                    run += more
        except BaseException:
            _release(run)
            raise
        return run, why

    async def _up(self, parts: Iterator[Sequence[Want]], read: Read) -> AsyncGenerator[tuple[list[DeviceLease], str], None]:
        """The leading run of each part, leased on the device, and why it ended; nothing behind a hole.

        `read` leases a part's leading run in memory. While a part is copied, the one behind it is read.
        """
        wants = next(parts, None)
        reading = asyncio.create_task(read(wants)) if wants is not None else None
        try:
            while wants is not None and reading is not None:
                leases, why = await reading
                here, wants = wants, None if why else next(parts, None)
                reading = asyncio.create_task(read(wants)) if wants is not None else None
                run, miss = leading_run(await self.tier.promote_many(list(zip(here, leases, strict=False))))
                yield run, miss or why
                if miss or why:
                    return
        finally:
            if reading is not None:
                reading.cancel()
                for result in await asyncio.gather(reading, return_exceptions=True):
                    if not isinstance(result, BaseException):
                        _release(result[0])

    # --- restores ---

    async def restore(self, request: api.Restore) -> api.RestoreStatus:
        """Begin a restore to the device: one to memory, and behind it the way up. Raises as the call does."""
        below = msgspec.structs.replace(request, tier="dram")
        status = await self._service.restore(self._tenant, below)
        staging = self._restores.get(status.restore_id)
        if staging is None or staging.over:
            staging = self._restores[status.restore_id] = _Staging()
            staging.task = asyncio.create_task(self._work(staging, status.restore_id, below))
            self._restores.move_to_end(status.restore_id)
        for restore_id in list(self._restores)[:-_REMEMBERED]:
            if self._restores[restore_id].over:
                del self._restores[restore_id]
        return _from_above(status, staging)

    async def get_restore(self, request: api.GetRestore) -> api.RestoreStatus:
        """As the call: how far it has come, or its end where that comes in time."""
        staging = self._restores.get(request.restore_id)
        began = self._clock.monotonic()
        status = await self._service.get_restore(self._tenant, request)
        if staging is None:
            return status
        if staging.task is not None and not staging.over and request.wait_ms:
            left = request.wait_ms / 1000 - (self._clock.monotonic() - began)
            await asyncio.wait((staging.task,), timeout=max(0.0, left))
        return _from_above(status, staging)

    async def cancel_restore(self, request: api.OfRestore) -> api.RestoreStatus:
        """As the call: what is staged stays."""
        staging = self._restores.get(request.restore_id)
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
        steps: list[Step] = []

        def parts() -> Iterator[Sequence[Want]]:
            first = 0
            while first < end:
                steps.append(plan.step(first, end, WINDOW))
                first += len(steps[-1].links)
                yield steps[-1].wants

        async def read(wants: Sequence[Want]) -> tuple[list[Lease], str]:
            return leading_run(await stack.get_many(wants, deadline=deadline, reach=reach, ahead=speculative))

        held: list[DeviceLease] = []  # to its end: it must not evict its own beginning
        try:
            async with aclosing(self._up(parts(), read)) as arriving:
                async for run, why in arriving:
                    held += run
                    staging.came(steps.pop(0), run, why)
        finally:
            _release(held)


def windows(wants: Sequence[Want]) -> Iterator[Sequence[Want]]:
    """Some at a time: about `WINDOW` bytes, at least one."""
    first = nbytes = 0
    for index, want in enumerate(wants):
        if nbytes and nbytes + want.size > WINDOW:
            yield wants[first:index]
            first, nbytes = index, 0
        nbytes += want.size
    if first < len(wants):
        yield wants[first:]


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


def _link(want: Want) -> Link:
    assert isinstance(want.ref, BlockWant)
    return Link(want.ref.name.prefix_id, want.ref.name.tokens)


def _release(leases: Iterable[Lease | DeviceLease]) -> None:
    for lease in leases:
        lease.release()
