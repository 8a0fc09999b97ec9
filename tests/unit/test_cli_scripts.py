"""The scripts a newcomer runs: what they say on a machine that is not ready, and that no process stays behind unseen."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOON = "import sys; sys.path.insert(0, 'scripts'); import _leaks; _leaks.GRACE_S = 0.3; sys.exit(_leaks.main(sys.argv[1:]))"
LEAKS = [sys.executable, "-c", SOON]  # as scripts/_leaks.py, with less patience for what was left


def run(command, **environment):
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize("status", [0, 1, 5])
def test_the_status_of_a_clean_run_is_the_commands_own(status):
    done = run([*LEAKS, "bash", "-c", f"exit {status}"])
    assert done.returncode == status
    assert "no process was left behind" in done.stderr


def test_a_process_that_detached_itself_is_named_ended_and_fails_the_run():
    done = run([*LEAKS, "bash", "-c", "setsid env -i sleep 293 >/dev/null 2>&1 & exit 0"])
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if "left process" in line]
    assert line.endswith("sleep 293")
    pid = int(line.split("process ")[1].split()[0])
    for _ in range(100):
        if not lives(pid):
            break
        time.sleep(0.05)
    assert not lives(pid)


def lives(pid: int) -> bool:
    """A zombie does not: whoever inherited it reaps it when it likes, and here that may be a test runner that waits."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_failed_run_that_also_leaks_keeps_its_status():
    assert run([*LEAKS, "bash", "-c", "setsid sleep 294 >/dev/null 2>&1 & exit 4"]).returncode == 4


@pytest.mark.parametrize(
    ("left", "said"), [("", "no process was left behind"), ("setsid sleep 295 >/dev/null 2>&1 & ", "left process")]
)
def test_a_signal_that_ended_the_run_is_named_and_becomes_a_shells_status(left, said):
    done = run([*LEAKS, "bash", "-c", f"{left}kill -TERM $$"])
    assert done.returncode == 128 + 15
    assert "the run was ended by signal 15 (SIGTERM)" in done.stderr
    assert said in done.stderr


def test_a_signal_reaches_the_command():
    process = subprocess.Popen([*LEAKS, "bash", "-c", "trap 'exit 7' TERM; echo on; sleep 20 & wait"], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"on\n"
    process.terminate()
    assert process.wait(20) == 7
    process.stdout.close()


@pytest.mark.parametrize("script", ["test", "check", "demo"])
def test_without_a_python_that_is_new_enough_it_says_what_to_install(script, tmp_path):
    done = run([str(ROOT / "scripts" / script)], KVTIER_VENV=str(tmp_path / "venv"), KVTIER_PYTHON="no-such-python")
    assert done.returncode == 1
    assert "no Python 3.11 or newer was found (tried: no-such-python)" in done.stderr
    assert "apt-get install python3" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_without_the_venv_module_it_says_which_package_has_it(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *ensurepip*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    done = run([str(ROOT / "scripts/test")], KVTIER_VENV=str(tmp_path / "venv"), KVTIER_PYTHON=str(python))
    assert done.returncode == 1
    assert "has no venv module" in done.stderr
    assert "python3-venv" in done.stderr


def test_broken_links_are_named(tmp_path):
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    links = "[ok](b.md#two-words) [gone](c.md) [head](b.md#three) [web](https://x.invalid) `[no](z.md)`"
    (tmp_path / "a.md").write_text(f"# One\n{links}\n")
    (tmp_path / "b.md").write_text("## Two, words\n```\n[no](y.md)\n```\n")
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/_links.py")], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["a.md: c.md: no such file", "a.md: b.md#three: no such heading"]
