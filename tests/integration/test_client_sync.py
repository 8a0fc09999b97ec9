"""The blocking client: from many threads, through forks, interrupts and the end of the interpreter."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.node import SHARD, fake_service, filler, links_of, namespace, pattern, payload_of

import kvstore
from kvstore import api
from kvstore.errors import Closed, Invalid, NotFound, Unavailable
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


class Running:
    """A fake node on a loop and thread of its own: the client under test blocks this one."""

    def __init__(self, folder):
        self.path = str(folder / "node.sock")
        self.loop = asyncio.new_event_loop()
        self.ready, self.stop = threading.Event(), asyncio.Event()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self._main()))
        self.thread.start()
        assert self.ready.wait(10)

    async def _main(self):
        async with fake_service() as self.service:
            local = LocalServer.open(self.service, self.path, limits=Limits(window=4 << 20, drain=2))
            async with local as self.server, HttpServer.open(self.service, "127.0.0.1:0") as self.http:
                self.ready.set()
                await self.stop.wait()

    def do(self, change):
        """Run on the node's loop."""
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (change(), done.set()))
        assert done.wait(10)

    def until(self, condition, seconds=10):
        ends = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < ends
            time.sleep(0.002)

    def close(self):
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(20)
        self.loop.close()


@pytest.fixture
def node(tmp_path):
    node = Running(tmp_path)
    yield node
    node.close()


@pytest.fixture(params=["unix", "http"])
def url(request, node):
    return f"kvtier+unix://{node.path}" if request.param == "unix" else node.http.url.replace("http", "kvtier")


@pytest.fixture
def kv(node):
    with kvstore.open_sync(f"kvtier+unix://{node.path}") as client:
        yield client


def leases(node):
    return node.service.plane.tiers["default"].leases


def run(script, *, url, **options):
    return subprocess.run(
        [sys.executable, "-c", script, url], env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False, **options
    )


def test_calls_and_blocks(url, node):
    node.service.answers["get_session"] = api.Session(id="x", namespace=NS.id, lane="main", version=1, tokens=0, blocks=0)
    links = links_of(NS, 3)
    with kvstore.open_sync(url) as kv:
        assert kv.get_session("x", namespace=NS).version == 1
        assert kv.put(NS, SHARD, links, filler(links)) == [True] * 3
        with kv.get(NS, SHARD, links) as blocks:
            assert [payload_of(NS, lease)[:32].hex() for lease in blocks.leases] == [link.prefix_id for link in links]
        with pytest.raises(NotFound):
            kv.lookup(namespace="ab" * 32, prefix_ids=[])
        status = kv.restore("x")
        asyncio.run_coroutine_threadsafe(node.service.advance(status.restore_id, state="partial"), node.loop).result(10)
        assert kv.wait(status).state == "partial"
    node.until(lambda: leases(node) == 0)


def test_a_lookup_that_is_begun_is_polled_and_never_waited_for(kv, node, monkeypatch):
    links = links_of(NS, 3)
    names = [link.prefix_id for link in links]
    assert kv.begin_lookup(namespace=NS, prefix_ids=names) is None  # nobody has told the node of the namespace
    assert kv.put(NS, SHARD, links, filler(links)) == [True] * 3
    assert kv.lookup(namespace=NS, prefix_ids=names).run == 3
    found = api.Found(run=3, tiers=["dram"] * 3)
    node.do(lambda: monkeypatch.setattr(node.service.plane, "lookup_now", lambda *_: found))
    asked, said = kv.begin_lookup(namespace=NS, prefix_ids=names), []
    node.until(lambda: (answer := asked.poll()) is not None and not said.append(answer))
    assert said == [found]
    many = [f"{number:064x}" for number in range(1000)]
    assert kv.begin_lookup(namespace=NS, prefix_ids=many) is None  # too long to be sent without waiting


def test_a_lookup_that_the_node_must_wait_for_is_told_so(kv, node, monkeypatch):
    links = links_of(NS, 3)
    assert kv.put(NS, SHARD, links, filler(links)) == [True] * 3
    assert kv.lookup(namespace=NS, prefix_ids=[]).run == 0
    node.do(lambda: monkeypatch.setattr(node.service.plane, "lookup_now", lambda *_: None))
    asked = kv.begin_lookup(namespace=NS, prefix_ids=[links[0].prefix_id])
    with pytest.raises(Unavailable) as error:
        node.until(lambda: asked.poll() is not None)
    assert error.value.kind == "timeout"


def test_sessions_are_an_iterator(kv, node):
    one = api.Session(id="x", namespace=NS.id, lane="main", version=1, tokens=0, blocks=0)

    async def page(tenant, request):
        return api.SessionPage(sessions=[one], cursor="" if request.cursor == "bb" else request.cursor + "b")

    node.service.answers["list_sessions"] = page
    assert list(kv.sessions()) == [one] * 3


def test_many_threads_share_one_client(kv, node):
    def work(thread):
        links = links_of(NS, 4, start=thread * 1000)
        for _ in range(10):
            assert kv.put(NS, SHARD, links, filler(links)) == [True] * 4
            with kv.get(NS, SHARD, links) as blocks:
                for link, lease in zip(links, blocks.leases, strict=True):
                    payload = payload_of(NS, lease)
                    assert payload == pattern(link, len(payload))
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    node.until(lambda: leases(node) == 0)


def test_blocks_may_be_released_on_any_thread(kv, node):
    links = links_of(NS, 8)
    kv.put(NS, SHARD, links, filler(links))
    blocks = [kv.get(NS, SHARD, links) for _ in range(20)]
    assert leases(node) == 160
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: each.release(), [*blocks, *blocks]))
    node.until(lambda: leases(node) == 0)


def test_it_works_inside_a_running_loop(kv):
    async def main():
        return kv.health()

    assert asyncio.run(main()).ok


def test_on_its_own_loop_it_refuses_instead_of_waiting_for_itself(kv):
    async def inside():
        return kv.health()

    with pytest.raises(Invalid, match="own loop"):
        kv._background.run(inside())


def test_a_closed_client_says_so(node):
    kv = kvstore.open_sync(f"kvtier+unix://{node.path}")
    kv.close()
    kv.close()
    with pytest.raises(Closed):
        kv.health()
    node.until(lambda: node.server.connections == 0)
    assert not any(thread.name == "kvtier-client" for thread in threading.enumerate())


def test_closing_ends_a_call_that_another_thread_waits_for(kv, node):
    node.service.answers["stats"] = lambda tenant, request: asyncio.sleep(60)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(kv.stats)
        node.until(lambda: any(name == "stats" for _, name, _ in node.service.calls))
        kv.close()
        with pytest.raises((Closed, Unavailable)):
            waiting.result(10)


def test_no_node_leaves_no_thread(tmp_path):
    with pytest.raises(Unavailable):
        kvstore.open_sync(f"kvtier+unix://{tmp_path}/none.sock")
    assert not any(thread.name == "kvtier-client" for thread in threading.enumerate())


def test_a_client_that_nobody_holds_any_more_closes_itself(node):
    kvstore.open_sync(f"kvtier+unix://{node.path}")
    gc.collect()
    node.until(lambda: node.server.connections == 0)


@pytest.mark.parametrize("how", ["unix", "http"])
def test_the_interpreter_exits_with_an_open_client(node, how):
    url = f"kvtier+unix://{node.path}" if how == "unix" else node.http.url.replace("http", "kvtier")
    script = (
        "import sys, kvstore\n"
        "from fakes.node import SHARD, links_of, namespace\n"
        "kv = kvstore.open_sync(sys.argv[1])\n"
        "blocks = kv.get(namespace(), SHARD, links_of(namespace(), 1))\n"
        "print(kv.health().ok)\n"
    )
    ended = run(script, url=url)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")
    node.until(lambda: node.server.connections == 0)


@pytest.mark.parametrize("interrupt", ["os.kill, (os.getpid(), signal.SIGINT)", "_thread.interrupt_main"])
def test_ctrl_c_ends_a_waiting_call(node, interrupt):
    """`interrupt_main` is a signal that came just before the thread fell asleep: it does not wake it."""
    script = (
        "import _thread, os, signal, sys, threading, kvstore\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs inherit that it is ignored
        "kv = kvstore.open_sync(sys.argv[1])\n"
        "status = kv.restore('x')\n"
        "try:\n"
        f"    threading.Timer(0.3, {interrupt}).start()\n"
        "    kv.wait(status)\n"
        "except KeyboardInterrupt:\n"
        "    print(kv.health().ok)\n"
        "kv.close()\n"
    )
    ended = run(script, url=f"kvtier+unix://{node.path}")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "True\n", "")


def test_an_interrupt_while_a_call_is_handed_over_is_no_other_error(kv, monkeypatch):
    loop, begun, ended = kv._background._loop, threading.Event(), threading.Event()
    real = loop.call_soon_threadsafe

    def interrupted(*call, **options):
        monkeypatch.undo()
        real(*call, **options)
        begun.wait(10)
        raise KeyboardInterrupt

    async def work():
        begun.set()
        time.sleep(0.2)  # noqa: ASYNC251  it is running just now, not waiting
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(loop, "call_soon_threadsafe", interrupted)
    with pytest.raises(KeyboardInterrupt):
        kv._background.run(work())
    assert ended.wait(10)
    assert kv.health().ok


def test_an_interrupt_in_the_middle_of_a_read_or_a_write_leaves_nothing_leased_and_no_window_taken(kv, node, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    links = links_of(NS, 8)
    assert all(kv.put(NS, SHARD, links, filler(links)))
    kv.get(NS, SHARD, links).release()
    monkeypatch.setattr("kvstore.client.line.Line.lend", interrupted)  # the node has leased them
    with pytest.raises(KeyboardInterrupt):
        kv.get(NS, SHARD, links)
    monkeypatch.undo()
    node.until(lambda: leases(node) == 0)
    monkeypatch.setattr("kvstore.client.direct._Piece._fill", interrupted)  # the node has made room for them
    for _ in range(9):
        with pytest.raises(KeyboardInterrupt):
            kv.put(NS, SHARD, links_of(NS, 8, start=5000), filler(links))
    monkeypatch.undo()
    assert all(kv.put(NS, SHARD, links, filler(links)))
    with kv.get(NS, SHARD, links) as blocks:
        assert len(blocks) == 8
    node.until(lambda: leases(node) == 0)


FORKS = """
import os, sys, time, kvstore
from fakes.node import SHARD, filler, links_of, namespace
kv = kvstore.open_sync(sys.argv[1])
links = links_of(namespace(), 2)
kv.put(namespace(), SHARD, links, filler(links))
blocks = kv.get(namespace(), SHARD, links)
begun = time.monotonic()
child = os.fork()
if child == 0:
    try:
        kv.health()
        os._exit(1)
    except kvstore.Closed as error:
        if error.kind != "forked" or "spawn" not in error.remedy:
            os._exit(2)
    kv.close()
    blocks.release()
    with kvstore.open_sync(sys.argv[1]) as other:
        found = len(other.get(namespace(), SHARD, links))
    os._exit(0 if found == 2 and time.monotonic() - begun < 5 else 3)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), kv.health().ok, blocks.intact)
kv.close()
"""


@pytest.mark.parametrize("how", ["unix", "http"])
def test_b48_a_forked_child_is_told_at_once_and_can_open_its_own(node, how):
    url = f"kvtier+unix://{node.path}" if how == "unix" else node.http.url.replace("http", "kvtier")
    ended = run(FORKS, url=url)
    assert (ended.stdout, ended.stderr) == ("0 True True\n", "")
    node.until(lambda: leases(node) == 0)


def test_a_forked_child_does_not_keep_its_dead_parents_leases(node):
    """A worker that lives on must not hold the connection: the node would never learn that the parent died."""
    script = (
        "import os, sys, time, kvstore\n"
        "from fakes.node import SHARD, filler, links_of, namespace\n"
        "kv = kvstore.open_sync(sys.argv[1])\n"
        "links = links_of(namespace(), 2)\n"
        "kv.put(namespace(), SHARD, links, filler(links))\n"
        "blocks = kv.get(namespace(), SHARD, links)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "    os._exit(0)\n"
        "print(child, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, f"kvtier+unix://{node.path}"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
    )
    child = 0
    try:
        child = int(parent.stdout.readline())
        assert leases(node) == 2
        parent.kill()
        parent.wait()
        node.until(lambda: leases(node) == 0)
        os.kill(child, 0)  # and it does live on
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        if child:
            os.kill(child, signal.SIGKILL)
