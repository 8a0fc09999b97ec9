"""The one place that spells object keys.

Layout under the root (schema/FORMAT.md, section 5)::

    format.json  epoch  keyring  keys/<tenant>  hints/{collect,usage}
    namespaces/<namespace>.json
    blocks/<namespace>/<shard>/<prefix_id>/<gen>
    heads/<tenant>/<family>
    manifests/<tenant>/<family>/<gen>-<id>
    names/<tenant>/<name>/<namespace>/<lane>

Tenants and session ids are any non-empty unicode; they are escaped so that distinct ids never share a key, and none can leave
its folder.
"""

from __future__ import annotations

import re
from typing import Final, Protocol
from urllib.parse import quote, unquote

import msgspec
from blake3 import blake3

from kvstore.errors import Invalid
from kvstore.ids import NamespaceId, PrefixId, is_hex_id

MAX_ID_BYTES: Final = 512
MAX_SEGMENT: Final = 255
MAX_KEY: Final = 1024
MAX_GEN: Final = 9_999_999_999
_DIGITS: Final = 10
_ROOT: Final = re.compile(r"[A-Za-z0-9._~=+-]+(/[A-Za-z0-9._~=+-]+)*")


def check_id(text: str, field: str) -> str:
    """A tenant or session id from outside, unchanged.

    Raises:
        Invalid: It is empty, too long, not encodable, has control characters, or a path part that is `.` or `..` before or after
            one percent-decoding.
    """
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Invalid(f"{field} must be valid unicode (it holds a lone surrogate)") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise Invalid(f"{field} must be 1 to {MAX_ID_BYTES} bytes of UTF-8; it has {size}")
    for form in (text, unquote(text, errors="replace")):
        if any(ord(c) < 0x20 or 0x7F <= ord(c) < 0xA0 for c in form):
            raise Invalid(f"{field} must not contain control characters")
        if any(part in {".", ".."} for part in form.split("/")):
            raise Invalid(f"{field} must not have a path part '.' or '..'")
    return text


def escape(text: str) -> str:
    """One key segment for an id: unreserved ASCII as it is, other bytes as %XX; `=` and 64 hex digits where that is too long.

    `=` cannot come from the first form (it would be %3D), so the two forms never meet. A segment is never `.` or `..`.
    """
    segment = quote(text, safe="")
    if segment.strip(".") == "":  # "..." is legal as an id, and some stores clean dots away
        segment = segment.replace(".", "%2E")
    return segment if len(segment) <= MAX_SEGMENT else "=" + blake3(text.encode()).hexdigest()


def gen_text(gen: int) -> str:
    """A generation, ten digits, so that keys sort by age."""
    if not 0 <= gen <= MAX_GEN:
        raise Invalid(f"generation {gen} is out of range")
    return f"{gen:0{_DIGITS}d}"


def parse_gen(text: str) -> int | None:
    """The inverse of `gen_text`; None for anything else."""
    return int(text) if len(text) == _DIGITS and text.isascii() and text.isdigit() else None


class BlockKey(msgspec.Struct, frozen=True):
    """A block object's key, taken apart."""

    namespace: NamespaceId
    shard: str
    prefix_id: PrefixId
    gen: int


class Veil(Protocol):
    """How a sealed root spells what must not be read, nor guessed, off its keys. Deterministic: look-ups are by name."""

    def block(self, namespace: NamespaceId, shard: str, prefix_id: PrefixId) -> str:
        """64 hex digits in a PrefixId's place."""
        ...

    def session(self, tenant: str, name: str) -> str:
        """A segment in a session id's place; `tenant` is its segment."""
        ...

    def lane(self, place: str, lane: str) -> str:
        """A segment in a lane's place, below the key `place`."""
        ...

    def lane_of(self, place: str, segment: str) -> str | None:
        """The inverse of `lane`; None for a foreign segment."""
        ...


class Keys:
    """Keys under one root, such as `prod/kv` (or "" for the whole bucket).

    Args:
        root: Its prefix.
        veil: Of a sealed root; see `veiled`.
    """

    def __init__(self, root: str = "", veil: Veil | None = None) -> None:
        if root and (not _ROOT.fullmatch(root) or any(part in {".", ".."} for part in root.split("/")) or len(root) > MAX_SEGMENT):
            raise Invalid(
                f"store prefix {root!r} must be '/'-separated parts of letters, digits and ._~=+-, without '.' or '..' parts"
            )
        self.root, self._veil = f"{root}/" if root else "", veil
        self.format = f"{self.root}format.json"
        self.epoch = f"{self.root}epoch"
        self.keyring = f"{self.root}keyring"
        self.collect_hint = f"{self.root}hints/collect"
        self.usage_hint = f"{self.root}hints/usage"
        self.namespaces = f"{self.root}namespaces/"
        self.blocks = f"{self.root}blocks/"
        self._sealed = (self.blocks, f"{self.root}manifests/", f"{self.root}names/")

    def veiled(self, veil: Veil) -> Keys:
        """Keys of the same root, sealed."""
        return Keys(self.root.removesuffix("/"), veil)

    @property
    def plain(self) -> bool:
        """Whether names of sessions and blocks can be read off the keys."""
        return self._veil is None

    def seals(self, key: str) -> bool:
        """Whether the body of that key is sealed in a sealed root."""
        return key.startswith(self._sealed)

    def bound(self, key: str) -> str:
        """What a sealed body is bound to: its key under the root; a block's without the generation, which a copy changes."""
        return (key.rpartition("/")[0] if key.startswith(self.blocks) else key).removeprefix(self.root)

    def tenant_keys(self, escaped_tenant: str) -> str:
        """Register of a tenant's data keys."""
        return self._key("keys", escaped_tenant)

    def all_tenant_keys(self) -> str:
        """List prefix of those of all tenants."""
        return self._key("keys", "")

    def _key(self, *segments: str) -> str:
        key = self.root + "/".join(segments)
        if len(key) > MAX_KEY:
            raise Invalid(
                f"the object key would be {len(key)} bytes, more than {MAX_KEY}: shorten the session id, tenant or store prefix"
            )
        return key

    def probe(self, token: str) -> str:
        """A throw-away key for the start-up probe."""
        return self._key("probe", token)

    def namespace(self, namespace: NamespaceId) -> str:
        """Where a namespace's fields are kept readable."""
        return self._key("namespaces", f"{namespace}.json")

    def block(self, namespace: NamespaceId, shard: str, prefix_id: PrefixId, gen: int) -> str:
        """A block object."""
        return self._key("blocks", namespace, shard, self._block(namespace, shard, prefix_id), gen_text(gen))

    def block_gens(self, namespace: NamespaceId, shard: str, prefix_id: PrefixId) -> str:
        """List prefix of all generations of a block."""
        return self._key("blocks", namespace, shard, self._block(namespace, shard, prefix_id), "")

    def _block(self, namespace: NamespaceId, shard: str, prefix_id: PrefixId) -> str:
        return prefix_id if self._veil is None else self._veil.block(namespace, shard, prefix_id)

    def namespace_blocks(self, namespace: NamespaceId) -> str:
        """List prefix of all blocks of a namespace."""
        return self._key("blocks", namespace, "")

    def parse_block(self, key: str) -> BlockKey | None:
        """The inverse of `block`; None for a foreign key. In a sealed root `prefix_id` is what stands in its place."""
        parts = key.removeprefix(self.blocks).split("/")
        gen = parse_gen(parts[-1])
        if not key.startswith(self.blocks) or len(parts) != 4 or gen is None or not (is_hex_id(parts[0]) and is_hex_id(parts[2])):
            return None
        return BlockKey(NamespaceId(parts[0]), parts[1], PrefixId(parts[2]), gen)

    def heads(self, tenant: str | None = None) -> str:
        """List prefix of the heads of a tenant, or of all."""
        return self._key("heads", "") if tenant is None else self._key("heads", escape(tenant), "")

    def head(self, tenant: str, family: str) -> str:
        """A family's register."""
        return self._key("heads", escape(tenant), family)

    def parse_head(self, key: str) -> tuple[str, str] | None:
        """(escaped tenant, family) of a head's key; None for a foreign key."""
        parts = key.removeprefix(self.heads()).split("/")
        return (parts[0], parts[1]) if key.startswith(self.heads()) and len(parts) == 2 else None

    def manifests(self) -> str:
        """List prefix of all manifests."""
        return self._key("manifests", "")

    def manifest(self, tenant: str, family: str, name: str) -> str:
        """A manifest, `name` being `<gen>-<id>`."""
        return self._key("manifests", escape(tenant), family, name)

    def manifest_of(self, escaped_tenant: str, family: str, name: str) -> str:
        """As `manifest`, from a tenant that came out of a key."""
        return self._key("manifests", escaped_tenant, family, name)

    def parse_manifest(self, key: str) -> int | None:
        """Generation of a manifest's key; None for a foreign key."""
        parts = key.removeprefix(self.manifests()).split("/")
        return parse_gen(parts[-1].partition("-")[0]) if key.startswith(self.manifests()) and len(parts) == 3 else None

    def names(self, tenant: str | None = None) -> str:
        """List prefix of the session names of a tenant, or of all."""
        return self._key("names", "") if tenant is None else self._key("names", escape(tenant), "")

    def name(self, tenant: str, name: str, namespace: NamespaceId, lane: str) -> str:
        """Which family and branch a session id means."""
        if self._veil is None:
            return self._key("names", escape(tenant), escape(name), namespace, lane)
        place = "/".join(("names", escape(tenant), self._veil.session(escape(tenant), name), namespace))
        return self._key(place, self._veil.lane(place, lane))

    def name_lanes(self, tenant: str, name: str) -> str:
        """List prefix of what one session id holds: its namespaces and lanes."""
        segment = escape(name) if self._veil is None else self._veil.session(escape(tenant), name)
        return self._key("names", escape(tenant), segment, "")

    def parse_name(self, key: str) -> tuple[str, NamespaceId, str] | None:
        """(segment of the name, namespace, lane) of a name's key; None for a foreign key."""
        parts = key.removeprefix(self.root).split("/")
        if len(parts) != 5 or parts[0] != "names":
            return None
        lane = parts[4] if self._veil is None else self._veil.lane_of("/".join(parts[:4]), parts[4])
        return None if lane is None else (parts[2], NamespaceId(parts[3]), lane)


def manifest_name(gen: int, token: str) -> str:
    """`<gen>-<id>`."""
    return f"{gen_text(gen)}-{token}"
