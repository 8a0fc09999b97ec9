"""The processes of the demo: a node, and the model's worker. All end with the demo, in whatever way it ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

import kvstore
from kvstore.errors import KVTierError, Unavailable

# They ask to be ended with their parent (PR_SET_PDEATHSIG), so that a kill -9 of the demo leaves none behind either.
_WITH_PARENT: Final = "import ctypes; ctypes.CDLL(None).prctl(1, 9); "
_START_S: Final = 60.0
_STOP_S: Final = 60.0


class Process:
    """A Python child that runs some code and writes its log into a folder. Start it from the main thread: it ends with it."""

    def __init__(
        self, name: str, code: str, *arguments: str, folder: Path, environment: Mapping[str, str], talks: bool = False
    ) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        pipe = subprocess.PIPE if talks else subprocess.DEVNULL
        with self._log.open("ab") as log:
            self.child = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT + code, *arguments],
                stdin=pipe,
                stdout=pipe if talks else log,
                stderr=log,
                env=os.environ | dict(environment),
                start_new_session=True,  # Ctrl-C is for the demo, which then ends its children in order
            )

    def kill(self) -> None:
        """As a crash would end it."""
        self.child.kill()
        self.child.wait()

    def stop(self) -> None:
        """Politely; then not."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        try:
            self.child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def failed(self, what: str) -> Unavailable:
        """An error with the end of the log, which is gone when the demo has ended."""
        words = self._log.read_text(errors="replace").strip().splitlines()[-8:]
        return Unavailable(f"the {self.name} {what}", remedy="its log ended with:\n" + "\n".join(f"    {line}" for line in words))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.child.stdin, self.child.stdout):
            if pipe is not None:
                pipe.close()


class Node:
    """A node that is started, killed and started again on one socket, one bucket and one folder for its disk tier."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._disk = folder, folder / "nvme"
        socket = folder / "node.sock"
        self.url = f"kvtier+unix://{socket}"
        self._environment = {
            "KVTIER_NODE_SOCKET": str(socket),
            "KVTIER_NODE_LISTEN": "",
            "KVTIER_NVME_PATH": str(self._disk),
            "KVTIER_NVME_SIZE": "384MiB",
            "KVTIER_DRAM_SIZE": "384MiB",
            **environment,
        }
        self._process: Process | None = None

    def start(self) -> None:
        """Start it, and wait until it may be sent work."""
        code = "from kvstore.cli.main import main; main()"
        self._process = Process("node", code, "serve", folder=self._folder, environment=self._environment)
        ends = time.monotonic() + _START_S
        while not self._ready():
            if self._process.child.poll() is not None:
                raise self._process.failed("ended at its start")
            if time.monotonic() > ends:
                raise self._process.failed(f"did not come up within {_START_S:.0f} s")
            time.sleep(0.05)

    def _ready(self) -> bool:
        try:
            with kvstore.open_sync(self.url) as client:
                return client.ready().ok
        except KVTierError:
            return False

    def stop(self) -> None:
        """In order: what it accepted is on disk and in the bucket."""
        if self._process is not None:
            self._process.stop()

    def kill(self) -> None:
        """With its memory; its disk stays."""
        if self._process is not None:
            self._process.kill()

    def lose_disk(self) -> None:
        """Delete what a killed node left behind."""
        shutil.rmtree(self._disk, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class Model:
    """The model's process, as an object: `model.ask("load", threads=1)` runs that command there."""

    def __init__(self, name: str, folder: Path) -> None:
        environment = {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),  # torch makes it when imported, by default in /tmp
        }
        code = "from kvstore.demo.worker import main; main()"
        self.process = Process(name, code, folder=folder, environment=environment, talks=True)

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        """Run a command of :class:`kvstore.demo.worker.Worker` and wait for its answer.

        Raises:
            Unavailable: It failed; the message says why.
        """
        child = self.process.child
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(msgspec.json.encode({"do": do, **fields}) + b"\n")
            child.stdin.flush()
        except BrokenPipeError:
            raise self.process.failed(f"ended before {do!r}") from None
        line = child.stdout.readline()
        if not line:
            raise self.process.failed(f"ended during {do!r}")
        answer: dict[str, Any] = msgspec.json.decode(line)
        if "error" in answer:
            raise Unavailable(f"the {self.process.name} could not {do}: {answer['error']}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.__exit__()
