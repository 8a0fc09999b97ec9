"""The tensors of one block, worked on by several threads: a block that is alone uses every core, and of many each uses one."""

from __future__ import annotations

import threading
from collections.abc import Callable

Share = Callable[[Callable[[], bool]], None]
"""Has other threads call a step, too, until it returns False: those that have nothing better to do, or none. It raises nothing.

`tiering.Movers.share` is one."""


def each(work: Callable[[int], object], count: int, share: Share | None = None) -> None:
    """`work` of 0 to `count - 1`, each once: by this thread and by those that `share` finds. When it is over, nobody works.

    Raises:
        Exception: One that `work` raised; what was not begun by then is left out.
    """
    if share is None or count < 2:
        for index in range(count):
            work(index)
        return
    steps = _Steps(work, count)
    share(steps.step)
    while steps.step():
        pass
    steps.wait()


class _Steps:
    def __init__(self, work: Callable[[int], object], count: int) -> None:
        self._work: Callable[[int], object] | None = work
        self._next, self._count = 0, count
        self._under_way = 0
        self._error: Exception | None = None
        self._changed = threading.Condition()

    def step(self) -> bool:
        with self._changed:
            work, index = self._work, self._next
            if work is None or index == self._count or self._error is not None:
                return False
            self._next, self._under_way = index + 1, self._under_way + 1
        error: Exception | None = None
        try:
            work(index)
        except Exception as found:  # noqa: BLE001  raised by `wait`, in the thread that asked
            error = found
        del work
        with self._changed:
            if error is not None:
                self._error = error
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()
        return True

    def wait(self) -> None:
        """Until those who began have ended. Who comes later finds nothing, and keeps no buffer alive."""
        with self._changed:
            self._changed.wait_for(lambda: not self._under_way)
            self._work = None
        if self._error is not None:
            raise self._error
