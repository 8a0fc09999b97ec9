"""One block of shared memory that its owner writes and other processes may only read."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

from tiering.extents import PAGE

# From <linux/fcntl.h> and <linux/mman.h>; Python 3.11's modules do not name them all.
_F_ADD_SEALS = 1033
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW, _F_SEAL_FUTURE_WRITE = 1, 2, 4, 16
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)  # a CDLL call releases the GIL; mmap.madvise does not


class Arena:
    """A memfd of fixed size. After `create` has mapped it, no other writable mapping can be made, and nothing can resize it.

    A reader that was handed `fd` (SCM_RIGHTS) maps it read-only. A file opened read-only would not do: it can be opened for
    writing again through /proc.

    Attributes:
        fd: To be handed over.
        size: Bytes, a multiple of a page.
        view: All of it, writable.
    """

    def __init__(self, fd: int, memory: mmap.mmap) -> None:
        self.fd = fd
        self.size = len(memory)
        self.view = memoryview(memory)
        self._memory = memory

    @classmethod
    def create(cls, name: str, size: int) -> Arena:
        """Make one of at least `size` bytes; pages are real only when first touched, or by `populate`.

        Raises:
            OSError: No memory, or no memfd on this system.
        """
        size = -(-size // PAGE) * PAGE
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, size)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
            memory = mmap.mmap(fd, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(fd, _F_ADD_SEALS, _F_SEAL_FUTURE_WRITE | _F_SEAL_SEAL)
        except BaseException:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):  # large pages, where the system gives them to shared memory that asks; never needed
            memory.madvise(mmap.MADV_HUGEPAGE)
        return cls(fd, memory)

    def populate(self, offset: int, nbytes: int) -> None:
        """Make these pages real, leaving their bytes as they are: safe while others write there.

        Raises:
            OSError: The system refuses the memory.
        """
        nbytes = min(nbytes, self.size - offset)
        start = np.frombuffer(self._memory, np.uint8).ctypes.data
        if not _libc.madvise(ctypes.c_void_p(start + offset), ctypes.c_size_t(nbytes), _MADV_POPULATE_WRITE):
            return
        error = ctypes.get_errno()
        if error != errno.EINVAL:
            raise OSError(error, os.strerror(error))
        # Linux before 5.14. Reading a page of shared memory is enough to allocate it.
        self.view[offset : offset + nbytes : PAGE].tobytes()

    def close(self) -> None:
        """Let go of the file and the mapping. Views that are still out stay valid; the memory is freed with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.view.release()
            with contextlib.suppress(BufferError):  # leases are out; the mapping goes with the last view
                self._memory.close()
