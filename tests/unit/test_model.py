"""Stored values: bounded, versioned, never guessed."""

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import Corrupt, Unsupported
from kvstore.keys import MAX_GEN, gen_text
from kvstore.model import (
    MAX_EPOCH,
    RECENT,
    BlockRef,
    Branch,
    Copy,
    Epoch,
    Format,
    Head,
    Manifest,
    Name,
    Version,
    dump,
    parse,
    sealed,
    stored_bytes,
)

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


KEYS = {
    Format: "r/format.json",
    Epoch: "r/epoch",
    Head: "r/heads/default/" + "f" * 32,
    Name: "r/names/default/chat%2F42/" + "a" * 64 + "/main",
    Manifest: "r/manifests/default/" + "f" * 32 + "/0000000057-" + "e" * 32,
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_values_read_back(value):
    kind, key = type(value), KEYS[type(value)]
    body = dump(value, key)
    assert parse(body, kind, key) == parse(memoryview(bytearray(body)), kind, key) == value
    assert len(body) == stored_bytes(value)
    assert body[11:75].decode() == blake3(body[:11] + b"0" * 64 + body[75:] + key.removeprefix("r/").encode()).hexdigest()


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_i7_no_flipped_bit_of_a_value_is_ever_read_as_another(value):
    """Every bit of every byte, the digest's own and the version's too: corrupt, and never `unknown`."""
    key = KEYS[type(value)]
    body = bytearray(dump(value, key))
    for at in range(len(body)):
        for bit in range(8):
            body[at] ^= 1 << bit
            with pytest.raises(Corrupt, match="do not match their digest") as refused:
                parse(body, type(value), key)
            assert key in refused.value.message
            assert "kvtier fsck" in refused.value.remedy
            body[at] ^= 1 << bit
    for length in (0, 1, 10, 11, 74, 75, 76, len(body) - 1):
        with pytest.raises(Corrupt):
            parse(body[:length], type(value), key)
    for longer in (body + b" ", b" " + body, body + b"\0", body + body):
        with pytest.raises(Corrupt):
            parse(longer, type(value), key)
    assert parse(body, type(value), key) == value


@pytest.mark.parametrize("value", VALUES[2:], ids=lambda value: type(value).__name__)
def test_i9_a_value_of_another_key_is_no_value_of_this_one(value):
    """An answer that was meant for somebody else; the root it lies under makes no difference."""
    kind, key = type(value), KEYS[type(value)]
    body = dump(value, key)
    assert parse(body, kind, key.removeprefix("r/")) == parse(body, kind, f"other/{key}") == value
    parts = key.split("/")
    for at in range(1, len(parts)):
        other = "/".join([*parts[:at], f"{parts[at]}0", *parts[at + 1 :]])
        with pytest.raises(Corrupt):
            parse(body, kind, other)


names = st.text(st.characters(codec="utf-8"), max_size=12)
naturals = st.integers(0, (1 << 53) - 1)
epochs = st.integers(0, MAX_EPOCH)
moments = st.floats(0, 1e12)
versions = st.builds(Version, seq=naturals, manifest=names, n=naturals, at=moments)
branches = st.builds(
    Branch,
    seq=naturals,
    manifest=names,
    n=naturals,
    ttl=naturals,
    sliding=st.booleans(),
    expires=moments,
    pinned=st.booleans(),
    at=moments,
    history=st.lists(versions, max_size=3).map(tuple),
)
heads = st.builds(
    Head,
    swaps=naturals,
    write=names,
    recent=st.lists(names, max_size=4).map(tuple),
    open=st.booleans(),
    sealed_at=epochs,
    dead=st.booleans(),
    branches=st.dictionaries(names, branches, max_size=3),
)
stored = st.one_of(
    heads,
    st.builds(Epoch, epoch=epochs, write=names),
    st.builds(Name, name=names, family=names, branch=names, write=names),
    st.builds(Format, store_id=names, created=moments, guarantees=st.dictionaries(names, st.booleans(), max_size=2)),
)


@given(stored, st.integers(0), st.integers(1, 255))
def test_what_is_stored_is_read_back_or_refused(value, at, flip):
    key = KEYS[type(value)]
    body = bytearray(dump(value, key))
    assert parse(body, type(value), key) == value
    body[at % len(body)] ^= flip
    with pytest.raises(Corrupt):
        parse(body, type(value), key)


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, MAX_GEN, MAX_GEN + 1, 1 << 53])
def test_an_epoch_that_no_key_has_room_for_is_corrupt(epoch):
    assert len(gen_text(MAX_EPOCH + 2)) == 10  # what a collection compares with, and what comes after
    with pytest.raises(Corrupt):
        parse(dump(Epoch(epoch=epoch), "epoch"), Epoch, "epoch")
    with pytest.raises(Corrupt):
        parse(dump(Head(sealed_at=epoch), "heads/t/f"), Head, "heads/t/f")
    far = msgspec.structs.replace(MANIFEST, blocks=(BlockRef(LINK, 256, (Copy(0, epoch, 1, 1),)),))
    with pytest.raises(Corrupt):
        parse(dump(far, "manifests/t/f/m"), Manifest, "manifests/t/f/m")


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_i10_an_unknown_version_is_refused_never_guessed(value):
    for version in (0, max(type(value).VERSIONS) + 1, 99):
        newer = sealed(msgspec.json.encode({**msgspec.to_builtins(value), "v": version}), type(value), "it")
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
        for body in (bad, sealed(bad, kind, "it")):
            with pytest.raises(Corrupt):
                parse(body, kind, "it")


@pytest.mark.parametrize("tokens", [0, -256, 8193, 1 << 70])
def test_b27_a_manifest_with_an_impossible_block_length_is_corrupt(tokens):
    with pytest.raises(Corrupt, match="it is not a valid Manifest"):
        parse(altered(b'"tokens":256', b'"tokens":%d' % tokens), Manifest, "it")


@pytest.mark.parametrize("link", ["../" + "b" * 61, "B" * 64, "b" * 63, "b" * 65, "b" * 64 + "\\n", ""])
def test_b22_a_manifest_cannot_name_a_key_outside_the_blocks(link):
    with pytest.raises(Corrupt):
        parse(altered(LINK.encode(), link.encode()), Manifest, "it")


@pytest.mark.parametrize("size", [b"-1", b"1e9", b"99999999999999999999", b'"5"', b"null"])
def test_sizes_in_a_manifest_are_naturals(size):
    with pytest.raises(Corrupt):
        parse(altered(b"5900000", size), Manifest, "it")


def altered(old, new):
    """The manifest with a hostile writer's change to it, and the digest that belongs to that."""
    text = msgspec.json.encode(MANIFEST)
    assert old in text
    return sealed(text.replace(old, new, 1), Manifest, "it")


@given(st.data())
def test_no_bytes_raise_anything_but_corrupt(data):
    text = bytearray(msgspec.json.encode(data.draw(st.sampled_from(VALUES))))
    for _ in range(data.draw(st.integers(1, 4))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.integers(0, 255))
    for kind in (Head, Manifest, Name):
        try:
            parse(sealed(bytes(text), kind, "it"), kind, "it")
        except (Corrupt, Unsupported):
            continue


def test_unknown_fields_are_ignored_and_defaults_may_be_absent():
    assert parse(sealed(b'{"v":1,"epoch":5,"new":{"x":1}}', Epoch, "epoch"), Epoch, "epoch") == Epoch(epoch=5)
    assert parse(sealed(b'{"v":1}', Head, "head"), Head, "head") == Head()


def test_a_branch_and_its_history_stay_within_their_price():
    """A family of 1,000 branches without history fits in a head."""
    name = f"{57:010d}-{'a' * 32}"
    branch = Branch(seq=1000, manifest=name, n=4096, ttl=2_592_000, expires=1767225600, at=1767225600)
    version = Version(seq=999, manifest=name, n=4095, at=1767225600)
    assert len(msgspec.json.encode(branch)) <= 180
    assert len(msgspec.json.encode(version)) <= 100
    head = Head(recent=("f" * 32,) * RECENT, branches={f"{i:032x}": branch for i in range(1000)})
    assert stored_bytes(head) < 256 * 1024
