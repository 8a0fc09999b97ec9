"""Several sessions in one `generate`: every row is stored and restored under its own, and says what it would say alone."""

import numpy as np
import pytest
from fake_client import FakeClient

import kvstore
from kvstore.connectors.hf import SessionCache
from kvstore.connectors.hf_restored import Row
from kvstore.errors import Conflict, Invalid, Unavailable, Unsupported

B, W, PAD, EOS = 16, 24, 0, 96


@pytest.fixture
def kv():
    return FakeClient()


@pytest.fixture(params=["llama", "gemma3", "mistral"])
def model(request, make_model, make_window_model):
    return make_model() if request.param == "llama" else make_window_model(request.param, W)


@pytest.fixture
def batch(torch):
    """Rows of token ids, as a tokenizer pads them: (input_ids, attention_mask)."""

    def run(rows):
        columns = max(map(len, rows))
        ids = torch.tensor([[PAD] * (columns - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    return run


@pytest.fixture
def words(prompt):
    """`words(row, n)`: n token ids of that row's conversation."""
    return lambda row, n: [(3 * row + token) % 90 + 2 for token in prompt(n)[0].tolist()]


def alone(torch, greedy, model, rows):
    """What each row says by itself, of 9 tokens."""
    ids = [torch.tensor([row]) for row in rows]
    return [greedy(model, row, attention_mask=torch.ones_like(row))[0, row.shape[1] :].tolist() for row in ids]


def said(answer, prompts):
    return [row[prompts.shape[1] :].tolist() for row in answer]


@pytest.mark.parametrize(
    "lengths",
    [
        [(20, 20, 20), (30, 30, 30)],
        [(5, 60, 33), (9, 40, 1), (20, 3, 90)],  # how much longer each gets
        [(1, 150), (150, 1)],
        [(100,), (7,)],
    ],
)
@pytest.mark.parametrize("into", ["dynamic", "static"])
def test_rows_of_any_length_say_what_they_say_alone(torch, transformers, model, kv, batch, words, greedy, lengths, into):
    names = [f"s{row}" for row in range(len(lengths[0]))]
    rows, held = [[] for _ in names], [0] * len(names)
    for more in lengths:
        rows = [row + words(index, 300)[len(row) : len(row) + n] for index, (row, n) in enumerate(zip(rows, more, strict=True))]
        ids, mask = batch(rows)
        sessions = SessionCache(model, kv, block_tokens=B)  # another process
        cache = transformers.StaticCache(config=model.config, max_cache_len=320) if into == "static" else None
        past = sessions.restore_batch(names, ids, mask, into=cache)
        new = max(len(row) - n for row, n in zip(rows, held, strict=True))
        assert int(past.past_key_values.get_seq_length()) == (ids.shape[1] - new if any(held) else 0)
        assert [row.tokens.tolist() for row in past.rows] == [row[: max(0, len(row) - new)] if any(held) else [] for row in rows]
        answer = greedy(model, ids, past, attention_mask=mask)
        assert said(answer, ids) == alone(torch, greedy, model, rows)
        done = sessions.commit_batch(names, answer, past.past_key_values, mask)
        rows = [row + more for row, more in zip(rows, said(answer, ids), strict=True)]
        if into == "static" and sessions.namespace.groups[-1].window:
            return  # what its windows have passed is gone: `test_hf_static.py` says what then
        held = [len(row) - 1 for row in rows]
        assert [receipt.tokens for receipt in done] == held
        assert [sessions.restore(name).tokens.tolist() for name in names] == [row[:-1] for row in rows]


def test_padding_is_never_stored_and_a_row_is_what_it_would_be_alone(torch, model, kv, batch, words, prefill):
    rows = [words(0, 70), words(1, 21)]
    ids, mask = batch(rows)
    sessions = SessionCache(model, kv, block_tokens=B)
    past = sessions.restore_batch(["a", "b"], ids, mask)
    with torch.inference_mode():
        position_ids = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=position_ids, use_cache=True, **past.cache)
    sessions.commit_batch(["a", "b"], ids, past.past_key_values, mask)
    for name, row in zip("ab", rows, strict=True):
        restored = sessions.restore(name)
        assert restored.tokens.tolist() == row
        for mine, theirs in zip(restored.past_key_values.layers, prefill(model, torch.tensor([row])).layers, strict=True):
            n = theirs.keys.shape[2]
            assert torch.allclose(mine.keys[:, :, -n:], theirs.keys, atol=1e-5)
            assert torch.allclose(mine.values[:, :, -n:], theirs.values, atol=1e-5)
    assert sum(link.tokens for link in kv.puts) == (70 + 21) * len(sessions.namespace.groups)


def test_of_rows_with_a_window_nothing_is_stored_that_the_cache_does_not_have(make_window_model, kv, batch, words, greedy):
    """In one cache the rows' windows begin at different tokens; what lies before one of them is no KV."""
    model = make_window_model("gemma3", W)
    names, rows = ["a", "b", "c"], [words(0, 90), words(1, 75), words(2, 20)]
    sessions = SessionCache(model, kv, block_tokens=B)
    ids, mask = batch(rows)
    past = sessions.restore_batch(names, ids, mask)
    sessions.commit_batch(names, greedy(model, ids, past, attention_mask=mask), past.past_key_values, mask)
    past = sessions.restore_batch(names, ids, mask)
    assert [row.tokens.size for row in past.rows] == [89, 74, 19]
    answer = greedy(model, ids, past, attention_mask=mask)
    kv.blocks.clear()  # evicted since
    long, also, short = sessions.commit_batch(names, answer, past.past_key_values, mask)
    assert isinstance(long, Unsupported)
    assert isinstance(also, Unsupported)
    assert short.tokens == 28  # its window does not begin before its first token
    assert sessions.restore("c").tokens.size == 28


def test_a_new_row_beside_an_old_one_shares_what_others_have(torch, make_model, kv, batch, words, greedy):
    model = make_model()
    sessions = SessionCache(model, kv, block_tokens=B)
    ids, mask = batch([words(0, 40)])
    past = sessions.restore_batch(["a"], ids, mask)
    sessions.commit_batch(["a"], greedy(model, ids, past, attention_mask=mask), past.past_key_values, mask)
    rows = [[*words(0, 40), 5], [*words(0, 40), 6, 7], words(1, 3)]
    ids, mask = batch(rows)
    past = sessions.restore_batch(["a", "b", "c"], ids, mask)
    assert [row.tokens.size for row in past.rows] == [31, 32, 0]
    assert [row.version for row in past.rows] == [1, 0, 0]
    assert [row.miss for row in past.rows] == ["batch", "", ""]
    assert said(greedy(model, ids, past, attention_mask=mask), ids) == alone(torch, greedy, model, rows)


def test_what_a_row_is_padded_with_when_it_is_done_is_not_stored(torch, make_model, kv, batch, words):
    sessions = SessionCache(make_model(eos_token_id=EOS), kv, block_tokens=B)
    model = sessions._model
    ids, mask = batch([words(0, 20), words(1, 9)])
    past = sessions.restore_batch(["a", "b"], ids, mask)
    said = torch.tensor([[7, 8, EOS, PAD, PAD], [7, 8, 9, 10, 11]])
    output = torch.cat([ids, said], dim=1)
    full = torch.cat([mask, torch.ones_like(said)], dim=1)
    with torch.inference_mode():
        model(output[:, :-1], attention_mask=full[:, :-1], use_cache=True, **past.cache)
    done = sessions.commit_batch(["a", "b"], output, past.past_key_values, mask)
    assert [receipt.tokens for receipt in done] == [23, 13]
    assert sessions.restore("a").tokens.tolist() == [*words(0, 20), 7, 8, EOS]
    assert sessions.restore("b").tokens.tolist() == [*words(1, 9), 7, 8, 9, 10]
    stopped = torch.cat([ids, torch.tensor([[7, PAD, PAD, PAD, PAD], [7, 8, 9, 10, 11]])], dim=1)  # by a stopping criterion
    done = sessions.commit_batch(["c", "d"], stopped, past.past_key_values, mask)
    assert [receipt.tokens for receipt in done] == [21, 13]


def test_one_rows_trouble_is_not_the_others(make_model, kv, batch, words, greedy):
    model = make_model()
    sessions = SessionCache(model, kv, block_tokens=B)
    ids, mask = batch([words(0, 20), words(1, 9)])
    past = sessions.restore_batch(["same", "same"], ids, mask)
    answer = greedy(model, ids, past, attention_mask=mask)
    first, second = sessions.commit_batch(["same", "other"], answer, past.past_key_values, mask)
    assert (first.version, second.version) == (1, 1)
    stranger = SessionCache(model, kv, block_tokens=B)
    conflict, receipt = stranger.commit_batch(["same", "new"], answer, past.past_key_values, mask)
    assert isinstance(conflict, Conflict)
    assert receipt.version == 1


def test_a_store_in_trouble_costs_a_recomputation(torch, model, kv, batch, words, greedy):
    sessions = SessionCache(model, kv, block_tokens=B)
    rows = [words(0, 40), words(1, 9)]
    ids, mask = batch(rows)
    past = sessions.restore_batch(["a", "b"], ids, mask)
    sessions.commit_batch(["a", "b"], greedy(model, ids, past, attention_mask=mask), past.past_key_values, mask)
    kv.down = Unavailable("the node is down")
    past = sessions.restore_batch(["a", "b"], ids, mask)
    assert [(row.tokens.size, row.miss) for row in past.rows] == [(0, "the node is down")] * 2
    assert said(greedy(model, ids, past, attention_mask=mask), ids) == alone(torch, greedy, model, rows)


def test_wrong_batches_are_refused(torch, make_model, kv, batch, words, prefill):
    model = make_model()
    sessions = SessionCache(model, kv, block_tokens=B)
    ids, mask = batch([words(0, 20), words(1, 9)])
    with pytest.raises(Invalid, match="has 2 rows"):
        sessions.restore_batch(["a"], ids, mask)
    with pytest.raises(Invalid, match="has 2 rows"):
        sessions.restore_batch("ab", ids, mask)
    with pytest.raises(Invalid, match="padded on the left"):
        sessions.restore_batch(["a", "b"], ids, mask.flip(1))
    with pytest.raises(Invalid, match="padded on the left"):
        sessions.restore_batch(["a", "b"], ids, torch.zeros_like(mask))
    with pytest.raises(Invalid, match="the shape"):
        sessions.restore_batch(["a", "b"], ids[:, 1:], mask)
    with pytest.raises(Invalid, match=r"the shape \[rows, columns\]"):
        sessions.restore_batch(["a"], ids, mask[0])
    with pytest.raises(Invalid, match="begins with 2 prompts of 20"):
        sessions.commit_batch(["a", "b"], ids[:, :19], prefill(model, ids), mask)
    with pytest.raises(Invalid, match="of \\(sequences, heads, head_dim\\)"):
        sessions.commit_batch(["a", "b"], ids, prefill(model, ids[:1]), mask)
    assert kv.sessions == {}


def test_on_a_real_node(torch, make_window_model, batch, words, greedy):
    model = make_window_model("gemma3", W)
    rows = [words(0, 50), words(1, 9)]
    with kvstore.open_sync("memory://hf-batch") as kv:
        sessions = SessionCache(model, kv, block_tokens=B)
        ids, mask = batch(rows)
        past = sessions.restore_batch(["a", "b"], ids, mask)
        answer = greedy(model, ids, past, attention_mask=mask)
        done = sessions.commit_batch(["a", "b"], answer, past.past_key_values, mask, durability="bucket")
        assert [(receipt.tokens, receipt.durability) for receipt in done] == [(58, "bucket"), (17, "bucket")]
        rows = [row + more + [11, 12] for row, more in zip(rows, said(answer, ids), strict=True)]
        ids, mask = batch(rows)
        past = SessionCache(model, kv, block_tokens=B).restore_batch(["a", "b"], ids, mask)
        assert [row.tokens.size for row in past.rows] == [58, 17]
        assert said(greedy(model, ids, past, attention_mask=mask), ids) == alone(torch, greedy, model, rows)


def test_a_row_says_how_many_tokens_it_has_and_not_which():
    row = Row(tokens=np.arange(5000, dtype=np.uint32), version=3)
    assert repr(row) == "Row(tokens.size=5000, version=3, miss='')"
