"""What a node is told: one frozen value per section."""

from __future__ import annotations

from typing import Final, Literal, get_type_hints

import msgspec

from kvstore.config.quantities import Bytes, Seconds

CodecName = Literal["raw", "zstd", "bp-zstd", "auto"]
Durability = Literal["dram", "nvme", "bucket"]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A section of kvtier.toml."""


class StoreSettings(Section, frozen=True, kw_only=True):
    """`[store]`: the bucket.

    Attributes:
        url: `s3://bucket/prefix?endpoint=...` or `memory://name`; empty means stage 1: no bucket, local tiers only.
        codec: Of block objects: `raw` is fastest on a fast network, `bp-zstd` stores about 31% fewer bytes of bf16 KV, losslessly;
            `auto` picks for each object by what link and codec are measured to carry, and stats say why.
        durability: What a commit through the API promises unless it says otherwise.
        instance_metadata: Whether credentials may come from the cloud's instance-metadata address.
        timeout: Of one request, besides what its size needs.
        inflight: Most bytes in flight to or from the store.
        sse: Whether the store is asked to encrypt what it keeps: `s3` with its own keys, `kms` with one of its key service.
        sse_kms_key: Id or ARN of that key; empty is the bucket's own.
    """

    url: str = ""
    codec: CodecName = "raw"
    durability: Durability = "bucket"
    instance_metadata: bool = False
    timeout: Seconds = Seconds(30)
    inflight: Bytes = Bytes(256 << 20)
    sse: Literal["", "s3", "kms"] = ""
    sse_kms_key: str = ""


class DramSettings(Section, frozen=True, kw_only=True):
    """`[dram]`: the shared-memory arena of each tenant, allocated at start; and the write window of each connection."""

    size: Bytes = Bytes(1 << 30)
    window: Bytes = Bytes(64 << 20)


class NvmeSettings(Section, frozen=True, kw_only=True):
    """`[nvme]`: the local disk tier; off while `path` is empty.

    Attributes:
        path: Its folder.
        size: Payload it may hold.
        admission: `all`, or `second`: a block that no promise rests on is written when it is offered for the second time, which
            spares the disk most writes and costs hits. What durability `nvme` promises is always written.
    """

    path: str = ""
    size: Bytes = Bytes(8 << 30)
    admission: Literal["all", "second"] = "all"


class NodeSettings(Section, frozen=True, kw_only=True):
    """`[node]`: this process.

    Attributes:
        listen: Address of the HTTP API; beyond loopback only with `[auth]` and `[tls]`. Empty: no HTTP.
        socket: Path of the Unix socket for engines on this host. Empty: none.
        id: Shown in answers; by default the host's name.
        events: Where it publishes what its tiers have (`tcp://127.0.0.1:5557`), in the words of vLLM's KV events; empty: nowhere.
            Beyond loopback only for `peers.networks`.
        events_replay: Where subscribers get again what they missed of it.
    """

    listen: str = "127.0.0.1:7878"
    socket: str = ""
    id: str = ""
    events: str = ""
    events_replay: str = ""


class AuthSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[auth]`: who may use the HTTP API. On loopback nobody is asked unless there are tokens.

    Attributes:
        tokens_file: Of access tokens, hashed (`kvtier tokens create`); read again when it changes. Empty: no tokens.
        anonymous: Whether it may listen beyond loopback without tokens, for whoever reaches it.
        plaintext: Whether it may listen beyond loopback without TLS, where something else encrypts.
    """

    tokens_file: str = ""
    anonymous: bool = False
    plaintext: bool = False


class TlsSettings(Section, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tls]`: of the HTTP API; PEM files, read again when they change.

    Attributes:
        cert: Its certificate, and those between it and the authority. Empty: no TLS.
        key: Of the certificate.
        client_ca: Where set, only clients with a certificate of these authorities are let in.
    """

    cert: str = ""
    key: str = ""
    client_ca: str = ""


class PeersSettings(Section, frozen=True, kw_only=True):
    """`[peers]`: the mesh, if this node is part of one.

    Attributes:
        listen: Address at which other nodes get blocks; empty: no mesh. Beyond loopback only with `networks`.
        advertise: Where others reach it (`host:port`), if that is another address.
        directory: `valkey://host:6379`: who is there, and who has what. Credentials: KVTIER_DIRECTORY_USER and _PASSWORD.
        mesh: Name of the mesh; several may share a directory.
        static: Without a directory: the other nodes, as `name=host:port`.
        networks: Whose addresses may connect, such as `10.0.0.0/8`. Without the three files below KV between nodes is not
            encrypted, and nobody is asked who they are: then name only networks in which all is yours.
        tls_cert: PEM file of this node's certificate, which names its id or its address.
        tls_key: PEM file of its key.
        tls_ca: PEM file of the authority that signed every node's; whoever has a certificate of it is a peer.
        placement: Whether a block that no node has is fetched from the bucket by one node for all.
    """

    listen: str = ""
    advertise: str = ""
    directory: str = ""
    mesh: str = "default"
    static: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    tls_ca: str = ""
    placement: bool = True


class LifecycleSettings(Section, frozen=True, kw_only=True):
    """`[lifecycle]`: how long things live.

    Attributes:
        session_ttl: From the last commit or restore; 0 means for ever.
        sliding: Whether commits and restores renew it.
        anonymous_ttl: PERIOD: blocks that no session names live one to two of these once collections run.
        collect_interval: Seconds between collections by this node; 0 means only when asked.
        collect_rate: Most requests per second that a collection sends to the store; 0 means as many as it takes.
        max_skew: How far this host's clock may be from the store's; beyond, nothing is collected from here. 0: whatever.
        max_bytes: Of live blocks in the bucket; above it a collection drops the least useful sessions, never a pinned one. 0: none.
        history: Older versions of a session that stay restorable.
    """

    session_ttl: Seconds = Seconds(7 * 86400)
    sliding: bool = True
    anonymous_ttl: Seconds = Seconds(12 * 3600)
    collect_interval: Seconds = Seconds(0)
    collect_rate: int = 0
    max_skew: Seconds = Seconds(300)
    max_bytes: Bytes = Bytes(0)
    history: int = 8


class LimitSettings(Section, frozen=True, kw_only=True):
    """`[limits]`: every queue and wait is bounded.

    Attributes:
        connections: Engine connections on the Unix socket.
        restores: Restores that run or are remembered.
        restore: The longest a restore works when it names no deadline.
        write_behind: Bytes published and not yet on disk or in the bucket; more is dropped and counted.
        pending_commits: Memory of commits that were promised (`dram`, `nvme`) and wait for the bucket; more are refused, counted.
        drain: How long a stop waits for what was accepted.
    """

    connections: int = 64
    restores: int = 10_000
    restore: Seconds = Seconds(300)
    write_behind: Bytes = Bytes(512 << 20)
    pending_commits: Bytes = Bytes(256 << 20)
    drain: Seconds = Seconds(30)


class PrestageSettings(Section, frozen=True, kw_only=True):
    """`[prestage]`: what is brought into memory ahead of its use.

    Attributes:
        held: Percent of the DRAM tier that may be spared from eviction until its use; speculative restores fill at most half of it.
        hold: For how long, unless the restore says otherwise.
        tool_hold: For how long while a tool runs (`tool_start`).
        recent: What a request used within that time never makes way for a speculative restore.
        speculative: Speculative restores at work at once; they pause while anybody wants bytes now.
        waiting: Speculative restores that may wait; more are dropped.
        inflight: Bytes that a speculative restore asks for at once: what a request may have to share the link with.
        hints: Hints of a tenant that may be under way or scheduled; more are dropped.
    """

    held: int = 50
    hold: Seconds = Seconds(5)
    tool_hold: Seconds = Seconds(120)
    recent: Seconds = Seconds(60)
    speculative: int = 2
    waiting: int = 256
    inflight: Bytes = Bytes(32 << 20)
    hints: int = 1000


class PricesSettings(Section, frozen=True, kw_only=True):
    """`[prices]`: what things cost, for the estimates of `kvtier cost`. 0 is unknown: then there are counts and no sum.

    Attributes:
        currency: What the figures are in.
        source: Whose list they are from, and of which day; shown beside every sum.
        put_1000: Of 1,000 PUT and COPY requests.
        get_1000: Of 1,000 GET and HEAD requests.
        list_1000: Of 1,000 LIST requests. DELETE is taken to be free.
        gb_month: Of a GB (10^9 bytes) that is stored for a month.
        gb_egress: Of a GB that is read from the bucket.
        gpu_hour: Of one GPU for an hour.
        prefill: Tokens that an engine computes in a second, where `models` does not say.
        models: The same for single ones, as `model=tokens`; the name is the namespace's.
    """

    currency: str = "USD"
    source: str = ""
    put_1000: float = 0.0
    get_1000: float = 0.0
    list_1000: float = 0.0
    gb_month: float = 0.0
    gb_egress: float = 0.0
    gpu_hour: float = 0.0
    prefill: float = 0.0
    models: tuple[str, ...] = ()


class EncryptionSettings(Section, frozen=True, kw_only=True):
    """`[encryption]`: what this node stores, in the bucket and on its disk, is sealed before it leaves it.

    Attributes:
        key_file: Master keys (`kvtier keys new`); empty: nothing is sealed.
    """

    key_file: str = ""


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tenants.<name>]`: who may act for a tenant, and how much it may have. 0 is no limit.

    Attributes:
        uids: Which local users may act for it on the Unix socket; empty means the node's own.
        max_bytes: Stored in the bucket, as the last collection counted them and this node has added since.
        max_sessions: In the bucket.
        requests: Calls per second over HTTP and the socket; twice as many may come at once. Blocks read or written through shared
            memory are none.
    """

    uids: tuple[int, ...] = ()
    max_bytes: Bytes = Bytes(0)
    max_sessions: int = 0
    requests: float = 0.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node is told."""

    store: StoreSettings = StoreSettings()
    dram: DramSettings = DramSettings()
    nvme: NvmeSettings = NvmeSettings()
    node: NodeSettings = NodeSettings()
    auth: AuthSettings = AuthSettings()
    tls: TlsSettings = TlsSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    limits: LimitSettings = LimitSettings()
    prestage: PrestageSettings = PrestageSettings()
    peers: PeersSettings = PeersSettings()
    prices: PricesSettings = PricesSettings()
    encryption: EncryptionSettings = EncryptionSettings()
    tenants: dict[str, Tenant] = {}


SECTIONS: Final[dict[str, type[Section]]] = {
    name: kind for name, kind in get_type_hints(Settings).items() if isinstance(kind, type) and issubclass(kind, Section)
}
