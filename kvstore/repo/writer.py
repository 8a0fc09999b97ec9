"""Commits and creations by session id: which lane, whether the name is free, and the order of writes (branch before name)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec
from cachetools import LRUCache

from kvstore.api import MAIN, Receipt
from kvstore.errors import AlreadyExists, Conflict, Gone, Invalid, NotFound, Unavailable
from kvstore.ids import Link, Namespace, NamespaceId, PrefixId
from kvstore.model import Branch, Head, Manifest, Name
from kvstore.repo.branches import is_promise, made_for, means, promised
from kvstore.repo.chains import Block, Source, common, covers, cutter, fold, links_of, unfold
from kvstore.repo.commit import Commit, Committed, Ledger, Proposal, scoped
from kvstore.repo.edits import dropped
from kvstore.repo.epochs import Epochs
from kvstore.repo.families import Addition, Families
from kvstore.repo.families import Edit as Swap
from kvstore.repo.finding import Finder, Found
from kvstore.repo.heads import renewed, versions_of
from kvstore.repo.manifests import made_by

_TRIES: Final = 8
_LANE_DIGITS: Final = 16


class Place(NamedTuple):
    """A session id, in one namespace and lane."""

    tenant: str
    session: str
    namespace: NamespaceId
    lane: str


class Writer:
    """Makes sessions and their versions.

    Args:
        ledger: What commits write to.
        epochs: For uploads ahead of a swap.
        families: The swaps.
        finder: The names.
        cached: Sessions whose first block is remembered, which tells their lane without a request.
    """

    def __init__(self, ledger: Ledger, epochs: Epochs, families: Families, finder: Finder, *, cached: int) -> None:
        self._ledger, self._root, self._epochs = ledger, ledger.root, epochs
        self._families, self._finder = families, finder
        self._firsts: LRUCache[Place, PrefixId] = LRUCache(cached)

    async def commit(
        self, tenant: str, session: str, lane: str, proposal: Proposal, source: Source, *, ttl: int, sliding: bool
    ) -> Receipt:
        """The next version of a session; `base` 0 makes the session where its name is free.

        Args:
            tenant: Whose.
            session: Its id.
            lane: "" means `main`, or a lane of its own for a chain that shares no block with what `main` holds.
            proposal: The version.
            source: Bytes on this node.
            ttl: Of a session that is made here and whose proposal says none.
            sliding: Of a session that is made here.

        Raises:
            Conflict: The session moved; `current` is its version.
            Gone: It was deleted, or it expired; perhaps its id means another one by now.
            NotFound: There is no such session, and `base` is not 0; or the bytes of its first block are nowhere.
            Unavailable: `outcome_unknown` where it may have landed; `promise_pending` where it was built on a promise that nothing
                in the bucket tells of.
        """
        _check(tenant, proposal.namespace)
        await self._root.put_namespace(proposal.namespace)
        place = Place(tenant, session, proposal.namespace.id, lane or MAIN)
        free = False
        if proposal.write_id:
            # Known by what it was promised: that tells its followers which session it made, or was taken in by.
            promise = promised(tenant, session, place.namespace, proposal.write_id)
            proposal = msgspec.structs.replace(proposal, write_id=promise)
        if not lane:
            place, free = await self._in_its_lane(place, proposal, source)
        start = Branch(seq=0, ttl=ttl if proposal.ttl is None else proposal.ttl, sliding=sliding)
        done = await self._commit(place, proposal, source, start, free=free)
        if proposal.links:
            self._firsts[place] = proposal.links[0].prefix_id
        return Receipt(
            id=session,
            namespace=place.namespace,
            lane=place.lane,
            version=done.version,
            tokens=done.tokens,
            blocks=done.blocks,
            durability="bucket",
            cut=done.cut,
            branch=done.branch,
        )

    async def create(
        self, tenant: str, session: str, namespace: Namespace, lane: str, *, ttl: int, sliding: bool, labels: dict[str, str]
    ) -> tuple[Found, Manifest]:
        """An empty session, and its empty manifest. Raises `AlreadyExists`."""
        _check(tenant, namespace)
        await self._root.put_namespace(namespace)
        place = Place(tenant, session, namespace.id, lane or MAIN)
        if await self._finder.look(*place) is not None:
            raise AlreadyExists(f"session {session!r} exists already")
        start = Branch(seq=0, ttl=ttl, sliding=sliding)
        for _ in range(_TRIES):
            family, branch_id = await self._family(tenant), self._root.ids.new()
            opening = _Opening(self._ledger, tenant, family, branch_id, namespace, labels, start)
            try:
                branch, manifest = await self._families.run(self._key(tenant, family), opening)
            except Gone:
                continue  # a collection found the head empty for two epochs, and ended it
            await self.name(place, family, branch_id)
            found = Found(id=session, namespace=place.namespace, lane=place.lane, family=family, branch_id=branch_id, branch=branch)
            return found, manifest
        raise Unavailable("collections keep ending this session's new family: try again")

    async def detach(self, place: Place, manifest: Manifest, n: int, start: Branch, source: Source) -> Committed:
        """A session in a family of its own that begins with these blocks; they are copied inside the store (R6).

        Raises:
            AlreadyExists: The name is taken.
            NotFound: The first block is gone.
        """
        blocks = await unfold(manifest, n)
        fields = await self._root.namespace(manifest.namespace)
        if fields is None:
            raise NotFound(f"namespace {manifest.namespace} is not known under this root")
        whole = [shard for shard in manifest.shards if all(shard in block.copies for block in blocks)]
        proposal = Proposal(namespace=fields, base=0, links=tuple(links_of(blocks)), shards=tuple(whole), labels=manifest.labels)
        return await self._new(place, proposal, source, start, blocks)

    async def name(self, place: Place, family: str, branch: str, write_id: str = "") -> None:
        """Make the id mean a branch that is in its head; where it cannot, drop the branch.

        Args:
            place: The id.
            family: Of the branch.
            branch: Its id.
            write_id: Of the commit that made the branch.

        Raises:
            AlreadyExists: The id is taken.
            Gone: It meant what another try of this very commit made, and that was deleted since.
        """

        async def alive(name: Name) -> bool:
            if await self._finder.alive(place.tenant, name):
                return True
            if write_id and self._ended(place.tenant, name, write_id):
                raise Gone("this commit has landed, and the session was deleted since, or it expired", landed=1)
            return False

        try:
            await self._finder.names.claim(self._finder.key(*place), place.session, family, branch, alive)
        except (AlreadyExists, Gone):
            with contextlib.suppress(Gone, Unavailable):  # then it expires; `fsck` drops one that never does
                await self._families.run(self._key(place.tenant, family), dropped(branch))
            raise

    # --- inside ---

    async def _commit(self, place: Place, proposal: Proposal, source: Source, start: Branch, *, free: bool) -> Committed:
        """Into the branch that the name means, or into a new one where `base` is 0 and the name is free."""
        names, key = self._finder.names, self._finder.key(*place)
        for _ in range(_TRIES):
            name = None if free else names.known(key) or await self._named(key)
            if proposal.branch and (name is None or not means(name.branch, proposal.branch)):
                name = await self._meant(place, proposal.branch)
            if name is not None:
                commit = Commit(self._ledger, place.tenant, name.family, name.branch, proposal, source)
                try:
                    return await self._into(place.tenant, name, commit)
                except Gone as gone:
                    if gone.facts.get("landed") or proposal.branch:
                        raise  # it was made, and deleted since, whatever became of the name
                    if await self._named(key) != name:
                        await self._made_again(place, proposal)
                        continue
                    if proposal.base:
                        raise
            elif proposal.base:
                raise NotFound(
                    f"there is no session {place.session!r} with lane {place.lane!r}: commit on base_version 0 to make it"
                )
            free = False
            try:
                return await self._new(place, proposal, source, start)
            except AlreadyExists:
                continue  # somebody made it meanwhile: perhaps on the way to the same version
        raise Unavailable(f"session {place.session!r} is made and deleted by others all the time: try again")

    async def _named(self, key: str) -> Name | None:
        held = await self._finder.names.read(key)
        return None if held is None else held.name

    async def _meant(self, place: Place, branch: str) -> Name:
        """The name, if it means the session that a commit was built on. Versions are numbers: another one has the same (I4).

        Of a promise that no session tells of, nobody here knows whether it has yet to be kept: then it is not `Gone`.
        """
        name = await self._named(self._finder.key(*place))
        if name is not None and (means(name.branch, branch) or await self._took_in(place, name, branch)):
            return name
        if is_promise(branch) and not (name is not None and self._ended(place.tenant, name, branch)):
            raise Unavailable(
                f"this commit was built on a promise that session {place.session!r} does not tell of in lane {place.lane!r}: "
                "whoever gave it has yet to keep it, or could not, or it was kept and the session deleted since",
                kind="promise_pending",
            )
        raise Gone(
            f"the session that this commit was built on is not what {place.session!r} means in lane {place.lane!r}: "
            "it was deleted, or it expired",
            remedy="restore the session, and commit on what it holds now",
        )

    async def _took_in(self, place: Place, name: Name, promise: str) -> bool:
        """Whether the commit that was to make a session found this one under its name, and made a version of it."""
        found = await self._finder.look(*place) if is_promise(promise) else None
        return found is not None and found.branch_id == name.branch and _knows(found, promise)

    def _ended(self, tenant: str, name: Name, write_id: str) -> bool:
        """Whether a name means a session that is gone, and that the commit with this id made a version of; asks nobody."""
        at = self._families.heads.known(self._key(tenant, name.family))
        return at is not None and name.branch not in at.head.branches and scoped(name.branch, write_id) in at.head.recent

    async def _made_again(self, place: Place, proposal: Proposal) -> None:
        """The name means another session than we knew. Whoever built on a version of an earlier one never touches it (I4).

        A user who read the later one on another node is told so once too often; one whose commit has landed in it is not.
        """
        found = await self._finder.look(*place)
        if found is None or not proposal.base:
            return
        if _knows(found, proposal.write_id):
            return
        raise Conflict(
            f"session {place.session!r} was deleted and made again; it is at version {found.branch.seq}",
            current=found.branch.seq,
        )

    async def _into(self, tenant: str, name: Name, commit: Commit) -> Committed:
        key = self._key(tenant, name.family)
        position = self._families.heads.known(key)
        if position is not None:
            await commit.ahead(position.head, self._epochs.latest)
        return await self._families.run(key, commit)

    async def _new(
        self, place: Place, proposal: Proposal, source: Source, start: Branch, copies: Sequence[Block] = ()
    ) -> Committed:
        """PUT an empty open head, commit the branch, then name it."""
        for _ in range(_TRIES):
            branch = made_for(proposal.write_id, self._root.ids)
            commit = Commit(self._ledger, place.tenant, "", branch, proposal, source, start, copies)
            await commit.ahead(Head(), self._epochs.latest)
            family = await self._family(place.tenant)
            try:
                done = await self._families.run(self._key(place.tenant, family), commit.of(family))
            except Gone:
                continue
            await self.name(place, family, branch, proposal.write_id)
            return done
        raise Unavailable("collections keep ending this session's new family: try again")

    async def _family(self, tenant: str) -> str:
        family, position = await self._families.heads.create(tenant)
        self._families.seed(self._key(tenant, family), position)
        return family

    def _key(self, tenant: str, family: str) -> str:
        return self._root.keys.head(tenant, family)

    async def _in_its_lane(self, place: Place, proposal: Proposal, source: Source) -> tuple[Place, bool]:
        """Where a commit without a lane belongs, and whether that name was just found to be free."""
        links = proposal.links
        if not links or self._firsts.get(place) == links[0].prefix_id:
            return place, False
        own = place._replace(lane=links[0].prefix_id[:_LANE_DIGITS])
        main = await self._finder.look(*place)
        if main is None:
            if proposal.base and await self._finder.look(*own) is not None:
                return own, False
            return place, proposal.base == 0
        main, manifest = await self._finder.reading(place.tenant, main)
        if await _share(links_of(await unfold(manifest, min(main.branch.n, 1))), links, proposal, source):
            if main.position is not None:
                self._families.seed(self._key(place.tenant, main.family), main.position)
            return place, False
        # A chain of its own: a parallel sub-agent, unless it was built on what `main` holds.
        if await self._finder.look(*own) is not None:
            return own, False
        return (own, True) if proposal.base == 0 else (place, False)


class _Opening:
    """A branch that holds nothing yet. See :class:`kvstore.repo.families.Change`."""

    write_id = ""

    def __init__(
        self, ledger: Ledger, tenant: str, family: str, branch: str, namespace: Namespace, labels: dict[str, str], start: Branch
    ) -> None:
        self._ledger, self._tenant, self._family, self._branch = ledger, tenant, family, branch
        self._namespace, self._labels, self._start = namespace, labels, start
        self.branches = frozenset({branch})

    async def decide(self, head: Head) -> Addition[tuple[Branch, Manifest]]:
        """Its manifest is an object, so the head must be open."""
        if head.dead:
            raise Gone("this family was ended")
        return Addition(self._build)

    async def landed(self, head: Head) -> tuple[Branch, Manifest]:
        """Never asked, as it has no write id of its own."""
        raise NotImplementedError

    async def _build(self, epoch: int) -> Swap[tuple[Branch, Manifest]]:
        now = await self._ledger.root.now()
        manifest = await fold([], self._namespace, self._labels, now)
        name = await self._ledger.manifests.put(self._tenant, self._family, epoch, manifest)
        branch = renewed(msgspec.structs.replace(self._start, manifest=name, at=now), now)
        return Swap({self._branch: branch}, (branch, manifest))


def _knows(found: Found, write_id: str) -> bool:
    """Whether a session remembers the commit with that write id as its own."""
    ours = scoped(found.branch_id, write_id)
    if ours and found.position is not None and ours in found.position.head.recent:
        return True
    return any(made_by(version.manifest, ours) for version in versions_of(found.branch))


async def _share(stored: Sequence[Link], links: Sequence[Link], proposal: Proposal, source: Source) -> bool:
    """Whether two chains have their first tokens in common, or one of them has none."""
    if not stored or not links or common(stored, links):
        return True
    cut = cutter(proposal.namespace, proposal.shards, source)
    return await covers(links[:1], stored[:1], cut) or await covers(stored[:1], links[:1], cut)


def _check(tenant: str, namespace: Namespace) -> None:
    """Tenants never share a block (I9): whose a namespace is, is part of every block's name."""
    if namespace.tenant != tenant:
        raise Invalid(f"namespace.tenant is {namespace.tenant!r} and the session's tenant is {tenant!r}")
