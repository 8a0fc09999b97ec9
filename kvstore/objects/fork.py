"""A store opened before fork() hangs for ever in the child, even one opened there anew: obstore's threads are not copied.

So the child is told at once instead, and what to do about it.
"""

from __future__ import annotations

import os

from kvstore.errors import Closed


class _Process:
    """Of this process: whether an S3 store was ever opened in it, and whether it was forked off after that."""

    opened = False
    forked = False


def opened() -> None:
    """From now on a forked child cannot use S3."""
    _Process.opened = True


def refuse_in_child() -> None:
    """Raises `Closed`, kind `forked`, in a process that was forked off after a store was opened."""
    if _Process.forked:
        raise Closed("this process was forked off after an S3 store had been opened; the store does not work here", kind="forked")


def in_child() -> bool:
    """Whether this process was forked off after a store was opened."""
    return _Process.forked


def _after_fork() -> None:
    _Process.forked = _Process.opened


os.register_at_fork(after_in_child=_after_fork)
