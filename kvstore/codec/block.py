"""Whole blocks: seal, verify, encode, decode, and the ranges of layers between."""

from __future__ import annotations

from itertools import accumulate
from typing import Final

import msgspec
import numpy as np
from blake3 import blake3

from kvstore.codec.coding import Codec, decode_tensor, frame_of, lay, plane_bytes
from kvstore.codec.header import Header, header_of, stored_header
from kvstore.codec.layout import Layout, layout_of
from kvstore.codec.sharing import Share, each
from kvstore.errors import Corrupt, Invalid
from kvstore.ids import BlockName, Namespace

# BF16 and the F8 kinds have no numpy dtype: their bits are seen as unsigned integers of the same width.
_NUMPY: Final = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "F8_E4M3": "u1", "F8_E5M2": "u1", "I8": "i1", "U8": "u1", "U32": "<u4",
}  # fmt: skip


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """A stored object, ready to be sent. For codec `raw`, `body` is the very view that was given: nothing was copied."""

    body: bytes | memoryview
    header_bytes: int

    @property
    def nbytes(self) -> int:
        """Length of the object."""
        return len(self.body)


def seal(raw: memoryview, name: BlockName, ns: Namespace) -> None:
    """Make a raw object of a buffer whose payload is already in place behind `header_bytes`: digest it and write the header.

    Args:
        raw: Writable, exactly `layout(...).raw_bytes` long.
        name: What the payload is.
        ns: Its namespace.

    Raises:
        Invalid: The buffer has another length or is read-only, or as `layout`.
    """
    expected = layout_of(name, ns)
    view = _buffer(raw, expected, writable=True)
    payload = view[expected.header_bytes :]
    digests = "".join(
        blake3(payload[start : start + size]).hexdigest() for start, size in zip(expected.offsets, expected.sizes, strict=True)
    )
    view[: expected.header_bytes] = header_of(expected, name.prefix_id, "raw", expected.sizes, digests)


def verify(raw: memoryview, name: BlockName, ns: Namespace, share: Share | None = None) -> None:
    """Require that these bytes are the named block as a raw object. `share` finds threads that help.

    Raises:
        Corrupt: They are not.
        Invalid: As `layout`, or the name is of another namespace.
    """
    _verified(memoryview(raw).cast("B"), name, ns, share)


def _verified(raw: memoryview, name: BlockName, ns: Namespace, share: Share | None) -> Header:
    header, payload = _open_raw(raw, name, ns)
    each(lambda index: check_tensor(header, index, payload), len(header.digests), share)
    return header


def _open_raw(raw: memoryview, name: BlockName, ns: Namespace) -> tuple[Header, memoryview]:
    header, payload = _open(raw, name, ns)
    if header.codec != "raw":
        raise Corrupt(f"block: codec {header.codec} where a raw object was expected")
    return header, payload


decode_in_place = verify  # a raw object that was read straight into its destination is decoded when it is verified


def encode(raw: memoryview, name: BlockName, ns: Namespace, codec: Codec, share: Share | None = None) -> Encoded:
    """A raw object as stored under a codec. The raw object is verified first: rot in memory must not be signed as truth.

    At its peak it holds twice the stored length, at most `2 * layout.stored_limit`; nothing for codec `raw`.

    Args:
        raw: The raw object.
        name: Which block it is.
        ns: Its namespace.
        codec: How each tensor is to be stored.
        share: Finds threads that help.

    Raises:
        Corrupt: The raw object is not what it claims.
        Invalid: As `layout`, or the name is of another namespace.
        Unsupported: The codec needs zstandard, which is not installed.
    """
    view = memoryview(raw).cast("B")
    if codec == "raw":
        return Encoded(view, _verified(view, name, ns, share).header_bytes)
    known, payload = _open_raw(view, name, ns)
    expected = known.layout
    specs, count = expected.specs, len(expected.specs)
    frames, digests = [b""] * count, [""] * count

    def code(index: int) -> None:
        frames[index] = frame_of(codec, specs[index], check_tensor(known, index, payload))

    each(code, count, share)
    sizes = [plane_bytes(codec, spec, size) + len(frame) for spec, size, frame in zip(specs, expected.sizes, frames, strict=True)]
    starts = (0, *accumulate(sizes))
    # The header comes last, when its length is known. numpy asks for huge pages: making small ones took a third of coding.
    room = np.empty(expected.header_limit + starts[-1], np.uint8).data
    body = room[expected.header_limit :]

    def place(index: int) -> None:
        at, stored = known.starts[index], body[starts[index] : starts[index + 1]]
        lay(codec, specs[index], payload[at : at + expected.sizes[index]], frames[index], stored)
        digests[index] = blake3(stored).hexdigest()

    each(place, count, share)
    header = header_of(expected, name.prefix_id, codec, sizes, "".join(digests), known.raw_digests)
    first = expected.header_limit - len(header)
    room[first : expected.header_limit] = header
    return Encoded(room[first:], len(header))


def decode(stored: memoryview, name: BlockName, ns: Namespace, into: memoryview, share: Share | None = None) -> None:
    """Turn a stored object of any codec into the raw one, checking name, digests and lengths. On an error `into` holds garbage.

    The digests of the raw tensors are taken from the stored header, which is checked, and not computed again: frames carry a
    checksum of their content, and that pass would cost a sixth of the decoding. `verify` makes it.

    Args:
        stored: The whole object.
        name: What was asked for.
        ns: Its namespace.
        into: Writable, exactly `layout(...).raw_bytes` long; not overlapping `stored`.
        share: Finds threads that help.

    Raises:
        Corrupt: It is not this block, or not intact.
        Invalid: `into` has another length or is read-only, or as `layout`.
        Unsupported: The codec needs zstandard, which is not installed.
    """
    view = memoryview(stored).cast("B")
    header, payload = _open(view, name, ns)
    target = _buffer(into, header.layout, writable=True)
    if header.codec == "raw":
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(view, np.uint8))  # unlike a slice assignment, without the GIL
        verify(target, name, ns, share)  # what was copied, should somebody still write to `stored`
        return
    expected = header.layout
    each(lambda index: place_tensor(header, index, payload, target), len(header.digests), share)
    target[: expected.header_bytes] = header_of(expected, name.prefix_id, "raw", expected.sizes, header.raw_digests)


def tensor_range(header: Header, first_layer: int, last_layer: int) -> tuple[int, int]:
    """Byte range [start, end) of the stored object that holds these layers, both included: one HTTP range.

    The range of the shard's last layer also holds `token_ids`, so that consecutive ranges make up the whole payload.

    Raises:
        Invalid: The shard has no such layers.
    """
    wanted = _layer_tensors(header.layout, first_layer, last_layer)
    return header.header_bytes + header.starts[wanted.start], header.header_bytes + header.starts[wanted.stop]


def decode_layers(header: Header, part: memoryview, first_layer: int, last_layer: int, into: memoryview) -> None:
    """Decode the bytes of `tensor_range` to where the raw object has them. `seal` it when every layer has come.

    Args:
        header: From `stored_header`, which has checked it.
        part: Exactly the bytes of that range.
        first_layer: As in `tensor_range`.
        last_layer: As in `tensor_range`.
        into: The whole raw object, writable. Only these layers are touched.

    Raises:
        Corrupt: The bytes are not intact; others of these layers may have been written.
        Invalid: `into` has another length or is read-only, or the shard has no such layers.
    """
    wanted = _layer_tensors(header.layout, first_layer, last_layer)
    first, end = header.starts[wanted.start], header.starts[wanted.stop]
    view = memoryview(part).cast("B")
    if view.nbytes != end - first:
        raise Corrupt(f"block: {view.nbytes} bytes of a range of {end - first}")
    target = _buffer(into, header.layout, writable=True)
    for index in wanted:
        place_tensor(header, index, view, target, first)


def tensors(raw: memoryview, name: BlockName, ns: Namespace) -> dict[str, np.ndarray]:
    """Views of a raw object's tensors by name, in storage order; nothing is copied or verified.

    BF16 is seen as uint16, F8 as uint8 (the same bits). The views are writable if `raw` is.

    Raises:
        Invalid: The buffer has another length, or as `layout`.
    """
    expected = layout_of(name, ns)
    payload = _buffer(raw, expected, writable=False)[expected.header_bytes :]
    return {
        spec.name: np.frombuffer(payload[start : start + size], _NUMPY[spec.dtype]).reshape(spec.shape)
        for spec, start, size in zip(expected.specs, expected.offsets, expected.sizes, strict=True)
    }


def _buffer(raw: memoryview, expected: Layout, *, writable: bool) -> memoryview:
    view = memoryview(raw).cast("B")
    if view.nbytes != expected.raw_bytes:
        raise Invalid(f"the raw object has {expected.raw_bytes} bytes, and the buffer {view.nbytes}")
    if writable and view.readonly:
        raise Invalid("the buffer is read-only")
    return view


def _open(view: memoryview, name: BlockName, ns: Namespace) -> tuple[Header, memoryview]:
    """The checked header of a whole object, and its payload."""
    header = stored_header(view, name, ns)
    if view.nbytes != header.stored_bytes:
        raise Corrupt(f"block: {view.nbytes} bytes where its header says {header.stored_bytes}")
    return header, view[header.header_bytes :]


def check_tensor(header: Header, index: int, payload: memoryview, base: int = 0) -> memoryview:
    """The stored bytes of one tensor, verified. `payload` starts at byte `base` of the payload."""
    start, end = header.starts[index : index + 2]
    stored = payload[start - base : end - base]
    if blake3(stored).digest() != header.digests[index]:
        raise Corrupt(f"block: {header.layout.specs[index].name} does not match its digest")
    return stored


def place_tensor(header: Header, index: int, payload: memoryview, target: memoryview, base: int = 0) -> None:
    """Verify one tensor and decode it to where the raw object has it."""
    stored, expected = check_tensor(header, index, payload, base), header.layout
    start = expected.header_bytes + expected.offsets[index]
    decode_tensor(header.codec, expected.specs[index], stored, target[start : start + expected.sizes[index]])


def _layer_tensors(expected: Layout, first_layer: int, last_layer: int) -> range:
    """Indices of the tensors of these layers, and of what follows the shard's last one."""
    if first_layer > last_layer or first_layer not in expected.layers or last_layer not in expected.layers:
        raise Invalid(f"layers {first_layer} to {last_layer} are not in shard {expected.shard}")
    start = expected.layers.index(first_layer) * expected.per_layer
    if last_layer == expected.layers[-1]:
        return range(start, len(expected.specs))
    return range(start, (expected.layers.index(last_layer) + 1) * expected.per_layer)
