"""Blocks in a GPU's memory: copied on streams of their own, behind what the engine has begun, through pinned memory.

Never run on a GPU yet: its tests run the same code on the CPU, where streams and events do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.codec.layout import Layout
from kvstore.connectors.vllm_layout import HostPages
from kvstore.connectors.vllm_messages import NOWHERE
from kvstore.errors import Unsupported
from kvstore.ids import Namespace


class _Lane(threading.local):
    """What each copying thread has of its own: a stream, and pinned memory for one block."""

    stream: Any = None
    pinned: Any = None


class DevicePages(HostPages):
    """As `HostPages`, where the engine's blocks are in a device's memory."""

    def __init__(self, plan: Layout, caches: Sequence[Any], namespace: Namespace, blocks: int, pages: int) -> None:
        import torch  # noqa: PLC0415  only an engine has it

        self._device = caches[0].device
        if self._device.type not in {"cuda", "cpu"}:
            raise Unsupported(f"KV in the memory of a {self._device.type} device is not held yet", remedy="remove the connector")
        self._torch, self._streams, self._lane = torch, torch.get_device_module(self._device), _Lane()
        super().__init__(plan, caches, namespace, blocks, pages)

    def mark(self) -> Any:
        """See the base class."""
        event = self._streams.Event()
        event.record(self._streams.current_stream())
        return event

    def read(self, pages: Sequence[int], tokens: np.ndarray, payload: memoryview, mark: Any) -> None:
        """See the base class. The block is there when this returns."""
        stream, pinned = self._mine()
        stream.wait_event(mark)
        with self._streams.stream(stream):
            rows = self._index(self._rows(pages))
            for view, offset, size in zip(self._views, self._plan.offsets, self._plan.sizes, strict=False):
                part = view.index_select(0, rows)
                pinned[offset : offset + size].view(part.dtype).view(part.shape).copy_(part, non_blocking=True)
        self._ended(stream)
        whole = np.frombuffer(payload, np.uint8)
        whole[: pinned.numel()] = pinned.numpy()
        self._put_tokens(whole, tokens)

    def write(self, pages: Sequence[int], raw: memoryview, mark: Any) -> None:
        """See the base class. The engine has the block when this returns."""
        stream, pinned = self._mine()
        pinned.numpy()[:] = np.frombuffer(raw, np.uint8)[self._plan.header_bytes :][: pinned.numel()]
        rows = self._rows(pages)
        kept = [index for index, row in enumerate(rows) if row != NOWHERE]
        stream.wait_event(mark)
        with self._streams.stream(stream):
            there, mine = self._index([rows[index] for index in kept]), self._index(kept)
            for view, offset, size in zip(self._views, self._plan.offsets, self._plan.sizes, strict=False):
                part = pinned[offset : offset + size].view(view.dtype).view(len(rows), *view.shape[1:])
                view.index_copy_(0, there, part.to(self._device, non_blocking=True).index_select(0, mine))
        self._ended(stream)

    def _ended(self, stream: Any) -> None:
        """Wait until what this thread began has ended."""
        event = self._streams.Event()
        event.record(stream)
        event.synchronize()

    def _mine(self) -> tuple[Any, Any]:
        """This thread's stream and memory."""
        lane = self._lane
        if lane.stream is None:
            if self._device.type == "cuda":
                self._streams.set_device(self._device)
            lane.stream = self._streams.Stream()
            size = sum(self._plan.sizes[: len(self._views)])
            lane.pinned = self._torch.empty(size, dtype=self._torch.uint8, pin_memory=self._device.type != "cpu")
        return lane.stream, lane.pinned

    def _index(self, rows: Sequence[int]) -> Any:
        return self._torch.tensor(rows, dtype=self._torch.int64, device=self._device)

    @staticmethod
    def _held(found: list[Any]) -> list[Any]:
        return found
