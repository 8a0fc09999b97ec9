"""One thing to measure, how it is timed, and a process that measures on request: one JSON object per line, in and out."""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

MIB = 1 << 20
Result = dict[str, float | int | str]


def _nothing() -> None:
    pass


class Case(NamedTuple):
    """`run(i)` is called for i in range(calls), timed one by one; then `after` once, not timed.

    Attributes:
        run: Moves `bytes_per_call` bytes. It asserts that it did.
        bytes_per_call: Bytes.
        calls: How many calls make up one measurement.
        after: Undoes what `run` did, where the next measurement needs that.
        servers: Processes whose CPU time is reported as the servers'.
    """

    run: Callable[[int], None]
    bytes_per_call: int
    calls: int
    after: Callable[[], None] = _nothing
    servers: Sequence[int] = ()


class Rows(Protocol):
    """A module of cases.

    Attributes:
        CASES: The names of its cases: rows of the table, and the baselines beside them.
    """

    CASES: Sequence[str]

    def cases(self, size: int, folder: Path) -> AbstractContextManager[Mapping[str, Case]]:
        """Its cases for values of `size` bytes; `folder` is an empty one, on the disk that is measured."""
        ...


def timed(case: Case) -> Result:
    """One measurement: GB/s, CPU-seconds per GB (of this process, and of the servers), and milliseconds per call."""
    took: list[float] = []
    servers, cpu, began = _cpu_of(case.servers), _cpu(), time.perf_counter()
    for i in range(case.calls):
        started = time.perf_counter()
        case.run(i)
        took.append(time.perf_counter() - started)
    wall, cpu, servers = time.perf_counter() - began, _cpu() - cpu, _cpu_of(case.servers) - servers
    case.after()
    moved = case.bytes_per_call * case.calls / 1e9
    took.sort()
    return {
        "gbps": moved / wall,
        "cpu_s_per_gb": cpu / moved,
        "srv_cpu_s_per_gb": servers / moved,
        "p50_ms": took[len(took) // 2] * 1e3,
        "p99_ms": took[min(len(took) - 1, int(len(took) * 0.99))] * 1e3,
        "calls": case.calls,
        "bytes_per_call": case.bytes_per_call,
    }


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _cpu_of(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


class _Open:
    """The cases of one size at a time."""

    def __init__(self, rows: Rows, folder: Path | None) -> None:
        self._rows, self._folder = rows, folder
        self._size = 0
        self._found: Mapping[str, Case] = {}
        self._closing = ExitStack()

    def case(self, name: str, size: int) -> Case:
        if size != self._size:
            self.close()
            self._found = self._closing.enter_context(_cases(self._rows, size, self._folder))
            self._size = size
        return self._found[name]

    def close(self) -> None:
        self._found, self._size = {}, 0
        self._closing.close()


@contextmanager
def _cases(rows: Rows, size: int, folder: Path | None) -> Iterator[Mapping[str, Case]]:
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=folder) as name, rows.cases(size, Path(name)) as found:
        yield found


def main() -> None:
    """Answer requests until there are no more: `{"case", "size"}` measures, `{"drop": 1}` lets go, `{"quit": 1}` ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", help="one of this folder's, with CASES and cases()")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    asked = parser.parse_args()
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # whatever a library prints is no answer
    rows: Rows = importlib.import_module(asked.module)
    now = _Open(rows, asked.folder)

    def say(answer: Mapping[str, object]) -> None:
        answers.write(msgspec.json.encode(answer) + b"\n")

    say({"ready": True, "cases": list(rows.CASES), "pid": os.getpid()})
    try:
        for line in sys.stdin:
            request = msgspec.json.decode(line, type=dict[str, str | int])
            if "quit" in request:
                break
            if "drop" in request:
                now.close()
                say({"ok": True})
                continue
            try:
                say(timed(now.case(str(request["case"]), int(request["size"]))))
            except Exception as error:  # noqa: BLE001  told to whoever measures, which goes on with the other cases
                say({"error": f"{type(error).__name__}: {error}"[:300]})
    finally:
        now.close()


if __name__ == "__main__":
    main()
