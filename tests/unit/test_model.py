"""Stored values: bounded, versioned, never guessed."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt, Unsupported
from kvstore.model import RECENT, BlockRef, Branch, Copy, Epoch, Format, Head, Manifest, Name, Version, dump, parse

LINK = "b" * 64
MANIFEST = Manifest(
    namespace="a" * 64,
    shards=("t0of1.p0of1.g0",),
    block_tokens=256,
    tokens=300,
    blocks=(BlockRef(LINK, 256, (Copy(0, 57, 5_900_000, 12_288),)), BlockRef("c" * 64, 44, (Copy(0, 57, 1_000_000, 12_288),))),
)
VALUES = [
    Format(store_id="s", created=1.5, guarantees={"create": True}),
    Epoch(epoch=57, write="w"),
    Head(),
    Head(
        swaps=3,
        write="w",
        recent=("v", "w"),
        branches={"b": Branch(seq=2, manifest="m", n=1, history=(Version(seq=1, manifest="l", n=1, at=2.5),))},
    ),
    Name(name="chat/42 世界", family="f", branch="b"),
    MANIFEST,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_read_back(value):
    assert parse(dump(value), type(value), "it") == value


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_i10_an_unknown_version_is_refused_never_guessed(value):
    for version in (0, 2, 99):
        newer = msgspec.json.encode({**msgspec.to_builtins(value), "v": version})
        with pytest.raises(Unsupported) as caught:
            parse(newer, type(value), "it")
        assert caught.value.kind == "unknown_format"


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\0" * 100,
        b"null",
        b"[]",
        b"{}",
        b'{"v":"1"}',
        b'{"v":1.5}',
        b"\xff",
        b'{"v":1',
        b"[" * 100_000,
        b'{"v":1,"x":' + b"[" * 100_000,
    ],
)
def test_b31_empty_or_zeroed_values_are_corrupt(bad):  # fmt: skip
    for kind in (Epoch, Name, Manifest):
        with pytest.raises(Corrupt):
            parse(bad, kind, "it")


@pytest.mark.parametrize("tokens", [0, -256, 8193, 1 << 70])
def test_b27_a_manifest_with_an_impossible_block_length_is_corrupt(tokens):
    text = dump(MANIFEST).replace(b'"tokens":256', b'"tokens":%d' % tokens, 1)
    with pytest.raises(Corrupt, match="it is not a valid Manifest"):
        parse(text, Manifest, "it")


@pytest.mark.parametrize("link", ["../" + "b" * 61, "B" * 64, "b" * 63, "b" * 65, "b" * 64 + "\\n", ""])
def test_b22_a_manifest_cannot_name_a_key_outside_the_blocks(link):
    with pytest.raises(Corrupt):
        parse(dump(MANIFEST).replace(LINK.encode(), link.encode()), Manifest, "it")


@pytest.mark.parametrize("size", [b"-1", b"1e9", b"99999999999999999999", b'"5"', b"null"])
def test_sizes_in_a_manifest_are_naturals(size):
    with pytest.raises(Corrupt):
        parse(dump(MANIFEST).replace(b"5900000", size), Manifest, "it")


@given(st.data())
def test_no_bytes_raise_anything_but_corrupt(data):
    text = bytearray(dump(data.draw(st.sampled_from(VALUES))))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    for kind in (Head, Manifest, Name):
        try:
            parse(text, kind, "it")
        except (Corrupt, Unsupported):
            continue


def test_unknown_fields_are_ignored_and_defaults_may_be_absent():
    assert parse(b'{"v":1,"epoch":5,"new":{"x":1}}', Epoch, "epoch") == Epoch(epoch=5)
    assert parse(b'{"v":1}', Head, "head") == Head()


def test_a_branch_and_its_history_stay_within_their_price():
    """A family of 1,000 branches without history fits in a head."""
    name = f"{57:010d}-{'a' * 32}"
    branch = Branch(seq=1000, manifest=name, n=4096, ttl=2_592_000, expires=1767225600, at=1767225600)
    version = Version(seq=999, manifest=name, n=4095, at=1767225600)
    assert len(dump(branch)) <= 180
    assert len(dump(version)) <= 100
    head = Head(recent=("f" * 32,) * RECENT, branches={f"{i:032x}": branch for i in range(1000)})
    assert len(dump(head)) < 256 * 1024
