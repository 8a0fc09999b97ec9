"""Reading a header that nobody vouches for: bounded, then taken apart, then required byte by byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, get_args

import msgspec
from blake3 import blake3

from kvstore.codec.coding import CODECS, Codec, stored_sizes
from kvstore.codec.layout import Layout, layout_of
from kvstore.codec.spelling import ALIGN, DIGEST_AT, ZEROS, spell_coded, spell_header
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Digest, Namespace, PrefixId

_CODEC: Final = re.compile(rb'"codec":"([a-z0-9-]{1,16})"')
_DIGESTS: Final = b'"digests":"'
_RAW_DIGESTS: Final = b'"raw_digests":"'
_HEX: Final = b"0123456789abcdef"
_ENDS: Final = re.compile(rb'"data_offsets":\[\d{1,12},(\d{1,12})\]')


class Header(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What the header of a stored object says, all of it checked.

    Attributes:
        layout: Of the raw object.
        codec: How each tensor is stored.
        header_bytes: Where the payload starts in the stored object.
        starts: Where each stored tensor starts, counted from the payload's first byte, and at the end where the last one ends.
        digests: BLAKE3-256 of each tensor's stored bytes.
        raw_digests: Those of the raw tensors, in hex and without a separator, as a raw object's header spells them.
        digest: The block's.
    """

    layout: Layout
    codec: Codec
    header_bytes: int
    starts: tuple[int, ...]
    digests: tuple[bytes, ...]
    raw_digests: str
    digest: Digest

    @property
    def stored_bytes(self) -> int:
        """Length of the whole stored object."""
        return self.header_bytes + self.starts[-1]


def header_length(head: memoryview, name: BlockName, ns: Namespace) -> int:
    """How many bytes of a stored object are its header, from at least its first 8 bytes.

    Raises:
        Corrupt: No header of this block has that length, or there are not even 8 bytes.
        Invalid: As `layout`, or the name is of another namespace.
    """
    return _header_length(head, layout_of(name, ns))


def _header_length(head: memoryview, expected: Layout) -> int:
    length = 8 + int.from_bytes(head[:8], "little")
    if head.nbytes < 8 or length % ALIGN or length > expected.header_limit:
        raise Corrupt(f"block header: {head.nbytes} bytes read, a length of {length}, at most {expected.header_limit} allowed")
    return length


def _digest(header: bytes) -> str:
    """The block's digest: of the whole padded header, its own field as zeros."""
    blank = header[:DIGEST_AT] + ZEROS.encode() + header[DIGEST_AT + len(ZEROS) :]
    return blake3(blank).hexdigest()


def signed(header: bytes) -> bytes:
    """A header from `spell_header` with its digest filled in."""
    return header[:DIGEST_AT] + _digest(header).encode() + header[DIGEST_AT + len(ZEROS) :]


def block_digest(stored: memoryview) -> Digest:
    """The digest of a stored or raw object: BLAKE3-256 of its header, which binds the digest of every tensor.

    Raises:
        Corrupt: The header's length is not inside the object, or the header says another digest.
    """
    view = memoryview(stored).cast("B")
    length = 8 + int.from_bytes(view[:8], "little")
    if view.nbytes < ALIGN or length > view.nbytes or length % ALIGN:
        raise Corrupt("block header: its length is not inside the object")
    return _checked_digest(bytes(view[:length]))


def _checked_digest(header: bytes) -> Digest:
    digest = _digest(header)
    if header[DIGEST_AT : DIGEST_AT + len(ZEROS)] != digest.encode():
        raise Corrupt("block header: its bytes do not match its digest")
    return Digest(digest)


def stored_header(head: memoryview, name: BlockName, ns: Namespace) -> Header:
    """The header at the start of `head`, for a reader who asked for this block.

    Args:
        head: The object's first bytes; at least the header (`header_length`), more is ignored.
        name: What was asked for; a header that says anything else is refused.
        ns: Its namespace.

    Raises:
        Corrupt: It is not the header of this block.
        Invalid: As `layout`, or the name is of another namespace.
    """
    expected, view = layout_of(name, ns), memoryview(head).cast("B")
    length = _header_length(view, expected)
    if view.nbytes < length:
        raise Corrupt(f"block header: cut after {view.nbytes} of {length} bytes")
    text = bytes(view[:length])
    plain = _raw_header(text, expected, name)
    if plain is not None:
        return plain
    digest = _checked_digest(text)
    codec, ends, digests, raw_digests = _taken_apart(text, expected)
    starts = (0, *ends)
    sizes = [end - start for start, end in pairwise(starts)]
    if not all(size in possible for size, possible in zip(sizes, _possible(codec, expected), strict=True)):
        raise Corrupt("block header: a tensor has an impossible length")
    # One spelling exists for these values, so this one comparison catches duplicate keys, gaps, overlaps, foreign names, wrong
    # dtypes and shapes, another block's identity and anything a JSON parser might be tricked with.
    spelled = header_of(expected, name.prefix_id, codec, sizes, digests, raw_digests)
    if spelled != text:
        raise Corrupt("block header: it is not the header of the block that was asked for")
    return Header(
        layout=expected,
        codec=codec,
        header_bytes=length,
        starts=starts,
        digests=_binary(digests),
        raw_digests=raw_digests or digests,
        digest=digest,
    )


def _raw_header(text: bytes, expected: Layout, name: BlockName) -> Header | None:
    """What a raw object's header says: only its digests are not known beforehand, and with them it is spelled in one way."""
    said = _digests(text, _DIGESTS, len(expected.specs)) if len(text) == expected.header_bytes else None
    if said is None or header_of(expected, name.prefix_id, "raw", expected.sizes, said) != text:
        return None
    return Header(
        layout=expected,
        codec="raw",
        header_bytes=len(text),
        starts=(*expected.offsets, expected.payload_bytes),
        digests=_binary(said),
        raw_digests=said,
        digest=Digest(text[DIGEST_AT : DIGEST_AT + len(ZEROS)].decode()),
    )


@lru_cache(maxsize=256)
def _possible(codec: Codec, expected: Layout) -> tuple[range, ...]:
    """Lengths that each stored tensor can have."""
    return tuple(stored_sizes(codec, spec, size) for spec, size in zip(expected.specs, expected.sizes, strict=True))


def _binary(digests: str) -> tuple[bytes, ...]:
    whole = bytes.fromhex(digests)
    return tuple(whole[at : at + 32] for at in range(0, len(whole), 32))


def _digests(text: bytes, field: bytes, count: int) -> str | None:
    """What a field says: that many digests in hex, or None."""
    start = text.find(field) + len(field)
    said = text[start : start + 64 * count]
    whole = start >= len(field) and text[start + 64 * count : start + 64 * count + 1] == b'"'
    return said.decode() if whole and not said.strip(_HEX) else None


def _taken_apart(text: bytes, expected: Layout) -> tuple[Codec, list[int], str, str]:
    """The values that vary between headers of one block: codec, ends of the tensors, digests in hex, and "" or the raw ones."""
    count = len(expected.specs)
    codec, digests = _CODEC.search(text), _digests(text, _DIGESTS, count)
    ends = list(map(int, _ENDS.findall(text)))
    if codec is None or digests is None or len(ends) != count:
        raise Corrupt(f"block header: it does not describe {count} tensors")
    name, raw = codec[1].decode(), _digests(text, _RAW_DIGESTS, count)
    if (raw is None) != (name == "raw"):
        raise Corrupt(f"block header: it does not tell the digests of {count} raw tensors")
    for known in CODECS:
        if name == known:
            return known, ends, digests, raw or ""
    raise Corrupt(f"block header: unknown codec {name!r}; known: {', '.join(get_args(Codec))}")


def header_of(
    expected: Layout, prefix_id: PrefixId, codec: Codec, sizes: Sequence[int], digests: str, raw_digests: str = ""
) -> bytes:
    """The only right header for these stored sizes and digests."""
    raw = codec == "raw"
    return signed(
        spell_header(
            namespace=expected.namespace,
            shard=expected.shard_text,
            prefix_id=prefix_id,
            tokens=expected.tokens,
            codec=codec,
            raw="" if raw else expected.raw_text,
            digests=digests,
            raw_digests=raw_digests,
            entries=expected.entries if raw else spell_coded((spec.name for spec in expected.specs), sizes),
        )
    )
