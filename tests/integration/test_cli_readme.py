"""What README.md tells people to type works as written."""

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import app

README = (Path(__file__).parents[2] / "README.md").read_text()
DEFAULT_URL = "kvtier://127.0.0.1:7878"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def commands():
    lines = (line.removeprefix("$ ") for block in blocks("console") for line in block.splitlines())
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("kvtier ")]


@pytest.fixture(scope="module")
def url(up, tmp_path_factory):
    with up(tmp_path_factory.mktemp("up")) as (_, ready):
        yield ready["http"]


@pytest.fixture
def tiny(monkeypatch):
    """Instead of a download: a random model, and a tokenizer that knows one text."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, max_position_embeddings=512, eos_token_id=None, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = transformers.BatchEncoding({"input_ids": torch.arange(2, 92).reshape(1, 90)})
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: model)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: lambda *_, **__: ids)


@pytest.mark.seaweed
def test_the_commands_of_the_walk_through(url, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[2])
    typed = [words for words in commands() if words[0] not in {"up", "serve"}]
    assert [words[1] for words in typed if words[0] == "sessions"] == ["create", "ls", "fork", "show"]
    monkeypatch.setenv("KVTIER_URL", url)
    for words in typed:
        result = CliRunner().invoke(app, words, catch_exceptions=False)
        assert result.exit_code == 0, (words, result.output)


@pytest.mark.slow
@pytest.mark.seaweed
def test_the_python_of_the_readme(url, tiny, capsys):
    hf, client = (block.replace(DEFAULT_URL, url) for block in blocks("python"))
    assert url in hf
    assert url in client
    exec(compile(hf, "README.md", "exec"), {})
    exec(compile(hf, "README.md", "exec"), {})  # the next turn
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "blocks.py"))["main"](url)
    exec(compile(client, "README.md", "exec"), {})
    exec(compile(client, "README.md", "exec"), {})  # as often as one likes
    first, second, _, _, _, restored, forked, *listed = capsys.readouterr().out.splitlines()
    assert first == "1 121 bucket"
    assert second == first  # the same tokens again are the same version
    assert restored.startswith("ready 1 960 {")
    fork = forked.split()[0]
    assert {"example", fork} <= {line.split()[0] for line in listed}
