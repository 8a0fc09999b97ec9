"""Shared memory: an arena that is read only, and a window through which blocks go in, whole or not at all."""

import asyncio
import mmap
import os

import msgspec
import pytest
from fakes.node import SHARD, filler, links_of, pattern, payload_of, until
from fakes.raw_socket import LIMITS, NS, answer, leased, url

import kvstore
from kvstore import codec, wire
from kvstore.errors import Invalid, Unavailable
from kvstore.ids import BlockName
from kvstore.server.local import LocalServer


async def test_a_client_killed_while_it_fills_its_window_leaves_no_room_taken(raw, service, server):
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    links = links_of(NS, 3)
    prefixes = b"".join(bytes.fromhex(link.prefix_id) for link in links)
    extents = [(16, index * 69632, 65600) for index in range(3)]
    published = await answer(client, wire.Publish(1, NS.id, str(SHARD), prefixes, extents, filled=False))
    assert (published.taken, published.drained) == ([True] * 3, False)
    assert service.plane.tiers["default"].used > 0
    client.close()
    await until(lambda: server.connections == 0)
    assert (service.plane.tiers["default"].used, service.plane.tiers["default"].count) == (0, 0)


async def test_no_connection_takes_more_room_than_its_window_has(raw, service):
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    links, most = links_of(NS, 70), LIMITS.window // 65600
    refused = []
    for number, link in enumerate(links, 1):  # all name the same bytes of the window
        got = await answer(
            client, wire.Publish(number, NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [(16, 0, 65600)], filled=False)
        )
        if isinstance(got, wire.Fault):
            refused.append((number, got.problem.kind))
    assert refused == [(number, "overloaded") for number in range(most + 1, len(links) + 1)]


async def test_a_number_whose_blocks_still_lie_in_the_window_is_in_use(raw, service, server):
    copied = []
    service.plane.namespaces[NS.id] = NS
    service.plane.land = lambda tenant, rooms, copy, done, *, soon: copied.append(done)
    client = await raw()
    prefix = bytes.fromhex(links_of(NS, 1)[0].prefix_id)
    publish = wire.Publish(1, NS.id, str(SHARD), prefix, [(16, 0, 65600)])
    assert isinstance(await answer(client, publish), wire.Published)
    fault = await answer(client, publish)
    assert (fault.id, fault.problem.kind) == (0, "corrupt")
    [done] = copied
    assert server.connections == 1  # its window is still read
    done()
    await until(lambda: server.connections == 0)


async def test_what_one_connection_published_another_finds_at_once(server, path):
    async with kvstore.open(url(path)) as writer, kvstore.open(url(path)) as reader:
        for turn in range(5):
            links = links_of(NS, 8, start=turn)
            assert await writer.put(NS, SHARD, links, filler(links)) == [True] * 8
            with await reader.get(NS, SHARD, links, reach="dram") as blocks:
                assert [payload_of(NS, lease) for lease in blocks.leases] == [pattern(link, 65600) for link in links]


async def test_a_window_overwritten_before_it_is_drained_spoils_the_writers_block_alone(raw, server, service, path):
    links = links_of(NS, 2)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links[:1], filler(links))
    client = await raw()
    with mmap.mmap(client.fds[1], LIMITS.window) as window:
        window[:65600] = pattern(links[1], 65600)
        publish = wire.Publish(1, NS.id, str(SHARD), bytes.fromhex(links[1].prefix_id), [(16, 0, 65600)])
        assert isinstance(await answer(client, publish), wire.Published)

        def overwrite():
            for byte in range(256):
                window[:65600] = bytes([byte]) * 65600

        overwriting = asyncio.create_task(asyncio.to_thread(overwrite))
        await service.plane.settled("default")
        await overwriting
    leases, _ = await service.plane.get("default", NS.id, SHARD, links, deadline_ms=0, reach="dram")
    assert payload_of(NS, leases[0]) == pattern(links[0], 65600)
    name = BlockName(NS.id, SHARD, links[1].prefix_id, links[1].tokens)
    codec.verify(leases[1].view, name, NS)  # digested as it landed: whoever reads it gets one and the same bytes
    for lease in leases:
        lease.release()


async def test_each_connection_has_a_window_of_its_own(raw):
    first, second = await raw(), await raw()
    assert not os.path.samestat(os.fstat(first.fds[1]), os.fstat(second.fds[1]))


async def test_the_arena_cannot_be_written_by_a_client(raw, service):
    client = await raw()
    arena = client.fds[0]
    with pytest.raises(OSError):
        mmap.mmap(arena, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(arena, b"x", 0)
    with pytest.raises(OSError):
        os.ftruncate(arena, 4096)
    again = os.open(f"/proc/self/fd/{arena}", os.O_RDWR)
    try:
        with pytest.raises(OSError):
            mmap.mmap(again, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(OSError):
            os.pwrite(again, b"x", 0)
    finally:
        os.close(again)
    mmap.mmap(arena, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ).close()


async def test_the_window_cannot_be_cut_under_the_node(raw):
    client = await raw()
    for size in (0, 4096, 8 << 20):
        with pytest.raises(OSError):
            os.ftruncate(client.fds[1], size)


async def test_a_read_is_a_view_of_the_arena_not_a_copy(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 1)
        await kv.put(NS, SHARD, links, filler(links))
        blocks = await kv.get(NS, SHARD, links)
        assert blocks.leases[0].view.obj is kv._transport._connection._met.arena
        assert leased(service) == 1
        blocks.release()
        await until(lambda: leased(service) == 0)


async def test_b32_the_window_overwritten_after_it_was_drained_changes_nothing(server, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 8)
        await kv.put(NS, SHARD, links, filler(links))
        connection = kv._transport._connection
        await until(lambda: not connection._draining)
        window = connection.window
        window[:] = b"\xee" * len(window)
        with await kv.get(NS, SHARD, links) as blocks:
            for link, lease in zip(links, blocks.leases, strict=True):
                assert payload_of(NS, lease) == pattern(link, len(payload_of(NS, lease)))


async def test_b32_a_cancelled_put_never_reads_the_callers_buffer_again(server, service, path):
    """The caller may reuse its buffer as soon as the cancelled call is over: what is stored is the original, or nothing."""
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 40)
        buffer, started, over = bytearray(b"\x11" * 70000), asyncio.Event(), []
        loop = asyncio.get_running_loop()

        def fill(index, payload):
            loop.call_soon_threadsafe(started.set)
            assert not over
            payload[:] = buffer[: payload.nbytes]

        put = asyncio.create_task(kv.put(NS, SHARD, links, fill))
        await started.wait()
        put.cancel()
        with pytest.raises(asyncio.CancelledError):
            await put
        over.append(True)
        buffer[:] = b"\x22" * len(buffer)
        await asyncio.sleep(0.05)
        with await kv.get(NS, SHARD, links) as blocks:
            assert all(set(payload_of(NS, lease)) == {0x11} for lease in blocks.leases)
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 40  # all of the window is free again


async def test_more_than_the_window_goes_through_it_in_pieces(server, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 200)  # 13 MB through 4 MiB
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 200
        with await kv.get(NS, SHARD, links) as blocks:
            assert len(blocks) == 200
            assert payload_of(NS, blocks.leases[-1])[:32] == bytes.fromhex(links[-1].prefix_id)


async def test_a_block_larger_than_the_window_is_refused_with_the_remedy(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, window=16384)), kvstore.open(url(path)) as kv:
        links = links_of(NS, 1)
        with pytest.raises(Invalid, match=r"\[dram\] window"):
            await kv.put(NS, SHARD, links, filler(links))


@pytest.mark.parametrize(
    ("offset", "length"),
    [(-1, 65600), (4 << 20, 65600), ((4 << 20) - 65599, 65600), (1 << 62, 65600), (0, 0), (0, -1), (0, 65601), (0, 1 << 40)],
)
async def test_extents_outside_the_window_are_refused(raw, service, offset, length):
    client = await raw()
    service.plane.namespaces[NS.id] = NS
    prefix = bytes.fromhex(links_of(NS, 1)[0].prefix_id)
    fault = await answer(client, wire.Publish(1, NS.id, str(SHARD), prefix, [(16, offset, length)]))
    assert (fault.id, fault.problem.kind) == (1, "invalid")
    assert service.plane.tiers["default"].used == 0
    assert isinstance(await answer(client, wire.Ask(2, "health", msgspec.Raw(b"\x80"))), wire.Reply)


async def test_a_write_that_waits_for_room_is_told_when_the_node_goes(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 1)
        await kv.put(NS, SHARD, links, filler(links))
        await until(lambda: not kv._transport._connection._draining)
        assert kv._transport._connection.space.take_now(4 << 20) == 0
        waiting = asyncio.create_task(kv.put(NS, SHARD, links, filler(links)))
        await asyncio.sleep(0.01)
        for connection in server._connections:
            connection.abort()
        with pytest.raises(Unavailable):
            await waiting
