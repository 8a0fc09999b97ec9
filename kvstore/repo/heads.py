"""Heads: the registers that say what is alive. Reading them, replacing them by swaps, and the values they go through."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Final

import msgspec
from cachetools import LRUCache

from kvstore.errors import TooManyBranches, Unavailable
from kvstore.model import MAX_HEAD_BYTES, RECENT, Branch, Head, Version, dump, parse, stored_bytes
from kvstore.objects.base import CREATE, Absent, Unchanged, Update
from kvstore.repo.root import MAX_REGISTER_BYTES, Root

HISTORY_UNTIL: Final = 128  # branches; a larger family keeps no older versions
_TRIES: Final = 4


class Position(msgspec.Struct, frozen=True):
    """A head as a writer knows it.

    Attributes:
        head: Its value.
        etag: What the next swap must match.
        epoch: Read after this head, or kept along an unbroken chain of the writer's own swaps (R2); None: not read yet.
    """

    head: Head
    etag: str
    epoch: int | None = None


class Heads:
    """Reads and swaps heads by key. What was read is kept, so that reading it again is a conditional GET.

    Args:
        root: Where.
        cached: Entries kept in memory: branches and their older versions, and one for each head.
    """

    def __init__(self, root: Root, cached: int) -> None:
        self._root = root
        self._cache: LRUCache[str, Position] = LRUCache(cached, getsizeof=lambda position: entries(position.head))

    async def read(self, key: str) -> Position | None:
        """The head now; None where there is none.

        Raises:
            Corrupt: It is not what was stored there, whoever asks.
            Unsupported: It has a newer format version (I10).
        """
        return await self._root.sound(key, partial(self._read, key))

    async def _read(self, key: str) -> Position | None:
        known = self._cache.get(key)
        got = await self._root.store.get(
            key, into=memoryview(bytearray(MAX_REGISTER_BYTES)), if_none_match=known.etag if known else None
        )
        if isinstance(got, Unchanged) and known is not None:
            return known
        if isinstance(got, Absent | Unchanged):
            self._cache.pop(key, None)
            return None
        found = Position(parse(got.data, Head, key), got.etag)
        self._keep(key, found)
        return found

    def known(self, key: str, etag: str = "") -> Position | None:
        """A head that was read before, if it had that ETag (any, by default); asks nobody."""
        found = self._cache.get(key)
        return found if found is not None and etag in {"", found.etag} else None

    async def create(self, tenant: str) -> tuple[str, Position]:
        """A new family, with an empty open head (R3). Returns its id and the head.

        Each id is sent once (R7): it is used if it is there although no answer came, and otherwise never again. Should it be made
        later, it stays empty, and collections end it.
        """
        for attempt in range(_TRIES):
            family, write = self._root.ids.new(), self._root.ids.new()
            key, head = self._root.keys.head(tenant, family), Head(swaps=1, write=write, recent=(write,))
            etag = await self._root.attempt(key, dump(head, key), CREATE)
            if etag is not None:
                made = Position(head, etag)
                self._keep(key, made)
                return family, made
            found = await self.read(key)
            if found is not None:  # nobody else knows this key, but a collection may have sealed it already
                return family, found
            await self._root.pause(attempt)
        raise Unavailable(f"a new family of sessions could not be created in {_TRIES} attempts")

    async def swap(self, key: str, old: Position, new: Head) -> Position | None:
        """Replace exactly `old`. None on any answer but 200: it may or may not have landed.

        The epoch goes on only along this chain; a caller who gets None reads head and epoch again.
        """
        self._cache.pop(key, None)
        etag = await self._root.attempt(key, dump(new, key), Update(old.etag))
        if etag is None:
            return None
        self._keep(key, Position(new, etag))  # whoever finds it here has read no epoch after it
        return Position(new, etag, old.epoch)

    def _keep(self, key: str, position: Position) -> None:
        if entries(position.head) <= self._cache.maxsize:
            self._cache[key] = position


# --- the values a head goes through -----------------------------------------------------------------------------------


def swapped(head: Head, write: str, *, branches: Mapping[str, Branch | None] | None = None, **fields: object) -> Head:
    """The head after one more swap (R8).

    Args:
        head: What is replaced.
        write: The operation's write id.
        branches: Those that change; None drops one.
        fields: Others of the head's fields that change.
    """
    kept = dict(head.branches)
    for name, branch in (branches or {}).items():
        if branch is None:
            kept.pop(name, None)
        else:
            kept[name] = branch
    recent = (*head.recent, write)[-RECENT:]
    return msgspec.structs.replace(head, swaps=head.swaps + 1, write=write, recent=recent, branches=kept, **fields)


def fitted(head: Head, *, growing: bool) -> Head:
    """The head cut to what may be stored: older versions go first.

    Args:
        head: What shall be stored.
        growing: Whether it has a branch more; an eighth of the room is left to the branches that are in already.

    Raises:
        TooManyBranches: It is too large even without older versions.
    """
    limit = MAX_HEAD_BYTES * 7 // 8 if growing else MAX_HEAD_BYTES
    large = len(head.branches) > HISTORY_UNTIL
    if not large and stored_bytes(head) <= limit:
        return head
    for keep in (0,) if large else (32, 16, 8, 4, 2, 1, 0):
        branches = {name: _with_history(branch, keep) for name, branch in head.branches.items()}
        smaller = msgspec.structs.replace(head, branches=branches)
        if stored_bytes(smaller) <= limit:
            return smaller
    raise TooManyBranches(f"this family of sessions has {len(head.branches)} branches, more than one head can hold")


def _with_history(branch: Branch, keep: int) -> Branch:
    return branch if len(branch.history) <= keep else msgspec.structs.replace(branch, history=branch.history[:keep])


def entries(head: Head) -> int:
    """About how much memory it takes, in entries of a few hundred bytes."""
    return 1 + sum(1 + len(branch.history) for branch in head.branches.values())


def next_version(branch: Branch, *, manifest: str, n: int, at: float, history: int) -> Branch:
    """The branch one version on; what it was goes to its history, so it stays named and restorable."""
    past = Version(seq=branch.seq, manifest=branch.manifest, n=branch.n, at=branch.at)
    versions = (past, *branch.history) if branch.seq else branch.history  # version 0 is empty: there is nothing to go back to
    return msgspec.structs.replace(branch, seq=branch.seq + 1, manifest=manifest, n=n, at=at, history=versions[:history])


def versions_of(branch: Branch) -> list[Version]:
    """All versions that are named, newest first."""
    return [Version(seq=branch.seq, manifest=branch.manifest, n=branch.n, at=branch.at), *branch.history]


def renewed(branch: Branch, now: float, ttl: int | None = None) -> Branch:
    """The branch with its time to live started anew; `ttl` replaces it, 0 meaning for ever."""
    seconds = branch.ttl if ttl is None else ttl
    return msgspec.structs.replace(branch, ttl=seconds, expires=float(math.ceil(now) + seconds) if seconds else 0.0)


def expired(branch: Branch, now: float) -> bool:
    """Whether a collection drops it."""
    return not branch.pinned and 0 < branch.expires <= now
