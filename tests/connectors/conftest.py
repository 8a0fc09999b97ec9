"""A random little model, and clients."""

import sys
from pathlib import Path

import pytest

from kvstore.client import SyncClient
from kvstore.connectors import bridge, pages, transfers

sys.path.insert(0, str(Path(__file__).parent))  # for fake_client


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A busy machine is no reason for a miss: look-ups have as long as they take. Tests of what is late set a time of their own."""
    for module in (bridge, pages, transfers):
        monkeypatch.setattr(module, "LOOK_S", 30.0)
    monkeypatch.setitem(SyncClient.lookup.__kwdefaults__, "deadline_ms", 30_000)


@pytest.fixture(scope="session")
def torch():
    torch = pytest.importorskip("torch", reason="the `torch` extra is not installed")
    torch.set_num_threads(1)
    return torch


@pytest.fixture(scope="session")
def transformers(torch):
    return pytest.importorskip("transformers", reason="the `hf` extra is not installed")


@pytest.fixture(scope="session")
def make_model(torch, transformers):
    """Builds a Llama of 2 layers and 2 KV heads; one seed, one set of weights."""

    def make(seed=1, dtype="float32", **changes):
        fields = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "eos_token_id": None,
            "pad_token_id": 0,
            "bos_token_id": 1,
        }
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(**(fields | changes))
        return transformers.LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    return make


@pytest.fixture(scope="session")
def model(make_model):
    return make_model()


@pytest.fixture(scope="session")
def make_window_model(torch, transformers):
    """Builds a model with sliding windows: `gemma3` has them in two layers of four, `mistral` in both of two."""

    def make(kind="gemma3", window=24, **changes):
        fields = {
            "vocab_size": 97,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4 if kind == "gemma3" else 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "sliding_window": window,
            "eos_token_id": None,
            "pad_token_id": 0,
            "bos_token_id": 1,
        }
        torch.manual_seed(1)
        if kind == "gemma3":
            layers = ["sliding_attention", "full_attention"] * 2
            config = transformers.Gemma3TextConfig(**(fields | {"layer_types": layers} | changes))
            return transformers.Gemma3ForCausalLM(config).eval()
        return transformers.MistralForCausalLM(transformers.MistralConfig(**(fields | changes))).eval()

    return make


@pytest.fixture
def greedy(torch):
    """`greedy(model, ids, past)`: prompt and answer of 9 tokens; without a store where there is no `past`."""

    def run(model, ids, past=None, **settings):
        cache = past.cache if past is not None else {}
        with torch.inference_mode():
            return model.generate(ids, **cache, **({"max_new_tokens": 9, "do_sample": False} | settings))

    return run


@pytest.fixture
def prompt(torch):
    """`prompt(n)`: n token ids, shape [1, n]; a longer one begins like a shorter one."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(2, 97, (1, 400), generator=generator)
    return lambda n: ids[:, :n].clone()


@pytest.fixture
def prefill(torch):
    """`prefill(model, ids)`: the cache of these tokens."""

    def run(model, ids, past=None):
        with torch.inference_mode():
            return model(ids, past_key_values=past, use_cache=True).past_key_values

    return run
