"""How a header is spelled. There is one spelling for given values, so that a reader may insist on every byte of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

ALIGN: Final = 4096  # the payload of every object starts on a multiple of this, as O_DIRECT likes it
VERSION: Final = "1"
ZEROS: Final = "0" * 64
_OPENING: Final = f'{{"__metadata__":{{"kvtier":"{VERSION}","digest":"'
DIGEST_AT: Final = 8 + len(_OPENING)  # where the block's own digest stands, in every header

Entry = tuple[str, str, Sequence[int], int]  # name, dtype, shape, bytes


def padded(length: int) -> int:
    """The next multiple of 4,096."""
    return -(-length // ALIGN) * ALIGN


def shape_text(shape: Sequence[int]) -> str:
    """`[256,3,64]`."""
    return f"[{','.join(map(str, shape))}]"


def spell_entries(tensors: Iterable[Entry]) -> str:
    """The header's JSON after its metadata: each tensor with dtype, shape and offsets, without gaps."""
    text, start = [], 0
    for name, dtype, shape, size in tensors:
        text.append(f',"{name}":{{"dtype":"{dtype}","shape":{shape_text(shape)},"data_offsets":[{start},{start + size}]}}')
        start += size
    return "".join(text)


def spell_coded(names: Iterable[str], sizes: Iterable[int]) -> str:
    """`spell_entries` of coded tensors: they are bytes, of these lengths."""
    text, start = [], 0
    for name, size in zip(names, sizes, strict=True):
        text.append(f',"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{start + size}]}}')
        start += size
    return "".join(text)


def spell_header(
    *, namespace: str, shard: str, prefix_id: str, tokens: int, codec: str, raw: str, digests: str, raw_digests: str, entries: str
) -> bytes:
    """A whole header, 64 zeros standing for the block's digest.

    Args:
        namespace: 64 hex digits.
        shard: Such as `t0of1.p0of1.g0`.
        prefix_id: 64 hex digits.
        tokens: Of the block.
        codec: Name of the codec.
        raw: Dtypes and shapes of the raw tensors, `;` between them; "" leaves the field out (the entries say it).
        digests: 64 hex digits for each tensor, in storage order, without a separator.
        raw_digests: The same for the raw tensors; "" leaves the field out, as `raw`.
        entries: From `spell_entries`.
    """
    was = f',"raw":"{raw}","raw_digests":"{raw_digests}"' if raw else ""
    text = (
        f'{_OPENING}{ZEROS}","namespace":"{namespace}","shard":"{shard}","prefix_id":"{prefix_id}","tokens":"{tokens}",'
        f'"codec":"{codec}","enc":"none"{was},"digests":"{digests}"}}{entries}}}'
    )
    length = padded(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length).encode("ascii")
