"""What a node is asked."""

from __future__ import annotations

import msgspec

from kvstore.api.words import Durability, Event, Priority, Target, Tier
from kvstore.ids import Link, Namespace


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a face hands to a node."""


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
        branch: The session that `base_version` is a version of, as `Session.branch` or `Receipt.branch` says it. Where the id has
            come to mean another one, whose versions are counted from 1 as well, the answer is `Gone`; where a promise is not yet
            kept, `Unavailable`, kind `promise_pending`. "" where the caller does not know.
        base_prefix_id: The last block of `base_version`, as the caller knows it; "" where it does not. Where that version ends
            with another one, and would be replaced, the answer is `Conflict`: a promise that could not be kept leaves its number
            to somebody else's version.
        blocks: The whole prefix, in order; only the last block may be partial.
        shards: Which shards the blocks were published for; every block has all of them.
        durability: What the answer promises; the node's default where None.
        write_id: 32 hex digits that make a retry of this commit the same commit; "" where the caller does not retry.
    """

    base_version: int
    branch: str = ""
    base_prefix_id: str = ""
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
