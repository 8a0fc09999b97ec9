"""What docs/start.md, sessions.md and sizing.md tell people to type works as written, on one node; and a backup can be restored."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvstore.cli.commands import COMMANDS, app

ROOT = Path(__file__).parents[2]
DEFAULT = "127.0.0.1:7878"


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / "docs" / page).read_text(), re.MULTILINE | re.DOTALL)


def typed(page):
    """Each command of its console blocks, and what the page says that it prints."""
    for block in blocks(page, "console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, shown = command.partition("\n")
            yield line, shown


def ends(process):
    """As Ctrl-C does."""
    process.send_signal(signal.SIGINT)
    process.wait(60)


class Terminal:
    """Runs lines of a page against a node that listens elsewhere."""

    def __init__(self, url, data):
        self.address, self.data = url.removeprefix("kvtier://"), data
        self.variables = {}

    def run(self, line):
        line = line.replace(DEFAULT, self.address)
        for name, value in self.variables.items():
            line = line.replace(f"${name}", value)
        words = shlex.split(line, comments=True)
        if words[0] == "export":
            name, _, value = words[1].partition("=")
            self.variables[name] = value
            return ""
        if words[0] == "kvtier":
            more = ["--data", str(self.data)] if words[1] == "doctor" else []
            result = CliRunner().invoke(app, [*words[1:], *more], env=self.variables, catch_exceptions=False)
            assert result.exit_code == 0, (line, result.output)
            return result.output
        assert words[0] in {"python", "curl"}, line
        program = [sys.executable, *words[1:]] if words[0] == "python" else [*words[:1], "--fail-with-body", *words[1:]]
        done = subprocess.run(
            program, cwd=ROOT, env=os.environ | self.variables, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, (line, done.stdout, done.stderr)
        return done.stdout


@pytest.mark.slow
@pytest.mark.seaweed
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_the_five_minutes_a_lost_node_the_sessions_page_and_a_backup(tmp_path, up, capsys):
    data, lines = tmp_path / "data", list(typed("start.md"))
    lost = next(index for index, (line, _) in enumerate(lines) if "sessions restore" in line)
    with up(data) as (process, ready):
        terminal = Terminal(ready["http"], data)
        for line, shown in lines[:lost]:
            assert terminal.run(line).startswith(shown), line
        ends(process)
    # The node's own part is lost, as by the page's `rm -r`; the bucket is a backup (docs/recovery.md), made while no node ran.
    assert "rm -r ~/.local/share/kvtier/nvme\n" in "".join(blocks("start.md", "bash"))
    assert (data / "nvme").is_dir()
    restored = tmp_path / "restored"
    shutil.copytree(data, restored, ignore=shutil.ignore_patterns("nvme", "*.sock*"))
    shutil.rmtree(data)
    with up(restored) as (_, ready):
        checked = CliRunner().invoke(app, ["fsck", "--deep", "--data", str(restored)], catch_exceptions=False)
        assert checked.exit_code == 0, checked.output
        terminal = Terminal(ready["http"], restored)
        terminal.variables["KVTIER_URL"] = ready["http"]
        (restore, _), *rest = lines[lost:]
        status = json.loads(terminal.run(f"{restore} --format json").splitlines()[-1])
        assert (status["state"], list(status["by_tier"])) == ("ready", ["bucket"])
        for line, shown in rest:
            assert terminal.run(line).startswith(shown), line

        said = [terminal.run(line) for line, _ in typed("sessions.md")]
        assert json.loads(said[1])["id"] == "example"
        assert json.loads(said[5])["id"] == "example-tool"
        assert json.loads(said[6])["tokens"] == 512
        [python] = blocks("sessions.md", "python")
        exec(compile(python.replace(DEFAULT, terminal.address), "sessions.md", "exec"), {})
        assert capsys.readouterr().out.splitlines() == ["ready 960 of 960", "example-child 1 960", "512"]


def test_the_figures_of_the_sizing_page_are_those_of_the_command():
    page = (ROOT / "docs/sizing.md").read_text()
    [(line, shown)] = [each for each in typed("sizing.md") if each[0].startswith("kvtier plan")]
    result = CliRunner().invoke(app, shlex.split(line)[1:], catch_exceptions=False)
    assert [row.split() for row in result.stdout.splitlines()] == [row.split() for row in shown.splitlines()]
    assert result.stderr.strip().startswith("for model llama-3.1-8b, turns 10, lasts 1 h, dram-for 10 min, nvme-for 1 d, ttl 1 d, ")
    prices = re.findall(
        r"^(put_1000|get_1000|list_1000|gb_month|gpu_hour) = ([\d.]+)", (ROOT / "docs/cost.md").read_text(), re.MULTILINE
    )
    assert len(prices) == 5
    more = [word for name, price in [*prices, ("prefill", "12000")] for word in ("--set", f"prices.{name}={price}")]
    quoted = {"1d": ("requests", "storage", "avoided"), "7d": ("storage",)}
    for ttl, names in quoted.items():
        again = [*shlex.split(line.replace("--ttl 1d", f"--ttl {ttl}"))[1:], *more, "--format", "json"]
        rows = map(json.loads, CliRunner().invoke(app, again, catch_exceptions=False).stdout.splitlines())
        found = {row["name"]: row["value"] for row in rows}
        for name in names:
            assert f"{found[name]:,.0f} USD" in page.replace("\n", " "), (ttl, name, found[name])


def test_every_command_that_the_pages_name_exists():
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    named = {word for page in pages for word in re.findall(r"(?:^\$ |`)kvtier ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert named - {"node"} <= set(COMMANDS)
    assert {"up", "plan", "gateway"} <= named
