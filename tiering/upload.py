"""Copies of values from the host into device memory: part by part, from registered memory or through two pinned buffers."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from tiering.streams import Device, Mark

if TYPE_CHECKING:
    from torch import Tensor

PIECE: Final = 1 << 20  # of a value in one copy, at least: parts that are smaller go together
BOUNCE: Final = 8 << 20  # of each of two pinned buffers


class Source(msgspec.Struct, frozen=True):
    """A value on the host, and where it starts in the registered arena (-1: it is not in it)."""

    view: memoryview
    offset: int = -1


class Cargo:
    """What is copied of a value, and where to.

    Attributes:
        tensor: The room for it, u8 [size].
        ends: Where its parts end.
        head: So many leading bytes tell all the others apart: they hold digests of them.
        marks: (end, mark) of each copy queued by now, in order of the ends.
        busy: Until when the room's last user may be using it.
        closed: Nothing more is copied there: by now the room may be another's.
    """

    __slots__ = ("busy", "closed", "ends", "head", "marks", "pieces", "tensor", "told")

    def __init__(self, tensor: Tensor, ends: Sequence[int], head: int, busy: list[Mark]) -> None:
        self.tensor, self.ends, self.head, self.busy = tensor, ends, head, busy
        self.pieces = pieces(ends)
        self.marks: list[tuple[int, Mark]] = []
        self.closed = False
        self.told: bytes | None = None  # the head of what was copied before all of it was there

    @property
    def complete(self) -> bool:
        """Whether all of it is queued."""
        return len(self.marks) == len(self.pieces)

    def mark(self, part: int) -> Mark | None:
        """Behind the copy of a part; None where it is not queued yet. Raises `IndexError` where there is no such part."""
        at = bisect_left(self.marks, self.ends[part], key=lambda each: each[0])
        return self.marks[at][1] if at < len(self.marks) else None


class Differs(Exception):
    """These are not the bytes whose beginning was copied before."""


class Uploads:
    """Queues them, from any thread, one batch at a time: part i of all its values comes before part i + 1 of any.

    Args:
        device: Whose memory.
        arena: Memory of the host that the device's driver has registered, u8; None where there is none.
    """

    def __init__(self, device: Device, arena: Tensor | None) -> None:
        self._device = device
        self.arena = arena
        self._bounce: list[tuple[Tensor, Mark]] = []
        self._turn = threading.Lock()
        self._closed = False

    def queue(self, batch: Sequence[tuple[Cargo, Source]]) -> list[Cargo]:
        """Queue what is not queued yet of whole values; returns those that differ from what was copied of them before.

        Raises `RuntimeError` where the device fails, or was closed.
        """
        with self._turn:
            if self._closed:
                raise RuntimeError("the device was closed")
            sound = [(cargo, source) for cargo, source in batch if _agrees(cargo, source) and not cargo.closed]
            for cargo, _ in sound:
                self._follow(cargo)
            for part in range(max((len(cargo.pieces) for cargo, _ in sound), default=0)):
                here = [(cargo, source) for cargo, source in sound if len(cargo.marks) == part < len(cargo.pieces)]
                for cargo, source in here:
                    self._piece(cargo, source, part)
                if here:
                    mark = self._device.mark()
                    for cargo, _ in here:
                        cargo.marks.append((cargo.pieces[part], mark))
            return [cargo for cargo, source in batch if not _agrees(cargo, source)]

    def advance(self, cargo: Cargo, source: Source, end: int) -> bool:
        """Queue the pieces that end within the first `end` bytes, all that are there; whether there was any that is new.

        Raises:
            Differs: It is another value than before.
            RuntimeError: The device fails.
        """
        with self._turn:
            first, last = len(cargo.marks), bisect_right(cargo.pieces, end)
            if last <= first or cargo.closed or self._closed:
                return False
            if cargo.told is None and not first:
                cargo.told = bytes(source.view[: cargo.head])
            if not _agrees(cargo, source):
                raise Differs
            self._follow(cargo)
            for part in range(first, last):
                self._piece(cargo, source, part)
            mark = self._device.mark()
            cargo.marks += [(cargo.pieces[part], mark) for part in range(first, last)]
            return True

    def close(self) -> None:
        """Wait for what is queued, and let go of the host's memory. A second call does nothing."""
        with self._turn:
            if not self._closed:
                self._closed = True
                self._device.close()
            self.arena = None
            self._bounce.clear()

    def _follow(self, cargo: Cargo) -> None:
        """What is copied to its room comes behind whoever used it last."""
        for mark in cargo.busy:
            self._device.after(mark)
        cargo.busy.clear()

    def _piece(self, cargo: Cargo, source: Source, part: int) -> None:
        start, end = cargo.pieces[part - 1] if part else 0, cargo.pieces[part]
        if self.arena is not None and source.offset >= 0:
            self._device.copy(cargo.tensor[start:end], self.arena[source.offset + start : source.offset + end])
            return
        for at in range(start, end, BOUNCE):
            stop = min(at + BOUNCE, end)
            room = self._bounced(memoryview(source.view)[at:stop])
            self._device.copy(cargo.tensor[at:stop], room)
            self._bounce.append((self._bounce.pop(0)[0], self._device.mark()))

    def _bounced(self, view: memoryview) -> Tensor:
        """These bytes in the pinned buffer that was filled longest ago, once they have left it."""
        while len(self._bounce) < 2:
            self._bounce.insert(0, (self._device.staging(BOUNCE), self._device.mark()))
        buffer, left = self._bounce[0]
        left.wait()
        np.copyto(buffer.numpy()[: view.nbytes], np.frombuffer(view, np.uint8))
        return buffer[: view.nbytes]


def _agrees(cargo: Cargo, source: Source) -> bool:
    return cargo.told is None or source.view[: cargo.head] == cargo.told


def pieces(ends: Sequence[int]) -> list[int]:
    """Parts put together until each piece has at least `PIECE` bytes; where the pieces end."""
    found, start = [], 0
    for end in ends:
        if end - start >= PIECE or end == ends[-1]:
            found.append(end)
            start = end
    return found
