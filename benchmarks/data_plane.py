"""The data plane beside the bare medium, and beside what users would pick instead, in one run.

Every round measures every case once, in random order, each after an untimed pass of itself; the first round does not count. A ratio
is the median over rounds of a case's value by its baseline's in the same round.

    python benchmarks/data_plane.py [--json] [--rounds 5] [--sizes 2,8,32] [--rows dram_get_copy,...] [--folder DIR] [--peers KIT]
        [--moved 100]
                                    [--trace FILE]

With a trace, rows named policy come first: hit rates of eviction, as `benchmarks/policy.py` measures them.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import policy
from _cases import MIB, Result
from _workers import Worker, start_ours, start_peers
from memory import resident


class Row(NamedTuple):
    """A promise, and what it is measured against.

    Attributes:
        module: Where its case is.
        target: At least this ratio to the baseline; without one, at most this many microseconds for the median call.
        baseline: A case of the same module.
        peers: Other cases that answer the same need, ours and the kit's, as a pattern.
        once: Whether it does not depend on the size of a block: measured at the first one only.
    """

    module: str
    target: float
    baseline: str = ""
    peers: str = ""
    once: bool = False


ROWS: Final = {
    "dram_get_copy": Row("same_host", 0.90, "memcpy_out", "mooncake_local_get_into|(redis|valkey)_unix_get|lmc_cpu_get_copy"),
    "dram_lease": Row("same_host", 30),
    "dram_lease_512": Row("same_host", 1000, once=True),
    "dram_put": Row("same_host", 0.80, "memcpy_in", "mooncake_local_put_from|(redis|valkey)_unix_set|lmc_cpu_put"),
    "lookup": Row("same_host", 1000, once=True),
    "nvme_get": Row("nvme", 0.90, "nvme_get_raw", "lmc_disk_odirect_get.*"),
    "nvme_put": Row("nvme", 0.85, "nvme_put_raw", "lmc_disk_odirect_put.*"),
    "bucket_get": Row("bucket", 0.95, "bucket_get_raw", "bucket_get_digested|s3_(raw_http|obstore)_get.*|lmc_s3_b?get.*"),
    "bucket_get_null": Row("bucket", 1 / 1.3, "obstore_null", "http_null"),
    "bucket_get_tls": Row("bucket", 0.95, "http_tls", "obstore_tls"),
    "bucket_put": Row("bucket", 0.85, "bucket_put_raw", "s3_(raw_http|obstore)_put|lmc_s3_put"),
    "codec": Row("codec", 0.85, "codec_plain", once=True),
    "codec_lone": Row("codec", 1.5, "codec_one", once=True),
    "codec_encode_lone": Row("codec", 1.5, "codec_encode", once=True),
    "restore_dram": Row("restore_hf", 1 / 1.3, "restore_dram_bare", once=True),
    "restore_nvme": Row("restore_hf", 1 / 1.4, "restore_nvme_bare", once=True),
    "restore_bucket": Row("restore_hf", 1 / 1.25, "restore_bucket_bare", once=True),
}
_SEED: Final = 4


def measure(workers: Sequence[Worker], wanted: Sequence[tuple[Worker, str]], size: int, rounds: int) -> dict[str, list[Result]]:
    """What every round saw of every case; a case that failed once is left out of later rounds."""
    order, seen = random.Random(_SEED), dict[str, list[Result]]()
    failed: set[str] = set()
    for turn in range(rounds + 1):
        for worker, case in order.sample(wanted, len(wanted)):
            if case in failed:
                continue
            worker.measure(case, size)
            result = worker.measure(case, size)
            if "error" in result:
                failed.add(case)
                print(f"{case} at {size / MIB:g} MiB: {result['error']}", file=sys.stderr)
            elif turn:
                seen.setdefault(case, []).append(result)
        print(f"{size / MIB:g} MiB: round {turn} of {rounds}", file=sys.stderr)
    for worker in workers:
        worker.drop()
    return {case: results for case, results in seen.items() if case not in failed}


def lines(seen: Mapping[str, Sequence[Result]], rows: Mapping[str, Row], size: int) -> Iterator[dict[str, object]]:
    """A line for every row, and one for each of its peers."""
    for name, row in rows.items():
        if name not in seen:
            continue
        ours = seen[name]
        line: dict[str, object] = {"name": name, "mib": size / MIB}
        if row.baseline:
            base = seen[row.baseline]
            ratio = _ratio(ours, base)
            line |= {**_facts(ours), "ratio": ratio, "target": round(row.target, 3), "met": ratio >= row.target}
            line |= {"baseline": row.baseline, **{f"baseline_{key}": value for key, value in _facts(base).items()}}
        else:
            took = round(_median(ours, "p50_ms") * 1e3, 1)
            line |= {"value": took, "unit": "us", "p99_us": round(_median(ours, "p99_ms") * 1e3, 1)}
            line |= {"target": row.target, "met": took <= row.target}
        yield {**line, "rounds": len(ours)}
        for peer in [case for case in seen if row.peers and re.fullmatch(row.peers, case)]:
            against = {"vs_baseline": _ratio(seen[peer], seen[row.baseline]), "ours_by_peer": _ratio(ours, seen[peer])}
            yield {"name": f"{name}:{peer}", "mib": size / MIB, **_facts(seen[peer]), **against, "rounds": len(seen[peer])}


def _facts(results: Sequence[Result]) -> dict[str, object]:
    return {
        "value": round(_median(results, "gbps"), 3),
        "unit": "GB/s",
        "cpu_s_per_gb": round(_median(results, "cpu_s_per_gb"), 3),
        "srv_cpu_s_per_gb": round(_median(results, "srv_cpu_s_per_gb"), 3),
        "p50_ms": round(_median(results, "p50_ms"), 3),
        "p99_ms": round(_median(results, "p99_ms"), 3),
    }


def _median(results: Sequence[Result], key: str) -> float:
    return statistics.median(float(result[key]) for result in results)


def _ratio(ours: Sequence[Result], others: Sequence[Result]) -> float:
    pairs = zip(ours, others, strict=True)
    return round(statistics.median(float(one["gbps"]) / float(other["gbps"]) for one, other in pairs), 3)


def _table(line: Mapping[str, object]) -> str:
    met = {True: "met", False: "MISSED"}.get(bool(line["met"])) if "met" in line else ""
    ratio, target = line.get("ratio", line.get("vs_baseline", "")), line.get("target", "")
    return f"{line['name']!s:44} {line['mib']!s:>5} MiB  {line['value']!s:>9} {line['unit']:5} {ratio!s:>7} {target!s:>7} {met}"


def main() -> None:
    """Every size; rows that do not depend on it at the first one only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sizes", default="2,8,32", help="MiB")
    parser.add_argument("--rows", default=",".join([*ROWS, "memory"]), help="which ones")
    parser.add_argument("--moved", type=float, default=100, help="GB that go through a node before its memory is measured")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    parser.add_argument("--peers", type=Path, help="the kit with workers for other systems")
    parser.add_argument("--trace", type=Path, help="the conversation trace, for the policy's rows")
    asked = parser.parse_args()
    if asked.trace:
        policy.tell(policy.rows("conversation", policy.read(asked.trace), policy.CAPACITIES))
    names = asked.rows.split(",")
    chosen = {name: ROWS[name] for name in names if name != "memory"}
    modules = list(dict.fromkeys(row.module for row in chosen.values()))
    with ExitStack() as lifetime:
        ours = start_ours(modules, asked.folder, lifetime)
        peers = start_peers(asked.peers, lifetime) if asked.peers else []
        for index, size in enumerate(int(float(text) * MIB) for text in asked.sizes.split(",")):
            rows = {name: row for name, row in chosen.items() if not (row.once and index)}
            needed = {*rows, *(row.baseline for row in rows.values())}
            wanted = [(worker, case) for worker in ours for case in worker.cases if case in needed]
            patterns = [row.peers for row in rows.values() if row.peers]
            wanted += [
                (worker, case)
                for worker in [*ours, *peers]
                for case in worker.cases
                if any(re.fullmatch(p, case) for p in patterns)
            ]
            if not rows:
                continue
            for line in lines(measure([*ours, *peers], wanted, size, asked.rounds), rows, size):
                print(msgspec.json.encode(line).decode() if asked.json else _table(line), flush=True)
    if "memory" in names:
        line = resident(asked.moved, asked.folder)
        print(msgspec.json.encode(line).decode() if asked.json else _table(line), flush=True)


if __name__ == "__main__":
    main()
