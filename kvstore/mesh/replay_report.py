"""What a replay comes to: figures of one run, of its halves, and of the minutes after something happened."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

import msgspec

from kvstore.mesh.replay import Answer
from kvstore.mesh.replay_costs import Machine
from kvstore.mesh.replay_nodes import POLICIES, Setup, Store
from kvstore.mesh.replay_trace import Request


class Figure(msgspec.Struct, frozen=True):
    """One result, stably named; `ratio` is of value to baseline."""

    name: str
    value: float
    unit: str
    baseline: float | None = None
    ratio: float | None = None


class Setting(msgspec.Struct, frozen=True, tag="replay", tag_field="event"):
    """What the figures that follow are of.

    Attributes:
        machine: What a node is.
        about: The same, for people.
        speedup: Requests arrive so many times as fast as in the trace.
        dram: Blocks in a node's memory; `nvme` on its disk.
    """

    machine: str
    about: str
    speedup: float
    requests: int
    nodes: int
    dram: int
    nvme: int
    policy: str
    sharing: bool
    bucket: bool


class Summary(msgspec.Struct, frozen=True):
    """Of some answers.

    Attributes:
        hit_rate: Leading blocks that were within reach, by blocks asked for.
        mean_s: Time to first token; so are the others of its kind.
        imbalance: Tokens computed by the node that computed most, by the mean of all that answered.
        computed_tokens: In all.
        gpu_bytes: Loaded from there; so are the others of its kind.
        dollars: Of the time in which GPUs loaded or computed, for a million tokens of prompts.
        off: Median error of the predicted time to first token, by what it was; 0 where nothing was predicted.
    """

    hit_rate: float
    mean_s: float
    p50_s: float
    p95_s: float
    p99_s: float
    imbalance: float
    computed_tokens: int
    dram_bytes: int
    nvme_bytes: int
    peer_bytes: int
    bucket_bytes: int
    dollars: float
    off: float

    def figures(self, name: str, baseline: Summary | None, hit_rate: float | None) -> Iterator[Figure]:
        """As results under a name.

        Args:
            name: What they begin with.
            baseline: What they are compared with, but the hit rate,
            hit_rate: which is compared with this.
        """
        for field, unit in _UNITS.items():
            value = getattr(self, field)
            than = hit_rate if field == "hit_rate" else getattr(baseline, field, None)
            yield Figure(f"{name}.{field}", value, unit, than, value / than if than else None)


_UNITS = {
    "hit_rate": "",
    "mean_s": "s",
    "p50_s": "s",
    "p95_s": "s",
    "p99_s": "s",
    "imbalance": "",
    "computed_tokens": "tokens",
    "dram_bytes": "B",
    "nvme_bytes": "B",
    "peer_bytes": "B",
    "bucket_bytes": "B",
    "dollars": "USD/M tokens",
    "off": "",
}


def summary(answers: Sequence[Answer], machine: Machine) -> Summary:
    """Of one or more answers."""
    times = sorted(one.ttft_s for one in answers)
    work = dict[str, int]()
    for one in answers:
        work[one.node] = work.get(one.node, 0) + one.found.tokens.computed
    computed = sum(work.values())
    tokens = [one.found.tokens for one in answers]
    busy = sum(one.load_s + one.compute_s for one in answers)
    prompts = computed + sum(one.found.split for one in answers)
    return Summary(
        hit_rate=sum(one.hits for one in answers) / max(1, sum(one.blocks for one in answers)),
        mean_s=statistics.fmean(times),
        p50_s=_part(times, 0.5),
        p95_s=_part(times, 0.95),
        p99_s=_part(times, 0.99),
        imbalance=max(work.values()) * len(work) / computed,
        computed_tokens=computed,
        dram_bytes=sum(one.dram for one in tokens) * machine.token_bytes,
        nvme_bytes=sum(one.nvme for one in tokens) * machine.token_bytes,
        peer_bytes=sum(one.peer for one in tokens) * machine.token_bytes,
        bucket_bytes=sum(one.bucket for one in tokens) * machine.token_bytes,
        dollars=busy / 3600 * machine.hour / prompts * 1e6,
        off=statistics.median(abs(one.predicted_s - one.ttft_s) / one.ttft_s if one.predicted_s else 0.0 for one in answers),
    )


def halves(answers: Sequence[Answer]) -> tuple[Sequence[Answer], Sequence[Answer]]:
    """Of one run, by number of requests; either has one at least where there are two."""
    middle = len(answers) // 2
    return answers[:middle], answers[middle:]


def pool(setup: Setup, requests: Sequence[Request]) -> float:
    """The hit rate of one cache with the room of all nodes, which has every block at once: what sharing could come to."""
    store = Store(setup.nodes * setup.dram, POLICIES[setup.policy]())
    hits = asked = 0
    for request in requests:
        store.policy.asked(request.keys)
        hits += next((at for at, key in enumerate(request.keys) if key not in store.held), len(request.keys))
        asked += len(request.keys)
        store.put(request.keys)
    return hits / max(1, asked)


def _part(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]
