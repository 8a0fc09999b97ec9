"""examples/warm_prefix.py, with a small model on a real node: what one computed, everybody finds."""

import importlib.util
from pathlib import Path

import pytest

import kvstore
from kvstore.connectors.hf import SessionCache
from kvstore.errors import AlreadyExists, Gone

B = 16


@pytest.fixture
def example(torch):
    path = Path(__file__).parents[2] / "examples" / "warm_prefix.py"
    spec = importlib.util.spec_from_file_location("warm_prefix", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_published_prefix_is_reused_by_other_prompts_and_outlives_two_collections(torch, model, prompt, prefill, example, root):
    system, question = prompt(70)[:, :50], prompt(70)[:, 50:]
    with kvstore.open_sync(f"memory://{root}") as kv:
        session = example.publish(model, SessionCache(model, kv, block_tokens=B), kv, system, "support")
        assert (session.id, session.tokens, session.pinned) == ("warm/support", 3 * B, True)
        for _ in range(2):
            kv.collect(now=True)
        with pytest.raises(Gone):
            kv.get_session("draft of support")
        other = SessionCache(model, kv, block_tokens=B)
        ids = torch.cat([system, question], dim=1)
        past = other.restore("chat", ids)  # a new session: it begins with what is stored of its prompt
        assert past.tokens.tolist() == ids[0, : 3 * B].tolist()
        cold = prefill(model, ids)
        warm = prefill(model, ids[:, 3 * B :], past.past_key_values)
        for mine, theirs in zip(cold.layers, warm.layers, strict=True):
            assert torch.allclose(mine.keys, theirs.keys, atol=1e-5)
        with pytest.raises(AlreadyExists):
            example.publish(model, other, kv, system, "support")
