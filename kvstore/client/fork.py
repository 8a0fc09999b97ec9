"""After fork(), sockets, loops and leases belong to the parent. The child is told at once, and keeps no connection open for it."""

from __future__ import annotations

import os
import stat
import weakref

from kvstore.errors import Closed


class Birth:
    """Which process something was opened in."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is still that process."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises `Closed`, kind `forked`, in a child."""
        if not self.here:
            raise Closed(
                "this client was opened before fork(), in the parent process",
                kind="forked",
                remedy="open another client in the child, or use the `spawn` start method",
            )


class ParentSocket:
    """A connected socket that a forked child must not hold: while it did, the node would never see the parent die.

    In the child /dev/null takes the descriptor's place, so that the number stays taken and no loop of the parent is disturbed.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._inode = fd, os.fstat(fd).st_ino
        _held.add(self)

    def leave(self) -> None:
        """In the child."""
        try:
            found = os.fstat(self._fd)
        except OSError:
            return
        if not stat.S_ISSOCK(found.st_mode) or found.st_ino != self._inode:
            return  # it was closed, and the number belongs to something else
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        os.dup2(null, self._fd, inheritable=False)
        os.close(null)


_held: weakref.WeakSet[ParentSocket] = weakref.WeakSet()


def _after_fork() -> None:
    for held in list(_held):
        held.leave()


os.register_at_fork(after_in_child=_after_fork)
