"""Small namespaces and blocks whose bytes follow from their name, for tests of the data plane."""

from __future__ import annotations

import hashlib

import numpy as np

from kvstore.ids import Link, Namespace, Shard, chain

SMALL = {"model": "tiny", "revision": "1", "layers": 2, "kv_heads": 2, "head_dim": 16, "dtype": "F32", "block_tokens": 16}


def namespace(**changes) -> Namespace:
    return Namespace(**{**SMALL, **changes})


def links_of(ns: Namespace, tokens: int, first: int = 0, *, partial: bool = True) -> list[Link]:
    return chain(ns, range(first, first + tokens), partial=partial)


def payload(link: Link, size: int) -> bytes:
    seed = int.from_bytes(hashlib.sha256(link.prefix_id.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8).tobytes()


async def publish(service, tenant: str, ns: Namespace, links, shard: Shard | None = None) -> list[bool]:
    """Through the data plane of a node's service."""
    taken = []
    for link in links:
        room = await service.plane.reserve(tenant, ns.id, shard or Shard(), link)
        if room is None:
            taken.append(False)
            continue
        room.payload[:] = payload(link, len(room.payload))
        taken.append(await room.publish())
    return taken
