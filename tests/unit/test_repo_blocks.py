"""The bucket as an origin: what it serves is verified, what it lacks is a miss, and what it has is not sent twice."""

import asyncio
from collections import Counter

import pytest

from kvstore import codec
from kvstore.clock import SeededIds, VirtualClock
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.model import Copy
from kvstore.objects import CREATE, OVERWRITE, Absent, Fault, Faults
from kvstore.repo import BlockWant, want
from kvstore.repo.testing import ONE_SHARD, Shelf, bodies, broken, commit, opened, tiny, until
from tiering import Miss, Want

NS = tiny()


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    assert shelf.leases == 0


def names(shelf, tokens, namespace=NS, shard=Shard()) -> list[BlockName]:  # noqa: B008  immutable
    return [BlockName(namespace.id, shard, link.prefix_id, link.tokens) for link in shelf.fill(namespace, tokens, (str(shard),))]


async def offer(repo, shelf, name, namespace=NS) -> bool:
    lease = shelf.lease(name, shelf.held[name])
    try:
        return await repo.origin.offer(want(namespace, name), lease)
    finally:
        lease.release()


async def read(repo, name, namespace=NS, **ref) -> bytes | Miss:
    asked = want(namespace, name, **ref)
    into = memoryview(bytearray(asked.size))
    miss = await repo.origin.fetch(asked, into)
    return bytes(into) if miss is None else miss


def block_requests(store) -> list[str]:
    log, store.requests = store.requests, []
    return [entry.verb for entry in log if "/blocks/" in entry.key]


async def epochs_pass(repo, count):
    for _ in range(count):
        await repo.epochs.advance(await repo.epochs.read())


async def test_a_copy_that_came_meanwhile_is_used_and_never_copied_onto_itself(repo, shelf, store):
    [name] = names(shelf, [1, 2, 3, 4])
    assert await offer(repo, shelf, name)
    epoch = (await repo.epochs.read()).epoch
    known = repo.uploads.known(name)
    assert known is not None
    assert known.gen == epoch
    before = len(store.requests)
    assert await repo.uploads.renew(name, known, epoch) == known
    assert len(store.requests) == before
    renewed = await repo.uploads.renew(name, known, epoch + 1)
    assert (renewed.gen, store.requests[-1].verb) == (epoch + 1, "copy")


@pytest.mark.parametrize("name", codec.CODECS)
async def test_what_was_offered_is_read_back_under_every_codec(memory, clock, shelf, name):
    namespace = tiny(dtype="BF16", layers=2)
    async with opened(memory, clock, codec=name) as writer, opened(memory, clock, SeededIds(2)) as reader:
        for block in names(shelf, range(12), namespace):
            assert await offer(writer, shelf, block, namespace)
            assert await read(reader, block, namespace) == shelf.held[block]
            assert await read(writer, block, namespace) == shelf.held[block]
    sizes = {len(body) for key, body in bodies(memory).items() if "/blocks/" in key}
    assert (sizes == {len(shelf.held[block])}) == (name == "raw")


async def test_a_raw_object_is_read_straight_into_its_destination(repo, shelf, store):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    seen = []
    inner = store._store.get

    async def get(key, **options):
        seen.append(options.get("into"))
        return await inner(key, **options)

    store._store.get = get
    asked = want(NS, block)
    into = memoryview(bytearray(asked.size))
    assert await repo.origin.fetch(asked, into) is None
    assert seen == [into]


async def test_b26_a_hole_ends_the_run(repo, shelf, memory):
    blocks = names(shelf, range(32))
    for block in blocks:
        await offer(repo, shelf, block)
    asked = [want(NS, block) for block in blocks]
    async with opened(memory, VirtualClock(), SeededIds(7)) as other:
        assert await other.origin.contains(asked) == 8
    for hole in (0, 1, 2, 5, 7):
        await memory.delete([repo.uploads.key(blocks[hole], 1)])
        async with opened(memory, VirtualClock(), SeededIds(7)) as other:
            assert await other.origin.contains(asked) == hole
        await memory.put(repo.uploads.key(blocks[hole], 1), shelf.held[blocks[hole]], CREATE)
    async with opened(memory, VirtualClock(), SeededIds(7)) as other:
        assert await other.origin.contains(asked) == 8
    assert await repo.origin.contains([]) == 0


async def test_b20_a_tenants_lookup_costs_another_no_more_and_no_less_than_a_cold_one(repo, shelf, store):
    mine, theirs = tiny("ann"), tiny("bob")
    for block in names(shelf, range(16), mine):
        await offer(repo, shelf, block, mine)
    counts = []
    for tokens in (range(16), range(500, 516)):  # ann's very tokens, and a prompt nobody ever had
        store.requests.clear()
        assert await repo.origin.contains([want(theirs, block) for block in names(shelf, tokens, theirs)]) == 0
        assert await read(repo, names(shelf, tokens, theirs)[0], theirs) is Miss.ABSENT
        counts.append(len(store.requests))
    assert counts[0] == counts[1]


async def test_b38_an_object_deleted_behind_our_back_is_a_miss_and_is_uploaded_again(repo, shelf, store, memory):
    (block,) = names(shelf, range(4))
    assert await offer(repo, shelf, block)
    assert await repo.origin.contains([want(NS, block)]) == 1
    key = repo.uploads.key(block, 1)
    await memory.delete([key])
    block_requests(store)
    assert await read(repo, block) is Miss.ABSENT
    assert len(block_requests(store)) <= 2
    assert await repo.origin.contains([want(NS, block)]) == 0
    assert await offer(repo, shelf, block)
    assert bodies(memory)[key] == shelf.held[block]
    assert await read(repo, block) == shelf.held[block]


async def test_b38_a_named_block_deleted_behind_our_back_cuts_the_prefix_there(repo, shelf, store, memory):
    await commit(repo, shelf, "s", range(12), 0, NS)
    _, manifest = await repo.sessions.resolve("default", "s")
    block, copy = names(shelf, range(12))[1], manifest.blocks[1].copies[0]
    await memory.delete([repo.uploads.key(block, copy.gen)])
    block_requests(store)
    assert await read(repo, block, copy=copy) is Miss.ABSENT
    assert block_requests(store) == ["get", "list"]
    assert await repo.origin.contains([want(NS, block, copy)]) == 0


async def test_b33_twenty_concurrent_puts_are_one_object_and_twenty_successes(repo, shelf, store):
    (block,) = names(shelf, range(4))
    assert await asyncio.gather(*(offer(repo, shelf, block) for _ in range(20))) == [True] * 20
    assert block_requests(store).count("put") == 1


async def test_b33_nodes_that_put_one_block_at_once_all_succeed(memory, clock, shelf):
    (block,) = names(shelf, range(4))

    async def node(number: int) -> bool:
        async with opened(memory, clock, SeededIds(number)) as repo:
            return await offer(repo, shelf, block)

    assert await asyncio.gather(*(node(number) for number in range(20))) == [True] * 20
    assert len([key for key in bodies(memory) if "/blocks/" in key]) == 1


async def test_b33_a_writer_that_was_stopped_leaves_the_next_one_free(repo, shelf, store):
    (block,) = names(shelf, range(4))
    store.script.append(Fault(action="stall", verb="put", key="*/blocks/*"))
    first = asyncio.create_task(offer(repo, shelf, block))
    await until(lambda: not store.script[0].times)
    second = asyncio.create_task(offer(repo, shelf, block))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second
    assert await read(repo, block) == shelf.held[block]


@pytest.mark.parametrize("found", [b"", b"x" * 100_000, b"short"])
async def test_b36_what_is_no_block_is_a_miss_and_is_overwritten(repo, shelf, memory, found):
    (block,) = names(shelf, range(4))
    key = repo.uploads.key(block, 1)
    await memory.put(key, found, CREATE)
    assert await read(repo, block) is Miss.CORRUPT
    assert await read(repo, block, copy=Copy(0, 1, len(found), 0)) is Miss.CORRUPT
    assert await offer(repo, shelf, block)
    assert bodies(memory)[key] == shelf.held[block]
    assert await read(repo, block) == shelf.held[block]


@pytest.mark.parametrize("found", [b"", b"x" * 100_000])
async def test_b36_an_implausible_object_is_overwritten_by_a_commit(repo, shelf, memory, found):
    (block,) = names(shelf, range(4))
    await memory.put(repo.uploads.key(block, 1), found, CREATE)
    assert (await commit(repo, shelf, "s", range(4), 0, NS)).tokens == 4
    assert bodies(memory)[repo.uploads.key(block, 1)] == shelf.held[block]
    assert broken(bodies(memory), repo.root.keys) == []


@pytest.mark.parametrize("codec_name", ["raw", "zstd"])
async def test_b30_a_flipped_bit_is_a_miss_and_whoever_has_the_bytes_mends_it_in_place(memory, clock, shelf, codec_name):
    async with opened(memory, clock, codec=codec_name) as repo:
        await commit(repo, shelf, "s", range(8), 0, NS)
        _, manifest = await repo.sessions.resolve("default", "s")
        block, copy = names(shelf, range(8))[0], manifest.blocks[0].copies[0]
        key = repo.uploads.key(block, copy.gen)
        flipped = bytearray(bodies(memory)[key])
        flipped[-3] ^= 4
        await memory.put(key, bytes(flipped), OVERWRITE)
        assert await read(repo, block, copy=copy) is Miss.CORRUPT
        assert repo.origin.counts["corrupt"] == 1
        await epochs_pass(repo, 1)
        assert await offer(repo, shelf, block)  # the engine computed it again
        assert repo.uploads.counts["repaired"] == 1
        assert await read(repo, block, copy=copy) == shelf.held[block]


async def test_a_sound_older_generation_stands_in_for_a_bad_one(repo, shelf, memory):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    await epochs_pass(repo, 3)
    await memory.put(repo.uploads.key(block, 4), b"rotten" * 700, CREATE)
    assert await read(repo, block, copy=Copy(0, 4, 4200, 0)) == shelf.held[block]


async def test_a_block_repaired_under_another_codec_is_still_read(memory, clock, shelf):
    async with opened(memory, clock, codec="zstd") as coded, opened(memory, clock, SeededIds(2)) as plain:
        (block,) = names(shelf, range(4))
        await offer(coded, shelf, block)
        key = coded.uploads.key(block, 1)
        stated = Copy(0, 1, len(bodies(memory)[key]), 0)
        await memory.put(key, shelf.held[block], OVERWRITE)  # raw now: another size than any manifest says
        assert await read(plain, block, copy=stated) == shelf.held[block]
        await memory.put(key, codec.encode(memoryview(shelf.held[block]), block, NS, "zstd").body, OVERWRITE)
        assert await read(plain, block, copy=Copy(0, 1, len(shelf.held[block]), 0)) == shelf.held[block]


async def test_older_generations_are_listed_only_where_time_allows(repo, shelf, store, clock):
    blocks = names(shelf, range(4))
    await offer(repo, shelf, blocks[0])
    await epochs_pass(repo, 4)
    asked = [want(NS, block) for block in blocks]
    async with opened(store, clock, SeededIds(2)) as other:
        block_requests(store)
        assert await read(other, blocks[0]) is Miss.ABSENT
        assert block_requests(store) == ["get", "get"]
        assert await other.origin.contains(asked) == 0
        assert await other.origin.contains(asked, until=clock.monotonic() + 0.01) == 0
        assert block_requests(store) == ["head", "head"] * 2
        assert await other.origin.contains(asked, until=clock.monotonic() + 5) == 1
        assert block_requests(store) == ["head", "head", "list"]
        assert await read(other, blocks[0]) == shelf.held[blocks[0]]
        assert block_requests(store)[0] == "get"


async def test_the_blocks_of_a_session_are_looked_at_under_the_generations_it_grew_in(repo, shelf, store, memory, clock):
    """One listing for each epoch in which it grew, not one for each block; and none of them for a chain that is nowhere."""
    for base, tokens in enumerate((80, 160, 240)):
        await commit(repo, shelf, "s", range(tokens), base, NS)
        await epochs_pass(repo, 2)
    blocks = names(shelf, range(400))  # the last 40 were never stored
    asked = [want(NS, block) for block in blocks]
    async with opened(store, clock, SeededIds(2)) as other:
        await other.epochs.read()
        block_requests(store)
        assert await other.origin.contains(asked, until=clock.monotonic() + 5) == 60
        spent = Counter(block_requests(store))
        assert spent["list"] == 4
        assert spent["head"] <= 3 * 60  # each, and what the steps reached beyond the ends of three runs
        assert [other.uploads.known(block).gen for block in blocks[:60:20]] == [1, 3, 5]
        assert await read(other, blocks[25]) == shelf.held[blocks[25]]
        await other.origin.aclose()
        assert block_requests(store) == ["get", "copy"]  # and it is kept young
        assert await other.origin.contains(asked[60:], until=clock.monotonic() + 5) == 0
        assert Counter(block_requests(store)) == {"head": 2, "list": 1}
        assert await other.origin.contains(asked[60:], until=clock.monotonic() + 5, missed=True) == 0
        assert block_requests(store) == ["list"]


async def test_a_chain_of_very_many_generations_is_listed_only_so_often(repo, shelf, store, clock):
    for base in range(10):
        await commit(repo, shelf, "s", range(4 * base + 4), base, NS)
        await epochs_pass(repo, 1)
    await epochs_pass(repo, 2)
    async with opened(store, clock, SeededIds(2)) as other:
        await other.epochs.read()
        block_requests(store)
        asked = [want(NS, block) for block in names(shelf, range(40))]
        assert await other.origin.contains(asked, until=clock.monotonic() + 5) == 8
        assert block_requests(store).count("list") == 8


async def test_a_useful_anonymous_block_is_kept_young(repo, shelf, memory):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    await epochs_pass(repo, 1)
    assert await read(repo, block) == shelf.held[block]
    await repo.origin.aclose()
    assert repo.uploads.key(block, 2) in bodies(memory)
    await epochs_pass(repo, 1)
    await collect(repo)
    assert {key.split("/")[-1] for key in bodies(memory) if "/blocks/" in key} == {"0000000002"}
    assert await read(repo, block) == shelf.held[block]


async def test_an_anonymous_block_lives_one_to_two_epochs(repo, shelf, memory):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    for alive in (True, True, False):
        await collect(repo)
        assert (repo.uploads.key(block, 1) in bodies(memory)) == alive
        await epochs_pass(repo, 1)


async def test_offers_beyond_the_bytes_in_flight_are_declined_and_counted(memory, clock, shelf):
    store = Faults(memory, clock=clock)
    async with opened(store, clock, inflight=10_000) as repo:
        blocks = names(shelf, range(16))
        store.script.append(Fault(action="stall", verb="put", key="*/blocks/*", times=-1))
        tasks = [asyncio.create_task(offer(repo, shelf, block)) for block in blocks[:2]]
        await until(lambda: repo.uploads._gate.held > 8000)
        assert not await offer(repo, shelf, blocks[2])
        assert repo.uploads.counts["offers_declined"] == 1
        store.release.set()
        store.script.clear()
        assert await asyncio.gather(*tasks) == [True, True]
        assert await offer(repo, shelf, blocks[2])


async def test_i11_a_store_that_fails_is_a_miss_and_never_an_exception(repo, shelf, store):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    store.script.append(Fault(action="busy", times=-1))
    assert await read(repo, block) is Miss.UNAVAILABLE
    assert await repo.origin.contains([want(NS, names(shelf, range(50, 54))[0])]) == 0
    assert not await offer(repo, shelf, names(shelf, range(60, 64))[0])
    assert repo.origin.counts["failed_store_busy"] == 2
    assert await repo.origin.fetch(Want(block.tier_key, 8, "nonsense"), memoryview(bytearray(8))) is Miss.ABSENT
    assert await repo.origin.contains([Want(block.tier_key, 8)]) == 0


@pytest.mark.parametrize("action", ["lost", "before"])
async def test_a_block_put_whose_answer_is_lost_is_there_after_all(repo, shelf, store, action):
    (block,) = names(shelf, range(4))
    store.script.append(Fault(action=action, verb="put", key="*/blocks/*"))
    assert await offer(repo, shelf, block)
    assert await read(repo, block) == shelf.held[block]


async def test_rotten_local_bytes_are_not_signed_as_truth(repo, shelf, memory):
    (block,) = names(shelf, range(4))
    await offer(repo, shelf, block)
    await epochs_pass(repo, 3)
    rotten = bytearray(shelf.held[block])
    rotten[-1] ^= 1
    shelf.held[block] = bytes(rotten)
    repo.uploads._known.clear()
    receipt = await commit(repo, shelf, "s", range(4), 0, NS)
    assert (receipt.tokens, receipt.cut) == (4, False)  # the bucket's older copy was sound
    assert repo.uploads.counts["corrupt_local"] >= 1
    _, manifest = await repo.sessions.resolve("default", "s")
    assert isinstance(await read(repo, block, copy=manifest.blocks[0].copies[0]), bytes)


async def test_b17_every_rank_finds_its_own_shard(repo, shelf, memory):
    shards = ("t0of2.p0of1.g0", "t1of2.p0of1.g0")
    await commit(repo, shelf, "s", range(16), 0, NS, shards=shards)
    async with opened(memory, VirtualClock(), SeededIds(3)) as other:
        for shard in shards:
            blocks = names(shelf, range(16), shard=Shard.parse(shard))
            assert await other.origin.contains([want(NS, block) for block in blocks]) == 4
            for block in blocks:
                assert await read(other, block) == shelf.held[block]
        assert await other.origin.contains([want(NS, block) for block in names(shelf, range(16))]) == 0


async def test_b18_another_revision_hits_nothing_and_back_again_everything(repo, shelf):
    for block in names(shelf, range(16)):
        await offer(repo, shelf, block)
    for other in (tiny(dtype="F16"), tiny(lora="x"), tiny(quantization="fp8")):
        assert await repo.origin.contains([want(other, block) for block in names(Shelf(), range(16), other)]) == 0
    assert await repo.origin.contains([want(NS, block) for block in names(shelf, range(16))]) == 4


async def test_an_object_under_another_blocks_name_is_refused(repo, shelf, memory):
    """I7: a reader insists on the name it asked for."""
    one, two = names(shelf, range(8))
    await memory.put(repo.uploads.key(two, 1), shelf.held[one], CREATE)
    assert await read(repo, two) is Miss.CORRUPT


async def test_a_412_is_reuse_and_its_size_is_what_head_says(memory, clock, shelf):
    async with opened(memory, clock, codec="zstd") as repo:
        (block,) = names(shelf, range(4))
        store = Faults(memory, [Fault(action="slow", verb="head")], clock)

        class Sneaky:
            """Somebody else puts the block between our look and our PUT."""

            def __getattr__(self, name):
                return getattr(store, name)

            async def put(self, key, body, mode):
                if "/blocks/" in key and isinstance(await memory.head(key), Absent):
                    await memory.put(key, shelf.held[block], CREATE)
                return await store.put(key, body, mode)

        repo.root.store = Sneaky()
        await commit(repo, shelf, "s", range(4), 0, NS)
        _, manifest = await repo.sessions.resolve("default", "s")
        assert manifest.blocks[0].copies == (Copy(0, 1, len(shelf.held[block]), 0),)


async def test_b32_a_cancelled_offer_gives_the_buffer_back_only_when_the_put_is_over(memory, clock, shelf):
    """The caller may overwrite its buffer once the call is over: the object has the original bytes, or does not exist."""

    class Slow:
        """A PUT that is carried out to its end whoever leaves, as the contract has it."""

        gate = asyncio.Event()

        def __getattr__(self, name):
            return getattr(memory, name)

        async def put(self, key, body, mode):
            if "/blocks/" not in key:
                return await memory.put(key, body, mode)
            task = asyncio.ensure_future(self._put(key, body, mode))
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                await task
                raise

        async def _put(self, key, body, mode):
            await self.gate.wait()
            return await memory.put(key, body, mode)

    async with opened(memory, clock) as repo:
        repo.root.store = slow = Slow()
        (block,) = names(shelf, range(4))
        buffer = bytearray(shelf.held[block])
        lease = shelf.lease(block, buffer)
        task = asyncio.create_task(repo.origin.offer(want(NS, block), lease))
        await until(lambda: repo.uploads._gate.held > 0)
        task.cancel()
        await asyncio.sleep(0)
        assert not task.done()
        slow.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        lease.release()
        buffer[:] = bytes(len(buffer))
        repo.root.store = memory
        assert await read(repo, block) == shelf.held[block]


async def test_wants_carry_what_the_hierarchy_needs():
    name = names(Shelf(), range(4))[0]
    asked = want(NS, name, Copy(0, 3, 10, 0))
    assert asked.key == name.tier_key
    assert asked.size == codec.layout(NS, Shard(), 4).raw_bytes
    assert asked.ref == BlockWant(name, NS, Copy(0, 3, 10, 0))
    assert (str(Shard()),) == ONE_SHARD
