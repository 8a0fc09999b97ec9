"""Sliding-window layers: stored whole while their window passes, restored as far back as it reaches."""

import pytest
from fake_client import FakeClient

import kvstore
from kvstore.connectors.hf import SessionCache, crop
from kvstore.errors import Unsupported
from kvstore.ids import Group, Shard

B, W = 16, 24


@pytest.fixture
def kv():
    return FakeClient()


@pytest.fixture(params=["gemma3", "mistral"])
def model(request, make_window_model):
    return make_window_model(request.param, W)


@pytest.fixture
def sessions(model, kv):
    return SessionCache(model, kv, block_tokens=B)


def stored(kv, sessions, geometry):
    """The KV of a group's blocks, in the order of the session's chain."""
    (versions,) = kv.sessions.values()
    shard = () if geometry.shard == Shard() else (str(geometry.shard),)
    found = []
    for link in versions[-1]:
        raw = kv.blocks[(sessions.namespace.id, link.prefix_id, *shard)]
        found.append(geometry.read(memoryview(raw), link.tokens)[0])
    return found


def test_the_namespace_says_which_layers_have_which_window(kv, make_model, make_window_model):
    def namespace(model):
        return SessionCache(model, kv, block_tokens=B, revision="1", model_id="m").namespace

    assert namespace(make_model()).groups == (Group(),)
    assert namespace(make_window_model("mistral", W)).groups == (Group(kind="window", window=W, layers=(0, 1)),)
    hybrid = namespace(make_window_model("gemma3", W))
    assert hybrid.groups == (Group(layers=(1, 3)), Group(kind="window", window=W, layers=(0, 2)))
    assert hybrid.id != namespace(make_window_model("gemma3", W + 1)).id
    full = make_window_model("gemma3", W, layer_types=["full_attention"] * 4)
    assert namespace(full).id != hybrid.id


@pytest.mark.parametrize("window", [5, B, W])
@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
@pytest.mark.parametrize("turns", [(20, 40), (70, 90, 150), (300, 320), (5, 6, 200)])
def test_turns_go_on_as_without_a_store(torch, make_window_model, kind, window, kv, prompt, greedy, turns):
    model = make_window_model(kind, window)
    asked, before = torch.empty((1, 0), dtype=torch.long), 0
    for version, length in enumerate(turns, start=1):
        asked = torch.cat([asked, prompt(400)[:, asked.shape[1] : length]], dim=1)
        sessions = SessionCache(model, kv, block_tokens=B)  # another process
        past = sessions.restore("s", asked)
        assert (past.tokens.size, past.past_key_values.get_seq_length(), past.miss) == (before, before, "")
        answer = greedy(model, asked, past)
        assert torch.equal(answer, greedy(model, asked))
        receipt = sessions.commit("s", answer, past.past_key_values)
        before = answer.shape[1] - 1
        assert (receipt.version, receipt.tokens, receipt.cut) == (version, before, False)
        asked = answer


def test_what_is_stored_is_what_a_fresh_prefill_leaves(torch, model, kv, sessions, prompt, prefill):
    """Every token of every layer, also of those that the window has passed long ago."""
    from kvstore.connectors.hf_cache import empty_cache  # noqa: PLC0415  it imports torch

    past = sessions.restore("s", prompt(100))
    sessions.commit("s", prompt(100), prefill(model, prompt(100), past.past_key_values))
    whole = prefill(model, prompt(100), empty_cache(model))
    for geometry in sessions._geometries:
        for number, block in enumerate(stored(kv, sessions, geometry)):
            kept = [whole.layers[layer] for layer in geometry.layers]
            part = slice(number * B, number * B + block.shape[2])
            expected = torch.stack([torch.stack([layer.keys[0, :, part], layer.values[0, :, part]]) for layer in kept])
            assert torch.equal(torch.from_numpy(block.copy()), expected.transpose(2, 3))


@pytest.mark.parametrize("common", [1, 10, W, 47, 48, 49, 110])
def test_a_shorter_prefix_of_a_session_longer_than_the_window(torch, model, sessions, prompt, greedy, common):
    past = sessions.restore("s", prompt(150))
    sessions.commit("s", greedy(model, prompt(150), past), past.past_key_values)
    edited = prompt(170)
    edited[0, common] = (edited[0, common] + 1) % 97
    past = sessions.restore("s", edited)
    assert past.tokens.size == common
    answer = greedy(model, edited, past)
    assert torch.equal(answer, greedy(model, edited))
    assert sessions.commit("s", answer, past.past_key_values).tokens == 178
    shared = sessions.restore("another", edited)
    assert shared.tokens.size == 10 * B
    assert torch.equal(greedy(model, edited, shared), answer)


def test_without_a_prompt_the_whole_session_comes_back(torch, model, sessions, prompt, prefill):
    past = sessions.restore("s", prompt(101))
    sessions.commit("s", prompt(100), prefill(model, prompt(100), past.past_key_values))
    restored = sessions.restore("s")
    assert restored.tokens.tolist() == prompt(100)[0].tolist()
    kept = prefill(model, prompt(100))
    again = prefill(model, prompt(120)[:, 100:], restored.past_key_values)
    for mine, theirs in zip(again.layers, prefill(model, prompt(120)[:, 100:], kept).layers, strict=True):
        n = theirs.keys.shape[2]
        assert torch.allclose(mine.keys[:, :, -n:], theirs.keys, atol=1e-5)


def test_of_a_window_only_its_end_is_read(make_window_model, kv, prompt, greedy):
    model = make_window_model("gemma3", W)
    sessions = SessionCache(model, kv, block_tokens=B)
    past = sessions.restore("s", prompt(200))
    sessions.commit("s", greedy(model, prompt(200), past), past.past_key_values)
    read, get = [], kv.get

    def counting(namespace, shard, links, **rest):
        read.append((shard.group, len(links)))
        return get(namespace, shard, links, **rest)

    kv.get = counting
    assert sessions.restore("s", prompt(200)).tokens.size == 199
    assert kv.staged == ["t0of1.p0of1.g0"]
    assert sum(blocks for group, blocks in read if group == 0) == 13
    assert sum(blocks for group, blocks in read if group == 1) == 3  # 199 - 24 = 175, in block 10; to block 12
    assert kv.leased == 0


def test_a_cache_whose_window_has_passed_is_refused_and_one_that_goes_on_from_a_store_is_cut(model, sessions, prompt, prefill):
    with pytest.raises(Unsupported, match="let go of the first 77 tokens") as refused:
        sessions.commit("s", prompt(100), prefill(model, prompt(100)))
    assert "the cache that restore returns" in refused.value.remedy
    short = prefill(model, prompt(20))
    assert sessions.commit("s", prompt(20), short).tokens == 20  # all of it was there
    receipt = sessions.commit("s", prompt(100), prefill(model, prompt(100)[:, 20:], short))
    assert (receipt.tokens, receipt.cut) == (B, True)  # what a block's end needs is gone; the full one is stored
    assert sessions.restore("s", prompt(100)).tokens.size == B


@pytest.mark.parametrize("missing", range(5, 12))
def test_a_hole_in_a_windows_blocks_costs_a_recomputation(torch, make_window_model, kv, prompt, greedy, missing):
    model = make_window_model("gemma3", W)
    sessions = SessionCache(model, kv, block_tokens=B)
    past = sessions.restore("s", prompt(180))
    sessions.commit("s", greedy(model, prompt(180), past), past.past_key_values)
    (versions,) = kv.sessions.values()
    link = versions[-1][missing]
    del kv.blocks[sessions.namespace.id, link.prefix_id, "t0of1.p0of1.g1"]
    kv.lookup = lambda **asked: FakeClient.lookup(kv, **asked | {"shards": [Shard()]})  # it went after the look-up
    past = sessions.restore("s", prompt(200))
    needed = missing >= (180 - W) // B
    assert (past.tokens.size, past.miss) == ((missing * B, "absent") if needed else (180, ""))
    assert torch.equal(greedy(model, prompt(200), past), greedy(model, prompt(200)))
    assert kv.leased == 0


def test_a_node_that_dies_before_the_window_is_read_costs_a_recomputation(torch, make_window_model, kv, prompt, greedy):
    model = make_window_model("gemma3", W)
    sessions = SessionCache(model, kv, block_tokens=B)
    past = sessions.restore("s", prompt(100))
    sessions.commit("s", greedy(model, prompt(100), past), past.past_key_values)
    get = kv.get

    def dying(namespace, shard, links, **rest):
        if shard.group:
            kv.down = kvstore.errors.Unavailable("the node is down")
        return get(namespace, shard, links, **rest)

    kv.get = dying
    past = sessions.restore("s", prompt(100))
    assert (past.tokens.size, past.past_key_values.get_seq_length(), past.miss) == (0, 0, "the node is down")
    assert torch.equal(greedy(model, prompt(100), past), greedy(model, prompt(100)))


def test_cropping_a_restored_cache_is_right_or_refused(torch, model, sessions, prompt, prefill, greedy):
    past = sessions.restore("s", prompt(101))
    sessions.commit("s", prompt(100), prefill(model, prompt(100), past.past_key_values))
    restored = sessions.restore("s")
    crop(restored.past_key_values, 99)
    assert torch.equal(greedy(model, prompt(110), restored), greedy(model, prompt(110)))
    restored = sessions.restore("s")
    if len(sessions.namespace.groups) > 1:  # where all layers slide, all of them were read
        with pytest.raises(Unsupported, match="no longer has what its first"):
            crop(restored.past_key_values, 50)
        assert restored.past_key_values.get_seq_length() == 100
    crop(restored.past_key_values, 0)
    assert torch.equal(greedy(model, prompt(110), restored), greedy(model, prompt(110)))


def test_compute_or_load_completes_the_window(torch, make_window_model, kv, prompt, greedy):
    from kvstore.client.choice import Choice  # noqa: PLC0415  beside what it is for

    model, choice = make_window_model("gemma3", W), Choice()
    sessions = SessionCache(model, kv, block_tokens=B, compute_or_load=choice)
    sessions._choosing.passes.remove()
    for tokens in (100, 200):
        choice.observe_compute(0, tokens, tokens * 1.0)  # so slow a model that this machine is never too slow
    past = sessions.restore("s", prompt(150))
    sessions.commit("s", greedy(model, prompt(150), past), past.past_key_values)
    past = sessions.restore("s", prompt(170))
    assert past.tokens.size == 150
    assert torch.equal(greedy(model, prompt(170), past), greedy(model, prompt(170)))


def test_on_a_real_node(torch, model, prompt, greedy, root):
    with kvstore.open_sync(f"memory://{root}") as kv:
        sessions = SessionCache(model, kv, block_tokens=B)
        past = sessions.restore("s", prompt(100))
        answer = greedy(model, prompt(100), past)
        assert sessions.commit("s", answer, past.past_key_values, durability="bucket").tokens == 108
        again = SessionCache(model, kv, block_tokens=B)
        longer = torch.cat([answer, prompt(130)[:, 109:]], dim=1)
        past = again.restore("s", longer)
        assert (past.tokens.size, past.miss) == (108, "")
        assert torch.equal(greedy(model, longer, past), greedy(model, longer))
        assert again.reusable(longer) == 6 * B
        assert again.fork("s", "f").tokens == 108
        assert again.rewind("s", tokens=50).tokens == 48
        assert again.restore("s", longer).tokens.size == 48
    with kvstore.open_sync(f"memory://{root}") as kv:  # another node: everything comes out of the bucket
        again = SessionCache(model, kv, block_tokens=B)
        past = again.restore("f", longer)
        assert (past.tokens.size, past.miss) == (108, "")
        assert set(kv.wait(past.restore_id).by_tier) == {"bucket"}
        assert torch.equal(greedy(model, longer, past), greedy(model, longer))


def test_what_attends_otherwise_is_refused(make_window_model, kv):
    with pytest.raises(Unsupported, match="chunked attention"):
        SessionCache(make_window_model("mistral", None, attention_chunk_size=W), kv)
    with pytest.raises(Unsupported, match="depends on what follows it"):
        SessionCache(make_window_model("gemma3", W, use_bidirectional_attention=True), kv)
