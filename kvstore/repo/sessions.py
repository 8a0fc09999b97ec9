"""Sessions, as users speak of them: list, show, fork, rewind, renew, pin, delete, and find a version to restore."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from kvstore.api import MAIN, Session, SessionManifest, SessionPage, VersionInfo, Versions
from kvstore.errors import Corrupt, Invalid, Unavailable
from kvstore.ids import BlockName, Link, Namespace, NamespaceId
from kvstore.keys import check_id
from kvstore.model import Branch, Manifest, Version
from kvstore.repo.edits import Amendment, changed, dropped, find_version, forked, rewound
from kvstore.repo.families import Families, MovedError
from kvstore.repo.finding import Finder, Found
from kvstore.repo.heads import renewed, versions_of
from kvstore.repo.listing import MAX_PAGE, Listing
from kvstore.repo.root import Root
from kvstore.repo.together import Finishing, together
from kvstore.repo.writer import Place, Writer
from tiering import Lease

log = logging.getLogger(__name__)


class Sessions:
    """Every call takes the tenant, then the session id, its namespace id and its lane ("" where it is the only one).

    All raise `NotFound` (nobody ever had that name), `Gone` (deleted or expired), `Invalid` (ambiguous or malformed names) and
    `Unavailable` (kind `outcome_unknown` where a write may have landed).

    Args:
        history: Older versions of a session that stay named.
    """

    def __init__(
        self, root: Root, finder: Finder, families: Families, writer: Writer, finishing: Finishing, *, history: int
    ) -> None:
        self._root, self._finder, self._families, self._writer = root, finder, families, writer
        self._finishing, self._history = finishing, history
        self._listing = Listing(root, finder, self._shown)
        self._counted = Listing(root, finder, _named)

    # --- look ---

    async def get(self, tenant: str, session: str, namespace: str = "", lane: str = "") -> Session:
        """A session as it stands."""
        return await self._shown(tenant, await self._finder.find(tenant, session, namespace, lane))

    async def resolve(
        self, tenant: str, session: str, namespace: str = "", lane: str = "", version: int | None = None
    ) -> tuple[Session, Manifest]:
        """What a restore needs: the session, and the manifest of a version cut to the blocks that belong to it.

        It renews a sliding time to live of which more than half is over; expiry and resume are decided by who swaps first.
        """
        found = await self._kept_alive(tenant, await self._finder.find(tenant, session, namespace, lane))
        found, manifest, at = await self._version(tenant, found, version or 0)
        return _session(found, manifest, at), manifest

    async def versions(self, tenant: str, session: str, namespace: str = "", lane: str = "") -> Versions:
        """The versions that can still be restored, newest first."""
        found = await self._finder.find(tenant, session, namespace, lane)
        infos = []
        for each in versions_of(found.branch):
            manifest = await self._finder.manifest(tenant, found.family, each.manifest)
            blocks = None if manifest is None else manifest.blocks[: each.n]
            info = VersionInfo(
                version=each.seq,
                tokens=-1 if blocks is None else sum(block.tokens for block in blocks),
                blocks=each.n,
                at=each.at,
                current=each.seq == found.branch.seq,
                prefix_id=blocks[-1].prefix_id if blocks else "",
            )
            infos.append(info)
        return Versions(id=session, versions=infos)

    async def manifest(self, tenant: str, session: str, namespace: str = "", lane: str = "", version: int = 0) -> SessionManifest:
        """The blocks of a version; 0 means the current one."""
        found = await self._finder.find(tenant, session, namespace, lane)
        found, manifest, at = await self._version(tenant, found, version)
        return SessionManifest(
            id=session,
            namespace=found.namespace,
            lane=found.lane,
            version=at.seq,
            tokens=manifest.tokens,
            block_tokens=manifest.block_tokens,
            shards=list(manifest.shards),
            blocks=[Link(block.prefix_id, block.tokens) for block in manifest.blocks],
            branch=found.branch_id,
        )

    async def namespaces_of(self, tenant: str, session: str) -> list[NamespaceId]:
        """Namespaces of an id that hold something alive."""
        held = await self._finder.lanes(tenant, session)
        found = await together(lambda pair: self._finder.look(tenant, session, *pair), held)
        return list(dict.fromkeys(each.namespace for each in found if each is not None))

    async def list(self, tenant: str, prefix: str = "", cursor: str = "", limit: int = 100) -> SessionPage:
        """Living sessions whose id starts with `prefix`, in pages."""
        return await self._listing.page(tenant, prefix, cursor, limit)

    async def count(self, tenant: str, most: int) -> int:
        """How many live, counted up to `most`: by reading every name and head."""
        found, cursor = 0, ""
        while found < most:
            page = await self._counted.page(tenant, "", cursor, MAX_PAGE)
            found, cursor = found + len(page.sessions), page.cursor
            if not cursor:
                break
        return found

    # --- life ---

    async def create(
        self,
        tenant: str,
        session: str,
        namespace: Namespace,
        lane: str = "",
        *,
        ttl: int = 0,
        sliding: bool = True,
        labels: dict[str, str] | None = None,
    ) -> Session:
        """A new, empty session at version 0. Raises `AlreadyExists` where it lives."""
        work = self._writer.create(tenant, session, namespace, lane, ttl=ttl, sliding=sliding, labels=labels or {})
        found, manifest = await self._finishing.run(work)
        return _session(found, manifest, find_version(found.branch, 0))

    async def fork(
        self,
        tenant: str,
        session: str,
        namespace: str,
        lane: str,
        as_: str,
        *,
        version: int = 0,
        ttl: int | None = None,
        detach: bool = False,
        pinned: bool = False,
        tokens: int | None = None,
    ) -> Session:
        """A second session that begins as a version of the first one (0: the current one); no blocks move.

        Args:
            tenant: Whose.
            session: The first one.
            namespace: Its.
            lane: Its.
            as_: Id of the second one; its lane is `main`.
            version: Of the first one.
            ttl: Of the second one; None takes that of the first.
            detach: Give it a family of its own, for which the blocks are copied inside the store; neither pinned nor cut then.
            pinned: The second one never expires.
            tokens: Only the whole blocks within so many tokens.

        Raises:
            AlreadyExists: `as_` lives.
            Invalid: Not one block is within `tokens` tokens.
            TooManyBranches: The family is full; `detach` is the way out.
        """
        check_id(as_, "as")
        found = await self._finder.find(tenant, session, namespace, lane)
        place = Place(tenant, as_, found.namespace, MAIN)
        if detach:
            return await self._finishing.run(self._detached(place, found, version, ttl))
        return await self._finishing.run(self._forked(place, found, version, ttl, pinned=pinned, tokens=tokens))

    async def rewind(
        self,
        tenant: str,
        session: str,
        namespace: str = "",
        lane: str = "",
        *,
        version: int | None = None,
        tokens: int | None = None,
    ) -> Session:
        """Back to an earlier version (0: empty) or to the whole blocks within `tokens` tokens, as a new version."""
        if (version is None) == (tokens is None) or min(version or 0, tokens or 0) < 0:
            raise Invalid("rewind needs exactly one of version and tokens, at least 0")
        found = await self._finder.find(tenant, session, namespace, lane)

        async def target(branch: Branch) -> tuple[str, int]:
            if version == 0:
                return branch.manifest, 0
            if version is not None:
                there = find_version(branch, version)
                return there.manifest, there.n
            return branch.manifest, await self._blocks_within(tenant, found.family, branch, tokens or 0)

        now = await self._root.now()
        return await self._amended(tenant, found, rewound(found.branch_id, target, now, self._history))

    async def touch(self, tenant: str, session: str, namespace: str = "", lane: str = "", *, ttl: int | None = None) -> Session:
        """Renew: it now expires `ttl` seconds from now (None keeps its own; 0 means never)."""
        now = await self._root.now()
        return await self._change(tenant, session, namespace, lane, lambda branch: renewed(branch, now, ttl))

    async def pin(self, tenant: str, session: str, namespace: str = "", lane: str = "", *, pinned: bool = True) -> Session:
        """Never expire it; or let it expire again, its time to live beginning anew."""
        now = await self._root.now()

        def change(branch: Branch) -> Branch:
            after = msgspec.structs.replace(branch, pinned=pinned)
            return renewed(after, now) if branch.pinned and not pinned else after

        return await self._change(tenant, session, namespace, lane, change)

    async def delete(self, tenant: str, session: str, namespace: str = "", lane: str = "") -> None:
        """Delete it; its blocks go with the next collections."""
        found = await self._finder.find(tenant, session, namespace, lane)
        await self._run(tenant, found, dropped(found.branch_id))

    # --- inside ---

    async def _forked(
        self, place: Place, found: Found, version: int, ttl: int | None, *, pinned: bool, tokens: int | None
    ) -> Session:
        now, new = await self._root.now(), self._root.ids.new()

        async def start(branch: Branch) -> Branch:
            n = branch.n if tokens is None else await self._blocks_within(place.tenant, found.family, branch, tokens)
            if tokens is not None and n == 0:
                raise Invalid(f"not one whole block is within {tokens} tokens")
            return renewed(msgspec.structs.replace(branch, pinned=pinned, n=n), now, ttl)

        branch = await self._run(place.tenant, found, forked(found.branch_id, new, version, now, start))
        await self._writer.name(place, found.family, new)
        made = msgspec.structs.replace(found, id=place.session, lane=place.lane, branch_id=new, branch=branch)
        return await self._shown(place.tenant, made)

    async def _detached(self, place: Place, found: Found, version: int, ttl: int | None) -> Session:
        found, manifest, at = await self._version(place.tenant, found, version)
        start = Branch(seq=0, ttl=found.branch.ttl if ttl is None else ttl, sliding=found.branch.sliding)
        await self._writer.detach(place, manifest, at.n, start, _nowhere)
        return await self.get(*place)

    async def _change(self, tenant: str, session: str, namespace: str, lane: str, change: Callable[[Branch], Branch]) -> Session:
        found = await self._finder.find(tenant, session, namespace, lane)
        return await self._amended(tenant, found, changed(found.branch_id, change))

    async def _amended(self, tenant: str, found: Found, amendment: Amendment) -> Session:
        branch = await self._run(tenant, found, amendment)
        return await self._shown(tenant, msgspec.structs.replace(found, branch=branch))

    async def _run(self, tenant: str, found: Found, amendment: Amendment) -> Branch:
        key = self._root.keys.head(tenant, found.family)
        if found.position is not None:
            self._families.seed(key, found.position)
        return await self._families.run(key, amendment)

    async def _blocks_within(self, tenant: str, family: str, branch: Branch, tokens: int) -> int:
        """How many of a branch's blocks hold at most that many tokens together."""
        manifest = await self._finder.manifest(tenant, family, branch.manifest)
        if manifest is None and branch.manifest:
            raise MovedError(branch.manifest)
        total = 0
        for index, block in enumerate(manifest.blocks[: branch.n] if manifest is not None else ()):
            total += block.tokens
            if total > tokens:
                return index
        return branch.n

    async def _kept_alive(self, tenant: str, found: Found) -> Found:
        now = await self._root.now()
        if not _half_over(found.branch, now):
            return found
        renewal = changed(found.branch_id, lambda branch: renewed(branch, now) if _half_over(branch, now) else branch)
        try:
            return msgspec.structs.replace(found, branch=await self._run(tenant, found, renewal), position=None)
        except Unavailable as error:
            log.warning("a session is restored and its time to live could not be renewed: %s", error)
            return found

    async def _version(self, tenant: str, found: Found, version: int) -> tuple[Found, Manifest, Version]:
        """A version's manifest, cut to the blocks that belong to it."""
        found, manifest = await self._finder.reading(tenant, found, version)
        at = find_version(found.branch, version)
        if manifest is None:
            fields = await self._root.namespace(found.namespace)
            return (
                found,
                Manifest(namespace=found.namespace, shards=(), block_tokens=fields.block_tokens if fields else 1, tokens=0),
                at,
            )
        if len(manifest.blocks) < at.n or manifest.namespace != found.namespace:
            raise Corrupt(f"session {found.id!r}: its head and its manifest {at.manifest} disagree")
        blocks = manifest.blocks[: at.n]
        return found, msgspec.structs.replace(manifest, blocks=blocks, tokens=sum(block.tokens for block in blocks)), at

    async def _shown(self, tenant: str, found: Found) -> Session:
        found, manifest, at = await self._version(tenant, found, 0)
        return _session(found, manifest, at)


def _session(found: Found, manifest: Manifest, at: Version) -> Session:
    """What is said of a session; `manifest` is cut to the version `at`."""
    branch = found.branch
    return Session(
        id=found.id,
        namespace=found.namespace,
        lane=found.lane,
        version=at.seq,
        tokens=manifest.tokens,
        blocks=at.n,
        bytes=sum(copy.bytes for block in manifest.blocks for copy in block.copies),
        updated=at.at,
        expires=branch.expires,
        ttl_s=branch.ttl,
        sliding=branch.sliding,
        pinned=branch.pinned,
        labels=manifest.labels,
        family=found.family,
        branch=found.branch_id,
    )


async def _named(_: str, found: Found) -> Session:
    """Without its manifest, which nobody looks at who counts."""
    empty = Manifest(namespace=found.namespace, shards=(), block_tokens=1, tokens=0)
    return _session(found, empty, find_version(found.branch, 0))


def _half_over(branch: Branch, now: float) -> bool:
    return branch.ttl > 0 and branch.sliding and not branch.pinned and branch.expires - now < branch.ttl / 2


async def _nowhere(_: BlockName) -> Lease | None:
    """No bytes on this node."""
    return None
