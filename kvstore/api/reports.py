"""The parts of what a node reports of itself and of its bucket."""

from __future__ import annotations

from typing import Literal

import msgspec


class Doomed(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that a collection would delete.

    Attributes:
        kind: `session` (its head is `key`), `manifest`, `block` or `head`.
        gen: Generation; 0 where the kind has none.
        size: Stored bytes; of a session, those of its blocks where they are known.
        reason: `expired`: its time to live is over, or only such sessions name it. `capacity`: the least useful bytes above the
            limit. `superseded`: a version that is no longer kept, or an older generation of a block. `orphan`: the manifest of a
            family that is gone. `unnamed`: a block that no session names. `dead`: what `reap` takes.
    """

    kind: Literal["session", "manifest", "block", "head"]
    key: str
    gen: int
    size: int
    reason: Literal["expired", "capacity", "superseded", "orphan", "unnamed", "dead"]
    branch: str = ""


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Live blocks of one namespace: objects that a session names, each counted once, and their stored bytes."""

    tenant: str
    namespace: str
    blocks: int
    bytes: int


class CollectorStats(msgspec.Struct, frozen=True, kw_only=True):
    """Collections by this node.

    Attributes:
        heads: Read by the run under way, or by the last one.
        listed: Objects seen by it.
        deleted: Objects deleted since the node started.
        freed: Bytes of those.
        runs: How they ended: `ok`, `skipped` (another node had just done it), or an error's kind.
        last_success: Seconds since the epoch, by this host's clock; 0: none yet.
        late_s: Seconds by which the next periodic run is overdue.
        error: What the last run failed with, until one succeeds.
        usage: Live blocks of the caller's tenant, as of the last collection by any node.
    """

    running: bool = False
    heads: int = 0
    listed: int = 0
    deleted: int = 0
    freed: int = 0
    runs: dict[str, int] = {}
    last_success: float = 0
    late_s: float = 0
    error: str = ""
    usage: list[Usage] = []


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """How long something took, by bucket.

    Attributes:
        bounds_s: Inclusive upper ends, in seconds.
        counts: One count for each bound, and one for what took longer; not cumulative.
        total_s: Sum.
    """

    bounds_s: list[float] = []
    counts: list[int] = []
    total_s: float = 0


class TierStats(msgspec.Struct, frozen=True, kw_only=True):
    """One tier, as it stands.

    Attributes:
        used: Payload bytes held or reserved.
        limit: Payload bytes it may hold; 0 for the bucket.
        hits: Blocks found.
        misses: Blocks not found.
        bytes_in: Bytes taken.
        bytes_out: Bytes given.
        bytes_written: Bytes that its medium had to write for `bytes_in`, index included: their quotient is the write amplification.
            0 where nobody counts them.
        evictions: Blocks that made room.
        dropped: Blocks not taken, for want of room or time, or because the tier failed.
        declined: Blocks not taken because they were not found worth their room, or the wear of writing them.
        corrupt: Blocks whose bytes were not what they claim.
        missed: Misses by reason.
        tokens: Tokens that readers got from it, of every tenant.
        queued_bytes: Bytes waiting to be written to it.
        errors: Operations that failed.
        reads: How long reading a block took.
    """

    used: int
    limit: int
    hits: int
    misses: int
    bytes_in: int
    bytes_out: int
    evictions: int
    dropped: int
    corrupt: int
    missed: dict[str, int] = {}
    tokens: int = 0
    queued_bytes: int = 0
    errors: int = 0
    declined: int = 0
    bytes_written: int = 0
    reads: Latency = Latency()


class MeshStats(msgspec.Struct, frozen=True, kw_only=True):
    """This node's part in a mesh.

    Attributes:
        members: The other nodes, as last known.
        fetches: Blocks asked of others, by how that ended (`hits`, or the kind of miss), and what happened on the way: `through`
            (the owner was asked to read it from the bucket for all), `hedged` (the bucket was asked instead of waiting), `wrong`
            (the directory was), `corrupt`.
        by_member: Of the members, by node: blocks that each was asked for, by how that ended. One block may be asked of several.
        directory: What is wrong with it; "" where nothing is.
    """

    members: list[str] = []
    fetches: dict[str, int] = {}
    by_member: dict[str, dict[str, int]] = {}
    directory: str = ""


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the bucket's store is doing.

    Attributes:
        breaker: `closed`: requests are sent. `open`: the store failed, and is left alone. `half_open`: a probe is under way.
        opened: How often it opened.
        refused: Requests not sent because of it.
        hedges_sent: Reads asked for a second time because they were slow.
        hedges_won: Those that were answered first.
        corrupt_reads: Registers and manifests that were not what they claim to be, by folder; each was read once more.
        window_bytes: How much may be under way at it now; 0 where nothing bounds it.
        window_shrunk: How often that became less, by reason: `busy`, the store said SlowDown; `slow`, its answers took long.
        codec: Of new block objects, now.
        codec_reason: What speaks for it: it was `set`; for `auto`, `unmeasured` so far; it is `faster`; or the other one is, by too
            little to switch (`near`).
        codec_why: The same with its numbers, for people.
        codec_switched: How often `auto` changed it.
        codec_ratio: Stored by raw bytes of what was coded; an assumption before anything was.
        link_rate: Bytes a second that uploads were carried at; 0 before enough was seen.
        codec_rate: Raw bytes a second that were coded; 0 as well.
    """

    breaker: Literal["closed", "open", "half_open"] = "closed"
    opened: int = 0
    refused: int = 0
    hedges_sent: int = 0
    hedges_won: int = 0
    corrupt_reads: dict[str, int] = {}
    window_bytes: int = 0
    window_shrunk: dict[str, int] = {}
    codec: str = ""
    codec_reason: str = ""
    codec_why: str = ""
    codec_switched: int = 0
    codec_ratio: float = 0.0
    link_rate: float = 0.0
    codec_rate: float = 0.0


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What estimates are made with, as `[prices]` says; 0 is unknown.

    Attributes:
        currency: Of all figures.
        source: Where they are from, and of which day.
        put_1000: Of 1,000 PUT and COPY requests.
        get_1000: Of 1,000 GET and HEAD requests.
        list_1000: Of 1,000 LIST requests.
        gb_month: Of a GB (10^9 bytes) stored for a month.
        gb_egress: Of a GB read from the bucket.
        gpu_hour: Of one GPU for an hour.
    """

    currency: str = ""
    source: str = ""
    put_1000: float = 0
    get_1000: float = 0
    list_1000: float = 0
    gb_month: float = 0
    gb_egress: float = 0
    gpu_hour: float = 0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What one namespace cost and saved on this node since it started. Counts are counted; what a comment calls estimated is not.

    Attributes:
        tenant: Whose; "" for what the node did for nobody in particular, such as collections and looks at the store's health.
        namespace: Its id; "" for a tenant's work that is of none; `other` for all beyond the first 256.
        model: Of the namespace, where this node knows it.
        requests: To the store, by verb.
        sent: Bytes of bodies to the store.
        fetched: Bytes of bodies from the store.
        stored: Bytes alive in the bucket, at the last collection by any node: not of this node, so never to be added up over nodes;
            -1 where none told of this namespace.
        tokens: That readers got, by tier; those of a model on several ranks once.
        read: Bytes that readers got, by tier; blocks of memory as full blocks have them.
        written: Bytes that writers put into memory.
        load_s: Seconds that readers waited for what was not in memory. Copies to a GPU are the engine's, and not in it.
        recompute_s: Estimated: seconds that computing `tokens` would have taken at the rate that `[prices]` states; 0 without one.
        avoided_s: Estimated: `recompute_s` less `load_s`. Negative where loading took longer; 0 without a rate.
        gpus: Ranks of the engines that read it.
        requests_cost: Estimated, in the currency of the prices.
        egress_cost: Estimated.
        month_cost: Estimated: of storing `stored` for a month.
        saved: Estimated: `avoided_s` on `gpus` GPUs.
    """

    tenant: str
    namespace: str
    model: str = ""
    requests: dict[str, int] = {}
    sent: int = 0
    fetched: int = 0
    stored: int = 0
    tokens: dict[str, int] = {}
    read: dict[str, int] = {}
    written: int = 0
    load_s: float = 0
    recompute_s: float = 0
    avoided_s: float = 0
    gpus: int = 1
    requests_cost: float = 0
    egress_cost: float = 0
    month_cost: float = 0
    saved: float = 0
