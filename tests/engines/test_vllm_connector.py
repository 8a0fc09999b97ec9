"""vLLM with KVTierConnector, by configuration alone: what one process computed, another one has."""


def connector(url, **extra):
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url, **extra},
    }


def test_a_prefix_outlives_its_process_and_the_nodes_memory_and_disk(engine, node, prompt, ttft):
    ids = prompt(1500)
    first = engine("prefills", connector=connector(node.url))
    cold = first.generate(ids)[0]
    assert cold.cached == 0
    first.close()
    node.settled()
    node.wipe()
    second = engine("resumes", connector=connector(node.url))
    warm = second.generate(ids)[0]
    assert warm.cached == 1280  # five blocks of 256
    assert warm.tokens == cold.tokens
    ttft("cold", 1500, cold)
    ttft("kvtier, bucket", 1500, warm)
    assert node.stats.leases == 0
