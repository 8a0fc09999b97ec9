"""What a client may rely on, whatever carries its calls: the Unix socket and HTTP, one suite."""

import asyncio

import msgspec
import pytest
from fakes.node import SHARD, fake_service, filler, links_of, namespace, pattern, payload_of, until

import kvstore
from kvstore import api
from kvstore.errors import Conflict, Invalid, NotFound, Overloaded, Unavailable
from kvstore.ids import Link
from kvstore.server.app import HttpServer
from kvstore.server.local import LocalServer

NS = namespace()
SESSION = api.Session(id="chat/1 世界", namespace=NS.id, lane="main", version=3, tokens=48, blocks=3, labels={"a": "b"})


@pytest.fixture
async def service():
    async with fake_service() as service:
        yield service


@pytest.fixture(params=["unix", "http"])
async def url(request, service, tmp_path):
    if request.param == "unix":
        path = tmp_path / "node.sock"
        async with LocalServer.open(service, str(path)):
            yield f"kvtier+unix://{path}"
    else:
        async with HttpServer.open(service, "127.0.0.1:0") as server:
            yield server.url.replace("http://", "kvtier://")


@pytest.fixture
async def kv(url):
    async with kvstore.open(url) as client:
        yield client


async def test_what_is_put_is_got_bit_for_bit(kv):
    links = links_of(NS, 5)
    assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 5
    with await kv.get(NS, SHARD, links) as blocks:
        assert (len(blocks), blocks.miss, blocks.intact) == (5, "", True)
        for link, lease in zip(links, blocks.leases, strict=True):
            payload = payload_of(NS, lease)
            assert payload == pattern(link, len(payload))
            assert lease.view.readonly


async def test_a_partial_block_has_its_own_length(kv):
    last = kvstore.chain(NS, range(5), partial=True)
    assert await kv.put(NS, SHARD, last, filler(last)) == [True]
    with await kv.get(NS, SHARD, last) as blocks:
        assert len(payload_of(NS, blocks.leases[0], tokens=5)) == 5 * (2 * 2 * 4 * 128 * 2 + 4)


async def test_b26_a_hole_ends_the_run(kv):
    links = links_of(NS, 3)
    there = [links[0], links[2]]
    await kv.put(NS, SHARD, there, filler(there))
    with await kv.get(NS, SHARD, links) as blocks:
        assert (len(blocks), blocks.miss) == (1, "absent")
    with await kv.get(NS, SHARD, links[1:]) as blocks:
        assert (len(blocks), blocks.miss) == (0, "absent")
    await kv.put(NS, SHARD, [links[1]], filler([links[1]]))
    with await kv.get(NS, SHARD, links) as blocks:
        assert (len(blocks), blocks.miss) == (3, "")
    found = await kv.lookup(namespace=NS, prefix_ids=[link.prefix_id for link in links])
    assert (found.run, found.tiers) == (3, ["dram"] * 3)


async def test_nothing_is_nothing(kv):
    assert await kv.put(NS, SHARD, [], filler([])) == []
    with await kv.get(NS, SHARD, []) as blocks:
        assert (len(blocks), blocks.miss) == (0, "")


@pytest.mark.parametrize("tokens", [0, -256, 17, 1 << 40])
async def test_b27_a_bad_length_is_refused_not_sliced(kv, tokens):
    links = [Link(links_of(NS, 1)[0].prefix_id, tokens)]
    with pytest.raises(Invalid):
        await kv.put(NS, SHARD, links, filler(links))
    with pytest.raises(Invalid):
        (await kv.get(NS, SHARD, links)).release()


async def test_b33_twenty_puts_of_one_block_all_succeed(kv, service):
    links = links_of(NS, 1)
    taken = await asyncio.gather(*(kv.put(NS, SHARD, links, filler(links)) for _ in range(20)))
    assert taken == [[True]] * 20
    await service.plane.settled("default")
    assert service.plane.tiers["default"].count == 1


async def test_a_full_node_drops_and_says_so(kv, service):
    links = links_of(NS, 3)
    service.plane.full = True
    assert await kv.put(NS, SHARD, links, filler(links)) == [False] * 3
    service.plane.full = False
    assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 3


async def test_an_error_in_fill_is_the_callers_and_leaves_nothing(kv, service):
    links = links_of(NS, 4)

    def fill(index, payload):
        if index == 2:
            raise ZeroDivisionError
        payload[:] = bytes(payload.nbytes)

    with pytest.raises(ZeroDivisionError):
        await kv.put(NS, SHARD, links, fill)
    assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 4


async def test_a_read_ends_at_its_deadline_as_a_miss(kv, service):
    links = links_of(NS, 1)
    await kv.put(NS, SHARD, links, filler(links))
    service.plane.gate = asyncio.Event()
    with await kv.get(NS, SHARD, links, deadline_ms=20) as blocks:
        assert (len(blocks), blocks.miss) == (0, "timeout")


async def test_b46_a_look_up_that_is_not_answered_is_a_miss(kv, service):
    async def never(tenant, request):
        await asyncio.Event().wait()

    service.answers["lookup"] = never
    found = await kv.lookup(namespace=NS, prefix_ids=[links_of(NS, 1)[0].prefix_id], deadline_ms=20)
    assert found.run == 0


async def test_values_survive_the_way_in_and_the_way_out(kv, service):
    service.answers["get_session"] = SESSION
    assert await kv.get_session("chat/1 世界", namespace=NS, lane="main") == SESSION
    tenant, name, request = service.calls[-1]
    assert (tenant, name) == ("default", "get_session")
    assert request == api.OfSession(id="chat/1 世界", namespace=NS.id, lane="main")


async def test_every_field_of_a_commit_arrives(kv, service):
    receipt = api.Receipt(id="s", namespace=NS.id, lane="main", version=8, tokens=32, blocks=2, durability="nvme")
    service.answers["commit"] = receipt
    links = links_of(NS, 2)
    shards = ("t0of2.p0of1.g0",)
    wanted = {"lane": "main", "ttl_s": 0, "labels": {"k": "v"}, "durability": "nvme", "write_id": "ab" * 16, "shards": shards}
    assert await kv.commit("s", namespace=NS, base_version=7, blocks=links, **wanted) == receipt
    assert service.calls[-1][2] == api.Commit(id="s", namespace=NS.id, base_version=7, blocks=links, **wanted)


async def test_a_namespace_is_said_once(kv, service):
    service.answers["get_session"] = SESSION
    for _ in range(3):
        await kv.get_session("x", namespace=NS)
    assert [name for _, name, _ in service.calls].count("put_namespace") == 1


async def test_a_model_is_a_name_or_a_namespace(kv, service):
    await kv.restore("x", model="meta/llama")
    await kv.restore("x", model=NS)
    await kv.restore("x", model=NS.id)
    asked = [(request.model, request.namespace) for _, name, request in service.calls if name == "restore"]
    assert asked == [("meta/llama", ""), ("", NS.id), ("", NS.id)]


async def test_errors_keep_their_class_kind_and_facts(kv, service):
    async def conflict(tenant, request):
        raise Conflict("the session is at version 9", current=9)

    service.answers["rewind"] = conflict
    with pytest.raises(Conflict, match="at version 9") as caught:
        await kv.rewind("x", version=3)
    assert (caught.value.kind, caught.value.facts) == ("conflict", {"current": 9})


async def test_a_defect_of_the_node_says_nothing_of_its_inside(kv, service, caplog):
    async def broken(tenant, request):
        raise RuntimeError("secret-of-the-node")

    service.answers["stats"] = broken
    with pytest.raises(kvstore.KVTierError, match="inside the node") as caught:
        await kv.stats()
    assert caught.value.kind == "internal"
    assert "secret-of-the-node" in caplog.text


async def test_an_unknown_namespace_is_not_found(kv):
    with pytest.raises(NotFound):
        await kv.lookup(namespace="ab" * 32, prefix_ids=[])


async def test_all_sessions_page_by_page(kv, service):
    async def page(tenant, request):
        start = int(request.cursor or 0)
        found = [msgspec.structs.replace(SESSION, id=f"s{i}") for i in range(start, start + 2)]
        return api.SessionPage(sessions=found, cursor=str(start + 2) if start < 4 else "")

    service.answers["list_sessions"] = page
    assert [session.id async for session in kv.sessions(prefix="s")] == [f"s{i}" for i in range(6)]
    assert next(request.prefix for _, name, request in service.calls if name == "list_sessions") == "s"


async def test_waiting_for_a_restore_ends_with_it(kv, service):
    begun = await kv.restore("x", tier="nvme", deadline_ms=100)
    assert (begun.state, begun.version, begun.tier) == ("resolving", None, "nvme")
    waiting = asyncio.create_task(kv.wait(begun))
    await service.advance(begun.restore_id, state="staging", version=4)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await service.advance(begun.restore_id, state="ready", tokens=512)
    ended = await waiting
    assert (ended.state, ended.version, ended.tokens) == ("ready", 4, 512)


async def test_a_restore_that_does_not_end_is_a_timeout(kv):
    begun = await kv.restore("x")
    with pytest.raises(Unavailable) as caught:
        await kv.wait(begun.restore_id, timeout_ms=30)
    assert caught.value.kind == "timeout"


async def test_overload_is_told_apart(kv, service):
    async def busy(tenant, request):
        raise Overloaded("10000 restores are running")

    service.answers["restore"] = busy
    with pytest.raises(Overloaded):
        await kv.restore("x")


async def test_b22_ids_that_would_leave_their_folder(kv):
    for bad in ("../../x", "%2e%2e/x", "a/../b", "\0", ""):
        with pytest.raises(Invalid):
            await kv.restore(bad)
        with pytest.raises(Invalid):
            await kv.delete_session(bad)


async def test_b23_ids_arrive_as_they_are(kv, service):
    service.answers["get_session"] = SESSION
    ids = ["a b", "a+b", "a%2Bb", "x?y", "x#y", "~", "世界", "a/b", "a&b=c", "%", "x" * 500]
    for each in ids:
        await kv.get_session(each)
    assert [request.id for _, name, request in service.calls if name == "get_session"] == ids


async def test_a_closed_client_says_so(kv):
    await kv.aclose()
    await kv.aclose()
    with pytest.raises(kvstore.Closed):
        await kv.stats()


async def test_cancelled_reads_leave_no_lease(kv, service):
    links = links_of(NS, 2)
    await kv.put(NS, SHARD, links, filler(links))
    service.plane.gate = asyncio.Event()
    reads = [asyncio.create_task(kv.get(NS, SHARD, links)) for _ in range(20)]
    await until(lambda: service.plane.waiting)
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    service.plane.gate.set()
    with await kv.get(NS, SHARD, links) as blocks:
        assert len(blocks) == 2
    await until(lambda: service.plane.tiers["default"].leases == 0)
