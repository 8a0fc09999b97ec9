"""schema/openapi.yaml against a real node, with and without access tokens: Schemathesis asks as it says, and as it does not.

The gateway's own paths have no specification, so they are not here.
"""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

ROOT = Path(__file__).parents[2]
KVTIER = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
SEED, EXAMPLES = "1", os.environ.get("KVTIER_OPENAPI_EXAMPLES", "4")
# A request of the right shape may still be refused (rules between fields, names that no id has): `positive_data_acceptance` would
# call that a failure. DELETE of a restore cancels it, and its end is still told: `use_after_free` would.
NOT = "positive_data_acceptance,use_after_free"
# 501 says that this node has not what is asked for, such as a device; it is specified, and no fault.
CONFIG = """[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", "501"]
"""


@pytest.fixture
def node(tmp_path):
    """`node(**settings)`: its URL."""
    running = []

    def start(*sets):
        sets = ("store.url=memory://openapi", "dram.size=32MiB", f"nvme.path={tmp_path}/nvme", "nvme.size=32MiB", *sets)
        command = [*KVTIER, "serve", "--format", "json", "--log-level", "error", "--set", "node.listen=127.0.0.1:0"]
        flags = [text for each in ("node.socket=", *sets) for text in ("--set", each)]
        process = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
        running.append(process)
        return msgspec.json.decode(process.stdout.readline())["http"].replace("kvtier://", "http://")

    yield start
    for process in running:
        process.terminate()
        process.wait(20)


def ran(folder, specification, url, phases, *more):
    (config := folder / "schemathesis.toml").write_text(CONFIG)
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "--config-file",
        config,
        "run",
        specification,
        "-u",
        url,
        "--phases",
        phases,
    ]
    options = ["-n", EXAMPLES, "--seed", SEED, "--checks", "all", "--exclude-checks", NOT, "--continue-on-failure", "--no-color"]
    return subprocess.run([*command, *options, *more], capture_output=True, text=True, check=False, cwd=folder)


def test_a_node_without_tokens_is_as_it_is_specified(node, tmp_path):
    specification = yaml.safe_load((ROOT / "schema/openapi.yaml").read_text())
    for path in specification["paths"].values():
        for operation in path.values():
            if isinstance(operation, dict):
                operation.pop("security", None)  # it asks for none
    (told := tmp_path / "openapi.yaml").write_text(yaml.safe_dump(specification))
    found = ran(tmp_path, told, node(), "coverage")
    assert found.returncode == 0, found.stdout[-6000:]


def test_a_node_with_tokens_is_as_it_is_specified(node, tmp_path):
    file = tmp_path / "tokens.toml"
    create = [*KVTIER, "tokens", "create", "--file", file, "--tenant", "t", "--scope", "admin", "--format", "json"]
    made = subprocess.run(create, capture_output=True, text=True, check=True)
    header = f"Authorization: Bearer {msgspec.json.decode(made.stdout)['token']}"
    url = node(f"auth.tokens_file={file}")
    found = ran(tmp_path, ROOT / "schema/openapi.yaml", url, "fuzzing,stateful", "-H", header)
    assert found.returncode == 0, found.stdout[-6000:]


def test_an_operation_that_is_not_specified_is_noticed(node, tmp_path):
    specification = yaml.safe_load((ROOT / "schema/openapi.yaml").read_text())
    kept = specification["paths"]["/v1/stats"]["get"]
    kept.pop("security")
    specification["components"]["schemas"]["Stats"]["properties"]["node"] = {"type": "integer"}
    specification["paths"] = {"/v1/stats": {"get": kept}}
    (told := tmp_path / "openapi.yaml").write_text(yaml.safe_dump(specification))
    assert ran(tmp_path, told, node(), "fuzzing").returncode == 1
