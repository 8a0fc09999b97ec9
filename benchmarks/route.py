"""Milliseconds of a route decision: 100 candidates, a prompt of 131,072 tokens in 512 blocks, in one process.

`cold`: nothing is believed of the prompt. `sessions`: it was routed before, and eight nodes have parts of it in memory or on disk.
`holes`: each node has nine in ten of its blocks, each others: every block is a run of its own, the worst there is. With `--blocks`
so many are believed to be somewhere besides. A decision ranks all and gives reasons for all; `chosen` is what the router notes when
it is taken. `cpu_p99_ms` leaves out what others on the machine took; the baseline is a loop of the interpreter that takes as long
in the median: how much of p99 is theirs.

    python benchmarks/route.py [--blocks 10000000] [--rounds 300]
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
import numpy as np

from kvstore.clock import SeededIds
from kvstore.mesh.replay_costs import MACHINES
from kvstore.mesh.router import Candidate, Prompt, Router

CANDIDATES: Final = 100
BLOCKS: Final = 512
TOKENS: Final = 256
WANTED_MS: Final = 5.0
_BATCH: Final = 1000


def keys(seed: int, count: int) -> list[bytes]:
    """Made up."""
    raw = np.random.default_rng(seed).bytes(32 * count)
    return [raw[at : at + 32] for at in range(0, len(raw), 32)]


class Bench:
    """A router and what is asked of it; the clock moves by 100 ms with each request."""

    def __init__(self, rounds: int) -> None:
        self._now, self._random, self._machine = 0.0, random.Random(1), MACHINES["8b-h100"]
        self.router = Router(lambda: self._now, SeededIds(1).jitter)
        for number in range(CANDIDATES):
            self.router.join(Candidate(f"e{number}", f"n{number}"), self._machine.speeds)
        self.prompts = [Prompt(keys(seed, BLOCKS), BLOCKS * TOKENS, TOKENS, self._machine.token_bytes) for seed in range(rounds)]

    def believe(self, blocks: int) -> None:
        """So many, each at one node."""
        for number in range(blocks // _BATCH):
            self.router.node_has(f"n{number % CANDIDATES}", keys(1_000_000 + number, _BATCH))

    def sessions(self) -> None:
        """Eight nodes have leading parts of each prompt."""
        for prompt in self.prompts:
            for _ in range(8):
                node, part = self._random.randrange(CANDIDATES), self._random.randrange(BLOCKS)
                self.router.node_has(f"n{node}", prompt.keys[:part], disk=self._random.random() < 0.5)

    def holes(self, prompts: Sequence[Prompt]) -> None:
        """Every node has nine in ten blocks of these prompts."""
        for prompt in prompts:
            for node in range(CANDIDATES):
                self.router.node_has(f"n{node}", [key for key in prompt.keys if self._random.random() < 0.9])

    def rows(self, name: str, prompts: Sequence[Prompt]) -> Iterator[dict[str, object]]:
        """Rank and choose, each with its baseline."""
        ranked, chosen, cpu = list[float](), list[float](), list[float]()
        for prompt in prompts:
            self._now += 0.1
            busy, began = time.thread_time(), time.perf_counter()
            best = self.router.rank(prompt)[0]
            middle = time.perf_counter()
            cpu.append(time.thread_time() - busy)
            self.router.chosen(prompt, best)
            chosen.append(time.perf_counter() - middle)
            ranked.append(middle - began)
        cpu.sort()
        for what, took, more in (
            ("rank", ranked, {"cpu_p99_ms": round(1e3 * cpu[int(len(cpu) * 0.99)], 3)}),
            ("chosen", chosen, {}),
        ):
            took.sort()
            spun = _spun(took[len(took) // 2], len(took))
            value, bare = (1e3 * one[int(len(one) * 0.99)] for one in (took, spun))
            yield {
                "name": f"route_{what}_p99:{name}",
                "value": round(value, 3),
                "unit": "ms",
                "baseline": round(bare, 3),
                "ratio": round(value / bare, 2),
                "p50_ms": round(1e3 * took[len(took) // 2], 3),
                "wanted": WANTED_MS,
                "samples": len(took),
                **more,
            }


def _spun(seconds: float, rounds: int) -> list[float]:
    """How long loops take that should take `seconds`."""
    began = time.perf_counter()
    sum(range(1_000_000))
    count = int(1_000_000 * seconds / (time.perf_counter() - began)) + 1
    took = list[float]()
    for _ in range(rounds):
        began = time.perf_counter()
        sum(range(count))
        took.append(time.perf_counter() - began)
    return sorted(took)


def main(blocks: int, rounds: int) -> None:
    """Print JSON lines."""
    for believed in dict.fromkeys((0, blocks)):
        bench = Bench(rounds)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        bench.believe(believed)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        name = f"{believed // 1_000_000}M_believed"
        found: list[dict[str, object]] = [*bench.rows(f"cold_{name}", bench.prompts)]
        bench.sessions()
        found += bench.rows(f"sessions_{name}", bench.prompts)
        bench.holes(bench.prompts[:50])
        found += bench.rows(f"holes_{name}", bench.prompts[:50])
        if believed:
            found.append(
                {"name": "route_memory", "value": round(grown), "unit": "MiB", "baseline": None, "ratio": None, "blocks": believed}
            )
        for row in found:
            print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="believed besides")
    parser.add_argument("--rounds", type=int, default=300, help="prompts")
    asked = parser.parse_args()
    main(asked.blocks, asked.rounds)
