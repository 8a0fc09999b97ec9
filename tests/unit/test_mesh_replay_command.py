"""`kvtier replay`: what is printed, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import app


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": at * 300,
            "input_length": 512 * 6,
            "output_length": 5,
            "hash_ids": [0, *range(at % 7 * 9 + 1, at % 7 * 9 + 6)],
        }
        for at in range(60)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def run(*arguments):
    return CliRunner().invoke(app, ["replay", *arguments])


def test_lines_have_the_same_keys_and_every_router(trace):
    found = [json.loads(line) for line in run(trace, "--format", "json", "--nodes", "3").stdout.splitlines()]
    assert {tuple(line) for line in found} == {("name", "value", "unit", "baseline", "ratio")}
    by = {line["name"]: line for line in found}
    for router in ("round-robin", "session-hash", "longest-prefix", "least-loaded", "kvtier"):
        assert by[f"{router}.hit_rate"]["baseline"] == by["pool.hit_rate"]["value"]
        assert by[f"{router}.second_half.p95_s"]["value"] > 0
    assert by["kvtier.mean_s"]["baseline"] == by["round-robin.mean_s"]["value"]
    assert by["constant.peer.bytes_per_s"]["value"] == 1e10


def test_a_table_and_a_picture(trace, tmp_path):
    picture = tmp_path / "x.svg"
    done = run(trace, "--svg", str(picture), "--die", "3:n1", "--join", "4:n8", "--constant", "token_s=0.001")
    assert done.exit_code == 0
    assert "had nothing happened" in done.stdout
    assert "0.001" in done.stdout
    assert picture.read_text().startswith("<svg")
    assert "kvtier" in picture.read_text()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--router", "magic"],
        ["--policy", "magic"],
        ["--machine", "magic"],
        ["--die", "3"],
        ["--die", "3:n9"],
        ["--join", "3:n1"],
        ["--nodes", "1", "--die", "3:n0"],
        ["--constant", "magic=1"],
        ["--constant", "token_s=fast"],
        ["--constant", "peer.bytes_per_s=0"],
    ],
)
def test_what_makes_no_sense_is_refused(trace, wrong):
    assert run(trace, *wrong).exit_code == 2
