"""Does the bucket hold what its heads name? One pass over everything under a root, while others work on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import msgspec
import numpy as np

from kvstore.errors import Corrupt, Denied, Gone, Invalid
from kvstore.ids import BlockName, Namespace, NamespaceId, Shard, namespace_id
from kvstore.model import Copy, Head, Manifest
from kvstore.objects.base import Absent, ObjectMeta
from kvstore.repo.blocks import want
from kvstore.repo.heads import versions_of
from kvstore.repo.marks import Marks
from kvstore.repo.repository import Repo
from kvstore.repo.together import together
from tiering import Miss

MAX_FINDINGS: Final = 10_000
_READS: Final = 4  # of whole blocks at once


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is not as it should be. A `note` harms nobody."""

    kind: str
    key: str
    detail: str = ""
    severity: Literal["error", "note"] = "error"


class Report(msgspec.Struct, kw_only=True):
    """What is under a root.

    Attributes:
        unnamed_branches: Branches no name leads to: a create or fork stopped halfway. They expire.
        dangling_names: Names whose branch is gone; they stay (about 200 bytes each).
        garbage_blocks: Blocks nothing names: anonymous ones, and those the next collections take.
        findings: At most 10,000.
        repaired: What was done, one line each.
    """

    epoch: int = 0
    heads: int = 0
    dead_heads: int = 0
    branches: int = 0
    unnamed_branches: int = 0
    names: int = 0
    dangling_names: int = 0
    manifests: int = 0
    garbage_manifests: int = 0
    blocks: int = 0
    bytes: int = 0
    garbage_blocks: int = 0
    garbage_bytes: int = 0
    findings: list[Finding] = []
    repaired: list[str] = []

    @property
    def clean(self) -> bool:
        """Whether everything that is named is there."""
        return not any(finding.severity == "error" for finding in self.findings)


class Named(msgspec.Struct, frozen=True):
    """A block that a manifest of some head names."""

    head: str
    manifest: str
    index: int
    name: BlockName
    copy: Copy


class Check:
    """One run.

    Attributes:
        report: What was found.
        sound: For each manifest key that is damaged, how many leading blocks are sound; -1 where it is absent or unreadable.
        bad: Named copies that are missing or corrupt, once for every manifest that names them.
        heads: By key, as they were read, without `recent`.
        nameless: (head key, branch id) of branches without name and TTL, older than the grace.
    """

    def __init__(self, repo: Repo) -> None:
        self._repo, self._root, self._keys = repo, repo.root, repo.root.keys
        self.report = Report()
        self.sound: dict[str, int] = {}
        self.bad: list[Named] = []
        self.nameless: list[tuple[str, str]] = []
        self.heads: dict[str, Head] = {}
        self._manifests: dict[str, tuple[str, int]] = {}  # key to the head that names it, and how many blocks of it
        self._damaged: set[str] = set()
        self._unopened: set[str] = set()
        seed = int(repo.root.ids.new(), 16)
        # Blocks, as digests of their keys: those that are named, those with a size that is stated, the named ones that are there,
        # and those of them with another size. Whatever is not as it should be is then read from the manifests once more.
        self._named, self._sized, self._stored, self._odd, self._looked_at = (Marks(seed) for _ in range(5))

    async def run(self, *, deep: bool, grace: float) -> Report:
        """Heads, then what they name, then what is there, then the names and namespaces."""
        self.report.epoch = (await self._repo.epochs.read()).epoch
        async for page in self._root.store.list(self._keys.heads()):
            await together(self._head, [meta.key for meta in page])
        await together(self._named_by, list(self.heads.items()))
        await self._stored_manifests()
        await self._stored_blocks(deep=deep)
        await self._blame()
        await self._names(await self._root.store.now() - grace)
        async for page in self._root.store.list(self._keys.namespaces):
            await together(self._namespace, [meta.key for meta in page])
        return self.report

    def find(self, kind: str, key: str, detail: str = "", severity: Literal["error", "note"] = "error") -> None:
        """Note something."""
        if len(self.report.findings) < MAX_FINDINGS:
            self.report.findings.append(Finding(kind=kind, key=key, detail=detail, severity=severity))

    def manifest_key(self, head_key: str, name: str) -> str:
        """Key of a manifest that a head names."""
        tenant, family = self._keys.parse_head(head_key) or ("", "")
        return self._keys.manifest_of(tenant, family, name)

    # --- heads and manifests ---

    async def _head(self, key: str) -> None:
        if self._keys.parse_head(key) is None:
            self.find("foreign_key", key, severity="note")
            return
        try:
            position = await self._repo.heads.read(key)
        except Corrupt as error:
            self.find("head_unreadable", key, error.message)
            return
        if position is not None:
            self.heads[key] = msgspec.structs.replace(position.head, recent=())  # most of its bytes
            self.report.heads += 1
            self.report.dead_heads += position.head.dead
            self.report.branches += len(position.head.branches)

    async def _named_by(self, entry: tuple[str, Head]) -> None:
        key, head = entry
        longest = _longest(head)
        for name, n in longest.items():
            manifest_key = self.manifest_key(key, name)
            self._manifests[manifest_key] = (key, n)
            try:
                manifest = await self._repo.manifests.fetch(manifest_key)
            except Corrupt as error:
                self.sound[manifest_key] = -1
                self.find("manifest_unreadable", manifest_key, error.message)
                continue
            except (Denied, Gone) as error:
                self._locked(manifest_key, error)
                continue
            if manifest is not None and len(manifest.blocks) >= n:
                self._expect(manifest_key, manifest, n)
            elif await self._still_named(key, name):
                self.sound[manifest_key] = -1
                self.find("manifest_missing" if manifest is None else "manifest_short", manifest_key, f"named by {key}")

    async def _readable(self, manifest_key: str) -> Manifest | None:
        closed = manifest_key in self.sound or manifest_key in self._unopened
        return None if closed else await self._repo.manifests.get(manifest_key)

    def _expect(self, manifest_key: str, manifest: Manifest, n: int) -> None:
        for index, block in enumerate(manifest.blocks[:n]):
            if not block.copies:
                self.find("block_without_copies", manifest_key, f"block {index}")
        copies = list(self._copies(manifest, n))
        self._named.add(self._named.digests((key for key, _, _ in copies), len(copies)))
        self._sized.add(self._sized.digests((_with_size(key, copy.bytes) for key, _, copy in copies), len(copies)))

    def _copies(self, manifest: Manifest, n: int) -> Iterator[tuple[str, int, Copy]]:
        """The block objects that its first `n` blocks name: key, index of the block, copy."""
        for index, block in enumerate(manifest.blocks[:n]):
            for copy in block.copies:
                yield self._keys.block(manifest.namespace, manifest.shards[copy.shard], block.prefix_id, copy.gen), index, copy

    def _entries(self, head: str, manifest_key: str, manifest: Manifest, n: int) -> Iterator[tuple[str, Named]]:
        """The same with all that is known of them."""
        for key, index, copy in self._copies(manifest, n):
            block = manifest.blocks[index]
            name = BlockName(manifest.namespace, Shard.parse(manifest.shards[copy.shard]), block.prefix_id, block.tokens)
            yield key, Named(head, manifest_key, index, name, copy)

    async def _still_named(self, head_key: str, manifest: str, n: int = 0) -> bool:
        """Whether a head names it even now, and at least `n` blocks of it: others commit and rewind while we look."""
        position = await self._repo.heads.read(head_key)
        return position is not None and _longest(position.head).get(manifest, -1) >= n

    async def _stored_manifests(self) -> None:
        async for page in self._root.store.list(self._keys.manifests()):
            for meta in page:
                self.report.manifests += 1
                if self._keys.parse_manifest(meta.key) is None:
                    self.find("foreign_key", meta.key, severity="note")
                elif meta.key not in self._manifests:
                    self.report.garbage_manifests += 1

    # --- blocks ---

    async def _stored_blocks(self, *, deep: bool) -> None:
        async for page in self._root.store.list(self._keys.blocks):
            found = self._named.digests((meta.key for meta in page), len(page))
            named = self._named.hold(found)
            sized = self._sized.hold(self._sized.digests((_with_size(meta.key, meta.size) for meta in page), len(page)))
            self._stored.add(found[named])
            self._odd.add(found[named & ~sized])
            for meta, is_named in zip(page, named, strict=True):
                self._stored_block(meta, named=bool(is_named))
        if deep or len(self._odd) or len(self._stored) < len(self._named):
            for manifest_key, (head, n) in self._manifests.items():
                await self._look_at(manifest_key, head, n, deep=deep)

    def _stored_block(self, meta: ObjectMeta, *, named: bool) -> None:
        self.report.blocks += 1
        self.report.bytes += meta.size
        if self._keys.parse_block(meta.key) is None:
            self.find("foreign_key", meta.key, severity="note")
        elif not named:
            self.report.garbage_blocks += 1
            self.report.garbage_bytes += meta.size

    async def _look_at(self, manifest_key: str, head: str, n: int, *, deep: bool) -> None:
        """Look at the blocks of a manifest that are not there, or not as stated; at all of them when the check is deep."""
        manifest = await self._readable(manifest_key)
        if manifest is None:
            return
        keys = [key for key, _, _ in self._copies(manifest, n)]
        found = self._named.digests(keys, len(keys))
        stored, odd = self._stored.hold(found), self._odd.hold(found)
        wanted = ~stored | odd | deep
        if not wanted.any():
            return
        wanted &= ~self._looked_at.hold(found)
        self._looked_at.add(found[wanted])
        entries = list(self._entries(head, manifest_key, manifest, n))
        await together(self._missing, [entries[at] for at in np.flatnonzero(wanted & ~stored)])
        await together(self._resized, [entries[at] for at in np.flatnonzero(wanted & odd)], limit=_READS)
        await together(self._inspect, [entries[at] for at in np.flatnonzero(wanted & stored & ~odd)], limit=_READS)

    async def _missing(self, entry: tuple[str, Named]) -> None:
        key, named = entry
        if not isinstance(await self._root.store.head(key), Absent):
            return  # it was stored while the listing went on
        if await self._still_named(named.head, named.manifest.rpartition("/")[2], named.index + 1):
            self._damage("block_missing", key, f"block {named.index} of {named.manifest}")

    async def _resized(self, entry: tuple[str, Named]) -> None:
        """One whose size is not the stated one: it may have been repaired under another codec."""
        key, named = entry
        meta = await self._root.store.head(key)
        if not isinstance(meta, Absent) and await self._inspect(entry):
            self.find("block_resized", key, f"{meta.size} bytes where {named.copy.bytes} are stated; sound", severity="note")

    async def _inspect(self, entry: tuple[str, Named]) -> bool:
        """Read a block. Whether it is what it claims."""
        key, named = entry
        fields = await self._fields(named.name.namespace)
        if fields is None:
            self.find("namespace_missing", self._keys.namespace(named.name.namespace), "its blocks could not be verified")
            return False
        try:
            miss = await self._repo.origin.inspect(want(fields, named.name, named.copy))
        except Invalid as error:
            self._damage("block_corrupt", key, error.message)
            return False
        except (Denied, Gone) as error:
            self._locked(key, error)
            return False
        if miss is Miss.CORRUPT:
            self._damage("block_corrupt", key, f"block {named.index} of {named.manifest}")
        return miss is None

    async def _fields(self, namespace: NamespaceId) -> Namespace | None:
        try:
            return await self._root.namespace(namespace)
        except Corrupt:
            return None

    def _locked(self, key: str, error: Denied | Gone) -> None:
        """Its key is not at hand, or was deleted on purpose. Neither is damage: a repair must not act on it (R12)."""
        if error.kind not in {"no_key", "key_destroyed"}:
            raise error
        self._unopened.add(key)
        self.find(error.kind, key, error.message, severity="note" if isinstance(error, Gone) else "error")

    def _damage(self, kind: str, key: str, detail: str) -> None:
        self._damaged.add(key)
        self.find(kind, key, detail)

    async def _blame(self) -> None:
        """Which manifests a damaged block shortens: several versions may name it."""
        for manifest_key, (head, n) in self._manifests.items() if self._damaged else ():
            manifest = await self._readable(manifest_key)
            if manifest is not None:
                self.bad += [named for key, named in self._entries(head, manifest_key, manifest, n) if key in self._damaged]
        for named in self.bad:
            self.sound[named.manifest] = min(named.index, self.sound.get(named.manifest, named.index))

    # --- names ---

    async def _names(self, before: float) -> None:
        meant: set[tuple[str, str]] = set()
        async for page in self._root.store.list(f"{self._keys.root}names/"):
            meant.update(filter(None, await together(self._name, [meta.key for meta in page])))
        for key, head in self.heads.items():
            for branch_id, branch in head.branches.items():
                if (key, branch_id) not in meant and not self._unopened:
                    self.report.unnamed_branches += 1
                    if not branch.expires and branch.at < before:
                        self.nameless.append((key, branch_id))
                        self.find("branch_unnamed", key, f"branch {branch_id} has no name and no expiry", severity="note")

    async def _name(self, key: str) -> tuple[str, str] | None:
        """(head key, branch) that a name means, if that branch lives."""
        if self._keys.parse_name(key) is None:
            self.find("foreign_key", key, severity="note")
            return None
        self.report.names += 1
        try:
            held = await self._repo.finder.names.read(key)
        except Corrupt as error:
            self.find("name_unreadable", key, error.message)
            return None
        except (Denied, Gone) as error:
            self._locked(key, error)
            return None
        if held is None:
            return None
        tenant = key.removeprefix(f"{self._keys.root}names/").partition("/")[0]
        head_key = f"{self._keys.heads()}{tenant}/{held.name.family}"
        head = self.heads.get(head_key)
        if head is None or held.name.branch not in head.branches:
            self.report.dangling_names += 1
            return None
        return head_key, held.name.branch

    # --- namespaces ---

    async def _namespace(self, key: str) -> None:
        try:
            await self._root.namespace(namespace_id(key.removeprefix(self._keys.namespaces).removesuffix(".json")))
        except Corrupt as error:
            self.find("namespace_unreadable", key, error.message)
        except Invalid:
            self.find("foreign_key", key, severity="note")


def _with_size(key: str, nbytes: int) -> str:
    return f"{key} {nbytes}"


def _longest(head: Head) -> dict[str, int]:
    """Every manifest that a head names, with the most blocks it names of it."""
    longest: dict[str, int] = {}
    for branch in head.branches.values():
        for version in versions_of(branch):
            if version.manifest:
                longest[version.manifest] = max(version.n, longest.get(version.manifest, 0))
    return longest
