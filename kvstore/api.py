"""The calls of a node: one table of requests, answers and routes, shared by every face.

HTTP routes, the Unix socket, the embedded node, the clients and schema/openapi.yaml all follow `CALLS`. Path and query parameters
are fields of the request of the same name. Block bytes travel beside this table: `/v1/blocks/...` over HTTP, shared memory
on one host (:mod:`kvstore.wire`).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from kvstore.ids import Link, Namespace

Durability = Literal["dram", "nvme", "bucket"]
Tier = Literal["dram", "nvme", "bucket"]
Target = Literal["device", "dram", "nvme", "bucket"]  # of a restore
Priority = Literal["interactive", "speculative"]
Event = Literal["tool_start", "tool_return", "resume_at", "final"]
MAX_BLOCKS: Final = 65_536  # of one session, as requests may name them
MAX_TOKENS: Final = 16_777_216
MAIN: Final = "main"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a face hands to a node."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a node answers."""


class OfSession(Request, frozen=True, kw_only=True):
    """A request about one session.

    Attributes:
        id: The session id, as the user knows it.
        namespace: Namespace id; by default the only one that this id holds.
        lane: Which of parallel sub-agents under one id; by default the only one.
    """

    id: str
    namespace: str = ""
    lane: str = ""


# --- answers ----------------------------------------------------------------------------------------------------------


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
    """One version that can still be restored. `tokens` and `blocks` are -1 where the manifest would have to be read to know."""

    version: int
    tokens: int
    blocks: int
    at: float
    current: bool


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
        branch: As in `Session`; "" where the session has yet to be made.
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
        blocks: Blocks that sessions name, as of the last collection that this node knows of.
        bytes: Their stored bytes.
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
        tiers: For each block of the run, the farthest tier that one of its shards is in: `dram`, `nvme` or `bucket`.
    """

    run: int
    tiers: list[str]


class Taken(Answer, frozen=True, kw_only=True):
    """Whether a block that was sent (`PUT /v1/blocks/...`) was kept. Not kept means dropped under load: never an error."""

    taken: bool


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
        evictions: Blocks that made room.
        dropped: Blocks not taken, for want of room or time, or because the tier failed.
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
    reads: Latency = Latency()


class StoreStats(msgspec.Struct, frozen=True, kw_only=True):
    """How the bucket's store is doing.

    Attributes:
        breaker: `closed`: requests are sent. `open`: the store failed, and is left alone. `half_open`: a probe is under way.
        opened: How often it opened.
        refused: Requests not sent because of it.
        hedges_sent: Reads asked for a second time because they were slow.
        hedges_won: Those that were answered first.
        corrupt_reads: Registers and manifests that were not what they claim to be, by folder; each was read once more.
    """

    breaker: Literal["closed", "open", "half_open"] = "closed"
    opened: int = 0
    refused: int = 0
    hedges_sent: int = 0
    hedges_won: int = 0
    corrupt_reads: dict[str, int] = {}


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


class Health(Answer, frozen=True, kw_only=True):
    """Whether a node lives and may be sent work. `degraded` names each guarantee it cannot give now, with the reason."""

    ok: bool
    node: str
    version: str
    degraded: dict[str, str] = {}


class Done(Answer, frozen=True, kw_only=True):
    """It is done; there is nothing else to say."""


# --- requests ---------------------------------------------------------------------------------------------------------


class Restore(OfSession, frozen=True, kw_only=True):
    """Bring a session's blocks into a tier.

    Attributes:
        model: Instead of `namespace`: the model id of one of the session's namespaces.
        version: Which version; the current one by default.
        tokens: Only the blocks whose tokens these begin with, full ones; empty means all.
        tier: Where to; `bucket` only resolves.
        deadline_ms: What is not staged by then is left out; 0 means the node's own limit.
        max_bytes: No more than that is staged, in prefix order; 0 means no limit.
        priority: A speculative restore waits while anybody wants bytes now, evicts nothing that was used lately, may be dropped.
        hold_ms: How long what is staged in `dram` is spared from eviction, unless it is used before; the node's default where None.
        shards: Which shards; those of the manifest by default.
    """

    model: str = ""
    version: int | None = None
    tokens: list[int] = []
    tier: Target = "dram"
    deadline_ms: int = 0
    max_bytes: int = 0
    priority: Priority = "interactive"
    hold_ms: int | None = None
    shards: tuple[str, ...] = ()


class Hint(OfSession, frozen=True, kw_only=True):
    """What is about to happen to a session. Advice: it may be dropped, is not kept over a restart, and changes no answer.

    Attributes:
        event: `tool_start`: its turn waits for a tool; what is in memory of it is spared from eviction for a while. `tool_return`:
            the turn goes on; its blocks are staged now. `resume_at`: it goes on at a time that is known; its blocks are staged
            shortly before. `final`: it is done; its blocks are the first to make way.
        at: Of `resume_at`: when, in seconds since the epoch by the node's clock ...
        in_s: ... or in seconds from now. Exactly one of the two.
    """

    event: Event
    at: float | None = None
    in_s: float | None = None


class OfRestore(Request, frozen=True, kw_only=True):
    """A request about one restore."""

    restore_id: str


class GetRestore(OfRestore, frozen=True, kw_only=True):
    """How far a restore has come; `wait_ms` lets the answer wait that long for its end, so that nobody has to poll."""

    wait_ms: int = 0


class ListSessions(Request, frozen=True, kw_only=True):
    """Sessions whose id starts with `prefix`, in the order of their keys."""

    prefix: str = ""
    cursor: str = ""
    limit: int = 100


class GetManifest(OfSession, frozen=True, kw_only=True):
    """The blocks of a version; 0 means the current one."""

    version: int = 0


class CreateSession(OfSession, frozen=True, kw_only=True):
    """A new, empty session.

    Attributes:
        ttl_s: Seconds without renewal until it expires; None takes the node's default, 0 means never.
    """

    ttl_s: int | None = None
    sliding: bool | None = None
    labels: dict[str, str] = {}


class Commit(OfSession, frozen=True, kw_only=True):
    """Make these blocks the session's next version.

    Attributes:
        base_version: The version it was built on; 0 creates the session where the name is free.
        branch: The session that `base_version` is a version of, as `Session.branch` says it. Where the id has come to mean another
            one, whose versions are counted from 1 as well, the answer is `Gone`. "" where the caller does not know.
        blocks: The whole prefix, in order; only the last block may be partial.
        shards: Which shards the blocks were published for; every block has all of them.
        durability: What the answer promises; the node's default where None.
        write_id: 32 hex digits that make a retry of this commit the same commit; "" where the caller does not retry.
    """

    base_version: int
    branch: str = ""
    blocks: list[Link]
    shards: tuple[str, ...] = ("t0of1.p0of1.g0",)
    ttl_s: int | None = None
    labels: dict[str, str] = {}
    durability: Durability | None = None
    write_id: str = ""


class Fork(OfSession, frozen=True, kw_only=True):
    """A second session that begins as the first one's version; no blocks move."""

    as_: str = msgspec.field(name="as")
    version: int = 0
    ttl_s: int | None = None


class Warm(OfSession, frozen=True, kw_only=True):
    """Publish a session's version as a prefix for everyone in the tenant: a pinned fork that never expires, under `warm/`.

    Attributes:
        as_: What it is called after `warm/`; the session's id by default.
        version: Which version; 0 means the current one.
        tokens: Only the whole blocks within that many tokens; all by default.
    """

    as_: str = msgspec.field(name="as", default="")
    version: int = 0
    tokens: int | None = None


class Rewind(OfSession, frozen=True, kw_only=True):
    """Back to an earlier version, or to fewer tokens (floored to a block boundary). It is a new version. Exactly one of the two."""

    version: int | None = None
    tokens: int | None = None


class Touch(OfSession, frozen=True, kw_only=True):
    """Renew: it now expires `ttl_s` from now; None keeps its TTL; 0 means never."""

    ttl_s: int | None = None


class PutNamespace(Request, frozen=True, kw_only=True):
    """Make a namespace's fields known under its id."""

    namespace: str
    fields: Namespace


class OfNamespace(Request, frozen=True, kw_only=True):
    """A request about one namespace, by its id."""

    namespace: str


class OfTenant(Request, frozen=True, kw_only=True):
    """A request about all that a tenant has. It must be the caller's own: it is said so that nobody asks for this by accident."""

    tenant: str


class Lookup(Request, frozen=True, kw_only=True):
    """How much of a chain is somewhere, without moving a byte.

    Attributes:
        reach: The farthest tier to ask.
        deadline_ms: A look-up never waits longer; what is unknown by then is a miss.
    """

    namespace: str
    prefix_ids: list[str]
    shards: tuple[str, ...] = ("t0of1.p0of1.g0",)
    reach: Tier = "bucket"
    deadline_ms: int = 250


class Collect(Request, frozen=True, kw_only=True):
    """Collect garbage once.

    Attributes:
        dry_run: Change nothing; say what would go, and why.
        now: Advance the epoch twice first, so that what is unnamed now is deleted at once.
        reap: Also delete the heads of families that were dead for a week.
        purge_versions: Also delete noncurrent versions, in a versioned bucket.
    """

    dry_run: bool = False
    now: bool = False
    reap: bool = False
    purge_versions: bool = False


class Nothing(Request, frozen=True, kw_only=True):
    """A request without parameters."""


class Call(msgspec.Struct, frozen=True):
    """One call: how it is named, routed, asked and answered. `name` is also the method of :class:`kvstore.service.Service`."""

    name: str
    method: str
    path: str
    request: type[Request]
    answer: type[Answer]
    about: str
    status: int = 200


_S = "/v1/sessions/{id}"
CALLS: Final[tuple[Call, ...]] = (
    Call("restore", "POST", f"{_S}/restore", Restore, RestoreStatus, "Bring a session's blocks into a tier; answers at once.", 202),
    Call("get_restore", "GET", "/v1/restores/{restore_id}", GetRestore, RestoreStatus, "How far a restore has come."),
    Call(
        "cancel_restore", "DELETE", "/v1/restores/{restore_id}", OfRestore, RestoreStatus, "Stop a restore; what is staged stays."
    ),
    Call("hint", "POST", f"{_S}/hint", Hint, Hinted, "Say what is about to happen to a session; answers at once.", 202),
    Call("list_sessions", "GET", "/v1/sessions", ListSessions, SessionPage, "Sessions by id prefix, in pages."),
    Call("get_session", "GET", _S, OfSession, Session, "One session."),
    Call("versions", "GET", f"{_S}/versions", OfSession, Versions, "The versions that can still be restored."),
    Call("manifest", "GET", f"{_S}/manifest", GetManifest, SessionManifest, "The blocks of a version."),
    Call("create_session", "PUT", _S, CreateSession, Session, "Create an empty session.", 201),
    Call("commit", "POST", f"{_S}/commit", Commit, Receipt, "Make published blocks the session's next version."),
    Call("fork", "POST", f"{_S}/fork", Fork, Session, "A second session that begins as this one.", 201),
    Call("warm", "POST", f"{_S}/warm", Warm, Warmed, "Publish it as a pinned prefix for everyone in the tenant.", 201),
    Call("rewind", "POST", f"{_S}/rewind", Rewind, Session, "Back to an earlier version or fewer tokens."),
    Call("touch", "POST", f"{_S}/touch", Touch, Session, "Renew the time to live."),
    Call("pin", "POST", f"{_S}/pin", OfSession, Session, "Never expire or evict it."),
    Call("unpin", "POST", f"{_S}/unpin", OfSession, Session, "Let it expire again."),
    Call("delete_session", "DELETE", _S, OfSession, Done, "Delete it; its blocks go with the next collections."),
    Call("list_namespaces", "GET", "/v1/namespaces", Nothing, Namespaces, "What is stored for which model."),
    Call("put_namespace", "PUT", "/v1/namespaces/{namespace}", PutNamespace, Done, "Make a namespace's fields known."),
    Call("delete_namespace", "DELETE", "/v1/namespaces/{namespace}", OfNamespace, Dropped, "Drop every session of a namespace."),
    Call("delete_tenant", "DELETE", "/v1/tenants/{tenant}", OfTenant, Dropped, "Drop every session of the caller's tenant."),
    Call("lookup", "POST", "/v1/lookup", Lookup, Found, "How much of a chain is somewhere."),
    Call("collect", "POST", "/v1/collect", Collect, Collected, "Collect garbage once."),
    Call("stats", "GET", "/v1/stats", Nothing, Stats, "Tiers, queues, requests."),
    Call("health", "GET", "/healthz", Nothing, Health, "Whether the process lives."),
    Call("ready", "GET", "/readyz", Nothing, Health, "Whether it may be sent work, and what is degraded."),
)
BY_NAME: Final = {call.name: call for call in CALLS}
