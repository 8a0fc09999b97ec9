"""What the faces need of a node. :class:`kvstore.service.Service` is one; tests bring small ones of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol

from kvstore import api
from kvstore.ids import Link, Shard
from tiering import Lease


class Arena(Protocol):
    """A tenant's read arena: shared memory that is sealed against writing."""

    @property
    def fd(self) -> int:
        """Its descriptor, handed to the tenant's clients."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...


class Room(Protocol):
    """A place for one block's payload. Exactly one of `publish` and `abort` ends it."""

    @property
    def payload(self) -> memoryview:
        """Writable, and exactly as long as the payload."""
        ...

    async def publish(self) -> bool:
        """Digest what was written, and make it visible."""
        ...

    def abort(self) -> None:
        """Give the room back."""
        ...


class Ahead(Protocol):
    """A place for a block that has no name yet."""

    def abort(self) -> None:
        """Give it back."""
        ...


class Pin(Protocol):
    """A block that is leased, in the arena."""

    @property
    def offset(self) -> int:
        """Where it starts."""
        ...

    @property
    def size(self) -> int:
        """Its bytes."""
        ...


class Plane(Protocol):
    """The data plane, as :class:`kvstore.service.plane.Plane` documents it."""

    def allowed(self, uid: int, tenant: str) -> bool:
        """Whether a local user may act for a tenant."""
        ...

    def arena(self, tenant: str) -> Arena:
        """The tenant's arena."""
        ...

    async def get(
        self, tenant: str, namespace: str, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: str
    ) -> tuple[list[Lease], str]:
        """The leading run, and why it ended."""
        ...

    def pin_now(self, tenant: str, namespace: str, shard: str, prefixes: bytes, tokens: Sequence[int]) -> Sequence[Pin] | None:
        """All of these blocks, if that can be told at once."""
        ...

    def pinned(self, tenant: str, namespace: str, shard: str, pins: Sequence[Any], tokens: Sequence[int]) -> None:
        """The reader has its answer: count what `pin_now` gave."""
        ...

    def unpin(self, tenant: str, pins: Sequence[Any]) -> None:
        """Give back what `pin_now` gave."""
        ...

    def lookup_now(self, tenant: str, request: api.Lookup) -> api.Found | None:
        """The answer to a look-up, if it can be told at once."""
        ...

    def rooms_now(
        self, tenant: str, namespace: str, shard: str, prefixes: bytes, tokens: Sequence[int], slots: list[Any]
    ) -> Sequence[Room | None] | None:
        """Room for payloads, if the namespace is at hand; None for each that has none. `slots` of `ahead` are used up first."""
        ...

    def ahead(self, tenant: str, namespace: str, shard: str, tokens: int, count: int) -> Sequence[Ahead]:
        """Places for that many blocks of a length, or fewer; for `rooms_now`, or `not_wanted`."""
        ...

    def not_wanted(self, tenant: str, slots: Sequence[Any]) -> None:
        """Take back what `ahead` gave."""
        ...

    def writing(self, tenant: str) -> set[Callable[[], bool]]:
        """Who may have sent blocks that nobody has looked at yet, though others may rely on them; each tells whether that is so."""
        ...

    @property
    def copying(self) -> bool:
        """Whether threads are copying what writers published."""
        ...

    def land(
        self, tenant: str, rooms: Sequence[Any], copies: Sequence[Callable[[], None]], copied: Callable[[], None], *, soon: bool
    ) -> None:
        """Take over rooms that `copies` fill on threads; then `copied` is called on the loop. `soon`: it is waited for."""
        ...

    async def reserve(self, tenant: str, namespace: str, shard: Shard, link: Link) -> Room | None:
        """Room for a payload; None where there is none."""
        ...

    async def payload_bytes(self, tenant: str, namespace: str, shard: Shard, tokens: int) -> int:
        """Length of a payload."""
        ...

    @property
    def run(self) -> Callable[..., Awaitable[object]]:
        """Runs a function on the mover threads, to its real end also when the caller is cancelled."""
        ...


class Service(Protocol):
    """The calls of a node."""

    @property
    def node_id(self) -> str:
        """Shown in answers."""
        ...

    @property
    def version(self) -> str:
        """Of kvtier."""
        ...

    @property
    def plane(self) -> Plane:
        """Its data plane."""
        ...

    def admit(self, tenant: str) -> None:
        """Count a request that is no call of the table. Raises `Overloaded` where the tenant has made too many."""
        ...

    async def call(self, tenant: str, name: str, request: api.Request) -> api.Answer:
        """One call of :data:`kvstore.api.CALLS`. Raises `KVTierError`."""
        ...

    def watch(self, tenant: str, restore_id: str) -> AsyncIterator[api.RestoreStatus]:
        """Every change of a restore's status, the last one included. Raises `NotFound`."""
        ...
