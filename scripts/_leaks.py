"""Runs a command and fails when it leaves a process behind.

Whatever the command's descendants leave orphaned becomes a child of this process (PR_SET_CHILD_SUBREAPER), even after a
double fork with a cleaned environment; so after the command ended, every living child here is a leak. Leaks are named, ended and
turn exit status 0 into 1. A command that a signal ended gives 128 and its number, as in a shell.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 3.0  # what was told to stop at the very end of a run may take this long


def main(command: list[str]) -> int:
    """Run it; its exit status, or 1 where it leaked."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        print("leaks: this kernel has no child subreapers; left-over processes go unnoticed", file=sys.stderr)
    # Neither signal may end us before the command: Ctrl-C reaches it as well, SIGTERM is passed on.
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    process = subprocess.Popen(
        command,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, signals),  # noqa: PLW1509  this process has one thread
    )
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
    status = process.wait()
    if status < 0:
        print(f"leaks: the run was ended by signal {-status} ({signal.Signals(-status).name})", file=sys.stderr)
        status = 128 - status
    leaked = _left_after(GRACE_S)
    for pid, what in leaked.items():
        print(f"leaks: the run left process {pid} behind: {what}", file=sys.stderr)
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    if leaked:
        return status or 1
    print("leaks: no process was left behind", file=sys.stderr)
    return status


def _left_after(seconds: float) -> dict[int, str]:
    """Children that still live after a while; those that ended are reaped."""
    deadline = time.monotonic() + seconds
    while (left := _children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _children() -> dict[int, str]:
    """Living children of this process by pid, with their command lines."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    found: dict[int, str] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                arguments = (stat.parent / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
                found[int(stat.parent.name)] = b" ".join(arguments).decode(errors="replace")[:200]
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
