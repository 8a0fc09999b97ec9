"""One file cut into slots: a page of header, then the value, padded to pages. It bypasses the page cache where it can."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from tiering.extents import PAGE, rounded
from tiering.sealer import Sealer

_MAGIC = b"kvtslot1"
_HEADER = struct.Struct("<8s32sQQ16s")  # magic, key, size, seq, xxh3_128 of the value; then xxh3_64 of all that
_PIECE = 4 << 20  # what a value is moved and digested in: enough for the device's best rate
_BOUNCE = 1 << 20  # each thread's; and a run of at most `lanes.MOST_JOINED` bytes finds its headers and ends there


class Placed(msgspec.Struct, frozen=True):
    """Where a value lies, and what its bytes must be.

    Attributes:
        key: 32 bytes.
        offset: Of its header in the slab.
        size: Bytes of the value.
        seq: Grows with every slot that is written: of two claims to the same place the larger is the later.
        digest: xxh3_128 of the value; where it is sealed, its tag.
        salt: 32 bytes, where the value is sealed; then the key does not stand in the slab.
        who: Whose it is, below 2^64; 0: nobody's in particular.
    """

    key: bytes
    offset: int
    size: int
    seq: int
    digest: bytes
    salt: bytes = b""
    who: int = 0

    @property
    def name(self) -> bytes:
        """What the index knows it by: its key, and whose it is."""
        return self.key + self.who.to_bytes(8, "little") if self.who else self.key

    @property
    def length(self) -> int:
        """Bytes of the slab that it takes."""
        return slot_length(self.size)

    def header(self) -> bytes:
        """The page in front of the value."""
        key = self.salt or self.key
        head = _HEADER.pack(_MAGIC, key, self.size, self.seq, self.digest)
        return (head + xxhash.xxh3_64_digest(head)).ljust(PAGE, b"\0")

    @property
    def bound(self) -> bytes:
        """What a sealed value is bound to: which it is, and how long."""
        return self.key + self.size.to_bytes(8, "little")


def slot_length(size: int) -> int:
    """Bytes of the slab that a value of `size` bytes takes."""
    return PAGE + rounded(size)


class ShortRead(OSError):
    """The file ends before the slot does."""


class Slab:
    """File I/O by slot. Every call blocks: run it on a mover thread.

    O_DIRECT where the file system has it: 6 to 20 times less CPU, and no second copy of the values in the page cache.

    Attributes:
        direct: Whether O_DIRECT is in use.
        size: Bytes.
        sealer: Seals what is written; None: nothing does. Set before the first slot is.
    """

    def __init__(self, fd: int, size: int, *, direct: bool) -> None:
        self.sealer: Sealer | None = None
        self.size = size
        self.direct = direct
        self._fd = fd
        self._own = threading.local()  # each thread's bounce buffer

    @classmethod
    def open(cls, path: Path, size: int) -> Slab:
        """Open or create the file, and give it this size. New space is a hole until it is written.

        Raises:
            OSError: It cannot be opened or sized.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        direct = True
        try:
            fd = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            direct = False
            fd = os.open(path, flags, 0o600)
        try:
            if os.fstat(fd).st_size != size:
                os.ftruncate(fd, size)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size, direct=direct)

    def write(self, placed: Placed, value: memoryview) -> Placed:
        """Write header and value. On return the kernel has them; `sync` makes them durable.

        A page-aligned value, such as one in an arena, is written from where it is; any other passes through a bounce buffer.

        Args:
            placed: Where; its digest is not looked at.
            value: Its bytes.

        Returns:
            The same, with the digest of what was written.

        Raises:
            OSError: ENOSPC, EIO, EFBIG.
        """
        value = value.cast("B")
        if self.sealer is not None:
            return self._write_sealed(self.sealer, placed, value)
        if value.nbytes <= _PIECE and self.takes(value):
            return self.write_run([(placed, value)])[0]
        digest, bounce, start = xxhash.xxh3_128(), not self.takes(value), 0
        while start < value.nbytes:  # piece by piece: the device is at work while this core digests; it begins soon, and stays busy
            piece = value[start : start + (_BOUNCE if bounce else _PIECE * 4 if start else _PIECE)]
            digest.update(piece)
            self._write_all(self._whole_pages(piece, bounce=bounce), placed.offset + PAGE + start)
            start += piece.nbytes
        placed = msgspec.structs.replace(placed, digest=digest.digest())
        header = self._scratch()[:PAGE]
        header[:] = placed.header()
        self._write_all([header], placed.offset)
        return placed

    def write_run(self, run: Sequence[tuple[Placed, memoryview]]) -> list[Placed]:
        """Write slots that lie one behind the other, of values that it `takes`, in one request; as `write`.

        Raises:
            OSError: As `write`; what of it was written is not known.
        """
        parts: list[memoryview] = []
        written = []
        for at, (placed, value) in enumerate(run):
            written.append(msgspec.structs.replace(placed, digest=xxhash.xxh3_128_digest(value)))
            header = self._scratch()[2 * PAGE * at : 2 * PAGE * at + PAGE]
            header[:] = written[-1].header()
            parts += [header, *self._whole_pages(value.cast("B"), at)]
        self._write_all(parts, run[0][0].offset)
        return written

    def takes(self, value: memoryview) -> bool:
        """Whether a value can be written from where it is."""
        return self.sealer is None and (not self.direct or np.frombuffer(value, np.uint8).ctypes.data % PAGE == 0)

    def read(self, placed: Placed, into: memoryview) -> bool:
        """Read a value, with the padding behind it, into a page-aligned buffer of whole pages. Returns whether its digest is right.

        Raises:
            ShortRead: The file was cut.
            OSError: EIO and its kin.
        """
        if placed.salt or self.sealer is not None:
            return self._read_sealed(placed, into)
        digest = xxhash.xxh3_128()
        for start in range(0, placed.size, _PIECE):
            self._read_all(into[start : start + _PIECE], placed.offset + PAGE + start)
            digest.update(into[start : min(start + _PIECE, placed.size)])
        return digest.digest() == placed.digest

    def read_run(self, run: Sequence[tuple[Placed, memoryview]]) -> bool:
        """Read slots that lie one behind the other, in one request.

        Returns:
            False where not all of it came or not all is right: read them one by one.

        Raises:
            OSError: EIO and its kin.
        """
        header = self._scratch()[:PAGE]  # what lies between two values goes nowhere
        parts = [part for _, into in run for part in (header, into)][1:]
        got = os.preadv(self._fd, parts, run[0][0].offset + PAGE)
        return got == sum(part.nbytes for part in parts) and all(
            xxhash.xxh3_128_digest(into[: placed.size]) == placed.digest for placed, into in run
        )

    def has_header(self, placed: Placed) -> bool:
        """Whether the slot's header is the one that was written for this value."""
        page = self._scratch()[:PAGE]
        try:
            self._read_all(page, placed.offset)
        except OSError:
            return False
        return page == placed.header()

    def zero(self, offset: int, nbytes: int) -> None:
        """Write zeros over whole pages, so that the file system need not allocate them later.

        Raises:
            OSError: ENOSPC, EIO.
        """
        scratch = self._scratch()
        scratch[:] = bytes(_BOUNCE)
        for start in range(0, nbytes, _BOUNCE):
            self._write_all([scratch[: min(_BOUNCE, nbytes - start)]], offset + start)

    def sync(self) -> None:
        """Make everything written so far durable.

        Raises:
            OSError: EIO: what was written since the last sync may be lost.
        """
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)

    def _write_sealed(self, sealer: Sealer, placed: Placed, value: memoryview) -> Placed:
        """As `write`: what this thread has sealed of it goes out while other threads seal theirs."""
        placed = msgspec.structs.replace(placed, salt=sealer.salt())
        stream, scratch = sealer.sealing(placed.salt, placed.bound), self._scratch()
        for start in range(0, value.nbytes, _BOUNCE):
            piece = value[start : start + _BOUNCE]
            stream.update_into(piece, scratch[: piece.nbytes])
            whole = rounded(piece.nbytes)
            scratch[piece.nbytes : whole] = bytes(whole - piece.nbytes)
            self._write_all([scratch[:whole]], placed.offset + PAGE + start)
        placed = msgspec.structs.replace(placed, digest=stream.tag())
        scratch[:PAGE] = placed.header()
        self._write_all([scratch[:PAGE]], placed.offset)
        return placed

    def _read_sealed(self, placed: Placed, into: memoryview) -> bool:
        """As `read`, opened where it lies; bytes of it are of no worth before all of it is."""
        if self.sealer is None or not placed.salt:
            return False
        stream = self.sealer.opening(placed.salt, placed.bound)
        for start in range(0, placed.size, _PIECE):
            self._read_all(into[start : start + _PIECE], placed.offset + PAGE + start)
            piece = into[start : min(start + _PIECE, placed.size)]
            stream.update_into(piece, piece)
        return stream.holds(placed.digest)

    def _whole_pages(self, value: memoryview, at: int = 0, *, bounce: bool = False) -> list[memoryview]:
        """What a value, the `at`-th of a run, is written from: its whole pages, and a page of this thread's for the rest."""
        scratch = self._scratch()
        whole = 0 if bounce else value.nbytes // PAGE * PAGE
        rest = value.nbytes - whole
        if not rest:
            return [value]
        tail = scratch[: rounded(rest)] if bounce else scratch[2 * PAGE * at + PAGE : 2 * PAGE * (at + 1)]
        tail[:rest] = value[whole:]
        tail[rest:] = bytes(tail.nbytes - rest)
        return [value[:whole], tail] if whole else [tail]

    def _scratch(self) -> memoryview:
        view: memoryview | None = getattr(self._own, "view", None)
        if view is None:
            view = self._own.view = memoryview(mmap.mmap(-1, _BOUNCE))
        return view

    def _write_all(self, parts: list[memoryview], offset: int) -> None:
        while parts:
            written = os.pwritev(self._fd, parts, offset)
            if not written:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += written
            while parts and written >= parts[0].nbytes:
                written -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][written:]

    def _read_all(self, into: memoryview, offset: int) -> None:
        while into.nbytes:
            got = os.preadv(self._fd, [into], offset)
            if not got or got % PAGE:  # only the end of a file is no whole page
                raise ShortRead(errno.EIO, "the slab ends before the slot does")
            offset += got
            into = into[got:]
