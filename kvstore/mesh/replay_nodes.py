"""What a replay is made of: its setting, nodes with their blocks, and requests on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvstore.mesh.replay_costs import Machine
from kvstore.mesh.replay_trace import Request
from kvstore.mesh.router import Ticket
from tiering.policy import Lru, Policy
from tiering.policy_reuse import Reuse

POLICIES: Final[dict[str, Callable[[], Policy]]] = {"reuse": Reuse, "lru": Lru}


class Change(msgspec.Struct, frozen=True):
    """A node dies, or joins and is empty, so many seconds after the first arrival."""

    at_s: float
    node: str
    joins: bool


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What is replayed.

    Attributes:
        machine: Of each node.
        router: One of `ROUTERS`.
        nodes: At the beginning: n0, n1, ...
        dram: Blocks in a node's memory.
        nvme: Blocks on its disk; 0: there is none.
        sharing: Whether nodes load from each other.
        bucket: Whether there is one; it has everything that was ever computed.
        policy: Of the memory, one of `POLICIES`. The disk keeps recency.
        speed: By how much faster than in the trace requests arrive.
        changes: Deaths and arrivals of nodes.
        seed: Of what tells equals apart.
    """

    machine: Machine
    router: str
    nodes: int = 8
    dram: int = 3000
    nvme: int = 0
    sharing: bool = True
    bucket: bool = False
    policy: str = "reuse"
    speed: float = 1.0
    changes: Sequence[Change] = ()
    seed: int = 1


class Store:
    """Blocks under one policy, with room for so many."""

    def __init__(self, capacity: int, policy: Policy) -> None:
        self.capacity, self.policy, self.held = capacity, policy, set[bytes]()

    def put(self, keys: Sequence[bytes], *, last: bool = False) -> tuple[list[bytes], list[bytes]]:
        """These come in, with `last` as the first to go again: what came in, and what made way."""
        new = [key for key in dict.fromkeys(keys) if key not in self.held][: self.capacity]
        gone = list[bytes]()
        while len(self.held) - len(gone) + len(new) > self.capacity and (victim := self.policy.victim()) is not None:
            gone.append(victim)
        self.held.difference_update(gone)
        self.held.update(new)
        for key in new:
            (self.policy.first if last else self.policy.add)(key)
        return new, gone


class Node:
    """One node: what it has, and whom it has to answer."""

    def __init__(self, name: str, setup: Setup) -> None:
        self.name = name
        self.dram = Store(setup.dram, POLICIES[setup.policy]())
        self.nvme = Store(setup.nvme, Lru())
        self.waiting = deque[Job]()
        self.reading: Job | None = None
        self.alive = True
        self.sends_until = 0.0

    def jobs(self) -> list[Job]:
        """What it has to answer, in turn."""
        return [*([self.reading] if self.reading else []), *self.waiting]

    def has(self, key: bytes) -> bool:
        """In memory or on disk."""
        return key in self.dram.held or key in self.nvme.held


class Job(msgspec.Struct, eq=False):
    """A request on its way. `ticket` is what its router gave for it."""

    request: Request
    at_s: float
    predicted_s: float = 0.0
    ticket: Ticket | None = None
