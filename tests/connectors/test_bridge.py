"""The bridge: what an engine asks comes true or is a miss, never an error, and never touches memory that was taken back."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from kvstore import codec
from kvstore.connectors import bridge as module
from kvstore.connectors import transfers
from kvstore.connectors.bridge import Bridge
from kvstore.errors import Invalid, Unavailable
from kvstore.ids import Namespace, Shard, chain

NS = Namespace(model="m", revision="1", layers=2, page_bytes=4096, layout="test/1", block_tokens=8)
SHARD = Shard()
LINKS = chain(NS, np.arange(40))
PLAN = codec.layout(NS, SHARD, 8)


def content(index):
    return np.random.default_rng(index).integers(0, 256, PLAN.payload_bytes, np.uint8)


def fill(index, payload):
    payload[:] = content(index).tobytes()


@pytest.fixture
def bridge(request):
    made = Bridge(f"memory://{request.node.name}?dram=64MiB")  # a bucket of its own
    assert made.wait_connected(30)
    yield made
    made.close()


def saved(bridge, links=LINKS):
    transfer = bridge.save(NS, SHARD, links, fill)
    assert transfer.wait(30)
    return transfer.run


def answer(look):
    while (found := look.poll()) is None:
        pass
    return found


def test_what_was_saved_is_found_and_loaded(bridge):
    assert answer(bridge.look(NS, [SHARD], LINKS)).run == 0
    assert saved(bridge, LINKS[:3]) == 3
    assert answer(bridge.look(NS, [SHARD], LINKS)).run == 3
    assert saved(bridge) == 5
    assert bridge.counts.blocks["known"] == 3
    assert bridge.counts.blocks["saved"] == 5
    got = {}
    transfer = bridge.load(NS, SHARD, LINKS, lambda i, raw: got.__setitem__(i, bytes(raw[PLAN.header_bytes :])), near=5)
    assert transfer.wait(30)
    assert transfer.run == 5
    assert got == {i: content(i).tobytes() for i in range(5)}
    assert bridge.counts.looks == {"miss": 1, "partial": 1}
    assert bridge.counts.nbytes == {"loaded": 5 * PLAN.raw_bytes, "saved": 5 * PLAN.raw_bytes}


def test_what_is_not_there_ends_the_run(bridge):
    saved(bridge, LINKS[:2])
    got = []
    transfer = bridge.load(NS, SHARD, LINKS, lambda i, raw: got.append(i), near=5)
    assert transfer.wait(30)
    assert (transfer.run, got) == (2, [0, 1])
    assert (bridge.counts.blocks["loaded"], bridge.counts.blocks["lost"]) == (2, 3)


def test_a_copy_that_fails_is_a_miss(bridge):
    saved(bridge)

    def place(index, raw):
        if index == 2:
            raise ValueError("no such page")

    transfer = bridge.load(NS, SHARD, LINKS, place, near=5)
    assert transfer.wait(30)
    assert transfer.run == 0
    assert bridge.counts.blocks["lost"] == 3


def test_without_a_node_everything_is_a_miss(tmp_path):
    bridge = Bridge(f"kvtier+unix://{tmp_path}/nobody.sock")
    try:
        assert bridge.look(NS, [SHARD], LINKS).poll().run == 0
        load = bridge.load(NS, SHARD, LINKS, lambda i, raw: None)
        save = bridge.save(NS, SHARD, LINKS, fill)
        call = bridge.call("versions", lambda kv: kv.versions("s"))
        assert load.wait(30)
        assert save.wait(30)
        assert (load.run, save.run) == (0, 0)
        with pytest.raises(Unavailable):
            call.result(30)
        assert bridge.counts.looks == {"unavailable": 1}
        assert +bridge.counts.blocks == {"lost": 5, "dropped": 5}
        assert bridge.counts.calls == {"unavailable": 1}
    finally:
        bridge.close()


def test_a_node_that_comes_later_is_found(monkeypatch):
    calls, real = [], module.open_sync

    def late(url):
        calls.append(url)
        if len(calls) < 3:
            raise Unavailable("not yet")
        return real(url)

    monkeypatch.setattr(module, "open_sync", late)
    monkeypatch.setattr(module, "_REOPEN_S", (0.01,))
    bridge = Bridge("memory://bridge-later?dram=64MiB")
    assert bridge.wait_connected(30)
    assert saved(bridge) == 5
    bridge.close()
    assert len(calls) == 3


def test_a_wrong_url_is_said_at_once():
    with pytest.raises(Invalid, match="scheme"):
        Bridge("http://somewhere")


def test_a_question_that_takes_too_long_is_a_miss(bridge, monkeypatch):
    saved(bridge)
    gate = threading.Event()
    monkeypatch.setattr(bridge._kv, "lookup", lambda **_: gate.wait(30))
    monkeypatch.setattr(transfers, "LOOK_S", 0.05)
    look = bridge.look(NS, [SHARD], LINKS)
    assert look.poll(0.001) is None
    assert answer(look).run == 0
    assert bridge.counts.looks == {"late": 1}
    gate.set()


def test_nothing_is_copied_once_it_was_stopped(bridge):
    entered, go, touched = threading.Event(), threading.Event(), []

    def slow(index, payload):
        touched.append(index)
        if index == 1:
            entered.set()
            assert go.wait(30)
        fill(index, payload)

    transfer = bridge.save(NS, SHARD, LINKS, slow)
    assert entered.wait(30)
    stopper = threading.Thread(target=transfer.stop)
    stopper.start()
    stopper.join(0.05)
    assert stopper.is_alive()  # the copy of that block has not ended
    go.set()
    stopper.join(30)
    assert not stopper.is_alive()
    assert transfer.wait(30)
    assert touched == [0, 1]
    assert answer(bridge.look(NS, [SHARD], LINKS)).run in {0, 1, 2}  # what was filled in time may be there


def test_copies_that_were_begun_are_settled_before_what_was_lent_goes_back(bridge):
    saved(bridge)
    told = []
    transfer = bridge.load(NS, SHARD, LINKS, lambda i, raw: told.append(i), near=5, settle=lambda: told.append("settled"))
    assert transfer.wait(30)
    assert told == [0, 1, 2, 3, 4, "settled"]
    transfer.stop()
    assert told[-1] == "settled"


def test_copies_before_one_that_fails_are_settled_too(bridge):
    saved(bridge)
    told = []

    def place(index, raw):
        told.append(index)
        if index == 2:
            raise ValueError("no such page")

    transfer = bridge.load(NS, SHARD, LINKS, place, near=5, settle=lambda: told.append("settled"))
    assert transfer.wait(30)
    assert told == [0, 1, 2, "settled"]


def test_what_was_copied_from_a_node_that_died_does_not_count_where_the_caller_ends_it_early(bridge, monkeypatch):
    saved(bridge)
    monkeypatch.setattr("kvstore.blocks.Blocks.intact", property(lambda _: False))

    def place(index, raw):
        if index == 2:
            raise transfers.Stopped

    transfer = bridge.load(NS, SHARD, LINKS, place, near=5)
    assert transfer.wait(30)
    assert transfer.run == 0


def test_a_call_that_fails_in_an_unknown_way_does_not_count_as_made(bridge):
    call = bridge.call("divide", lambda kv: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        call.result(30)
    assert bridge.counts.calls == {"error": 1}


def test_a_forked_child_finds_nothing_and_waits_for_nothing(bridge):
    saved(bridge)

    def found():
        load = bridge.load(NS, SHARD, LINKS, lambda i, raw: None)
        save = bridge.save(NS, SHARD, LINKS, fill)
        runs = (
            bridge.look(NS, [SHARD], LINKS).poll(0).run,
            load.done,
            load.run,
            save.done,
            save.run,
            bridge.call("x", lambda kv: 1),
        )
        bridge.close()
        return runs

    assert in_child(found) == repr((0, True, 0, True, 0, None))
    assert answer(bridge.look(NS, [SHARD], LINKS)).run == 5  # the parent's is as it was


def test_a_forked_child_does_not_share_the_bridge_of_its_parent():
    url = "memory://bridge-child?dram=64MiB"
    parents = Bridge.shared(url)
    try:
        assert in_child(lambda: Bridge.shared(url) is parents) == "False"
    finally:
        parents.close()


def in_child(work):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writing, repr(work()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        answer = said.read()
    os.waitpid(child, 0)
    return answer


_LEAVES = """
import threading
from kvstore.connectors.bridge import Bridge
bridge = Bridge("memory://bridge-leaves?dram=64MiB")
assert bridge.wait_connected(30)
begun = threading.Event()
bridge.call("wait", lambda kv: (begun.set(), threading.Event().wait()))
assert begun.wait(30)
print("leaves", flush=True)
"""


def test_an_interpreter_that_ends_waits_for_no_call():
    ended = subprocess.run([sys.executable, "-c", _LEAVES], check=False, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "leaves\n"), ended.stderr


def test_more_than_can_wait_is_dropped_and_counted(bridge, monkeypatch):
    gate = threading.Event()
    first = bridge.call("wait", lambda kv: gate.wait(30))
    more = [bridge.call("wait", lambda kv: None) for _ in range(module._CALLS + 10)]
    assert more.count(None) == 11
    gate.set()
    assert first.result(30)
    assert [call.result(30) for call in more if call is not None] == [None] * (module._CALLS - 1)
    assert bridge.counts.calls == {"ok": module._CALLS, "busy": 11}


def test_the_parts_of_an_engine_in_one_process_share_one_bridge():
    url = "memory://bridge-shared?dram=64MiB"
    one, two = Bridge.shared(url), Bridge.shared(url)
    assert one is two
    assert one.wait_connected(30)
    two.close()
    assert saved(one) == 5  # it is open until everyone has closed it
    one.close()
    other = Bridge.shared(url)
    assert other is not one
    other.close()


def test_news_are_told_once(bridge):
    saved(bridge)
    news = bridge.news()
    assert news["blocks"] == {"saved": 5}
    assert bridge.news() == {}
    saved(bridge)
    assert bridge.news() == {"blocks": {"known": 5}}
