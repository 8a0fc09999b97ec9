"""Frames and versions of the same-host plane."""

import msgspec
import pytest

from kvstore import wire
from kvstore.errors import Corrupt, Unsupported

MESSAGES = [
    wire.Hello(1, "0.1.0", "default"),
    wire.Ask(1, "stats", msgspec.Raw(b"\x80")),
    wire.Get(2, "ab", "t0of1.p0of1.g0", b"\xcd" * 32, [16], 250, "bucket"),
    wire.Publish(3, "ab", "t0of1.p0of1.g0", b"\xcd" * 32, [(16, 0, 4096)]),
    wire.Release([(1, 3)]),
    wire.Cancel(9),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message):
    framed = wire.frame(message)
    assert wire.body_length(framed[:4]) == len(framed) - 4
    back = wire.parse_to_node(framed[4:])
    assert wire.frame(back) == framed
    assert type(back) is type(message)


def test_what_a_newer_minor_version_appends_is_ignored():
    assert wire.parse_to_node(msgspec.msgpack.encode(["Cancel", 4, "new", {"more": 1}])) == wire.Cancel(4)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xc0", b"\x80", msgspec.msgpack.encode(["Nobody", 1]), msgspec.msgpack.encode(["Cancel", "x"]), b"\x91" * 20_000],
)
def test_anything_else_is_corrupt(body):
    with pytest.raises(Corrupt):
        wire.parse_to_node(body)
    with pytest.raises(Corrupt):
        wire.parse_to_client(body)


@pytest.mark.parametrize("length", [0, wire.MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_frames_length_is_bounded_before_anything_is_read(length):
    with pytest.raises(Corrupt):
        wire.body_length(length.to_bytes(4, "little"))


def test_a_batch_is_bounded_before_its_elements_are_made():
    wire.parse_to_node(msgspec.msgpack.encode(["Release", [(0, 0)] * wire.MAX_BATCH]))
    with pytest.raises(Corrupt, match="65536"):
        wire.parse_to_node(msgspec.msgpack.encode(["Release", [(0, 0)] * (wire.MAX_BATCH + 1)]))


@pytest.mark.parametrize(
    ("node", "client", "fits"),
    [
        ("0.1.0", "0.1.9", True),
        ("0.1.0", "0.2.0", True),
        ("0.2.0", "0.1.0", True),
        ("0.1.0", "0.3.0", False),
        ("1.0.0", "0.9.0", False),
        ("1.4", "1.5.2.dev1", True),
        ("0.1.0", "garbage", False),
        ("0.1.0", "", False),
    ],
)
def test_neighbouring_minor_versions_fit(node, client, fits):
    if fits:
        wire.check_versions(node, client)
        return
    with pytest.raises(Unsupported) as caught:
        wire.check_versions(node, client)
    assert caught.value.kind == "version_mismatch"
