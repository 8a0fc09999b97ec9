"""What an engine says of its blocks, in either spelling, becomes what a router asks for."""

import msgspec
import pytest

from kvstore.errors import Invalid
from kvstore.ids import Namespace, chain, extra_key
from kvstore.mesh.engine_events import Batch, Cleared, Removed, Stored, decode
from kvstore.mesh.residency import Residency

NAMESPACE = Namespace(model="m", revision="r", layers=1, kv_heads=1, head_dim=8, block_tokens=8)


@pytest.fixture
def held():
    return set()


@pytest.fixture
def engine(held):
    def told(more, fewer):
        assert held.isdisjoint(more)
        assert held.issuperset(fewer)
        held.update(more)
        held.difference_update(fewer)

    return Residency(NAMESPACE, told)


def names(tokens, **more):
    return [link.prefix_id for link in chain(NAMESPACE, tokens, **more)]


def stored(tokens, hashes, parent=None, size=4, extra=(), lora=""):
    return Batch((Stored(tuple(hashes), parent, tuple(tokens), size, extra, lora),))


def removed(*hashes):
    return Batch((Removed(hashes),))


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_blocks_of_any_size_that_fits_are_ours(engine, held, size):
    tokens = list(range(100, 132))
    engine.apply(stored(tokens, range(32 // size), size=size))
    assert held == set(names(tokens))


def test_a_prompt_that_comes_in_pieces(engine, held):
    tokens = list(range(24))
    engine.apply(stored(tokens[:4], [1]))
    assert held == set()
    engine.apply(stored(tokens[4:20], [2, 3, 4, 5], parent=1))
    assert held == set(names(tokens[:16]))
    engine.apply(stored(tokens[20:], [6], parent=5))
    assert held == set(names(tokens))


def test_prompts_that_part_in_the_middle_of_our_block(engine, held):
    one, two = list(range(16)), [*range(12), 90, 91, 92, 93]
    engine.apply(stored(one, [1, 2, 3, 4]))
    engine.apply(stored(two[12:], [5], parent=3))
    assert held == set(names(one)) | set(names(two))
    engine.apply(removed(4))
    assert held == set(names(two))
    engine.apply(removed(3))
    assert held == set(names(one)[:1])
    engine.apply(stored(one[8:12], [3], parent=2))  # back again, and with it the second prompt
    assert held == set(names(two))


def test_what_goes_with_a_part_of_it(engine, held):
    engine.apply(stored(range(16), [1, 2], size=8))
    engine.apply(removed(1, 1, 77))
    assert held == {names(range(16))[1]}
    engine.apply(Batch((Cleared(),)))
    assert held == set()
    engine.apply(stored(range(8, 16), [3], parent=2, size=8))  # nobody knows any more what was before it
    assert held == set()
    assert engine.ignored == 1


def test_two_ranks_hold_one_block_until_the_second_lets_go(engine, held):
    event = Stored((1,), None, tuple(range(8)), 8)
    engine.apply(Batch((event,), rank=0))
    engine.apply(Batch((event,), rank=1))
    engine.apply(Batch((Removed((1,)),), rank=0))
    assert held == set(names(range(8)))
    engine.apply(Batch((Cleared(),), rank=1))
    assert held == set()


def test_a_salt_is_part_of_the_name_and_what_is_not_known_is_not_followed(engine, held):
    engine.apply(stored(range(16), [1, 2], size=8, extra=(("pepper",), ())))
    assert held == set(names(range(16), extra={0: [extra_key("salt", "pepper")]}))
    engine.forget()
    assert held == set()
    engine.apply(stored(range(8), [1], size=8, extra=((("image", 0),),)))
    engine.apply(stored(range(8), [2], size=8, lora="adapter"))
    engine.apply(stored(range(8), [3], size=8, extra=(("a", "b"),)))
    assert held == set()
    assert engine.ignored == 3


def test_sizes_that_do_not_fit_are_refused_by_name(engine):
    with pytest.raises(Invalid, match="blocks of 3 tokens and the router of 8"):
        engine.apply(stored(range(6), [1, 2], size=3))


def test_memory_is_bounded(engine, held, monkeypatch):
    monkeypatch.setattr("kvstore.mesh.residency.KNOWN", 4)
    for each in range(6):
        engine.apply(stored(range(each, each + 8), [each], size=8))
    assert held == {name for each in range(2, 6) for name in names(range(each, each + 8))}


ON = {"type": "BlockStored", "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}
AS_MAPS = [
    {**ON, "block_hashes": [b"a"], "medium": "GPU", "of a later version": 1},
    {**ON, "block_hashes": [b"b"], "medium": "STORAGE"},
    {"type": "BlockRemoved", "block_hashes": [b"a"], "medium": "GPU"},
    {"type": "AllBlocksCleared"},
]
AS_ARRAYS = [
    ["BlockStored", [b"a"], None, [1, 2], 2, None, "GPU"],
    ["BlockStored", [b"b"], None, [1, 2], 2, None, "STORAGE", None],
    ["BlockRemoved", [b"a"], "GPU"],
    ["AllBlocksCleared"],
]


@pytest.mark.parametrize("events", [AS_MAPS, AS_ARRAYS], ids=["maps", "arrays"])
def test_both_spellings(events):
    batch = decode(msgspec.msgpack.encode([0.0, events, 3]))
    assert batch == Batch((Stored((b"a",), None, (1, 2), 2), Removed((b"a",)), Cleared()), rank=3)


@pytest.mark.parametrize(
    "event",
    [
        7, [], ["NoSuch"], {"type": "BlockStored"}, ["BlockStored", [1], None, [1, 2, 3], 2, None, None],
        ["BlockStored", [1], None, [1, 2], 0, None, None], ["BlockStored", [1.5], None, [1, 2], 2, None, None],
        ["BlockStored", [1], None, [1, 2], 2, None, None, None, [None, None]],
    ],
)  # fmt: skip
def test_an_event_that_is_none_is_counted_and_the_others_count(event):
    assert decode(msgspec.msgpack.encode([0.0, [event, ["AllBlocksCleared"]]])) == Batch((Cleared(),), unknown=1)


@pytest.mark.parametrize("payload", [b"", b"\xc1", msgspec.msgpack.encode(7), msgspec.msgpack.encode([0.0, 7])])
def test_what_is_no_batch_is_refused(payload):
    with pytest.raises(Invalid, match="batch of KV events"):
        decode(payload)
