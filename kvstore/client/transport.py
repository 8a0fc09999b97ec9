"""The seam between the typed client and whatever carries its calls: a Unix socket, HTTP, or a node in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

from kvstore import api
from kvstore.blocks import Blocks, DeviceBlocks
from kvstore.errors import Invalid, Unavailable
from kvstore.ids import Link, Namespace, Shard

Fill: TypeAlias = Callable[[int, memoryview], None]
"""Copies the payload of block i into a writable view of exactly its length: the tensors in storage order."""

GRACE_S: Final = 0.25  # past its deadline an answer gets this long to arrive, before the client calls it a miss
PATIENCE_S: Final = 60.0
START: Final = "start one with `kvtier up` or `kvtier serve`, or correct the URL"  # where no node listens
_SLOW: Final = {"commit": 300.0, "collect": 3600.0, "delete_namespace": 3600.0, "delete_tenant": 3600.0}
# Besides GET: asking again does no harm.
_HARMLESS: Final = frozenset({"restore", "lookup", "put_namespace", "delete_namespace", "delete_tenant"})


class Transport(Protocol):
    """Carries calls and block bytes. Errors are those of :mod:`kvstore.errors`; a miss is a value."""

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """One call of :data:`kvstore.api.CALLS`."""
        ...

    async def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: api.Tier) -> Blocks:
        """Lease the longest leading run of blocks that arrives before the deadline (0: the node's own limit)."""
        ...

    async def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """Publish blocks; whether each was taken. Not taken means dropped under load.

        `fill(i, payload)` is called in order, on a worker thread, and never once this call is over: also when it was cancelled,
        the caller's buffers are free again.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the connection. Calling it twice does nothing."""
        ...


@runtime_checkable
class DeviceTransport(Protocol):
    """Hands blocks out in a device's memory, too: a store in this process."""

    async def get_on_device(
        self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, early: bool
    ) -> DeviceBlocks:
        """As `Transport.get`; `early`: before they have arrived. Raises `Unsupported` where it was opened without a device."""
        ...


def patience(name: str, request: api.Request) -> float:
    """Seconds to wait for a call's answer before giving up on the node."""
    if isinstance(request, api.Lookup):
        return request.deadline_ms / 1000 + GRACE_S
    if isinstance(request, api.GetRestore):
        return request.wait_ms / 1000 + PATIENCE_S
    return _SLOW.get(name, PATIENCE_S)


def block_patience(deadline_ms: int) -> float:
    """Seconds to wait for blocks."""
    return deadline_ms / 1000 + GRACE_S if deadline_ms else _SLOW["commit"]


def no_answer(name: str, why: str, *, late: bool) -> Unavailable:
    """The error for a call that was sent and not answered, in time or at all: a change may have been made."""
    call = api.BY_NAME.get(name)
    safe = call is None or call.method == "GET" or name in _HARMLESS
    return Unavailable(f"{name}: {why}", kind="outcome_unknown" if not safe else "timeout" if late else "unavailable")


def check_batch(links: Sequence[Link]) -> None:
    """Refuse more blocks at once than a session can have. Raises `Invalid`."""
    if len(links) > api.MAX_BLOCKS:
        raise Invalid(f"{len(links)} blocks in one call; at most {api.MAX_BLOCKS}")
