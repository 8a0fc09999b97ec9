"""Which blocks a tier keeps: hits per block asked for by the tiers' policy, beside least-recently-used and S3-FIFO, on a trace.

A request asks for its blocks in prefix order; those that are not there come in, and others make way. The trace is the
conversation trace of Mooncake (FAST'25), in both halves and as a whole; figures of the policy were chosen on the first half. Traces
of other shapes are made here, to see that nothing depends on that one.

    python benchmarks/policy.py [--trace mooncake_conversation_trace.jsonl]

The trace is public: github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from tiering.policy import Lru
from tiering.policy_reuse import Reuse

CAPACITIES: Final = (3_000, 10_000, 30_000)
WANTED: Final = {3_000: 0.135, 10_000: 0.245, 30_000: 0.335}
Requests = Sequence[Sequence[bytes]]


class Cache(Protocol):
    """So many blocks."""

    def request(self, keys: Sequence[bytes]) -> int:
        """Ask for them; how many were there."""
        ...


class OfReuse:
    """The tiers' own object, asked for a request at a time."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._policy, self._held = capacity, Reuse(), set[bytes]()

    def request(self, keys: Sequence[bytes]) -> int:
        """How many were there; the rest comes in at once."""
        held, policy = self._held, self._policy
        policy.asked(keys)
        missing = [key for key in keys if key not in held]
        new = list(dict.fromkeys(missing))[: self._capacity]
        over = len(held) + len(new) - self._capacity
        if over > 0:
            held.difference_update(policy.victims(over))
        held.update(new)
        policy.add_many(new)
        return len(keys) - len(missing)


class OfLru:
    """The other policy of the tiers."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._policy, self._held = capacity, Lru(), set[bytes]()

    def request(self, keys: Sequence[bytes]) -> int:
        """How many were there; the rest comes in one by one."""
        held, policy, hits = self._held, self._policy, 0
        for key in keys:
            if key in held:
                hits += 1
                policy.touch(key)
                continue
            if len(held) == self._capacity and (victim := policy.victim()) is not None:
                held.remove(victim)
            held.add(key)
            policy.add(key)
        return hits


class OfS3Fifo:
    """Three queues (Yang, SOSP 2023): a tenth is probation, and it remembers four times as many as it holds."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._small, self._main, self._ghost = OrderedDict[bytes, int](), OrderedDict[bytes, int](), OrderedDict[bytes, None]()

    def request(self, keys: Sequence[bytes]) -> int:
        """How many were there; the rest comes in one by one."""
        hits = 0
        for key in keys:
            queue = self._small if key in self._small else self._main
            if key in queue:
                hits += 1
                queue[key] = min(3, queue[key] + 1)
                continue
            while len(self._small) + len(self._main) >= self._capacity:
                self._evict()
            if key in self._ghost:
                del self._ghost[key]
                self._main[key] = 0
            else:
                self._small[key] = 0
        return hits

    def _evict(self) -> None:
        if len(self._small) >= self._capacity // 10 or not self._main:
            key, uses = self._small.popitem(last=False)
            if uses:
                self._main[key] = 0
                return
            self._ghost[key] = None
            if len(self._ghost) > 4 * self._capacity:
                self._ghost.popitem(last=False)
            return
        key, uses = self._main.popitem(last=False)
        if uses:
            self._main[key] = uses - 1


POLICIES: Final[dict[str, Callable[[int], Cache]]] = {"reuse": OfReuse, "lru": OfLru, "s3_fifo": OfS3Fifo}


def replay(requests: Requests, cache: Cache) -> tuple[float, float, float, float]:
    """Hit rates of the whole and of both halves of the requests, and blocks asked for per second."""
    middle = len(requests) // 2
    started = time.perf_counter()
    first = sum(map(cache.request, requests[:middle]))
    second = sum(map(cache.request, requests[middle:]))
    took = time.perf_counter() - started
    early, late = (sum(map(len, part)) for part in (requests[:middle], requests[middle:]))
    return (first + second) / (early + late), first / early, second / late, (early + late) / took


def rows(name: str, requests: Requests, capacities: Sequence[int]) -> Iterator[dict[str, object]]:
    """One row for each capacity: hit rates of all policies, in one run."""
    for capacity in capacities:
        row: dict[str, object] = {"name": "policy", "trace": name, "capacity": capacity}
        for policy, start in POLICIES.items():
            whole, first, second, speed = replay(requests, start(capacity))
            row[policy] = {"whole": round(whole, 4), "first_half": round(first, 4), "second_half": round(second, 4)}
            row[f"{policy}_per_second"] = round(speed)
        if name == "conversation":
            row["wanted"] = WANTED.get(capacity)
        yield row


def key(block: int) -> bytes:
    """A block's name."""
    return block.to_bytes(8, "little")


def read(path: Path) -> Requests:
    """A trace of JSON lines, in the order of time."""

    class Line(msgspec.Struct):
        timestamp: int
        hash_ids: list[int]

    with path.open("rb") as file:
        lines = [msgspec.json.decode(line, type=Line) for line in file if line.strip()]
    return [[key(block) for block in line.hash_ids] for line in sorted(lines, key=lambda line: line.timestamp)]


def zipf(rng: random.Random) -> Requests:
    """Single blocks, some far more popular than others: a cache of objects, no chain."""
    weights = list(itertools.accumulate(1 / rank**0.9 for rank in range(1, 50_001)))
    return [[key(block)] for block in rng.choices(range(50_000), cum_weights=weights, k=150_000)]


def scans(rng: random.Random) -> Requests:
    """Chats of a few turns, and every so often a batch job that reads 2,000 documents once."""
    fresh, chats, out = itertools.count(), list[list[bytes]](), list[Requests]()
    for turn in range(6_000):
        chat = rng.choice(chats) if chats and rng.random() < 0.7 else []
        if not chat:
            chats = [*chats[-150:], chat]
        chat += [key(next(fresh)) for _ in range(4)]
        out.append([list(chat[-60:] if len(chat) > 60 else chat)])
        if turn % 1_500 == 1_499:
            out.append([[key(next(fresh)) for _ in range(20)] for _ in range(2_000)])
    return [request for part in out for request in part]


def agents(rng: random.Random) -> Requests:
    """A few templates shared by all, 60 agents at once, 40 turns each, with pauses for tools."""
    fresh = itertools.count()
    templates = [[key(next(fresh)) for _ in range(12)] for _ in range(5)]
    running, out = list[tuple[list[bytes], int]](), []
    for _ in range(8_000):
        while len(running) < 60:
            running.append((list(rng.choice(templates)), 40))
        chain, left = running.pop(int(rng.random() ** 1.5 * len(running)))
        chain += [key(next(fresh)) for _ in range(rng.randrange(1, 4))]
        out.append(list(chain))
        if left:
            running.append((chain, left - 1))
    return out


def documents(rng: random.Random) -> Requests:
    """Long documents, asked about once; one in ten is asked about four times more, soon."""
    fresh, again, out = itertools.count(), list[list[bytes]](), []
    for _ in range(4_000):
        if again and rng.random() < 0.3:
            out.append(again.pop(rng.randrange(len(again))))
            continue
        document = [key(next(fresh)) for _ in range(rng.randrange(10, 90))]
        out.append(document)
        if rng.random() < 0.1:
            again += [document] * 4
    return out


def loops(rng: random.Random) -> Requests:
    """The same 400 prompts of 30 blocks in turn, again and again: the worst there is for recency."""
    prompts = [[key(prompt * 30 + at) for at in range(30)] for prompt in range(400)]
    return [prompt for _ in range(15) for prompt in rng.sample(prompts, len(prompts))]


SHAPES: Final = {"zipf": zipf, "scans": scans, "agents": agents, "documents": documents, "loops": loops}


def main(path: Path | None) -> int:
    """Replay, and print."""
    if path is not None and path.is_file():
        tell(rows("conversation", read(path), CAPACITIES))
    else:
        print("no conversation trace: name it with --trace FILE", file=sys.stderr)
    for name, shape in SHAPES.items():
        tell(rows(name, shape(random.Random(4)), (1_000, 4_000)))
    return 0


def tell(found: Iterator[dict[str, object]]) -> None:
    """A JSON object per line."""
    for row in found:
        print(msgspec.json.encode(row).decode(), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace of Mooncake, as JSON lines")
    sys.exit(main(parser.parse_args().trace))
