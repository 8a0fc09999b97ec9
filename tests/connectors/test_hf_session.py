"""SessionCache against a client without a node: what is delivered, what is published, and what happens under faults."""

import subprocess
import sys
import time

import numpy as np
import pytest
from fake_client import FakeClient

from kvstore.connectors.hf import SessionCache, crop
from kvstore.errors import Conflict, Gone, Invalid, NotFound, Overloaded, Unavailable, Unsupported

B = 16


@pytest.fixture
def kv():
    return FakeClient()


@pytest.fixture
def sessions(model, kv):
    return SessionCache(model, kv, block_tokens=B)


def kv_of(torch, cache, start=0, stop=None):
    """All K and V of a cache, one tensor."""
    return torch.stack([t[0, :, start:stop] for layer in cache.layers for t in (layer.keys, layer.values)])


@pytest.mark.parametrize("n", [1, B - 1, B, B + 1, 5 * B, 5 * B + 7])
def test_a_session_is_restored_bit_for_bit_to_its_last_token(torch, model, sessions, prompt, prefill, n):
    cache = prefill(model, prompt(n))
    receipt = sessions.commit("s", prompt(n), cache)
    restored = sessions.restore("s")
    assert (receipt.version, receipt.tokens) == (1, n)
    assert restored.tokens.tolist() == prompt(n)[0].tolist()
    assert restored.past_key_values.get_seq_length() == n
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_two_byte_dtypes_keep_their_bits(torch, make_model, kv, prompt, prefill, dtype):
    model = make_model(dtype=dtype)
    sessions = SessionCache(model, kv, block_tokens=B)
    cache = prefill(model, prompt(3 * B + 1))
    sessions.commit("s", prompt(3 * B + 1), cache)
    restored = sessions.restore("s").past_key_values
    assert restored.layers[0].keys.dtype == getattr(torch, dtype)
    assert torch.equal(kv_of(torch, restored), kv_of(torch, cache))


def test_the_next_turn_has_the_logits_of_a_cache_that_was_never_stored(torch, model, sessions, prompt, prefill):
    ids = prompt(70)
    cache = prefill(model, ids[:, :60])
    sessions.commit("s", ids[:, :60], cache)
    restored = sessions.restore("s", ids)
    with torch.inference_mode():
        kept = model(ids[:, 60:], past_key_values=cache).logits
        back = model(ids[:, 60:], past_key_values=restored.past_key_values).logits
    assert torch.equal(kept, back)


def test_generate_continues_as_without_a_store(torch, model, kv, sessions, prompt):
    one, more = prompt(50), prompt(58)[:, 50:]
    settings = {"max_new_tokens": 9, "do_sample": False}
    first = sessions.restore("s", one)
    answer = model.generate(one, **first.cache, **settings)
    receipt = sessions.commit("s", answer, first.past_key_values)
    assert receipt.tokens == 58  # the 59th token was sampled and never computed

    two = torch.cat([answer, more], dim=1)
    again = SessionCache(model, kv, block_tokens=B)  # another process
    second = again.restore("s", two)
    assert second.tokens.size == 58
    continued = model.generate(two, **second.cache, **settings)
    assert torch.equal(continued, model.generate(two, **settings))
    assert again.commit("s", continued, second.past_key_values).version == 2


def test_generate_takes_the_cache_under_its_own_name_for_it_and_warns_of_nothing(model, sessions, prompt, recwarn):
    past = sessions.restore("s", prompt(40))
    answer = model.generate(prompt(40), **past.cache, max_new_tokens=3, do_sample=False)
    assert [str(warning.message) for warning in recwarn if warning.category is FutureWarning] == []
    assert sessions.commit("s", answer, past.past_key_values).tokens == 42


def test_b25_a_stored_prompt_leaves_one_token_to_compute(torch, model, sessions, prompt, prefill):
    for n in (2 * B, 2 * B + 5):
        ids = prompt(n)
        sessions.commit(f"s{n}", ids, prefill(model, ids))
        restored = sessions.restore(f"s{n}", ids)
        assert restored.tokens.size == restored.past_key_values.get_seq_length() == n - 1
        settings = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(model.generate(ids, **restored.cache, **settings), model.generate(ids, **settings))
    exact = prompt(2 * B)
    assert sessions.reusable(exact) == 2 * B - 1 == sessions.reuse(exact).past_key_values.get_seq_length()
    assert sessions.reusable(prompt(1)) == 0 == sessions.reuse(prompt(1)).past_key_values.get_seq_length()


def test_b26_a_hole_ends_what_is_reused(model, kv, sessions, prompt, prefill):
    ids = prompt(3 * B + 1)
    sessions.commit("s", ids, prefill(model, ids))
    blocks = dict(kv.blocks)
    order = [link.prefix_id for link in kv.puts]
    for missing, expected in ((0, 0), (1, B), (2, 2 * B)):
        kv.blocks = {key: raw for key, raw in blocks.items() if key[1] != order[missing]}
        assert sessions.reusable(ids) == expected
        assert sessions.reuse(ids).past_key_values.get_seq_length() == expected
        short = sessions.restore("s", ids)
        assert (short.past_key_values.get_seq_length(), short.tokens.size, short.miss) == (expected, expected, "absent")
    kv.blocks = blocks
    assert sessions.reusable(ids) == 3 * B == sessions.reuse(ids).tokens.size


def test_b24_whole_blocks_only_unless_exact(model, kv, sessions, prompt, prefill):
    ids = prompt(4 * B + 1)
    cache = prefill(model, ids[:, : 4 * B])
    sessions.commit("s", ids, cache, exact=False)
    cache = prefill(model, ids[:, 4 * B :], cache)
    assert sessions.commit("s", ids, cache, exact=False).tokens == 4 * B
    assert [link.tokens for link in kv.puts] == [B] * 4
    assert sessions.commit("s", ids, cache).tokens == 4 * B + 1
    assert [link.tokens for link in kv.puts] == [B] * 4 + [1]


def test_a_turn_publishes_only_its_new_blocks(model, kv, sessions, prompt, prefill):
    ids = prompt(5 * B)
    sessions.commit("s", ids, prefill(model, ids[:, : 3 * B + 4]))
    kv.puts.clear()
    sessions.commit("s", ids, prefill(model, ids))
    assert [link.tokens for link in kv.puts] == [B, B]  # the partial block was superseded, three full ones were known


def test_b28_trimming_a_restored_cache_changes_nothing_stored(torch, model, kv, sessions, prompt, prefill):
    ids = prompt(3)
    sessions.commit("s", ids, prefill(model, ids))
    (key,) = kv.blocks
    before = bytes(kv.blocks[key])
    for keep in (0, -2):
        cache = sessions.restore("s").past_key_values
        assert cache.get_seq_length() == 3
        crop(cache, keep)
        assert cache.get_seq_length() == 0
        assert torch.equal(kv_of(torch, prefill(model, ids, cache)), kv_of(torch, prefill(model, ids)))
    for keep in (3, 10):
        cache = sessions.restore("s").past_key_values
        crop(cache, keep)
        assert cache.get_seq_length() == 3
    sessions.restore("s").past_key_values.layers[0].keys.zero_()
    assert bytes(kv.blocks[key]) == before
    assert torch.equal(kv_of(torch, sessions.restore("s").past_key_values), kv_of(torch, prefill(model, ids)))


def test_an_edited_continuation_keeps_what_is_common_within_a_block(torch, model, sessions, prompt, prefill):
    ids = prompt(4 * B)
    cache = prefill(model, ids)
    sessions.commit("s", ids, cache)
    edited = ids.clone()
    edited[0, 2 * B + 5] = (edited[0, 2 * B + 5] + 1) % 97
    restored = sessions.restore("s", edited)
    assert restored.tokens.size == 2 * B + 5
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache, stop=2 * B + 5))
    receipt = sessions.commit("s", edited, prefill(model, edited))
    assert receipt.version == 2
    assert sessions.restore("s").tokens.tolist() == edited[0].tolist()
    assert sessions.restore("s", version=1).tokens.tolist() == ids[0].tolist()


def test_a_new_session_shares_the_blocks_of_another(model, sessions, prompt, prefill):
    sessions.commit("a", prompt(40), prefill(model, prompt(40)))
    restored = sessions.restore("b", prompt(60))
    assert (restored.tokens.size, restored.version) == (2 * B, 0)
    assert sessions.commit("b", prompt(60), prefill(model, prompt(60))).version == 1


def test_forks_and_rewinds_continue_from_their_own_version(model, sessions, prompt, prefill):
    ids = prompt(80)
    sessions.commit("s", ids, prefill(model, ids[:, :40]))
    sessions.commit("s", ids, prefill(model, ids[:, :70]))
    assert sessions.fork("s", "f", version=1).tokens == 40
    assert sessions.restore("f").tokens.size == 40
    assert sessions.commit("f", ids, prefill(model, ids[:, :50])).version == 2
    assert sessions.rewind("s", tokens=2 * B + 3).tokens == 2 * B
    assert sessions.restore("s", ids).tokens.size == 2 * B
    assert sessions.commit("s", ids, prefill(model, ids)).version == 4


def test_somebody_else_committed_meanwhile(model, kv, sessions, prompt, prefill):
    other = SessionCache(model, kv, block_tokens=B)
    sessions.commit("s", prompt(20), prefill(model, prompt(20)))
    with pytest.raises(Conflict):
        other.commit("s", prompt(30), prefill(model, prompt(30)))  # it never saw version 1
    assert other.restore("s", prompt(30)).version == 1
    assert other.commit("s", prompt(30), prefill(model, prompt(30))).version == 2
    with pytest.raises(Conflict):
        sessions.commit("s", prompt(40), prefill(model, prompt(40)))
    assert sessions.restore("s").tokens.size == 30
    assert sessions.commit("s", prompt(40), prefill(model, prompt(40))).version == 3


def test_i4_a_session_that_was_made_again_meanwhile_is_left_alone(model, kv, sessions, prompt, prefill):
    sessions.commit("s", prompt(20), prefill(model, prompt(20)))
    kv.replace("s", sessions.namespace, [[]])
    with pytest.raises(Gone):
        sessions.commit("s", prompt(30), prefill(model, prompt(30)))
    assert kv.sessions["s", sessions.namespace.id] == [[]]


def test_b18_other_weights_dtype_or_rope_share_nothing(torch, make_model, kv, prompt, prefill):
    def hits(model, **settings):
        return SessionCache(model, kv, block_tokens=B, **settings).reusable(prompt(40))

    model = make_model(1)
    SessionCache(model, kv, block_tokens=B).commit("s", prompt(40), prefill(model, prompt(40)))
    assert hits(make_model(1)) == 2 * B
    assert hits(make_model(2)) == 0
    assert hits(make_model(1, dtype="bfloat16")) == 0
    assert hits(make_model(1, rope_parameters={"rope_type": "default", "rope_theta": 5e5})) == 0
    assert hits(make_model(1), tenant="b") == 0
    assert hits(make_model(1), revision="2") == 0
    touched = make_model(1)
    with torch.no_grad():
        touched.model.layers[0].self_attn.k_proj.weight.mul_(1.001)
    assert hits(touched) == 0


def test_a_store_in_trouble_costs_a_recomputation(model, kv, sessions, prompt, prefill):
    sessions.commit("s", prompt(40), prefill(model, prompt(40)))
    for error in (Unavailable("the node is down"), Overloaded("too many restores")):
        kv.down = error
        restored = sessions.restore("s", prompt(40))
        assert (restored.tokens.size, restored.past_key_values.get_seq_length()) == (0, 0)
        assert error.message in restored.miss
        assert sessions.reusable(prompt(40)) == 0 == sessions.reuse(prompt(40)).tokens.size
        with pytest.raises(type(error)):
            sessions.restore("s")
    kv.down = None
    with pytest.raises(NotFound):
        sessions.restore("nobody")


def test_b45_what_is_reported_is_what_is_delivered(torch, model, kv, sessions, prompt, prefill):
    cache = prefill(model, prompt(4 * B))
    sessions.commit("s", prompt(4 * B), cache)
    del kv.blocks[sessions.namespace.id, kv.puts[2].prefix_id]  # not uploaded yet, or gone again
    restored = sessions.restore("s")
    assert restored.tokens.size == restored.past_key_values.get_seq_length() == 2 * B
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache, stop=2 * B))


def test_a_node_that_dies_while_it_is_read_delivers_nothing(model, kv, sessions, prompt, prefill):
    sessions.commit("s", prompt(40), prefill(model, prompt(40)))
    kv.dies_while_read = True
    restored = sessions.restore("s")
    assert (restored.tokens.size, restored.past_key_values.get_seq_length(), restored.miss) == (0, 0, "unavailable")
    assert kv.leased == 0


def test_tokens_that_a_name_does_not_stand_for_are_a_miss(model, kv, sessions, prompt, prefill):
    sessions.commit("s", prompt(40), prefill(model, prompt(40)))
    first, second = (sessions.namespace.id, kv.puts[0].prefix_id), (sessions.namespace.id, kv.puts[1].prefix_id)
    kv.blocks[second] = kv.blocks[first]
    restored = sessions.restore("s")
    assert (restored.tokens.size, restored.miss) == (B, "corrupt")


def test_b44_no_lease_is_left(model, kv, sessions, prompt, prefill):
    sessions.commit("s", prompt(90), prefill(model, prompt(90)))
    for _ in range(20):
        sessions.restore("s", prompt(60))
    assert kv.leased == 0


@pytest.mark.parametrize(("near", "most"), [(True, 1), (False, 3)])
def test_long_sessions_are_read_in_windows(torch, model, kv, sessions, prompt, prefill, monkeypatch, near, most):
    for name, value in (("NEAR", 1), ("FAR", 1), ("REQUESTS", 2)):
        monkeypatch.setattr(f"kvstore.connectors.arrivals.{name}", value)
    cache = prefill(model, prompt(90))
    sessions.commit("s", prompt(90), cache)
    seen = []

    def get(*args, **settings):
        blocks = FakeClient.get(kv, *args, **settings)
        seen.append((len(blocks), kv.leased))
        return blocks

    kv.get = get
    if not near:
        kv.lookup = lambda **asked: FakeClient.lookup(kv, **asked | {"prefix_ids": []})
    assert torch.equal(kv_of(torch, sessions.restore("s").past_key_values), kv_of(torch, cache))
    assert [count for count, _ in seen] == [1] * 6
    assert max(leased for _, leased in seen) <= most
    assert kv.leased == 0


@pytest.mark.parametrize("near", [0, 1, 2, 3])
def test_a_hole_ends_it_and_what_was_asked_for_behind_it_goes_back(torch, model, kv, sessions, prompt, prefill, monkeypatch, near):
    monkeypatch.setattr("kvstore.connectors.arrivals.FAR", 1)
    cache = prefill(model, prompt(90))
    sessions.commit("s", prompt(90), cache)
    del kv.blocks[sessions.namespace.id, kv.puts[2].prefix_id]
    kv.lookup = lambda **asked: FakeClient.lookup(kv, **asked | {"prefix_ids": asked["prefix_ids"][:near]})
    restored = sessions.restore("s")
    assert (restored.tokens.size, restored.miss) == (2 * B, "absent")
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache)[:, :, : 2 * B])
    ends = time.monotonic() + 10
    while kv.leased and time.monotonic() < ends:
        time.sleep(0.01)
    assert kv.leased == 0


def test_dropped_blocks_are_offered_again(model, kv, sessions, prompt, prefill, monkeypatch):
    pauses = []
    monkeypatch.setattr("kvstore.connectors.hf_store.time.sleep", pauses.append)
    kv.refuse_puts = 2
    receipt = sessions.commit("s", prompt(3 * B), prefill(model, prompt(3 * B)))
    assert (receipt.tokens, receipt.cut, len(pauses)) == (3 * B, False, 1)
    assert [link.prefix_id for link in kv.puts[3:]] == [link.prefix_id for link in kv.puts[:2]]
    assert sessions.restore("s").tokens.tolist() == prompt(3 * B)[0].tolist()


def test_a_node_that_takes_no_more_commits_the_beginning(model, kv, sessions, prompt, prefill, monkeypatch):
    monkeypatch.setattr("kvstore.connectors.hf_store.time.sleep", lambda _: None)
    sessions.commit("s", prompt(2 * B), prefill(model, prompt(2 * B)))
    kv.refuse_puts = 1000
    receipt = sessions.commit("s", prompt(4 * B), prefill(model, prompt(4 * B)))
    assert (receipt.tokens, receipt.cut) == (2 * B, True)
    with pytest.raises(Overloaded):
        sessions.commit("other", prompt(80)[:, 5:], prefill(model, prompt(80)[:, 5:]))


@pytest.mark.parametrize("how", ["outcome_unknown", "promise_pending"])
def test_a_commit_whose_answer_is_lost_lands_once(model, kv, sessions, prompt, prefill, how):
    kv.lost_answers, kv.lost_how = 1, how
    assert sessions.commit("s", prompt(40), prefill(model, prompt(40))).version == 1
    kv.lost_answers = 2
    with pytest.raises(Unavailable, match="did not answer"):
        sessions.commit("s", prompt(50), prefill(model, prompt(50)))
    assert len(kv.sessions["s", sessions.namespace.id]) == 2


def test_wrong_calls_are_refused(torch, model, sessions, prompt, prefill):
    cache = prefill(model, prompt(20))
    with pytest.raises(Invalid, match="holds 20 tokens, and input_ids only 19"):
        sessions.commit("s", prompt(19), cache)
    with pytest.raises(Invalid, match="2 sequences"):
        sessions.restore("s", prompt(20).repeat(2, 1))
    with pytest.raises(Invalid, match="2 layers of"):
        sessions.commit("s", prompt(20), prefill(model, prompt(20).repeat(2, 1)))
    with pytest.raises(Invalid, match="a full block has 16"):
        sessions.commit("s", prompt(20), prefill(model, prompt(9)), exact=False)
    with pytest.raises(Invalid, match="holds 0 tokens"):
        sessions.commit("s", prompt(20), type(cache)(config=model.config))


def test_caches_that_cannot_be_stored_are_refused_at_once(transformers, make_model, model, kv, sessions, prompt):
    linear = make_model()
    linear.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(Unsupported, match="layer 1 of this model keeps a LinearAttentionLayer"):
        SessionCache(linear, kv)
    quantized = type("QuantizedCache", (), {"layers": [type("QuantizedLayer", (transformers.cache_utils.DynamicLayer,), {})()]})
    with pytest.raises(Unsupported, match="a QuantizedCache of QuantizedLayer"):
        sessions.commit("s", prompt(20), quantized())
    with pytest.raises(Unsupported, match="a dict of nothing"):
        sessions.commit("s", prompt(20), {})
    scaled = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(Unsupported, match="RoPE of type 'dynamic'"):
        SessionCache(make_model(rope_parameters=scaled), kv)


def test_the_same_model_in_another_folder_is_the_same_namespace(transformers, model, kv, tmp_path):
    names = []
    for folder in (tmp_path / "a" / "tiny", tmp_path / "b" / "tiny"):
        model.save_pretrained(folder)
        names.append(SessionCache(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), kv).namespace)
    assert names[0] == names[1]
    assert names[0].model == "tiny"


def test_tokens_come_in_any_flat_form(model, sessions, prompt, prefill):
    ids = prompt(20)
    sessions.commit("s", ids[0].tolist(), prefill(model, ids))
    for form in (ids, ids[0], ids[0].tolist(), ids[0].numpy(), ids.numpy(), np.asarray(ids[0].tolist(), dtype=np.uint32)):
        assert sessions.reusable(form) == B
        assert sessions.restore("s", form).tokens.size == 19


def test_importing_the_connector_imports_no_torch():
    code = (
        "import sys, kvstore.connectors.hf; "
        "print(sorted({'torch', 'transformers', 'aiobotocore', 'obstore', 'aiohttp'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert shown.stdout.strip() == "[]"
