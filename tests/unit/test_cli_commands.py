"""The command itself: what it knows, how it answers and what it costs to ask."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvstore.cli import commands, config
from kvstore.cli.commands import app
from kvstore.cli.embedded import data_folder
from kvstore.cli.up import _doctor
from kvstore.errors import KINDS

run = CliRunner().invoke


def test_every_command_of_the_help_can_be_loaded():
    for name, (module, about) in commands.COMMANDS.items():
        command = typer.main.get_command(import_module(f"kvstore.cli.{module}").app)
        assert command.help, name
        assert about.endswith((".", "...")), name


def test_help_names_every_command_and_imports_none_of_them():
    code = (
        "import sys; sys.argv = ['kvtier', '--help']\n"
        "from kvstore.cli.commands import app\n"
        "try: app()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = {'aiohttp', 'obstore', 'aiobotocore', 'torch', 'lmdb', 'kvstore.node', 'kvstore.server'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in commands.COMMANDS)


def every_command(command, path=()):
    """(path, command) of a command and all below it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from every_command(below, (*path, name))


def test_no_bracketed_word_of_a_help_is_lost(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    seen = set()
    for name, (module, _) in commands.COMMANDS.items():
        for path, command in every_command(typer.main.get_command(import_module(f"kvstore.cli.{module}").app)):
            texts = [command.help or "", *(getattr(parameter, "help", None) or "" for parameter in command.params)]
            words = {word for text in texts for word in re.findall(r"\[[\w.<>*]+\]", text.replace("\\[", "["))}
            shown = run(app, [name, *path, "--help"]).output if words else ""
            assert all(word in shown for word in words), (name, *path, words)
            seen |= words
    assert "[prices]" in seen


def loaded_without(package, *arguments):
    """What a command says in a process that has not got a package."""
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"  # importing it raises ModuleNotFoundError
        f"sys.argv = ['kvtier', *{arguments!r}]\n"
        "from kvstore.cli.main import main; main()"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    done = loaded_without("zmq", "gateway", "--help")
    assert done.returncode == 1
    assert "`kvtier gateway` needs the package zmq" in done.stderr
    assert "pip install '.[gateway]'" in done.stderr
    done = loaded_without("aiohttp", "serve", "--help")
    assert "pip install '.[node]'" in done.stderr
    done = loaded_without("zmq", "route", "--help")
    assert done.returncode == 0, done.stderr


def test_version():
    result = run(commands.app, ["--version"])
    assert result.exit_code == 0
    assert result.output.startswith("kvtier 0.")


def test_an_unknown_command_is_wrong_usage_and_names_the_near_one():
    result = run(commands.app, ["sesions"])
    assert result.exit_code == 2
    assert "Did you mean 'sessions'" in result.output


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_of_error_prints_its_remedy_and_ends_with_its_exit_status(kind, monkeypatch):
    def fail(*_args, **_kwargs):
        raise KINDS[kind].error("the thing is wrong", kind=kind)

    monkeypatch.setattr(config, "load", fail)
    result = run(commands.app, ["config", "show"])
    assert result.exit_code == KINDS[kind].exit
    assert result.exit_code in {1, 2, 3, 4}
    assert result.stderr == f"error: the thing is wrong\n  {KINDS[kind].remedy}\n"
    assert result.stdout == ""


def test_a_defect_is_not_dressed_up(monkeypatch):
    monkeypatch.setattr(config, "load", lambda **_: 1 / 0)
    assert isinstance(run(commands.app, ["config", "show"]).exception, ZeroDivisionError)


def test_config_show_tells_where_each_value_came_from(tmp_path, monkeypatch):
    monkeypatch.setenv("KVTIER_NVME_SIZE", "16GiB")
    monkeypatch.setenv("KVTIER_SHELF_SIZE", "1GiB")
    file = tmp_path / "kvtier.toml"
    file.write_text('[dram]\nsize = "2GiB"\n[nvme]\nsize = "4GiB"\n[tenants.acme]\nuids = [1000]\nmax_sessions = 7\n')
    asked = ["config", "show", "--config", str(file), "--set", "node.id=n1"]
    done = run(commands.app, [*asked, "--format", "json"])
    assert done.stderr.startswith("warning: KVTIER_SHELF_SIZE is no setting and is ignored; there is KVTIER_DRAM_SIZE")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(set(line) == {"name", "value", "origin"} for line in lines)
    found = {line["name"]: (line["value"], line["origin"]) for line in lines}
    assert found["dram.size"] == (str(2 << 30), str(file))
    assert found["nvme.size"] == (str(16 << 30), "KVTIER_NVME_SIZE")
    assert found["node.id"] == ("n1", "flag")
    assert found["dram.window"] == (str(64 << 20), "default")
    assert found["lifecycle.sliding"] == ("true", "default")
    assert found["peers.networks"] == ("", "default")
    networks = run(commands.app, [*asked, "--set", "peers.networks=10.0.0.0/8,fd00::/8", "--format", "json"]).stdout
    assert '"value":"10.0.0.0/8,fd00::/8"' in networks
    table = run(commands.app, asked).stdout
    assert "2.0 GiB" in table
    assert "tenant acme: local users 1000; max_sessions 7" in table


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--set", "dram.siz=1GiB"], 2, "unknown setting dram.siz; known: size, window"),
        (["--set", "dram"], 2, "write it like dram.size=4GiB"),
        (["--set", "store.url=s3://key:secret@bucket/x"], 2, "must not carry credentials"),
        (["--config", "/nowhere/kvtier.toml"], 3, "does not exist"),
        (["--format", "xml"], 2, "'xml' is not one of"),
    ],
)
def test_config_that_is_wrong_is_refused_with_the_reason(arguments, code, says):
    result = run(commands.app, ["config", "show", *arguments])
    assert result.exit_code == code
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_up_says_where_a_browser_finds_the_console():
    console = import_module("kvstore.cli.up")._console
    assert console("kvtier://127.0.0.1:7878") == "http://127.0.0.1:7878/"
    assert console("kvtier://node.example:7878?tls=true") == "https://node.example:7878/"
    assert not console("")


def test_up_names_the_doctor_of_what_it_was_given(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    own = data_folder(None)
    assert _doctor(own, "", None, []) == "kvtier doctor"
    assert (
        _doctor(tmp_path / "d", "s3://b/p?region=x", None, []) == f"kvtier doctor --store 's3://b/p?region=x' --data {tmp_path}/d"
    )
    said = _doctor(own, "", Path("a.toml"), ["dram.size=1GiB", "node.id=a b"])
    assert said == f"kvtier doctor --config {tmp_path}/a.toml --data {own} --set dram.size=1GiB --set 'node.id=a b'"
