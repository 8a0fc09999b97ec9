"""Processes that measure on request: our own cases, and a kit's workers for what users would pick instead."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any, Self

import msgspec
from _cases import Result

HERE = Path(__file__).parent
# Of the kit: worker, the environment it runs in, its script, what it is told.
_PEERS: Sequence[tuple[str, str, str, Mapping[str, str]]] = (
    ("mooncake", "mooncake", "w_mooncake.py", {"MC_MODE": "local"}),
    ("redis", "redis", "w_redis.py", {}),
    ("lmcache", "lmcache", "w_lmcache.py", {}),
    ("s3", "servers", "w_s3ref.py", {}),
)


class Worker:
    """A process with a line protocol: a JSON object in, one out; the first one out says which cases it has."""

    def __init__(self, name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.name = name
        self._process, self._in, self._out = process, process.stdin, process.stdout
        self.cases: list[str] = self._answer().get("cases", [])

    @classmethod
    @contextmanager
    def start(
        cls, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None, errors: IO[bytes] | None = None
    ) -> Iterator[Self]:
        """Start one and wait until it is ready; stop it afterwards. It has no cases where it could not start."""
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=env)
        worker = cls(name, process)
        try:
            yield worker
        finally:
            worker._stop()

    def measure(self, case: str, size: int) -> Result:
        """One measurement, or `{"error": ...}`."""
        self._say({"case": case, "size": size})
        return self._answer()

    def drop(self) -> None:
        """Let go of what was made for a size."""
        self._say({"drop": 1})
        self._answer()

    def _say(self, request: Mapping[str, object]) -> None:
        self._in.write(msgspec.json.encode(request) + b"\n")
        self._in.flush()

    def _answer(self) -> dict[str, Any]:
        line = self._out.readline()
        return msgspec.json.decode(line, type=dict[str, Any]) if line.strip() else {"error": f"{self.name} ended"}

    def _stop(self) -> None:
        try:
            self._say({"quit": 1})
            self._process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()


def start_ours(modules: Sequence[str], folder: Path | None, lifetime: ExitStack) -> list[Worker]:
    """A worker for each module of cases in this folder."""
    where = ["--folder", str(folder)] if folder else []
    return [
        lifetime.enter_context(Worker.start(module, [sys.executable, HERE / "_cases.py", module, *where])) for module in modules
    ]


def start_peers(kit: Path, lifetime: ExitStack) -> list[Worker]:
    """The kit's workers, and the S3 server that two of them share. `PEERS` says where its packages are, `./.peers` by default."""
    packages = Path(os.environ.get("PEERS", ".peers")).resolve()
    env = {**os.environ, "PEERS": str(packages), "PYTHONPATH": str(kit)}
    errors = lifetime.enter_context((packages / "logs" / "kvtier.log").open("ab"))
    command = [sys.executable, str(kit / "s3srv.py")]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
    assert server.stdout is not None
    env["S3_EXTERNAL"] = str(msgspec.json.decode(server.stdout.readline())["pid"])
    server.wait()  # what it started goes on in a session of its own
    lifetime.callback(os.kill, int(env["S3_EXTERNAL"]), 15)
    workers = []
    for name, environment, script, told in _PEERS:
        python = packages / environment / "bin" / "python"
        workers.append(lifetime.enter_context(Worker.start(name, [python, kit / script, "--worker"], {**env, **told}, errors)))
    return workers
