"""Nodes of a mesh on a trace, by a virtual clock: who gets a prompt, what is loaded and computed for it, and when it is answered.

The policy of the tiers, the price and the router are the product's own objects. What is simulated is the rest: an engine reads one
prompt after the other, each as `price` says of what is really there. Loading and computing do not overlap; a node sends to one peer
at a time; decoding is somebody else's work. What a node gains or loses is told to the router `TOLD_S` later, and a death is noticed
after `NOTICED_S`.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np

from kvstore.mesh.price import SOURCES, Priced, Prices, Table, price
from kvstore.mesh.replay_nodes import Job, Node, Setup, Store
from kvstore.mesh.replay_routers import ROUTERS
from kvstore.mesh.replay_trace import BLOCK_TOKENS, Request

TOLD_S: Final = 0.25
NOTICED_S: Final = 1.0
_DRAM, _NVME, _PEER, _BUCKET = (SOURCES.index(name) for name in ("dram", "nvme", "peer", "bucket"))


class Answer(msgspec.Struct, frozen=True):
    """What became of one request.

    Attributes:
        at_s: When it arrived.
        ttft_s: Until its first token.
        predicted_s: The same, as its node's price had it when it was routed; 0 where the router has no prices.
        node: Who answered.
        blocks: Of it.
        hits: Leading ones that were somewhere within reach when it was read.
        found: Where its tokens came from.
        load_s: Of all that, loading, and
        compute_s: computing.
    """

    at_s: float
    ttft_s: float
    predicted_s: float
    node: str
    blocks: int
    hits: int
    found: Priced
    load_s: float
    compute_s: float


class Replay:
    """One run."""

    def __init__(self, setup: Setup, requests: Sequence[Request]) -> None:
        self._setup, self._now = setup, 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._nodes: dict[str, Node] = {}
        self._holders: dict[bytes, dict[Node, None]] = {}  # who came first is first
        self._bucket: set[bytes] = set()
        self._answers: list[Answer] = []
        self._table = Table(["here"], [setup.machine.speeds])
        self._router = ROUTERS[setup.router](setup, lambda: self._now)
        for number in range(setup.nodes):
            self._join(f"n{number}")
        for request in requests:
            at = (request.at_s - requests[0].at_s) / setup.speed
            self._later(at, self._arrives(Job(request, at)))
        for change in setup.changes:
            self._later(change.at_s, self._changes(change.node, joins=change.joins))

    def run(self) -> list[Answer]:
        """What became of all requests, in the order of arrival."""
        while self._events:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return sorted(self._answers, key=lambda one: one.at_s)

    def _later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._order), event))

    def _arrives(self, job: Job) -> Callable[[], None]:
        def event() -> None:
            node = self._nodes[self._router.choose(job)]
            node.waiting.append(job)
            self._read(node)

        return event

    def _changes(self, name: str, *, joins: bool) -> Callable[[], None]:
        return (lambda: self._join(name)) if joins else (lambda: self._die(name))

    def _join(self, name: str) -> None:
        if name in self._nodes:  # another life, perhaps before the death was noticed
            self._router.left(self._nodes[name])
        node = self._nodes[name] = Node(name, self._setup)
        self._router.joined(node)

    def _die(self, name: str) -> None:
        node = self._nodes[name]
        node.alive = False
        for key in node.dram.held | node.nvme.held:
            self._holders[key].pop(node, None)

        def noticed() -> None:
            if self._nodes[name] is node:
                self._router.left(node)
            for job in node.jobs():
                self._arrives(job)()

        self._later(NOTICED_S, noticed)

    def _read(self, node: Node) -> None:
        """The engine takes the next prompt, if it is idle."""
        if node.reading or not node.waiting or not node.alive:
            return
        job = node.reading = node.waiting.popleft()
        keys = job.request.keys
        prices, hits = self._priced(node, job.request)
        priced, peers = prices.of(0), dict[Node, list[bytes]]()
        node.dram.policy.asked(keys)
        node.nvme.policy.asked(keys)
        for start, stop, source in prices.steps(0):
            for key in keys[start // BLOCK_TOKENS : -(-stop // BLOCK_TOKENS)]:
                if source == _DRAM:
                    node.dram.policy.touch(key)
                elif source == _PEER:
                    peers.setdefault(next(other for other in self._holders[key] if other is not node), []).append(key)
        load, compute = priced.load_ms / 1e3 + self._sent(peers), priced.compute_ms / 1e3

        def read() -> None:
            if node.alive:
                self._answers.append(
                    Answer(job.at_s, self._now - job.at_s, job.predicted_s, node.name, len(keys), hits, priced, load, compute)
                )
                self._keep(node, keys, {key for part in peers.values() for key in part})
                self._router.answered(job)
                node.reading = None
                self._read(node)

        self._later(load + compute, read)

    def _priced(self, node: Node, request: Request) -> tuple[Prices, int]:
        """By what is really within reach; and how many leading blocks are."""
        bounds, runs = list[int](), list[tuple[bool, ...]]()
        hits = 0
        for hits, key in enumerate(request.keys):
            holders = self._holders.get(key, {})
            peer = self._setup.sharing and len(holders) > (node in holders)
            here = (False, key in node.dram.held, key in node.nvme.held, peer, key in self._bucket)
            if not any(here):
                break
            if not runs or here != runs[-1]:
                bounds.append(hits)
                runs.append(here)
        else:
            hits = len(request.keys)
        tokens = [min(block * BLOCK_TOKENS, request.tokens) for block in (*bounds, hits)]
        flags = np.array(runs, np.bool_).reshape(len(runs), len(SOURCES)).T[:, None]
        return price(self._table, tokens, request.tokens, self._setup.machine.token_bytes, flags), hits

    def _sent(self, peers: Mapping[Node, Sequence[bytes]]) -> float:
        """Seconds until the last of these peers begins to send; each is busy for what it sends."""
        begins = self._now
        for node, keys in peers.items():
            node.dram.policy.asked(keys)
            node.nvme.policy.asked(keys)
            begins = max(begins, node.sends_until)
            nbytes = len(keys) * BLOCK_TOKENS * self._setup.machine.token_bytes
            node.sends_until = max(self._now, node.sends_until) + nbytes / self._setup.machine.speeds.peer.bytes_per_s
        return begins - self._now

    def _keep(self, node: Node, keys: Sequence[bytes], peers: Container[bytes]) -> None:
        """What a prompt leaves behind: what was computed stays here, what came from peers is the first to go."""
        made = [key for key in keys if key not in peers]
        self._put(node, node.dram, [key for key in keys if key in peers], last=True)
        self._put(node, node.dram, made)
        self._put(node, node.nvme, made)
        if self._setup.bucket and not self._bucket.issuperset(made):
            self._bucket.update(made)
            self._later(TOLD_S, lambda: self._router.stored(made))

    def _put(self, node: Node, store: Store, keys: Sequence[bytes], *, last: bool = False) -> None:
        new, gone = store.put(keys, last=last)
        for key in new:
            self._holders.setdefault(key, {})[node] = None
        for key in gone:
            if not node.has(key):
                self._holders[key].pop(node)
        if new or gone:
            self._later(TOLD_S, lambda: self._router.told(node.name, new, gone, disk=store is node.nvme))
