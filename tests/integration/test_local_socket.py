"""The Unix socket: who may come in, what they are handed, and what remains when they misbehave, die or are killed."""

import array
import asyncio
import gc
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from fakes.node import SHARD, VERSION, fake_service, filler, links_of, namespace, pattern, payload_of, until

import kvstore
from kvstore import api, codec, wire
from kvstore.client.local import LocalTransport
from kvstore.errors import AlreadyExists, Closed, Denied, Invalid, NotFound, Unavailable, Unsupported
from kvstore.ids import BlockName
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()
LIMITS = Limits(window=4 << 20, drain=5)


@pytest.fixture
async def service():
    async with fake_service("default", "acme") as service:
        yield service


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "node.sock")


@pytest.fixture
async def server(service, path):
    async with LocalServer.open(service, path, limits=LIMITS) as server:
        yield server


def url(path, **query):
    return f"kvtier+unix://{path}" + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else "")


def leased(service, tenant="default"):
    return service.plane.tiers[tenant].leases


def mode_of(path):
    return stat.S_IMODE(Path(path).stat().st_mode)


def descriptors():
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def mappings():
    return Path("/proc/self/maps").read_text().count("kvtier-window")


def framed(body):
    return len(body).to_bytes(4, "little") + body


def get_of(number, link):
    return wire.Get(number, NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [link.tokens], 0, "dram")


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(5)
        self.socket.connect(path)
        self.fds = []

    def send(self, message):
        self.socket.sendall(message if isinstance(message, bytes) else wire.frame(message))

    def receive(self):
        """The next message, or None at the end."""
        head = self._exactly(4)
        return wire.parse_to_client(self._exactly(wire.body_length(head))) if head else None

    def _exactly(self, nbytes):
        data = b""
        while len(data) < nbytes:
            try:
                part, ancillary, _, _ = self.socket.recvmsg(nbytes - len(data), 64)
            except ConnectionResetError:
                return b""
            for _, _, content in ancillary:
                self.fds += array.array("i", content)
            if not part:
                return b""
            data += part
        return data

    def hello(self, *, version=VERSION, tenant="default", protocol=wire.PROTOCOL):
        self.send(wire.Hello(protocol, version, tenant))
        return self.receive()

    def close(self):
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


@pytest.fixture
def raw(path, server):
    made = []

    async def make(hello=True):
        client = await asyncio.to_thread(Raw, path)
        made.append(client)
        if hello:
            assert isinstance(await asyncio.to_thread(client.hello), wire.Welcome)
        return client

    yield make
    for client in made:
        client.close()


async def answer(client, message=None):
    if message is not None:
        await asyncio.to_thread(client.send, message)
    return await asyncio.to_thread(client.receive)


# --- the socket file ---


async def test_only_the_owner_may_open_the_socket(server, path):
    assert mode_of(path) == 0o600


async def test_another_mode_is_kept_whatever_the_umask(service, path):
    before = os.umask(0o077)
    try:
        async with LocalServer.open(service, path, mode=0o660):
            assert mode_of(path) == 0o660
    finally:
        os.umask(before)


async def test_a_second_node_does_not_take_the_socket(server, service, path):
    with pytest.raises(AlreadyExists):
        async with LocalServer.open(service, path):
            pass
    async with kvstore.open(url(path)) as kv:
        assert (await kv.health()).ok


async def test_a_foreign_listener_is_not_replaced(service, path):
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(path)
        foreign.listen()
        with pytest.raises(AlreadyExists, match="somebody listens"):
            async with LocalServer.open(service, path):
                pass


async def test_what_a_dead_node_left_is_replaced(service, path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    async with LocalServer.open(service, path), kvstore.open(url(path)) as kv:
        assert (await kv.health()).ok
    assert not Path(path).exists()  # noqa: ASYNC240  a test


async def test_a_file_that_is_no_socket_is_left_alone(service, tmp_path):
    path = tmp_path / "node.sock"
    path.write_text("mine")
    with pytest.raises(AlreadyExists, match="no socket"):
        async with LocalServer.open(service, str(path)):
            pass
    assert path.read_text() == "mine"


async def test_a_path_too_long_for_a_socket_is_said(service):
    with pytest.raises(Invalid, match="at most 107"):
        async with LocalServer.open(service, "/tmp/" + "x" * 120):
            pass


async def test_no_node_there(path):
    with pytest.raises(Unavailable, match="no node listens") as caught:
        async with kvstore.open(url(path)):
            pass
    assert "kvtier up" in caught.value.remedy


# --- the handshake ---


@pytest.mark.parametrize("version", ["0.0.9", "0.1.7", "0.2.0", "0.1.0rc1"])
async def test_neighbouring_minor_versions_work_together(raw, version):
    client = await raw(hello=False)
    assert isinstance(await asyncio.to_thread(lambda: client.hello(version=version)), wire.Welcome)


@pytest.mark.parametrize("version", ["0.3.0", "1.1.0", "", "x.y", "0", "0.-1", "٠.١"])
async def test_other_versions_get_a_clear_refusal(raw, version):
    client = await raw(hello=False)
    fault = await asyncio.to_thread(lambda: client.hello(version=version))
    assert (fault.id, fault.problem.kind, fault.problem.status) == (0, "version_mismatch", 426)
    assert await answer(client) is None


async def test_a_client_is_told_which_versions_do_not_fit(server, service, path):
    service.version = "0.7.0"
    with pytest.raises(Unsupported, match=r"0\.7\.0") as caught:
        await LocalTransport.open(path)
    assert caught.value.kind == "version_mismatch"


async def test_another_protocol_is_refused(raw):
    client = await raw(hello=False)
    fault = await asyncio.to_thread(lambda: client.hello(protocol=99))
    assert fault.problem.kind == "version_mismatch"


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        b"\5\0\0\0hello",
        wire.frame(wire.Release([(1, 1)])),
        b"\1\x10\0\0",
    ],
)
async def test_garbage_instead_of_a_hello_is_refused(raw, server, first):
    client = await raw(hello=False)
    fault = await answer(client, first)
    assert (fault.id, fault.problem.kind) == (0, "corrupt")
    assert await answer(client) is None
    await until(lambda: server.connections == 0)


async def test_a_silent_connection_is_dropped(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, hello=0.05)):
        client = await asyncio.to_thread(Raw, path)
        client.send(b"\1")
        assert await answer(client) is None
        client.close()


async def test_more_connections_than_allowed_are_refused(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, connections=2)) as server:
        clients = [await kvstore.connect(url(path)) for _ in range(2)]
        with pytest.raises(kvstore.Overloaded):
            await kvstore.connect(url(path))
        await clients[0].aclose()
        await until(lambda: server.connections == 1)
        clients.append(await kvstore.connect(url(path)))
        for client in clients:
            await client.aclose()


# --- tenants ---


async def test_b20_tenants_share_nothing(server, service, path):
    theirs = namespace(tenant="acme")
    async with kvstore.open(url(path)) as kv, kvstore.open(url(path, tenant="acme")) as acme:
        links = links_of(NS, 2)
        await kv.put(NS, SHARD, links, filler(links))
        found = await acme.lookup(namespace=theirs, prefix_ids=[link.prefix_id for link in links_of(theirs, 2)])
        assert found.run == 0
        with pytest.raises(NotFound):
            await acme.lookup(namespace=NS.id, prefix_ids=[link.prefix_id for link in links])
        with pytest.raises(Invalid):
            await acme.get(NS, SHARD, links)
        with pytest.raises(NotFound):
            (await acme._transport.get(NS, SHARD, links, deadline_ms=0, reach="dram")).release()


async def test_another_tenants_arena_is_never_handed_over(raw, service):
    mine, theirs = (os.fstat(service.plane.arena(tenant).fd) for tenant in ("default", "acme"))
    client = await raw()
    handed = [os.fstat(fd) for fd in client.fds]
    assert len(handed) == 2
    assert os.path.samestat(handed[0], mine)
    assert not any(os.path.samestat(each, theirs) for each in handed)


async def test_nothing_is_published_into_another_tenants_namespace(raw, service):
    service.plane.namespaces[NS.id] = NS
    client = await raw(hello=False)
    assert isinstance(await asyncio.to_thread(client.hello, tenant="acme"), wire.Welcome)
    prefix = bytes.fromhex(links_of(NS, 1)[0].prefix_id)
    for number, filled in ((1, True), (2, False)):
        fault = await answer(client, wire.Publish(number, NS.id, str(SHARD), prefix, [(16, 0, 65600)], filled=filled))
        assert (fault.id, fault.problem.kind) == (number, "not_found")
    fault = await answer(client, get_of(3, links_of(NS, 1)[0]))
    assert (fault.id, fault.problem.kind) == (3, "not_found")
    assert [tier.used for tier in service.plane.tiers.values()] == [0, 0]


async def test_lease_numbers_of_another_connection_release_nothing(raw, server, service, path):
    links = links_of(NS, 2)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
    first, second = await raw(), await raw()
    held = await answer(first, get_of(1, links[0]))
    assert len(held.offsets) == 1
    second.send(wire.Release([(held.first, 1), (0, 60_000)]))
    assert isinstance(await answer(second, get_of(1, links[1])), wire.Leased)
    assert leased(service) == 2


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


async def test_a_user_outside_the_table_is_denied(server, service, path):
    service.plane.uids["acme"] = {os.getuid() + 1}
    with pytest.raises(Denied, match="acme"):
        await kvstore.connect(url(path, tenant="acme"))
    with pytest.raises(Denied):
        await kvstore.connect(url(path, tenant="nobody-knows"))


# --- shared memory ---


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


# --- leases ---


async def test_leases_of_a_killed_client_are_released(server, service, path):
    links = links_of(NS, 4)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
    script = (
        "import sys, time, kvstore\n"
        "from fakes.node import SHARD, links_of, namespace\n"
        f"kv = kvstore.open_sync({url(path)!r})\n"
        "blocks = kv.get(namespace(), SHARD, links_of(namespace(), 4))\n"
        "print(len(blocks), flush=True)\n"
        "time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    child = subprocess.Popen(  # noqa: ASYNC220  it starts at once
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment
    )
    try:
        assert await asyncio.to_thread(child.stdout.readline) == b"4\n"
        assert (leased(service), server.leases, server.connections) == (4, 4, 1)
        child.send_signal(signal.SIGKILL)
        await until(lambda: leased(service) == 0)
        await until(lambda: server.connections == 0)
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def test_what_a_killed_client_published_is_kept(raw, service, server):
    client = await raw()
    service.plane.namespaces[NS.id] = NS
    link = links_of(NS, 1)[0]
    with mmap.mmap(client.fds[1], 4 << 20) as window:
        window[:65600] = pattern(link, 65600)
    await until(lambda: server.connections == 1)
    client.send(wire.Publish(1, NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [(16, 0, 65600)]))
    client.close()
    await until(lambda: server.connections == 0)
    [lease], _ = await service.plane.get("default", NS.id, SHARD, [link], deadline_ms=0, reach="dram")
    assert payload_of(NS, lease) == pattern(link, 65600)
    lease.release()


async def test_a_connection_holds_a_bounded_number_of_leases(service, path):
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, leases=3)), kvstore.open(url(path)) as kv:
        links = links_of(NS, 5)
        await kv.put(NS, SHARD, links, filler(links))
        first = await kv.get(NS, SHARD, links)
        assert (len(first), first.miss) == (3, "full")
        with await kv.get(NS, SHARD, links) as second:
            assert (len(second), second.miss) == (0, "full")
        first.release()
        with await kv.get(NS, SHARD, links[:3]) as third:
            assert (len(third), third.miss) == (3, "")


async def test_a_lease_is_released_once_however_often_it_is_asked(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 2)
        await kv.put(NS, SHARD, links, filler(links))
        blocks, others = await kv.get(NS, SHARD, links), await kv.get(NS, SHARD, links)
        first = blocks.leases[0]
        for _ in range(3):
            first.release()
            blocks.release()
        await until(lambda: leased(service) == 2)
        others.release()
        await until(lambda: leased(service) == 0)


async def test_b47_500_cancels_leave_nothing(server, service, path):
    links = links_of(NS, 3)
    async with kvstore.open(url(path)) as kv:
        await kv.put(NS, SHARD, links, filler(links))
        (await kv.get(NS, SHARD, links)).release()
        gc.collect()
        before = descriptors()
        for round_ in range(50):
            service.plane.gate = asyncio.Event() if round_ % 2 else None
            running = [asyncio.create_task(kv.get(NS, SHARD, links)) for _ in range(6)]
            running += [asyncio.create_task(kv.put(NS, SHARD, links, filler(links))) for _ in range(2)]
            running += [asyncio.create_task(kv.get_restore("none", wait_ms=1000)), asyncio.create_task(kv.stats())]
            for _ in range(round_ % 5):
                await asyncio.sleep(0)
            for task in running:
                task.cancel()
            for outcome in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(outcome, kvstore.Blocks):
                    outcome.release()
        service.plane.gate = None
        await until(lambda: leased(service) == 0)
        assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 3
        with await kv.get(NS, SHARD, links) as blocks:
            assert len(blocks) == 3
        connection = kv._transport._connection
        await until(lambda: connection.space._extents._free == [(0, 4 << 20)])
        await until(lambda: connection._waiting == {})
        assert connection._slots._value == wire.MAX_IN_FLIGHT
        assert descriptors() <= before
    await until(lambda: server.connections == 0)


async def test_opening_and_closing_leaves_no_descriptor_and_no_mapping(server, path):
    async def once():
        async with kvstore.open(url(path)) as kv:
            await kv.health()

    await once()
    await until(lambda: server.connections == 0)
    before = descriptors(), mappings()
    for _ in range(20):
        await once()
    await until(lambda: server.connections == 0)
    assert (descriptors(), mappings()) == before


# --- hostile and slow clients ---


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\x7f",
        b"\0\0\0\0",
        b"\4\0\0\0\xde\xad\xbe\xef",
        wire.frame(wire.Hello(1, VERSION, "acme")),
        wire.frame(wire.Ask(0, "health", msgspec.Raw(b"\x80"))),
        wire.frame(wire.Ask(-3, "health", msgspec.Raw(b"\x80"))),
        framed(msgspec.msgpack.encode(["Release", [(1, 1)] * 70000])),
        framed(b"\x91" * 5000 + b"\xc0"),
    ],
)
async def test_garbage_ends_that_connection_and_no_other(raw, server, service, path, garbage):
    async with kvstore.open(url(path)) as kv:
        client = await raw()
        fault = await answer(client, garbage)
        assert (fault.id, fault.problem.kind) == (0, "corrupt")
        assert await answer(client) is None
        assert (await kv.health()).ok


async def test_a_request_number_in_use_ends_the_connection(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    get = get_of(7, links_of(NS, 1)[0])
    client.send(get)
    fault = await answer(client, get)
    assert (fault.id, fault.problem.kind) == (0, "corrupt")
    await until(lambda: service.plane.waiting == 0)


async def test_a_call_that_cannot_be_understood_fails_alone(raw):
    client = await raw()
    for number, (name, body) in enumerate(
        [("nonsense", b"\x80"), ("x" * 10000, b"\x80"), ("restore", b"\x80"), ("restore", b"\xc0"), ("commit", b"\x81\xa2id\x05")],
        1,
    ):
        fault = await answer(client, wire.Ask(number, name, msgspec.Raw(body)))
        assert (fault.id, fault.problem.kind) == (number, "invalid")
        assert len(fault.problem.detail) < 2000
    assert isinstance(await answer(client, wire.Ask(99, "health", msgspec.Raw(b"\x80"))), wire.Reply)


async def test_more_requests_than_allowed_are_answered_as_overload(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    link = links_of(NS, 1)[0]
    frames = b"".join(wire.frame(get_of(n, link)) for n in range(1, wire.MAX_IN_FLIGHT + 2))
    fault = await answer(client, frames)
    assert (fault.id, fault.problem.kind) == (wire.MAX_IN_FLIGHT + 1, "overloaded")
    service.plane.gate.set()
    assert {(await answer(client)).id for _ in range(wire.MAX_IN_FLIGHT)} == set(range(1, wire.MAX_IN_FLIGHT + 1))


async def test_every_request_is_answered_once_also_when_it_is_cancelled(raw, service):
    service.plane.gate = asyncio.Event()
    service.plane.namespaces[NS.id] = NS
    client = await raw()
    link = links_of(NS, 1)[0]
    frames = b""
    for number in range(1, 41):  # cancelled before its first step, and while it waits
        frames += wire.frame(get_of(number, link))
        frames += wire.frame(wire.Cancel(number)) if number % 2 else b""
    client.send(frames)
    await until(lambda: service.plane.waiting == 20)
    client.send(b"".join(wire.frame(wire.Cancel(number)) for number in (*range(1, 41), 4711)))
    seen = [await answer(client) for _ in range(40)]
    assert sorted(each.id for each in seen) == list(range(1, 41))
    assert {each.problem.kind for each in seen} == {"closed"}
    assert isinstance(await answer(client, wire.Ask(50, "health", msgspec.Raw(b"\x80"))), wire.Reply)


async def test_a_client_that_does_not_read_is_dropped_with_its_leases(service, path):
    labels = {"x" * 200 + str(i): "y" * 200 for i in range(500)}
    service.answers["get_session"] = api.Session(id="s", namespace=NS.id, lane="main", version=1, tokens=0, blocks=0, labels=labels)
    links = links_of(NS, 1)
    async with LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, stall=0.2)) as server:
        async with kvstore.open(url(path)) as kv:
            await kv.put(NS, SHARD, links, filler(links))
        client = await asyncio.to_thread(Raw, path)
        await asyncio.to_thread(client.hello)
        client.send(get_of(1, links[0]))
        ask = msgspec.Raw(msgspec.msgpack.encode(api.OfSession(id="s")))
        client.send(b"".join(wire.frame(wire.Ask(number, "get_session", ask)) for number in range(2, 50)))
        await until(lambda: server.connections == 0 and leased(service) == 0)
        client.close()


async def test_a_commit_goes_on_when_its_client_dies(raw, service, server):
    begun, finish, done = asyncio.Event(), asyncio.Event(), []

    async def commit(tenant, request):
        begun.set()
        await finish.wait()
        done.append(request.id)
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=1, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    client = await raw()
    await until(lambda: server.connections == 1)
    request = api.Commit(id="s", base_version=0, blocks=[])
    client.send(wire.Ask(1, "commit", msgspec.Raw(msgspec.msgpack.encode(request))))
    await begun.wait()
    client.send(wire.Cancel(1))
    client.close()
    await asyncio.sleep(0.02)
    finish.set()
    await until(lambda: server.connections == 0)
    assert done == ["s"]


# --- stopping and coming back ---


async def test_a_stop_answers_what_was_accepted(service, path):
    release = asyncio.Event()

    async def commit(tenant, request):
        await release.wait()
        return api.Receipt(id=request.id, namespace=NS.id, lane="main", version=5, tokens=0, blocks=0, durability="bucket")

    service.answers["commit"] = commit
    opened = LocalServer.open(service, path, limits=LIMITS)
    await opened.__aenter__()
    async with kvstore.open(url(path)) as kv:
        begun = await kv.restore("x")
        commit_ = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        wait = asyncio.create_task(kv.get_restore(begun.restore_id, wait_ms=60_000))
        await until(lambda: len(service.calls) >= 3)
        closing = asyncio.create_task(opened.__aexit__(None, None, None))
        with pytest.raises(Unavailable, match="stopping"):
            await wait
        release.set()
        assert (await commit_).version == 5
        await closing
        with pytest.raises(Unavailable):
            await kv.health()


async def test_a_stop_is_bounded_and_says_that_the_outcome_is_unknown(service, path):
    async def commit(tenant, request):
        await asyncio.Event().wait()

    service.answers["commit"] = commit
    opened = LocalServer.open(service, path, limits=msgspec.structs.replace(LIMITS, drain=0.05))
    await opened.__aenter__()
    async with kvstore.open(url(path)) as kv:
        running = asyncio.create_task(kv.commit("s", namespace=NS.id, base_version=4, blocks=[]))
        await until(lambda: service.calls)
        await opened.__aexit__(None, None, None)
        with pytest.raises(Unavailable) as caught:
            await running
        assert caught.value.kind == "outcome_unknown"


async def test_a_node_that_vanishes_leaves_it_open_whether_a_change_was_made(path):
    links = links_of(NS, 1)
    never = asyncio.Event()
    async with fake_service() as service:

        async def hangs(tenant, request):
            await never.wait()

        service.answers["commit"] = service.answers["get_session"] = hangs
        opened = LocalServer.open(service, path, limits=LIMITS)
        server = await opened.__aenter__()
        async with kvstore.open(url(path)) as kv:
            await kv.put(NS, SHARD, links, filler(links))
            running = [
                asyncio.create_task(kv.commit("s", namespace=NS, base_version=0, blocks=links)),
                asyncio.create_task(kv.get_session("s")),
            ]
            await until(lambda: {"commit", "get_session"} <= {name for _, name, _ in service.calls})
            for connection in server._connections:
                connection.abort()
            errors = await asyncio.gather(*running, return_exceptions=True)
            assert [error.kind for error in errors] == ["outcome_unknown", "unavailable"]
        never.set()
        await opened.__aexit__(None, None, None)


async def test_a_client_connects_again_to_a_node_that_was_restarted(path):
    links = links_of(NS, 2)
    async with fake_service() as first:
        opened = LocalServer.open(first, path, limits=LIMITS)
        await opened.__aenter__()
        kv = await kvstore.connect(url(path))
        await kv.put(NS, SHARD, links, filler(links))
        held = await kv.get(NS, SHARD, links)
        assert held.intact
        await opened.__aexit__(None, None, None)
        await until(lambda: not held.intact)
        assert payload_of(NS, held.leases[0])  # still mapped: reading it ends no process
        held.release()
        with pytest.raises(Unavailable):
            await kv.get(NS, SHARD, links)
    async with fake_service() as second, LocalServer.open(second, path, limits=LIMITS):
        await asyncio.sleep(0.6)  # failed attempts are not repeated for half a second
        with await kv.get(NS, SHARD, links) as blocks:  # the namespace was said again by itself
            assert (len(blocks), blocks.miss) == (0, "absent")
        assert await kv.put(NS, SHARD, links, filler(links)) == [True, True]
        await kv.aclose()
    with pytest.raises(Closed):
        await kv.health()


async def test_a_namespace_that_cannot_be_said_again_is_an_error_of_the_call(server, service, path):
    async with kvstore.open(url(path)) as kv:
        links = links_of(NS, 1)
        await kv.put(NS, SHARD, links, filler(links))
        service.plane.namespaces.clear()
        with pytest.raises(NotFound):
            (await kv.get(NS, SHARD, links)).release()
