"""The register `epoch`: the only time that safety knows. It grows by swaps, and anyone may advance it (R9)."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.errors import Corrupt, Unavailable
from kvstore.model import MAX_EPOCH, Epoch, dump, parse
from kvstore.objects.base import Absent, Unchanged, Update
from kvstore.repo.root import MAX_REGISTER_BYTES, Root, outcome_unknown

_TRIES: Final = 16
_RECENT_S: Final = 60.0


class Reading(msgspec.Struct, frozen=True):
    """The epoch as it was read. `modified` is by the store's clock."""

    epoch: int
    etag: str
    modified: float


class Epochs:
    """Reads and advances the epoch.

    Attributes:
        latest: The newest that this process has read; 0 before it has read any.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self.latest = 0
        self._read_at = float("-inf")

    async def read(self) -> Reading:
        """The epoch now.

        Raises:
            Unavailable: `store_not_initialised`: it is missing, and everybody stops.
            Corrupt: It is damaged; or it went back, so an older copy of the bucket was put in place. Nothing is added or deleted.
        """
        before = self.latest
        found = await self._root.sound(self._root.keys.epoch, self._read)
        if found.epoch < before:
            raise Corrupt(
                f"the epoch went back from {before} to {found.epoch}: the bucket was replaced by an older copy of itself",
                remedy="stop every node, and restore the whole prefix to one point in time into an empty one",
            )
        self.latest = max(self.latest, found.epoch)
        self._read_at = self._root.clock.monotonic()
        return found

    async def _read(self) -> Reading:
        got = await self._root.store.get(self._root.keys.epoch, into=memoryview(bytearray(MAX_REGISTER_BYTES)))
        if isinstance(got, Absent | Unchanged):
            raise Unavailable(f"{self._root.keys.epoch} is missing: nobody may write or collect", kind="store_not_initialised")
        return Reading(parse(got.data, Epoch, self._root.keys.epoch).epoch, got.etag, got.modified)

    @property
    def fresh(self) -> bool:
        """Whether `latest` was read within the last minute."""
        return self._root.clock.monotonic() - self._read_at <= _RECENT_S

    async def recent(self) -> int:
        """An epoch read within the last minute: enough for what no head names. Adding to a head always takes `read`."""
        return self.latest if self.fresh else (await self.read()).epoch

    async def advance(self, seen: Reading) -> Reading:
        """Make the epoch greater than it was seen; whoever else does so has done it for us.

        Raises:
            Unavailable: The store does not answer; the epoch may have grown.
            Corrupt: It is the last one that a key has room for, which no bucket comes to by itself.
        """
        key = self._root.keys.epoch
        for attempt in range(_TRIES):
            if seen.epoch >= MAX_EPOCH:
                raise Corrupt(
                    f"{key} is {seen.epoch}, the last there is: something other than kvtier wrote it",
                    remedy="commits go on and nothing is collected; move what matters to an empty root",
                )
            body = dump(Epoch(epoch=seen.epoch + 1, write=self._root.ids.new()), key)
            await self._root.attempt(key, body, Update(seen.etag))
            now = await self.read()
            if now.epoch > seen.epoch:
                return now
            seen = now
            await self._root.pause(attempt)
        raise outcome_unknown("advancing the epoch")
