"""Eviction by measured re-use: the blocks that promise the fewest hits per unit of room and time go first.

What one request asks for, in prefix order, is a chain: what is new in it, and what was asked for together before, share one history
and are kept as *runs*. A run goes from its end, so that what stays is a usable prefix. Runs are of a class, by what is known
when they are asked for; `tiering.policy_returns` counts what comes back, by class and age, and tells what that promises.

After Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018; the classes are ours.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from tiering.policy_returns import AGE, CLASSES, LONGEST, UNIT, USES, Returns, kind

_LAST: Final = 0  # the class of a request's last block
_RUN: Final = 256  # blocks in a run, at most: what is looked through for one that may go
_STALE: Final = 256  # blocks asked for until classes are compared again, at most
_FLOOR: Final = 1 << 17  # blocks remembered, at least
_TIMES: Final = 9  # and that many times as many as were in the tier
_NOBODY: Final = float("inf")


class _Run:
    """Blocks with one history, in prefix order; those that may be evicted now are among the first `left`.

    `uses` is 0 for a block that came without having been asked for.
    """

    __slots__ = ("asked", "keys", "kind", "left", "uses")

    def __init__(self, keys: list[bytes], sort: int, asked: int, uses: int) -> None:
        self.keys, self.kind, self.asked, self.uses = keys, sort, asked, uses
        self.left = 0


class Reuse:
    """Fewest expected hits per block and time goes first; see the module. Everything comes in: what is not worth it leaves first.

    Work per block is constant: classes and the lengths of runs are bounded. Some 130 bytes are remembered per block, for nine
    times as many as the tier held (and 131,072 at least).
    """

    def __init__(self) -> None:
        self._home: dict[bytes, _Run] = {}
        self._ranked: set[bytes] = set()
        self._next: OrderedDict[bytes, None] = OrderedDict()  # go before all others
        self._queues: list[OrderedDict[_Run, None]] = [OrderedDict() for _ in range(CLASSES)]  # longest since asked for first
        self._ghosts: OrderedDict[_Run, None] = OrderedDict()  # nothing of them may be evicted; longest so first
        self._lowest = [_NOBODY] * CLASSES  # by class, what the run at one end promises
        self._newest = [False] * CLASSES  # and whether at the end of what came last
        self._returns = Returns()
        self._now = self._stale = self._most = 0

    def admit(self, key: bytes, size: int) -> bool:  # noqa: ARG002  the seam's signature
        """Always."""
        return True

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """One request wants these, in prefix order, here or not; the first `told` of them are context. See `Policy`."""
        known, new, lead, here = self._walk(list(keys), told)
        fresh, returns = len(new), self._returns
        self._now = now = self._now + (fresh if told else len(keys))
        returns.at(now)
        for run in known:
            if run.asked < now:  # else it is in this request twice
                age, size, run.asked = now - run.asked, len(run.keys), now
                returns.again[run.kind] += size
                returns.after[AGE[age // UNIT] if age < LONGEST else -1] += size
                run.uses = min(run.uses + 1, USES)
                sort = kind(run.uses, fresh, later=True)
                returns.came[sort] += size
                if run.left:
                    del self._queues[run.kind][run]
                run.kind = sort
                if run.left:
                    self._queue(run)
        if new:
            last = [new.pop()] if new[-1] == keys[-1] else new[:0]
            self._begin(new, kind(1, fresh, later=lead > 1), 1, here=here)
            self._begin(last, _LAST, 1, here=here)
            if len(self._home) > _FLOOR:
                self._forget()

    def _walk(self, keys: list[bytes], told: int) -> tuple[list[_Run], list[bytes], int, bool]:
        """Runs that are asked for again, what is new, how many known blocks lead, and whether any that is new is here."""
        home, total = self._home, len(keys)
        known, new = list[_Run](), list[bytes]()
        at, lead, here = 0, 0, False
        while at < total:
            run, size = home.get(keys[at]), 1
            if run is None:
                if home.keys().isdisjoint(keys[at:]):
                    new += keys[at:]
                    break
                new.append(keys[at])
            elif not run.uses or (run.kind == _LAST and at < told and at + 1 < total):  # not asked for, or not the last after all
                new.append(keys[at])
                here |= run.left > 0
                self._drop(run, keys[at])
            else:
                size = len(run.keys)
                if keys[at : at + size] != run.keys:
                    if at >= told:
                        run = self._part(run, keys[at : at + size])
                    size = len(run.keys) if at >= told else 1
                if at == lead:
                    lead += size
                if at >= told:
                    known.append(run)
            at += size
        return known, new, lead, here

    def add(self, key: bytes) -> None:
        """May be evicted from now on."""
        self.add_many((key,))

    def add_many(self, keys: Sequence[bytes]) -> None:
        """These may be evicted from now on."""
        home, at, total = self._home, 0, len(keys)
        self._ranked.update(keys)
        while at < total:
            run = home.get(keys[at])
            if run is None:
                self._begin([keys[at]], kind(1, 1, later=False), 0, here=True)
                at += 1
                continue
            size = len(run.keys)
            if run.left < size:
                self._revive(run)
            at += size if size == 1 or keys[at : at + size] == run.keys else 1
        for key in keys if self._next else ():
            self._next.pop(key, None)
        self._most = max(self._most, len(self._ranked))

    def touch(self, key: bytes) -> None:
        """No longer before all others; its history `asked` told already."""
        if key in self._next:
            self.add(key)

    def first(self, key: bytes) -> None:
        """Goes before all others."""
        self._ranked.discard(key)
        self._next[key] = None
        self._next.move_to_end(key, last=False)

    def remove(self, key: bytes) -> None:
        """Pinned, or gone."""
        self._ranked.discard(key)
        if self._next:
            self._next.pop(key, None)

    def victim(self) -> bytes | None:
        """The one that promises least, taken out."""
        taken = self.victims(1)
        return taken[0] if taken else None

    def victims(self, count: int) -> list[bytes]:
        """So many that promise least, taken out; fewer where no more may go. A run goes from its end."""
        taken: list[bytes] = []
        while self._next and len(taken) < count:
            taken.append(self._next.popitem(last=False)[0])
        ranked, lowest = self._ranked, self._lowest
        if self._now >= self._stale:
            self._stale = self._now + max(1, min(_STALE, len(ranked) // 16))
            for sort in range(CLASSES):
                self._compare(sort)
        while ranked and len(taken) < count:
            sort = lowest.index(min(lowest))
            queue = self._queues[sort]
            if not queue:
                lowest[sort] = _NOBODY
                continue
            run = next(reversed(queue) if self._newest[sort] else iter(queue))
            start = max(0, run.left - (count - len(taken)))
            part = run.keys[start : run.left]
            if not ranked.issuperset(part):
                part = [key for key in part if key in ranked]
            ranked.difference_update(part)
            taken += part
            run.left = start
            if not start:
                del queue[run]
                self._ghosts[run] = None
                self._compare(sort)
        return taken

    def _compare(self, sort: int) -> None:
        """What a class has that promises least. It is at an end: an index has one peak."""
        queue, lowest = self._queues[sort], _NOBODY
        if queue:
            promise, now = self._returns.promise[sort], self._now
            age = now - next(iter(queue)).asked
            lowest = promise[AGE[age // UNIT] if age < LONGEST else -1]
            age = now - next(reversed(queue)).asked
            newest = promise[AGE[age // UNIT] if age < LONGEST else -1]
            self._newest[sort] = newest < lowest
            lowest = min(lowest, newest)
        self._lowest[sort] = lowest

    def _queue(self, run: _Run) -> None:
        queue = self._queues[run.kind]
        queue[run] = None
        if len(queue) == 1:
            self._compare(run.kind)

    def _begin(self, keys: list[bytes], sort: int, uses: int, *, here: bool) -> None:
        """Runs of blocks that have no history."""
        for start in range(0, len(keys), _RUN):
            run = _Run(keys[start : start + _RUN], sort, self._now, uses)
            homes = dict.fromkeys(run.keys, run)
            if len(homes) < len(run.keys):  # asked for twice in one request
                run.keys = list(homes)
            self._home.update(homes)
            self._returns.came[sort] += uses * len(run.keys)
            self._ghosts[run] = None
            if here:
                self._revive(run)

    def _revive(self, run: _Run) -> None:
        """Any block of it may be evicted now."""
        if not run.left:
            del self._ghosts[run]
            self._queue(run)
        run.left = len(run.keys)

    def _part(self, run: _Run, keys: Sequence[bytes]) -> _Run:
        """What of a run these begin with, as a run of its own; of one that begins otherwise, their first."""
        pairs = enumerate(zip(keys, run.keys, strict=False))
        count = next((at for at, (one, other) in pairs if one != other), min(len(keys), len(run.keys)))
        left = run.left
        if count:
            part = _Run(run.keys[:count], run.kind, run.asked, run.uses)
            run.keys, run.left = run.keys[count:], max(0, left - count)
            part.left = left - run.left
        else:
            part = _Run([keys[0]], run.kind, run.asked, run.uses)
            run.keys.remove(keys[0])
            run.left = min(left, len(run.keys))
            part.left = min(left, 1)
        self._home.update(dict.fromkeys(part.keys, part))
        if left and not run.left:
            del self._queues[run.kind][run]
            self._ghosts[run] = None
        if part.left:
            self._queue(part)
        else:
            self._ghosts[part] = None
        return part

    def _drop(self, run: _Run, key: bytes) -> None:
        """It begins anew."""
        if run.left:
            del self._queues[run.kind][run]
        else:
            del self._ghosts[run]
        self._home.pop(key, None)

    def _forget(self) -> None:
        home, most = self._home, max(_FLOOR, _TIMES * self._most)
        while self._ghosts and len(home) > most:
            run, _ = self._ghosts.popitem(last=False)
            for key in run.keys:
                home.pop(key, None)
