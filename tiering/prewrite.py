"""A new slab is written once, in the background: pages that were never written are slow to write first, and may not exist."""

from __future__ import annotations

import asyncio
import logging

from tiering.catalog import Catalog
from tiering.index import META, Change, Index
from tiering.movers import Movers
from tiering.slab import Slab

_log = logging.getLogger("tiering.disk")
_STEP = 4 << 20
_DONE = b"prewritten"  # size of the slab whose every page was written


def was_prewritten(meta: dict[bytes, bytes], size: int) -> bool:
    """Whether a slab of this size was written to its end."""
    return meta.get(_DONE) == b"%d" % size


class Prewrite:
    """Takes pieces that no slot has, writes zeros over them, and gives them back.

    Attributes:
        over: Whether it has ended, or given up.
    """

    def __init__(self, name: str, *, slab: Slab, index: Index, catalog: Catalog, movers: Movers) -> None:
        self._name = name
        self._slab, self._index, self._catalog, self._movers = slab, index, catalog, movers
        self._back: asyncio.Event | None = None
        self.over = False

    @property
    def lends(self) -> bool:
        """Whether a piece is out now."""
        return self._back is not None

    async def returned(self) -> None:
        """Until the piece that is out is back."""
        if self._back is not None:
            await self._back.wait()

    async def run(self) -> None:
        """All of the slab; for as long as it takes."""
        try:
            while (piece := self._catalog.borrow(_STEP)) is not None:
                written, back = False, asyncio.Event()
                self._back = back
                try:
                    await self._movers.run(self._slab.zero, *piece)
                    written = True
                finally:
                    self._catalog.give_back(*piece, written=written)
                    self._back = None
                    back.set()
            await self._index.commit([Change(META, _DONE, b"%d" % self._slab.size)])
        except OSError as error:
            _log.warning("%s: stopped writing the new slab in advance: %s", self._name, error)
        finally:
            self.over = True
