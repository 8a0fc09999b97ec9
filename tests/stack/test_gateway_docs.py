"""What docs/gateway.md tells people to try works as written: nodes, stand-ins for engines, a gateway, a request."""

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "gateway.md").read_text()
KVTIER = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]


def free():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def commands():
    """Those under `Try it`, with ports that are free."""
    (block,) = re.findall(r"^## Try it$.*?^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    ports = {port: str(free()) for port in ("7878", "7879", "8101", "8102", "7900")}
    text = re.sub("|".join(ports), lambda found: ports[found[0]], block).replace("\\\n", " ")
    return [shlex.split(line.removeprefix("$ ")) for line in text.splitlines()], list(ports.values())


def listens(process, port):
    ends = time.monotonic() + 60
    while time.monotonic() < ends and process.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", int(port))) == 0:
                return
        time.sleep(0.05)
    raise AssertionError((process.args, process.poll()))


def end(process):
    process.send_signal(signal.SIGINT)
    try:
        assert process.wait(30) == 0, process.args
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the page asks with curl")
def test_what_the_page_tells_to_try():
    typed, ports = commands()
    *servers, curl = typed
    assert [words[0] for words in typed] == ["kvtier", "kvtier", "python", "python", "kvtier", "curl"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "AWS_"))}
    with ExitStack() as lifetime:
        engines = {}
        for words, port in zip(servers, ports, strict=True):
            begins = {"kvtier": KVTIER, "python": [sys.executable]}[words[0]]
            process = subprocess.Popen(
                [*begins, *words[1:]],
                cwd=ROOT,
                env=clean,
                stderr=subprocess.DEVNULL,
                # A run in a shell's background ignores Ctrl-C, and so would what it starts.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509  nothing else runs here
            )
            engines |= {"ab"[len(engines)]: process} if words[0] == "python" else {}
            lifetime.callback(lambda process=process: end(process) if process.poll() is None else None)
            listens(process, port)

        def ask():
            said = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=60).stdout
            assert " 200 OK" in said.splitlines()[0], said
            patterns = (r"X-KVTier-Engine: (\w)", r'"split":(\d+)', r"(\d+) of \d+ tokens were known")
            return ["".join(re.findall(pattern, said)) for pattern in patterns]  # no route where the tokenizer was just ended

        assert ask()[1:] == ["0", "0"]
        ends = time.monotonic() + 60
        while (found := ask())[1] == "0":
            assert time.monotonic() < ends, found
            time.sleep(0.5)
        first, expected, known = found
        assert int(expected) > 32
        assert known == expected
        end(engines[first])
        assert ask()[0] == ({"a", "b"} - {first}).pop()
