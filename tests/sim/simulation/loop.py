"""An event loop without a clock, threads or sockets: when nothing is left to do, time jumps to the next timer."""

import asyncio
import selectors


class Stuck(Exception):
    """Everybody waits for something that will never happen."""


class _Nothing(selectors.SelectSelector):
    """No file is ever ready; waiting is what moves the time."""

    def __init__(self):
        super().__init__()
        self.now = 0.0

    def select(self, timeout=None):
        if timeout is None:
            raise Stuck("every task waits, and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Callbacks run as they were scheduled, timers in the order of their time: nothing depends on the machine."""

    def __init__(self):
        self._virtual = _Nothing()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now


def run(main):
    """As `asyncio.run`, on a loop of this kind."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
