"""Which sessions go first when the bucket has a limit: the least useful bytes, in one pass and bounded memory."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.model import Branch

HALF_LIFE_S: Final = 6 * 3600.0
"""Unused for so long, a session counts half: a guess at how fast the chance of a return fades."""
_MOST: Final = 32_768  # sessions that one run may evict, about 15 MiB of candidates; the next run goes on


def worth(tokens: int, layers: int, nbytes: int, idle_s: float) -> float:
    """How much computing a session's bytes save, on a logarithmic scale that only ever compares sessions.

    Computing KV again takes time roughly in proportion to tokens times layers (the width of the model is the same for all sessions
    of a namespace, and is no part of its name). Divided by stored bytes, and halved for every `HALF_LIFE_S` without use.

    Args:
        tokens: Of the current version.
        layers: Of its model.
        nbytes: Stored, all shards.
        idle_s: Since it was last committed or renewed.
    """
    return math.log2(max(1, tokens) * max(1, layers) / max(1, nbytes)) - max(0.0, idle_s) / HALF_LIFE_S


def last_used(branch: Branch) -> float:
    """Store-clock seconds of the last version or renewal. Restores renew once half of the time to live is over."""
    renewed = branch.expires - branch.ttl if branch.ttl and branch.expires else 0.0
    return max(branch.at, renewed)


def standing(branch: Branch) -> tuple[int, float, float, int]:
    """What every commit, renewal, rewind and pin changes."""
    return branch.seq, branch.at, branch.expires, branch.ttl


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A session as it was judged. One that has changed since is another one, and is judged anew by a later run.

    Attributes:
        head: Key of its head.
        branch: Its id there.
        judged: Its `standing` then.
        nbytes: What its blocks weigh, shared ones in full.
    """

    head: str
    branch: str
    judged: tuple[int, float, float, int]
    nbytes: int


class LeastWorth:
    """Keeps the sessions of least worth out of any number.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int = _MOST) -> None:
        self._limit, self._added = limit, 0
        self._heap: list[tuple[float, int, Candidate]] = []  # the most valuable on top; the number settles ties, as it came

    def add(self, value: float, candidate: Candidate) -> None:
        """Consider a session."""
        self._added += 1
        entry = (-value, -self._added, candidate)
        if len(self._heap) < self._limit:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heappushpop(self._heap, entry)

    def choose(self, excess: int) -> Mapping[str, list[Candidate]]:
        """The least valuable ones that weigh `excess` bytes together, by head.

        A block that two sessions share counts in both, so that less than `excess` may come free, never more sessions go than must;
        the next run takes what is still too much.
        """
        chosen: dict[str, list[Candidate]] = {}
        for _, _, candidate in sorted(self._heap, reverse=True):
            if excess <= 0:
                break
            chosen.setdefault(candidate.head, []).append(candidate)
            excess -= candidate.nbytes
        return chosen
