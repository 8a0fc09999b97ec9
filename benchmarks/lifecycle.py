"""What a time to live, or a limit, costs in hits and saves in bytes: on the conversation trace of Mooncake (FAST'25), replayed.

Each request of the trace is a turn: it looks for its blocks of 512 tokens, and commits them. `ttl` lets every session live for so
long after its last turn, by the product's own rule; a block is there while a session that names it lives. `lru` keeps so many
blocks, by the tiers' own policy. Nothing is stored: only the decisions are replayed, in the order and at the times of the trace.

Hit rates are hits per block asked for, beside figures that were computed from the same trace by other means. Live bytes are a mean
over the trace's duration, for a model of 128 KiB per token, beside what would be alive if nothing ever went.

    python benchmarks/lifecycle.py --trace mooncake_conversation_trace.jsonl

The trace is public: github.com/kvcache-ai/Mooncake, FAST25-release/traces/conversation_trace.jsonl.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec
from _bench import report

from kvstore import codec
from kvstore.ids import Namespace, Shard
from kvstore.model import Branch
from kvstore.repo.heads import expired, next_version, renewed
from tiering.policy import Lru

BLOCK_TOKENS: Final = 512  # of the trace
MODEL: Final = Namespace(
    model="llama-8b", revision="1", layers=32, kv_heads=8, head_dim=128, dtype="BF16", block_tokens=BLOCK_TOKENS
)
BLOCK_BYTES: Final = codec.layout(MODEL, Shard(), BLOCK_TOKENS).raw_bytes
BY_TTL: Final = {60: 0.100, 300: 0.288, 600: 0.343}  # seconds: hit rate, each use renewing a block
BY_LRU: Final = {1_000: 0.045, 3_000: 0.065, 10_000: 0.212, 30_000: 0.326, 50_000: 0.355}  # blocks: hit rate


class Turn(msgspec.Struct, frozen=True):
    """A request of the trace: milliseconds since its beginning, and its blocks in prefix order."""

    timestamp: int
    hash_ids: list[int]

    @property
    def at(self) -> float:
        """Seconds since its beginning."""
        return self.timestamp / 1000


class Outcome(msgspec.Struct):
    """What a replay found."""

    asked: int = 0
    hits: int = 0
    block_seconds: float = 0.0

    def rate(self) -> float:
        """Hits per block asked for."""
        return self.hits / self.asked

    def live_gib(self, turns: Sequence[Turn]) -> float:
        """Mean over the trace."""
        return self.block_seconds / (turns[-1].at - turns[0].at) * BLOCK_BYTES / 2**30


def by_ttl(turns: Sequence[Turn], ttl: int) -> Outcome:
    """Sessions that live so long after their last turn (0: for ever). A block's life is that of the last session that named it."""
    found, end = Outcome(), turns[-1].at
    naming: dict[int, Branch] = {}
    since: dict[int, float] = {}
    for turn in turns:
        # A turn's commit renews its session whatever is left of it; a restore before it has nothing to add.
        session = renewed(next_version(Branch(seq=0), manifest="", n=len(turn.hash_ids), at=turn.at, history=0), turn.at, ttl)
        for block in turn.hash_ids:
            found.asked += 1
            last = naming.get(block)
            if last is not None and not expired(last, turn.at):
                found.hits += 1
            else:
                if last is not None:
                    found.block_seconds += last.expires - since[block]
                since[block] = turn.at
            naming[block] = session
    found.block_seconds += sum(min(session.expires or end, end) - since[block] for block, session in naming.items())
    return found


def by_lru(turns: Sequence[Turn], capacity: int) -> Outcome:
    """So many blocks; the least recently used one makes way."""
    found, before = Outcome(), turns[0].at
    policy, held = Lru(), set[bytes]()
    for turn in turns:
        found.block_seconds += len(held) * (turn.at - before)
        before = turn.at
        for key in map(_key, turn.hash_ids):
            found.asked += 1
            if key in held:
                found.hits += 1
                policy.touch(key)
                continue
            if len(held) == capacity and (victim := policy.victim()) is not None:
                held.remove(victim)
            held.add(key)
            policy.add(key)
    return found


def _key(block: int) -> bytes:
    return block.to_bytes(8, "little")


def read(lines: Iterable[bytes]) -> list[Turn]:
    """The trace, in the order of time."""
    return sorted((msgspec.json.decode(line, type=Turn) for line in lines if line.strip()), key=lambda turn: turn.timestamp)


def main(path: Path | None) -> int:
    """Replay, and print."""
    if path is None or not path.is_file():
        where = f"there is no file {path}" if path is not None else "no trace is named"
        print(f"{where}: name the public trace with --trace FILE\n\n{__doc__}", file=sys.stderr)
        return 2
    with path.open("rb") as file:
        turns = read(file)
    everything = by_ttl(turns, 0)
    unlimited = everything.live_gib(turns)
    for ttl, figure in BY_TTL.items():
        _tell(f"lifecycle/ttl/{ttl}s", by_ttl(turns, ttl), figure, turns, unlimited)
    for capacity, figure in BY_LRU.items():
        _tell(f"lifecycle/lru/{capacity}", by_lru(turns, capacity), figure, turns, unlimited)
    _tell("lifecycle/unlimited", everything, 0.366, turns, unlimited)
    return 0


def _tell(name: str, found: Outcome, figure: float, turns: Sequence[Turn], unlimited: float) -> None:
    report(f"{name}/hit_rate", "hits per block", [found.rate()], [figure], blocks=found.asked)
    report(f"{name}/live", "GiB", [found.live_gib(turns)], [unlimited])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, metavar="FILE", help="the conversation trace of Mooncake, as JSON lines")
    sys.exit(main(parser.parse_args().trace))
