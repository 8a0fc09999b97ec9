"""Milliseconds to first token of candidates for one prompt: what waits before it, what is loaded, what is computed.

A stored prefix is of use from its beginning, so each candidate has a *split*: tokens before it are loaded, each run from wherever
that is soonest, and what comes after it is computed. Pure arithmetic on arrays, a column for each candidate; nothing is per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Flags: TypeAlias = NDArray[np.bool_]

SOURCES: Final = ("gpu", "dram", "nvme", "peer", "bucket")  # nearest first: the order of columns everywhere
MOST_BUSY: Final = 0.9  # what a candidate is taken for at most: nobody is infinitely dear


class Speed(msgspec.Struct, frozen=True):
    """Of one source: a request takes `latency_s`, and then a second for each `bytes_per_s` bytes."""

    latency_s: float
    bytes_per_s: float


class Speeds(msgspec.Struct, frozen=True):
    """What one engine computes and loads with.

    Attributes:
        token_s: Seconds of computing a token, and
        position_s: for each token before it. So [start, stop) takes token_s times its tokens and position_s times its positions.
        dram: From the node's memory to the GPU; so are the others, all the way. What the GPU holds costs nothing.
        nvme: From the node's disk.
        peer: From another node.
        bucket: From the bucket.
        pass_s: Seconds that a pass takes besides, however few its tokens: all weights are read for it.
    """

    token_s: float
    position_s: float
    dram: Speed
    nvme: Speed
    peer: Speed
    bucket: Speed
    pass_s: float = 0.0

    def loads(self) -> Sequence[Speed]:
        """In the order of `SOURCES`."""
        return (Speed(0.0, np.inf), self.dram, self.nvme, self.peer, self.bucket)


class Tokens(msgspec.Struct, frozen=True):
    """Of one prompt, by where their KV comes from; they add up to the prompt."""

    gpu: int = 0
    dram: int = 0
    nvme: int = 0
    peer: int = 0
    bucket: int = 0
    computed: int = 0


class Priced(msgspec.Struct, frozen=True):
    """One candidate, and why.

    Attributes:
        candidate: Its name.
        ms: Predicted to first token: queue, load and compute.
        price: What candidates are ranked by: `ms` and what this costs others, `imbalance_ms`.
        queue_ms: Work that was given to it before.
        load_ms: Of the tokens before the split.
        compute_ms: Of the tokens after it.
        imbalance_ms: What those who come next wait longer because of this one, more so where the candidate is busy.
        split: Tokens that are loaded or already there; at most all but one.
        found: Tokens that could have been loaded: more than `split` where computing the rest is sooner.
        tokens: By source.
    """

    candidate: str
    ms: float
    price: float
    queue_ms: float
    load_ms: float
    compute_ms: float
    imbalance_ms: float
    split: int
    found: int
    tokens: Tokens


class Table:
    """What is known of the candidates now, one row each.

    Attributes:
        names: Of the candidates.
        queue_s: Seconds of work ahead, (candidates,).
        busy: Which part of the time each was busy lately, 0 to 1, (candidates,).
        token_s: See `Speeds`, (candidates,).
        position_s: The same.
        pass_s: The same.
        latency_s: (sources, candidates).
        byte_s: Seconds of a byte, (sources, candidates).
    """

    def __init__(self, names: Sequence[str], speeds: Sequence[Speeds]) -> None:
        self.names = names
        self.queue_s, self.busy = np.zeros(len(names)), np.zeros(len(names))
        self.token_s = np.array([one.token_s for one in speeds], np.float64)
        self.position_s = np.array([one.position_s for one in speeds], np.float64)
        self.pass_s = np.array([one.pass_s for one in speeds], np.float64)
        loads = [one.loads() for one in speeds]
        self.latency_s = np.array([[of[at].latency_s for of in loads] for at in range(len(SOURCES))], np.float64)
        self.byte_s = np.array([[1 / of[at].bytes_per_s for of in loads] for at in range(len(SOURCES))], np.float64)


class Prices:
    """Of one prompt, for all candidates of a table.

    Attributes:
        price: Milliseconds, (candidates,); see `Priced`.
    """

    def __init__(self, table: Table, bounds: Floats, tokens: int, token_bytes: int, here: Flags) -> None:
        self._table, self._tokens = table, tokens
        start = np.minimum(bounds, tokens - 1)  # the last token is computed in any case: its logits are the answer
        self._bounds: list[int] = start.astype(np.int64).tolist()
        self._lengths = np.diff(start)
        self._source, load = _loads(table, np.diff(bounds) * token_bytes, here)
        positions = (tokens - start) * (tokens + start - 1) / 2
        compute = np.outer(table.token_s, tokens - start)
        compute += np.outer(table.position_s, positions)
        compute += table.pass_s[:, None]  # one pass in any case, wherever the split is
        self._split = np.argmin(load + compute, axis=1)
        self._found = np.isfinite(load).sum(axis=1) - 1
        each = np.arange(len(table.names))
        load, compute = load[each, self._split], compute[each, self._split]
        taken = np.arange(len(self._lengths)) < self._split[:, None]  # runs before the split
        by_source = [((self._source == at) & taken) @ self._lengths for at in range(len(SOURCES))]
        self._by_source: list[list[int]] = np.array(by_source).T.astype(np.int64).tolist()
        busy = np.minimum(table.busy, MOST_BUSY)
        self._terms = 1e3 * np.array([table.queue_s, load, compute, (load + compute) * busy / (1 - busy)])
        self.price: Floats = self._terms.sum(axis=0)

    def steps(self, row: int) -> list[tuple[int, int, int]]:
        """What one candidate loads, in order: tokens [start, stop) from the source of that index."""
        split, bounds = self._split[row], self._bounds
        return list(zip(bounds[:split], bounds[1 : split + 1], self._source[row, :split].tolist(), strict=True))

    def of(self, row: int) -> Priced:
        """One candidate, with reasons."""
        split = self._bounds[self._split[row]]
        gpu, dram, nvme, peer, bucket = self._by_source[row]
        queue, load, compute, imbalance = self._terms[:, row].tolist()
        return Priced(
            candidate=self._table.names[row],
            ms=queue + load + compute,
            price=queue + load + compute + imbalance,
            queue_ms=queue,
            load_ms=load,
            compute_ms=compute,
            imbalance_ms=imbalance,
            split=split,
            found=self._bounds[self._found[row]],
            tokens=Tokens(gpu, dram, nvme, peer, bucket, self._tokens - split),
        )


def price(table: Table, bounds: Sequence[int], tokens: int, token_bytes: int, here: Flags) -> Prices:
    """Price one prompt.

    Args:
        table: The candidates.
        bounds: Where runs begin, in tokens, and where the last one ends; [0] where nothing is stored.
        tokens: Of the whole prompt, at least 1.
        token_bytes: Of KV of one token.
        here: Whether a candidate can get a run from a source, (sources, candidates, runs).
    """
    return Prices(table, np.array(bounds, np.float64), tokens, token_bytes, here)


def _loads(table: Table, nbytes: Floats, here: Flags) -> tuple[NDArray[np.int8], Floats]:
    """The soonest source of each run, (candidates, runs); seconds up to each bound, (candidates, runs + 1), inf behind a hole."""
    least: Floats = np.full(here.shape[1:], np.inf)
    source, seconds = np.zeros(least.shape, np.int8), np.empty_like(least)
    for at in range(len(SOURCES)):
        if here[at].any():
            np.multiply(table.byte_s[at][:, None], nbytes, out=seconds)
            seconds += table.latency_s[at][:, None]
            np.copyto(seconds, np.inf, where=~here[at])
            np.copyto(source, at, where=seconds < least)
            np.minimum(least, seconds, out=least)
    again = source[:, 1:] == source[:, :-1]  # it goes on in the same request
    latency = table.latency_s.ravel().take(source[:, 1:] * np.int64(len(least)) + np.arange(len(least))[:, None])
    latency *= again
    least[:, 1:] -= latency
    up_to: Floats = np.zeros((len(least), here.shape[2] + 1))
    np.cumsum(least, axis=1, out=up_to[:, 1:])
    return source, up_to
