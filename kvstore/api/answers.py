"""What a node answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstore.api.reports import CollectorStats, Cost, Doomed, Latency, MeshStats, Prices, StoreStats, TierStats, Usage
from kvstore.api.words import Durability, Event, Priority, Target
from kvstore.ids import Link, Namespace


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node answers."""


class Session(Answer, frozen=True, kw_only=True):
    """A session as it stands.

    Attributes:
        version: Grows by one with every commit and rewind; 0 while it is empty.
        tokens: Tokens of KV that this version names.
        blocks: Blocks of it.
        bytes: Stored bytes of those blocks, all shards.
        expires: Seconds since the epoch by the store's clock; 0 means never.
        family: What a session and its forks share.
        branch: Names this session among all that ever had its id; opaque. See `Commit.branch`.
    """

    id: str
    namespace: str
    lane: str
    version: int
    tokens: int
    blocks: int
    bytes: int = 0
    updated: float = 0
    expires: float = 0
    ttl_s: int = 0
    sliding: bool = True
    pinned: bool = False
    labels: dict[str, str] = {}
    family: str = ""
    branch: str = ""


class SessionPage(Answer, frozen=True, kw_only=True):
    """Some sessions, and where to go on; `cursor` is "" on the last page."""

    sessions: list[Session]
    cursor: str = ""


class VersionInfo(Answer, frozen=True, kw_only=True):
    """One version that can still be restored. `tokens` and `blocks` are -1 where the manifest would have to be read to know.

    Attributes:
        prefix_id: Its last block, which names all that it holds: versions of two sessions that end with the same one hold the same.
            "" where it holds nothing, or that is not known.
    """

    version: int
    tokens: int
    blocks: int
    at: float
    current: bool
    prefix_id: str = ""


class Versions(Answer, frozen=True, kw_only=True):
    """Newest first."""

    id: str
    versions: list[VersionInfo]


class SessionManifest(Answer, frozen=True, kw_only=True):
    """Which blocks a version names, in prefix order; `branch` as in `Session`."""

    id: str
    namespace: str
    lane: str
    version: int
    tokens: int
    block_tokens: int
    shards: list[str]
    blocks: list[Link]
    branch: str = ""


class Receipt(Answer, frozen=True, kw_only=True):
    """A commit, acknowledged.

    Attributes:
        version: The session's version that holds it.
        tokens: Tokens it names. Fewer than asked (`cut`) where bytes were neither here nor in the bucket any more.
        durability: What outlives what: `dram` this process's life, `nvme` its kill -9, `bucket` the machine.
        branch: As in `Session`; its first 16 digits where the session has yet to be made, which will do for `Commit.branch`; ""
            where it is a version of a session that the commit did not name.
    """

    id: str
    namespace: str
    lane: str
    version: int
    tokens: int
    blocks: int
    durability: Durability
    cut: bool = False
    branch: str = ""


class RestoreStatus(Answer, frozen=True, kw_only=True):
    """How far a restore has come. Fields not yet known are None while `resolving`.

    Attributes:
        state: `resolving`, `staging`, then `ready` (all of it), `partial` (a shorter prefix: a block was missing, or the deadline
            or the byte budget cut it), `failed`, `cancelled`, or `dropped` (speculative, and there was no room or time for it).
        branch: As in `Session`.
        tokens: Tokens of the version that is restored (cut to `tokens` asked).
        staged_tokens: Tokens whose blocks are in the tier now: what the engine may count on.
        by_tier: Bytes by the tier they were found in.
        eta_ms: Milliseconds it will still take, by what this restore measured so far.
        late_ms: At its end, milliseconds by which it missed its deadline; where the deadline cut it, those that the rest would have
            taken at the rate measured. None where it had no deadline, or ended for another reason.
        error: Why it is not `ready`, in a sentence.
        kind: Of the error where it `failed`, as a problem document has it.
    """

    restore_id: str
    id: str
    state: Literal["resolving", "staging", "ready", "partial", "failed", "cancelled", "dropped"]
    node: str
    tier: Target
    priority: Priority = "interactive"
    namespace: str | None = None
    lane: str | None = None
    version: int | None = None
    branch: str | None = None
    tokens: int | None = None
    staged_tokens: int = 0
    bytes: int | None = None
    staged_bytes: int = 0
    by_tier: dict[str, int] = {}
    eta_ms: float | None = None
    elapsed_ms: float = 0
    late_ms: float | None = None
    error: str = ""
    kind: str = ""


class Hinted(Answer, frozen=True, kw_only=True):
    """What was made of a hint.

    Attributes:
        taken: Whether anything is done about it. Not taken means that too many wait: never an error.
        restore_id: Of `tool_return`: the restore that it began or joined.
    """

    id: str
    event: Event
    taken: bool
    restore_id: str = ""


class NamespaceInfo(Answer, frozen=True, kw_only=True):
    """A namespace that something was stored under.

    Attributes:
        blocks: Blocks that sessions name, as of the last collection that this node knows of; -1 where none told of any.
        bytes: Their stored bytes; -1 likewise.
    """

    namespace: str
    fields: Namespace
    blocks: int = 0
    bytes: int = 0


class Namespaces(Answer, frozen=True, kw_only=True):
    """All of a tenant's."""

    namespaces: list[NamespaceInfo]


class Dropped(Answer, frozen=True, kw_only=True):
    """How much a removal dropped. Blocks go with the next collections.

    Attributes:
        sessions: Dropped by this call; what another one dropped meanwhile is counted there.
        families: Heads that they were in.
        failed: Heads that could not be read, so that their sessions stay: `kvtier fsck` says what is wrong with them.
    """

    sessions: int
    families: int = 0
    failed: int = 0


class Warmed(Answer, frozen=True, kw_only=True):
    """A shared prefix, published.

    Attributes:
        session: The pinned session that keeps it alive.
        restore_id: Of the restore that brings it into this node's memory.
    """

    session: Session
    restore_id: str


class Found(Answer, frozen=True, kw_only=True):
    """What a look-up found.

    Attributes:
        run: Length of the leading run of blocks for which every shard asked is somewhere.
        tiers: For each block of the run, the farthest tier that one of its shards is in: `dram`, `nvme`, `peer`
            (another node) or `bucket`.
    """

    run: int
    tiers: list[str]


class Taken(Answer, frozen=True, kw_only=True):
    """Whether a block that was sent (`PUT /v1/blocks/...`) was kept. Not kept means dropped under load: never an error."""

    taken: bool


class Collected(Answer, frozen=True, kw_only=True):
    """What a collection did, or would do.

    Attributes:
        heads: Families that live.
        evicted: Sessions dropped because the bucket was over its limit; their bytes go with later collections.
        bytes_deleted: Of blocks.
        failed: Keys that the store would not delete; the next collection tries again.
        reaped: Dead heads deleted.
        purged: Noncurrent versions deleted, of a versioned bucket.
        live_bytes: Of blocks that a session names.
        usage: The same by namespace.
        reasons: How many things go, or would go, by reason.
        examples: The first of them, in a dry run.
        warnings: Sentences for an operator.
    """

    epoch: int
    heads: int
    sealed: int
    expired: int
    manifests_kept: int
    manifests_deleted: int
    blocks_kept: int
    blocks_deleted: int
    bytes_deleted: int
    failed: int = 0
    dry_run: bool = False
    evicted: int = 0
    reaped: int = 0
    purged: int = 0
    live_bytes: int = 0
    usage: list[Usage] = []
    reasons: dict[str, int] = {}
    examples: list[Doomed] = []
    warnings: list[str] = []


class Stats(Answer, frozen=True, kw_only=True):
    """A node, as it stands.

    Attributes:
        restores: At work or waiting.
        restored: Restores that ended, by `priority state`.
        lateness: How late restores with a deadline were, by priority.
        held_bytes: Of the caller's memory tier, spared from eviction until their use.
        hints: By event; also `scheduled` (now), `dropped` and `failed`.
        reads: Requests of readers, by `get` or `lookup`, and `complete`, `partial` or `miss`.
        tokens_missed: Tokens that readers asked for and did not get, by reason.
        bucket: How its store is doing.
        restarts: How often each background task failed and was started again.
        mesh: Its part in a mesh; None where it has none.
        events: What it publishes: `batches` and `blocks`; `dropped` moves; `unnamed` blocks; `replays` asked for; `refused`.
        cost: What each tenant and namespace cost and saved.
        prices: What its estimates are made with.
        whole: Whether this tells of the whole node, for which a caller needs the scope `admin`. If not, it tells of the caller's
            tenant: `tiers` has its memory alone, and what is of the whole node is 0 or empty.
    """

    node: str
    version: str
    uptime_s: float
    tiers: dict[str, TierStats]
    leases: int
    queued_bytes: int
    restores: int
    commits: dict[str, int]
    store_requests: dict[str, int]
    store: str
    restored: dict[str, int] = {}
    lateness: dict[str, Latency] = {}
    held_bytes: int = 0
    hints: dict[str, int] = {}
    collector: CollectorStats = CollectorStats()
    reads: dict[str, int] = {}
    tokens_missed: dict[str, int] = {}
    bucket: StoreStats = StoreStats()
    restarts: dict[str, int] = {}
    mesh: MeshStats | None = None
    events: dict[str, int] = {}
    cost: list[Cost] = []
    prices: Prices = Prices()
    whole: bool = True


class Health(Answer, frozen=True, kw_only=True):
    """Whether a node lives and may be sent work. `degraded` names each guarantee it cannot give now; `admin` is told the reason."""

    ok: bool
    node: str
    version: str
    degraded: dict[str, str] = {}


class Done(Answer, frozen=True, kw_only=True):
    """It is done; there is nothing else to say."""
