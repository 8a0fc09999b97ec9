"""`kvtier replay`: what is printed, and what is refused."""

import json

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import app
from kvstore.mesh.replay_routers import ROUTERS


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
    asked = [word for router in ("kvtier", "round-robin", *ROUTERS) for word in ("--router", router)]  # in any order
    setting, *found = [
        json.loads(line) for line in run(trace, "--format", "json", "--nodes", "3", "--speedup", "2", *asked).stdout.splitlines()
    ]
    assert (setting["event"], setting["nodes"], setting["speedup"], setting["machine"]) == ("replay", 3, 2.0, "8b-h100")
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
    ("wrong", "says"),
    [
        (["--router", "best"], "there is no router 'best'"),
        (["--policy", "magic"], "there is no policy 'magic'"),
        (["--machine", "magic"], "there is no machine 'magic'"),
        (["--die", "3"], "--die 3: this is no change"),
        (["--die", "1:n99"], "--die 1:n99: nodes are n0 to n7"),
        (["--die", "1:n3", "--die", "2:n3"], "--die 2:n3: it is gone by then"),
        (["--join", "3:n1"], "--join 3:n1: it is there already"),
        (["--nodes", "1", "--die", "3:n0"], "--die 3:n0: it is the last node"),
        (["--constant", "magic=1"], "there is no constant 'magic'"),
        (["--constant", "token_s=fast"], "a constant is a number greater than 0"),
        (["--constant", "peer.bytes_per_s=0"], "a constant is a number greater than 0"),
    ],
)
def test_what_makes_no_sense_is_refused(trace, wrong, says):
    done = run(trace, *wrong)
    assert done.exit_code == 2
    assert says in done.stderr


def test_a_trace_that_is_not_there(tmp_path):
    done = run(str(tmp_path / "none.jsonl"))
    assert done.exit_code == 2
    assert "correct the field" not in done.stderr
    assert "name a file" in done.stderr
