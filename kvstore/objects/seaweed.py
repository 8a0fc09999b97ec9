"""A SeaweedFS server of our own in a data folder: `kvtier up` without a store URL, the demo and the tests.

One process (`weed mini`) with everything in it, on loopback. The folder holds its data, its ports and its random credentials, so a
later start on the same folder finds everything again, also after kill -9 of the server, of its parent, or of both.
"""

from __future__ import annotations

import asyncio
import fcntl
import http.client
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Unavailable, Unsupported
from kvstore.objects.credentials import Credentials
from kvstore.objects.settings import S3Settings
from kvstore.objects.signing import UNSIGNED, sign

_READY_S: Final = 60.0
_STOP_S: Final = 10.0
_PORTS: Final = ("s3", "master", "volume", "filer", "admin")
_LOWEST_PORT, _HIGHEST_PORT = 20_000, 32_000  # below the ports that outgoing connections take, so that they are free again later

# The child asks to be killed when its parent dies (PR_SET_PDEATHSIG = 1), looks whether that has happened already, and becomes the
# server: nothing is left running after a kill -9 of the parent. Killed, not asked to stop: without its folder it would not, and
# what it acknowledged survives either way. On a machine that has no time for both, the node, which answers engines, goes first: so
# a lower priority, of the process and of the scheduling group that its session is (see kvstore.lifecycle.process).
_RUN_WITH_PARENT: Final = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); parent = int(sys.argv[1]); "
    "os.getppid() == parent or sys.exit(1); os.nice(5)\n"
    "try: open('/proc/self/autogroup', 'w').write('5')\n"
    "except OSError: pass\n"
    "os.execv(sys.argv[2], sys.argv[2:])"
)


class _State(msgspec.Struct, frozen=True):
    """What the folder remembers."""

    access_key: str
    secret_key: str
    ports: dict[str, int]


class SeaweedFS:
    """A running server. Start it from the main thread: it ends with the thread that started it.

    Attributes:
        bucket: Its bucket.
        endpoint: URL of its S3 service.
        credentials: Its only identity, which may do everything.
    """

    def __init__(self, folder: Path, bucket: str, process: subprocess.Popen[bytes], state: _State) -> None:
        self._folder, self._process = folder, process
        self.bucket = bucket
        self.endpoint = f"http://127.0.0.1:{state.ports['s3']}"
        self.credentials = Credentials(state.access_key, state.secret_key)
        self._ports = state.ports

    @classmethod
    @asynccontextmanager
    async def open(cls, folder: Path, bucket: str = "kvtier") -> AsyncIterator[SeaweedFS]:
        """A server for as long as the block runs, with a bucket made at its first start.

        Raises:
            Unsupported: There is no `weed` binary: the extra `local` brings it.
            Unavailable: It did not come up, or another one uses the folder.
        """
        server = cls.launch(folder, bucket)  # here and not in a helper thread, whose end would end the server
        try:
            await asyncio.to_thread(server.wait_ready)
        except BaseException:
            server.kill()  # nobody used it: nothing is gained by the ten seconds that it may take to stop while it starts
            raise
        try:
            yield server
        finally:
            await asyncio.to_thread(server.stop)

    @classmethod
    def launch(cls, folder: Path, bucket: str = "kvtier") -> SeaweedFS:
        """Start the process, without waiting until it answers (`wait_ready`). Raises as `open`."""
        binary = find_weed()
        folder = folder.resolve()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
        try:
            state = _remembered(folder / "seaweed.json")
            _sweep(state.ports)  # they are free: what is there is left from a server that was killed
            with (folder / "seaweed.log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        sys.executable,
                        "-I",
                        "-S",
                        "-c",
                        _RUN_WITH_PARENT,
                        str(os.getpid()),
                        *_command(binary, folder, bucket, state),
                    ],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=folder,
                    pass_fds=(lock,),  # the lock goes along, and is held for as long as the server lives
                    start_new_session=True,  # Ctrl-C in the terminal is for us, who then stop it in order
                    env={
                        "PATH": os.environ.get("PATH", ""),
                        "HOME": str(folder),
                        "AWS_ACCESS_KEY_ID": state.access_key,
                        "AWS_SECRET_ACCESS_KEY": state.secret_key,
                        "WEED_S3_SSE_KEY": state.secret_key,
                    },
                )
        finally:
            os.close(lock)
        return cls(folder, bucket, process, state)

    @property
    def pid(self) -> int:
        """Of its process, which leads a session."""
        return self._process.pid

    def settings(self) -> S3Settings:
        """How to reach its bucket."""
        return S3Settings(bucket=self.bucket, endpoint=self.endpoint)

    def wait_ready(self) -> None:
        """Block until its bucket answers. Raises `Unavailable` if the process ended or a minute has passed."""
        end = time.monotonic() + _READY_S
        while not self.healthy():
            if self._process.poll() is not None or time.monotonic() > end:
                raise Unavailable(
                    f"SeaweedFS in {self._folder} did not come up",
                    remedy=f"see {self._folder / 'seaweed.log'}: {self._last_words()}",
                )
            time.sleep(0.05)

    def healthy(self) -> bool:
        """Whether the bucket answers now, and the data it had before is within reach."""
        path = f"/{self.bucket}"
        headers = sign(
            self.credentials,
            self.settings().region,
            method="HEAD",
            host=f"127.0.0.1:{self._ports['s3']}",
            path=path,
            query="",
            headers={},
            payload=UNSIGNED,
            at=SystemClock().now(),
        )
        # Volumes are known to the master only after their server has signed on, up to 5 s later than the rest; objects would be
        # there and unreadable until then.
        signed_on = self._ask("master", "GET", "/dir/status", {})
        return signed_on is not None and b'"DataNodes":[{' in signed_on and self._ask("s3", "HEAD", path, headers) is not None

    def _ask(self, service: str, method: str, path: str, headers: dict[str, str]) -> bytes | None:
        """The body of a 200, else None."""
        connection = http.client.HTTPConnection("127.0.0.1", self._ports[service], timeout=2.0)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.read(1 << 20) if answer.status == http.client.OK else None
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def stop(self) -> None:
        """End the process: politely, then not."""
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _sweep(self._ports)

    def kill(self) -> None:
        """As a power cut would end it."""
        self._process.kill()
        self._process.wait()
        _sweep(self._ports)

    def _last_words(self) -> str:
        with suppress(OSError):
            return (self._folder / "seaweed.log").read_text(errors="replace")[-300:].strip()
        return ""


def find_weed() -> str:
    """Path of the binary: the one installed with this Python, or the one on the PATH."""
    found = shutil.which("weed", path=sysconfig.get_path("scripts")) or shutil.which("weed")
    if found is None:
        raise Unsupported("there is no `weed` binary", remedy="install kvtier[local], or give a store URL")
    return found


def _lock(folder: Path) -> int:
    """A descriptor whose lock says that the folder is in use. One that is just ending gets a moment."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    end = time.monotonic() + _STOP_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                os.close(lock)
                raise Unavailable(
                    f"another SeaweedFS uses {folder}", remedy="stop the other `kvtier up`, or choose another data folder"
                ) from None
            time.sleep(0.1)
        else:
            return lock


def _remembered(path: Path) -> _State:
    """Credentials and ports of the last start, if they are there and its ports are free; else new ones, written down."""
    kept: _State | None = None
    with suppress(OSError, msgspec.DecodeError):
        kept = msgspec.json.decode(path.read_bytes(), type=_State)
    if kept and set(kept.ports) == set(_PORTS) and all(map(_free, _both(kept.ports))):
        return kept
    ids = RandomIds()
    access, secret = (kept.access_key, kept.secret_key) if kept else (f"KVTIER{ids.new()[:14].upper()}", ids.new())
    state = _State(access, secret, _new_ports(ids))
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(state))
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    return state


def _new_ports(ids: RandomIds) -> dict[str, int]:
    while True:
        start = _LOWEST_PORT + int(ids.new(), 16) % (_HIGHEST_PORT - _LOWEST_PORT - 2 * len(_PORTS))
        ports = {name: start + 2 * n for n, name in enumerate(_PORTS)}
        if all(map(_free, _both(ports))):
            return ports


def _both(ports: dict[str, int]) -> list[int]:
    """Each service's HTTP port, and the one after it for its gRPC."""
    return [port + more for port in ports.values() for more in (0, 1)]


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a connection that lingers from before does not count
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _sweep(ports: dict[str, int]) -> None:
    """Remove the Unix sockets that a server which has ended left in /tmp: several for each start, and it removes none."""
    for name, port in ports.items():
        for left in (f"{name}-{port}", f"{name}-grpc-{port + 1}"):
            with suppress(OSError):  # never made, or another user's
                Path(f"/tmp/seaweedfs-{left}.sock").unlink()  # noqa: S108  the server's own choice; -filer.localSocket moves only one


def _command(binary: str, folder: Path, bucket: str, state: _State) -> list[str]:
    ports = [f"-{name}.port{suffix}={port + n}" for name, port in state.ports.items() for n, suffix in enumerate(("", ".grpc"))]
    return [
        binary, "-logtostderr=true", "mini", f"-dir={folder / 'data'}", f"-bucket={bucket}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1",
        *ports,
        # The master's log of elections is not needed with one master; replaying it makes the volumes sign on five seconds late.
        "-master.resumeState=false", "-master.telemetry=false",
        "-admin.ui=false", "-webdav=false", "-volume.preStopSeconds=0", "-s3.port.iceberg=0", "-s3.port.lance=0",
    ]  # fmt: skip
