"""SessionCache against a real node inside this process, on the memory store."""

import pytest

import kvstore
from kvstore.connectors.hf import SessionCache
from kvstore.errors import Conflict

B = 16


@pytest.fixture
def kv():
    with kvstore.open_sync("memory://hf") as client:
        yield client


def test_turns_forks_and_rewinds_on_a_real_node(torch, model, kv, prompt, prefill):
    sessions = SessionCache(model, kv, block_tokens=B)
    ids = prompt(150)
    first = sessions.restore("chat", ids[:, :60])
    assert (first.tokens.size, first.version) == (0, 0)
    cache = prefill(model, ids[:, :60], first.past_key_values)
    assert sessions.commit("chat", ids, cache, durability="bucket").durability == "bucket"

    again = SessionCache(model, kv, block_tokens=B)
    restored = again.restore("chat")
    assert restored.tokens.tolist() == ids[0, :60].tolist()
    assert restored.miss == ""
    kept, back = prefill(model, ids[:, 60:100], cache), prefill(model, ids[:, 60:100], restored.past_key_values)
    for mine, theirs in zip(kept.layers, back.layers, strict=True):
        assert torch.equal(mine.keys, theirs.keys)
        assert torch.equal(mine.values, theirs.values)
    assert again.commit("chat", ids, back, durability="bucket").version == 2
    otherwise = ids.clone()
    otherwise[0, 50] = (otherwise[0, 50] + 1) % 97
    with pytest.raises(Conflict):
        sessions.commit("chat", otherwise, prefill(model, otherwise[:, :70]), durability="bucket")

    assert again.fork("chat", "other", version=1).tokens == 60
    assert again.restore("other").tokens.tolist() == ids[0, :60].tolist()
    assert again.rewind("chat", tokens=40).tokens == 2 * B
    assert again.restore("chat", ids).tokens.tolist() == ids[0, : 2 * B].tolist()
    assert again.restore("chat", version=2).tokens.size == 100


def test_b25_reported_tokens_are_those_a_node_delivers(model, kv, prompt, prefill):
    sessions = SessionCache(model, kv, block_tokens=B)
    ids = prompt(4 * B)
    sessions.commit("s", ids, prefill(model, ids), durability="bucket")
    assert sessions.reusable(ids) == 4 * B - 1 == sessions.reuse(ids).past_key_values.get_seq_length()
    assert sessions.reusable(ids[:, 1:]) == 0
