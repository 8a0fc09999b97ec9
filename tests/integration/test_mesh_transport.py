"""Blocks between nodes over real sockets: what arrives is what was published, or it is a miss."""

import asyncio
import os
import signal
import socket
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from fakes.mesh_peers import NS, Counted, block, introduce, mesh_node, wants_of
from fakes.node import until
from fakes.peer import request_of, scripted, through

from kvstore.errors import Invalid
from kvstore.mesh import frames, link
from kvstore.mesh.link import LinkSettings, TcpLink
from kvstore.mesh.members import Member, owner
from kvstore.mesh.supplier import PeerSettings
from kvstore.server.peering import PeeringLimits
from kvstore.service.names import Names
from tiering import Miss, Reach

PATIENT = PeerSettings(patience_s=30, through_s=30)  # no timing here but where it is the subject


@asynccontextmanager
async def pair(**how):
    """Two nodes that know each other; the second reads from the first."""
    async with mesh_node("a", **how.pop("first", {})) as a, mesh_node("b", **{"settings": PATIENT, **how}) as b:
        introduce(a, b)
        yield a, b


def only(node, wants, *members):
    """The directory says that these have them."""
    node.directory.others |= dict.fromkeys(members)
    node.directory.places |= {each.key: members for each in wants}


def idle(*nodes):
    return all(node.dram.leases == 0 and node.dram._budget.reserved == 0 for node in nodes)


@pytest.mark.parametrize("blocks", [1, 3, 60])
async def test_what_arrives_is_what_was_published(blocks):
    async with pair() as (a, b):
        wants = wants_of(blocks)
        a.put(wants)
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["peer"] * blocks
        assert (await b.read(wants))[1] == ["dram"] * blocks
        await until(lambda: idle(a, b))


async def test_requests_are_batched_and_the_directory_is_asked_once_for_all():
    async with pair() as (a, b):
        wants = wants_of(16)
        a.put(wants)
        await b.read(wants)
        assert b.directory.asked == 1
        assert a.peering.counts["requests blocks"] <= 4


async def test_a_block_on_the_disk_is_read_into_memory_first(tmp_path):
    async with pair(first={"nvme": tmp_path / "nvme"}) as (a, b):
        wants = wants_of(20)
        a.put(wants)
        for each in wants:
            assert a.stack.offer(each)
        await a.stack.flush(wants)
        a.dram.discard_many([each.key for each in wants[5:]])
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]


async def test_a_hole_ends_the_prefix():
    async with pair(placement=False) as (a, b):
        wants = wants_of(12)
        a.put(wants[:5] + wants[6:])
        only(b, wants, a.member)
        found = await b.stack.get_many(wants)
        assert found[5] is Miss.ABSENT
        assert len(found) == 6
        for lease in found[:5]:
            lease.release()
        assert b.directory.wrongs[0] == ("a", wants[5].key)
        await until(lambda: idle(a, b))


async def test_a_peer_says_what_it_has(monkeypatch):
    monkeypatch.setattr(link, "_HOLDS_S", 30.0)
    async with pair() as (a, b):
        wants = wants_of(30)
        a.put(wants[::2])
        keys = [each.key for each in wants]
        assert await b.links.holds(a.member, keys) == [True, False] * 15
        with pytest.raises(ConnectionRefusedError):
            await b.links.holds(Member("gone", 1, "127.0.0.1", 1), keys)


async def test_a_peer_that_is_killed_is_a_shorter_prefix_and_the_next_origin_has_the_rest(tmp_path):
    bucket = Counted()
    async with mesh_node("b", dram=256 << 20, bucket=bucket, settings=PATIENT) as b:
        script = Path(__file__).parents[1] / "crash" / "kill9_peer.py"
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(sys.executable, str(script), stdin=pipe, stdout=pipe)
        try:
            name, port = (await child.stdout.readline()).split()
            served = Member(name.decode(), 1, "127.0.0.1", int(port))
            came = 0

            async def kill_after_some(total, data):
                nonlocal came
                came += len(data)
                if came > 20 << 20 and child.returncode is None:
                    os.kill(child.pid, signal.SIGKILL)
                    await child.wait()
                return data

            async with through(served, kill_after_some) as member:
                wants = wants_of(400)
                only(b, wants, member)
                got, sources = await b.read(wants)
                assert got == [block(each) for each in wants]
                assert set(sources) == {"peer", "bucket"}
                await until(lambda: idle(b))
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()


@pytest.mark.parametrize("bit", [1_000_000, 70_000, 250])
async def test_a_flipped_bit_is_no_block(bit):
    """In a tensor, in a later block, and in a header."""
    bucket = Counted()

    def flip(total, data):
        if total <= bit < total + len(data):
            data = bytearray(data)
            data[bit - total] ^= 1
        return bytes(data)

    async with pair(bucket=bucket) as (a, b):
        wants = wants_of(14)
        a.put(wants)
        async with through(a.member, flip) as member:
            only(b, wants, member)
            got, _ = await b.read(wants)
            assert got == [block(each) for each in wants]
            counts = b.peers.counts  # where `a` owns the block it is asked once more, to read it through
            assert bucket.asked or counts["through"] or counts["hits"] < len(wants)
            await until(lambda: idle(b))


async def test_bytes_that_changed_while_they_were_read_are_another_sources():
    async with pair(bucket=Counted()) as (a, b), mesh_node("c") as c:
        introduce(a, b, c)
        wants, others = wants_of(4), wants_of(1, first=9)
        a.put(wants)
        c.put(wants)
        lease = a.dram.lease(wants[2])
        a.dram.memory[lease.offset : lease.offset + lease.size] = block(others[0])  # a sound block, and not this one
        only(b, wants, a.member)
        b.directory.places[wants[2].key] = (a.member, c.member)
        b.peers._supplier(c.member).speed = 1.0  # so that `a` is asked first
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["peer"] * 4
        assert b.peers.counts["corrupt"] == 1
        assert ("a", wants[2].key) in b.directory.wrongs
        lease.release()


async def test_leading_layers_are_told_of_as_they_come():
    async with pair() as (a, b):
        wants = wants_of(1)
        a.put(wants)
        place, told = bytearray(wants[0].size), []
        assert await b.peers.fetch(wants[0], memoryview(place), told.append) is None
        assert told == sorted(told)
        assert told[-1] == wants[0].size


def _frame(what, place, nbytes, extra=b""):
    return b"%010x\r\n" % (nbytes + 16) + frames._FRAME.pack(what, place, nbytes) + extra


GARBAGE = {
    "nothing": b"",
    "noise": bytes(range(256)) * 40,
    "a refusal": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "a redirect": b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n" + b" " * 60,
    "half a frame": frames.ANSWER + _frame(0, 0, 10)[:9],
    "a short object": frames.ANSWER + _frame(0, 0, 10, b"x" * 10 + b"\r\n"),
    "a huge object": frames.ANSWER + _frame(0, 0, 1 << 39),
    "a huge coded one": frames.ANSWER + _frame(1, 0, 1 << 39),
    "another's place": frames.ANSWER + _frame(0, 7, wants_of(1)[0].size),
    "an unknown miss": frames.ANSWER + _frame(99, 0, 0, b"\r\n"),
    "a miss with bytes": frames.ANSWER + _frame(2, 0, 5, b"x" * 5 + b"\r\n"),
    "another length": frames.ANSWER + b"00000000ff\r\n" + frames._FRAME.pack(0, 0, wants_of(1)[0].size),
    "zeros": frames.ANSWER + _frame(0, 0, wants_of(1)[0].size, bytes(wants_of(1)[0].size) + b"\r\n"),
    "no coding": frames.ANSWER + _frame(1, 0, 100, b"x" * 100 + b"\r\n"),
}


@pytest.mark.parametrize("said", GARBAGE.values(), ids=GARBAGE.keys())
async def test_a_peer_that_talks_nonsense_is_a_miss(said):
    async def answer(reader, writer):
        await request_of(reader)
        writer.write(said)
        await writer.drain()

    bucket = Counted()
    async with mesh_node("b", bucket=bucket, settings=PATIENT) as b, scripted(answer) as member:
        wants = wants_of(3)
        only(b, wants, member)
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["bucket"] * 3
        with pytest.raises((OSError, frames.Malformed)):
            await b.links.holds(member, [each.key for each in wants])
        await until(lambda: idle(b))


async def test_a_peer_that_takes_too_long_is_not_waited_for():
    async def answer(reader, writer):
        await request_of(reader)
        writer.write(frames.ANSWER + _frame(0, 0, wants_of(1)[0].size, b"x"))
        await asyncio.sleep(3600)

    bucket = Counted()
    quick = PeerSettings(patience_s=0.05, unmeasured=1e9)
    async with mesh_node("b", bucket=bucket, settings=quick) as b, scripted(answer) as member:
        wants = wants_of(3)
        only(b, wants, member)
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert b.peers.counts["hedged"]
        await until(lambda: idle(b))
        asked = bucket.asked.copy()
        more = wants_of(1, first=5)
        only(b, more, member)
        await b.read(more)  # it is left alone for a while
        assert b.peers.counts["hedged"] <= 3
        assert bucket.asked.keys() - asked.keys() == {more[0].key}


async def test_a_reader_that_does_not_read_holds_nothing_for_long():
    limits = PeeringLimits(stall_s=0.2, slowest=1e9)
    async with mesh_node("a", dram=64 << 20, limits=limits) as a:
        wants = wants_of(100)
        a.put(wants)
        sock = _asking(a, wants)
        await until(lambda: a.dram.leases > 0)
        await until(lambda: a.peering.counts["connections idle or stalled"] == 1)
        await until(lambda: idle(a))
        sock.close()


async def test_a_reader_that_leaves_ends_its_answer():
    bucket = Counted()
    bucket.held = asyncio.Event()
    async with mesh_node("a", bucket=bucket, placement=False) as a:
        wants = wants_of(3)
        sock = _asking(a, wants, through=True)
        await until(lambda: bucket.asked)
        sock.close()
        await until(lambda: not a.peering._visits and idle(a))


def _asking(node, wants, **more):
    """A connection on which these were asked for."""
    ask = frames.Ask(
        namespace=NS,
        shard="t0of1.p0of1.g0",
        prefixes=b"".join(bytes.fromhex(each.ref.name.prefix_id) for each in wants),
        tokens=tuple(each.ref.name.tokens for each in wants),
        **more,
    )
    sock = socket.create_connection(node.peering.address)
    sock.sendall(frames.request(frames.BLOCKS, "x", msgspec.msgpack.encode(ask)))
    return sock


def _post(path, body, length=None, kind=frames.MEDIA_TYPE):
    size = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n\r\n".encode() + body


def _ask(**fields):
    fine = {"namespace": NS, "shard": "t0of1.p0of1.g0", "prefixes": bytes(32), "tokens": [64]}
    return msgspec.msgpack.encode(fine | fields)


NONSENSE = {
    "another method": b"GET /v1/peer/blocks HTTP/1.1\r\nContent-Type: application/msgpack\r\n\r\n",
    "another path": _post("/", _ask()),
    "a page's content type": _post(frames.BLOCKS, _ask(), kind="text/plain"),
    "an endless head": b"POST " + b"x" * 6_000,
    "a huge body": _post(frames.BLOCKS, b"", 1 << 40),
    "no length": b"POST /v1/peer/blocks HTTP/1.1\r\nContent-Type: application/msgpack\r\n\r\n",
    "no msgpack": _post(frames.BLOCKS, b"\xff" * 50),
    "an unknown field": _post(frames.BLOCKS, _ask(more=1)),
    "too many tokens": _post(frames.BLOCKS, _ask(tokens=[129])),
    "no namespace": _post(frames.BLOCKS, _ask(namespace={"model": "m", "revision": "r", "layers": 0})),
    "no shard": _post(frames.BLOCKS, _ask(shard="../etc")),
    "no blocks": _post(frames.BLOCKS, _ask(prefixes=b"", tokens=[])),
    "too many blocks": _post(frames.BLOCKS, _ask(prefixes=bytes(32) * 600, tokens=[64] * 600)),
    "half a prefix": _post(frames.BLOCKS, _ask(prefixes=bytes(33))),
    "half a key": _post(frames.HOLDS, msgspec.msgpack.encode(bytes(33))),
    "too many keys": _post(frames.HOLDS, msgspec.msgpack.encode(bytes(32 * 17_000))),
}


@pytest.mark.parametrize(("through", "why"), [(False, "absent"), (True, "full")])
async def test_a_namespace_that_nobody_has_heard_of_costs_little(through, why, monkeypatch):
    def sizes(self, tokens):
        raise AssertionError(f"{len(tokens)} blocks of {self.namespace.layers} layers are measured")

    strange = msgspec.structs.replace(NS, layers=4096, block_tokens=512)
    async with pair() as (a, _):
        reader, writer = await asyncio.open_connection(*a.peering.address)
        with monkeypatch.context() as patched:
            patched.setattr(Names, "sizes", sizes)
            ask = _ask(namespace=strange, prefixes=os.urandom(32 * 512), tokens=[*range(1, 513)], through=through)
            writer.write(_post(frames.BLOCKS, ask))
            assert (await reader.readuntil(frames.LAST)).startswith(frames.ANSWER)
        assert a.peering.counts[why] == 512
        writer.close()


async def test_a_peer_that_lets_nobody_connect_holds_no_thread(monkeypatch):
    async def never(self):
        await asyncio.sleep(60)

    monkeypatch.setattr(TcpLink, "_dialled", never)
    async with mesh_node("a") as a:
        with pytest.raises(TimeoutError):
            await a.links.holds(Member("b", 1, "127.0.0.1", 1), [bytes(32)])
        assert not a.links.askers._threads


@pytest.mark.parametrize("said", NONSENSE.values(), ids=NONSENSE.keys())
async def test_a_request_that_is_none_is_refused_and_others_are_served(said):
    async with pair() as (a, b):
        reader, writer = await asyncio.open_connection(*a.peering.address)
        writer.write(said)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400")
        writer.close()
        wants = wants_of(2)
        a.put(wants)
        assert (await b.read(wants))[1] == ["peer"] * 2


@pytest.mark.parametrize(
    ("fields", "miss"),
    [({"namespace": msgspec.structs.replace(NS, tenant="another")}, Miss.ABSENT), ({"prefixes": bytes(32)}, Miss.ABSENT)],
)
async def test_what_a_node_does_not_know_is_a_miss(fields, miss):
    async with mesh_node("a") as a:
        reader, writer = await asyncio.open_connection(*a.peering.address)
        writer.write(_post(frames.BLOCKS, _ask(**fields)))
        answer = await reader.readexactly(len(frames.ANSWER) + frames.FRAME_BYTES)
        assert frames.parse_frame(answer[len(frames.ANSWER) :]).miss is miss
        writer.close()


async def test_only_trusted_addresses_may_connect():
    async with mesh_node("a", networks=("10.0.0.0/8",)) as a:
        reader, writer = await asyncio.open_connection(*a.peering.address)
        assert await reader.read() == b""
        assert a.peering.counts["connections untrusted"] == 1
        writer.close()


async def test_a_listener_beyond_loopback_needs_networks():
    async with mesh_node("a") as a:
        opening = type(a.peering).open(a.stack, {}, None, None, None, listen="0.0.0.0:0")
        with pytest.raises(Invalid, match="no network is trusted"):
            async with opening:
                pass


async def test_one_address_has_so_many_connections():
    async with mesh_node("a", limits=PeeringLimits(from_one=2)) as a:
        socks = [socket.create_connection(a.peering.address) for _ in range(3)]
        await until(lambda: a.peering.counts["connections crowded"] == 1)
        for sock in socks:
            sock.close()


async def test_what_is_beyond_the_bound_of_a_request_is_a_miss():
    limits = PeeringLimits(asked=2 * wants_of(1)[0].size)
    async with mesh_node("a", limits=limits) as a:
        wants = wants_of(6)
        a.put(wants)
        sock = _asking(a, wants)
        data = b""
        while frames.LAST not in data[-5:]:
            data += await asyncio.to_thread(sock.recv, 1 << 20)
        assert a.peering.counts["raw"] == 2
        assert a.peering.counts["full"] == 4
        sock.close()


@pytest.mark.parametrize("count", [3, 5])
async def test_a_herd_reads_each_block_from_the_bucket_once(count):
    bucket = Counted()
    async with AsyncExitStack() as life:
        nodes = [
            await life.enter_async_context(mesh_node(f"n{index}", dram=64 << 20, bucket=bucket, settings=PATIENT))
            for index in range(count)
        ]
        introduce(*nodes)
        wants = wants_of(100)
        answers = await asyncio.gather(*(node.read(wants) for node in nodes))
        for got, _ in answers:
            assert got == [block(each) for each in wants]
        assert set(bucket.asked.values()) == {1}
        assert len(bucket.asked) == 100
        await until(lambda: idle(*nodes))


async def test_an_owner_that_takes_too_long_is_not_waited_for():
    held, bucket = Counted(), Counted()
    held.held = asyncio.Event()
    quick = PeerSettings(patience_s=0.05, through_s=0.05, unmeasured=1e9)
    async with mesh_node("a", bucket=held) as a, mesh_node("b", bucket=bucket, settings=quick) as b:
        introduce(a, b)
        wants = [each for each in wants_of(30) if owner(each.key, ["a", "b"]) == "a"][:2]
        got, sources = await b.read(wants)
        assert got == [block(each) for each in wants]
        assert sources == ["bucket"] * 2
        assert b.peers.counts["through"] == 2
        held.held.set()


async def test_nodes_that_disagree_about_an_owner_do_not_wait_for_each_other():
    """Each believes that the other is to read the block."""
    bucket = Counted()
    async with mesh_node("a", bucket=bucket, settings=PATIENT) as a, mesh_node("b", bucket=bucket, settings=PATIENT) as b:
        introduce(a, b)
        for node, other in ((a, b), (b, a)):
            node.peers._owner = lambda want, node=node, other=other: node.peers._supplier(other.member)
            node.peering._lending._owns = lambda key: False
        wants = wants_of(5)
        async with asyncio.timeout(20):
            answers = await asyncio.gather(a.read(wants), b.read(wants))
        assert all(got == [block(each) for each in wants] for got, _ in answers)


async def test_a_slow_link_gets_coded_blocks():
    async with pair() as (a, b):
        wants, more = wants_of(8), wants_of(8, first=3)
        a.put(wants + more)
        b.peers._supplier(a.member).speed = 10e6
        a.peering._lending._worth.coding.value = 500e6
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]
        coded = a.peering.counts["coded"]
        assert coded  # and some not, once the link is measured
        b.peers._supplier(a.member).speed = 2e9
        got, _ = await b.read(more)
        assert got == [block(each) for each in more]
        assert a.peering.counts["coded"] == coded
        await until(lambda: idle(a, b))


async def test_until_it_is_known_what_coding_takes_one_block_of_a_request_is_coded():
    async with mesh_node("a") as a:
        wants = wants_of(5)
        a.put(wants)
        sock = _asking(a, wants, speed=10_000_000)
        await until(lambda: a.peering.counts["raw"] + a.peering.counts["coded"] == 5)
        assert a.peering.counts["coded"] == 1
        sock.close()


async def test_a_fetch_can_be_cancelled_at_any_moment():
    """A thousand times: nothing stays leased at the source, nor reserved here, and nobody writes to a place that was given up."""
    async with pair() as (a, b):
        wants = wants_of(6)
        a.put(wants)
        loop = asyncio.get_running_loop()
        places = [bytearray(wants[0].size) for _ in range(4)]
        for turn in range(1000):
            tasks = [loop.create_task(b.peers.fetch(each, memoryview(place))) for each, place in zip(wants, places, strict=False)]
            await _steps(turn % 40, turn % 7 * 0.0002)
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for place, how in zip(places, ended, strict=True):
                assert how is None or isinstance(how, asyncio.CancelledError)
                place[:64] = b"\xaa" * 64
                place[-64:] = b"\xaa" * 64
            if turn % 50 == 0:
                await asyncio.sleep(0.002)
                assert all(place[:64] == place[-64:] == b"\xaa" * 64 for place in places)
        await until(lambda: idle(a, b))
        assert all(place[:64] == place[-64:] == b"\xaa" * 64 for place in places)
        assert (await b.read(wants))[0] == [block(each) for each in wants]


async def test_reads_can_be_cancelled_at_any_moment():
    async with pair() as (a, b):
        wants = wants_of(12)
        a.put(wants)
        for turn in range(200):
            task = asyncio.create_task(b.stack.get_many(wants))
            await _steps(turn % 30, turn % 5 * 0.0005)
            task.cancel()
            (got,) = await asyncio.gather(task, return_exceptions=True)
            if not isinstance(got, asyncio.CancelledError):
                for lease in got:
                    lease.release()
                b.dram.discard_many([each.key for each in wants])
        await until(lambda: idle(a, b))


async def _steps(loops, seconds):
    for _ in range(loops):
        await asyncio.sleep(0)
    if seconds:
        await asyncio.sleep(seconds)


async def test_a_stop_cuts_what_is_under_way():
    async def answer(reader, writer):
        await request_of(reader)
        await asyncio.sleep(3600)

    async with scripted(answer) as member, mesh_node("b", settings=PATIENT, links=LinkSettings(silent_s=60)) as b:
        only(b, wants_of(1), member)
        task = asyncio.create_task(b.stack.get_many(wants_of(1), reach=Reach.ORIGIN))
        await until(lambda: b.peers._supplier(member).load)
        async with asyncio.timeout(10):
            await b.stack.aclose()
            assert await task == [Miss.UNAVAILABLE]
