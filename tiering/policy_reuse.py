"""Eviction by measured re-use: the blocks that promise the fewest hits per unit of room and time go first.

What is asked for together, in prefix order, is a chain: its blocks share one history, and are kept as few *runs*. Runs fall into
classes, by what is known when they are asked for: how often before, after how long, how many turns their conversation has had,
how many new blocks came with them, and whether a block is a request's last (a partial block, that the next turn replaces).

Per class and age the policy counts how many blocks got there and how many were asked for again, evicted ones included. From
this follows an index: the best ratio, over all spans ahead, of hits to room-time (Gittins). It falls with age once the next turn is
overdue, and it is low at first where turns take their time. Where counts are few, an estimate leans on the class's share of
returns times the shape that all classes have in common. Time is counted in blocks asked for, so nothing depends on a clock.

After Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018; the classes are ours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import Final

_UNIT: Final = 128  # blocks asked for: the finest age that is told apart
_AGES: Final = 20  # two per octave; the last is open
_SLOT: Final = 1024  # blocks asked for between two records of the arrivals
_TURNS, _USES, _KINDS = 3, 5, 5
_CLASSES: Final = 1 + _USES * _TURNS * _KINDS
# The part that is asked for again, before anything was counted: of new blocks, by how many came with them, in a first turn and in a
# later one; of others, by uses. From the first half of a public trace of conversations.
_RETURNS_FIRST: Final = (0.45, 0.40, 0.30, 0.24, 0.20)
_RETURNS_LATER: Final = (0.60, 0.50, 0.20, 0.15, 0.15)
_RETURNS_USED: Final = (0.47, 0.55, 0.65, 0.85)
_LAST_RETURNS: Final = 0.02  # of a request's last block
_RETURNS_WEIGHT: Final = 3000  # blocks counted that weigh as much as the figures above
_SHAPE_WEIGHT: Final = 5000  # the same for how a class spreads over ages
_MEDIAN, _SPREAD = 11_000, 1.1  # of the ages of what is asked for again, before anything was counted: a lognormal law
_GAPS: Final = (1 << 12, 1 << 14)  # blocks asked for between two uses: three sorts
_EVERY: Final = 16  # slots between two estimates
_FADE: Final = 1 << 18  # blocks asked for until a count weighs half
_STALE: Final = 128  # blocks asked for until classes are compared again, at most
_FLOOR: Final = 1 << 17  # blocks remembered, at least
_TIMES: Final = 9  # and that many times as many as were in the tier


def _age(units: int) -> int:
    octave = units.bit_length()
    return min(_AGES - 1, units if octave < 2 else 2 * octave - 2 + (units >> (octave - 2) & 1))


def _by_then(blocks: float) -> float:
    return 0.5 * (1 + math.erf(math.log(blocks / _MEDIAN) / _SPREAD / math.sqrt(2))) if blocks else 0.0


_TOP: Final = 1023
_AGE: Final = [_age(units) for units in range(_TOP + 1)]
_EDGES: Final = [_AGE.index(age) * _UNIT for age in range(_AGES)]
_SPANS: Final = [b - a for a, b in zip(_EDGES, [*_EDGES[1:], (_TOP + 1) * _UNIT], strict=True)]
_SHAPE: Final = [_by_then(a + span) - _by_then(a) for a, span in zip(_EDGES, _SPANS, strict=True)]
_BACK: Final = [-(-edge // _SLOT) for edge in _EDGES]


def _returns(kind: int) -> float:
    if not kind:
        return _LAST_RETURNS
    rest, sort = divmod(kind - 1, _KINDS)
    uses, turns = divmod(rest, _TURNS)
    return _RETURNS_USED[uses - 1] if uses else (_RETURNS_LATER if turns else _RETURNS_FIRST)[sort]


class _Run:
    """Blocks with one history. `ranked`: those that may be evicted now, in prefix order."""

    __slots__ = ("asked", "keys", "kind", "length", "ranked", "turns", "uses")

    def __init__(self, keys: list[bytes], asked: int) -> None:
        self.keys = keys
        self.asked = asked
        self.kind = 1
        self.length = 0  # of the request that asked last
        self.ranked: dict[bytes, None] = {}
        self.turns = 1
        self.uses = 1


class Reuse:
    """Fewest expected hits per block and time goes first; see the module. Everything comes in: what is not worth it leaves first.

    Work per block is constant: classes and ages are bounded, runs are handled as a whole. Some 170 bytes are remembered per
    block, for nine times as many as the tier held (and 131,072 at least).
    """

    def __init__(self) -> None:
        self._home: dict[bytes, _Run] = {}
        self._queues: list[OrderedDict[_Run, None]] = [OrderedDict() for _ in range(_CLASSES)]
        self._ghosts: OrderedDict[_Run, None] = OrderedDict()  # nothing of them may be evicted; longest so first
        self._next: OrderedDict[bytes, None] = OrderedDict()  # go before all others
        self._ranked = self._most = 0
        self._now = 0
        self._order: list[tuple[OrderedDict[_Run, None], bool, float]] = []
        self._stale = 0
        self._hits = [[0.0] * _AGES for _ in range(_CLASSES)]
        self._came = [0.0] * _CLASSES
        self._slots: deque[list[float]] = deque(maxlen=_BACK[-1] + 1)
        self._count = 0
        self._density: list[list[float]] = []
        self._estimate()

    def admit(self, key: bytes, size: int) -> bool:  # noqa: ARG002  the seam's signature
        """Always."""
        return True

    def asked(self, keys: Sequence[bytes]) -> None:
        """One request wants these, in prefix order, here or not."""
        home, total = self._home, len(keys)
        self._now = now = self._now + total
        while now // _SLOT > self._count:
            self._slot()
        homes = list(map(home.get, keys))
        known: list[_Run] = []
        new: list[Sequence[bytes]] = []
        at = lead = before = turns = fresh = 0
        while at < total:
            run, start = homes[at], at
            if run is None:
                at = total if not any(homes[at:]) else next(i for i in range(at, total) if homes[i] is not None)
                new.append(keys[start:at])
                fresh += at - start
                continue
            size = len(run.keys)
            at += size
            if at > total or homes[start:at].count(run) != size:
                at = start + 1
                while at < total and homes[at] is run:
                    at += 1
            if run.asked != now:
                age = now - run.asked
                self._hits[run.kind][_AGE[min(age // _UNIT, _TOP)]] += at - start
                if lead == start:
                    lead, before, turns = at, run.length, run.turns
                run = self._part(run, keys[start:at])
                run.uses = min(run.uses + 1, _USES)
                run.asked = age - now  # until it is placed: below 0, so that it does not count twice
                known.append(run)
        # A conversation goes on where its last request ended, but for the partial block.
        turns = min(turns + 1, _TURNS) if lead > 1 and lead >= before - 2 else 1
        for run in known:
            gap = run.asked + now
            self._place(run, turns, total, bisect_right(_GAPS, gap))
        sort = min(_KINDS - 1, ((fresh + 1).bit_length() - 1) // 2)
        for part in new:
            ends = part is new[-1]
            if len(part) > ends:
                self._begin(part[:-1] if ends else part, turns, total, sort)
            if ends:
                self._begin(part[-1:], turns, total, -1)
        if len(home) > _FLOOR and len(home) > _TIMES * self._most:
            self._forget()

    def add(self, key: bytes) -> None:
        """May be evicted from now on."""
        run = self._home.get(key)
        if run is None or not run.ranked or self._next:
            self.add_many((key,))
        elif key not in run.ranked:
            run.ranked[key] = None
            self._ranked += 1

    def add_many(self, keys: Sequence[bytes]) -> None:
        """These may be evicted from now on."""
        home, at, total = self._home, 0, len(keys)
        while at < total:
            key = keys[at]
            run = home.get(key)
            if run is None:
                self._begin((key,), 1, 1, 0)
                run = home[key]
            ranked, before, start = run.ranked, len(run.ranked), at
            at += len(run.keys)
            if keys[start:at] == run.keys:
                ranked.update(dict.fromkeys(run.keys))
            else:
                at = start + 1
                ranked[key] = None
            self._ranked += len(ranked) - before
            if not before:
                self._ghosts.pop(run, None)
                queue = self._queues[run.kind]
                queue[run] = None
                if len(queue) == 1:
                    self._insert(queue)
        for key in keys if self._next else ():
            self._next.pop(key, None)
        self._most = max(self._most, self._ranked)

    def touch(self, key: bytes) -> None:
        """No longer before all others; its history `asked` told already."""
        if key in self._next:
            self.add(key)

    def first(self, key: bytes) -> None:
        """Goes before all others."""
        self.remove(key)
        self._next[key] = None
        self._next.move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Pinned, or gone."""
        if self._next:
            self._next.pop(key, None)
        run = self._home.get(key)
        if run is not None and key in run.ranked:
            del run.ranked[key]
            self._ranked -= 1
            if not run.ranked:
                self._rest(run)

    def victim(self) -> bytes | None:
        """The one that promises least, taken out."""
        taken = self.victims(1)
        return taken[0] if taken else None

    def victims(self, count: int) -> list[bytes]:
        """So many that promise least, taken out; fewer where no more may go. A run goes from its end."""
        taken: list[bytes] = []
        while self._next and len(taken) < count:
            taken.append(self._next.popitem(last=False)[0])
        while (left := count - len(taken)) > 0:
            if not self._order or self._now >= self._stale:
                self._rank()
                if not self._order:
                    break
            queue, newest, _ = self._order[-1]
            if not queue:
                self._order.pop()
                continue
            run = next(reversed(queue)) if newest else next(iter(queue))
            ranked = run.ranked
            if len(ranked) > left:
                taken += [ranked.popitem()[0] for _ in range(left)]
                self._ranked -= left
                break
            taken += reversed(ranked)
            self._ranked -= len(ranked)
            ranked.clear()
            del queue[run]
            self._ghosts[run] = None
            if queue and len(self._order) > 1:
                run = next(reversed(queue)) if newest else next(iter(queue))
                age = (self._now - run.asked) // _UNIT
                if self._density[run.kind][_AGE[age] if age < _TOP else -1] <= self._order[-2][2]:
                    continue
            self._order.pop()
            if queue:
                self._insert(queue)
        return taken

    def _rank(self) -> None:
        """The classes, least valuable last, each with the end to take from: an index has one peak, so its least is at an end."""
        order = sorted(map(self._end, filter(None, self._queues)), key=itemgetter(2), reverse=True)
        self._most = max(self._most, self._ranked)
        self._order, self._stale = order, self._now + max(1, min(_STALE, self._ranked // 64))

    def _end(self, queue: OrderedDict[_Run, None]) -> tuple[OrderedDict[_Run, None], bool, float]:
        first, last = next(iter(queue)), next(reversed(queue))
        density = self._density[first.kind]
        age = (self._now - first.asked) // _UNIT
        old = density[_AGE[age] if age < _TOP else -1]
        age = (self._now - last.asked) // _UNIT
        new = density[_AGE[age] if age < _TOP else -1]
        return (queue, True, new) if new < old else (queue, False, old)

    def _insert(self, queue: OrderedDict[_Run, None]) -> None:
        order, end = self._order, self._end(queue)
        at = len(order)
        if at >= 2 * _CLASSES:  # classes came to life again and again, and nothing went meanwhile
            self._stale = self._now
            return
        while at and order[at - 1][2] < end[2]:
            at -= 1
        order.insert(at, end)

    def _begin(self, keys: Sequence[bytes], turns: int, length: int, sort: int) -> None:
        home = self._home
        fresh = dict.fromkeys(keys)
        if any(map(home.get, fresh)):  # asked for twice in one request
            fresh = {key: None for key in fresh if key not in home}
        if fresh:
            run = _Run(list(fresh), self._now)
            home.update(dict.fromkeys(fresh, run))
            self._ghosts[run] = None
            self._place(run, turns, length, sort)

    def _place(self, run: _Run, turns: int, length: int, sort: int) -> None:
        """It was asked for just now: its class, at the class's end."""
        kind = 0 if sort < 0 else 1 + ((run.uses - 1) * _TURNS + turns - 1) * _KINDS + sort
        if run.ranked:
            del self._queues[run.kind][run]
            self._queues[kind][run] = None
        run.asked, run.turns, run.length, run.kind = self._now, turns, length, kind
        self._came[kind] += len(run.keys)

    def _part(self, run: _Run, keys: Sequence[bytes]) -> _Run:
        """Of a run, the part that was asked for, as a run of its own."""
        count = len(keys)
        if count >= len(run.keys):
            return run
        part = _Run(list(dict.fromkeys(keys)), run.asked)
        part.kind, part.turns, part.uses, part.length = run.kind, run.turns, run.uses, run.length
        if run.keys[:count] == part.keys:
            del run.keys[:count]
        else:
            gone = set(part.keys)
            run.keys = [key for key in run.keys if key not in gone]
        ranked = run.ranked
        self._home.update(dict.fromkeys(part.keys, part))
        if ranked:
            part.ranked = {key: None for key in part.keys if key in ranked}
            for key in part.ranked:
                del ranked[key]
        if not part.ranked:
            self._ghosts[part] = None
        else:
            self._queues[run.kind][part] = None
            if not ranked:
                self._rest(run)
        return part

    def _rest(self, run: _Run) -> None:
        del self._queues[run.kind][run]
        self._ghosts[run] = None

    def _forget(self) -> None:
        home = self._home
        while self._ghosts and len(home) > max(_FLOOR, _TIMES * self._most):
            run, _ = self._ghosts.popitem(last=False)
            for key in run.keys:
                del home[key]

    def _slot(self) -> None:
        self._count += 1
        self._slots.append(self._came.copy())
        if self._count % _EVERY == 0 or self._count in (1, 2, 4, 8):
            self._estimate()
        if self._count % (_FADE // _SLOT) == 0:
            self._hits = [[count / 2 for count in row] for row in self._hits]
            self._slots = deque(([count / 2 for count in row] for row in self._slots), maxlen=self._slots.maxlen)
            self._came = [count / 2 for count in self._came]

    def _estimate(self) -> None:
        """Indices by class and age, from what was counted."""
        nobody = [0.0] * _CLASSES
        reached = [self._slots[-1 - back] if back < len(self._slots) else nobody for back in _BACK]
        returned = [sum(at) for at in zip(*self._hits, strict=True)]
        rates = [
            (hits + _SHAPE_WEIGHT * _RETURNS_FIRST[2] * share) / (sum(came) + _SHAPE_WEIGHT)
            for hits, came, share in zip(returned, reached, _SHAPE, strict=True)
        ]
        every = sum(rates)
        shape = [rate / every for rate in rates]
        self._density = [
            _index(_law(hits, [came[kind] for came in reached], shape, _returns(kind))) for kind, hits in enumerate(self._hits)
        ]


def _law(hits: Sequence[float], reached: Sequence[float], shape: Sequence[float], returns: float) -> list[float]:
    """By age, the part of a class that is asked for again then."""
    seen = sum(came * share for came, share in zip(reached, shape, strict=True))
    part = (sum(hits) + _RETURNS_WEIGHT * returns) / (seen + _RETURNS_WEIGHT)
    return [
        (hit + _SHAPE_WEIGHT * part * share) / (came + _SHAPE_WEIGHT) for hit, came, share in zip(hits, reached, shape, strict=True)
    ]


def _index(law: Iterable[float]) -> list[float]:
    """By age, the best ratio of hits to block-time over all spans ahead: the steepest line to a later point of their curve."""
    hits, time, left = 0.0, 0.0, 1.0
    curve = [(0.0, 0.0)]
    for part, span in zip(law, _SPANS, strict=True):
        hits += part
        time += span * max(left - part / 2, 0.01)
        left = max(left - part, 0.02)
        curve.append((time, hits))
    hull, index = [curve.pop()], []
    for x, y in reversed(curve):
        slope = (hull[-1][1] - y) / (hull[-1][0] - x)
        while len(hull) > 1 and (other := (hull[-2][1] - y) / (hull[-2][0] - x)) >= slope:
            slope = other
            hull.pop()
        index.append(slope)
        hull.append((x, y))
    return index[::-1]
