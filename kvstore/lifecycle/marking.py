"""From heads to marks: everything that a head names, history included (R4, R5)."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import Corrupt, Gone
from kvstore.lifecycle.kept import Kept
from kvstore.model import Head, Manifest
from kvstore.repo import Repo
from kvstore.repo.heads import versions_of
from kvstore.repo.marks import Digests, Marks, digests

_KEPT: Final = 32 << 20  # of outlines: 1.6 million blocks


class Outline(msgspec.Struct, frozen=True):
    """A manifest, as far as collections care: about 20 bytes a block.

    Attributes:
        digests: Of the keys of all copies, block by block.
        ends: For each block, how many copies there are up to its end.
        nbytes: For each block, the bytes of those.
        block_tokens: Tokens of every block but the last.
        tokens: Of all blocks.
        namespace: Whose blocks they are.
    """

    digests: Digests
    ends: NDArray[np.uint32]
    nbytes: NDArray[np.int64]
    block_tokens: int
    tokens: int
    namespace: str

    def first(self, n: int) -> Digests:
        """Copies of the first `n` blocks."""
        return self.digests[: self.ends[min(n, len(self.ends)) - 1]] if n and len(self.ends) else self.digests[:0]

    def weight(self, n: int) -> int:
        """Stored bytes of the first `n` blocks."""
        return int(self.nbytes[min(n, len(self.nbytes)) - 1]) if n and len(self.nbytes) else 0

    def length(self, n: int) -> int:
        """Tokens of the first `n` blocks."""
        return min(self.tokens, n * self.block_tokens)


_NOTHING: Final = Outline(np.empty(0, np.uint64), np.empty(0, np.uint32), np.empty(0, np.int64), 1, 0, "")


class Marking:
    """Marks what heads name. Manifests never change, so their outlines are good for later runs.

    Args:
        repo: Where.

    Attributes:
        seed: Of the digests; outlines are made of them.
    """

    def __init__(self, repo: Repo) -> None:
        self._repo, self._keys = repo, repo.root.keys
        self.seed = int(repo.root.ids.new(), 16)
        self._outlines: Kept[Outline] = Kept(_KEPT)

    def turn(self) -> None:
        """A run is over: outlines that it did not need go."""
        self._outlines.turn()

    async def mark(self, key: str, head: Head, marks: Marks) -> dict[str, Outline]:
        """Mark everything a head names. What is absent is looked for in the head as it is now (R5).

        Returns:
            Outlines of what it names, by name.

        Raises:
            Corrupt: It names a manifest that is absent, or one that cannot be read.
        """
        named, absent = await self._mark(key, head, marks)
        while absent:
            position = await self._repo.heads.read(key)
            if position is None:
                break
            still = absent & longest(position.head).keys()
            if still:
                raise Corrupt(f"{key} names manifest {min(still)}, which is absent: nothing was collected; run `kvtier fsck`")
            named, absent = await self._mark(key, position.head, marks)
        return named

    async def _mark(self, key: str, head: Head, marks: Marks) -> tuple[dict[str, Outline], set[str]]:
        """Mark what a head names; returns what is there, and the names of manifests that are absent."""
        named, absent = {}, set()
        for name, n in longest(head).items():
            manifest_key = self._manifest_key(key, name)
            marks.add_key(manifest_key)
            outline = await self._outline(manifest_key)
            if outline is None:
                absent.add(name)
            else:
                marks.add(outline.first(n))
                named[name] = outline
        return named, absent

    async def _outline(self, key: str) -> Outline | None:
        found = self._outlines.get(key)
        if found is None:
            try:
                manifest = await self._repo.manifests.get(key)
            except Gone:  # its tenant's keys were deleted, for good: nobody reads those blocks again (R12)
                return _NOTHING
            if manifest is None:
                return None
            found = self._drawn(manifest)
            self._outlines.put(key, found, 400 + found.digests.nbytes + found.ends.nbytes + found.nbytes.nbytes)
        return found

    def _manifest_key(self, head_key: str, name: str) -> str:
        tenant, family = self._keys.parse_head(head_key) or ("", "")
        return self._keys.manifest_of(tenant, family, name)

    def _drawn(self, manifest: Manifest) -> Outline:
        copies = [(block.prefix_id, copy) for block in manifest.blocks for copy in block.copies]
        keys = (self._keys.block(manifest.namespace, manifest.shards[copy.shard], name, copy.gen) for name, copy in copies)
        ends = np.cumsum([len(block.copies) for block in manifest.blocks], dtype=np.uint32)
        sizes = np.cumsum([0, *(copy.bytes for _, copy in copies)], dtype=np.int64)
        return Outline(
            digests(keys, len(copies), self.seed), ends, sizes[ends], manifest.block_tokens, manifest.tokens, manifest.namespace
        )


def longest(head: Head) -> dict[str, int]:
    """Every manifest that a head names, with the most blocks it names of it."""
    named: dict[str, int] = {}
    for branch in head.branches.values():
        for version in versions_of(branch):
            if version.manifest:
                named[version.manifest] = max(version.n, named.get(version.manifest, 0))
    return named
