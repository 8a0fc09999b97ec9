"""Names by content: what a block of KV means (`PrefixId`), where it may be reused (`Namespace`), which shard it is.

A `PrefixId` is identity, used for look-up; a `Digest` is integrity, checked on bytes. KV bytes for the same tokens legitimately
differ between kernels, batch shapes and GPUs, so bytes are never the address. See schema/FORMAT.md, sections 1 to 3.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any, Literal, NewType

import msgspec
import numpy as np
from blake3 import blake3

from kvstore.errors import Invalid

NamespaceId = NewType("NamespaceId", str)  # 64 hex digits
PrefixId = NewType("PrefixId", str)  # 64 hex digits
Digest = NewType("Digest", str)  # 64 hex digits

MAX_BLOCK_TOKENS = 8192
MAX_GROUPS = 64
MAX_TEXT_BYTES = 4096  # of one field of a namespace
MAX_EXTRA_BYTES = 4096  # of one extra key: a hash, an adapter's name, a salt
DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "U32": 4}
_HEX64 = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"t(\d{1,4})of(\d{1,4})\.p(\d{1,4})of(\d{1,4})\.g(\d{1,2})")


def canonical_json(value: Mapping[str, Any] | Sequence[Any] | str | float | bool | None) -> str:
    """JSON with one spelling for one value (RFC 8785): sorted keys, no spaces, numbers as ECMAScript prints them.

    So 10000.0 is `10000`: a configuration hashes alike wherever it was read.

    Raises:
        Invalid: The value is not JSON (a NaN, a key that is no string, an object of another kind).
    """
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise Invalid("canonical JSON: every key must be a string")
        order = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{canonical_json(key)}:{canonical_json(value[key])}" for key in order) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(canonical_json, value)) + "]"
    if isinstance(value, float):
        return _ecma_number(value)
    if value is None or isinstance(value, bool | int | str):
        return msgspec.json.encode(value).decode()
    raise Invalid(f"canonical JSON: a {type(value).__name__} has no spelling")


def _ecma_number(value: float) -> str:
    if not math.isfinite(value):
        raise Invalid("canonical JSON: numbers must be finite")
    if value.is_integer() and abs(value) < 1e16:
        return str(int(value))
    shortest = Decimal(repr(value))
    if 1e-6 <= abs(value) < 1e21:
        return format(shortest, "f")
    mantissa, exponent = f"{shortest.normalize():e}".split("e")
    return f"{mantissa}e{int(exponent):+d}"


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers that share one attention kind, hence one rule for which blocks a prefix needs.

    Attributes:
        kind: `full` needs every block below the prefix length L; `window` those that cover [L-window, L); `state` (a recurrent
            or convolutional state) the one that ends at exactly L.
        window: In tokens; 0 unless `kind` is `window`.
        layers: Indices of the model's layers in this group, ascending; empty means all of them.
    """

    kind: Literal["full", "window", "state"] = "full"
    window: int = 0
    layers: tuple[int, ...] = ()


class Namespace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True):
    """Everything that must match before a single byte of KV is reused. Change one field alone: 0 hits.

    An unknown field in its JSON is refused, not ignored: it may be the very thing that must match.

    Attributes:
        model: Model id, such as `meta-llama/Llama-3.1-8B`.
        revision: Revision or digest of the weights. Never empty: weights that move under one name would serve wrong KV.
        layers: Number of layers whose KV is stored.
        kv_heads: KV heads of the whole model (not of a shard); 0 for MLA and opaque layouts.
        head_dim: Elements per head.
        mla_rank: Latent rank (`kv_lora_rank`) where attention is MLA; then `kv_heads` is 0.
        mla_rope: Elements of the decoupled RoPE key that MLA stores beside the latent.
        page_bytes: For opaque layouts: bytes of one layer of one block of one shard. 0 for canonical.
        rope: The model's RoPE configuration as `canonical_json` spells it, or "" where it has none.
        quantization: Of the weights, such as `none`, `awq`, `fp8`.
        lora: Adapter id and its digest, or "".
        dtype: Of the KV tensors, in safetensors' spelling.
        layout: `canonical` ([tokens, kv_heads, head_dim] per tensor), or an engine's opaque one, `vllm-0.32/cpu-amx/bs128`.
        block_tokens: Tokens per block.
        fidelity: `lossless`, or the name of a lossy codec.
        tenant: Whose it is: tenants never share a block.
        identity: `tokens` (PrefixIds chain over token ids), or the name of an engine's own hash scheme.
        groups: Attention groups; they partition the layers.
    """

    model: str
    revision: str
    layers: int
    kv_heads: int = 0
    head_dim: int = 0
    mla_rank: int = 0
    mla_rope: int = 0
    page_bytes: int = 0
    rope: str = ""
    quantization: str = "none"
    lora: str = ""
    dtype: str = "BF16"
    layout: str = "canonical"
    block_tokens: int = 256
    fidelity: str = "lossless"
    tenant: str = "default"
    identity: str = "tokens"
    groups: tuple[Group, ...] = (Group(),)

    def __post_init__(self) -> None:
        """Refuse what could not be stored or would be ambiguous; the message names the field."""
        for field in ("model", "revision", "tenant", "layout", "fidelity", "identity", "quantization"):
            if not getattr(self, field):
                raise Invalid(f"namespace.{field} must not be empty")
        for field, value in msgspec.structs.asdict(self).items():
            if isinstance(value, str):
                _check_text(f"namespace.{field}", value)
        if self.dtype not in DTYPE_BYTES:
            raise Invalid(f"namespace.dtype {self.dtype!r} is unknown; known: {', '.join(sorted(DTYPE_BYTES))}")
        if not 1 <= self.layers <= 4096:
            raise Invalid(f"namespace.layers is {self.layers}; it must be 1 to 4096")
        if not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise Invalid(f"namespace.block_tokens is {self.block_tokens}; it must be 1 to {MAX_BLOCK_TOKENS}")
        self._check_shape()
        self._check_groups()

    def _check_shape(self) -> None:
        dimensions = (self.kv_heads, self.head_dim, self.mla_rank, self.mla_rope)
        if min(*dimensions, self.page_bytes) < 0 or max(dimensions) > 1 << 16 or self.page_bytes > 1 << 30:
            raise Invalid("namespace: a dimension is out of bounds (0 to 65,536; page_bytes 0 to 1 GiB)")
        shapes = (self.kv_heads > 0 and self.head_dim > 0, self.mla_rank > 0, self.page_bytes > 0)
        alone = (self.kv_heads == 0 or shapes[0]) and (self.mla_rope == 0 or shapes[1])
        if shapes.count(True) != 1 or not alone or (self.page_bytes > 0) == (self.layout == "canonical"):
            raise Invalid(
                "namespace needs exactly one shape: kv_heads with head_dim, or mla_rank (both with layout 'canonical'), "
                "or page_bytes with an opaque layout"
            )

    def _check_groups(self) -> None:
        if not 1 <= len(self.groups) <= MAX_GROUPS:
            raise Invalid(f"namespace.groups must hold 1 to {MAX_GROUPS} groups")
        for group in self.groups:
            if (group.window > 0) != (group.kind == "window") or not 0 <= group.window < 1 << 32:
                raise Invalid("namespace.groups: a window group needs window > 0, and only it may have one")
            if list(group.layers) != sorted(set(group.layers)):
                raise Invalid("namespace.groups: layers must be in ascending order, each once")
        named = sorted(layer for group in self.groups for layer in group.layers)
        if named != list(range(self.layers)) and not (len(self.groups) == 1 and not named):
            raise Invalid("namespace.groups: the groups must partition the layers, each layer in exactly one")

    @cached_property
    def id(self) -> NamespaceId:
        """BLAKE3-256 of the canonical JSON, in hex."""
        return NamespaceId(blake3(self.canonical_json()).hexdigest())

    def canonical_json(self) -> bytes:
        """UTF-8 JSON with sorted keys, no spaces and every field present: the bytes that are hashed and stored."""
        return msgspec.json.encode(self, order="sorted")

    def group_layers(self, group: int) -> tuple[int, ...]:
        """Layer indices of a group, ascending."""
        return self.groups[group].layers or tuple(range(self.layers))


class Shard(msgspec.Struct, frozen=True, kw_only=True, order=True, dict=True):
    """One engine rank's part of a block: tensor-parallel rank, pipeline stage, attention group.

    Not part of the namespace: all shards share PrefixIds and differ in the path, so that one manifest serves all ranks.
    """

    rank: int = 0
    ranks: int = 1
    stage: int = 0
    stages: int = 1
    group: int = 0

    def __post_init__(self) -> None:
        """Refuse ranks outside their size."""
        if not (0 <= self.rank < self.ranks <= 4096 and 0 <= self.stage < self.stages <= 4096 and 0 <= self.group < MAX_GROUPS):
            raise Invalid(f"shard {self} is out of range: each index must be below its count")

    @cached_property
    def text(self) -> str:
        """As paths and manifests spell it: `t0of1.p0of1.g0`."""
        return f"t{self.rank}of{self.ranks}.p{self.stage}of{self.stages}.g{self.group}"

    def __str__(self) -> str:
        return self.text

    @classmethod
    def parse(cls, text: str) -> Shard:
        """The inverse of `str`. Raises `Invalid`."""
        match = _SHARD.fullmatch(text)
        if match is None:
            raise Invalid(f"shard {text!r} is not of the form t0of1.p0of1.g0")
        rank, ranks, stage, stages, group = map(int, match.groups())
        shard = cls(rank=rank, ranks=ranks, stage=stage, stages=stages, group=group)
        if str(shard) != text:
            raise Invalid(f"shard {text!r} is not spelled canonically; use {shard}")
        return shard


def is_hex_id(text: str) -> bool:
    """Whether this is a well-formed namespace id, PrefixId or digest."""
    return _HEX64.fullmatch(text) is not None


def prefix_id(text: str) -> PrefixId:
    """A PrefixId from outside. Raises `Invalid`."""
    if not is_hex_id(text):
        raise Invalid("prefix_id must be 64 lower-case hex digits")
    return PrefixId(text)


def namespace_id(text: str) -> NamespaceId:
    """A namespace id from outside. Raises `Invalid`."""
    if not is_hex_id(text):
        raise Invalid("namespace must be 64 lower-case hex digits")
    return NamespaceId(text)


def _check_text(field: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise Invalid(f"{field} must be valid unicode (it holds a lone surrogate)") from None
    if size > MAX_TEXT_BYTES:
        raise Invalid(f"{field} has {size} bytes of UTF-8, more than {MAX_TEXT_BYTES}: use a digest")


def length_prefixed(*parts: bytes) -> bytes:
    """Length-prefixed fields (u32 little endian each): no two sequences share an encoding."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def as_tokens(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as u32 little endian, shape [n]. Raises `Invalid` for negative, too large or non-integer ids."""
    try:
        array = np.asarray(tokens)
    except ValueError:
        raise Invalid("tokens must be a flat sequence of integers") from None
    if array.size == 0:
        return np.empty(0, dtype="<u4")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise Invalid("tokens must be a flat sequence of integers")
    if int(array.min()) < 0 or int(array.max()) > 0xFFFFFFFF:
        raise Invalid("tokens: every id must be 0 to 4,294,967,295")
    return np.ascontiguousarray(array, dtype="<u4")


def block_id(
    namespace: NamespaceId, parent: PrefixId | NamespaceId, tokens: Sequence[int] | np.ndarray, extra: Sequence[bytes] = ()
) -> PrefixId:
    """One link of the chain: `tokens` (1 to block_tokens of them) after everything `parent` stands for.

    Args:
        namespace: Where it may be reused.
        parent: The block before, or the namespace id for the first block.
        tokens: Token ids, shape [n].
        extra: What else the KV of this block depends on: LoRA, multimodal item hashes with offsets, a cache salt.
    """
    for key in extra:
        if len(key) > MAX_EXTRA_BYTES:
            raise Invalid(f"extra key of {len(key)} bytes; at most {MAX_EXTRA_BYTES}: pass its digest")
    ids = as_tokens(tokens)
    if ids.size == 0:
        raise Invalid("a block has at least one token")
    return PrefixId(_link(bytes.fromhex(namespace), bytes.fromhex(parent), ids.tobytes(), extra).hex())


def _link(namespace: bytes, parent: bytes, tokens: bytes, extra: Sequence[bytes]) -> bytes:
    body = length_prefixed(b"kvtier.prefix.1", namespace, parent, tokens, len(extra).to_bytes(4, "little"), *extra)
    return blake3(body).digest()


def engine_id(namespace: NamespaceId, key: bytes) -> PrefixId:
    """The name of a block of which an engine hands over only its own hash: no parent, no tokens, no sessions."""
    return PrefixId(blake3(length_prefixed(b"kvtier.engine.1", bytes.fromhex(namespace), key)).hexdigest())


def extra_key(*parts: str) -> bytes:
    """One extra key of a block, such as `("salt", text)`: spelled alike by who names an engine's blocks and who asks for them."""
    return blake3(length_prefixed(*(part.encode("utf-8", "surrogatepass") for part in parts))).digest()


class Link(msgspec.Struct, frozen=True):
    """One block of a chain: its name and how many tokens it holds."""

    prefix_id: PrefixId
    tokens: int


def chain(
    namespace: Namespace,
    tokens: Sequence[int] | np.ndarray,
    *,
    extra: Mapping[int, Sequence[bytes]] | None = None,
    partial: bool = False,
) -> list[Link]:
    """The blocks of a prompt, in order.

    Args:
        namespace: Gives the id and `block_tokens`.
        tokens: Token ids, shape [n].
        extra: By block index: further keys of that block (and so of every later one).
        partial: Whether to name a last block that is not full as well.

    Returns:
        `n // block_tokens` full blocks, and the partial one when asked and when there is one.
    """
    ids, size, extra = as_tokens(tokens), namespace.block_tokens, extra or {}
    count = math.ceil(ids.size / size) if partial else ids.size // size
    outside = [index for index in extra if not 0 <= index < max(1, math.ceil(ids.size / size))]
    if outside:
        raise Invalid(f"extra names block {outside[0]}, and the tokens have {math.ceil(ids.size / size)} blocks")
    for index, keys in extra.items():
        if any(len(key) > MAX_EXTRA_BYTES for key in keys):
            raise Invalid(f"extra key of block {index} is longer than {MAX_EXTRA_BYTES} bytes: pass its digest")
    root, packed = bytes.fromhex(namespace.id), ids.tobytes()
    parent, links = root, []
    for index in range(count):
        piece = packed[4 * index * size : 4 * (index + 1) * size]
        parent = _link(root, parent, piece, extra.get(index, ()))
        links.append(Link(PrefixId(parent.hex()), len(piece) // 4))
    return links


class BlockName(msgspec.Struct, frozen=True, dict=True):
    """What an object or a slot claims to hold, and a reader insists on."""

    namespace: NamespaceId
    shard: Shard
    prefix_id: PrefixId
    tokens: int

    @cached_property
    def tier_key(self) -> bytes:
        """32 bytes under which tiers hold it."""
        return tier_key(tier_key_head(self.namespace, self.shard), self.prefix_id)


def tier_key_head(namespace: NamespaceId, shard: Shard) -> bytes:
    """What the tier keys of one shard of a namespace have in common, for `tier_key`."""
    return length_prefixed(b"kvtier.tier.1", namespace.encode(), str(shard).encode()) + (64).to_bytes(4, "little")


def tier_key(head: bytes, prefix: str) -> bytes:
    """The 32 bytes under which tiers hold a block: of one shard's `tier_key_head`, and its PrefixId."""
    return blake3(head + prefix.encode()).digest()


def pack_prefixes(prefixes: Sequence[str]) -> bytes:
    """PrefixIds as 32 bytes each, one behind the other. Raises `Invalid` unless each has 64 lower-case hex digits."""
    text = "".join(prefixes)
    try:
        packed = bytes.fromhex(text)
    except ValueError:
        packed = b""
    if packed.hex() != text or not {64}.issuperset(map(len, prefixes)):
        raise Invalid("prefix_id must be 64 lower-case hex digits")
    return packed


def unpack_prefixes(packed: bytes) -> list[PrefixId]:
    """The inverse of `pack_prefixes`. Raises `Invalid` where it is no multiple of 32 bytes."""
    if len(packed) % 32:
        raise Invalid("prefix_ids have 32 bytes each")
    text = packed.hex()
    return [PrefixId(text[at : at + 64]) for at in range(0, len(text), 64)]
