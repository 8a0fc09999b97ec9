"""The protocol on a real S3 server."""

import asyncio

import pytest

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import AlreadyExists, Conflict, Gone
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle.collector import collect
from kvstore.objects import Faults
from kvstore.repo import want
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import Shelf, commit, opened, tiny, until
from tiering import Movers

NS = tiny(dtype="BF16", layers=2)


@pytest.mark.seaweed
async def test_b53_four_appenders_that_rebase_lose_nothing(s3_store, root):
    shelf, turns = Shelf(), {1: list(range(4))}
    async with s3_store() as store:

        async def appender(number: int) -> None:
            async with opened(store, SystemClock(), RandomIds(), root=root) as node:
                while True:
                    version = (await node.sessions.get("default", "s", NS.id, "main")).version
                    await until(lambda version=version: version in turns)  # its writer has not heard yet that it landed
                    mine = [*turns[version], number, number, number, number]
                    try:
                        receipt = await commit(node, shelf, "s", mine, version, NS)
                    except Conflict:
                        continue
                    turns[receipt.version] = mine
                    return

        async with opened(store, SystemClock(), RandomIds(), root=root) as first:
            await commit(first, shelf, "s", range(4), 0, NS)
            await asyncio.gather(*(appender(number) for number in range(4)))
            session = await first.sessions.get("default", "s", NS.id, "main")
            assert (session.version, session.tokens) == (5, 20)
            assert sorted(turns[5][4::4]) == [0, 1, 2, 3]
            assert (await fsck(first, deep=True)).findings == []


@pytest.mark.seaweed
async def test_a_life_on_a_real_server(s3_store, root):
    shelf, ids = Shelf(), RandomIds()
    async with s3_store() as bare, Movers.open(2) as movers:
        store = Faults(bare)
        async with opened(store, SystemClock(), ids, movers.run, root=root, codec="bp-zstd") as node:
            await commit(node, shelf, "s", range(30), 0, NS)
            await node.sessions.fork("default", "s", NS.id, "main", "世界/t")
            await commit(node, shelf, "世界/t", [*range(28), 9, 9, 9], 1, NS)
            await node.sessions.rewind("default", "s", tokens=9)
            with pytest.raises(AlreadyExists):
                await node.sessions.create("default", "s", NS)
            assert [each.id for each in (await node.sessions.list("default")).sessions] in (["s", "世界/t"], ["世界/t", "s"])
            await node.sessions.delete("default", "s")
        async with opened(store, SystemClock(), ids, movers.run, root=root) as other:
            with pytest.raises(Gone):
                await other.sessions.get("default", "s", NS.id, "main")
            session, manifest = await other.sessions.resolve("default", "世界/t")
            assert (session.version, session.tokens) == (2, 31)
            for block in manifest.blocks:
                name = BlockName(NS.id, Shard(), block.prefix_id, block.tokens)
                asked = want(NS, name, block.copies[0])
                raw = memoryview(bytearray(asked.size))
                assert await other.origin.fetch(asked, raw) is None
                assert bytes(raw) == shelf.held[name]
            report = await fsck(other, deep=True)
            assert report.findings == []
            done = await collect(other, now=True)
            assert done.blocks_kept == 9  # 7 full ones, and the partial last ones of two versions
            assert (await fsck(other, deep=True)).garbage_blocks == 0
            store.requests.clear()
            await collect(other)
            heads = [entry for entry in store.requests if f"{root}/heads/" in entry.key]
            assert {entry.verb for entry in heads} <= {"list", "get"}
            again = await commit(other, shelf, "世界/t", range(28), 2, NS)
            assert (again.version, again.tokens) == (3, 28)


@pytest.mark.seaweed
async def test_a_fresh_node_finds_what_it_was_not_told_of_by_one_listing(s3_store, root):
    shelf = Shelf()
    async with s3_store() as bare:
        async with opened(bare, SystemClock(), RandomIds(), root=root) as node:
            links = shelf.fill(NS, range(40))
            await commit(node, shelf, "s", range(40), 0, NS)
            for _ in range(2):
                await node.epochs.advance(await node.epochs.read())
        store = Faults(bare)
        async with opened(store, SystemClock(), RandomIds(), root=root) as fresh:
            asked = [want(NS, BlockName(NS.id, Shard(), link.prefix_id, link.tokens)) for link in links]
            assert await fresh.origin.contains(asked) == 0
            store.requests.clear()
            assert await fresh.origin.contains(asked, until=fresh.root.clock.monotonic() + 60) == 10
            assert [entry.verb for entry in store.requests].count("list") == 1
