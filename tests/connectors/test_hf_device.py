"""SessionCache on a model that is not on the host: through pinned memory, by the same steps on the device `cpu`."""

import pytest
from fake_client import FakeClient

from kvstore.connectors.hf import SessionCache

B = 16


def cuda_missing():
    try:
        import torch  # noqa: PLC0415  the extra may not be installed
    except ImportError:
        return True
    return not torch.cuda.is_available()


@pytest.fixture(
    params=[
        "cpu",
        pytest.param(
            "cuda:0", marks=[pytest.mark.cuda, pytest.mark.skipif(cuda_missing(), reason="torch sees no CUDA device here")]
        ),
    ]
)
def placed(request, make_model, monkeypatch):
    """`placed(dtype)`: a model on the device, which is treated as one whatever it is."""
    from kvstore.connectors import hf_cache  # noqa: PLC0415  it imports torch

    monkeypatch.setattr(hf_cache, "on_host", lambda device: False)
    return lambda dtype="float32": make_model(dtype=dtype).to(request.param)


@pytest.fixture
def kv():
    return FakeClient()


def kv_of(torch, cache):
    return torch.stack([t[0].cpu() for layer in cache.layers for t in (layer.keys, layer.values)])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("n", [1, B - 1, B, 5 * B + 7])
def test_a_session_comes_back_bit_for_bit(torch, placed, kv, prompt, prefill, monkeypatch, dtype, n):
    monkeypatch.setattr("kvstore.connectors.arrivals.NEAR", 1)  # a window for each block: pinned memory is used again
    model = placed(dtype)
    ids = prompt(n).to(model.device)
    cache = prefill(model, ids)
    sessions = SessionCache(model, kv, block_tokens=B)
    sessions.commit("s", ids, cache)
    restored = SessionCache(model, kv, block_tokens=B).restore("s")
    assert restored.tokens.tolist() == prompt(n)[0].tolist()
    assert {str(layer.keys.device) for layer in restored.past_key_values.layers} == {str(model.device)}
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache))
    assert kv.leased == 0


def test_what_is_stored_on_a_device_is_what_is_stored_on_the_host(torch, make_model, placed, kv, prompt, prefill, monkeypatch):
    from kvstore.connectors import hf_cache  # noqa: PLC0415  it imports torch

    model, host = placed(), make_model()
    ids = prompt(70).to(model.device)
    SessionCache(model, kv, block_tokens=B).commit("s", ids, prefill(model, ids))
    monkeypatch.setattr(hf_cache, "on_host", lambda device: True)
    back = SessionCache(host, kv, block_tokens=B).restore("s").past_key_values
    assert back.get_seq_length() == 70
    kept = prefill(host, prompt(70))
    if model.device.type == "cpu":  # devices round otherwise
        assert torch.equal(kv_of(torch, back), kv_of(torch, kept))
    assert torch.allclose(kv_of(torch, back), kv_of(torch, kept), atol=1e-3)


def test_a_prompt_that_leaves_a_block_in_its_middle(torch, placed, kv, prompt, prefill):
    model = placed()
    ids = prompt(3 * B).to(model.device)
    sessions = SessionCache(model, kv, block_tokens=B)
    cache = prefill(model, ids)
    sessions.commit("s", ids, cache)
    edited = ids.clone()
    edited[0, B + 5] = (edited[0, B + 5] + 1) % 97
    restored = sessions.restore("s", edited)
    assert restored.tokens.size == B + 5
    assert torch.equal(kv_of(torch, restored.past_key_values), kv_of(torch, cache)[:, :, : B + 5])


def test_a_node_that_dies_while_it_is_read_delivers_nothing(placed, kv, prompt, prefill):
    model = placed()
    ids = prompt(3 * B).to(model.device)
    sessions = SessionCache(model, kv, block_tokens=B)
    sessions.commit("s", ids, prefill(model, ids))
    kv.dies_while_read = True
    restored = sessions.restore("s", ids)
    assert (restored.past_key_values.get_seq_length(), restored.miss) == (0, "unavailable")
    assert kv.leased == 0


def test_the_next_turn_goes_on_from_it(torch, placed, kv, prompt, prefill):
    model = placed()
    ids = prompt(70).to(model.device)
    sessions = SessionCache(model, kv, block_tokens=B)
    cache = prefill(model, ids[:, :60])
    sessions.commit("s", ids[:, :60], cache)
    restored = sessions.restore("s", ids)
    with torch.inference_mode():
        kept = model(ids[:, 60:], past_key_values=cache).logits
        back = model(ids[:, 60:], past_key_values=restored.past_key_values).logits
    assert torch.equal(kept, back)
    assert sessions.commit("s", ids, restored.past_key_values).version == 2
