"""Commits that were promised before they are in the bucket: what is kept of each, and the order of one session's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from kvstore import api
from kvstore.ids import Namespace

_FIXED, _BLOCK = 1024, 256  # bytes of memory that a commit takes, about: in any case, and for each block that it names
LANE_DIGITS: Final = 16


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


class Intent(msgspec.Struct, frozen=True, kw_only=True):
    """A commit that was promised: enough to make it again after a crash, under the same write id."""

    tenant: str
    request: api.Commit
    fields: Namespace
    at: float

    @property
    def bytes(self) -> int:
        """About how much memory it takes."""
        labels = sum(len(name) + len(value) for name, value in self.request.labels.items())
        return _FIXED + _BLOCK * len(self.request.blocks) + labels

    def on(self, branch: str) -> Intent:
        """The same, where that is the session it was built on."""
        return msgspec.structs.replace(self, request=msgspec.structs.replace(self.request, branch=branch))


class Line:
    """The pending commits of one session, and those that are about to be promised: one at a time, each checked against the last.

    Attributes:
        broken: One of them could not land; what was promised on top of it cannot either.
    """

    def __init__(self) -> None:
        self.intents: deque[Intent] = deque()
        self.task: asyncio.Task[None] | None = None
        self.moved = asyncio.Condition()
        self.entrance = asyncio.Lock()
        self.entering = 0
        self.broken = False

    def empty(self) -> bool:
        """Whether nothing of this session is pending."""
        return not self.intents


class Place(NamedTuple):
    """The pending commits of a session are a line for each of these."""

    tenant: str
    session: str
    namespace: str
    lane: str

    @classmethod
    def of(cls, tenant: str, request: api.Commit) -> Place:
        """Where a commit lines up."""
        return cls(tenant, request.id, request.namespace, request.lane)


def chain_of(tenant: str, request: api.Commit, version: int) -> tuple[Place, int]:
    """Where what became of a promise is remembered. Chains of one id that name no lane are told apart by how they begin."""
    lane = request.lane or (request.blocks[0].prefix_id[:LANE_DIGITS] if request.blocks else "")
    return Place.of(tenant, request)._replace(lane=lane), version
