"""An engine's first question after its node was started anew: reconnecting is part of its 250 ms, and goes on past them."""

import asyncio
import threading

import pytest
from fakes.node import SHARD, fake_service, filler, links_of, namespace

from kvstore import api
from kvstore.connectors import bridge as module
from kvstore.connectors import transfers
from kvstore.connectors.bridge import Bridge
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()
LINKS = links_of(NS, 3)


class Node:
    """A node that has these blocks, on a thread of its own. `told`: it has heard of the namespace, and may say so."""

    def __init__(self, path, told=None):
        self._loop, self._stop, self._ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        self._path, self._told = path, told
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._main()))
        self._thread.start()
        assert self._ready.wait(10)

    async def _main(self):
        async with fake_service() as service:
            put = service.put_namespace

            async def slow(tenant, request):  # the bucket takes its time
                await put(tenant, request)
                if self._told is not None:
                    await asyncio.to_thread(self._told.wait, 30)
                return api.Done()

            service.put_namespace = slow
            service.answers["lookup"] = api.Found(run=3, tiers=["nvme"] * 3)
            async with LocalServer.open(service, self._path, limits=Limits(window=4 << 20, drain=2)):
                self._ready.set()
                await self._stop.wait()

    def stop(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()


def answer(bridge):
    look = bridge.look(NS, [SHARD], LINKS)
    while (found := look.poll()) is None:
        pass
    return found.run


@pytest.fixture
def bridge(tmp_path, monkeypatch):
    """A bridge that has used a node which is gone now."""
    for each in (transfers, module):
        monkeypatch.setattr(each, "LOOK_S", 10.0)  # a busy machine is no reason
    node = Node(str(tmp_path / "node.sock"))
    bridge = Bridge(f"kvtier+unix://{tmp_path}/node.sock")
    assert bridge.wait_connected(30)
    assert bridge.save(NS, SHARD, LINKS, filler(LINKS)).wait(30)
    assert answer(bridge) == 3
    node.stop()
    yield bridge
    bridge.close()


def test_the_first_question_to_a_node_that_was_started_anew_waits_for_the_way_to_it(bridge, tmp_path):
    node = Node(str(tmp_path / "node.sock"))
    assert answer(bridge) == 3
    assert bridge.counts.looks == {"hit": 2}
    node.stop()


def test_where_that_takes_too_long_it_is_a_miss_and_the_next_one_a_hit(bridge, tmp_path, monkeypatch):
    told = threading.Event()
    node = Node(str(tmp_path / "node.sock"), told)
    monkeypatch.setattr(transfers, "LOOK_S", 0.1)
    assert answer(bridge) == 0
    monkeypatch.setattr(transfers, "LOOK_S", 10.0)
    told.set()
    assert answer(bridge) == 3
    assert bridge.counts.looks == {"hit": 2, "late": 1}
    node.stop()
