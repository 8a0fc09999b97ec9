"""Settings: one frozen value per section, and where each field came from.

`kvtier.toml` is overridden by `KVTIER_<SECTION>_<FIELD>` environment variables, those by flags. This module parses; reading files
and the environment is done by the caller, who passes their content in.
"""

from __future__ import annotations

import ipaddress
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args, get_type_hints
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.keys import Keys, check_id

CodecName = Literal["raw", "zstd", "bp-zstd", "auto"]
Durability = Literal["dram", "nvme", "bucket"]

_UNITS: Final = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
_SECONDS: Final = {"": 1, "S": 1, "M": 60, "MIN": 60, "H": 3600, "D": 86400, "W": 604800}
_QUANTITY: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


class Bytes(int):
    """A size in bytes; settings spell it `4GiB`, `500MB` or a plain number."""


class Seconds(int):
    """A duration in seconds; settings spell it `12h`, `30d` or a plain number."""


def _quantity(text: str | int, units: Mapping[str, int], field: str, example: str) -> int:
    match = _QUANTITY.fullmatch(str(text))
    if match is None or match[2].upper() not in units:
        raise Invalid(f"{field} is {text!r}; write it like {example}")
    return int(float(match[1]) * units[match[2].upper()])


def parse_bytes(text: str | int, field: str = "size") -> Bytes:
    """`4GiB`, `500MB`, `1024` as bytes. Raises `Invalid`."""
    return Bytes(_quantity(text, _UNITS, field, "4GiB or 500MB"))


def parse_seconds(text: str | int, field: str = "duration") -> Seconds:
    """`30s`, `12h`, `7d` as seconds. Raises `Invalid`."""
    return Seconds(_quantity(text, _SECONDS, field, "30s, 12h or 7d"))


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
    """

    url: str = ""
    codec: CodecName = "raw"
    durability: Durability = "bucket"
    instance_metadata: bool = False
    timeout: Seconds = Seconds(30)
    inflight: Bytes = Bytes(256 << 20)


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
        listen: Address of the HTTP API; loopback only until there are tokens. Empty: no HTTP.
        socket: Path of the Unix socket for engines on this host. Empty: none.
        id: Shown in answers; by default the host's name.
    """

    listen: str = "127.0.0.1:7878"
    socket: str = ""
    id: str = ""


class PeersSettings(Section, frozen=True, kw_only=True):
    """`[peers]`: the mesh, if this node is part of one.

    Attributes:
        listen: Address at which other nodes get blocks; empty: no mesh. Beyond loopback only with `networks`.
        advertise: Where others reach it (`host:port`), if that is another address.
        directory: `valkey://host:6379`: who is there, and who has what. Credentials: KVTIER_DIRECTORY_USER and _PASSWORD.
        mesh: Name of the mesh; several may share a directory.
        static: Without a directory: the other nodes, as `name=host:port`.
        networks: Whose addresses may connect, such as `10.0.0.0/8`. Between nodes KV is not encrypted, and nobody is asked who they
            are: name only networks in which all is yours.
        placement: Whether a block that no node has is fetched from the bucket by one node for all.
    """

    listen: str = ""
    advertise: str = ""
    directory: str = ""
    mesh: str = "default"
    static: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
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


class Tenant(msgspec.Struct, frozen=True, kw_only=True):
    """`[tenants.<name>]`: which local users may act for a tenant on the Unix socket; empty means any user that can open it."""

    uids: tuple[int, ...] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node is told."""

    store: StoreSettings = StoreSettings()
    dram: DramSettings = DramSettings()
    nvme: NvmeSettings = NvmeSettings()
    node: NodeSettings = NodeSettings()
    lifecycle: LifecycleSettings = LifecycleSettings()
    limits: LimitSettings = LimitSettings()
    prestage: PrestageSettings = PrestageSettings()
    peers: PeersSettings = PeersSettings()
    tenants: dict[str, Tenant] = {}


SECTIONS: Final[dict[str, type[Section]]] = {
    name: kind for name, kind in get_type_hints(Settings).items() if isinstance(kind, type) and issubclass(kind, Section)
}


class Loaded(msgspec.Struct, frozen=True):
    """Settings, and for every `section.field` where its value came from: `default`, a file's name, a variable's name or `flag`."""

    settings: Settings
    origin: dict[str, str]


def load(
    *, toml: str = "", toml_name: str = "kvtier.toml", env: Mapping[str, str] | None = None, flags: Mapping[str, str] | None = None
) -> Loaded:
    """Merge the sources, later ones winning.

    Args:
        toml: Text of the file.
        toml_name: How to call it in errors and provenance.
        env: The process environment; other variables are ignored, an unknown `KVTIER_<SECTION>_...` is refused.
        flags: `section.field` to text.

    Raises:
        Invalid: An unknown section or field (the message names the known ones), or a value that does not fit.
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    origin = {f"{name}.{field}": "default" for name, kind in SECTIONS.items() for field in kind.__struct_fields__}

    def put(section: str, field: str, value: object, source: str) -> None:
        kind = SECTIONS.get(section)
        if kind is None:
            raise Invalid(f"{source}: unknown section [{section}]; known: {', '.join(SECTIONS)}")
        if field not in kind.__struct_fields__:
            raise Invalid(f"{source}: unknown setting {section}.{field}; known: {', '.join(kind.__struct_fields__)}")
        values[section][field] = _convert(get_type_hints(kind)[field], value, f"{section}.{field} ({source})")
        origin[f"{section}.{field}"] = source

    tenants = _from_toml(toml, toml_name, put)
    for variable, text in (env or {}).items():
        section, _, field = variable.removeprefix("KVTIER_").lower().partition("_")
        if variable.startswith("KVTIER_") and section in SECTIONS:
            put(section, field, text, variable)
    for name, text in (flags or {}).items():
        section, _, field = name.partition(".")
        put(section, field, text, "flag")
    settings = msgspec.convert(
        {**{name: kind(**values[name]) for name, kind in SECTIONS.items()}, "tenants": tenants}, Settings, from_attributes=True
    )
    _check(settings)
    return Loaded(settings, origin)


def _from_toml(text: str, name: str, put: Any) -> dict[str, Tenant]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Invalid(f"{name} is not valid TOML: {error}") from None
    tenants = document.pop("tenants", {})
    for section, fields in document.items():
        if not isinstance(fields, dict):
            raise Invalid(f"{name}: {section} stands outside a section; known sections: {', '.join(SECTIONS)}")
        for field, value in fields.items():
            put(section, field, value, name)
    try:
        parsed = msgspec.convert(tenants, dict[str, Tenant])
    except msgspec.ValidationError as error:
        raise Invalid(f"{name}: [tenants] {error}") from None
    return {check_id(tenant, "tenant"): table for tenant, table in parsed.items()}


def _convert(kind: Any, value: object, field: str) -> object:
    if kind is Bytes and isinstance(value, (str, int)):
        return parse_bytes(value, field)
    if kind is Seconds and isinstance(value, (str, int)):
        return parse_seconds(value, field)
    if kind is bool and isinstance(value, str) and value.lower() in {"yes", "no", "on", "off"}:
        return value.lower() in {"yes", "on"}
    if kind == tuple[str, ...] and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        choices = get_args(kind)
        if kind == tuple[str, ...]:
            expected = "a list of texts"
        else:
            expected = f"one of {', '.join(map(str, choices))}" if choices else f"a {kind.__name__}"
        raise Invalid(f"{field} is {value!r}; it must be {expected}") from None


def _check(settings: Settings) -> None:
    if settings.store.url:
        StorageUrl.parse(settings.store.url)
    if settings.dram.size < 1 << 20:
        raise Invalid("dram.size must be at least 1MiB")
    if settings.nvme.path and settings.nvme.size < 1 << 20:
        raise Invalid("nvme.size must be at least 1MiB")
    if not 0 <= settings.lifecycle.history <= 64:
        raise Invalid("lifecycle.history must be 0 to 64")
    if settings.lifecycle.collect_rate < 0:
        raise Invalid("lifecycle.collect_rate must be at least 0")
    if not 0 <= settings.prestage.held <= 90:
        raise Invalid("prestage.held must be 0 to 90 percent")
    if min(settings.prestage.speculative, settings.prestage.waiting, settings.prestage.hints) < 0:
        raise Invalid("prestage.speculative, prestage.waiting and prestage.hints must be at least 0")
    if settings.node.listen:
        parse_address(settings.node.listen)
    _check_peers(settings.peers)


def _check_peers(peers: PeersSettings) -> None:
    if not peers.listen:
        if peers.directory or peers.static:
            raise Invalid("peers.listen is empty, and other nodes are named: say where this one serves them, like 127.0.0.1:7979")
        return
    for field, text in (("peers.listen", peers.listen), ("peers.advertise", peers.advertise or peers.listen)):
        if not parse_address(text, field)[1]:
            raise Invalid(f"{field} is {text!r}; other nodes need a fixed port")
    if bool(peers.directory) == bool(peers.static):
        raise Invalid("peers.listen makes this node part of a mesh: set exactly one of peers.directory and peers.static")
    if peers.directory:
        DirectoryUrl.parse(peers.directory)
    static_peers(peers.static)


def static_peers(texts: Sequence[str]) -> dict[str, tuple[str, int]]:
    """`name=host:port` as name to address. Raises `Invalid`."""
    found: dict[str, tuple[str, int]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not name or not equals or name in found:
            raise Invalid(f"peers.static has {text!r}; write each node once, like b=10.0.0.2:7979")
        found[name] = parse_address(address, f"peers.static {name}")
        if not found[name][1] or not address.isascii():
            raise Invalid(f"peers.static {name} is {address!r}, where nobody can listen; write it like 10.0.0.2:7979")
    if len(set(found.values())) < len(found):
        raise Invalid("peers.static has one address under two names", remedy="give each node an address of its own")
    return found


def parse_address(text: str, field: str = "node.listen") -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises `Invalid`."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise Invalid(f"{field} is {text!r}; write it like 127.0.0.1:7878")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- storage URLs -----------------------------------------------------------------------------------------------------

SCHEMES: Final = ("kvtier+unix", "kvtier", "s3", "memory")
URL_KEYS: Final = (
    "endpoint", "region", "addressing", "ca_bundle", "allow_http", "dram", "nvme", "nvme_path", "codec", "tenant", "durability",
    "device", "device_bytes",
)  # fmt: skip


class StorageUrl(msgspec.Struct, frozen=True, kw_only=True):
    """One string that says where a client stores KV: a node (`kvtier+unix`, `kvtier`), or a bucket that it embeds (`s3`, `memory`).

    Attributes:
        host: Bucket of `s3`, name of `memory`, host of `kvtier`.
        path: Socket path, or key prefix in the bucket.
        port: Of `kvtier`; 7878 by default.
        tenant: Whose KV; `default` unless the URL says otherwise.
        device: Where an embedded node keeps blocks for the engine, as torch spells it (`cuda:0`; `cpu` runs the same code).
        device_bytes: How many bytes of that device's memory.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    endpoint: str = ""
    region: str = ""
    addressing: Literal["path", "virtual", ""] = ""
    ca_bundle: str = ""
    allow_http: bool = False
    dram: Bytes = Bytes(0)
    nvme: Bytes = Bytes(0)
    nvme_path: str = ""
    codec: CodecName | Literal[""] = ""
    tenant: str = "default"
    durability: Durability | Literal[""] = ""
    device: str = ""
    device_bytes: Bytes = Bytes(1 << 30)

    @classmethod
    def parse(cls, text: str) -> StorageUrl:
        """Take a URL apart.

        Raises:
            Invalid: Unknown scheme or key (the message names the known ones), credentials in the URL, or a part that is missing.
        """
        try:
            parts = urlsplit(text)
        except ValueError as error:  # brackets that hold no IPv6 address
            raise Invalid(f"the storage URL is no URL: {error}") from None
        if parts.scheme not in SCHEMES:
            raise Invalid(f"storage URL scheme {parts.scheme!r} is unknown; known: {', '.join(f'{s}://' for s in SCHEMES)}")
        if parts.username is not None or parts.password is not None:
            raise Invalid(
                "a storage URL must not carry credentials: use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        fields: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key not in URL_KEYS:
                raise Invalid(f"storage URL key {key!r} is unknown; known: {', '.join(URL_KEYS)}")
            fields[key] = _convert(hints[key], value, f"storage URL key {key}")
        check_id(fields.get("tenant", "default"), "tenant")
        try:
            port = parts.port or 0
        except ValueError:
            raise Invalid("storage URL port must be 0 to 65535") from None
        url = cls(scheme=parts.scheme, host=parts.hostname or "", port=port, path=unquote(parts.path), **fields)
        return url._checked(parts.netloc)

    def store_url(self) -> str:
        """This bucket as `[store] url` says it: without what describes a node."""
        keys = ("endpoint", "region", "addressing", "ca_bundle")
        query = {key: getattr(self, key) for key in keys if getattr(self, key)} | (
            {"allow_http": "true"} if self.allow_http else {}
        )
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{self.host}{path}" + (f"?{urlencode(query)}" if query else "")

    def _checked(self, netloc: str) -> StorageUrl:
        if "@" in self.endpoint:
            raise Invalid("storage URL key endpoint must not carry credentials")
        if self.device and self.scheme in {"kvtier+unix", "kvtier"}:
            raise Invalid(
                "storage URL key device is for s3:// and memory://: a node has no access to memory of an engine's process"
            )
        if self.scheme == "kvtier+unix":
            if netloc or not self.path.startswith("/") or self.path == "/":
                raise Invalid("kvtier+unix needs the absolute path of a socket: kvtier+unix:///run/kvtier/node.sock")
            return self
        if not self.host:
            raise Invalid(f"{self.scheme}:// needs {'a bucket' if self.scheme == 's3' else 'a name'} after the slashes")
        if self.scheme == "kvtier":
            return msgspec.structs.replace(self, port=self.port or 7878)
        root = self.path.strip("/")
        Keys(root)  # refuses a prefix that could not be a key
        return msgspec.structs.replace(self, host=netloc, port=0, path=root)


def masked(loaded: Loaded) -> dict[str, tuple[str, str]]:
    """`section.field` to (value, origin), for people to read. No setting holds a secret: URLs with credentials are refused."""
    shown: dict[str, tuple[str, str]] = {}
    for name, source in loaded.origin.items():
        section, _, field = name.partition(".")
        shown[name] = (_written(getattr(getattr(loaded.settings, section), field)), source)
    return shown


def _written(value: object) -> str:
    """As a variable or `--set` would spell it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
