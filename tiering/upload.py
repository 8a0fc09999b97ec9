"""Copies of values from the host into device memory: part by part, from registered memory or through two pinned buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from tiering.streams import Device, Mark
from tiering.tier import Want

if TYPE_CHECKING:
    from torch import Tensor

PIECE: Final = 1 << 20  # of a value in one copy, at least: parts that are smaller go together
BOUNCE: Final = 8 << 20  # of each of two pinned buffers


class Item(msgspec.Struct, frozen=True):
    """A value on the host, where it starts in the registered arena (-1: it is not in it), and in which tier it was."""

    want: Want
    view: memoryview
    offset: int = -1
    name: str = ""


class Value:
    """A value on the device.

    Attributes:
        ends: Where its parts end.
        marks: (end, mark) of each copy, in order of the ends.
        leases: How many use it.
        busy: Until when streams may use it although it is not leased any more.
    """

    __slots__ = ("busy", "ends", "key", "leases", "marks", "size", "tensor")

    def __init__(self, want: Want, tensor: Tensor, ends: Sequence[int], busy: list[Mark]) -> None:
        self.key, self.size, self.tensor, self.ends, self.busy = want.key, want.size, tensor, ends, busy
        self.marks: list[tuple[int, Mark]] = []
        self.leases = 0


class Uploads:
    """Queues them, one batch at a time.

    Args:
        device: Whose memory.
        arena: Memory of the host that the device's driver has registered, u8; None where there is none.
    """

    def __init__(self, device: Device, arena: Tensor | None) -> None:
        self._device = device
        self.arena = arena
        self._bounce: list[tuple[Tensor, Mark]] = []

    def queue(self, batch: Sequence[tuple[Value, Item]]) -> None:
        """Queue copies, part by part over the whole batch, and a mark behind every part."""
        steps = [(value, source, pieces(value.ends)) for value, source in batch]
        for value, _ in batch:
            for mark in value.busy:
                self._device.after(mark)
            value.busy.clear()
        for part in range(max(len(ends) for _, _, ends in steps)):
            here = [(value, source, ends) for value, source, ends in steps if part < len(ends)]
            for value, source, ends in here:
                self._copy(value.tensor, source, ends[part - 1] if part else 0, ends[part])
            mark = self._device.mark()
            for value, _, ends in here:
                value.marks.append((ends[part], mark))

    def _copy(self, target: Tensor, source: Item, start: int, end: int) -> None:
        if self.arena is not None and source.offset >= 0:
            self._device.copy(target[start:end], self.arena[source.offset + start : source.offset + end])
            return
        for at in range(start, end, BOUNCE):
            stop = min(at + BOUNCE, end)
            room = self._bounced(memoryview(source.view)[at:stop])
            self._device.copy(target[at:stop], room)
            self._bounce.append((self._bounce.pop(0)[0], self._device.mark()))

    def _bounced(self, view: memoryview) -> Tensor:
        """These bytes in the pinned buffer that was filled longest ago, once they have left it."""
        while len(self._bounce) < 2:
            self._bounce.insert(0, (self._device.staging(BOUNCE), self._device.mark()))
        buffer, left = self._bounce[0]
        left.wait()
        np.copyto(buffer.numpy()[: view.nbytes], np.frombuffer(view, np.uint8))
        return buffer[: view.nbytes]

    def close(self) -> None:
        """Nothing is queued any more: let go of the host's memory."""
        self.arena = None
        self._bounce.clear()


def pieces(ends: Sequence[int]) -> list[int]:
    """Parts put together until each piece has at least `PIECE` bytes; where the pieces end."""
    found, start = [], 0
    for end in ends:
        if end - start >= PIECE or end == ends[-1]:
            found.append(end)
            start = end
    return found
