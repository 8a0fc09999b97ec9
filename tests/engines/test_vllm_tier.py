"""KVTierSecondaryTier under vLLM's native offloading: two engine processes, and between them nothing but the bucket."""

TOKENS = 1100  # 8 blocks of 128, and some
STORED = 1024


def offloading(*tiers):
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "cpu_tiering",
            "cpu_bytes_to_use": 300_000_000,
            "secondary_tiers": list(tiers),
        },
    }


def kvtier(url):
    return offloading({"type": "KVTierSecondaryTier", "module_path": "kvstore.connectors.vllm_tier", "url": url})


def test_a_prefix_comes_from_the_bucket_to_another_process(engine, node, store, root, prompt, ttft):
    whole, damaged, unreachable, short = prompt(TOKENS), prompt(TOKENS, at=5000), prompt(TOKENS, at=10_000), prompt(20)
    first = engine("tier-stores", connector=kvtier(node.url))
    cold, stored = {}, set()
    for name, ids in (("damaged", damaged), ("whole", whole), ("unreachable", unreachable)):
        cold[name] = first.generate(ids)[0]
        assert cold[name].cached == 0
        first.generate(short)  # steps in which what was computed is handed down
        node.settled()
        if name == "damaged":
            stored = set(store.blocks(root))
    first.close()
    node.settled()
    assert len(stored) == STORED // 128
    assert len(store.blocks(root)) == 3 * STORED // 128

    node.wipe()
    store.corrupt(min(stored))
    second = engine("tier-loads", connector=kvtier(node.url))
    restored = second.generate(whole)[0]
    assert (restored.cached, restored.tokens) == (STORED, cold["whole"].tokens)
    ttft("kvtier tier: bucket", TOKENS, restored)
    again = answer_after(second, whole, node.settled)
    assert (again.cached, again.tokens) == (STORED, cold["whole"].tokens)
    ttft("kvtier tier: DRAM", TOKENS, again)

    recomputed = second.generate(damaged)[0]
    assert recomputed.cached < STORED  # what came before the damaged block
    assert recomputed.tokens == cold["damaged"].tokens

    store.stop()
    try:
        assert_alone(second.generate(unreachable)[0], cold["unreachable"])
        assert_alone(answer_after(second, unreachable, node.wipe), cold["unreachable"])
        assert_alone(answer_after(second, unreachable, node.kill), cold["unreachable"])
    finally:
        store.start()
    second.close()


def test_vllms_own_file_system_tier(engine, tmp_path, prompt, ttft):
    """No test of ours: its rows of the closing table, measured in the same run and in the same way."""
    ids, short = prompt(TOKENS), prompt(20)
    running = engine("fs-tier", connector=offloading({"type": "fs", "root_dir": str(tmp_path / "fs")}))
    cold = running.generate(ids)[0]
    running.generate(short)
    assert running.forget()
    ttft("vLLM host memory", TOKENS, running.generate(ids)[0])
    local = running.generate(ids)[0]
    ttft("cold", TOKENS, cold)
    ttft("local hit", TOKENS, local)
    loaded = answer_after(running, ids, lambda: None)
    assert (loaded.cached, loaded.tokens) == (STORED, cold.tokens)
    ttft("vLLM fs tier", TOKENS, loaded)
    running.close()


def answer_after(engine, ids, prepare):
    """The answer when the engine and its host memory have forgotten all, and something else has happened."""
    assert engine.forget(connector=True)
    prepare()
    return engine.generate(ids)[0]


def assert_alone(answer, cold):
    assert (answer.cached, answer.tokens) == (0, cold.tokens)
