"""The bucket: seconds and bytes per second of objects as large as blocks, one and eight at a time, and its conditional writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec
import numpy as np

from kvstore.cli.bench.results import Ask, Line, Timing
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import Settings, StorageUrl
from kvstore.errors import KVTierError, Unavailable
from kvstore.keys import Keys
from kvstore.objects import OVERWRITE, Got, ObjectStore, Update, probe
from kvstore.objects.base import Stored
from kvstore.objects.opening import open_store

MANY: Final = 8
_OBJECTS: Final = 16
_SMALL: Final = 2048  # about what a head weighs
_LATE: Final = 1.5  # what has begun may take this much longer than it was given
_CLEAN_S: Final = 30.0


async def measure(settings: Settings, ask: Ask, seconds: float) -> AsyncIterator[Line]:
    """Everything under a prefix that nobody used before; it is empty again afterwards, also after Ctrl-C."""
    url, clock, ids = StorageUrl.parse(settings.store.url), SystemClock(), RandomIds()
    prefix = Keys(url.path).probe(ids.new())
    async with open_store(url, settings.store, clock) as store:
        bench = _Bench(store, prefix, ask)
        try:
            async with asyncio.timeout(_LATE * seconds):  # a request that hangs ends it; otherwise every part ends by itself
                yield await _conditional(store, f"{prefix}/probe")
                yield await bench.register(seconds / 10)
                for parallel, share in ((1, 0.2), (MANY, 0.25)):
                    yield await bench.put(parallel, share * seconds)
                for parallel, share in ((1, 0.2), (MANY, 0.25)):
                    yield await bench.get(parallel, share * seconds)
        except TimeoutError:
            raise Unavailable("the bucket took too long", remedy="leave --quick out, or see what `kvtier doctor` says") from None
        finally:
            await bench.clean()


async def _conditional(store: ObjectStore, key: str) -> Line:
    try:
        await probe(store, key, SystemClock(), RandomIds())
    except KVTierError as error:
        if error.kind != "unsafe_store":
            raise
        return Line(name="bucket_conditional_writes", value=0.0, unit="hold", error=f"{error.message}; {error.remedy}")
    return Line(
        name="bucket_conditional_writes", value=1.0, unit="hold", note="one of several writers wins: sessions are safe here"
    )


class _Bench:
    def __init__(self, store: ObjectStore, prefix: str, ask: Ask) -> None:
        self._store, self._prefix = store, prefix
        self._body = np.random.default_rng(2).bytes(ask.object)
        self._objects = max(MANY, min(_OBJECTS, ask.size // ask.object))
        self._there = 0
        self._block = ask.object
        self._rooms = [memoryview(bytearray(ask.object)) for _ in range(MANY)]

    async def register(self, seconds: float) -> Line:
        """One small object, changed by compare-and-swap again and again: what a commit waits for, at least."""
        key, etag = f"{self._prefix}/register", ""

        async def swap(call: int) -> int:
            nonlocal etag
            body = f"{call} ".encode().ljust(_SMALL, b".")
            done = await self._store.put(key, body, Update(etag) if etag else OVERWRITE)
            if not isinstance(done, Stored):
                raise Unavailable("a conditional write that nobody disturbed was refused")
            etag = done.etag
            return _SMALL

        line = (await _repeat(swap, 1, 50, seconds)).line("bucket_swap", f"a register of {_SMALL} bytes, by compare-and-swap")
        return msgspec.structs.replace(line, value=line.p50_ms, unit="ms")

    async def put(self, parallel: int, seconds: float) -> Line:
        """Blocks written."""

        async def one(call: int) -> int:
            at = call % self._objects
            self._there = max(self._there, at + 1)
            await self._store.put(f"{self._prefix}/{at}", self._body, OVERWRITE)
            return self._block

        return (await _repeat(one, parallel, 64, seconds)).line(f"bucket_put_{parallel}", _at_once(parallel))

    async def get(self, parallel: int, seconds: float) -> Line:
        """Blocks read into memory."""

        async def one(call: int) -> int:
            found = await self._store.get(f"{self._prefix}/{call % self._there}", into=self._rooms[call % MANY])
            if not isinstance(found, Got):
                raise Unavailable("an object that was just written is not there")
            return found.data.nbytes

        return (await _repeat(one, parallel, 128, seconds)).line(f"bucket_get_{parallel}", _at_once(parallel))

    async def clean(self) -> None:
        """Delete whatever is under the prefix; the caller may be ending, and this is done first."""
        async with asyncio.timeout(_CLEAN_S):
            keys = {meta.key async for page in self._store.list(f"{self._prefix}/") for meta in page}
            keys |= {f"{self._prefix}/{at}" for at in range(self._there)}
            left = await self._store.delete(sorted(keys)) if keys else ()
        if left:
            raise Unavailable(f"{len(left)} objects under {self._prefix} could not be deleted", remedy="delete them by hand")


def _at_once(parallel: int) -> str:
    return "one at a time" if parallel == 1 else f"{parallel} at once"


async def _repeat(run: Callable[[int], Awaitable[int]], parallel: int, calls: int, seconds: float) -> Timing:
    """`run(i)`, so many at once, until so many calls or seconds. Raises `TimeoutError` where not even one ended in good time."""
    await run(0)  # connections, and whatever else is new once
    began, last = time.perf_counter(), 0.0
    moved, took, numbers = 0, list[float](), iter(range(calls))

    async def work() -> None:
        nonlocal moved, last
        for index in numbers:
            started = time.perf_counter()
            nbytes = await run(index)
            last = time.perf_counter()
            moved += nbytes
            took.append(last - started)
            if last - began > seconds:
                return

    try:
        async with asyncio.timeout(_LATE * seconds), asyncio.TaskGroup() as group:
            for _ in range(parallel):
                group.create_task(work())
    except TimeoutError:
        if not took:
            raise
    return Timing(moved / (last - began), took)
