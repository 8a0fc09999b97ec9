"""What the scheduler's half tells the workers' halves each step, and what they answer: plain values, sent in vLLM's own way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import msgspec
import numpy as np

from kvstore.ids import Link, pack_prefixes, unpack_prefixes

NOWHERE = -1  # instead of a block of the engine's: nothing is copied from there, or to there


class Load(msgspec.Struct, frozen=True):
    """Blocks to bring into the engine's memory.

    Attributes:
        request: For which request.
        prefixes: Their PrefixIds, 32 bytes each.
        tokens: How many each holds.
        pages: For each group: the engine's blocks, so many for each of ours; `NOWHERE` where nothing is wanted.
        near: How many leading ones are in a node's memory.
    """

    request: str
    prefixes: bytes
    tokens: int
    pages: tuple[tuple[int, ...], ...]
    near: int

    @property
    def links(self) -> list[Link]:
        """The blocks."""
        return _links(self.prefixes, self.tokens)


class Save(msgspec.Struct, frozen=True):
    """Blocks to take from the engine's memory.

    Attributes:
        job: Number of this order.
        request: Whose.
        prefixes: As of `Load`.
        ids: The tokens in them, u32 little endian.
        pages: As of `Load`.
    """

    job: int
    request: str
    prefixes: bytes
    ids: bytes
    pages: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> np.ndarray:
        """The tokens of each block, u32 [blocks, tokens of a block]."""
        return np.frombuffer(self.ids, "<u4").reshape(len(self.prefixes) // 32, -1)

    @property
    def links(self) -> list[Link]:
        """The blocks."""
        return _links(self.prefixes, self.tokens.shape[1])


class Step(msgspec.Struct, frozen=True):
    """What the workers do in one step.

    Attributes:
        loads: Begin these.
        saves: Begin these, after the forward pass.
        halt: Orders to save that must not touch the engine's memory any more: their blocks are somebody else's now.
        cancel: Requests whose load nobody waits for any more.
        waiting: Finished requests, whose blocks are kept until what is saved of them is: say when.
        idle: Whether nothing is computed in this step.
    """

    loads: tuple[Load, ...] = ()
    saves: tuple[Save, ...] = ()
    halt: tuple[int, ...] = ()
    cancel: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    idle: bool = False


class Report(msgspec.Struct, frozen=True):
    """What became of saves, of one worker or of several.

    Attributes:
        saved: By order: of each worker that is done with it, how many leading blocks it saved.
        lost: By request: of each worker whose load was short, how many leading blocks arrived.
    """

    saved: dict[int, tuple[int, ...]] = {}
    lost: dict[str, tuple[int, ...]] = {}

    def with_(self, other: Report) -> Report:
        """Both together."""
        saved, lost = defaultdict[int, tuple[int, ...]](tuple, self.saved), defaultdict[str, tuple[int, ...]](tuple, self.lost)
        for job, runs in other.saved.items():
            saved[job] += runs
        for request, runs in other.lost.items():
            lost[request] += runs
        return Report(dict(saved), dict(lost))


def packed(links: Sequence[Link]) -> bytes:
    """As `Load.prefixes`."""
    return pack_prefixes([link.prefix_id for link in links])


def _links(prefixes: bytes, tokens: int) -> list[Link]:
    return [Link(prefix, tokens) for prefix in unpack_prefixes(prefixes)]
