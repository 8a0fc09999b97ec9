"""One seed, one run: nodes, users and collectors on one store; then quiet, two collections, and the last judgement."""

import asyncio
import contextvars
import hashlib
import logging
import random as randomness  # noqa: TID251  seeded below
from collections import Counter, deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from unittest import mock

from kvstore.clock import SeededIds
from kvstore.errors import KVTierError
from kvstore.keys import Keys
from kvstore.lifecycle import collector, reaping
from kvstore.objects import Crash, Create, MemoryStore, Update
from kvstore.repo.fsck import fsck
from kvstore.repo.testing import opened
from simulation import loop
from simulation.actors import Collector, User
from simulation.history import History
from simulation.library import Library
from simulation.node import Node
from simulation.seal import Clear
from simulation.truth import Truth
from simulation.wire import LONGEST, Life, Rates, StoreClock, Wire, digest, draw, task_of_its_life

TAIL = 400


@dataclass
class Setup:
    """How much happens in one run."""

    seconds: float = 60.0  # of the world
    nodes: int = 3
    users: int = 8
    collectors: int = 2
    think: float = 1.0  # mean seconds between what a user does
    rest: float = 4.0  # mean seconds between collections
    history: int = 3
    max_bytes: int = 0  # of live blocks; the least useful sessions go
    longest: float = LONGEST
    reap: float = 0.0  # seconds that a dead head rests before it is deleted, more than `longest`; 0: it never is
    rates: Rates = field(default_factory=Rates)
    sealed: bool = False  # the bucket


@dataclass
class Result:
    seed: int
    digest: str
    violations: list
    counts: Counter
    tail: list


class Judge:
    """Who looks at the store when all is over."""

    name = "judge"


class World:
    def __init__(self, seed, setup):
        self.seed, self.setup, self.random = seed, setup, randomness.Random(seed)
        self.keys = Keys("r")
        self.memory = MemoryStore(StoreClock(self))
        self.library = Library()
        self.history = History(self)
        self.truth = Truth(self, self.library)
        self.clear, self.sealing, self._seal = {}, None, None  # every object as it is inside
        self.counts, self.violations = Counter(), []
        self.over = self.closed = False  # users come to an end; nodes do
        self.tail = deque(maxlen=TAIL)
        self._log, self._requests, self._open = hashlib.blake2b(digest_size=16), 0, {}
        self._carried = set()
        self.faulty = True

    @property
    def now(self):
        return asyncio.get_running_loop().time()

    async def run(self):
        asyncio.get_running_loop().set_exception_handler(self._defect)
        asyncio.get_running_loop().set_task_factory(task_of_its_life)
        if self.setup.sealed:
            self._seal = await Clear.made(self.memory, StoreClock(self), self.library.tenants)
            self.keys, self.sealing = self._seal.keys, self._seal.sealing
        self.nodes = [Node(self, f"n{number}") for number in range(self.setup.nodes)]
        users = [User(self, number) for number in range(self.setup.users)]
        collectors = [Collector(self, self.nodes[number % len(self.nodes)]) for number in range(self.setup.collectors)]
        lives = [asyncio.create_task(node.run()) for node in self.nodes]
        works = [asyncio.create_task(actor.run()) for actor in (*users, *collectors)]
        await asyncio.sleep(self.setup.seconds)
        self.over, self.faulty = True, False
        await asyncio.gather(*works)
        await self._settle()
        self.closed = True
        for node in self.nodes:
            if node.life is not None:
                node.life.die()
        await asyncio.gather(*lives)
        while self._carried:
            await asyncio.wait(self._carried)
        try:
            await self._last_judgement()
        except KVTierError as error:
            self.violation("I1", f"the last judgement ended with {error!r}")
        return Result(self.seed, self._log.hexdigest(), self.violations, self.counts, list(self.tail))

    async def _settle(self):
        """What nodes promised is landed, and what is under way arrives."""
        for node in self.nodes:
            await node.up.wait()
            while node.commits is not None and node.commits.pending:  # noqa: ASYNC110  the node has no event for it
                await asyncio.sleep(1.0)
        while self._carried:
            await asyncio.wait(self._carried)

    async def _last_judgement(self):
        self.history.judge()
        wire = Wire(self, Life(self, Judge(), 1))
        masters = None if self.sealing is None else self.sealing.masters
        async with opened(wire, StoreClock(self), SeededIds(self.seed), masters=masters, history=self.setup.history) as repo:
            for _ in range(2):
                await collector.collect(repo, now=True, max_skew_s=None)
            stored = {
                key for key in self.memory._objects if self.keys.parse_block(key) or self.keys.parse_manifest(key) is not None
            }
            live = self.truth.live()
            if stored != live:
                self.violation(
                    "I12", f"{len(stored - live)} objects are garbage and stayed, {len(live - stored)} are named and went"
                )
            report = await fsck(repo, deep=True)
            if not report.clean:
                self.violation("I1", f"fsck found {report.findings}")
            await self._reachable(repo)

    async def _reachable(self, repo):
        """I3: every branch that has a name is found by it, at its last version."""
        for branch in self.truth.branches.values():
            for key in branch.names if branch.gone == float("inf") else ():
                tenant, session = key.split("/")[2], self.truth.names[key][-1][1].name
                try:
                    found = await repo.sessions.get(tenant, session, self.library.namespaces[tenant].id, "main")
                except KVTierError as error:
                    self.violation("I3", f"{key} cannot be reached: {error!r}")
                    continue
                if (found.branch, found.version) != (branch.id, branch.last.seq):
                    self.violation(
                        "I3", f"{key} means {found.branch[:8]} at {found.version}, not {branch.id[:8]} at {branch.last.seq}"
                    )

    # --- the store ---

    async def write(self, life, key, mode, body):
        stored = await self.memory.put(key, body, mode)
        if hasattr(stored, "etag"):
            body = bytes(body) if self._seal is None else await self._seal.body(key, body)
            self.clear[key] = body
            self.truth.put(life, key, body, self.now)
        return stored

    async def copy(self, life, source, target):
        copied = await self.memory.copy(source, target)
        if target in self.memory._objects:
            self.clear[target] = self.clear[source] if source in self.clear else self.clear[target]
        return copied

    async def delete(self, life, keys):
        left = await self.memory.delete(keys)
        for key in keys:
            self.clear.pop(key, None)
        self.truth.gone(life, keys)
        return left

    # --- the network ---

    def fate(self, mode):
        rates = self.setup.rates if self.faulty else Rates.none()
        return draw(self.random, rates, isinstance(mode, Create | Update), self.setup.longest)

    def carry(self, request):
        task = asyncio.create_task(request, context=contextvars.Context())  # the network's own
        self._carried.add(task)
        task.add_done_callback(self._arrived)

    def _arrived(self, task):
        self._carried.discard(task)
        if task.exception() is not None:
            raise task.exception()

    # --- what is written down ---

    def begin(self, life, verb, key, mode, body):
        self._requests += 1
        self.counts["requests"] += 1
        word = type(mode).__name__.lower() if mode is not None else ""
        self._open[self._requests] = f"{life} {verb} {word} {key} {digest(body)}"
        self.note(f"#{self._requests} {self._open[self._requests]}")
        return self._requests

    def end(self, number, outcome):
        self.note(f"#{number} {outcome} <- {self._open[number]}")

    def note(self, line):
        line = f"{self.now:.6f} {line}"
        self._log.update(line.encode())
        self.tail.append(line)

    def count(self, what, by=1):
        self.counts[what] += by

    def violation(self, rule, what):
        self.violations.append(f"{rule}: {what} (at {self.now:.3f})")
        self.note(f"VIOLATION {self.violations[-1]}")

    def _defect(self, loop, context):
        error = context.get("exception")
        if not isinstance(error, Crash):
            self.violations.append(f"defect: {context.get('message')}: {error!r}")
            logging.getLogger(__name__).error("%s", context.get("message"), exc_info=error)


def simulate(seed, setup=None):
    """One run. The same seed gives the same run, to the last request."""
    setup, log = setup or Setup(), logging.getLogger("kvstore")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        salts = randomness.Random(seed)
        sealed = mock.patch("os.urandom", salts.randbytes) if setup.sealed else nullcontext()
        with mock.patch.object(reaping, "REAP_S", setup.reap or reaping.REAP_S), sealed:
            return loop.run(World(seed, setup).run())
    finally:
        log.setLevel(before)
