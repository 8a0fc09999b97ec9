"""StaticCache: restored into one, and committed from one, of which only a part is filled."""

import pytest
from fake_client import FakeClient

from kvstore.connectors.hf import SessionCache, crop
from kvstore.errors import Invalid, Unsupported

B, W, ROOM = 16, 24, 256


@pytest.fixture
def kv():
    return FakeClient()


@pytest.fixture
def static(transformers):
    return lambda model, room=ROOM: transformers.StaticCache(config=model.config, max_cache_len=room)


def kv_of(torch, cache, n):
    return torch.stack([t[0, :, :n] for layer in cache.layers for t in (layer.keys, layer.values)])


@pytest.mark.parametrize("again", ["the same", "another"])
def test_turns_in_a_static_cache_go_on_as_without_a_store(torch, model, kv, prompt, greedy, static, again):
    sessions, cache = SessionCache(model, kv, block_tokens=B), static(model)
    asked, before = prompt(50), 0
    for version in (1, 2, 3):
        past = sessions.restore("s", asked, into=cache)
        assert past.past_key_values is cache
        assert (past.tokens.size, int(cache.get_seq_length())) == (before, before)
        answer = greedy(model, asked, past)
        assert torch.equal(answer, greedy(model, asked))
        receipt = sessions.commit("s", answer, cache)
        before = answer.shape[1] - 1
        assert (receipt.version, receipt.tokens) == (version, before)
        asked = torch.cat([answer, prompt(300)[:, answer.shape[1] : answer.shape[1] + 13]], dim=1)
        if again == "another":
            cache = static(model)


def test_only_the_filled_part_is_stored_and_comes_back_in_either_kind(torch, model, kv, prompt, prefill, static):
    sessions = SessionCache(model, kv, block_tokens=B)
    cache = prefill(model, prompt(77), static(model))
    assert cache.layers[0].keys.shape[2] == ROOM
    assert sessions.commit("s", prompt(80), cache).tokens == 77
    assert [link.tokens for link in kv.puts] == [B] * 4 + [13]
    dynamic = sessions.restore("s").past_key_values
    assert torch.equal(kv_of(torch, dynamic, 77), kv_of(torch, cache, 77))
    assert dynamic.layers[0].keys.shape[2] == 77
    other = sessions.restore("s", into=static(model, 100)).past_key_values
    assert torch.equal(kv_of(torch, other, 77), kv_of(torch, cache, 77))


def test_what_generate_made_itself_is_committed(torch, model, kv, prompt, greedy):
    sessions = SessionCache(model, kv, block_tokens=B)
    made = greedy(model, prompt(40), cache_implementation="static", return_dict_in_generate=True)
    assert sessions.commit("s", made.sequences, made.past_key_values).tokens == 48
    past = sessions.restore("s", made.sequences)
    assert past.tokens.size == 48
    assert torch.equal(greedy(model, made.sequences, past), greedy(model, made.sequences))


@pytest.mark.parametrize("length", [10, W - 1, W, W + 1, 60])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_a_hybrid_static_cache_gets_the_end_of_its_window(torch, make_window_model, kv, prompt, greedy, static, kind, length):
    model = make_window_model(kind, W)
    sessions = SessionCache(model, kv, block_tokens=B)
    past = sessions.restore("s", prompt(length))
    sessions.commit("s", greedy(model, prompt(length), past), past.past_key_values)
    asked = prompt(length + 20)
    past = sessions.restore("s", asked, into=static(model))
    assert past.tokens.size == int(past.past_key_values.get_seq_length()) >= length
    answer = greedy(model, asked, past)
    assert torch.equal(answer, greedy(model, asked))


def test_of_a_hybrid_static_cache_only_what_the_window_still_holds_is_committed(make_window_model, kv, prompt, prefill, static):
    model = make_window_model("gemma3", W)
    sessions = SessionCache(model, kv, block_tokens=B)
    short = prefill(model, prompt(W), static(model))
    assert sessions.commit("s", prompt(W), short).tokens == W
    receipt = sessions.commit("s", prompt(B + W), prefill(model, prompt(B + W)[:, W:], short))
    assert (receipt.tokens, receipt.cut) == (B + W, False)  # the first block is stored; from there on it holds all
    receipt = sessions.commit("s", prompt(100), prefill(model, prompt(100)[:, B + W :], short))
    assert (receipt.tokens, receipt.cut) == (2 * B, True)
    with pytest.raises(Unsupported, match="let go of the first 76 tokens"):
        sessions.commit("other", prompt(101)[:, 1:], prefill(model, prompt(101)[:, 1:], static(model)))


def test_on_a_device_it_is_filled_by_the_same_steps(torch, model, kv, prompt, prefill, greedy, static, monkeypatch):
    from kvstore.connectors import hf_cache  # noqa: PLC0415  it imports torch

    monkeypatch.setattr(hf_cache, "on_host", lambda device: False)
    sessions = SessionCache(model, kv, block_tokens=B)
    sessions.commit("s", prompt(77), prefill(model, prompt(77), static(model)))
    past = sessions.restore("s", prompt(90), into=static(model))
    assert past.tokens.size == 77
    assert torch.equal(greedy(model, prompt(90), past), greedy(model, prompt(90)))


def test_wrong_caches_are_refused_before_anything_is_restored(transformers, model, kv, prompt, prefill, static):
    sessions = SessionCache(model, kv, block_tokens=B)
    sessions.commit("s", prompt(70), prefill(model, prompt(70)))
    with pytest.raises(Invalid, match="has room for 64 tokens, and there are 80"):
        sessions.restore("s", prompt(80), into=static(model, 64))
    with pytest.raises(Invalid, match="has room for 64 tokens, and there are 70"):
        sessions.restore("s", into=static(model, 64))
    with pytest.raises(Unsupported, match="into is a DynamicCache"):
        sessions.restore("s", into=transformers.DynamicCache(config=model.config))
    with pytest.raises(Invalid, match="batch of another size than 1"):
        sessions.restore("s", into=prefill(model, prompt(10).repeat(2, 1), static(model)))
    offloading = transformers.StaticCache(config=model.config, max_cache_len=ROOM, offloading=True)
    with pytest.raises(Unsupported, match="not offloaded"):
        sessions.restore("s", into=offloading)
    with pytest.raises(Unsupported, match="neither quantized nor offloaded"):
        sessions.commit("s", prompt(70), offloading)
    with pytest.raises(Unsupported, match="no longer has what its first"):
        crop(prefill(model, prompt(10), static(model)), 5)
