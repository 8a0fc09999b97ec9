"""The commit of docs/ordering.md, steps 3 to 6: what a session's next version is, made of one head at one epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy as shallow
from functools import partial
from typing import Self

import msgspec
from blake3 import blake3

from kvstore.errors import Conflict, Gone, NotFound
from kvstore.ids import BlockName, Link, Namespace, Shard
from kvstore.model import MAX_BLOCKS, Branch, Copy, Head, Manifest, Version
from kvstore.repo.chains import Block, Source, common, covers, cutter, fold, grows, links_of, tokens_of, unfold
from kvstore.repo.families import Addition, Edit, MovedError, Settled
from kvstore.repo.heads import next_version, renewed, versions_of
from kvstore.repo.manifests import Manifests, made_by
from kvstore.repo.root import Root
from kvstore.repo.slices import sliced
from kvstore.repo.uploads import Uploads, Wanted


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody wants a session's next version to be.

    Attributes:
        namespace: Of its blocks.
        base: The version it was built on.
        branch: The branch that `base` is a version of, or what was promised of it; "" where the caller does not know.
        base_prefix: The last block of `base`, as the caller knows it; "" where it does not.
        links: The whole prefix, in order; only the last block may be partial.
        shards: Every block is stored for all of these.
        labels: None keeps those of the version before.
        ttl: Seconds; None keeps the session's.
        write_id: Makes a repetition of this commit the same commit; "" where it is not repeated.
    """

    namespace: Namespace
    base: int
    branch: str = ""
    base_prefix: str = ""
    links: tuple[Link, ...]
    shards: tuple[str, ...]
    labels: dict[str, str] | None = None
    ttl: int | None = None
    write_id: str = ""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A version that holds the proposal, or its beginning (`cut`)."""

    version: int
    branch: str
    tokens: int
    blocks: int
    cut: bool = False


class Ledger(msgspec.Struct, frozen=True):
    """What commits write to."""

    root: Root
    manifests: Manifests
    uploads: Uploads
    history: int


class Commit:
    """One branch's commit, as a member of a group. See :class:`kvstore.repo.families.Change`.

    Args:
        ledger: Where it is written.
        tenant: Whose.
        family: Of the branch.
        branch: Its id.
        proposal: What it should become.
        source: Bytes on this node.
        start: The branch to begin with where it does not exist yet; None: then it is `Gone`.
        elsewhere: Copies that another family names, to be brought to this one inside the store (R6).
    """

    def __init__(
        self,
        ledger: Ledger,
        tenant: str,
        family: str,
        branch: str,
        proposal: Proposal,
        source: Source,
        start: Branch | None = None,
        elsewhere: Sequence[Block] = (),
    ) -> None:
        self._ledger, self._tenant, self._family, self._branch = ledger, tenant, family, branch
        self._proposal, self._source, self._start = proposal, source, start
        self._elsewhere = {(block.link.prefix_id, shard): copy for block in elsewhere for shard, copy in block.copies.items()}
        self._cut = cutter(proposal.namespace, proposal.shards, source)
        self._unfolded: dict[str, list[Block]] = {}
        self._shards = {text: Shard.parse(text) for text in proposal.shards}
        self._names: dict[tuple[int, str], BlockName] = {}
        self.branches = frozenset({branch})
        self.write_id = scoped(branch, proposal.write_id)

    def of(self, family: str) -> Self:
        """The same, of a family that was not known before."""
        other = shallow(self)
        other._family = family  # noqa: SLF001  one of ours
        return other

    async def decide(self, head: Head) -> Settled[Committed] | Edit[Committed] | Addition[Committed]:
        """Step 6: what of this head is kept, and whether anything is added.

        Raises:
            Conflict: The stored version is neither the base (and what the caller takes for it), nor contains the proposal, nor
                grew from the base towards it.
            Gone: There is no such branch.
        """
        want, branch = self._proposal, head.branches.get(self._branch, self._start)
        if branch is None or head.dead:
            raise Gone("this session was deleted, or it expired")
        if self.made(branch):
            return Settled(await self.landed(head))
        manifest = await self._manifest(branch.manifest)
        stored = await self._first(branch.manifest, manifest, branch.n)
        have = links_of(stored)
        run = common(have, want.links)
        whole = not await sliced(self._lacking, stored[:run])
        merging = False
        if branch.seq == want.base:  # an edited continuation is an edit, not a conflict
            same = run == len(have) == len(want.links) and whole
            if same and manifest is not None and (want.labels is None or want.labels == manifest.labels):
                return Settled(self._contained(branch.seq))
            if not await self._expected(have):
                raise Conflict(f"version {branch.seq} of the session is not what this commit was built on", current=branch.seq)
        elif want.base < branch.seq and await covers(have, want.links, self._cut):
            if whole:
                return Settled(self._contained(await self._exact(branch)))
            merging = True
        elif not (want.base < branch.seq and await covers(want.links, have, self._cut) and await self._grew(branch)):
            raise Conflict(f"the session is at version {branch.seq}, not {want.base}", current=branch.seq)

        keep, span = (stored, range(run)) if merging else (stored[:run], range(len(want.links)))
        answer = want.base if merging and tokens_of(have) > tokens_of(want.links) else branch.seq + 1

        async def build(epoch: int) -> Edit[Committed] | Settled[Committed]:
            return await self._build(head, branch, manifest, keep, span, epoch, answer)

        return Addition(build)

    def made(self, branch: Branch) -> bool:
        """Whether a version of the branch is what this commit made in an earlier life, in a group with others (R8)."""
        return any(
            version.seq > self._proposal.base and made_by(version.manifest, self.write_id) for version in versions_of(branch)
        )

    async def ahead(self, head: Head, epoch: int) -> None:
        """Store blocks before the head is ours to change, so that the swap is short. What comes of it is a guess, not a promise.

        Args:
            head: As it was last seen; without the branch where it does not exist yet.
            epoch: As it was last seen.

        Raises:
            NotFound: The branch is to be made, and the bytes of its first block are nowhere.
        """
        branch = head.branches.get(self._branch, self._start)
        if branch is None or branch.seq != self._proposal.base:
            return  # what is kept of it, if it is no conflict, is decided on the head as it is
        key = self._ledger.root.keys.manifest(self._tenant, self._family, branch.manifest) if branch.manifest else ""
        manifest = self._ledger.manifests.known(key) if key else None
        if key and manifest is None:
            return
        stored, links = await self._first(branch.manifest, manifest, branch.n), self._proposal.links
        keep = stored[: common(links_of(stored), links)]
        blocks = await self._secured(head, keep, range(len(links)), epoch)
        if links and not blocks and self._branch not in head.branches:
            raise _bytes_are_gone()

    async def landed(self, head: Head) -> Committed:
        """The version that this commit made in an earlier life."""
        branch = head.branches.get(self._branch)
        if branch is None:
            raise Gone("this commit has landed, and the session was deleted since, or it expired", landed=1)
        links = self._proposal.links
        for version in reversed(versions_of(branch)):
            if version.seq > self._proposal.base:
                stored = await self._links(version)
                if await covers(stored, links, self._cut):
                    return self._contained(await self._exact(branch))
        kept = links[: common(await self._links(versions_of(branch)[0]), links)]
        return self._done(branch.seq, kept, cut=True)

    # --- inside ---

    def _contained(self, version: int) -> Committed:
        return self._done(version, self._proposal.links)

    def _done(self, version: int, links: Sequence[Link], *, cut: bool = False) -> Committed:
        return Committed(version=version, branch=self._branch, tokens=tokens_of(links), blocks=len(links), cut=cut)

    async def _exact(self, branch: Branch) -> int:
        """The version that holds exactly the proposal, and the caller's own base where only longer ones do.

        Told of a longer one, the caller would build on blocks it never saw, and take them away with its next edit.
        """
        links = self._proposal.links
        for version in reversed(versions_of(branch)):
            if version.seq > self._proposal.base:
                stored = await self._links(version)
                if tokens_of(stored) == tokens_of(links) and await covers(stored, links, self._cut):
                    return version.seq
        return self._proposal.base

    async def _manifest(self, name: str) -> Manifest | None:
        if not name:
            return None
        found = await self._ledger.manifests.get(self._ledger.root.keys.manifest(self._tenant, self._family, name))
        if found is None:
            raise MovedError(name)
        return found

    async def _first(self, name: str, manifest: Manifest | None, n: int) -> list[Block]:
        """The first `n` blocks of a manifest; it is taken apart once, however often it is looked at."""
        if name not in self._unfolded:
            self._unfolded[name] = await unfold(manifest, MAX_BLOCKS)
        return self._unfolded[name][:n]

    async def _links(self, version: Version) -> list[Link]:
        return links_of(await self._first(version.manifest, await self._manifest(version.manifest), version.n))

    async def _expected(self, have: Sequence[Link]) -> bool:
        """Whether the base is what the caller takes it for, as far as the caller says, or is continued and so not replaced."""
        want = self._proposal
        if not want.base_prefix or (have and have[-1].prefix_id == want.base_prefix):
            return True
        return await covers(want.links, have, self._cut)

    async def _grew(self, branch: Branch) -> bool:
        """Whether the branch only grew since the base: no edit and no rewind in between, as far as its history tells."""
        base = self._proposal.base
        versions = [version for version in reversed(versions_of(branch)) if version.seq >= max(base, 1)]
        if [version.seq for version in versions] != list(range(max(base, 1), branch.seq + 1)):
            return False
        return await grows([await self._links(version) for version in versions], self._cut)

    async def _build(
        self, head: Head, branch: Branch, manifest: Manifest | None, keep: Sequence[Block], span: range, epoch: int, answer: int
    ) -> Edit[Committed] | Settled[Committed]:
        """Steps 3 and 4: store what is missing of the proposal's blocks in `span`, then the manifest; acknowledged as `answer`."""
        want, ledger = self._proposal, self._ledger
        blocks = await self._secured(head, keep, span, epoch)
        cut = len(blocks) < len(span)
        if cut and not blocks and not keep:
            raise NotFound(
                "the bytes of this commit's first block are neither on this node nor in the bucket",
                remedy="publish the blocks again",
            )
        result = [*blocks, *keep[len(blocks) :]]
        kept = want.links[: len(blocks)] if cut else want.links
        done = self._done(answer, kept, cut=cut)
        if manifest is not None and cut and result == await self._first(branch.manifest, manifest, branch.n):
            return Settled(msgspec.structs.replace(done, version=min(answer, branch.seq)))
        now = await ledger.root.now()
        labels = want.labels if want.labels is not None else manifest.labels if manifest is not None else {}
        made = await fold(result, want.namespace, labels, now, manifest)
        name = await ledger.manifests.put(self._tenant, self._family, epoch, made, self.write_id)
        new = next_version(branch, manifest=name, n=len(result), at=now, history=ledger.history)
        if want.ttl is not None or branch.sliding or self._branch not in head.branches:
            new = renewed(new, now, want.ttl)
        return Edit({self._branch: new}, done)

    async def _secured(self, head: Head, keep: Sequence[Block], span: range, epoch: int) -> list[Block]:
        """The leading blocks of the proposal that have a copy of every shard, each of an age that this head may name (R1).

        Args:
            head: What is replaced.
            keep: Its blocks that the proposal begins with; where one has every shard asked for, it stays as it is.
            span: Which blocks of the proposal.
            epoch: As R2 has it.
        """
        want = self._proposal
        lacking = await sliced(lambda some: [at for at in some if at >= len(keep) or self._lacking((keep[at],))], span)
        named = await self._named(head, lacking)
        rows: dict[int, dict[str, Copy | None]] = {}

        def asked(some: Sequence[int]) -> list[tuple[int, str]]:
            for index in some:
                held = keep[index].copies if index < len(keep) else {}
                rows[index] = {shard: named.get((index, shard)) for shard in want.shards} | dict(held)
            return [(index, shard) for index in some for shard, copy in rows[index].items() if copy is None]

        absent = await sliced(asked, lacking)
        wanted = await sliced(lambda some: [self._wanted(index, shard) for index, shard in some], absent)
        stored = await self._ledger.uploads.secure(wanted, want.namespace, epoch, self._source)
        for (index, shard), copy in zip(absent, stored, strict=True):
            rows[index][shard] = copy

        def block(index: int) -> Block | None:
            if index not in rows:
                return keep[index]
            copies = {shard: copy for shard, copy in rows[index].items() if copy is not None}
            return Block(want.links[index], copies) if len(copies) == len(rows[index]) else None

        blocks: list[Block] = []
        for each in await sliced(lambda some: map(block, some), span):
            if each is None:
                break
            blocks.append(each)
        return blocks

    def _lacking(self, blocks: Sequence[Block]) -> list[Block]:
        """Those without a copy of every shard asked for."""
        return [block for block in blocks if not block.copies.keys() >= self._shards.keys()]

    def _wanted(self, index: int, shard: str) -> Wanted:
        link = self._proposal.links[index]
        name = self._names.get((index, shard))
        if name is None:  # kept, as its digest is what costs
            name = BlockName(self._proposal.namespace.id, self._shards[shard], link.prefix_id, link.tokens)
            self._names[index, shard] = name
        copy = self._elsewhere.get((link.prefix_id, shard))
        return Wanted(name, () if copy is None else (copy,))

    async def _named(self, head: Head, indices: Sequence[int]) -> Mapping[tuple[int, str], Copy]:
        """What older versions of this branch name of these blocks: it is kept at any age, so it need not be stored again."""
        branch, links = head.branches.get(self._branch), self._proposal.links
        named: dict[tuple[int, str], Copy] = {}
        for version in branch.history if branch is not None else ():
            key = self._ledger.root.keys.manifest(self._tenant, self._family, version.manifest)
            manifest = self._ledger.manifests.known(key) if version.manifest else None
            if manifest is None:
                continue
            named.update(await sliced(partial(_the_same, manifest, min(version.n, len(manifest.blocks)), links), indices))
        return named


def _the_same(manifest: Manifest, n: int, links: Sequence[Link], indices: Sequence[int]) -> list[tuple[tuple[int, str], Copy]]:
    """Copies of those of these blocks that are at the same place among the first `n`: a name stands for its place as well."""
    refs = [(index, manifest.blocks[index]) for index in indices if index < n]
    same = [(index, ref) for index, ref in refs if ref.prefix_id == links[index].prefix_id]
    return [((index, manifest.shards[copy.shard]), copy) for index, ref in same for copy in ref.copies]


def scoped(branch: str, write_id: str) -> str:
    """A caller's write id as a head remembers it: the same id for two sessions of one family must not stand for one commit."""
    return blake3(f"{branch}:{write_id}".encode()).hexdigest()[:32] if write_id else ""


def _bytes_are_gone() -> NotFound:
    return NotFound(
        "the bytes of this commit's first block are neither on this node nor in the bucket", remedy="publish the blocks again"
    )
