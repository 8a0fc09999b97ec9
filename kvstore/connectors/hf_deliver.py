"""Blocks into the memory of a model's KV: all of a prefix where attention is full, its end where it is a window's."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvstore.client.choice import Loading
from kvstore.connectors.arrivals import arrivals, populating
from kvstore.connectors.base import common_prefix, usable
from kvstore.ids import Link, NamespaceId, PrefixId, as_tokens, block_id

if TYPE_CHECKING:
    from kvstore.blocks import Blocks
    from kvstore.client import SyncClient
    from kvstore.connectors.hf_cache import Geometry


class Part(msgspec.Struct, frozen=True, eq=False):
    """The KV of one attention group.

    Attributes:
        geometry: Which group.
        first: The first token.
        kv: A tensor `[layers, 2, tokens from there on, kv_heads, head_dim]`, at least as many as are used.
    """

    geometry: Geometry
    first: int
    kv: Any


class Arrived(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What came of one sequence's blocks of the first attention group, and what there is to say about it.

    Attributes:
        tokens: u32 [n]: as many as came.
        links: The blocks; all but the last one hold `block_tokens`.
        kv: Of those tokens, from the first on; None where there are none.
        miss: As in `hf.Restored`, and so are the others.
    """

    tokens: np.ndarray = as_tokens(())
    links: Sequence[Link] = ()
    kv: Any = None
    miss: str = ""
    version: int = 0
    restore_id: str = ""


def arrive(
    geometry: Geometry,
    model: Any,
    links: Sequence[Link],
    arriving: Generator[tuple[Sequence[Link], Blocks], None, None],
    prompt: np.ndarray | None,
    *,
    far: bool,
    loading: Loading | None = None,
    **about: Any,
) -> Arrived:
    """The first group's blocks, until the prompt or what arrives ends. `far`: some must be waited for."""
    stored = sum(link.tokens for link in links)
    limit = stored if prompt is None else usable(stored, prompt.size)
    kv, tokens, miss = _copy(geometry, model, arriving, prompt, limit, far=far, loading=loading)
    if loading is not None and tokens.size < limit:
        miss = miss or loading.miss
    return Arrived(tokens=tokens, links=links, kv=kv, miss=miss, **about)


def complete(
    kv: SyncClient, model: Any, geometries: Sequence[Geometry], rows: Sequence[Arrived], pads: Sequence[int], deadline_ms: int
) -> tuple[int, list[list[Part]], str]:
    """The other groups' KV of what came, cut to the columns that all rows and groups have.

    Args:
        kv: The client.
        model: The model.
        geometries: Of its groups; the first one's KV is what came.
        rows: What came of each sequence.
        pads: Columns before the first token of each.
        deadline_ms: For all of them.

    Returns:
        How many columns; of each row the parts of all groups, which reach to there at least; why it is less than what came.

    Raises:
        KVTierError: As :meth:`kvstore.client.SyncClient.get`.
    """
    first, *others = geometries
    columns, miss = min(pad + row.tokens.size for row, pad in zip(rows, pads, strict=True)), ""
    ends = time.monotonic() + deadline_ms / 1000
    while True:
        parts, shortest = list[list[Part]](), columns
        for row, pad in zip(rows, pads, strict=True):
            done = max(0, columns - pad)
            whole = first.room(model, 0).kv if row.kv is None else row.kv
            parts.append([Part(first, 0, whole)])
            for geometry in others:
                since, size = geometry.since(done), geometry.namespace.block_tokens
                needed = row.links[since // size : -(-done // size)]
                left = max(1, int((ends - time.monotonic()) * 1000))
                arriving = arrivals(kv, geometry.namespace, geometry.shard, needed, near=0, deadline_ms=left)
                parent = row.links[since // size - 1].prefix_id if since else None
                end, tokens, why = _copy(geometry, model, arriving, row.tokens[since:done], done - since, parent=parent)
                parts[-1].append(Part(geometry, since, end))
                if tokens.size < done - since:
                    shortest, miss = min(shortest, pad + since + tokens.size), why
        if shortest == columns:
            return columns, parts, miss
        columns = shortest  # the window of a shorter prefix begins earlier: once more


def _copy(
    geometry: Geometry,
    model: Any,
    arriving: Generator[tuple[Sequence[Link], Blocks], None, None],
    prompt: np.ndarray | None,
    limit: int,
    *,
    parent: PrefixId | None = None,
    far: bool = False,
    loading: Loading | None = None,
) -> tuple[Any, np.ndarray, str]:
    """Copy blocks into new memory, each byte once. Returns the KV, its tokens, and why there are less than `limit`.

    Args:
        geometry: Of the group.
        model: The model.
        arriving: The blocks.
        prompt: What their tokens should be; None where any will do.
        limit: At most so many tokens.
        parent: The block before the first one.
        far: Whether some must be waited for.
        loading: What may still come after a `timeout`.
    """
    room, tokens = geometry.room(model, limit), np.empty(limit, "<u4")
    done, miss = 0, ""
    namespace = geometry.namespace.id
    before: NamespaceId | PrefixId = parent or namespace
    pages = room.pages if far else None
    with closing(arriving), closing(room), nullcontext() if pages is None else populating(pages):
        for window, blocks in arriving if limit else ():
            miss, undone = blocks.miss, done
            if miss == "timeout" and loading is not None:
                miss = ""  # of one step; there may be another
            for link, lease in zip(window, blocks.leases, strict=False):
                block_kv, block_ids = geometry.read(lease.view, link.tokens)
                before = block_id(namespace, before, block_ids)
                if before != link.prefix_id:
                    miss = "corrupt"  # its tokens are not those that its name stands for
                    break
                ids = block_ids[: limit - done]
                common = ids.size if prompt is None else common_prefix(ids, prompt[done:])
                room.write(done, block_kv[:, :, :common])
                tokens[done : done + common] = ids[:common]
                done += common
            if not blocks.intact:
                done, miss = undone, "unavailable"  # the node died while this was copied
            if miss or done == limit:
                break
    return room.kv, tokens[:done], miss
