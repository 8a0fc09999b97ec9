"""What docs/engines/huggingface.md tells people to type works as written, one snippet after the other."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "engines" / "huggingface.md"
URL = "kvtier+unix:///run/kvtier/node.sock"


@pytest.fixture
def tiny(torch, transformers, make_model, monkeypatch):
    """Instead of a download: a random model, and a tokenizer of letters."""

    class Tokenizer:
        padding_side, pad_token, eos_token = "right", None, "x"

        def __call__(self, text, return_tensors, padding=False):
            texts = [text] if isinstance(text, str) else text
            columns = max(map(len, texts))
            assert len(texts) == 1 or (padding and self.padding_side == "left" and self.pad_token)
            rows = [[2 + ord(letter) % 90 for letter in each] for each in texts]
            ids = [[0] * (columns - len(row)) + row for row in rows]
            mask = [[0] * (columns - len(row)) + [1] * len(row) for row in rows]
            return transformers.BatchEncoding({"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)})

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: make_model())
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: Tokenizer())


def test_the_snippets_of_the_page(tiny, recwarn):
    snippets = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [snippet.count(URL) for snippet in snippets] == [1, 0, 0]
    names = {}
    try:
        exec(compile(snippets[0].replace(URL, "memory://hf-docs"), str(PAGE), "exec"), names)
        assert (names["past"].tokens.size, names["receipt"].version, names["receipt"].tokens) == (0, 1, 41 + 63)
        exec(compile(snippets[1], str(PAGE), "exec"), names)
        assert names["past"].tokens.size == 40  # one is left to compute
        assert (names["receipt"].version, names["receipt"].tokens) == (1, 41 + 63)  # the same answer again
        exec(compile(snippets[2], str(PAGE), "exec"), names)
        assert [receipt.tokens for receipt in names["receipts"]] == [11 + 63, 34 + 63]
        exec(compile(snippets[2], str(PAGE), "exec"), names)
        assert [row.tokens.size for row in names["past"].rows] == [10, 33]
    finally:
        names["kv"].close()
    assert [str(warning.message) for warning in recwarn if warning.category is FutureWarning] == []
