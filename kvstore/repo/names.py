"""Names: which family and branch a session id means. Never written before its branch, never deleted (R7)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import msgspec
from cachetools import LRUCache

from kvstore.errors import AlreadyExists, Corrupt, Unavailable
from kvstore.ids import NamespaceId
from kvstore.model import Name, dump, parse
from kvstore.objects.base import CREATE, Absent, PutMode, Unchanged, Update
from kvstore.repo.root import Root, outcome_unknown

_TRIES: Final = 16
_MAX_BYTES: Final = 16 * 1024


class Held(msgspec.Struct, frozen=True, gc=False):
    """A name as it was read."""

    name: Name
    etag: str


class Names:
    """Reads and claims names, by key."""

    def __init__(self, root: Root, cached: int) -> None:
        self._root = root
        self._cache: LRUCache[str, Held] = LRUCache(cached)

    def known(self, key: str) -> Name | None:
        """What a name meant when it was last read. While that branch lives it means the same: it moves only when that is gone."""
        held = self._cache.get(key)
        return None if held is None else held.name

    async def read(self, key: str) -> Held | None:
        """What it means now; None where nobody ever had it. Raises `Corrupt`, `Unsupported`."""
        return await self._root.sound(key, partial(self._read, key))

    async def _read(self, key: str) -> Held | None:
        known = self._cache.get(key)
        into = memoryview(bytearray(_MAX_BYTES))
        got = await self._root.store.get(key, into=into, if_none_match=known.etag if known else None)
        if isinstance(got, Unchanged) and known is not None:
            return known
        if isinstance(got, Absent | Unchanged):
            self._cache.pop(key, None)
            return None
        held = Held(parse(got.data, Name, key), got.etag)
        self._cache[key] = held
        return held

    async def claim(self, key: str, session: str, family: str, branch: str, alive: Callable[[Name], Awaitable[bool]]) -> None:
        """Make a name mean a branch that exists, if it is free: missing, or naming a branch that is gone.

        Args:
            key: The name's.
            session: The id as its owner spells it.
            family: What it shall mean.
            branch: What it shall mean.
            alive: Whether the branch that a name means still lives.

        Raises:
            AlreadyExists: It means another branch, which lives. It will never mean ours.
            Unavailable: `outcome_unknown`.
        """
        value = Name(name=session, family=family, branch=branch, write=self._root.ids.new())
        mode: PutMode = CREATE
        known = self._cache.get(key)
        if known is not None:
            if await alive(known.name):
                raise AlreadyExists(f"session {session!r} exists already")
            mode = Update(known.etag)
        for attempt in range(_TRIES):
            if attempt > 1:
                await self._root.pause(attempt)
            etag = await self._root.attempt(key, dump(value, key), mode)
            if etag is not None:
                self._cache[key] = Held(value, etag)
                return
            self._cache.pop(key, None)  # any answer but 200: what is there now decides
            held = await self._look(key)
            if held is None:
                mode = CREATE
            elif held.name.write == value.write:
                return
            elif await alive(held.name):
                raise AlreadyExists(f"session {session!r} exists already")
            else:
                mode = Update(held.etag)
        raise outcome_unknown(f"naming session {session!r}")

    async def _look(self, key: str) -> Held | None:
        try:
            return await self.read(key)
        except (Corrupt, Unavailable) as error:
            raise outcome_unknown("naming this session", error) from error

    async def lanes(self, tenant: str, session: str) -> list[tuple[NamespaceId, str]]:
        """Namespaces and lanes that one id was ever used for, the dangling ones too."""
        found = []
        async for page in self._root.store.list(self._root.keys.name_lanes(tenant, session)):
            for meta in page:
                parts = self._root.keys.parse_name(meta.key)
                if parts is not None:
                    found.append((parts[1], parts[2]))
        return found
