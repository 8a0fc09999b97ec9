"""Device memory above a tenant's hierarchy, inside the engine's process: blocks handed out there, and restores that go up to it.

Bytes take the path of every request into the arena, and from there to the device: layer by layer while a block comes from the
bucket, and window by window what comes from memory or disk, so that one is copied while the next one is read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Self

import msgspec

from kvstore import api, codec
from kvstore.blocks import DeviceBlocks
from kvstore.clock import Clock
from kvstore.errors import Invalid, KVTierError
from kvstore.ids import Link, Namespace, Shard
from kvstore.keys import check_id
from kvstore.repo import BlockWant
from kvstore.service.calls import Service
from kvstore.service.device_restores import DeviceRestores
from kvstore.service.stats import place_stats
from kvstore.service.wants import block_wants, leading_run
from tiering import DeviceLease, DeviceTier, Lease, Miss, Want

log = logging.getLogger(__name__)
WINDOW: Final = 32 << 20  # of blocks read, and then copied, together

Read = Callable[[Sequence[Want]], Coroutine[Any, Any, tuple[list[Lease], str]]]


def layer_ends(want: Want) -> tuple[int, Sequence[int]]:
    """The length of a block's header, and where each layer ends in the object; the last one takes the token ids along."""
    assert isinstance(want.ref, BlockWant)
    plan = codec.layout(want.ref.namespace, want.ref.name.shard, want.ref.name.tokens)
    starts = (*plan.offsets, plan.payload_bytes)
    ends = [plan.header_bytes + starts[(layer + 1) * plan.per_layer] for layer in range(len(plan.layers))]
    return plan.header_bytes, (*ends[:-1], want.size)


class OnDevice:
    """One tenant's blocks on one device.

    Attributes:
        tier: The device's memory.
    """

    def __init__(self, tier: DeviceTier, service: Service, tenant: str, clock: Clock) -> None:
        self.tier = tier
        self._service, self._tenant, self._clock = service, tenant, clock
        self._restores = DeviceRestores(service, tenant, clock, self.bring, WINDOW)
        self._early: set[asyncio.Task[str]] = set()

    @classmethod
    @asynccontextmanager
    async def open(cls, service: Service, tenant: str, clock: Clock, *, device: str, nbytes: int) -> AsyncIterator[Self]:
        """Open a device tier above a running node.

        Raises:
            Invalid: There is no such device.
        """
        plane, tiers = service.plane, service.plane.tiers(tenant)
        opening = DeviceTier.open(
            "device", nbytes, device, plane.run, arena=tiers.dram.memory, cut=layer_ends, early=tiers.stack.early
        )
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
        await self._restores.aclose()
        for task in self._early:
            task.cancel()
        await asyncio.gather(*self._early, return_exceptions=True)

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """One call: this node's, but for restores to the device, and its place in the statistics."""
        if isinstance(request, api.Restore) and request.tier == "device":
            check_id(request.id, "session id")
            return await self._restores.start(request)
        if isinstance(request, api.GetRestore):
            return await self._restores.get(request)
        if isinstance(request, api.OfRestore):
            return await self._restores.cancel(request)
        answer = await self._service.call(self._tenant, name, request)
        if isinstance(answer, api.Stats):
            return msgspec.structs.replace(answer, tiers={self.tier.name: place_stats(self.tier), **answer.tiers})
        return answer

    async def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int) -> DeviceBlocks:
        """Lease the longest leading run of blocks on the device, bringing up what is not there.

        Their copies may still run (`DeviceLease.wait`).
        """
        wants = block_wants(namespace, shard, links)
        read = self._reader(namespace, shard, deadline_ms)
        run, why = leading_run(await self.tier.get_many(wants))
        try:
            for window in windows(wants[len(run) :]):
                more, why = await self.bring(window, read)
                run += more
                if why:
                    break
        except BaseException:
            _release(run)
            raise
        return DeviceBlocks(run, why if len(run) < len(wants) else "")

    async def get_early(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int) -> DeviceBlocks:
        """As `get`, but at once: leases on room for blocks that are brought up behind it (`DeviceBlocks.arrived`)."""
        wants = block_wants(namespace, shard, links)
        read = self._reader(namespace, shard, deadline_ms)
        began: asyncio.Future[tuple[list[DeviceLease], str]] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._bring_behind(wants, read, began))
        self._early.add(task)
        task.add_done_callback(self._early.discard)
        try:
            await asyncio.wait((began, task), return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            task.cancel()
            if began.done():
                _release(began.result()[0])
            raise
        if not began.done():
            return DeviceBlocks([], Miss.UNAVAILABLE.value)  # it was closed meanwhile
        return DeviceBlocks(*began.result(), task)

    async def bring(self, wants: Sequence[Want], read: Read) -> tuple[list[DeviceLease], str]:
        """The leading run of blocks leased on the device, brought up where it is not there, and why it ended.

        `read` leases the leading run of some in memory. No more is read than the device has room for.
        """
        with self.tier.bringing(wants) as found:
            run, why = leading_run(found)
            try:
                missing = [at for at, lease in enumerate(run) if not lease.here]
                if missing:
                    leases, ended = await read([wants[at] for at in missing])
                    answers = await self.tier.promote_many(list(zip((wants[at] for at in missing), leases, strict=False)))
                    for at, answer in zip(missing, answers, strict=False):
                        if isinstance(answer, Miss):
                            ended = ended or answer.value
                        else:
                            run[at].source = answer.source
                            answer.release()
                    end = next((at for at in missing if not run[at].here), len(run))
                    if end < len(run):
                        why = ended or Miss.UNAVAILABLE.value
                        _release(run[end:])
                        del run[end:]
            except BaseException:
                _release(run)
                raise
            return run, why

    async def _bring_behind(self, wants: Sequence[Want], read: Read, began: asyncio.Future[tuple[list[DeviceLease], str]]) -> str:
        """Bring blocks up that somebody has leased already; why not all of them."""
        with self.tier.bringing(wants) as found:
            run, why = leading_run(found)
            began.set_result((run, why))
            for window in windows(wants[: len(run)]):
                try:
                    more, ended = await self.bring(window, read)
                except KVTierError as error:
                    return error.kind
                except Exception:
                    log.exception("bringing blocks to the device failed")
                    return Miss.UNAVAILABLE.value
                _release(more)
                if ended:
                    return ended
            return why

    def _reader(self, namespace: Namespace, shard: Shard, deadline_ms: int) -> Read:
        deadline = self._clock.monotonic() + deadline_ms / 1000
        get = self._service.plane.get

        async def read(wants: Sequence[Want]) -> tuple[list[Lease], str]:
            left_ms = max(1, int((deadline - self._clock.monotonic()) * 1000)) if deadline_ms else 0
            return await get(self._tenant, namespace.id, shard, list(map(_link, wants)), deadline_ms=left_ms, reach="bucket")

        return read


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


def _link(want: Want) -> Link:
    assert isinstance(want.ref, BlockWant)
    return Link(want.ref.name.prefix_id, want.ref.name.tokens)


def _release(leases: Iterable[DeviceLease]) -> None:
    for lease in leases:
        lease.release()
