"""The ObjectStore contract: one suite for every backend and wrapper."""

import asyncio
import os
from contextlib import asynccontextmanager

import pytest

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Closed, Corrupt, Invalid
from kvstore.objects import (
    ABSENT,
    CREATE,
    OVERWRITE,
    REFUSED,
    UNCHANGED,
    Faults,
    Got,
    MemoryStore,
    RetryingStore,
    Stored,
    Update,
    probe,
)
from kvstore.objects.paced import PacedStore

BACKENDS = ["memory", "faults", "retrying", "paced", pytest.param("s3", marks=pytest.mark.seaweed)]


@asynccontextmanager
async def memory():
    yield MemoryStore()


WRAPPERS = {
    "faults": Faults,
    "retrying": lambda store: RetryingStore(store, SystemClock(), RandomIds()),
    "paced": lambda store: PacedStore(store, 1e6, SystemClock()),
}


@pytest.fixture(params=BACKENDS)
async def store(request):
    async with request.getfixturevalue("s3_store")() if request.param == "s3" else memory() as opened:
        yield WRAPPERS.get(request.param, lambda store: store)(opened)


@pytest.fixture
def racers(store):
    # SeaweedFS lets many writers of one key wait for each other in steps of a second.
    return 20 if not hasattr(store, "_sockets") else 4


async def keys_under(store, prefix, **where):
    return [meta.key async for page in store.list(prefix, **where) for meta in page]


async def test_absent_is_a_value(store, root):
    assert await store.get(f"{root}/none") == ABSENT
    assert await store.head(f"{root}/none") == ABSENT
    assert await store.get(f"{root}/none", range=(0, 4)) == ABSENT
    assert await store.get(f"{root}/none", range=(4, 4)) == ABSENT
    assert await store.get(f"{root}/none", into=memoryview(bytearray(2 << 20))) == ABSENT


async def test_create_wins_once(store, root):
    first = await store.put(f"{root}/k", b"one", CREATE)
    assert isinstance(first, Stored)
    assert await store.put(f"{root}/k", b"two", CREATE) == REFUSED
    found = await store.get(f"{root}/k")
    assert (bytes(found.data), found.etag, found.size) == (b"one", first.etag, 3)
    meta = await store.head(f"{root}/k")
    assert (meta.key, meta.size, meta.etag) == (f"{root}/k", 3, first.etag)
    assert meta.modified == pytest.approx(found.modified, abs=1.5)


async def test_swap_needs_the_current_etag(store, root):
    first = await store.put(f"{root}/k", b"one", OVERWRITE)
    second = await store.put(f"{root}/k", b"two", Update(first.etag))
    assert isinstance(second, Stored)
    assert second.etag != first.etag
    assert await store.put(f"{root}/k", b"three", Update(first.etag)) == REFUSED
    assert await store.put(f"{root}/absent", b"three", Update(first.etag)) == REFUSED
    assert bytes((await store.get(f"{root}/k")).data) == b"two"
    assert await store.head(f"{root}/absent") == ABSENT


async def test_etags_repeat_with_the_content(store, root):
    etags = [(await store.put(f"{root}/k", body, OVERWRITE)).etag for body in (b"A", b"B", b"A")]
    assert etags[0] == etags[2] != etags[1]


async def test_conditional_get(store, root):
    etag = (await store.put(f"{root}/k", b"one", CREATE)).etag
    assert await store.get(f"{root}/k", if_none_match=etag) == UNCHANGED
    await store.put(f"{root}/k", b"two", OVERWRITE)
    assert bytes((await store.get(f"{root}/k", if_none_match=etag)).data) == b"two"
    large = (await store.put(f"{root}/large", bytes(2 << 20), CREATE)).etag
    assert await store.get(f"{root}/large", into=memoryview(bytearray(2 << 20)), if_none_match=large) == UNCHANGED


@pytest.mark.parametrize(
    ("span", "expected"),
    [((0, 10), b"0123456789"), ((3, 5), b"34"), ((8, 99), b"89"), ((10, 12), b""), ((50, 60), b""), ((4, 4), b"")],
)
async def test_ranges(store, root, span, expected):
    etag = (await store.put(f"{root}/k", b"0123456789", CREATE)).etag
    found = await store.get(f"{root}/k", range=span)
    assert (bytes(found.data), found.size, found.etag) == (expected, 10, etag)


async def test_b36_an_empty_object_reads_as_nothing(store, root):
    await store.put(f"{root}/empty", b"", CREATE)
    assert bytes((await store.get(f"{root}/empty")).data) == b""
    for span in ((0, 5), (0, 0), (7, 9)):
        assert bytes((await store.get(f"{root}/empty", range=span)).data) == b""
    into = memoryview(bytearray(2 << 20))
    assert bytes((await store.get(f"{root}/empty", into=into)).data) == b""
    assert bytes((await store.get(f"{root}/empty", range=(0, 2 << 20), into=into)).data) == b""
    assert (await store.head(f"{root}/empty")).size == 0


@pytest.mark.parametrize("size", [1, 5000, (1 << 20) - 1, 1 << 20, (3 << 20) + 7])
async def test_reads_land_in_the_callers_memory(store, root, size):
    body = os.urandom(size)
    await store.put(f"{root}/k", memoryview(body), CREATE)
    buffer = bytearray(b"\xee" * (size + 100))
    found = await store.get(f"{root}/k", into=memoryview(buffer))
    assert found.data == body
    assert buffer[:size] == body
    assert buffer[size:] == b"\xee" * 100
    found.data[0] ^= 0xFF
    assert buffer[0] == body[0] ^ 0xFF  # it is that memory, not a copy
    half = size // 2
    found = await store.get(f"{root}/k", range=(half, size), into=memoryview(buffer))
    assert (found.data, found.size) == (body[half:], size)


@pytest.mark.parametrize("size", [100, 2 << 20])
async def test_an_object_larger_than_the_memory_is_refused_before_its_body(store, root, size):
    await store.put(f"{root}/k", b"x" * size, CREATE)
    buffer = bytearray(size - 1)
    with pytest.raises(Corrupt):
        await store.get(f"{root}/k", into=memoryview(buffer))
    assert not any(buffer)
    assert len((await store.get(f"{root}/k", range=(0, size - 1), into=memoryview(buffer))).data) == size - 1


@pytest.mark.parametrize("size", [40, 2 << 20])
async def test_b49_stored_bytes_equal_the_input(store, root, size):
    for name, magic in {
        "zstd": b"\x28\xb5\x2f\xfd",
        "gzip": b"\x1f\x8b\x08\x00",
        "all": bytes(range(256)),
        "zero": bytes(9),
    }.items():
        body = magic + os.urandom(size)
        await store.put(f"{root}/{name}", bytearray(body), CREATE)
        assert (await store.get(f"{root}/{name}")).data == body
        assert (await store.head(f"{root}/{name}")).size == len(body)


@pytest.mark.parametrize("size", [1000, 2 << 20])
async def test_b32_a_buffer_is_free_when_the_put_is_over_even_if_cancelled(store, root, size):
    for n in range(6):
        original = os.urandom(size)
        buffer = bytearray(original)
        putting = asyncio.ensure_future(store.put(f"{root}/{n}", buffer, CREATE))
        await asyncio.sleep(n * 0.001)
        putting.cancel()
        await asyncio.wait({putting})
        buffer[:] = bytes(size)
        await asyncio.sleep(0.01)
        found = await store.get(f"{root}/{n}")
        assert found == ABSENT or found.data == original


async def test_nobody_writes_into_the_memory_of_a_cancelled_read(store, root):
    await store.put(f"{root}/k", b"\x01" * (8 << 20), CREATE)
    for n in range(8):
        buffer = bytearray(8 << 20)
        reading = asyncio.ensure_future(store.get(f"{root}/k", into=memoryview(buffer)))
        await asyncio.sleep(n * 0.001)
        reading.cancel()
        await asyncio.wait({reading})
        before = bytes(buffer)
        await asyncio.sleep(0.02)
        assert buffer == before


async def test_lists_by_plain_prefix(store, root):
    names = ["a", "ab", "abc/d", "abc/e", "b", "ab!"]
    for name in names:
        await store.put(f"{root}/{name}", name.encode(), CREATE)
    assert sorted(await keys_under(store, f"{root}/ab")) == sorted(f"{root}/{n}" for n in ("ab", "ab!", "abc/d", "abc/e"))
    assert sorted(await keys_under(store, f"{root}/")) == sorted(f"{root}/{n}" for n in names)
    assert await keys_under(store, f"{root}/abc/") == [f"{root}/abc/d", f"{root}/abc/e"]
    assert await keys_under(store, f"{root}/abc/", start_after=f"{root}/abc/d") == [f"{root}/abc/e"]
    assert await keys_under(store, f"{root}/nothing") == []
    (page,) = [page async for page in store.list(f"{root}/abc/d")]
    head = await store.head(f"{root}/abc/d")
    assert (page[0].size, page[0].etag) == (5, head.etag)
    assert page[0].modified == pytest.approx(head.modified, abs=1.5)


async def test_b52_a_long_listing_comes_in_pages(store, root):
    window = asyncio.Semaphore(32)

    async def put(n):
        async with window:
            await store.put(f"{root}/{n:05d}", b"", CREATE)

    await asyncio.gather(*map(put, range(1101)))
    counted = Faults(store)
    assert await keys_under(counted, f"{root}/") == [f"{root}/{n:05d}" for n in range(1101)]
    assert counted.counts["list"] == 2
    assert await keys_under(store, f"{root}/", start_after=f"{root}/00999") == [f"{root}/{n:05d}" for n in range(1000, 1101)]
    assert await store.delete([f"{root}/{n:05d}" for n in range(1100)]) == []
    assert await keys_under(store, f"{root}/") == [f"{root}/01100"]


async def test_delete_counts_absent_keys_as_deleted(store, root):
    await store.put(f"{root}/k", b"x", CREATE)
    assert await store.delete([f"{root}/k", f"{root}/never"]) == []
    assert await store.get(f"{root}/k") == ABSENT
    assert await store.delete([]) == []
    assert isinstance(await store.put(f"{root}/k", b"y", CREATE), Stored)


async def test_copy(store, root):
    await store.put(f"{root}/from", b"bytes", CREATE)
    await store.put(f"{root}/to", b"old", CREATE)
    assert await store.copy(f"{root}/from", f"{root}/to")
    assert bytes((await store.get(f"{root}/to")).data) == b"bytes"
    assert not await store.copy(f"{root}/none", f"{root}/new")
    assert await store.head(f"{root}/new") == ABSENT


@pytest.mark.parametrize(
    "key", ["", "/x", "x/", "a//b", "../x", "a/../b", "a/./b", ".", "nul\0", "new\nline", "x" * 1025, "世" * 342]
)
async def test_b22_a_key_that_some_store_would_clean_up_is_refused(store, key):
    for call in (
        lambda: store.put(key, b"x", OVERWRITE),
        lambda: store.get(key),
        lambda: store.head(key),
        lambda: store.delete(["fine", key]),
        lambda: store.copy("fine", key),
        lambda: store.copy(key, "fine"),
    ):
        with pytest.raises(Invalid):
            await call()


async def test_b23_keys_are_kept_as_they_are_spelled(store, root):
    names = ["a b", "a+b", "a%2Bb", "x?y", "x#y", "~", "世界", "%2e%2e", "a&b=c", "<t>", "'\"", "t" * 255]
    for name in names:
        assert isinstance(await store.put(f"{root}/{name}/k", name.encode(), CREATE), Stored)
    for name in names:
        assert bytes((await store.get(f"{root}/{name}/k")).data) == name.encode()
        assert (await store.get(f"{root}/{name}/k", into=memoryview(bytearray(1 << 20)))).data == name.encode()
        assert await keys_under(store, f"{root}/{name}/") == [f"{root}/{name}/k"]
    assert sorted(await keys_under(store, f"{root}/")) == sorted(f"{root}/{name}/k" for name in names)
    assert await store.delete([f"{root}/{name}/k" for name in names]) == []
    assert await keys_under(store, f"{root}/") == []


async def test_b33_concurrent_puts_of_one_block_leave_one_object(store, root, racers):
    bodies = [bytes([n]) * 1000 for n in range(racers)]
    answers = await asyncio.gather(*(store.put(f"{root}/k", body, CREATE) for body in bodies))
    winners = [n for n, answer in enumerate(answers) if isinstance(answer, Stored)]
    assert len(winners) == 1
    assert answers.count(REFUSED) == racers - 1
    assert await keys_under(store, f"{root}/") == [f"{root}/k"]
    assert (await store.get(f"{root}/k")).data == bodies[winners[0]]


async def test_concurrent_swaps_have_one_winner(store, root, racers):
    etag = (await store.put(f"{root}/k", b"start", CREATE)).etag
    answers = await asyncio.gather(*(store.put(f"{root}/k", f"writer {n}".encode(), Update(etag)) for n in range(racers)))
    (winner,) = (n for n, answer in enumerate(answers) if isinstance(answer, Stored))
    assert bytes((await store.get(f"{root}/k")).data) == f"writer {winner}".encode()


async def test_the_stores_clock(store):
    assert await store.now() == pytest.approx(SystemClock().now(), abs=5)


async def test_the_probe_accepts_it(store, root):
    counted = Faults(store)
    guarantees = await probe(counted, f"{root}/probe", SystemClock(), RandomIds())
    assert guarantees.conditional_get
    assert guarantees.etag_is_digest
    assert abs(guarantees.clock_skew_s) < 5
    assert len(counted.requests) <= 22
    assert await keys_under(store, f"{root}/") == []


async def test_a_closed_store_says_so(request, s3_store, root):
    for opened in (memory(), s3_store()):
        async with opened as store:
            await store.put(f"{root}/k", b"x", OVERWRITE)
            await store.aclose()
        with pytest.raises(Closed):
            await store.get(f"{root}/k")
        with pytest.raises(Closed):
            await keys_under(store, root)


async def test_memory_of_one_name_is_one_store(root):
    first, second = MemoryStore.named(root), MemoryStore.named(root)
    await first.put("k", b"x", CREATE)
    await first.aclose()
    assert bytes((await second.get("k")).data) == b"x"
    assert isinstance(await MemoryStore.named(root).get("k"), Got)
    assert await MemoryStore.named(root + "2").get("k") == ABSENT
