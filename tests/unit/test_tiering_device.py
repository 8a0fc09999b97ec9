"""The device tier: what is queued and in which order, what is held until when, and what a device without room does."""

import asyncio
import hashlib

import pytest

from tiering import Lease, Miss
from tiering.device_lease import DeviceLease
from tiering.streams import open_device
from tiering.testing import key_of, value_of, want_of
from tiering.upload import PIECE, pieces

torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")

from fakes.device import SIZE, bytes_of, leased, slow_device, tiers  # noqa: E402  needs torch

CUDA = pytest.param(
    "cuda:0",
    marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device here")],
)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("registered", [True, False])
async def test_what_is_promoted_is_what_memory_holds(device, registered):
    async with tiers(1 << 20, device, registered=registered) as (memory, tier):
        got = await tier.promote_many(await leased(memory, 1, 2, 3))
        for n, lease in enumerate(got, 1):
            assert (lease.key, lease.size, lease.source, str(lease.tensor.device)) == (key_of(n), SIZE, "dram", device)
            assert bytes_of(lease) == value_of(n, SIZE)
            lease.release()
        assert (tier.used, tier.allocated, tier.registered) == (3 * SIZE, 3 * SIZE, registered)
        (again,) = await tier.get_many([want_of(2, SIZE)])
        assert (again.source, bytes_of(again)) == ("device", value_of(2, SIZE))
        again.release()
        assert (tier.stats.hits, tier.stats.bytes_in) == (1, 3 * SIZE)


async def test_large_values_pass_the_bounce_buffers_in_pieces(monkeypatch):
    monkeypatch.setattr("tiering.upload.BOUNCE", 4096)
    async with tiers(1 << 20, registered=False) as (memory, tier):
        for n in (1, 2):
            (lease,) = await tier.promote_many(await leased(memory, n, size=50_001))
            assert bytes_of(lease) == value_of(n, 50_001)
            lease.release()


@pytest.fixture
def slow(monkeypatch):
    return slow_device(monkeypatch)


async def test_part_by_part_over_the_batch_and_a_consumer_waits_for_its_part_alone(slow):
    async with tiers(1 << 20, cut=lambda want: (0, (4000, 7000, want.size))) as (memory, tier):
        first, second = await tier.promote_many(await leased(memory, 1, 2))
        assert slow.diary[:9] == [4000, 4000, "mark", 3000, 3000, "mark", 3000, 3000, "mark"]
        assert memory.leases == 2  # nothing was copied yet
        await asyncio.sleep(0.05)
        first.wait(0)
        assert first.tensor[:4000].numpy().tobytes() == value_of(1, SIZE)[:4000]
        first.wait(2)
        assert bytes(second.tensor.numpy()) == value_of(2, SIZE)
        for lease in (first, second):
            lease.release()
        for _ in range(100):
            await asyncio.sleep(0.01)
            if not memory.leases:
                break
        assert memory.leases == 0


async def test_a_released_value_may_still_be_in_use_and_is_overwritten_only_after_that(slow):
    async with tiers(SIZE) as (memory, tier):
        (lease,) = await tier.promote_many(await leased(memory, 1))
        lease.synchronize()
        old = lease.tensor
        lease.release()
        assert not slow.waited
        (lease,) = await tier.promote_many(await leased(memory, 2))
        assert lease.tensor is old
        assert len(slow.waited) == 1
        assert bytes_of(lease) == value_of(2, SIZE)
        lease.release()


async def test_two_that_bring_the_same_values_copy_them_once_and_never_wait_for_each_other(slow):
    async with tiers(1 << 20) as (memory, tier):
        one, two = await leased(memory, 1, 2), (await leased(memory, 1, 2))[::-1]
        results = await asyncio.wait_for(asyncio.gather(tier.promote_many(one), tier.promote_many(two)), 20)
        assert [entry for entry in slow.diary if entry != "mark"] == [SIZE, SIZE]
        for lease in (lease for leases in results for lease in leases):
            assert bytes_of(lease) == value_of(1 if lease.key == key_of(1) else 2, SIZE)
            lease.release()
        twice = await tier.promote_many(await leased(memory, 3) + await leased(memory, 3))
        assert [bytes_of(lease) for lease in twice] == [value_of(3, SIZE)] * 2
        for lease in twice:
            lease.release()
        assert tier.used == 3 * SIZE


async def test_i8_leases_leave_no_room_and_say_so():
    async with tiers(3 * SIZE) as (memory, tier):
        leases = await tier.promote_many(await leased(memory, 1, 2, 3))
        assert await tier.promote_many(await leased(memory, 4)) == [Miss.FULL]
        assert (tier.stats.drops, tier.used, tier.allocated) == (1, 3 * SIZE, 3 * SIZE)
        assert tier.discard_many([key_of(1)]) == 0
        assert await tier.evict(1) == 0
        leases[1].release()
        (other,) = await tier.promote_many(await leased(memory, 4))
        assert [bytes_of(lease) for lease in (leases[0], other, leases[2])] == [value_of(n, SIZE) for n in (1, 4, 3)]
        for lease in (leases[0], other, leases[2]):
            lease.release()


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, RuntimeError])
async def test_a_device_without_memory_is_a_miss_that_is_counted(monkeypatch, kind):
    async with tiers(3 * SIZE) as (memory, tier):
        (first,) = await tier.promote_many(await leased(memory, 1))

        def refuse(nbytes):
            raise kind("out of memory")

        monkeypatch.setattr(tier._device, "allocate", refuse)
        assert await tier.promote_many(await leased(memory, 2)) == [Miss.FULL]
        assert (tier.stats.drops, tier.stats.errors, tier.stats.last_error) == (1, 1, "out of memory")
        assert (tier.used, bytes_of(first)) == (SIZE, value_of(1, SIZE))
        first.release()
        monkeypatch.undo()
        (second,) = await tier.promote_many(await leased(memory, 2))
        second.release()
        assert tier.used == 2 * SIZE


async def test_before_it_gives_up_it_gives_back_what_it_keeps(monkeypatch):
    async with tiers(100_000) as (memory, tier):
        for lease in await tier.promote_many(await leased(memory, 1, 2)):
            lease.release()
        assert tier.discard_many([key_of(1), key_of(2)]) == 2
        assert (tier.used, tier.allocated) == (0, 2 * SIZE)
        real, asked = tier._device.allocate, []

        def once(nbytes):
            asked.append((nbytes, tier.allocated))
            if len(asked) == 1:
                raise torch.OutOfMemoryError("out of memory")
            return real(nbytes)

        monkeypatch.setattr(tier._device, "allocate", once)
        (lease,) = await tier.promote_many(await leased(memory, 3, size=5000))
        lease.release()
        assert asked == [(5000, 25_000), (5000, 5000)]
        assert tier.stats.errors == 0


async def test_a_device_that_fails_is_a_miss_too(monkeypatch):
    async with tiers(1 << 20) as (memory, tier):

        def fail(target, source):
            raise RuntimeError("the device was lost")

        monkeypatch.setattr(tier._device, "copy", fail)
        assert await tier.promote_many(await leased(memory, 1, 2)) == [Miss.UNAVAILABLE] * 2
        assert (tier.used, tier.stats.errors, tier.contains_many([key_of(1)])) == (0, 1, [False])


async def test_who_gives_up_leaves_nothing_behind(slow):
    async with tiers(1 << 20) as (memory, tier):
        task = asyncio.create_task(tier.promote_many(await leased(memory, 1, 2)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (tier.used, tier.contains_many([key_of(1)])) == (0, [False])
        (lease,) = await tier.promote_many(await leased(memory, 1))
        assert bytes_of(lease) == value_of(1, SIZE)
        lease.release()


async def test_i8_whatever_the_sizes_no_more_than_the_limit_is_taken():
    async with tiers(100_000, dram=1 << 22) as (memory, tier):
        for step in range(300):
            dice = hashlib.sha256(b"device %d" % step).digest()
            n, size = dice[0] % 17, 1 + dice[0] % 17 * 2003
            (got,) = await tier.promote_many(await leased(memory, n, size=size))
            assert bytes_of(got) == value_of(n, size)
            got.release()
            if not dice[1] % 5:
                tier.discard_many([key_of(dice[2] % 17)])
            assert tier.used <= tier.allocated <= tier.limit
        assert tier.stats.evictions


async def test_a_closed_tier_has_nothing_and_what_is_leased_stays():
    async with tiers(1 << 20) as (memory, tier):
        (lease,) = await tier.promote_many(await leased(memory, 1))
    assert bytes_of(lease) == value_of(1, SIZE)
    assert await tier.get_many([want_of(1, SIZE)]) == [Miss.UNAVAILABLE]
    lease.release()
    lease.release()
    assert isinstance(lease, DeviceLease)
    assert not isinstance(lease, Lease)
    with pytest.raises(ValueError, match="released"):
        lease.wait()


def test_small_parts_go_together():
    assert pieces([100, 200, 300]) == [300]
    assert pieces([PIECE, PIECE + 1, 2 * PIECE + 1, 2 * PIECE + 2]) == [PIECE, 2 * PIECE + 1, 2 * PIECE + 2]
    assert pieces([5 * PIECE]) == [5 * PIECE]


@pytest.mark.parametrize(("name", "why"), [("gpu", "unknown"), ("mps", "not supported"), ("cuda:99", "not there")])
def test_a_device_that_is_not_there_is_refused_by_name(name, why):
    with pytest.raises(ValueError, match=why):
        open_device(name)
