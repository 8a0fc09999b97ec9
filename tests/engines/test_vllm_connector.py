"""vLLM with KVTierConnector, by configuration alone: what one process computed another one has; what breaks changes no output."""

import statistics
from contextlib import contextmanager

import msgspec
import pytest
import zmq

import kvstore

TOKENS, WHOLE = 1500, 1280  # five blocks of 256, and a rest


def connector(url, **extra):
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, **extra},
    }


def of_session(name, **more):
    return {"extra_args": {"kv_transfer_params": {"session_id": name, **more}}}


@contextmanager
def listening(endpoint):
    """Collects the events of an engine: `read()` gives the maps or arrays that came since."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"kv")

    def read():
        events = []
        while socket.poll(300):
            _, _, payload = socket.recv_multipart()
            events += msgspec.msgpack.decode(payload)[1]
        return events

    yield read
    context.destroy(linger=0)


def stored_events(events):
    """(medium, owner, tokens) of each `BlockStored`; this version of vLLM sends maps."""
    found = [event for event in events if event["type"] == "BlockStored"]
    return [(event["medium"], event.get("ownership"), len(event["token_ids"])) for event in found]


def key_of(store, root, url, session, block):
    """The key in the bucket of a session's block."""
    with kvstore.open_sync(url) as kv:
        (found,) = kv.list_sessions(prefix=session).sessions
        link = kv.manifest(session, namespace=found.namespace).blocks[block]
    (key,) = (key for key in store.blocks(root) if link.prefix_id in key)
    return key


def in_time(engine, ids, **sampling):
    """The answer to a prompt whose look-up was answered in time: on a busy machine one may be late, which is a miss."""
    for _ in range(5):
        late = engine.call("vllm_calls:counts")["looks"].get("late", 0)
        answer = engine.generate(ids, **sampling)[0]
        if engine.call("vllm_calls:counts")["looks"].get("late", 0) == late:
            return answer
        engine.call("vllm_calls:settle")
        engine.forget()
    pytest.fail("five look-ups were late")


def test_a_prefix_outlives_its_process_and_the_nodes_memory_and_disk(engine, node, store, root, prompt, ttft, tmp_path):
    ids, damaged, third = prompt(TOKENS), prompt(TOKENS, at=5000), prompt(TOKENS, at=10_000)
    with listening(endpoint := f"ipc://{tmp_path}/events") as read_events:
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint, "topic": "kv"}
        first = engine("vllm-prefills", connector=connector(node.url), kv_events_config=events)
        cold = first.generate(ids, **of_session("one"))[0]
        cold_damaged = first.generate(damaged, **of_session("two"))[0]
        cold_third = first.generate(third, max_tokens=2)[0]
        assert [each.cached for each in (cold, cold_damaged, cold_third)] == [0, 0, 0]
        said = read_events()
    assert ("STORAGE", "kvtier", WHOLE) in stored_events(said)
    assert any(medium == "GPU" for medium, _, _ in stored_events(said))  # the engine's own, as before
    receipt = cold.kv_transfer_params["kvtier"]
    assert receipt["session"] == "one"
    assert receipt["tokens_saved"] in range(0, WHOLE + 1, 256)  # what was acknowledged by then
    longer = ids + cold.tokens + prompt(400, at=20_000)
    child = first.generate(longer, **of_session("child", parent_session_id="one"))[0]
    assert child.cached >= WHOLE
    assert first.call("vllm_calls:settle") == 0
    first.close()
    node.settled()
    with kvstore.open_sync(node.url) as kv:
        assert {session.id: session.tokens for session in kv.list_sessions().sessions} == {"one": 1280, "two": 1280, "child": 1792}
    store.corrupt(key_of(store, root, node.url, "two", 2))
    node.wipe()

    second = engine("vllm-resumes", connector=connector(node.url))
    ttft("vllm connector: cold", TOKENS, cold)
    bucket = in_time(second, ids)
    assert (bucket.cached, bucket.tokens) == (WHOLE, cold.tokens)
    ttft("vllm connector: bucket", TOKENS, bucket)
    local = second.generate(ids)[0]
    assert (local.cached >= WHOLE, local.tokens) == (True, cold.tokens)
    ttft("vllm connector: local hit", TOKENS, local)
    second.forget()
    dram = in_time(second, ids)
    assert (dram.cached, dram.tokens) == (WHOLE, cold.tokens)
    ttft("vllm connector: DRAM", TOKENS, dram)
    second.forget()
    assert second.generate({"prompt_token_ids": ids, "cache_salt": "mine"}, max_tokens=1)[0].cached == 0
    again = in_time(second, damaged)
    assert again.tokens == cold_damaged.tokens
    counts = second.call("vllm_calls:counts")
    assert counts["blocks"]["lost"] == 3  # the damaged one, and two behind it
    assert "Recovered" in second.log

    for steps in (1, 2, 3):  # while it is looked for, loaded, computed
        second.forget()
        assert second.call("vllm_calls:abort", prompt=third, steps=steps) == 0
    second.forget()
    free = second.call("vllm_calls:free_blocks")
    node.stop()
    alone = second.generate(third, max_tokens=2)[0]
    assert (alone.cached, alone.tokens) == (0, cold_third.tokens)
    node.start()
    assert second.call("vllm_calls:settle") == 0
    second.forget()
    assert second.call("vllm_calls:free_blocks") == free
    assert node.stats.leases == 0


def test_without_a_node_an_engine_starts_and_answers_and_finds_one_that_comes(engine, node, store, prompt, record_property):
    ids = prompt(700)
    node.stop()
    running = engine("vllm-alone", connector=connector(node.url))
    cold = running.generate(ids)[0]
    assert (cold.cached, len(cold.tokens)) == (0, 8)
    node.start()
    assert running.call("vllm_calls:connected", within_s=60)
    running.forget()
    assert running.generate(ids)[0].tokens == cold.tokens
    assert running.call("vllm_calls:settle") == 0
    running.forget()
    running.call("vllm_calls:time_lookups")
    warm = in_time(running, ids)
    assert (warm.cached, warm.tokens) == (512, cold.tokens)
    running.forget()
    assert in_time(running, ids[:512]).cached == 256  # a prompt that is stored as a whole: its last block is computed
    for _ in range(60):
        running.generate(ids, max_tokens=1)
    metrics = running.call("vllm_calls:metrics")
    assert metrics["kvtier_engine_blocks_total saved"] >= 2
    assert metrics["kvtier_engine_blocks_total loaded"] == 3
    assert metrics["kvtier_engine_lookups_total hit"] >= 2
    times = running.call("vllm_calls:lookup_times")["calls"]["matched"]
    assert max(times) < 0.25
    said = {"median": statistics.median(times), "p99": statistics.quantiles(times, n=100)[98]}
    record_property("lookup_ms", {name: round(value * 1000, 3) for name, value in said.items()})

    other = running.generate(prompt(700, at=5000))[0]
    store.stop()
    for what in ("the tiers have it", "nobody has it"):
        running.forget()
        answers = running.generate(ids)[0], running.generate(prompt(700, at=5000))[0]
        assert [answer.tokens for answer in answers] == [cold.tokens, other.tokens], what
        node.wipe()
    store.start()
    running.close()
    assert node.stats.leases == 0


@pytest.mark.more_engines
def test_requests_that_lose_their_blocks_go_on_with_the_same_output(engine, node, prompt):
    """A cache of 12 blocks of 128 for two prompts of 6: the second one's decoding takes blocks from the first one."""
    prompts = [prompt(760), prompt(760, at=5000)]
    plenty = engine("vllm-plenty")
    expected = [plenty.generate(each, max_tokens=16)[0].tokens for each in prompts]
    plenty.close()
    running = engine("vllm-preempts", connector=connector(node.url), num_gpu_blocks_override=13, max_model_len=1024)
    running.call("vllm_calls:count_preemptions")
    answers = running.generate(*prompts, max_tokens=16)
    assert running.call("vllm_calls:preemptions") > 0
    assert [answer.tokens for answer in answers] == expected
    assert running.call("vllm_calls:settle") == 0
    running.close()
    assert node.stats.leases == 0


@pytest.mark.more_engines
def test_other_weights_and_blocks_of_another_size_share_nothing(engine, node, prompt):
    ids = prompt(700)
    first = engine("vllm-monday", connector=connector(node.url, revision="monday"))
    cold = first.generate(ids)[0]
    first.call("vllm_calls:settle")
    first.close()
    second = engine("vllm-tuesday", connector=connector(node.url, revision="tuesday"))
    answer = second.generate(ids)[0]
    assert (answer.cached, answer.tokens) == (0, cold.tokens)
    second.close()
    with pytest.raises(Exception, match='"block_tokens": 256'):
        engine("vllm-refused", connector=connector(node.url, revision="monday", block_tokens=200))


@pytest.mark.more_engines
def test_two_engines_in_turn_on_one_node_and_its_disk(engine, node, prompt, ttft):
    ids = prompt(TOKENS)
    first = engine("vllm-left", connector=connector(node.url))
    cold = first.generate(ids, **of_session("s"))[0]
    first.call("vllm_calls:settle")
    node.settled()
    node.restart()
    second = engine("vllm-right", connector=connector(node.url))
    answer = in_time(second, ids, **of_session("s"))
    assert (answer.cached, answer.tokens) == (WHOLE, cold.tokens)
    ttft("vllm connector: NVMe", TOKENS, answer)
    longer = ids + answer.tokens + prompt(300, at=20_000)
    turn = second.generate(longer, **of_session("s"))[0]
    second.call("vllm_calls:settle")
    back = first.generate(longer, **of_session("s"))[0]  # its own cache has the beginning, the tier has the rest
    assert back.tokens == turn.tokens
    assert back.cached >= 1792
    first.close()
    second.close()
    with kvstore.open_sync(node.url) as kv:
        (session,) = kv.list_sessions().sessions
        assert session.tokens == 1792
    assert node.stats.leases == 0
