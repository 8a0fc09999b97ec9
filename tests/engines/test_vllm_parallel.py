"""Two processes with half of the heads each, and an engine without a node: what one process stored, another one restores."""

import pytest
import torch
from harness import Engine
from test_vllm_connector import TOKENS, WHOLE, connector, in_time, of_session
from transformers import LlamaConfig, LlamaForCausalLM


@pytest.fixture(scope="module")
def halves(tmp_path_factory):
    """A model that two ranks can share, which SmolLM2's three KV heads do not allow: four heads, two KV heads, random weights."""
    folder = tmp_path_factory.mktemp("halves")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,  # large enough for attention to matter: another prompt gets another answer
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


TWO = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "skip_tokenizer_init": True,
    "environment": {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default each rank wants a NUMA node of its own
        "OMP_NUM_THREADS": "1",
    },
}


@pytest.mark.more_engines
def test_two_ranks_store_their_heads_and_two_others_restore_them(tmp_path, halves, node, prompt):
    ids = prompt(TOKENS)
    with Engine("tp-stores", tmp_path, halves, connector=connector(node.url), **TWO) as first:
        cold, other = (first.generate(each, **of_session("tp"))[0] for each in (ids, prompt(TOKENS, at=5000)))
        assert (cold.cached, len(set(cold.tokens)) > 1, cold.tokens != other.tokens) == (0, True, True)
        first.close()
    node.settled()
    node.wipe()
    with Engine("tp-restores", tmp_path, halves, connector=connector(node.url), **TWO) as second:
        warm = in_time(second, ids)
        assert (warm.cached, warm.tokens) == (WHOLE, cold.tokens)
        second.close()
    assert node.stats.leases == 0


@pytest.mark.more_engines
def test_an_engine_without_a_node_finds_in_the_bucket_what_another_one_left(engine, store, root, prompt):
    ids = prompt(TOKENS)
    url = f"{store.url(root)}&dram=256MiB"
    first = engine("embedded-stores", connector=connector(url), environment=store.environment)
    assert first.call("vllm_calls:connected", within_s=60)
    cold = first.generate(ids, **of_session("alone"))[0]
    assert cold.cached == 0
    first.close()
    assert len(store.blocks(root)) == WHOLE // 256
    second = engine("embedded-restores", connector=connector(url), environment=store.environment)
    assert second.call("vllm_calls:connected", within_s=60)
    warm = in_time(second, ids)
    assert (warm.cached, warm.tokens) == (WHOLE, cold.tokens)
    second.close()
