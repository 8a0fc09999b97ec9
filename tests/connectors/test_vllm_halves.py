"""The connector's two halves with a little engine: what one saves another one loads, bit by bit, or not at all."""

import threading
import time
from zlib import crc32

import numpy as np
import pytest
from fake_vllm import PAGE, Engine, MLAAttentionSpec, Request, SlidingWindowSpec, spec

from kvstore.connectors import vllm_scheduler
from kvstore.connectors.bridge import Bridge
from kvstore.ids import Shard


@pytest.fixture
def bridge(request, torch):
    made = Bridge(f"memory://{crc32(request.node.name.encode())}?dram=64MiB")
    assert made.wait_connected(30)
    yield made
    made.close()


@pytest.fixture
def leases(bridge):
    """How many there are once nothing is on its way any more."""

    def count():
        ends = time.monotonic() + 10
        while (found := bridge._kv.stats().leases) and time.monotonic() < ends:
            time.sleep(0.01)
        return found

    return count


def called(bridge):
    """What was asked for about sessions is done: calls are made one after the other."""
    bridge.call("wait", lambda kv: None).result(30)


def prompt(count, seed=0):
    return [int(token) for token in np.random.default_rng(seed).integers(0, 900, count)]


ORDERS = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3), "heads outermost": (1, 0, 2, 3)}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_what_one_engine_computed_another_one_has(torch, bridge, leases, order, heads):
    first = Engine(torch, bridge, (spec(torch, heads=heads), (0, 1)), heads=heads, order=order)
    first.run(Request("a", prompt(26)), chunk=10)
    other = Engine(torch, bridge, (spec(torch, heads=heads), (0, 1)), heads=heads)  # its memory lies otherwise
    again = Request("b", prompt(26))
    assert other.load(again) == 24
    assert other.holds(again, 24)
    assert +bridge.counts.blocks == {"saved": 3, "loaded": 3}
    assert leases() == 0


def test_the_latent_of_mla_is_stored_once_for_all_ranks(torch, bridge):
    parts = (spec(torch, MLAAttentionSpec, dim=12), (0, 1))
    first = Engine(torch, bridge, parts, tp=2)
    assert (first.model.namespace.mla_rank, first.model.namespace.mla_rope, first.model.ranks) == (8, 4, 1)
    first.run(Request("a", prompt(16)))
    assert +bridge.counts.blocks == {"saved": 2}
    again = Request("b", prompt(20))
    other = Engine(torch, bridge, parts)
    assert other.load(again) == 16
    assert other.holds(again, 16)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_ranks_and_stages_save_their_parts_under_one_name(torch, bridge, tp, pp):
    parts = (spec(torch, heads=2 // tp), (0, 1))
    first = Engine(torch, bridge, parts, tp=tp, pp=pp)
    first.run(Request("a", prompt(16)))
    assert bridge.counts.blocks["saved"] == 2 * tp * pp
    other, again = Engine(torch, bridge, parts, tp=tp, pp=pp), Request("b", prompt(20))
    assert other.load(again) == 16
    assert other.holds(again, 16)


def test_more_ranks_than_heads_save_each_head_once_and_load_it_all(torch, bridge):
    parts = (spec(torch, heads=1), (0,))
    first = Engine(torch, bridge, parts, tp=4, heads=2)
    assert first.model.ranks == 2
    first.run(Request("a", prompt(16)))
    assert bridge.counts.blocks["saved"] == 2 * 2
    other, again = Engine(torch, bridge, parts, tp=4, heads=2), Request("b", prompt(20))
    assert other.load(again) == 16
    assert other.holds(again, 16)


def test_a_prefix_that_one_rank_lacks_is_not_used(torch, bridge):
    parts = (spec(torch, heads=1), (0, 1))
    first = Engine(torch, bridge, parts, tp=2)
    first.workers[1].half._saves = False  # as if its saves were dropped
    first.run(Request("a", prompt(16)))
    assert Engine(torch, bridge, parts, tp=2).load(Request("b", prompt(20))) == 0


def test_hybrid_models_keep_what_each_group_needs(torch, bridge):
    parts = ((spec(torch), (0, 2)), (spec(torch, SlidingWindowSpec, sliding_window=8), (1, 3)))
    first = Engine(torch, bridge, *parts)
    assert [group.kind for group in first.model.namespace.groups] == ["full", "window"]
    first.run(Request("a", prompt(26)))
    other, again = Engine(torch, bridge, *parts), Request("b", prompt(26))
    again.pages = [[], [0, 0, 0, 0]]  # those behind the window have no place in the engine
    assert other.load(again) == 24
    assert other.holds(again, 24)
    assert {page for cache in other.workers[0].caches.values() for page in [cache[0].abs().sum().item()]} == {0}


@pytest.mark.parametrize("window", [2, 4, 8, 12])
@pytest.mark.parametrize("chunk", [3, 8, 10, 40])
@pytest.mark.parametrize("hasty", [True, False])
def test_blocks_that_a_window_has_left_are_not_mistaken_for_others(torch, bridge, window, chunk, hasty):
    """vLLM gives them to other requests: what is in them is theirs."""
    parts = ((spec(torch), (0,)), (spec(torch, SlidingWindowSpec, sliding_window=window), (1,)))
    engine = Engine(torch, bridge, *parts)
    engine.hasty = hasty
    one, two = Request("a", prompt(30)), Request("b", prompt(27, 7))
    for request in (one, two):
        engine.admit(request)
    while waiting := [each for each in (one, two) if each.num_computed_tokens < each.num_tokens]:
        engine.step([(each, min(chunk, each.num_tokens - each.num_computed_tokens)) for each in waiting])
        engine.until(lambda _: not engine.scheduler._jobs)  # no save is late
    for token in range(20):
        for request in (one, two):
            request.all_token_ids.append(900 + token)
        engine.step([(one, 1), (two, 1)])
        engine.until(lambda _: not engine.scheduler._jobs)
    for request in (one, two):
        engine.finish(request)
    other = Engine(torch, bridge, *parts)
    for request in (one, two):
        again = Request("c" + request.request_id, request.all_token_ids)
        loaded = other.load(again)
        assert other.holds(again, loaded)
        if window >= 8 and not hasty:  # no shorter than a block: all of them are stored
            assert loaded == (len(request.all_token_ids) - 1) // 8 * 8


# --- what is looked up ---


def test_at_least_one_token_is_left_to_compute_and_only_whole_blocks_count(torch, bridge):
    Engine(torch, bridge).run(Request("a", prompt(24)))
    for length, loaded in ((24, 16), (25, 24), (31, 24), (8, 0), (9, 8), (7, 0)):
        assert Engine(torch, bridge).admit(Request("b", prompt(24)[:length] + prompt(max(0, length - 24), 5))) == loaded


def test_what_the_engine_has_itself_is_not_loaded_again(torch, bridge):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    other, again = Engine(torch, bridge), Request("b", prompt(26))
    other.take(again, 12)
    other.compute(again, 0, 12)
    kept = list(again.pages[0])
    assert other.admit(again, local=12) == 12  # half of the second block is there already
    step = other.step().step
    assert step.loads[0].pages[0][:2] == (-1, again.pages[0][3])
    other.until(lambda told: not other.scheduler._tracked["b"].loading)
    assert again.pages[0][:3] == kept
    assert other.holds(again, 24)
    assert other.scheduler.matched(Request("c", prompt(26)), 24) == (0, False)


def test_a_long_prompt_is_named_in_several_steps(torch, bridge, monkeypatch):
    engine, ids = Engine(torch, bridge, (spec(torch), (0, 1))), prompt(60)
    engine.run(Request("a", ids))
    monkeypatch.setattr(vllm_scheduler, "NAMED", 24)
    engine, again = Engine(torch, bridge, (spec(torch), (0, 1))), Request("b", ids)
    named = []
    for _ in range(3):
        assert engine.scheduler.matched(again, 0)[0] is None or len(named) == 2
        named.append(len(engine.scheduler._tracked["b"].chain.links))
    assert named == [3, 6, 7]
    assert engine.load(again) == 56


def test_nothing_of_another_salt_adapter_or_model_is_used(torch, bridge, monkeypatch):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    assert Engine(torch, bridge).admit(Request("b", prompt(26), salt="s")) == 0
    assert Engine(torch, bridge, revision="others").admit(Request("c", prompt(26))) == 0
    assert Engine(torch, bridge).admit(Request("d", prompt(26))) == 24


def test_prompts_of_embeddings_and_those_that_must_be_computed_are_left_alone(torch, bridge):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    for field, value in (("prompt_embeds", object()), ("skip_reading_prefix_cache", True)):
        request = Request("b", prompt(26))
        setattr(request, field, value)
        engine = Engine(torch, bridge)
        assert engine.admit(request) == 0
        assert engine.finish(request) is None


def test_a_request_that_cannot_be_named_goes_on_without(torch, bridge):
    engine, request = Engine(torch, bridge), Request("a", [1, 2, -3, *range(20)], session="s")
    assert engine.admit(request) == 0
    assert engine.scheduler._tracked == {}
    assert engine.scheduler._sessions._running == {}
    request.all_token_ids[2] = 3
    assert engine.step([(request, 23)]).step.saves == ()
    assert engine.finish(request) is None


# --- what is saved ---


def test_prompt_blocks_are_saved_while_the_request_runs(torch, bridge):
    engine, request = Engine(torch, bridge), Request("a", prompt(30))
    engine.admit(request)
    saves = [engine.step([(request, 10)]).step.saves for _ in range(3)]
    assert [len(save.prefixes) // 32 for (save,) in saves] == [1, 1, 1]
    assert engine.step().step.saves == ()


def test_blocks_that_decoding_fills_are_saved_when_wanted(torch, bridge):
    engine = Engine(torch, bridge)
    engine.run(Request("a", prompt(13)), decode=12)
    assert bridge.counts.blocks["saved"] == 3
    engine = Engine(torch, bridge, decode=False)
    engine.run(Request("b", prompt(13, 1)), decode=12)
    assert bridge.counts.blocks["saved"] == 4


def test_only_sessions_or_only_long_prompts_where_that_is_asked_for(torch, bridge):
    engine = Engine(torch, bridge, save="sessions", min_tokens=16)
    engine.run(Request("a", prompt(20)))
    engine.run(Request("b", prompt(12, 1), session="s"))
    assert bridge.counts.blocks["saved"] == 0
    engine.run(Request("c", prompt(20), session="s"))
    assert bridge.counts.blocks["saved"] == 2


def test_what_was_loaded_is_not_saved_again(torch, bridge):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    other = Engine(torch, bridge)
    told = []
    step = other.scheduler.step
    other.scheduler.step = lambda output: told.append(step(output)) or told[-1]
    other.run(Request("b", prompt(26) + prompt(10, 3)))
    (save,) = (save for step in told for save in step.saves)
    assert len(save.prefixes) // 32 == 1
    assert save.tokens.tolist() == [(prompt(26) + prompt(10, 3))[24:32]]


def test_a_finished_request_keeps_its_blocks_until_they_are_saved(torch, bridge, monkeypatch):
    engine, gate, request = Engine(torch, bridge), threading.Event(), Request("a", prompt(16))
    slowly(engine, monkeypatch, gate)
    engine.admit(request)
    engine.step([(request, 16)])
    assert engine.scheduler.finished(request)[0] is True
    assert engine.step().sent == []
    gate.set()
    engine.until(lambda told: told.all_sent == ["a"])
    assert engine.scheduler._tracked == engine.scheduler._jobs == engine.scheduler._being_saved == {}
    assert bridge.counts.blocks["saved"] == 2


def test_a_save_that_hangs_does_not_keep_blocks_for_ever(torch, bridge, monkeypatch):
    monkeypatch.setattr(vllm_scheduler, "HOLD_S", 0.05)
    engine, gate, request = Engine(torch, bridge), threading.Event(), Request("a", prompt(16))
    monkeypatch.setattr(bridge._kv, "put", lambda *_: gate.wait(30))
    engine.admit(request)
    engine.step([(request, 16)])
    assert engine.scheduler.finished(request)[0] is True
    assert engine.until(lambda told: told.all_sent == ["a"])
    gate.set()
    assert engine.scheduler._jobs == {}


def slowly(engine, monkeypatch, gate):
    """Saves of this engine wait for the gate before each block."""
    for worker in engine.workers:
        for pages in worker.half._pages:
            read = pages.read
            monkeypatch.setattr(pages, "read", lambda *arguments, read=read: gate.wait(30) and read(*arguments))


def test_blocks_that_are_given_to_another_request_are_not_read_any_more(torch, bridge, monkeypatch):
    engine, gate, request = Engine(torch, bridge, blocks=9), threading.Event(), Request("a", prompt(16))
    entered = threading.Event()
    pages = engine.workers[0].half._pages[0]
    read = pages.read

    def slow(which, tokens, payload, mark):
        entered.set()
        assert gate.wait(30)
        read(which, tokens, payload, mark)

    monkeypatch.setattr(pages, "read", slow)
    engine.admit(request)
    engine.step([(request, 16)])
    assert entered.wait(30)
    engine.give(request)  # preempted
    request.num_preemptions += 1
    thief = Request("b", prompt(30, 7))
    engine.admit(thief)
    threading.Timer(0.05, gate.set).start()  # the copy of one block ends; the step waits for it
    told = engine.step([(thief, 30)])
    assert told.step.halt == (1,)
    engine.finish(thief)
    request.num_computed_tokens = 0
    assert engine.load(request) in {0, 8}  # what was copied in time
    assert engine.holds(request, request.num_computed_tokens)
    engine.step([(request, 16 - request.num_computed_tokens)])
    engine.finish(request)
    other, again = Engine(torch, bridge), Request("c", prompt(18))
    assert other.load(again) == 16  # offered anew in its second life
    assert other.holds(again, 16)


# --- when things go wrong ---


def broken(bridge, monkeypatch, at):
    """The loads of every engine lose blocks from `at` on."""
    load = bridge.load
    monkeypatch.setattr(bridge, "load", lambda ns, shard, links, place, **more: load(ns, shard, lost(links, at), place, **more))


def lost(links, at):
    return [*links[:at], *(type(link)("0" * 64, link.tokens) for link in links[at:])]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_did_not_arrive_is_computed_and_saved_again(torch, bridge, monkeypatch, leases, at):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    broken(bridge, monkeypatch, at)
    other, again = Engine(torch, bridge), Request("b", prompt(26), session="s")
    assert other.load(again) == 24
    assert again.num_computed_tokens == 8 * at
    assert other.holds(again, 8 * at)
    if not at:
        other.give(again)
        assert other.admit(again) == 0  # it is not asked for over and over
    (gone,) = [news for news in other.scheduler.take_news() if news.gone]
    assert (gone.start, gone.end) == (8 * at, 24)
    told = other.step([(again, 26 - again.num_computed_tokens)]).step
    assert sum(len(save.prefixes) // 32 for save in told.saves) == 3 - at
    other.finish(again)
    assert leases() == 0


def test_with_several_groups_a_failure_is_told_by_request(torch, bridge, monkeypatch):
    parts = ((spec(torch), (0,)), (spec(torch, SlidingWindowSpec, sliding_window=8), (1,)))
    Engine(torch, bridge, *parts).run(Request("a", prompt(26)))
    broken(bridge, monkeypatch, 1)
    other, again = Engine(torch, bridge, *parts), Request("b", prompt(26))
    other.admit(again)
    told = other.until(lambda told: told.all_received == ["b"])
    assert told.lost == {"b"}


def test_an_aborted_load_touches_nothing_and_holds_nothing(torch, bridge, monkeypatch, leases):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    other, again = Engine(torch, bridge), Request("b", prompt(26), session="s")
    gate = threading.Event()
    get = bridge._kv.get
    monkeypatch.setattr(bridge._kv, "get", lambda *arguments, **more: gate.wait(30) and get(*arguments, **more))
    other.admit(again)
    other.step()
    (transfer,) = other.workers[0].half._loading["b"].transfers
    assert other.scheduler.finished(again) == (False, {"kvtier": {"session": "s", "tokens_saved": 24, "version": None}})
    assert other.step().all_received == ["b"]  # at once: nothing more is written
    gate.set()
    assert transfer.wait(30)
    assert all(cache.abs().sum() == 0 for cache in other.workers[0].caches.values())
    assert other.scheduler._tracked == {}
    assert other.scheduler._sessions._running == {}
    assert leases() == 0


def test_a_request_that_never_ran_leaves_its_session_as_it_was(torch, bridge):
    engine = Engine(torch, bridge)
    engine.run(Request("a", prompt(26), session="s"))
    called(bridge)
    waits = Request("b", prompt(10) + prompt(16, 3), session="s")  # it begins as the session does, and goes another way
    assert engine.admit(waits) == 8
    engine.finish(waits)
    never = Request("c", prompt(10) + prompt(16, 3), session="s")
    while engine.scheduler.matched(never, 0)[0] is None:
        pass
    assert engine.finish(never)["kvtier"]["session"] == "s"
    called(bridge)
    assert engine.scheduler._sessions.counts == {"extended": 1}
    assert version(bridge, engine.model, "s").version == 1
    assert engine.scheduler._sessions._running == {}


def test_without_a_node_nothing_is_late_and_nothing_fails(torch, tmp_path):
    bridge = Bridge(f"kvtier+unix://{tmp_path}/nobody.sock")
    engine = Engine(torch, bridge)
    assert engine.run(Request("a", prompt(26), session="s"), decode=10)["kvtier"]["version"] is None
    assert engine.scheduler._tracked == engine.scheduler._jobs == {}
    engine.close()
    bridge.close()


def test_many_requests_that_wait_cost_a_step_no_more_than_one(torch, bridge, monkeypatch):
    """Each is given what the others have left of the time that a step may wait."""
    engine, now, waits = Engine(torch, bridge), [0.0], []

    def poll(look, wait_s):
        waits.append(wait_s)
        now[0] += wait_s

    monkeypatch.setattr(vllm_scheduler.Look, "poll", poll)
    monkeypatch.setattr(vllm_scheduler.time, "monotonic", lambda: now[0])
    for number in range(20):
        assert engine.scheduler.matched(Request(str(number), prompt(20, number)), 0) == (None, False)
    assert sum(waits) <= vllm_scheduler.SOON_S
    engine.step()
    engine.scheduler.matched(Request("next step", prompt(20)), 0)
    assert waits[-1] == vllm_scheduler.SOON_S


def test_told_to_forget_it_neither_looks_nor_saves(torch, bridge):
    Engine(torch, bridge).run(Request("a", prompt(26)))
    engine = Engine(torch, bridge)
    engine.scheduler.stop()
    engine.run(Request("b", prompt(26)))
    assert +bridge.counts.blocks == {"saved": 3}


# --- sessions ---


def version(bridge, model, session):
    return bridge._kv.manifest(session, namespace=model.namespace)


@pytest.mark.parametrize("tp", [1, 2])
def test_turns_become_versions_once_every_rank_has_saved(torch, bridge, tp):
    engine = Engine(torch, bridge, (spec(torch, heads=2 // tp), (0, 1)), tp=tp)
    told = engine.run(Request("a", prompt(20), session="s"))
    assert told["kvtier"]["session"] == "s"
    engine.run(Request("b", prompt(20) + prompt(20, 1), params={"session_id": "s"}), decode=2)
    called(bridge)
    found = version(bridge, engine.model, "s")
    assert (found.version, sum(link.tokens for link in found.blocks)) == (2, 40)
    assert len(found.shards) == tp


def test_the_receipt_says_what_is_acknowledged(torch, bridge):
    engine, request = Engine(torch, bridge), Request("a", prompt(20), session="s")
    engine.admit(request)
    engine.step([(request, 20)])
    tracked = engine.scheduler._tracked["a"]
    engine.until(lambda _: tracked.receipt is not None)
    assert tracked.receipt.result(30).tokens == 16
    request.all_token_ids += [1, 2]
    engine.step([(request, 1)])
    told = engine.finish(request)["kvtier"]
    assert told == {
        "session": "s",
        "tokens_saved": 16,
        "version": 1,
        "lane": "main",
        "tokens": 16,
        "durability": told["durability"],
    }


def test_what_is_over_when_the_engine_ends_is_committed(torch, bridge):
    engine, request = Engine(torch, bridge), Request("a", prompt(20), session="s")
    engine.admit(request)
    engine.step([(request, 20)])
    assert engine.scheduler.finished(request)[0]  # and no step follows, as in a script that ends here
    engine.close()
    assert version(bridge, engine.model, "s").version == 1


def test_a_commit_that_is_under_way_when_the_engine_ends_is_waited_for(torch, bridge):
    engine, begun, go_on = Engine(torch, bridge), threading.Event(), threading.Event()
    bridge.call("slow", lambda _: (begun.set(), go_on.wait(30)))  # calls are made in order: the commit is behind it
    engine.run(Request("a", prompt(20), session="s"))
    assert begun.wait(30)
    assert engine.scheduler._tracked == {}  # that request was over, and its commit has not begun
    threading.Timer(0.2, go_on.set).start()
    engine.close()
    assert version(bridge, engine.model, "s").version == 1


def test_a_node_that_says_nothing_is_not_asked_about_each_of_many_requests_at_the_end(torch, bridge, monkeypatch):
    engine, request = Engine(torch, bridge), Request("a", prompt(20), session="s")
    engine.admit(request)
    engine.step([(request, 20)])
    assert engine.scheduler.finished(request)[0]
    asked = []
    monkeypatch.setattr(bridge, "look", lambda *about: asked.append(about))
    monkeypatch.setattr(vllm_scheduler, "CLOSE_S", 0.0)
    engine.close()
    assert not asked
    assert engine.scheduler._tracked == engine.scheduler._sessions._running == {}


def test_a_request_that_still_runs_when_the_engine_ends_leaves_nothing(torch, bridge, leases):
    engine, request = Engine(torch, bridge), Request("a", prompt(20), session="s")
    engine.admit(request)
    engine.step([(request, 10)])
    engine.close()
    assert engine.scheduler._sessions._running == {}
    assert leases() == 0


def test_a_fork_begins_as_its_parent(torch, bridge):
    engine = Engine(torch, bridge)
    engine.run(Request("a", prompt(20), session="mother"))
    engine.run(Request("b", prompt(20) + prompt(9, 1), session="child", params={"parent_session_id": "mother"}))
    called(bridge)
    family = {bridge._kv.get_session(name, namespace=engine.model.namespace).family for name in ("mother", "child")}
    assert len(family) == 1
    assert engine.scheduler._sessions.counts["forked"] == 1


def test_news_of_what_is_stored(torch, bridge):
    engine = Engine(torch, bridge)
    engine.run(Request("a", prompt(20), session="s"), chunk=10)
    assert [(news.start, news.end, news.session, news.gone) for news in engine.scheduler.take_news()] == [
        (0, 8, "s", False),
        (8, 16, "s", False),
    ]
    assert engine.scheduler.take_news() == []


def test_the_halves_agree_on_shards(torch, bridge):
    engine = Engine(torch, bridge, (spec(torch, heads=1), (0, 1)), tp=2, pp=2)
    mine = [worker.half._shards[0] for worker in engine.workers]
    assert (
        sorted(mine)
        == sorted(engine.scheduler._shards)
        == [Shard(rank=rank, ranks=2, stage=stage, stages=2) for rank in range(2) for stage in range(2)]
    )
    assert PAGE * engine.model.pages[0] == engine.model.namespace.block_tokens
