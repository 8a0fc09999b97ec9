"""What the connector cannot hold is refused when the engine starts, with what to do, out of vLLM's own configuration."""

import pytest
import torch
from harness import EngineFailed
from test_vllm_connector import connector
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvstore.errors import Unsupported

FULL = FullAttentionSpec(block_size=128, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
RECURRENT = MambaSpec(block_size=128, shapes=((16, 16),), dtypes=(torch.float32,))


def made(model, *specs, **fields):
    """As vLLM makes a connector, without an engine."""
    config = EngineArgs(model=str(model), max_model_len=512, kv_transfer_config=connector("memory://unused"), **fields)
    groups = [KVCacheGroupSpec([f"model.layers.{index}.self_attn.attn"], spec) for index, spec in enumerate(specs)]
    caches = KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)
    return KVConnectorFactory.create_connector(config.create_engine_config(), KVConnectorRole.SCHEDULER, caches)


@pytest.mark.more_engines
def test_drafts_of_the_prompts_own_words_are_taken(model):
    made(model, FULL, speculative_config={"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}).shutdown()


@pytest.mark.more_engines
@pytest.mark.parametrize(
    ("specs", "fields", "remedy"),
    [
        ((FULL, RECURRENT), {}, "remove the connector for this model"),
        ((FULL,), {"tensor_parallel_size": 9, "decode_context_parallel_size": 3}, "leave decode_context_parallel_size at 1"),
    ],
    ids=["recurrent state", "context parallelism"],
)
def test_what_vllm_would_run_and_the_tier_cannot_hold_is_refused(model, specs, fields, remedy):
    with pytest.raises(Unsupported) as refused:
        made(model, *specs, **fields)
    assert refused.value.remedy == remedy


@pytest.mark.more_engines
def test_an_engine_with_a_drafting_model_ends_at_its_start_and_says_what_to_do(engine, model):
    drafts = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with pytest.raises(EngineFailed, match="What to do: speculate with method 'ngram'"):
        engine("vllm-drafts", connector=connector("memory://unused"), speculative_config=drafts)
