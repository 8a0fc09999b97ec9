"""A store in this process that keeps blocks in a device's memory: here `cpu`, which runs the code that a CUDA device runs."""

import asyncio

import pytest
from fakes.node import SHARD, filler, links_of, namespace, pattern

import kvstore
from kvstore import codec
from kvstore.errors import Invalid, Unsupported
from kvstore.service.ondevice import layer_ends
from kvstore.service.wants import block_wants

pytest.importorskip("torch", reason="the `torch` extra is not installed")

NS = namespace()
LINKS = links_of(NS, 12)
PLAN = codec.layout(NS, SHARD, NS.block_tokens)


@pytest.fixture
async def opened(request):
    """`opened(query)`: a store with a session of twelve blocks."""
    stores = []

    async def make(query="device=cpu&device_bytes=64MiB", dram="8MiB"):
        kv = await kvstore.connect(f"memory://test-device?dram={dram}&{query}")
        stores.append(kv)
        assert await kv.put(NS, SHARD, LINKS, filler(LINKS)) == [True] * len(LINKS)
        await kv.commit("chat", namespace=NS, base_version=0, blocks=LINKS)
        return kv

    yield make
    for kv in stores:
        await kv.aclose()


def check(blocks, links):
    blocks.wait()
    assert len(blocks) == len(links)
    for link, lease in zip(links, blocks.leases, strict=True):
        raw = lease.tensor.numpy().tobytes()
        assert len(raw) == lease.size == codec.layout(NS, SHARD, link.tokens).raw_bytes
        payload = raw[codec.layout(NS, SHARD, link.tokens).header_bytes :]
        assert payload == pattern(link, len(payload))


async def test_a_restore_to_the_device_and_what_is_handed_out_there(opened, monkeypatch):
    monkeypatch.setattr("kvstore.service.ondevice.WINDOW", 3 * PLAN.raw_bytes)
    kv = await opened()
    status = await kv.restore("chat", namespace=NS, tier="device")
    assert status.tier == "device"
    done = await kv.wait(status)
    size = sum(codec.layout(NS, SHARD, link.tokens).raw_bytes for link in LINKS)
    assert (done.state, done.tier, done.staged_tokens, done.staged_bytes) == ("ready", "device", 12 * NS.block_tokens, size)
    stats = (await kv.stats()).tiers
    assert (next(iter(stats)), stats["device"].used, stats["device"].bytes_in) == ("device", size, size)
    with await kv.get_on_device(NS, SHARD, LINKS) as blocks:
        check(blocks, LINKS)
    assert (await kv.stats()).tiers["device"].hits == 12


async def test_what_is_not_there_is_brought_up(opened, monkeypatch):
    monkeypatch.setattr("kvstore.service.ondevice.WINDOW", 2 * PLAN.raw_bytes)
    kv = await opened()
    with await kv.get_on_device(NS, SHARD, LINKS[:5]) as some, await kv.get_on_device(NS, SHARD, LINKS) as blocks:
        check(some, LINKS[:5])
        check(blocks, LINKS)
        assert [lease.source for lease in blocks.leases[:5]] == ["device"] * 5
    missing = [*LINKS[:3], links_of(NS, 14)[13], LINKS[3]]
    with await kv.get_on_device(NS, SHARD, missing) as blocks:
        check(blocks, LINKS[:3])
        assert blocks.miss == "absent"
    assert (await kv.stats()).leases == 0


async def test_a_device_without_room_holds_a_shorter_prefix_and_says_so(opened):
    kv = await opened(f"device=cpu&device_bytes={5 * PLAN.raw_bytes}")
    done = await kv.wait(await kv.restore("chat", namespace=NS, tier="device"))
    assert (done.state, done.staged_tokens) == ("partial", 5 * NS.block_tokens)
    assert "full" in done.error
    with await kv.get_on_device(NS, SHARD, LINKS) as blocks:
        check(blocks, LINKS[:5])
        assert blocks.miss == "full"
    assert (await kv.stats()).tiers["device"].dropped == 2 * 7


@pytest.mark.parametrize("priority", ["interactive", "speculative"])
async def test_only_what_was_asked_for(opened, priority):
    kv = await opened()
    asked = {"tokens": range(3 * NS.block_tokens), "max_bytes": 2 * PLAN.raw_bytes, "priority": priority}
    done = await kv.wait(await kv.restore("chat", namespace=NS, tier="device", **asked))
    assert (done.state, done.priority, done.staged_tokens) == ("partial", priority, 2 * NS.block_tokens)
    assert (await kv.stats()).tiers["device"].used == 2 * PLAN.raw_bytes


async def test_the_same_restore_is_joined_and_can_be_cancelled(opened, monkeypatch):
    kv = await opened()
    gate = asyncio.Event()
    tier = kv.transport._above.tier
    real = tier.promote_many

    async def slow(items):
        await gate.wait()
        return await real(items)

    monkeypatch.setattr(tier, "promote_many", slow)
    first = await kv.restore("chat", namespace=NS, tier="device")
    again = await kv.get_restore(first.restore_id, wait_ms=50)
    assert (again.state, again.staged_tokens) == ("staging", 0)
    ended = await kv.cancel_restore(first.restore_id)
    assert (ended.state, ended.error) == ("partial", "on the device: it was cancelled")
    gate.set()
    done = await kv.wait(await kv.restore("chat", namespace=NS, tier="device"))
    assert (done.state, done.restore_id != first.restore_id) == ("ready", True)


async def test_a_session_that_is_not_there_fails_as_it_does_in_memory(opened):
    kv = await opened()
    done = await kv.wait(await kv.restore("nobody", namespace=NS, tier="device"))
    assert (done.state, done.kind, done.tier, done.staged_tokens) == ("failed", "not_found", "device", 0)


async def test_without_a_device_it_says_how_to_have_one(opened):
    kv = await opened("codec=raw")
    with pytest.raises(Unsupported):
        await kv.restore("chat", namespace=NS, tier="device")
    with pytest.raises(Unsupported) as caught:
        await kv.get_on_device(NS, SHARD, LINKS)
    assert "device=cuda:0" in caught.value.remedy


@pytest.mark.parametrize("url", ["memory://x?device=cuda:77", "memory://x?device=tpu", "kvtier://127.0.0.1:1?device=cuda:0"])
async def test_a_device_that_cannot_be_is_refused(url):
    with pytest.raises(Invalid):
        await kvstore.connect(url)


def test_parts_are_layers_and_the_last_one_takes_the_token_ids_along():
    (want,) = block_wants(NS, SHARD, LINKS[:1])
    head, ends = layer_ends(want)
    assert head == PLAN.header_bytes
    assert len(ends) == NS.layers
    assert ends[-1] == want.size
    assert ends[0] == PLAN.header_bytes + sum(PLAN.sizes[: PLAN.per_layer])
