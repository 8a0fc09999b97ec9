"""What a restore brings in: the blocks of a version in prefix order, step by step, by the path that a request for them takes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Final

import msgspec

from kvstore import api, codec
from kvstore.ids import Link, Namespace, PrefixId, Shard, chain
from kvstore.model import BlockRef, Copy, Manifest
from kvstore.service.wants import block_wants
from tiering import Lease, Miss, Want

STEP: Final = 64  # blocks asked at once: enough to fill the link, few enough to report progress
_AT_ONCE: Final = 1024  # shards of them, together: fewer blocks where each has very many


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A session's version, found: its manifest cut to the blocks that belong to it."""

    session: api.Session
    manifest: Manifest
    namespace: Namespace

    @property
    def owner(self) -> Hashable:
        """Whose holds in the tenant's memory these are."""
        return (self.session.id, self.session.namespace, self.session.lane)


class Step(msgspec.Struct, frozen=True):
    """Some blocks in a row: for each, what every shard asked has of it. A block is staged when all its shards are."""

    links: Sequence[Link]
    rows: Sequence[Sequence[Want]]

    @property
    def wants(self) -> list[Want]:
        """All of them, in prefix order."""
        return [want for row in self.rows for want in row]


class Plan:
    """The blocks to bring, and their sizes. What it takes grows with the step, not with the session.

    Args:
        found: The version.
        tokens: Only the leading blocks that these spell; empty means all.
        shards: Only these; empty means all of the manifest.

    Attributes:
        size: Bytes of all blocks.
        tokens: Tokens of them.
    """

    def __init__(self, found: Resolved, tokens: Sequence[int] = (), shards: Sequence[str] = ()) -> None:
        self._namespace = found.namespace
        self.blocks = wanted_blocks(found, tokens)
        known = found.manifest.shards
        self._shards = [(Shard.parse(text), known.index(text) if text in known else -1) for text in shards or known]
        lengths = {block.tokens for block in self.blocks}
        self._sizes = {
            length: sum(codec.layout(self._namespace, shard, length).raw_bytes for shard, _ in self._shards) for length in lengths
        }
        self._most = max(1, min(STEP, _AT_ONCE // max(1, len(self._shards))))
        self.size = sum(self._sizes[block.tokens] for block in self.blocks)
        self.tokens = sum(block.tokens for block in self.blocks)

    def within(self, nbytes: int) -> int:
        """How many leading blocks have at most that many bytes together."""
        left = nbytes
        for index, block in enumerate(self.blocks):
            left -= self._sizes[block.tokens]
            if left < 0:
                return index
        return len(self.blocks)

    def step(self, first: int, end: int, nbytes: int) -> Step:
        """The blocks from `first` on, before `end`: as many as are asked at once, no more bytes than that, but at least one."""
        count, size = 0, 0
        for block in self.blocks[first : min(first + self._most, end)]:
            size += self._sizes[block.tokens]
            if count and size > nbytes:
                break
            count += 1
        return self._rows(self.blocks[first : first + count])

    def steps(self) -> Iterator[Step]:
        """All of it."""
        for first in range(0, len(self.blocks), self._most):
            yield self._rows(self.blocks[first : first + self._most])

    def _rows(self, blocks: Sequence[BlockRef]) -> Step:
        links = [Link(block.prefix_id, block.tokens) for block in blocks]
        columns = []
        for shard, index in self._shards:
            copies: dict[PrefixId, Copy] = {
                block.prefix_id: copy for block in blocks for copy in block.copies if copy.shard == index
            }
            columns.append(block_wants(self._namespace, shard, links, copies))
        return Step(links, list(zip(*columns, strict=True)))


def whole_rows(rows: Sequence[Sequence[Want]], answers: Sequence[Lease | Miss]) -> tuple[int, Miss | None]:
    """How many leading rows are complete, and why the next one is not."""
    width = len(rows[0]) if rows else 1
    for index, answer in enumerate(answers):
        if isinstance(answer, Miss):
            return index // width, answer
    return len(rows), None


def wanted_blocks(found: Resolved, tokens: Sequence[int]) -> Sequence[BlockRef]:
    """The blocks to bring: all of the version's, or the leading ones that `tokens` spells."""
    blocks = found.manifest.blocks
    if not tokens:
        return blocks
    named = chain(found.namespace, tokens, partial=True)
    run = 0
    for block, link in zip(blocks, named, strict=False):
        if block.prefix_id != link.prefix_id:
            break
        run += 1
    return blocks[:run]
