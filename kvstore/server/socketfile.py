"""The socket file of a node: who may open it, and that only one node has it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from kvstore.errors import AlreadyExists, Invalid

MAX_PATH: Final = 107  # sockaddr_un
_BACKLOG: Final = 128


class Peer(msgspec.Struct, frozen=True):
    """Who connected, as the kernel says."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """SO_PEERCRED: the process at the other end when it connected."""
    layout = struct.Struct("3i")
    return Peer(*layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)))


@contextmanager
def listening(path: str, mode: int) -> Iterator[socket.socket]:
    """A non-blocking listening socket at `path`, gone again at the end.

    A file that a dead node left is replaced; a lock beside it keeps two starting nodes from replacing each other's.

    Raises:
        AlreadyExists: Another node listens there, or something else than a socket has the name.
        Invalid: The path is too long for a socket, or its folder cannot be made.
    """
    if len(os.fsencode(path)) > MAX_PATH:
        raise Invalid(f"node.socket is {len(os.fsencode(path))} bytes long; a socket's path has at most {MAX_PATH}")
    try:
        Path(path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise Invalid(f"node.socket {path}: {error.strerror}") from None
    try:
        with _locked(lock, path), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _make_way(path)
            os.fchmod(listener.fileno(), mode)  # before bind, so that the file never has more rights, not even for a moment
            listener.bind(path)
            Path(path).chmod(mode)  # what the umask took away
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            mine = Path(path).stat()
            try:
                yield listener
            finally:
                with contextlib.suppress(FileNotFoundError):
                    if os.path.samestat(Path(path).stat(), mine):
                        Path(path).unlink()
    finally:
        os.close(lock)


@contextmanager
def _locked(lock: int, path: str) -> Iterator[None]:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyExists(f"another node has the socket {path}", remedy="stop it, or set another [node] socket") from None
    yield  # the lock ends with its descriptor


def _make_way(path: str) -> None:
    """Remove a socket that nobody listens on."""
    try:
        found = Path(path).lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise AlreadyExists(f"{path} exists and is no socket", remedy="remove it, or set another [node] socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise AlreadyExists(f"somebody listens on {path}", remedy="stop it, or set another [node] socket")
    Path(path).unlink()
