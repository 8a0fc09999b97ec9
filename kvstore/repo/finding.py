"""From a session id to a living branch: names, heads, lanes."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.api import MAIN
from kvstore.errors import Corrupt, Gone, Invalid, KVTierError, NotFound
from kvstore.ids import NamespaceId, namespace_id
from kvstore.keys import MAX_SEGMENT, check_id
from kvstore.model import Branch, Manifest, Name
from kvstore.repo.edits import find_version
from kvstore.repo.heads import Heads, Position
from kvstore.repo.manifests import Manifests
from kvstore.repo.names import Names
from kvstore.repo.root import Root
from kvstore.repo.together import together

_TRIES: Final = 8
_LANE: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A session that lives.

    Attributes:
        branch: As it was read, or made, just now.
        position: The head it was read from.
    """

    id: str
    namespace: NamespaceId
    lane: str
    family: str
    branch_id: str
    branch: Branch
    position: Position | None = None


class Finder:
    """Resolves session ids."""

    def __init__(self, root: Root, names: Names, heads: Heads, manifests: Manifests) -> None:
        self._root, self.names, self._heads, self._manifests = root, names, heads, manifests

    def key(self, tenant: str, session: str, namespace: NamespaceId, lane: str) -> str:
        """Key of a name. Raises `Invalid` for ids that are not allowed."""
        return self._root.keys.name(check_id(tenant, "tenant"), check_id(session, "session id"), namespace, check_lane(lane))

    async def find(self, tenant: str, session: str, namespace: str = "", lane: str = "") -> Found:
        """The session; what is left out must be the only one of its kind (`main` comes first among lanes).

        Raises:
            NotFound: Nobody ever had that name.
            Gone: It was deleted, or it expired.
            Invalid: It has several namespaces or lanes: say which.
        """
        if namespace and lane:
            return await self._must(tenant, session, namespace_id(namespace), lane)
        if namespace:
            found = await self.look(tenant, session, namespace_id(namespace), MAIN)
            if found is not None:
                return found
        held = [(ns, at) for ns, at in await self.lanes(tenant, session) if namespace in {"", ns} and lane in {"", at}]
        if not held:
            raise NotFound(f"there is no session {session!r}")
        lively = [found for found in await together(lambda pair: self.look(tenant, session, *pair), held) if found is not None]
        chosen = [found for found in lively if found.lane == MAIN] or lively
        if not chosen:
            raise Gone(f"session {session!r} was deleted, or it expired")
        if len(chosen) > 1:
            several = ", ".join(sorted(f"{found.namespace}/{found.lane}" for found in chosen))
            raise Invalid(
                f"session {session!r} holds several: say which namespace and lane of {several}",
                remedy="name `namespace` and `lane` (`--namespace` and `--lane` of the command)",
            )
        return chosen[0]

    async def look(self, tenant: str, session: str, namespace: NamespaceId, lane: str) -> Found | None:
        """One name's session; None where it is missing or gone. The head is read now; the name only where it is not known."""
        return (await self._look(tenant, session, namespace, lane))[0]

    async def lanes(self, tenant: str, session: str) -> list[tuple[NamespaceId, str]]:
        """Namespaces and lanes that an id was ever used for."""
        return await self.names.lanes(check_id(tenant, "tenant"), check_id(session, "session id"))

    async def alive(self, tenant: str, name: Name) -> bool:
        """Whether the branch that a name means lives."""
        position = await self._heads.read(self._root.keys.head(tenant, name.family))
        return position is not None and name.branch in position.head.branches

    async def manifest(self, tenant: str, family: str, name: str) -> Manifest | None:
        """A manifest by name; None where it is absent, or the name is empty."""
        return await self._manifests.get(self._root.keys.manifest(tenant, family, name)) if name else None

    async def reading(self, tenant: str, found: Found, version: int = 0) -> tuple[Found, Manifest | None]:
        """A session and the manifest of one of its versions. Where that is absent the head has moved on, and is read again.

        Raises:
            Gone: The session, or that version, is gone meanwhile.
            Corrupt: The head still names what is not there.
        """
        for _ in range(_TRIES):
            name = find_version(found.branch, version).manifest
            manifest = await self.manifest(tenant, found.family, name)
            if manifest is not None or not name:
                return found, manifest
            stale, found = found, await self._must(tenant, found.id, found.namespace, found.lane)
            if stale.branch == found.branch:
                break
        raise Corrupt(f"session {found.id!r} names a manifest that is absent: run `kvtier fsck`")

    async def _must(self, tenant: str, session: str, namespace: NamespaceId, lane: str) -> Found:
        found, error = await self._look(tenant, session, namespace, lane)
        if found is None:
            raise error
        return found

    async def _look(self, tenant: str, session: str, namespace: NamespaceId, lane: str) -> tuple[Found | None, KVTierError]:
        key = self.key(tenant, session, namespace, lane)
        missing = NotFound(f"there is no session {session!r} with namespace {namespace} and lane {lane!r}")

        async def follow(name: Name) -> Found | None:
            position = await self._heads.read(self._root.keys.head(tenant, name.family))
            branch = position.head.branches.get(name.branch) if position is not None else None
            if position is None or branch is None:
                return None
            return Found(
                id=session,
                namespace=namespace,
                lane=lane,
                family=name.family,
                branch_id=name.branch,
                position=position,
                branch=branch,
            )

        known = self.names.known(key)
        if known is not None and (found := await follow(known)) is not None:
            return found, missing
        held = await self.names.read(key)
        if held is None:
            return None, missing
        if held.name.name != session:
            raise Corrupt(f"{key} names session {held.name.name!r}, not {session!r}")
        if known is not None and (known.family, known.branch) == (held.name.family, held.name.branch):
            return None, Gone(f"session {session!r} was deleted, or it expired")
        return await follow(held.name), Gone(f"session {session!r} was deleted, or it expired")


def check_lane(lane: str) -> str:
    """A lane's name, as a key segment. Raises `Invalid`."""
    if not 1 <= len(lane) <= MAX_SEGMENT // 4 or not set(lane) <= _LANE:
        raise Invalid("lane must be 1 to 63 letters, digits, '-' or '_'")
    return lane
