"""What a read of the data plane hands over: the bytes of a leading run of blocks, lent until they are released."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

import numpy as np

from kvstore.copying import copy


class BlockLease:
    """One block's raw object (:mod:`kvstore.codec`), lent. Its bytes stay as they are until `release`.

    Attributes:
        view: The object's bytes, read-only. Do not use it, nor an array made of it, after the release.
        size: Its length in bytes.
    """

    __slots__ = ("_release", "size", "view")

    def __init__(self, view: memoryview, release: Callable[[], None]) -> None:
        self.view = view.toreadonly()
        self.size = view.nbytes
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Give it back, from any thread. A second call does nothing."""
        release, self._release = self._release, None
        if release is not None:
            release()


def _always() -> bool:
    return True


class Blocks:
    """The longest leading run of what was asked for.

    Attributes:
        miss: Why the run ended (`absent`, `timeout`, `corrupt`, `full`, `unavailable`), or "" where it is complete.
    """

    __slots__ = ("_intact", "_leases", "miss")

    def __init__(self, leases: list[BlockLease], miss: str, intact: Callable[[], bool] = _always) -> None:
        self._leases: Sequence[BlockLease] = leases
        self.miss = miss
        self._intact = intact

    @property
    def leases(self) -> Sequence[BlockLease]:
        """One for each block of the run, in order."""
        return self._leases

    @property
    def intact(self) -> bool:
        """Whether the lender is still there. Ask after copying out: where it is not, the bytes may have been reused meanwhile."""
        return self._intact()

    def copy_into(self, buffers: Sequence[memoryview | np.ndarray], *, skip: int = 0) -> int:
        """Copy the blocks out, at the speed of memory and without the GIL.

        Args:
            buffers: One for each block, in order, contiguous and exactly as long as what is copied; there may be more.
            skip: Bytes to leave out at the beginning of each object: `codec.layout(...).header_bytes` for the tensors alone.

        Returns:
            How many leading blocks are in the buffers, intact: all of them, or none where the lender has gone meanwhile.

        Raises:
            ValueError: A buffer has another length.
        """
        for lease, buffer in zip(self.leases, buffers, strict=False):
            copy(buffer, lease.view[skip:])
        return min(len(self.leases), len(buffers)) if self.intact else 0

    def release(self) -> None:
        """Give back every lease."""
        for lease in self.leases:
            lease.release()

    def __len__(self) -> int:
        return len(self.leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class DeviceBlock(Protocol):
    """One block's raw object in a device's memory, lent. What is queued on a stream after `wait` finds its bytes.

    Attributes:
        tensor: The object, u8 [size], a torch tensor on that device. Do not write there.
        size: Its length in bytes.
        coming: Whether some of it is not queued yet.
    """

    @property
    def coming(self) -> bool:
        """See above."""
        ...

    @property
    def tensor(self) -> Any:
        """See above."""
        ...

    @property
    def size(self) -> int:
        """See above."""
        ...

    async def arrived(self, part: int = -1) -> bool:
        """Until that layer and those before it (-1: all of it) may be waited for; False where the block does not come whole."""
        ...

    def wait(self, part: int = -1) -> None:
        """The caller's current stream waits until that layer and those before it are there; the host goes on."""
        ...

    def synchronize(self, part: int = -1) -> None:
        """As `wait`, for the host."""
        ...

    def release(self) -> None:
        """Give it back, once the work that uses it is queued on the current stream. A second call does nothing."""
        ...


class DeviceBlocks:
    """As `Blocks`, in a device's memory. One thread at a time uses it.

    Attributes:
        leases: One for each block of the run, in order. Where they were asked for early, the run ends sooner once a block turns out
            not to come.
        miss: Why the run ended, or "" where it is complete.
    """

    __slots__ = ("_bringing", "_loop", "leases", "miss")

    def __init__(self, leases: Sequence[DeviceBlock], miss: str, bringing: asyncio.Task[str] | None = None) -> None:
        self.leases, self.miss, self._bringing = leases, miss, bringing
        self._loop = asyncio.get_running_loop()

    async def arrived(self, layer: int = -1) -> int:
        """Until a layer (its index in the shard), and those before it, of all blocks may be waited for; on the loop of the store.

        Returns:
            How many leading blocks have it. It never grows from layer to layer. Where it shrinks, a block did not come whole (it
            was corrupt, or late): the layers of it that were used before are of no worth either.
        """
        for index, lease in enumerate(self.leases):
            if not await lease.arrived(layer):
                self._end_at(index)
                break
        return len(self.leases)

    def wait_layer(self, layer: int = -1) -> int:
        """As `arrived` and `wait` together, for any thread but that of the store's loop: blocks until the layer may be used.

        Raises:
            RuntimeError: This is the loop's thread, which would wait for itself.
        """
        try:
            inside = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            inside = False
        if inside:
            raise RuntimeError("on the store's own loop, await arrived() instead")
        blocks = asyncio.run_coroutine_threadsafe(self.arrived(layer), self._loop).result()
        self.wait(layer)
        return blocks

    def wait(self, layer: int = -1) -> None:
        """The caller's current stream waits until a layer (its index in the shard) and those before it are there in every block.

        Raises `ValueError` where one was asked for early, and has not arrived.
        """
        for lease in self.leases:
            lease.wait(layer)

    def release(self) -> None:
        """Give back every lease. Where some block was still on its way, bringing them is given up."""
        early = any(lease.coming for lease in self.leases)
        for lease in self.leases:
            lease.release()
        if early and self._bringing is not None and not self._bringing.done():
            self._loop.call_soon_threadsafe(self._bringing.cancel)

    def _end_at(self, index: int) -> None:
        leases, self.leases = self.leases, self.leases[:index]
        for lease in leases[index:]:
            lease.release()
        over = self._bringing is not None and self._bringing.done() and not self._bringing.cancelled()
        self.miss = (self._bringing.result() if self._bringing is not None and over else "") or "unavailable"

    def __len__(self) -> int:
        return len(self.leases)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
