"""KV between a client's memory and a model's: at once on the host, through pinned memory and on a stream of its own on a device.

Importing this imports torch: `hf_cache` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch


class Room(Protocol):
    """Where a restored session's KV is put together.

    Attributes:
        kv: `[layers, 2 (K, V), tokens, kv_heads, head_dim]`. The caller's current stream may use it after `close`.
        pages: Its memory, where making pages real ahead of their use saves time.
    """

    kv: torch.Tensor
    pages: np.ndarray | None

    def write(self, at: int, kv: np.ndarray) -> None:
        """Copy a block's KV to the tokens from `at` on. When this returns, the block may change."""
        ...

    def close(self) -> None:
        """Nothing is written any more: the caller's current stream goes on behind what was."""
        ...


class HostRoom:
    """A room for a model on the host: `kv` is a view of the buffer."""

    def __init__(self, buffer: np.ndarray, dtype: torch.dtype) -> None:
        self.kv, self._buffer = torch.from_numpy(buffer).view(dtype), buffer
        self.pages: np.ndarray | None = buffer

    def write(self, at: int, kv: np.ndarray) -> None:
        """See `Room`."""
        np.copyto(self._buffer[:, :, at : at + kv.shape[2]], kv)

    def close(self) -> None:
        """See `Room`."""


class DeviceRoom:
    """A room in a device's memory: one block is copied there while the next one is put into pinned memory.

    It is made and closed under the same current stream: torch gives its memory away again in the order of that one.

    Args:
        shape: Of the room.
        dtype: Of its elements.
        device: The model's. On any but a CUDA device, the same steps are over one by one.
        block_tokens: Most tokens of a block.
    """

    pages: np.ndarray | None = None

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, block_tokens: int) -> None:
        self.kv = torch.empty(shape, dtype=dtype, device=device)
        self._lane = Lane(device)  # behind the memory's last user, who was on the caller's stream
        self._block, self._dtype = (*shape[:2], block_tokens, *shape[3:]), dtype
        self._pinned: list[Pinned] = []  # two, once there is something to copy

    def write(self, at: int, kv: np.ndarray) -> None:
        """See `Room`."""
        pinned = self._pinned.pop(0) if len(self._pinned) > 1 else Pinned(self._block, self._dtype, self._lane)
        self._pinned.append(pinned)
        pinned.wait()
        host, bits = pinned.part(kv.shape)
        np.copyto(bits, kv)
        with self._lane.current():
            self.kv[:, :, at : at + kv.shape[2]].copy_(host, non_blocking=self._lane.cuda)
        pinned.used()

    def close(self) -> None:
        """See `Room`."""
        self._lane.join()


class Source(NamedTuple):
    """What a layer of a cache has of one sequence.

    Attributes:
        first: The first token it has.
        keys: From there on, `[kv_heads, tokens, head_dim]`.
        values: Likewise.
    """

    first: int
    keys: torch.Tensor
    values: torch.Tensor

    def part(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the tokens from `start` on, `[tokens, kv_heads, head_dim]` each: as blocks have them."""
        begin = start - self.first
        return self.keys[:, begin : begin + tokens].transpose(0, 1), self.values[:, begin : begin + tokens].transpose(0, 1)


class Leaving:
    """Copies blocks out of a cache on a device, behind what the caller's stream was computing when this was made.

    Args:
        sources: The cache's layers; they stay as they are.
        shape: Of the largest block.
        dtype: Of its elements.
        device: The cache's.
    """

    def __init__(self, sources: Sequence[Source], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self._sources, self._lane = sources, Lane(device)
        self._pinned = Pinned(shape, dtype, self._lane)

    def copy_out(self, start: int, kv: np.ndarray) -> None:
        """Copy the tokens from `start` on, as many as `kv` has room for. From any thread, one at a time."""
        host, bits = self._pinned.part(kv.shape)
        with self._lane.current():
            for source, parts in zip(self._sources, host, strict=True):
                for target, tokens in zip(parts, source.part(start, kv.shape[2]), strict=True):
                    target.copy_(tokens, non_blocking=self._lane.cuda)
        self._pinned.used()
        self._pinned.wait()
        np.copyto(kv, bits)


class Lane:
    """A stream of our own, which begins where the caller's is now; nothing but a name for it on other devices."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.cuda = device, device.type == "cuda"
        if self.cuda:
            self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
            self.stream.wait_stream(torch.cuda.current_stream(device))

    def current(self) -> AbstractContextManager[Any]:
        """Make it the current stream of this thread."""
        return torch.cuda.stream(self.stream) if self.cuda else nullcontext()

    def join(self) -> None:
        """The caller's current stream goes on behind what was queued here."""
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)


class Pinned:
    """A block's KV on the host, where a device copies without the host waiting for it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, lane: Lane) -> None:
        self._flat = torch.empty(int(np.prod(shape)), dtype=dtype, pin_memory=lane.cuda)
        bits = torch.uint16 if dtype is torch.bfloat16 else dtype  # numpy has no bfloat16
        self._bits = self._flat.view(bits).numpy()
        self._lane = lane
        self._event: Any = torch.cuda.Event(blocking=True) if lane.cuda else None  # type: ignore[no-untyped-call]  # torch's own

    def part(self, shape: tuple[int, ...]) -> tuple[torch.Tensor, np.ndarray]:
        """Its beginning in that shape, contiguous: as a tensor, and as the same bits in numpy."""
        size = int(np.prod(shape))
        return self._flat[:size].view(shape), self._bits[:size].reshape(shape)

    def used(self) -> None:
        """What the stream has been given so far uses it."""
        if self._event is not None:
            self._event.record(self._lane.stream)

    def wait(self) -> None:
        """Until the stream uses it no more; at once where it never did."""
        if self._event is not None:
            self._event.synchronize()
