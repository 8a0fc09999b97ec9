"""Sessions in pages, straight from the names in the bucket: there is no index to fall behind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import quote

from kvstore.api import Session, SessionPage
from kvstore.errors import Corrupt, Gone, Invalid
from kvstore.keys import check_id
from kvstore.repo.finding import Finder, Found
from kvstore.repo.root import Root
from kvstore.repo.together import together

MAX_PAGE: Final = 1000


class Listing:
    """Lists a tenant's living sessions.

    Args:
        root: Where.
        finder: Resolves names.
        show: What a page says about a session that was found.
    """

    def __init__(self, root: Root, finder: Finder, show: Callable[[str, Found], Awaitable[Session]]) -> None:
        self._root, self._finder, self._show = root, finder, show

    async def page(self, tenant: str, prefix: str, cursor: str, limit: int) -> SessionPage:
        """Those whose id starts with `prefix`, in the order of their keys; `cursor` comes from the page before."""
        check_id(tenant, "tenant")
        if not 1 <= limit <= MAX_PAGE:
            raise Invalid(f"limit must be 1 to {MAX_PAGE}")
        base = self._root.keys.names(tenant)
        parts = _key_prefixes(prefix) if self._root.keys.plain else [""]  # sealed names have no order: each of them is looked at
        first, after = _place(cursor, len(parts))
        found: list[Session] = []
        for index, part in enumerate(parts[first:], first):
            start = base + after if after and index == first else ""
            async for page in self._root.store.list(base + part, start_after=start):
                for begin in range(0, len(page), limit):
                    keys = [meta.key for meta in page[begin : begin + limit]]
                    for key, session in zip(keys, await together(lambda key: self._one(tenant, key, prefix), keys), strict=True):
                        if session is not None:
                            found.append(session)
                        if len(found) == limit:
                            return SessionPage(sessions=found, cursor=f"{index}.{key.removeprefix(base)}")
        return SessionPage(sessions=found)

    async def _one(self, tenant: str, key: str, prefix: str) -> Session | None:
        """The session a name means; None where it is dangling, unreadable (`fsck` says so) or does not match."""
        parts = self._root.keys.parse_name(key)
        if parts is None:
            return None
        try:
            known = self._finder.names.known(key)
            held = None if known is not None else await self._finder.names.read(key)
            name = known if known is not None else held.name if held is not None else None
            if name is None or not name.name.startswith(prefix):
                return None
            found = await self._finder.look(tenant, name.name, parts[1], parts[2])
            return None if found is None else await self._show(tenant, found)
        except (Corrupt, Gone):
            return None


def _key_prefixes(prefix: str) -> list[str]:
    """Where keys of ids with this prefix may lie: as they are, as a digest where they are long, or escaped where they are dots."""
    if not prefix:
        return [""]
    return [quote(prefix, safe=""), "=", *([] if prefix.strip(".") else ["%2E"])]


def _place(cursor: str, parts: int) -> tuple[int, str]:
    """Which listing a cursor is in, and the key it stands at."""
    if not cursor:
        return 0, ""
    index, _, after = cursor.partition(".")
    if index not in map(str, range(parts)) or not after:
        raise Invalid("cursor must come from the page before")
    return int(index), after
