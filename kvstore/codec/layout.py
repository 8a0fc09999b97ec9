"""Which tensors a block of a shard holds, and where each lies in the raw object. Follows from namespace, shard and length alone."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import accumulate
from typing import Final

import msgspec

from kvstore.codec.spelling import ZEROS, padded, shape_text, spell_entries, spell_header
from kvstore.errors import Invalid
from kvstore.ids import DTYPE_BYTES, BlockName, Namespace, NamespaceId, Shard

MAX_OBJECT_BYTES: Final = 4 << 30  # below the 5 GiB that S3 takes in one PUT
TOKEN_IDS: Final = "token_ids"  # noqa: S105  the tokens of a language model, no secret


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a raw object. `dtype` is in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its raw length."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


class Layout(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A raw object's anatomy.

    Attributes:
        namespace: Id of the namespace.
        shard: Whose part of the block.
        tokens: How many tokens the block holds.
        layers: Indices of the model's layers in it, in storage order.
        per_layer: Tensors of each layer.
        specs: Tensors in storage order: those of the layers, then `token_ids` where the namespace has them.
        sizes: Bytes of each.
        offsets: Where each starts, counted from the payload's first byte.
        header_bytes: Length of the raw object's header: a multiple of 4,096, the same for every block of this layout.
        payload_bytes: Length of all tensors.
        shard_text: The shard as headers spell it.
        raw_text: Dtypes and shapes as headers of coded objects spell them.
        entries: The tensors as the raw header spells them.
    """

    namespace: NamespaceId
    shard: Shard
    tokens: int
    layers: tuple[int, ...]
    per_layer: int
    specs: tuple[TensorSpec, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    header_bytes: int
    payload_bytes: int
    shard_text: str
    raw_text: str
    entries: str

    @property
    def raw_bytes(self) -> int:
        """Length of the raw object."""
        return self.header_bytes + self.payload_bytes

    @property
    def header_limit(self) -> int:
        """No header of a stored object, whatever its codec, is longer."""
        return padded(1024 + 256 * len(self.specs))

    @property
    def stored_limit(self) -> int:
        """No stored object, whatever its codec, is longer."""
        return self.header_limit + sum(map(coded_limit, self.sizes))


def coded_limit(size: int) -> int:
    """No coding of a tensor of that many bytes is longer: zstd grows incompressible data by far less."""
    return size + size // 128 + 128


def shard_layers(ns: Namespace, shard: Shard) -> tuple[int, ...]:
    """Indices of the model's layers in a shard, ascending.

    Pipeline stages split *all* layers of the namespace into contiguous runs as even as can be; where they do not divide, the first
    stages get one layer more. The shard holds those layers of its stage that belong to its attention group.

    Raises:
        Invalid: There is no such group, or it has no layer in that stage.
    """
    if shard.group >= len(ns.groups):
        raise Invalid(f"shard {shard}: the namespace has {len(ns.groups)} attention groups")
    each, more = divmod(ns.layers, shard.stages)
    first = shard.stage * each + min(shard.stage, more)
    stage = range(first, first + each + (shard.stage < more))
    layers = tuple(layer for layer in ns.group_layers(shard.group) if layer in stage)
    if not layers:
        raise Invalid(f"shard {shard}: no layer of group {shard.group} is in stage {shard.stage}")
    return layers


def tensor_specs(ns: Namespace, shard: Shard, tokens: int) -> tuple[TensorSpec, ...]:
    """The tensors of one block of one shard, in storage order.

    Layer by layer: `k` and `v` ([tokens, KV heads of the shard, head_dim]), or `c` (MLA, [tokens, rank + rope]), or for an opaque
    layout `kv` (`state` in a state group; [page_bytes / width of the dtype], whatever `tokens`). Then `token_ids` ([tokens], U32)
    where the namespace identifies blocks by tokens.

    Raises:
        Invalid: The length is outside 1 to `block_tokens`, or the shard is none of this namespace.
    """
    if not 1 <= tokens <= ns.block_tokens:
        raise Invalid(f"a block of this namespace holds 1 to {ns.block_tokens} tokens, not {tokens}")
    layers = shard_layers(ns, shard)
    parts = _layer_parts(ns, shard, tokens)
    specs = [TensorSpec(f"layers.{layer}.{part}", ns.dtype, shape) for layer in layers for part, shape in parts]
    if ns.identity == "tokens":
        specs.append(TensorSpec(TOKEN_IDS, "U32", (tokens,)))
    return tuple(specs)


def _layer_parts(ns: Namespace, shard: Shard, tokens: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """What every layer of a shard holds: (last part of the name, shape)."""
    state = ns.groups[shard.group].kind == "state"
    if ns.page_bytes:
        elements, rest = divmod(ns.page_bytes, DTYPE_BYTES[ns.dtype])
        if rest:
            raise Invalid(f"namespace.page_bytes is {ns.page_bytes}, not a multiple of the width of {ns.dtype}")
        return (("state" if state else "kv", (elements,)),)
    if state:
        raise Invalid("a state group has no canonical shape: describe it by an opaque layout with page_bytes")
    if ns.mla_rank:
        if shard.ranks != 1:
            raise Invalid(f"shard {shard}: MLA is replicated over ranks, so its only shard is rank 0 of 1")
        return (("c", (tokens, ns.mla_rank + ns.mla_rope)),)
    if max(ns.kv_heads, shard.ranks) % min(ns.kv_heads, shard.ranks):
        raise Invalid(f"shard {shard}: {ns.kv_heads} KV heads do not divide over {shard.ranks} ranks")
    shape = (tokens, max(1, ns.kv_heads // shard.ranks), ns.head_dim)  # with more ranks than heads, several hold the same head
    return (("k", shape), ("v", shape))


@lru_cache(maxsize=256)
def layout(ns: Namespace, shard: Shard, tokens: int) -> Layout:
    """The anatomy of a block's raw object; computed once for each (namespace, shard, length).

    Raises:
        Invalid: As `tensor_specs`, or the object would be larger than `MAX_OBJECT_BYTES`.
    """
    specs = tensor_specs(ns, shard, tokens)
    sizes = tuple(spec.nbytes for spec in specs)
    total = sum(sizes)
    if total > MAX_OBJECT_BYTES:
        raise Invalid(f"a block would be {total} bytes, more than {MAX_OBJECT_BYTES}: use fewer block_tokens, or shard it")
    namespace, shard_text, layers = ns.id, str(shard), shard_layers(ns, shard)
    entries = spell_entries((spec.name, spec.dtype, spec.shape, size) for spec, size in zip(specs, sizes, strict=True))
    header = spell_header(
        namespace=namespace,
        shard=shard_text,
        prefix_id=ZEROS,
        tokens=tokens,
        codec="raw",
        raw="",
        digests=ZEROS * len(specs),
        raw_digests="",
        entries=entries,
    )
    return Layout(
        namespace=namespace,
        shard=shard,
        tokens=tokens,
        layers=layers,
        per_layer=len(specs) // len(layers) if specs[-1].name != TOKEN_IDS else (len(specs) - 1) // len(layers),
        specs=specs,
        sizes=sizes,
        offsets=tuple(accumulate(sizes[:-1], initial=0)),
        header_bytes=len(header),
        payload_bytes=total,
        shard_text=shard_text,
        raw_text=";".join(spec.dtype + shape_text(spec.shape) for spec in specs),
        entries=entries,
    )


def layout_of(name: BlockName, ns: Namespace) -> Layout:
    """The layout of a named block.

    Raises:
        Invalid: The name says another namespace, or as `layout`.
    """
    found = layout(ns, name.shard, name.tokens)
    if name.namespace != found.namespace:
        raise Invalid(f"the name says namespace {name.namespace}, and this one is {found.namespace}")
    return found
