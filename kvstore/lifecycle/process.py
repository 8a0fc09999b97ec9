"""The collector as a process of its own: `python -m kvstore.lifecycle.process`, started by a node, with jobs on its input.

It runs at a low priority and shares no interpreter with the serving loop. It ends when its input does, so that none is left
behind by a node that was killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstore import api
from kvstore.clock import Clock, RandomIds, SystemClock
from kvstore.config import load
from kvstore.errors import KVTierError
from kvstore.lifecycle.collector import Progress
from kvstore.lifecycle.direct import DirectCollector
from kvstore.lifecycle.messages import BEAT_S, MAX_LINE, Ended, Event, Failed, Job, Progressed, Setup, Spent

log = logging.getLogger(__name__)
NICE: Final = 10  # 19 would starve it where every core is busy for days: then nothing is ever collected
_TELL_EVERY_S: Final = 1.0


class _Teller:
    """Writes events; of progress, one a second and never none for long."""

    def __init__(self, clock: Clock, spent: Callable[[], Spent]) -> None:
        self._clock, self._spent = clock, spent
        self._last = Progress()
        self._told = float("-inf")

    def watch(self, progress: Progress) -> None:
        self._last = progress
        if self._clock.monotonic() - self._told >= _TELL_EVERY_S:
            self.tell()

    async def beat(self) -> None:
        while True:
            self.tell()
            await self._clock.sleep(BEAT_S)

    def tell(self) -> None:
        self._told = self._clock.monotonic()
        write(Progressed(**msgspec.structs.asdict(self._last), spent=self._spent()))


def write(event: Event) -> None:
    """One line on standard output."""
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()


async def serve() -> int:
    """Do jobs until the input ends. Returns the exit status."""
    lines = asyncio.StreamReader(limit=MAX_LINE)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    setup = msgspec.json.decode(await lines.readline(), type=Setup)
    logging.basicConfig(stream=sys.stderr, level=setup.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    clock = SystemClock()
    async with AsyncExitStack() as lifetime:
        opened: DirectCollector | None = None
        line = await lines.readline()
        while line:
            job = msgspec.json.decode(line, type=Job)
            following = asyncio.create_task(lines.readline())
            try:
                if opened is None:
                    opening = DirectCollector.open(load(flags=setup.settings).settings, clock, RandomIds())
                    opened = await lifetime.enter_async_context(opening)
                working = asyncio.create_task(_work(opened, job, clock))
                await asyncio.wait({working, following}, return_when=asyncio.FIRST_COMPLETED)
                if not working.done():  # the input ended, or speaks out of turn
                    working.cancel()
                    await asyncio.gather(working, return_exceptions=True)
                    return 1
                write(Ended(collected=working.result()))
            except KVTierError as error:
                write(Failed(problem=error.problem()))
            line = await following
    return 0


async def _work(direct: DirectCollector, job: Job, clock: Clock) -> api.Collected | None:
    teller = _Teller(clock, direct.spent)
    beating = asyncio.create_task(teller.beat())
    try:
        if job.fresh_s and await direct.collector.fresh(job.fresh_s):
            return None
        return await direct.run(job.request, watch=teller.watch)
    finally:
        beating.cancel()
        teller.tell()


def give_way() -> None:
    """Leave most of a busy processor to others, and take it from nobody who wakes up.

    A session of its own, which this process has, is a scheduling group of its own where the kernel groups by session
    (`sched_autogroup_enabled`, the default of most distributions). Nice values then count only among the processes of one group, so
    the group has to be told as well: https://man7.org/linux/man-pages/man7/sched.7.html.
    """
    os.nice(NICE)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICE))


if __name__ == "__main__":
    give_way()
    sys.exit(asyncio.run(serve()))
