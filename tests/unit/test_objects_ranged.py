"""Large reads by ranges: the same bytes, of one version, and reports of what is there."""

import asyncio
from itertools import pairwise

import pytest

from kvstore.errors import Corrupt, Unavailable
from kvstore.objects import ABSENT, OVERWRITE, Fault, Faults, Got, MemoryStore
from kvstore.objects.ranged import PART, RangedStore, spans

SIZE = 2 * PART + 5000
BODY = bytes(range(251)) * (SIZE // 251 + 1)


class Telling(MemoryStore):
    """Says what has arrived, in two pieces, and begins again once where it is told to."""

    again = False

    async def get(self, key, *, arrived=None, **how):
        if arrived:
            arrived(0, 0)
        got = await super().get(key, **how)
        if arrived:
            arrived(0, 7)
            if self.again:
                arrived(0, 0)
                arrived(0, 7)
            arrived(7, len(got.data))
        return got


@pytest.mark.parametrize("nbytes", [1, PART, 2 * PART, SIZE, 4 * PART + 123, 5 * PART, 29 * PART + 1])
@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_spans_cover_everything_once_and_start_where_stores_cut(nbytes, most):
    found = spans(nbytes, most)
    assert len(found) <= most
    assert (found[0][0], found[-1][1]) == (0, nbytes)
    assert all(end == start for (_, end), (start, _) in pairwise(found))
    assert all(start % PART == 0 for start, _ in found)
    assert all(end - start >= PART for start, end in found) or len(found) == 1


@pytest.mark.parametrize(("length", "requests"), [(SIZE, 2), (2 * PART - 1, 1), (10, 1)])
async def test_what_is_read_by_ranges_is_the_object(length, requests):
    faults = Faults(MemoryStore())
    store = RangedStore(faults)
    await store.put("k", BODY[:length], OVERWRITE)
    into = memoryview(bytearray(length))
    got = await store.get("k", into=into)
    assert isinstance(got, Got)
    assert (bytes(into), got.size, len(got.data)) == (BODY[:length], length, length)
    assert faults.counts["get"] == requests
    assert got.etag == (await store.head("k")).etag


async def test_a_shorter_object_fills_what_it_fills_and_a_longer_one_is_refused():
    store = RangedStore(MemoryStore())
    await store.put("k", BODY[:10], OVERWRITE)
    into = memoryview(bytearray(SIZE))
    got = await store.get("k", into=into)
    assert (bytes(got.data), got.size) == (BODY[:10], 10)
    await store.put("k", BODY[: SIZE + 1], OVERWRITE)
    with pytest.raises(Corrupt):
        await store.get("k", into=into)
    assert await store.get("none", into=into) == ABSENT


async def test_ranges_of_two_versions_are_no_answer():
    class Changing(MemoryStore):
        async def get(self, key, *, range=None, **how):  # noqa: A002  a store's signature
            if range is not None and range[0]:
                await self.put(key, BODY[1 : SIZE + 1], OVERWRITE)
            return await super().get(key, range=range, **how)

    store = RangedStore(Changing())
    await store.put("k", BODY[:SIZE], OVERWRITE)
    with pytest.raises(Unavailable, match="changed"):
        await store.get("k", into=memoryview(bytearray(SIZE)))


async def test_a_range_that_fails_is_the_whole_reads_failure_and_ends_the_others():
    faults = Faults(MemoryStore())
    store = RangedStore(faults)
    await store.put("k", BODY[:SIZE], OVERWRITE)
    fault = Fault(action="busy", verb="get")
    faults.script.append(fault)
    with pytest.raises(Unavailable) as error:
        await store.get("k", into=memoryview(bytearray(SIZE)))
    assert error.value.kind == "store_busy"
    assert fault.times == 0


@pytest.mark.parametrize("again", [False, True])
async def test_progress_is_told_in_the_objects_own_places(again):
    below = Telling()
    below.again = again
    store, told = RangedStore(below), []
    await store.put("k", BODY[:SIZE], OVERWRITE)
    await store.get("k", into=memoryview(bytearray(SIZE)), arrived=lambda *span: told.append(span))
    if not again:
        assert (0, 0) not in told
        assert min(told) == (0, 7)
        assert sum(end - start for start, end in told) == SIZE
    else:
        assert told.count((0, 0)) == len(spans(SIZE, 8))


async def test_the_first_of_many_is_cut_and_the_others_keep_the_connections_busy():
    faults = Faults(MemoryStore(), [Fault(action="stall", verb="get", times=100)])
    store = RangedStore(faults)
    body = bytes(4 * PART)
    await store.put("k", body, OVERWRITE)
    reads = [asyncio.create_task(store.get("k", into=memoryview(bytearray(len(body))))) for _ in range(4)]
    await asyncio.sleep(0.01)
    faults.release.set()
    await asyncio.gather(*reads)
    assert faults.counts["get"] == 4 + 1 + 1 + 1
    await store.get("k", into=memoryview(bytearray(len(body))))
    assert faults.counts["get"] == 7 + 4
