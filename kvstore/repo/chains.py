"""Comparing chains of blocks: by what tokens they stand for, not by how their blocks happen to be cut (step 6 of a commit)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np

from kvstore import codec
from kvstore.ids import BlockName, Link, Namespace, PrefixId, Shard, block_id
from kvstore.model import BlockRef, Copy, Manifest
from kvstore.repo.slices import sliced
from tiering import Lease

TOKEN_IDS: Final = "token_ids"  # noqa: S105  the tokens of a language model, no secret

Source = Callable[[BlockName], Awaitable[Lease | None]]
"""Where the bytes of a block are leased from, raw; None where they are not on this node any more."""

Cut = Callable[[Sequence[Link], int, int], Awaitable[PrefixId | None]]
"""(chain, index, tokens) -> the name that block `index` would have if it ended after that many tokens; None: it cannot be told."""


class Block(NamedTuple):
    """A block of a version, with what is stored of it: by shard name. `ref` is how the manifest it was read from spells it."""

    link: Link
    copies: Mapping[str, Copy]
    ref: BlockRef | None = None


async def unfold(manifest: Manifest | None, n: int) -> list[Block]:
    """The first `n` blocks of a manifest."""
    if manifest is None:
        return []
    shards = manifest.shards

    def blocks(refs: Sequence[BlockRef]) -> list[Block]:
        return [Block(Link(ref.prefix_id, ref.tokens), {shards[copy.shard]: copy for copy in ref.copies}, ref) for ref in refs]

    return await sliced(blocks, manifest.blocks[:n])


async def fold(
    blocks: Sequence[Block], namespace: Namespace, labels: dict[str, str], now: float, before: Manifest | None = None
) -> Manifest:
    """A manifest of these blocks. Those that came from `before` keep their spelling where the shards are the same."""
    shards = tuple(sorted(set(await sliced(lambda some: {shard for block in some for shard in block.copies}, blocks))))
    order = {shard: index for index, shard in enumerate(shards)}
    same = before is not None and before.shards == shards

    def spelled(block: Block) -> BlockRef:
        if same and block.ref is not None:
            return block.ref
        copies = (Copy(order[shard], copy.gen, copy.bytes, copy.header_bytes) for shard, copy in sorted(block.copies.items()))
        return BlockRef(block.link.prefix_id, block.link.tokens, tuple(copies))

    return Manifest(
        namespace=namespace.id,
        shards=shards,
        block_tokens=namespace.block_tokens,
        tokens=tokens_of(block.link for block in blocks),
        labels=labels,
        created=now,
        blocks=tuple(await sliced(lambda some: map(spelled, some), blocks)),
    )


def links_of(blocks: Sequence[Block]) -> list[Link]:
    """Only the names."""
    return [block.link for block in blocks]


def tokens_of(links: Iterable[Link]) -> int:
    """How many tokens they stand for."""
    return sum(link.tokens for link in links)


def common(one: Sequence[Link], other: Sequence[Link]) -> int:
    """How many leading blocks are the very same. A PrefixId stands for everything before it, so one look at each is enough."""
    run = 0
    for left, right in zip(one, other, strict=False):
        if left.prefix_id != right.prefix_id:
            break
        run += 1
    return run


async def covers(longer: Sequence[Link], shorter: Sequence[Link], cut: Cut) -> bool:
    """Whether `shorter`'s tokens begin `longer`'s. Its last block may be a partial one that `longer` continues."""
    run = common(longer, shorter)
    if run == len(shorter):
        return True
    if run != len(shorter) - 1 or run == len(longer) or shorter[run].tokens >= longer[run].tokens:
        return False
    return await cut(longer, run, shorter[run].tokens) == shorter[run].prefix_id


async def grows(versions: Sequence[Sequence[Link]], cut: Cut) -> bool:
    """Whether each version begins the next one: nothing was rewound or edited in between."""
    for earlier, later in pairwise(versions):
        if not await covers(later, earlier, cut):
            return False
    return True


def cutter(namespace: Namespace, shards: Sequence[str], source: Source) -> Cut:
    """Cuts blocks by the token ids that their bytes carry."""

    async def cut(links: Sequence[Link], index: int, tokens: int) -> PrefixId | None:
        if namespace.identity != "tokens":
            return None
        link, parent = links[index], links[index - 1].prefix_id if index else namespace.id
        for shard in shards:
            name = BlockName(namespace.id, Shard.parse(shard), link.prefix_id, link.tokens)
            lease = await source(name)
            if lease is None:
                continue
            with lease:
                ids: np.ndarray = codec.tensors(lease.view, name, namespace)[TOKEN_IDS].copy()
            if block_id(namespace.id, parent, ids) != link.prefix_id:
                return None  # further keys are part of its name, and its bytes do not say which
            return block_id(namespace.id, parent, ids[:tokens])
        return None

    return cut
