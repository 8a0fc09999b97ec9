"""Commits that were promised before they are in the bucket: what is kept of each, and the order of one session's."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from cachetools import LRUCache

from kvstore import api
from kvstore.errors import Gone
from kvstore.ids import Namespace
from kvstore.repo.branches import is_promise, promised

_FIXED, _BLOCK = 1024, 256  # bytes of memory that a commit takes, about: in any case, and for each block that it names
LANE_DIGITS: Final = 16
_REMEMBERED: Final = 32_768  # versions that were promised


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
    """A commit that was promised: enough to make it again after a crash, under the same write id.

    Attributes:
        request: As it was asked for. Its branch is filled in once it is known.
        at: Seconds, by the clock of this host.
        promise: What its session was called when it was promised, where that was not made yet; see `kvstore.repo.branches`.
    """

    tenant: str
    request: api.Commit
    fields: Namespace
    at: float
    promise: str = ""

    @property
    def bytes(self) -> int:
        """About how much memory it takes."""
        labels = sum(len(name) + len(value) for name, value in self.request.labels.items())
        return _FIXED + _BLOCK * len(self.request.blocks) + labels

    @property
    def session(self) -> str:
        """What names the session it is a version of; "" where nobody knows yet."""
        return self.request.branch or self.promise

    def on(self, branch: str) -> Intent:
        """The same, where that is the session it was built on."""
        return msgspec.structs.replace(self, request=msgspec.structs.replace(self.request, branch=branch))


class Line:
    """The pending commits of one session, and those that are about to be promised: one at a time, each checked against the last.

    Attributes:
        broken: One of them could not land; what was promised on top of it cannot either.
        unmade: How often nothing was found of the promise that the first one was built on.
    """

    def __init__(self) -> None:
        self.intents: deque[Intent] = deque()
        self.task: asyncio.Task[None] | None = None
        self.moved = asyncio.Condition()
        self.entrance = asyncio.Lock()
        self.entering = 0
        self.broken = False
        self.unmade = 0

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


class Outcomes:
    """What became of promises, by version: the session each is one of, "" where it could not be made."""

    def __init__(self) -> None:
        self._made: LRUCache[tuple[Place | str, int], str] = LRUCache(_REMEMBERED)

    def note(self, intent: Intent, branch: str) -> None:
        """It was decided."""
        version = intent.request.base_version + 1
        chain = _chain(intent.tenant, intent.request), version
        self._made[chain] = branch if self._made.get(chain, branch) == branch else ""  # of two nobody knows which is meant
        if intent.promise:
            self._made[intent.promise, version] = branch

    def before(self, tenant: str, request: api.Commit) -> str | None:
        """The session of the version a commit was built on; "" where that could not be made, None where nothing is known."""
        said = request.branch if is_promise(request.branch) else _chain(tenant, request)
        return self._made.get((said, request.base_version))

    def after(self, tenant: str, request: api.Commit) -> api.Commit:
        """Say which session a commit was built on where that was a promise.

        Raises:
            Gone: It was built on a promise that could not be kept.
        """
        made = self.before(tenant, request)
        if made is None or (request.branch and not is_promise(request.branch)):
            return request
        if not made:
            raise Gone(
                f"version {request.base_version} of session {request.id!r} was promised, and could not be made, or was made twice",
                remedy="restore the session, and commit on what it holds now",
            )
        return msgspec.structs.replace(request, branch=made)


def promise_of(tenant: str, request: api.Commit) -> str:
    """What a promise may call its session: one that is yet to be made, or that its caller was promised earlier."""
    if request.branch or request.base_version:
        return request.branch if is_promise(request.branch) else ""
    return promised(tenant, request.id, request.namespace, request.write_id)


def _chain(tenant: str, request: api.Commit) -> Place:
    """Chains of one id that name no lane are told apart by how they begin."""
    lane = request.lane or (request.blocks[0].prefix_id[:LANE_DIGITS] if request.blocks else "")
    return Place.of(tenant, request)._replace(lane=lane)
