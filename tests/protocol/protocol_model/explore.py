"""Breadth-first exploration of a machine, and random walks through one too large for it."""

from collections import deque
from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from kvstore.clock import SeededIds

S = TypeVar("S", bound=msgspec.Struct)
Label = tuple[str, str, object]


class Machine(Protocol[S]):
    """A transition system."""

    def initial(self) -> S:
        """Where it starts."""
        ...

    def steps(self, s: S) -> Iterable[tuple[Label, S]]:
        """What may happen next, in an order that is the same in every process."""
        ...

    def violation(self, s: S) -> str:
        """What is wrong with this state, or nothing."""
        ...


class Verdict(msgspec.Struct, frozen=True):
    """What an exploration saw.

    Attributes:
        states: Distinct states seen.
        complete: Every reachable state was seen.
        violation: The first broken invariant, or nothing.
        trace: The shortest way there, a line per step.
        verbs: What processes were seen doing; a run that never does what it claims to check is empty talk.
    """

    states: int
    complete: bool
    violation: str
    trace: tuple[str, ...]
    verbs: frozenset[str]


# A state's fingerprint is the state itself, encoded: exact, compact, and the same in every process (hash() would not be).
_fingerprint = msgspec.msgpack.Encoder(order="deterministic").encode


def explore(machine: Machine[S], limit: int = 4_000_000) -> Verdict:
    """See every reachable state, or stop at the first violation or after `limit` states."""
    start = machine.initial()
    parent: dict[bytes, bytes | None] = {_fingerprint(start): None}
    queue, verbs = deque([start]), set[str]()
    while queue:
        s = queue.popleft()
        here = _fingerprint(s)
        for label, t in machine.steps(s):
            verbs.add(label[1])
            there = _fingerprint(t)
            if there in parent:
                continue
            parent[there] = here
            broken = machine.violation(t)
            if broken:
                return Verdict(len(parent), False, broken, _replay(machine, parent, there), frozenset(verbs))
            queue.append(t)
        if len(parent) > limit:
            return Verdict(len(parent), False, "", (), frozenset(verbs))
    return Verdict(len(parent), True, "", (), frozenset(verbs))


def _replay(machine: Machine[S], parent: dict[bytes, bytes | None], last: bytes) -> tuple[str, ...]:
    path: list[bytes] = []
    at: bytes | None = last
    while at is not None:
        path.append(at)
        at = parent[at]
    s, lines = machine.initial(), []
    for want in path[-2::-1]:
        label, s = next((label, t) for label, t in machine.steps(s) if _fingerprint(t) == want)
        lines.append(_line(label))
    return tuple(lines)


def _line(label: Label) -> str:
    who, does, what = label
    parts = sorted(what) if isinstance(what, frozenset) else what if isinstance(what, tuple) else [what]
    return " ".join([f"{who}: {does}", *map(str, parts)]).rstrip()


def walk(machine: Machine[S], seed: int, steps: int, length: int = 600) -> Verdict:
    """Random walks of `length` steps each; the same seed takes the same walks. Never complete."""
    chance, seen, taken = SeededIds(seed).jitter, set[str](), 0
    while taken < steps:
        s, trace, pace = machine.initial(), list[str](), dict[str, float]()
        for i in range(length):
            if i % 40 == 0:  # every process runs, crawls or stands for a while
                pace = {}
            options = list(machine.steps(s))
            if not options:
                break
            for (who, _, _), _ in options:
                if who not in pace:
                    pace[who] = (1.0, 0.1, 0.002)[int(3 * chance())]
            label, s = _choose(options, [pace[who] for (who, _, _), _ in options], chance())
            trace.append(_line(label))
            seen.add(label[1])
            taken += 1
            broken = machine.violation(s)
            if broken:
                return Verdict(taken, False, broken, tuple(trace), frozenset(seen))
    return Verdict(taken, False, "", (), frozenset(seen))


def _choose(options: list[tuple[Label, S]], weights: list[float], chance: float) -> tuple[Label, S]:
    left = chance * sum(weights)
    for option, weight in zip(options, weights, strict=True):
        left -= weight
        if left < 0:
            return option
    return options[-1]
