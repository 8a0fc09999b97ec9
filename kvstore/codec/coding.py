"""One tensor's bytes <-> its stored bytes. Every length is required before it is allocated; anything odd is `Corrupt`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from kvstore.codec.layout import TensorSpec, coded_limit
from kvstore.errors import Corrupt, Unsupported
from kvstore.ids import DTYPE_BYTES

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

Codec = Literal["raw", "zstd", "bp-zstd"]
CODECS: Final[tuple[Codec, ...]] = ("raw", "zstd", "bp-zstd")
_MAX_WINDOW: Final = 8 << 20  # what every zstd decoder supports
_PIECE: Final = 1 << 16  # elements: what is worked on stays in the cache


class _PerThread(threading.local):
    """A (de)compressor shared between threads crashes the process. zstandard is imported by whoever first needs it."""

    def __init__(self) -> None:
        try:
            import zstandard  # noqa: PLC0415  belongs to the extra `embed`; raw objects work without it
        except ImportError as error:
            raise Unsupported("codecs zstd and bp-zstd need the package zstandard: install kvtier[embed]") from error
        self.compressor: ZstdCompressor = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True)
        # High bytes repeat by chance and not in meaning: the matches that level 1 finds in them are short, and dearer than the
        # literals they replace. Without them frames are 6% smaller, and take half the time to make and two thirds to read.
        tuned = zstandard.ZstdCompressionParameters(
            compression_level=1, min_match=7, hash_log=6, write_checksum=True, write_content_size=True
        )
        self.high_compressor: ZstdCompressor = zstandard.ZstdCompressor(compression_params=tuned)
        self.decompressor: ZstdDecompressor = zstandard.ZstdDecompressor()
        self.parameters = zstandard.get_frame_parameters
        self.error = zstandard.ZstdError


class _Scratch(threading.local):
    """Where high bytes become 16 bits wide: one byte off, so that they come to stand in the high half, and no shift is needed."""

    def __init__(self) -> None:
        room = np.zeros(2 * _PIECE + 2, np.uint8)
        self._off, self._pairs = room[1:-1].view("<u2"), room[:-2].view("<u2")

    def merge(self, low: np.ndarray, high: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` with elements of these low and high bytes."""
        for at in range(0, len(out), _PIECE):
            piece = slice(at, at + _PIECE)
            there = out[piece]
            np.copyto(self._off[: len(there)], high[piece])
            np.bitwise_or(self._pairs[: len(there)], low[piece], out=there)


_scratch: Final = _Scratch()
_zstd: _PerThread | None = None


def _zstandard() -> _PerThread:
    global _zstd  # noqa: PLW0603  set once; `threading.local` gives each thread its own attributes
    if _zstd is None:
        _zstd = _PerThread()
    return _zstd


def planes(codec: Codec, spec: TensorSpec) -> bool:
    """Whether a tensor is stored as a raw plane of low bytes and a frame of high bytes. Other widths are one frame."""
    return codec == "bp-zstd" and DTYPE_BYTES[spec.dtype] == 2


def plane_bytes(codec: Codec, spec: TensorSpec, size: int) -> int:
    """How many bytes of a coded tensor are stored before its frame."""
    return size // 2 if planes(codec, spec) else 0


def stored_sizes(codec: Codec, spec: TensorSpec, size: int) -> range:
    """Lengths that the coding of a tensor of `size` raw bytes can have."""
    if codec == "raw":
        return range(size, size + 1)
    return range(plane_bytes(codec, spec, size) + 1, coded_limit(size) + 1)


def frame_of(codec: Codec, spec: TensorSpec, raw: memoryview) -> bytes:
    """What is compressed of a tensor: its high bytes, or all of it; nothing for codec `raw`."""
    if codec == "raw":
        return b""
    if not planes(codec, spec):
        return compressed(raw)
    high = np.right_shift(np.frombuffer(raw, "<u2"), 8).astype(np.uint8)
    return _zstandard().high_compressor.compress(high.data)


def lay(codec: Codec, spec: TensorSpec, raw: memoryview, frame: bytes, into: memoryview) -> None:
    """Fill `into`, exactly the stored length, with a tensor as it is stored: what is not compressed of it, then the frame."""
    behind = np.frombuffer(into, np.uint8)
    if planes(codec, spec):
        low, behind = behind[: len(raw) // 2], behind[len(raw) // 2 :]
        np.copyto(low, np.frombuffer(raw, "<u2"), casting="unsafe")
    np.copyto(behind, np.frombuffer(frame, np.uint8))


def decode_tensor(codec: Codec, spec: TensorSpec, stored: memoryview, into: memoryview) -> None:
    """Fill `into`, exactly the tensor's raw length, from stored bytes whose length `stored_sizes` allows.

    Raises:
        Corrupt: They are no coding of a tensor of that length.
    """
    if codec == "raw":
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(stored, np.uint8))  # unlike a slice assignment, without the GIL
    elif planes(codec, spec):
        half = into.nbytes // 2
        out = np.frombuffer(into, "<u2")
        high = decompressed(stored[half:], range(half, half + 1), spec.name)
        _scratch.merge(np.frombuffer(stored[:half], np.uint8), np.frombuffer(high, np.uint8), out)
    else:
        plain = decompressed(stored, range(into.nbytes, into.nbytes + 1), spec.name)
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(plain, np.uint8))


def compressed(data: bytes | memoryview) -> bytes:
    """One zstd-1 frame that declares its content's size and carries its checksum."""
    return _zstandard().compressor.compress(data)


def decompressed(frame: bytes | memoryview, sizes: range, what: str) -> bytes:
    """The content of exactly one zstd frame. What the frame declares is compared before anything is allocated.

    Args:
        frame: Nothing may follow it.
        sizes: Lengths the content may have.
        what: Names it in errors.

    Raises:
        Corrupt: It is not intact, or declares another size, no checksum, a dictionary or a window above 8 MiB.
    """
    zstd = _zstandard()
    try:
        declared = zstd.parameters(frame)  # looks at its header only
        if declared.content_size not in sizes or not declared.has_checksum or declared.window_size > _MAX_WINDOW:
            raise Corrupt(f"{what}: not a zstd frame with checksum of {sizes.start} to {sizes.stop - 1} bytes")
        content = zstd.decompressor.decompress(frame, allow_extra_data=False)
    except zstd.error as error:
        raise Corrupt(f"{what}: {error}") from None
    if len(content) != declared.content_size:
        raise Corrupt(f"{what}: a frame gave {len(content)} bytes instead of {declared.content_size}")
    return content
