"""Versions that an engine's requests leave behind: extended, edited, repeated, forked, in lanes; and never an error."""

from zlib import crc32

import numpy as np
import pytest

import kvstore
from kvstore import codec
from kvstore.connectors import tips as tips_module
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.session_names import session_of
from kvstore.connectors.sessions import Sessions, Who
from kvstore.connectors.tips import Tip, Tips
from kvstore.errors import NotFound
from kvstore.ids import Namespace, Shard, chain

NS = Namespace(model="m", revision="1", layers=1, page_bytes=512, layout="test/1", block_tokens=4)
SHARD = Shard()
SIZE = codec.layout(NS, SHARD, 4).payload_bytes


def links(*parts):
    """A chain of blocks of four tokens; each part a word for one block."""
    return chain(NS, np.array([[crc32(part.encode()) % 50_000 + i for i in range(4)] for part in parts], np.uint32).ravel())


@pytest.fixture
def url(request):
    return f"memory://{request.node.name}?dram=64MiB"


@pytest.fixture
def bridge(url):
    made = Bridge(url)
    assert made.wait_connected(30)
    yield made
    made.close()


@pytest.fixture
def sessions(bridge):
    return Sessions(bridge, NS, [SHARD])


@pytest.fixture
def turn(bridge, sessions):
    """One whole request: begins, saves, ends; the receipt."""

    def run(session, *parts, begun=None, **who):
        begun = begun or sessions.begin(Who(session=session, durability="bucket", **who))
        blocks = links(*parts)
        saved = bridge.save(NS, SHARD, blocks, lambda i, payload: payload.__setitem__(slice(None), bytes(SIZE)))
        assert saved.wait(30)
        assert saved.run == len(blocks)
        return sessions.end(begun, blocks).result(30)

    return run


@pytest.fixture
def stored(bridge):
    def read(session, lane="main", version=0):
        found = bridge._kv.manifest(session, namespace=NS, lane=lane, version=version)
        return [link.prefix_id for link in found.blocks]

    return read


def names(*parts):
    return [link.prefix_id for link in links(*parts)]


def test_a_session_grows_turn_by_turn(turn, stored, sessions):
    assert turn("s", "a", "b").version == 1
    assert turn("s", "a", "b", "c").version == 2
    assert stored("s") == names("a", "b", "c")
    assert sessions.counts == {"extended": 2}


def test_what_an_engine_that_starts_anew_adds_goes_behind_what_is_stored(turn, stored, bridge):
    turn("s", "a", "b")
    anew = Sessions(bridge, NS, [SHARD])
    receipt = anew.end(anew.begin(Who(session="s", durability="bucket")), links("a"))
    assert receipt.result(30).version == 1
    assert anew.counts == {"known": 1}
    assert stored("s") == names("a", "b")


def test_an_edit_replaces_what_was_there(turn, stored, sessions):
    turn("s", "a", "b", "thought")
    assert turn("s", "a", "b", "answer", "next").version == 2
    assert stored("s") == names("a", "b", "answer", "next")
    assert sessions.counts == {"extended": 1, "edited": 1}


def test_the_beginning_again_changes_nothing(turn, stored, sessions):
    turn("s", "a", "b", "c")
    receipt = turn("s", "a", "b")
    assert (receipt.version, receipt.blocks, receipt.tokens, receipt.lane) == (1, 2, 8, "main")
    assert stored("s") == names("a", "b", "c")
    assert sessions.counts == {"extended": 1, "known": 1}


def test_parallel_requests_that_part_have_lanes_of_their_own(turn, stored, sessions):
    one = sessions.begin(Who(session="s", durability="bucket"))
    two = sessions.begin(Who(session="s", durability="bucket"))
    turn("s", "a", "b", begun=one)
    lane = turn("s", "a", "x", begun=two).lane
    assert lane not in {"", "main"}
    assert stored("s") == names("a", "b")
    assert stored("s", lane) == names("a", "x")
    # Each goes on where it was, one after the other.
    assert turn("s", "a", "x", "y").lane == lane
    assert turn("s", "a", "b", "c").version == 2
    assert stored("s") == names("a", "b", "c")
    assert stored("s", lane) == names("a", "x", "y")


def test_parallel_requests_of_one_conversation_stay_in_one_lane(turn, stored, sessions):
    one = sessions.begin(Who(session="s", durability="bucket"))
    two = sessions.begin(Who(session="s", durability="bucket"))
    turn("s", "a", "b", begun=one)
    assert turn("s", "a", "b", "c", begun=two).version == 2
    assert stored("s") == names("a", "b", "c")
    assert "laned" not in sessions.counts


def test_another_engine_that_was_first_keeps_its_version(turn, stored, sessions, bridge):
    """Both know version 1; the other one commits, then this one, which parts from it."""
    turn("s", "a")
    other = Sessions(bridge, NS, [SHARD])
    turn("s", "a", "b")
    blocks = links("a", "x")
    saved = bridge.save(NS, SHARD, blocks, lambda i, payload: payload.__setitem__(slice(None), bytes(SIZE)))
    assert saved.wait(30)
    (mine,) = sessions._tips.of("s", blocks)
    other._tips.put("s", Tip.of("", 1, links("a"), mine.branch))  # what it knows is a version old
    receipt = other.end(other.begin(Who(session="s", durability="bucket")), blocks).result(30)
    assert receipt.lane not in {"", "main"}
    assert stored("s") == names("a", "b")
    assert stored("s", receipt.lane) == names("a", "x")
    assert other.counts["conflict"] == 1


def test_a_deleted_session_begins_anew(turn, stored, bridge):
    turn("s", "a", "b")
    bridge._kv.delete_session("s", namespace=NS)
    assert turn("s", "a", "b", "c").version == 1
    assert stored("s") == names("a", "b", "c")


def test_a_child_begins_as_its_parent_is(turn, stored, sessions, bridge):
    turn("mother", "a", "b")
    turn("child", "a", "b", "c", parent="mother")
    assert stored("child") == names("a", "b", "c")
    assert stored("mother") == names("a", "b")
    assert sessions.counts["forked"] == 1
    family = {bridge._kv.get_session(name, namespace=NS).family for name in ("mother", "child")}
    assert len(family) == 1
    turn("orphan", "a", parent="nobody")
    assert stored("orphan") == names("a")


def test_a_lane_that_was_asked_for_is_used(turn, stored):
    assert turn("s", "a", "b", lane="left").lane == "left"
    assert turn("s", "a", "c", lane="right").lane == "right"
    assert turn("s", "a", "b", "d", lane="left").version == 2
    assert stored("s", "left") == names("a", "b", "d")
    with pytest.raises(NotFound):
        stored("s", "main")


def test_conversations_that_share_nothing_do_not_replace_each_other(turn, stored, bridge):
    turn("s", "a", "b")
    turn("s", "z")
    turn("s", "z", "y")
    turn("s", "a", "b", "c")
    assert stored("s") == names("a", "b", "c")
    lanes = {session.lane for session in bridge._kv.list_sessions(prefix="s").sessions}
    assert len(lanes) == 2


def test_nothing_saved_is_nothing_committed(sessions):
    turn = sessions.begin(Who(session="s"))
    assert sessions.end(turn, []) is None
    assert sessions._running == {}


def test_without_a_node_it_is_counted(tmp_path):
    bridge = Bridge(f"kvtier+unix://{tmp_path}/nobody.sock")
    sessions = Sessions(bridge, NS, [SHARD])
    future = sessions.end(sessions.begin(Who(session="s")), links("a"))
    assert isinstance(future.exception(30), kvstore.Unavailable)
    assert bridge.counts.calls == {"unavailable": 1}
    bridge.close()


@pytest.mark.parametrize(
    ("params", "found"),
    [
        ({"session_id": "a", "X-Session-ID": "b"}, "a"),
        ({"x-session-id": "b"}, "b"),
        ({"session-id": "", "X-Claude-Code-Session-Id": "c"}, "c"),
        ({"session_id": 7}, ""),
        (None, ""),
        ("text", ""),
    ],
)
def test_a_session_id_is_taken_from_the_first_name_that_has_one(params, found):
    assert session_of(params) == found


def test_what_is_remembered_is_bounded_by_bytes(monkeypatch):
    monkeypatch.setattr(tips_module, "HELD_BYTES", 3 * (512 + 16))
    tips = Tips()
    for index in range(10):
        tips.put(f"s{index}", Tip.of("", 1, links("a", "b"), "x"))
        tips.put(f"s{index}", Tip.of("", 2, links("a", "b"), "x"))
    assert len(tips) == 3
    assert [tip.version for tip in tips.of("s9", links("a", "other"))] == [2]
    assert tips.of("s0", links("a")) == ()
    for index in range(100):
        tips.put("s9", Tip.of(f"lane{index}", 1, links("a", "b"), "x"))
    assert (len(tips), len(tips.of("s9", links("a")))) == (1, tips_module.LANES)
    tips.forget("s9", links("a"))
    assert (len(tips), tips._held) == (0, 0)
