"""Which candidate answers a prompt soonest: all of them ranked by price, with reasons.

It decides by what it believes: where blocks are, how much work was given to whom, and how fast each is. All of that may be wrong,
and costs time only. There is no rule of affinity: a session returns to where its blocks are because that is cheapest.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np

from kvstore.cost import Costs
from kvstore.errors import Invalid
from kvstore.mesh.belief import MOST_BLOCKS, Belief
from kvstore.mesh.price import SOURCES, Flags, Priced, Speed, Speeds, Table, price

MOST_CANDIDATES: Final = 1024
MOST_TOKENS: Final = 1 << 24
LATELY_S: Final = 60.0  # over which a candidate's share of busy time is taken
TIE: Final = 0.01  # prices nearer than this are the same: routers that know the same must not all take the first one
_UNFINISHED: Final = 4096  # requests of a candidate that are waited for, at most
_KEY: Final = 32
_BUCKET: Final = SOURCES.index("bucket")


class Candidate(msgspec.Struct, frozen=True):
    """An engine that could answer.

    Attributes:
        name: Its own; unique.
        node: The node it loads from; several engines may share one.
        shares: Whether its node loads from peers.
    """

    name: str
    node: str
    shares: bool = True


class Prompt(msgspec.Struct, frozen=True):
    """What is to be answered.

    Attributes:
        keys: Of its blocks in order, 32 bytes each: the first 8 tell them apart. A partial block may be the last.
        tokens: Of all of it.
        block_tokens: Of each block but the last.
        token_bytes: Of the KV of one token.
    """

    keys: Sequence[bytes]
    tokens: int
    block_tokens: int
    token_bytes: int


class Ticket(NamedTuple):
    """One routed request, until its first token."""

    candidate: str
    number: int


class _Engine:
    """One candidate's row, what was learned of it, and what it was given.

    `places` are bits of the belief: what the GPU has, what was routed here, what the node's memory and its disk have.
    """

    def __init__(self, candidate: Candidate, speeds: Speeds, costs: Costs, places: tuple[int, int, int, int]) -> None:
        self.candidate, self.assumed, self.costs, self.places = candidate, speeds, costs, places
        self.speeds = speeds
        self.unfinished: OrderedDict[int, float] = OrderedDict()
        self.free_at = self.spent_at = -math.inf
        self.spent = 0.0

    def learned(self) -> Speeds:
        """What was seen, and where nothing was seen what was assumed."""
        costs, assumed = self.costs, self.assumed
        token = costs.compute(0, 1)
        both = costs.compute(1, 2)

        def source(name: str, otherwise: Speed) -> Speed:
            once, more = costs.load(name, 0), costs.load(name, 1, 0)
            return otherwise if once is None or more is None else Speed(once, 1 / max(more, 1e-15))

        return Speeds(
            token_s=assumed.token_s if token is None else token,
            position_s=assumed.position_s if token is None or both is None else both - token,
            dram=source("dram", assumed.dram),
            nvme=source("nvme", assumed.nvme),
            peer=source("peer", assumed.peer),
            bucket=source("bucket", assumed.bucket),
            pass_s=assumed.pass_s,
        )


class Router:
    """Ranks candidates. Not thread-safe: on one loop. Never waits, and takes nothing from a clock but what it was given.

    Args:
        monotonic: The clock.
        jitter: A number in [0, 1), to tell equals apart.
        most_blocks: Beliefs, at most.
    """

    def __init__(self, monotonic: Callable[[], float], jitter: Callable[[], float], *, most_blocks: int = MOST_BLOCKS) -> None:
        self._monotonic, self._jitter = monotonic, jitter
        self._belief = Belief(most_blocks)
        self._bucket, self._elsewhere = self._belief.place(), self._belief.place()
        self._engines: dict[str, _Engine] = {}
        self._nodes: dict[str, tuple[int, int]] = {}  # memory and disk
        self._numbers = itertools.count()
        self._table: Table | None = None
        self._columns = _Columns([])

    def join(self, candidate: Candidate, speeds: Speeds) -> None:
        """One more, or an earlier one anew: nothing is believed of it yet.

        Args:
            candidate: Who.
            speeds: What is assumed until something was measured.

        Raises:
            Invalid: There are 1,024.
        """
        self.leave(candidate.name)
        if len(self._engines) >= MOST_CANDIDATES:
            raise Invalid(f"a router ranks {MOST_CANDIDATES} candidates at most")
        belief = self._belief
        memory = self._nodes.get(candidate.node)
        if memory is None:
            memory = self._nodes[candidate.node] = (belief.place(), belief.place())
        places = (belief.place(), belief.place(), *memory)
        self._engines[candidate.name] = _Engine(candidate, speeds, Costs(self._monotonic), places)
        self._table = None

    def leave(self, name: str) -> None:
        """It is gone; who never came may leave, too. What its node held is gone with the node's last engine."""
        engine = self._engines.pop(name, None)
        if engine is None:
            return
        node = engine.candidate.node
        last = all(other.candidate.node != node for other in self._engines.values())
        for bit in engine.places if last else engine.places[:2]:
            self._belief.forget(bit)
        if last:
            del self._nodes[node]
        self._table = None

    def rank(self, prompt: Prompt, most: int = MOST_CANDIDATES) -> list[Priced]:
        """The cheapest first, `most` of them; empty where there is nobody.

        Raises:
            Invalid: The prompt has no tokens, too many, or keys that are not 32 bytes.
        """
        _check(prompt)
        if not self._engines:
            return []
        table, now = self._rows(), self._monotonic()
        for row, engine in enumerate(self._engines.values()):
            table.queue_s[row] = max(0.0, engine.free_at - now)
            table.busy[row] = engine.spent * math.exp((engine.spent_at - now) / LATELY_S) / LATELY_S
        runs = self._belief.runs(prompt.keys)
        bounds = [min(block * prompt.block_tokens, prompt.tokens) for block in runs.bounds]
        here = self._columns.here(runs.places, self._bucket, self._elsewhere)
        prices = price(table, bounds, prompt.tokens, prompt.token_bytes, here)
        told_apart = prices.price * [1 + TIE * self._jitter() for _ in table.names]
        return [prices.of(row) for row in np.argsort(told_apart, kind="stable")[:most].tolist()]

    def chosen(self, prompt: Prompt, priced: Priced) -> Ticket:
        """That one answers it: it is busy for so long, and is believed to have these blocks then. `answered` when it has."""
        engine, now = self._engines.get(priced.candidate), self._monotonic()
        ticket = Ticket(priced.candidate, next(self._numbers))
        if engine is not None:
            seconds = (priced.load_ms + priced.compute_ms) / 1e3
            engine.free_at = max(now, engine.free_at) + seconds
            engine.spent = engine.spent * math.exp((engine.spent_at - now) / LATELY_S) + seconds
            engine.spent_at = now
            engine.unfinished[ticket.number] = seconds
            if len(engine.unfinished) > _UNFINISHED:
                engine.unfinished.popitem(last=False)
            self._belief.add(engine.places[1], prompt.keys)
        return ticket

    def answered(self, ticket: Ticket) -> None:
        """Its first token came, or it failed: what waits there is what was given to it afterwards. A second call does nothing."""
        engine = self._engines.get(ticket.candidate)
        if engine is None or ticket.number not in engine.unfinished:
            return
        while engine.unfinished.popitem(last=False)[0] != ticket.number:
            pass  # an engine reads prompts in turn: what was before it was answered, or never will be
        engine.free_at = self._monotonic() + sum(engine.unfinished.values())

    def queued(self, name: str, seconds: float) -> None:
        """An engine says how much work waits there, of whoever's; it knows better."""
        if (engine := self._engines.get(name)) is not None:
            engine.free_at = self._monotonic() + max(0.0, seconds)

    def observe_compute(self, name: str, start: int, tokens: int, seconds: float) -> None:
        """It has read so many tokens behind `start` others in so many seconds; see `kvstore.cost.Costs`."""
        if (engine := self._engines.get(name)) is not None:
            engine.costs.observe_compute(start, tokens, seconds)
            self._learn(engine)

    def observe_load(self, name: str, source: str, nbytes: int, seconds: float) -> None:
        """It has loaded so many bytes of one source in so many seconds."""
        if (engine := self._engines.get(name)) is not None and source in SOURCES[1:]:
            engine.costs.observe_load(source, nbytes, seconds)
            self._learn(engine)

    def engine_has(self, name: str, keys: Sequence[bytes]) -> None:
        """The engine's own cache has these now."""
        if (engine := self._engines.get(name)) is not None:
            self._belief.add(engine.places[0], keys)

    def engine_lost(self, name: str, keys: Sequence[bytes]) -> None:
        """The engine's own cache has these no more; its node may."""
        if (engine := self._engines.get(name)) is not None:
            self._belief.drop(engine.places[:1], keys)

    def engine_cleared(self, name: str) -> None:
        """The engine's own cache is empty."""
        if (engine := self._engines.get(name)) is not None:
            engine.places = (self._anew(engine.places[0]), *engine.places[1:])
            self._table = None

    def node_shares(self, node: str, *, shares: bool) -> None:
        """Whether a node loads from peers, and they from it."""
        for engine in self._engines.values():
            if engine.candidate.node == node and engine.candidate.shares != shares:
                engine.candidate = msgspec.structs.replace(engine.candidate, shares=shares)
                self._table = None

    def node_has(self, node: str, keys: Sequence[bytes], *, disk: bool = False) -> None:
        """A node has these now, in memory or on its disk."""
        if (places := self._nodes.get(node)) is not None:
            self._belief.add(places[disk], keys)

    def node_lost(self, node: str, keys: Sequence[bytes], *, disk: bool = False) -> None:
        """A node's memory, or its disk, has these no more."""
        if (places := self._nodes.get(node)) is not None:
            routed = [engine.places[1] for engine in self._engines.values() if engine.candidate.node == node]
            self._belief.drop([places[disk], *routed], keys)

    def node_cleared(self, node: str) -> None:
        """A node has nothing at all: neither in memory nor on its disk."""
        if (places := self._nodes.get(node)) is None:
            return
        memory = self._nodes[node] = (self._anew(places[0]), self._anew(places[1]))
        for engine in self._engines.values():
            if engine.candidate.node == node:
                engine.places = (engine.places[0], self._anew(engine.places[1]), *memory)
        self._table = None

    def peers_have(self, keys: Sequence[bytes]) -> None:
        """Nodes without a candidate here have these: whoever loads from peers gets them there."""
        self._belief.add(self._elsewhere, keys)

    def peers_lost(self, keys: Sequence[bytes]) -> None:
        """And these none of them has."""
        self._belief.drop([self._elsewhere], keys)

    def bucket_has(self, keys: Sequence[bytes]) -> None:
        """These are in the bucket, for everyone."""
        self._belief.add(self._bucket, keys)

    def bucket_lost(self, keys: Sequence[bytes]) -> None:
        """And these are not."""
        self._belief.drop([self._bucket], keys)

    def _anew(self, bit: int) -> int:
        self._belief.forget(bit)
        return self._belief.place()

    def _learn(self, engine: _Engine) -> None:
        engine.speeds = engine.learned()
        self._table = None

    def _rows(self) -> Table:
        if self._table is None:
            engines = list(self._engines.values())
            self._table = Table([one.candidate.name for one in engines], [one.speeds for one in engines])
            self._columns = _Columns(engines)
        return self._table


class _Columns:
    """Which columns of the belief are whose."""

    def __init__(self, engines: Sequence[_Engine]) -> None:
        self._gpu, self._routed, self._dram, self._nvme = (
            np.array([engine.places[at] for engine in engines], np.int64) for at in range(4)
        )
        self._shares = np.array([engine.candidate.shares for engine in engines], np.bool_)
        mine = {(engine.places[2], engine.places[3]) for engine in engines if engine.candidate.shares}
        self._peers_dram, self._peers_nvme = (np.array([one[at] for one in sorted(mine)], np.int64) for at in range(2))

    def here(self, places: Flags, bucket: int, elsewhere: int) -> Flags:
        """Whether a candidate can get a run from a source, (sources, candidates, runs)."""
        at = np.ascontiguousarray(places.T)
        found = np.zeros((len(SOURCES), len(self._gpu), len(places)), np.bool_)
        dram = at[self._dram]
        found[0], found[1], found[2] = at[self._gpu], dram | at[self._routed], at[self._nvme]
        peers = (at[self._peers_dram] | at[self._peers_nvme]).sum(axis=0) + at[elsewhere]
        found[3] = (peers > (dram | found[2])) & self._shares[:, None]
        found[_BUCKET] = at[bucket]
        return found


def _check(prompt: Prompt) -> None:
    if not 0 < prompt.tokens <= MOST_TOKENS or prompt.block_tokens < 1 or prompt.token_bytes < 1:
        raise Invalid(f"a prompt has 1 to {MOST_TOKENS} tokens, in blocks of at least one, of at least a byte")
    if len(prompt.keys) > -(-prompt.tokens // prompt.block_tokens):
        raise Invalid("a prompt has no more blocks than its tokens fill")
    if set(map(len, prompt.keys)) - {_KEY}:
        raise Invalid(f"keys have {_KEY} bytes")
