"""Compute or load in SessionCache: the model's speed is seen from outside, and what is not worth loading is left to it."""

import gc

import pytest
from fake_client import FakeClient

import kvstore
from kvstore.client.choice import Choice
from kvstore.connectors.hf import SessionCache

B = 16
TOKEN_S = 1e-3  # a slow model: 16 tokens take 16 ms


class Now:
    t = 1000.0

    def __call__(self):
        return self.t


class Slow(FakeClient):
    """Blocks behind the first `near` of every chain take `seconds` each to come."""

    def __init__(self, now):
        super().__init__()
        self.now, self.seconds, self.asked = now, 0.0, []

    def get(self, namespace, shard, links, *, deadline_ms=0):
        order = [link.prefix_id for link in self.puts]
        far = [link for link in links if self.near is not None and order.index(link.prefix_id) >= self.near]
        self.asked.append((len(links), deadline_ms))
        ready = len(far)
        if far and self.seconds:
            ready = min(len(far), int(deadline_ms / 1000 / self.seconds))
            self.now.t += min(deadline_ms / 1000, self.seconds * len(far))
        blocks = super().get(namespace, shard, links[: len(links) - len(far) + ready])
        blocks.miss = blocks.miss or ("timeout" if ready < len(far) else "")
        return blocks


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def kv(now):
    return Slow(now)


@pytest.fixture
def choice(now):
    return Choice(monotonic=now)


@pytest.fixture
def sessions(model, kv, choice, prompt, prefill):
    sessions = SessionCache(model, kv, block_tokens=B, compute_or_load=choice)
    sessions._choosing.passes.remove()  # this machine's speed is another one every time
    sessions.commit("s", prompt(10 * B), prefill(model, prompt(10 * B)))
    return sessions


def told(choice):
    for tokens in (100, 200):
        choice.observe_compute(0, tokens, tokens * TOKEN_S)


def delivered(restored):
    assert restored.tokens.size == restored.past_key_values.get_seq_length()
    return restored.tokens.size, restored.miss


def test_before_the_models_speed_is_known_all_is_loaded(kv, sessions, prompt):
    assert delivered(sessions.restore("s", prompt(12 * B))) == (10 * B, "")
    assert kv.restores[-1] == ("dram", "interactive")


def test_what_is_near_is_loaded_and_what_is_far_computed(torch, model, kv, choice, sessions, prompt, prefill):
    told(choice)
    kv.near, kv.seconds = 6, 1.0
    restored = sessions.restore("s", prompt(12 * B))
    assert delivered(restored) == (6 * B, "compute")
    assert restored.version == 1
    assert kv.restores[-1] == ("dram", "speculative")  # the rest comes behind the computing
    assert kv.leased == 0
    whole = prefill(model, prompt(12 * B))
    again = prefill(model, prompt(12 * B)[:, 6 * B :], restored.past_key_values)
    for mine, theirs in zip(again.layers, whole.layers, strict=True):
        assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
    assert delivered(sessions.reuse(prompt(12 * B))) == (6 * B, "compute")


def test_a_far_tier_is_tried_for_less_than_a_twentieth_and_then_known(now, kv, choice, sessions, prompt):
    told(choice)
    kv.near, kv.seconds = 0, 1.0
    began = now.t
    assert delivered(sessions.restore("s", prompt(12 * B))) == (0, "compute")
    assert 0 < now.t - began <= 0.05 * 12 * B * TOKEN_S
    tried, began = len(kv.asked), now.t
    assert delivered(sessions.restore("s", prompt(12 * B))) == (0, "compute")
    assert choice.costs.load("bucket", 1 << 20) > 1  # from the restore that went on behind the first turn
    assert (len(kv.asked), now.t) == (tried, began)


def test_a_far_tier_that_is_fast_is_loaded(kv, choice, sessions, prompt):
    told(choice)
    kv.near, kv.seconds = 0, 0.001
    assert delivered(sessions.restore("s", prompt(12 * B))) == (10 * B, "")
    assert kv.restores == []  # all is here
    assert kv.asked[0][0] == 1
    assert choice.saved > 0


def test_blocks_that_come_in_part_are_used(kv, choice, sessions, prompt):
    told(choice)
    choice.observe_load("bucket", 1 << 20, 1e-4)  # it was much faster than it is
    kv.near, kv.seconds = 0, 0.003
    assert delivered(sessions.restore("s", prompt(12 * B))) == (10 * B, "")
    first, second = kv.asked[0][0], kv.asked[1][0]
    assert first == 10
    assert 0 < second < 10


def test_without_a_prompt_nothing_can_be_computed(kv, choice, sessions):
    told(choice)
    kv.near, kv.seconds = 0, 0.1
    assert delivered(sessions.restore("s")) == (10 * B, "")


def test_damage_and_death_are_told_as_ever(kv, choice, sessions, prompt):
    told(choice)
    first, third = ((sessions.namespace.id, kv.puts[n].prefix_id) for n in (0, 2))
    kept, kv.blocks[third] = kv.blocks[third], kv.blocks[first]
    assert delivered(sessions.restore("s", prompt(12 * B))) == (2 * B, "corrupt")
    del kv.blocks[third]
    assert delivered(sessions.restore("s", prompt(12 * B))) == (2 * B, "absent")
    kv.blocks[third], kv.dies_while_read = kept, True
    assert delivered(sessions.restore("s", prompt(12 * B))) == (0, "unavailable")
    assert kv.leased == 0


def test_a_real_node_tells_where_blocks_are_and_lends_them(model, prompt, prefill):
    choice = Choice()
    with kvstore.open_sync("memory://hf-choice") as kv:
        sessions = SessionCache(model, kv, block_tokens=B, compute_or_load=choice)
        sessions.commit("s", prompt(10 * B), prefill(model, prompt(10 * B)), durability="bucket")
        for tokens in (100, 200):  # so slow a model that this machine is never too slow
            choice.observe_compute(0, tokens, tokens * 1.0)
        restored = sessions.restore("s", prompt(12 * B))
        assert delivered(restored) == (10 * B, "")
        assert restored.version == 1
        assert choice.costs.load("dram", 1 << 20) is not None
        assert delivered(sessions.restore("another", prompt(12 * B))) == (10 * B, "")


def test_the_models_own_passes_are_timed_and_steps_of_decoding_are_not(torch, make_model, kv, prompt):
    model, seen = make_model(), []
    choice = Choice()
    choice.observe_compute = lambda start, tokens, seconds: seen.append((start, tokens, seconds > 0))
    sessions = SessionCache(model, kv, block_tokens=B, compute_or_load=choice)
    answer = model.generate(prompt(50), max_new_tokens=20, do_sample=False)
    assert seen == [(0, 50, True)]
    past = model(answer[:, :30]).past_key_values
    model(answer[:, 30:60], past_key_values=past)
    assert seen[1:] == [(0, 30, True), (30, 30, True)]
    model(prompt(40).repeat(2, 1))  # several sequences are another speed
    assert len(seen) == 3
    sessions.commit("s", answer[:, :60], past)
    model.generate(answer, **sessions.restore("s", answer[:, :45]).cache, max_new_tokens=2, do_sample=False)
    assert seen[3:] == [(44, 26, True)]
    del sessions
    gc.collect()
    model(prompt(40))
    assert len(seen) == 4
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
