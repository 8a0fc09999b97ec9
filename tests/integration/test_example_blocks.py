"""examples/blocks.py, run twice over one store: the second turn loads what the first one computed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import kvstore


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("blocks", Path(__file__).parents[2] / "examples" / "blocks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_one_turn_publishes_the_next_one_loads(example, root, capsys):
    url = f"memory://{root}?dram=16MiB"
    with kvstore.open_sync(url) as kv:  # the example opens, and closes, further handles of the same store
        for _ in range(2):
            example.main(url)
        tokens = np.arange(1000, dtype=np.uint32) % 331
        loaded = example.load(kv, tokens)
        other = example.load(kv, np.where(np.arange(1000) == 100, 5, tokens))
        manifest = kv.manifest("example")
    turn = "960 are there for the next turn"
    said = "version 1: 960 tokens, bucket"
    assert capsys.readouterr().out.splitlines() == [
        "0 of 1000 tokens were loaded", said, turn, "960 of 1000 tokens were loaded", said, turn,
    ]  # fmt: skip
    assert [int(block[3, 1, 63, 1, 63]) for block in loaded] == [int(tokens[64 * (at + 1) - 1]) for at in range(15)]
    assert len(other) == 1  # the second block has another token
    assert manifest.tokens == 960
