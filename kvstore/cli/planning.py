"""How much memory, disk and bucket a load takes, how many requests, and what that costs. Pure; docs/sizing.md has the formulas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from kvstore import api
from kvstore.codec import layout
from kvstore.errors import Invalid
from kvstore.ids import Namespace, Shard
from kvstore.service.costs import of_requests

DAY: Final = 86_400.0
MONTH: Final = 30 * DAY
_GB: Final = 1e9
_LISTED: Final = 1000  # keys of one LIST
# Requests of the protocol (docs/design/003-protocol.md), besides those of blocks.
_CREATE_PUTS, _CREATE_GETS, _COMMIT_PUTS, _RESUME_GETS = 4, 2, 2, 3
_SEALED_PUTS, _SEALED_GETS = 1, 1  # what a collection asks of a head that was opened since the last


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served.

    Attributes:
        namespace: Of the model.
        ranks: Tensor-parallel ranks; each stores an object of its own for each block. MLA and opaque layouts: 1.
        tokens: Of a session at its end.
        turns: Of a session.
        sessions: New ones in a second, over all nodes.
        lasts: Seconds from a session's first turn to its last.
        dram_for: Seconds without a turn that a session stays in memory ...
        nvme_for: ... and on disk ...
        ttl: ... and in the bucket.
        nodes: Across which sessions are spread, each on one of them.
        cold: Share of later turns that find nothing nearer than the bucket, 0 to 1.
        ratio: Raw bytes by stored bytes: 1 with the codec `raw`.
        collect_every: Seconds between collections of the bucket.
    """

    namespace: Namespace
    ranks: int = 1
    tokens: int
    turns: int
    sessions: float
    lasts: float
    dram_for: float
    nvme_for: float
    ttl: float
    nodes: int = 1
    cold: float = 0.1
    ratio: float = 1.0
    collect_every: float = DAY / 2

    def shards(self) -> list[Shard]:
        """All that a block is stored as."""
        return [
            Shard(rank=rank, ranks=self.ranks, group=group)
            for group in range(len(self.namespace.groups))
            for rank in range(self.ranks)
        ]

    def bytes_of(self, tokens: int) -> int:
        """Raw bytes of a block of so many tokens, over all shards. Raises `Invalid` where the ranks do not divide the heads."""
        return sum(layout(self.namespace, shard, tokens).raw_bytes for shard in self.shards())

    @property
    def blocks(self) -> int:
        """Of a session, the last and partial one included."""
        return -(-self.tokens // self.namespace.block_tokens)

    @property
    def session_bytes(self) -> int:
        """Raw bytes of a session at its end."""
        whole, rest = divmod(self.tokens, self.namespace.block_tokens)
        return whole * self.bytes_of(self.namespace.block_tokens) + (self.bytes_of(rest) if rest else 0)

    def requests(self) -> dict[str, float]:
        """Of a session's life, by verb, collections left out: written once, read from the bucket by its cold turns."""
        objects, later = self.blocks * len(self.shards()), self.turns - 1
        read = objects * later / 2  # the prefix of turn t is (t-1)/turns of the session
        return {
            "put": objects + _CREATE_PUTS + _COMMIT_PUTS * later,
            "head": objects + self.turns,
            "get": _CREATE_GETS + self.cold * (later * _RESUME_GETS + read),
        }

    @property
    def reused(self) -> float:
        """Tokens of a session's turns that were computed in an earlier one."""
        return self.tokens * (self.turns - 1) / 2


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One figure, and how it comes about. `unit` is `bytes`, `bytes/s`, `requests`, `hours` or a currency."""

    name: str
    value: float
    unit: str
    how: str


def capacity(load: Load, *, beside: int) -> Iterator[Line]:
    """What nodes and bucket have to hold.

    Args:
        load: What is to be served.
        beside: Bytes of memory that a node takes beside its DRAM tier.
    """
    if not load.ttl:
        raise Invalid(
            "without a time to live nothing ever goes: there is no size to plan", remedy="give --ttl, or set lifecycle.session_ttl"
        )
    per_session, block = load.session_bytes, load.bytes_of(load.namespace.block_tokens)

    def held(seconds: float) -> float:
        return load.sessions * (load.lasts + seconds) * per_session

    dram, nvme = held(load.dram_for) / load.nodes, held(load.nvme_for) / load.nodes
    stored = load.sessions * per_session / load.ratio
    yield _bytes("token", block / load.namespace.block_tokens, "a full block / block_tokens")
    yield _bytes("session", per_session, "whole blocks, and a partial last one, as they lie in memory and on disk")
    yield _bytes("dram.size", dram, "of a node: sessions/s x (lasts + dram-for) x session / nodes")
    yield _bytes("memory limit", dram + beside, "of a node: dram.size + dram.window x engines + 1 GiB")
    yield _bytes("nvme.size", nvme, "of a node: sessions/s x (lasts + nvme-for) x session / nodes")
    yield _bytes("disk", nvme * 9 / 8, "of a node: nvme.size and an eighth")
    yield _bytes(
        "bucket",
        stored * (load.lasts + load.ttl + load.collect_every),
        "sessions/s x (lasts + ttl + collect-every) x session / ratio",
    )
    yield Line(name="to bucket", value=stored, unit="bytes/s", how="in the mean, of all nodes: sessions/s x session / ratio")
    fetched = load.cold * load.sessions * per_session * (load.turns - 1) / 2 / load.ratio
    yield Line(
        name="from bucket", value=fetched, unit="bytes/s", how="in the mean: cold x sessions/s x session x (turns - 1) / 2 / ratio"
    )


def month(load: Load, prices: api.Prices, prefill: float) -> Iterator[Line]:
    """Requests of thirty days and, where prices are known, sums.

    Args:
        load: What is to be served.
        prices: 0 is unknown, and left out.
        prefill: Tokens that an engine computes in a second; 0 is unknown.
    """
    sessions = load.sessions * MONTH
    counts = {verb: sessions * count for verb, count in load.requests().items()}
    counts["put"] += sessions * _SEALED_PUTS
    counts["get"] += sessions * (_SEALED_GETS + load.turns)  # and each new manifest
    alive = load.sessions * (load.lasts + load.ttl) * load.blocks * len(load.shards())
    counts["list"] = MONTH / load.collect_every * alive / _LISTED
    stored = load.sessions * (load.lasts + load.ttl + load.collect_every) * load.session_bytes / load.ratio
    fetched = load.cold * sessions * load.session_bytes * (load.turns - 1) / 2 / load.ratio
    for verb, count in counts.items():
        yield Line(name=verb, value=count, unit="requests", how="of a month, collections included")
    sums = {
        "requests": of_requests(((verb, round(count)) for verb, count in counts.items()), prices),
        "storage": stored / _GB * prices.gb_month,
        "egress": fetched / _GB * prices.gb_egress,
    }
    for name, value in sums.items():
        if value:
            yield Line(name=name, value=value, unit=prices.currency, how="of a month, by [prices]")
    if prefill:
        hours = sessions * load.reused / prefill / 3600 * load.ranks
        yield Line(
            name="GPU time",
            value=hours,
            unit="hours",
            how="of a month, at most avoided: tokens x (turns - 1) / 2 / prefill x ranks",
        )
        if prices.gpu_hour:
            yield Line(name="avoided", value=hours * prices.gpu_hour, unit=prices.currency, how="of a month, at most, by [prices]")


def _bytes(name: str, value: float, how: str) -> Line:
    return Line(name=name, value=value, unit="bytes", how=how)
