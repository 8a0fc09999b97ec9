"""What this node has, told to the directory: what comes and goes, in batches; and all of it, compared from time to time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final, Protocol, Self

import msgspec
import numpy as np

from kvstore.clock import Clock
from kvstore.mesh.entries import BUCKETS, SHORT, bucket_of
from tiering import Watch

_EVENTS: Final = 1 << 16
_CHANGES: Final = 1 << 16
_SAID: Final = 64  # buckets said at once, and
_SLICE: Final = 16  # buckets compared at once: each a few milliseconds of the server's only thread
_CHUNK: Final = 8192  # keys shortened before others run
_STEP_S: Final = 0.2

Run = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Runs something elsewhere, such as :meth:`tiering.Movers.run`."""


class Holder(Protocol):
    """A tier that can be watched; :class:`tiering.DramTier` and :class:`tiering.DiskTier` are."""

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now."""
        ...

    def keys(self) -> list[bytes]:
        """All that are here now."""
        ...

    def watch(self, told: Watch | None) -> None:
        """Tell of every value that comes and goes."""
        ...


class Told(Protocol):
    """A directory that entries are kept in; :class:`kvstore.mesh.valkey.ValkeyDirectory` is."""

    @property
    def ready(self) -> bool:
        """Whether entries can be written now."""
        ...

    @property
    def lives(self) -> int:
        """Grows when this node begins a life in which it has no entries yet, neither right nor wrong ones."""
        ...

    @property
    def losses(self) -> int:
        """Grows when entries may be missing or wrong."""
        ...

    def added(self, keys: Sequence[bytes]) -> None:
        """This node has these now; the first 8 bytes of a key will do."""
        ...

    def dropped(self, keys: Sequence[bytes]) -> None:
        """This node has these no more."""
        ...

    async def flush(self) -> None:
        """Write what was said, as far as it can be written."""
        ...

    async def correct(self, buckets: Sequence[int], held: Callable[[int], Iterable[bytes]]) -> bool:
        """Make entries what this node really has."""
        ...


class InventorySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the directory is kept right.

    Attributes:
        tell_s: Pause between two batches of news.
        pass_s: Everything is compared once in that time although nothing is known to be wrong.
        share: When something may be: the part of the time that the server works for it, at most. All nodes may have to at once.
    """

    tell_s: float = 0.05
    pass_s: float = 6 * 3600.0
    share: float = 0.02


class _Picture:
    """The first bytes of all keys at one moment, by bucket: eight bytes for each key."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        every = np.unique(np.frombuffer(b"".join(pieces), ">u8").astype(np.uint64))
        self._bounds = SHORT * np.searchsorted(every >> np.uint64(48), np.arange(BUCKETS + 1, dtype=np.uint64))
        self._bytes = every.astype(">u8").tobytes()
        self._filled = np.unique(every >> np.uint64(48)).astype(np.int64)

    def after(self, first: int) -> tuple[list[int], int]:
        """The next few buckets that are not empty, and where to go on after them."""
        start = int(np.searchsorted(self._filled, first))
        found: list[int] = self._filled[start : start + _SAID].tolist()
        return found, found[-1] + 1 if len(found) == _SAID else BUCKETS

    def bucket(self, number: int) -> set[bytes]:
        """Those of one bucket."""
        first, last = int(self._bounds[number]), int(self._bounds[number + 1])
        return {self._bytes[at : at + SHORT] for at in range(first, last, SHORT)}


class Inventory:
    """Watches tiers for a directory. It belongs to one event loop.

    A key is added when the first tier has it, and dropped when the last has it no more: what moves between them is no news.
    Whoever opens it keeps `tell` and `repair` running.

    Attributes:
        passes: How often everything was compared.
        missed: Comings and goings that were too many at once; what they were is found out by comparing.
    """

    def __init__(self, tiers: Sequence[Holder], directory: Told, run: Run, clock: Clock, settings: InventorySettings) -> None:
        self.passes = self.missed = 0
        self._tiers, self._directory, self._run, self._clock = tuple(tiers), directory, run, clock
        self._settings = settings
        self._events: deque[tuple[bytes, int]] = deque()
        self._again: set[bytes] = set()
        self._picture: _Picture | None = None
        self._changes: dict[int, dict[bytes, bool]] | None = None  # what has changed since its beginning, by bucket
        self._changed = 0
        self._at = 0  # the bucket that is next
        self._left = 0  # how many are still to be compared
        self._urgent = False
        self._whole = True  # whether empty buckets are compared, too: something may be wrong in them
        self._lives = 0  # the life, and
        self._seen = (0, 0)  # the losses, there and here, that the present comparing began after
        self._next = 0.0

    @classmethod
    @asynccontextmanager
    async def open(
        cls, tiers: Sequence[Holder], directory: Told, run: Run, clock: Clock, settings: InventorySettings | None = None
    ) -> AsyncIterator[Self]:
        """Watch for as long as the block lasts.

        Args:
            tiers: What this node has. Nobody else watches them.
            directory: Who is told.
            run: For what takes long.
            clock: Time.
            settings: Pace.
        """
        inventory = cls(tiers, directory, run, clock, settings or InventorySettings())
        for tier in tiers:
            tier.watch(inventory._hear)
        try:
            yield inventory
        finally:
            for tier in tiers:
                tier.watch(None)

    async def tell(self) -> None:
        """Tell the directory what comes and goes. Never ends."""
        while True:
            await self._clock.sleep(self._settings.tell_s)
            self.drain()

    async def repair(self) -> None:
        """Compare all entries with what is here: at once when some may be missing or wrong, slowly otherwise. Never ends."""
        while True:
            await self._clock.sleep(await self.step())

    def drain(self) -> None:
        """Tell the directory what has come and gone until now. Never waits."""
        moves = self._moves()
        if not moves and not self._again:
            return
        keys = list(moves.keys() | self._again)
        here = [0] * len(keys)
        for tier in self._tiers:
            for index, has in enumerate(tier.contains_many(keys)):
                here[index] += has
        late = self._moves()  # they moved while we looked: next time, whatever that was, it is said where they are
        added: list[bytes] = []
        dropped: list[bytes] = []
        for key, now in zip(keys, here, strict=True):
            self._note(key, has=now > 0)
            before = now - moves.get(key, 0)
            if key not in late and (key in self._again or (before > 0) != (now > 0)):
                (added if now else dropped).append(key)
        self._again = set(late)
        self._directory.added(added)
        self._directory.dropped(dropped)

    async def step(self) -> float:
        """Compare the next few buckets, if it is time; how many seconds to wait before the next step."""
        losses = (self._directory.losses, self.missed)
        if self._directory.lives != self._lives:  # first it says what it has, which is quick; what else is wrong is found out then
            self._lives, self._whole, self._left, self._urgent = self._directory.lives, False, BUCKETS, True
            self._forget()  # a picture for comparing may be hours old: it does not name the buckets that were empty then
        elif losses != self._seen and (self._whole or not self._urgent):
            self._seen, self._whole, self._left, self._urgent = losses, True, BUCKETS, True
        if not self._urgent and self._clock.monotonic() < self._next:
            return _STEP_S
        if not self._directory.ready:
            self._forget()
            return _STEP_S
        self._left = self._left or BUCKETS
        picture = self._picture
        if picture is None or self._changed > _CHANGES:
            picture = await self._look()
        begun = self._clock.monotonic()
        if self._whole:
            end = self._at + _SLICE
            if not await self._directory.correct(range(self._at, end), self._held):
                return _STEP_S  # from here on, when it answers
            pause = (self._clock.monotonic() - begun) * (1 / self._settings.share - 1)
        else:
            buckets, end = picture.after(self._at)
            self._directory.added([short for bucket in buckets for short in self._held(bucket)])
            await self._directory.flush()
            pause = 0.0
        self._at, self._left = end % BUCKETS, max(0, self._left - (end - self._at))
        if not self._left:
            self.passes += 1
            self._urgent, self._whole = False, True
            self._forget()
        self._next = self._clock.monotonic() + self._settings.pass_s * _SLICE / BUCKETS
        return pause if self._urgent else _STEP_S

    def _hear(self, key: bytes, by: int, _: object) -> None:
        """On any thread, under a tier's lock."""
        if len(self._events) < _EVENTS:
            self._events.append((key, by))
        else:
            self.missed += 1

    def _moves(self) -> dict[bytes, int]:
        moves: dict[bytes, int] = {}
        for _ in range(len(self._events)):
            key, by = self._events.popleft()
            moves[key] = moves.get(key, 0) + by
        return moves

    def _held(self, bucket: int) -> set[bytes]:
        """What is here of a bucket, now."""
        self.drain()
        assert self._picture is not None
        assert self._changes is not None
        held = self._picture.bucket(bucket)
        for short, has in self._changes.get(bucket, {}).items():
            (held.add if has else held.discard)(short)
        return held

    async def _look(self) -> _Picture:
        """Take a new picture. What changes meanwhile is noted from its beginning on."""
        self._forget()
        self._changes = {}
        pieces = []
        for tier in self._tiers:
            keys = tier.keys()
            for start in range(0, len(keys), _CHUNK):
                pieces.append(b"".join([key[:SHORT] for key in keys[start : start + _CHUNK]]))
                await asyncio.sleep(0)
        picture: _Picture = await self._run(partial(_Picture, pieces))
        self._picture = picture
        return picture

    def _note(self, key: bytes, *, has: bool) -> None:
        if self._changes is not None:
            changes = self._changes.setdefault(bucket_of(key), {})
            self._changed += key[:SHORT] not in changes
            changes[key[:SHORT]] = has

    def _forget(self) -> None:
        self._picture = self._changes = None
        self._changed = 0
