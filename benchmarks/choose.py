"""Compute or load on a real node and a real store behind a slow link, beside loading everything and computing everything.

The model is a stand-in: it takes the time that a model of that speed takes, and computes nothing. A turn finds out what is stored,
loads what it chooses, and "computes" the rest. `cold`: everything is in the bucket only. `half`: the first half of the prompt is in
memory, as a system prompt is. Every turn of `choose` starts with the tiers in that state; its knowledge grows from turn to turn,
the first one knows the model's speed only. After a turn that left blocks out two of them are staged, as SessionCache does.

    python benchmarks/choose.py [--rates 2,10,40,80,160,0] [--tokens-per-second 5000] [--turns 6]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from _bench import BLOCK_BYTES, NAMESPACE, SHARD, fill, links, server, url
from _link import Link
from _node import EmptiedNode

import kvstore
from kvstore import codec
from kvstore.client.choice import Choice, Stored, steps
from kvstore.client.sync import SyncClient
from kvstore.ids import Link as BlockLink

BLOCKS = 16
MORE = 64  # tokens of the prompt that are not stored
TOKENS = BLOCKS * NAMESPACE.block_tokens
PROMPT = TOKENS + MORE
SLOPE = 0.25  # reading the last token of the prompt takes that much longer than the first
RAW = codec.layout(NAMESPACE, SHARD, NAMESPACE.block_tokens).raw_bytes
WORST = 1.05


class Bench:
    """A session in the bucket, a node, and a link between them."""

    def __init__(self, kv: SyncClient, node: EmptiedNode, link: Link, speed: float) -> None:
        self._kv, self._node, self._link = kv, node, link
        self._blocks: list[BlockLink] = links(BLOCKS)
        self._a = 1 / speed / (1 + SLOPE / 2)
        self._target = memoryview(bytearray(BLOCK_BYTES))
        kv.put(NAMESPACE, SHARD, self._blocks, fill(0))
        kv.commit("bench", namespace=NAMESPACE, base_version=0, blocks=self._blocks, durability="bucket")

    def compute_s(self, start: int, stop: int) -> float:
        """What the model takes for tokens [start, stop)."""
        return self._a * ((stop - start) + SLOPE / PROMPT * (stop * stop - start * start) / 2)

    def prepare(self, warm: int, rate: float) -> None:
        """That many blocks in memory, the others in the bucket alone, behind a link of that speed."""
        self._link.rate = 0.0
        time.sleep(0.05)
        self._load(self._blocks)  # what earlier turns have left under way has come
        self._node.drop("dram")
        if warm:
            self._load(self._blocks[:warm])
        self._link.rate = rate

    def load_all(self) -> float:
        """Seconds of a turn without a choice."""
        began = time.perf_counter()
        self._kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in self._blocks], reach="nvme")
        self._load(self._blocks)
        time.sleep(self.compute_s(TOKENS, PROMPT))
        return time.perf_counter() - began

    def compute_all(self) -> float:
        """Seconds of a turn without a store."""
        began = time.perf_counter()
        time.sleep(self.compute_s(0, PROMPT))
        return time.perf_counter() - began

    def choose(self, choice: Choice) -> tuple[float, int, str]:
        """Seconds of a turn with it, blocks loaded, and why no more."""
        began, began_on = time.perf_counter(), choice.monotonic()
        near = self._kv.lookup(namespace=NAMESPACE, prefix_ids=[link.prefix_id for link in self._blocks], reach="nvme").tiers
        tiers = near + ["bucket"] * (BLOCKS - len(near))
        stored = [Stored(link.tokens, RAW, tier) for link, tier in zip(self._blocks, tiers, strict=True)]
        loading = choice.begin(stored, PROMPT, began=began_on)
        came = 0
        for _, blocks in steps(self._kv, NAMESPACE, SHARD, self._blocks, loading):
            came += blocks.copy_into([self._target] * len(blocks), skip=RAW - BLOCK_BYTES)
        done = came * NAMESPACE.block_tokens
        seconds = self.compute_s(done, PROMPT)
        time.sleep(seconds)
        took = time.perf_counter() - began
        choice.observe_compute(done, PROMPT - done, seconds)
        self._stage(choice, came)
        return took, came, loading.miss

    def _stage(self, choice: Choice, came: int) -> None:
        rest = self._blocks[came : came + 2]
        if rest:
            began = time.perf_counter()
            self._load(rest)
            choice.observe_load("bucket", RAW * len(rest), time.perf_counter() - began)

    def _load(self, blocks: Sequence[BlockLink]) -> None:
        with self._kv.get(NAMESPACE, SHARD, blocks) as found:
            assert found.copy_into([self._target] * len(found), skip=RAW - BLOCK_BYTES) == len(blocks), found.miss


def measure(bench: Bench, name: str, warm: int, rate: float, turns: int) -> dict[str, object]:
    """One state of the tiers and one speed of the link."""
    whole = statistics.median(bench.compute_all() for _ in range(3))
    bench.prepare(warm, rate)
    load = bench.load_all()
    choice = Choice()
    for tokens in (PROMPT // 4, PROMPT // 2):
        choice.observe_compute(0, tokens, bench.compute_s(0, tokens))
    seen = []
    for _ in range(turns):
        bench.prepare(warm, rate)
        seen.append(bench.choose(choice))
    ratios = [took / whole for took, _, _ in seen]
    last = statistics.median(ratios[turns // 2 :])
    return {
        "name": f"choose_{name}",
        "mb_s": rate / 1e6 or None,
        "value": round(last * whole, 4),
        "unit": "s",
        "baseline": round(whole, 4),
        "ratio": round(last, 3),
        "ratio_worst_turn": round(max(ratios), 3),
        "ratio_first_turn": round(ratios[0], 3),
        "ratio_all_turns": round(statistics.mean(ratios), 3),
        "ratio_load_all": round(load / whole, 3),
        "blocks": [came for _, came, _ in seen],
        "of": BLOCKS,
        "target": WORST,
        "met": max(ratios) <= WORST,
    }


def main() -> None:
    """Every speed of the link, cold and half warm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", default="2,10,40,80,160,0", help="of the link, MB/s; 0: not slowed down")
    parser.add_argument("--tokens-per-second", type=float, default=5000.0, help="of the model, for the whole prompt")
    parser.add_argument("--turns", type=int, default=6)
    asked = parser.parse_args()
    with server() as (seaweed, folder), Link.open(seaweed.endpoint) as link:
        store = url(seaweed, "kv").replace(seaweed.endpoint, link.endpoint)
        flags = {"store.url": store, "store.codec": "raw", "dram.size": "256MiB", "node.listen": ""}
        with EmptiedNode.start(f"{folder}/node.sock", flags) as node, kvstore.open_sync(node.url) as kv:
            bench = Bench(kv, node, link, asked.tokens_per_second)
            for rate in (float(text) * 1e6 for text in asked.rates.split(",")):
                for name, warm in (("cold", 0), ("half", BLOCKS // 2)):
                    print(json.dumps(measure(bench, name, warm, rate, asked.turns)), flush=True)


if __name__ == "__main__":
    main()
