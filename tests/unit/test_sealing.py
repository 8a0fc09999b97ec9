"""Sealed objects: what was sealed under a name opens under that name, in any pieces, and nothing else does."""

import os
import random  # noqa: TID251  seeded

import pytest

from kvstore.errors import Corrupt, Denied, Invalid
from kvstore.ids import NamespaceId, PrefixId
from kvstore.keys import Keys
from kvstore.sealing.frames import FRAME, HEADER, TAG, DataKey, Opening, UnknownKey, content_bytes, seal_into, sealed_bytes
from kvstore.sealing.keyfile import MasterKeys, made, spelled
from kvstore.sealing.veil import NameVeil

KEY = DataKey(b"k" * 16, b"s" * 32)
SIZES = [0, 1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME + 17]


def sealed(content: bytes, name: bytes = b"blocks/a", key: DataKey = KEY) -> bytearray:
    target = bytearray(sealed_bytes(len(content)))
    seal_into(key, os.urandom(32), name, memoryview(content), memoryview(target))
    return target


def opened(stored: bytes | bytearray, room: int, name: bytes = b"blocks/a") -> bytes:
    into = memoryview(bytearray(room))
    return bytes(into[: Opening(memoryview(stored), {KEY.id: KEY}, name, into).finish(len(stored))])


@pytest.mark.parametrize("size", SIZES)
def test_what_was_sealed_opens_and_lengths_say_each_other(size):
    content = random.Random(size).randbytes(size)
    stored = sealed(content)
    assert content_bytes(len(stored)) == size
    assert opened(stored, size) == opened(stored, size + 5) == content
    assert size < 16 or content not in bytes(stored)
    assert stored != sealed(content)  # no two objects share a key


@pytest.mark.parametrize("size", SIZES)
def test_i7_no_flipped_bit_no_cut_and_no_other_name_opens(size):
    stored = sealed(bytes(size))
    for at in {0, 9, 24, HEADER - 8, HEADER - 1, HEADER, len(stored) // 2, len(stored) - 1}:
        bad = bytearray(stored)
        bad[at] ^= 1
        with pytest.raises((Corrupt, UnknownKey)):
            opened(bad, size + 1)
    for cut in (0, 1, HEADER, len(stored) - 1):
        with pytest.raises(Corrupt):
            opened(stored[:cut], size)
    with pytest.raises(Corrupt):
        opened(stored + b"x", size + 1)
    with pytest.raises(Corrupt):
        opened(stored, size, b"blocks/b")
    if size:
        with pytest.raises(Corrupt):
            opened(stored, size - 1)


def test_frames_of_one_object_do_not_change_places_nor_end_early():
    stored = sealed(bytes(3 * FRAME))
    a, b = HEADER, HEADER + FRAME + TAG
    swapped = stored[:a] + stored[b : b + FRAME + TAG] + stored[a:b] + stored[b + FRAME + TAG :]
    with pytest.raises(Corrupt):
        opened(swapped, 3 * FRAME)
    short = bytearray(stored[: HEADER + 2 * (FRAME + TAG)])
    short[HEADER - 8 : HEADER] = (2 * FRAME).to_bytes(8, "little")
    with pytest.raises(Corrupt):
        opened(short, 3 * FRAME)


@pytest.mark.parametrize("seed", range(8))
def test_it_opens_as_it_comes_in_pieces_of_any_order(seed):
    rng = random.Random(seed)
    content = rng.randbytes(5 * FRAME + rng.randrange(FRAME))
    stored, told = sealed(content), []
    arriving, into = memoryview(bytearray(len(stored))), memoryview(bytearray(len(content)))

    def arrived(start, end):
        told.append((start, end))
        assert into[start:end] == content[start:end]

    opening = Opening(arriving, {KEY.id: KEY}, b"blocks/a", into, arrived)
    cuts = sorted(rng.sample(range(1, len(stored)), 9))
    pieces = list(zip([0, *cuts], [*cuts, len(stored)], strict=True))
    if seed % 2:
        rng.shuffle(pieces)
    for start, end in pieces:
        arriving[start:end] = stored[start:end]
        opening.arrived(start, end)
    assert sorted(told) == [(at, min(at + FRAME, len(content))) for at in range(0, len(content), FRAME)]
    assert opening.finish(len(stored)) == len(content)
    assert into == content


def test_another_attempt_takes_back_what_was_told():
    content, told = random.Random(1).randbytes(2 * FRAME), []
    stored, into = sealed(content), memoryview(bytearray(2 * FRAME))
    arriving = memoryview(bytearray(stored))
    opening = Opening(arriving, {KEY.id: KEY}, b"blocks/a", into, lambda *span: told.append(span))
    opening.arrived(0, HEADER + FRAME + TAG)
    opening.arrived(0, 0)
    opening.arrived(0, len(stored))
    assert told == [(0, FRAME), (0, 0), (0, FRAME), (FRAME, 2 * FRAME)]
    arriving[HEADER] ^= 1
    opening.arrived(0, 0)
    opening.arrived(0, len(stored))
    with pytest.raises(Corrupt):
        opening.finish(len(stored))


def test_names_are_keyed_stable_and_tell_nothing():
    namespace, prefix = NamespaceId("a" * 64), PrefixId("b" * 64)
    keys, same, other = (Keys("r").veiled(NameVeil(secret)) for secret in (b"1" * 32, b"1" * 32, b"2" * 32))
    plain = Keys("r").block(namespace, "t0of1.p0of1.g0", prefix, 3)
    assert keys.block(namespace, "t0of1.p0of1.g0", prefix, 3) == same.block(namespace, "t0of1.p0of1.g0", prefix, 3)
    assert len({each.block(namespace, "t0of1.p0of1.g0", prefix, 3) for each in (keys, other)} | {plain}) == 3
    assert keys.parse_block(keys.block(namespace, "t0of1.p0of1.g0", prefix, 3)).gen == 3
    names = [
        keys.name("t", name, namespace, lane) for name in ("alice@example.com", "bob") for lane in ("main", "0123456789abcdef")
    ]
    assert len(set(names)) == 4
    assert not any(word in name for name in names for word in ("alice", "bob", "main", "0123456789abcdef"))
    assert [keys.parse_name(name)[2] for name in names] == ["main", "0123456789abcdef"] * 2
    assert all(
        name.startswith(keys.name_lanes("t", who))
        for name, who in zip(names, ("alice@example.com",) * 2 + ("bob",) * 2, strict=True)
    )
    assert other.parse_name(names[0]) is None
    assert keys.parse_name("r/names/t/=x/" + namespace + "/main") is None


def test_a_key_file_wraps_under_its_first_key_and_unwraps_under_all(tmp_path):
    old, new, path = made("old"), made("2026"), tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(spelled(old))
    wrapped = MasterKeys.read(str(path)).wrap(b"secret", "place")
    path.write_text(spelled(new) + spelled(old))
    both = MasterKeys.read(str(path))
    assert both.ids == ["2026", "old"]
    assert both.unwrap(wrapped, "place") == b"secret"
    assert both.wrap(b"secret", "place").master == "2026"
    with pytest.raises(Denied, match="another key"):
        both.unwrap(wrapped, "elsewhere")
    with pytest.raises(Denied) as refused:
        MasterKeys([new]).unwrap(wrapped, "place")
    assert refused.value.kind == "no_key"
    assert "secret=" not in repr(new)


def test_a_key_file_that_changed_is_taken_up_where_it_matters(tmp_path, caplog):
    old, new, path = made("old"), made("new"), tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(spelled(old))
    running, later = MasterKeys.read(str(path)), MasterKeys.read(str(path))
    for broken in ("[[keys", "", spelled(made("old")), spelled(new) + spelled(made("old"))):
        path.write_text(broken)
        for _ in range(2):
            assert running.wrap(b"secret", "place").master == "old"
    assert len(caplog.records) == 2  # what is no key file, and what has another key by a known id: each is said once
    path.write_text(spelled(new) + spelled(old))
    wrapped = running.wrap(b"secret", "place")  # by a node that was not restarted
    assert wrapped.master == running.current.id == "new"
    assert later.unwrap(wrapped, "place") == b"secret"
    path.write_text(spelled(new))
    for begun_with in (old, made("old")):
        stale = MasterKeys([begun_with], str(path), renewed=True)
        with pytest.raises(Denied, match="any more"):
            stale.wrap(b"secret", "place")
        assert stale.unwrap(wrapped, "place") == b"secret"
    path.unlink()
    assert running.unwrap(MasterKeys([old]).wrap(b"secret", "place"), "place") == b"secret"


@pytest.mark.parametrize(
    "text",
    ["", "keys = 3", '[[keys]]\nid = "a"\nsecret = "c2hvcnQ="', '[[keys]]\nid = "a b"\nsecret = "%s"' % ("A" * 43 + "="), "\x00"],
)
def test_what_is_no_key_file_is_refused_without_its_words(tmp_path, text):
    path = tmp_path / "keys"
    path.touch(mode=0o600)
    path.write_text(text)
    with pytest.raises(Invalid) as refused:
        MasterKeys.read(str(path))
    assert "c2hvcnQ" not in refused.value.message
    assert "AAAA" not in refused.value.message


def test_a_key_file_that_others_may_read_is_refused(tmp_path):
    path = tmp_path / "keys"
    path.write_text(spelled(made("a")))
    path.chmod(0o640)
    with pytest.raises(Invalid, match="others"):
        MasterKeys.read(str(path))
