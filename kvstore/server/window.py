"""The write window of one connection: shared memory that its client fills and the node copies out of."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import numpy as np

# From <linux/fcntl.h>; Python 3.11's fcntl has no names for them.
_F_ADD_SEALS: Final = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4
_LARGE: Final = 12 << 20  # smaller ones are copied while the client fills the next ones
_PART: Final = 4 << 20


class Window:
    """A memfd that can be written by both sides and resized by neither: a client that cut it would end the node by SIGBUS.

    Its pages become real, and are charged to the client, when the client first writes them.

    Attributes:
        fd: To be handed over.
        size: Bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fd = os.memfd_create("kvtier-window", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size)
            fcntl.fcntl(self.fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            self._memory = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except BaseException:
            os.close(self.fd)
            raise

    def holds(self, offset: int, length: int) -> bool:
        """Whether an extent that a client names lies inside."""
        return offset >= 0 and 0 < length <= self.size - offset

    def copies(self, extents: Sequence[tuple[int, memoryview]]) -> list[Callable[[], None]]:
        """What copies from each offset into its view, all of it. A large block is worth two threads, a small one is not."""
        small = [extent for extent in extents if extent[1].nbytes < _LARGE]
        parts = [
            (offset + at, into[at : at + _PART])
            for offset, into in extents
            if into.nbytes >= _LARGE
            for at in range(0, into.nbytes, _PART)
        ]
        return [partial(self.copy_out, group) for group in ([small] if small else []) + [[part] for part in parts]]

    def copy_out(self, extents: list[tuple[int, memoryview]]) -> None:
        """Copy from each offset into its view, all of it; for a mover thread (numpy lets go of the GIL, a slice does not).

        The client may write at the same time. What lands is then a mixture of its own making, digested as it is.
        """
        memory = np.frombuffer(self._memory, np.uint8)
        for offset, into in extents:
            np.copyto(np.frombuffer(into, np.uint8), memory[offset : offset + into.nbytes])

    def close(self) -> None:
        """Let go of it."""
        with contextlib.suppress(BufferError):
            self._memory.close()
        os.close(self.fd)
