"""Nodes of a mesh, and what they know of each other's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Final, Protocol

import msgspec
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray


class Member(msgspec.Struct, frozen=True, order=True):
    """One life of one node.

    Attributes:
        node: The node's id, as configured; at most one member of a mesh bears it.
        incarnation: Of this life: never used again, so that what is said of an earlier life is known to be over.
        host: Where its peer listener is.
        port: The same.
    """

    node: str
    incarnation: int
    host: str
    port: int


class Directory(Protocol):
    """Who is there, and who is believed to have which block. Its word is a hint: whoever acts on it finds out.

    Keys are a tier's: 32 bytes, digests of namespace (hence tenant), shard and PrefixId.
    """

    def members(self) -> Sequence[Member]:
        """The others, as last known. Never waits; empty where the directory is out of reach and nothing is remembered."""
        ...

    async def locate(self, keys: Sequence[bytes]) -> list[tuple[Member, ...]]:
        """Others that are believed to hold each key, in the order asked. Answers within 250 ms: what is not known by then is ()."""
        ...

    def added(self, keys: Sequence[bytes]) -> None:
        """This node has these now. Never waits: it is told in batches, and what is dropped on the way is repaired later."""
        ...

    def dropped(self, keys: Sequence[bytes]) -> None:
        """This node has these no more. As `added`."""
        ...

    def wrong(self, member: Member, keys: Sequence[bytes]) -> None:
        """That member was asked for these, and has them not. As `added`."""
        ...


def owner(key: bytes, nodes: Sequence[str]) -> str:
    """The one node of `nodes` that fetches this block for all: the highest random weight (Thaler and Ravishankar, 1998).

    Every node computes the same, and a node that comes or goes moves only the blocks that are its own.

    Raises:
        ValueError: There are no nodes.
    """
    weights = _seeds(tuple(nodes)) ^ np.uint64(int.from_bytes(key[:8], "big"))
    for shift, factor in _MIX:
        weights ^= weights >> shift
        weights *= factor
    return nodes[int((weights ^ (weights >> _LAST)).argmax())]


@lru_cache(maxsize=8)
def _seeds(nodes: tuple[str, ...]) -> NDArray[np.uint64]:
    """64 bits of each node; a key's own are mixed in by `splitmix64` (Steele, Lea and Flood, 2014), all nodes at once."""
    return np.frombuffer(b"".join(blake3(node.encode()).digest(8) for node in nodes), ">u8").astype(np.uint64)


_MIX: Final = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB)))
_LAST: Final = np.uint64(31)
