"""A model's blocks in a store: which are there, and how those that are not get there. Every attention group is a shard."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore import api
from kvstore.errors import Unavailable
from kvstore.ids import Link

if TYPE_CHECKING:
    from kvstore.client import SyncClient
    from kvstore.connectors.hf_cache import Geometry
    from kvstore.connectors.hf_held import Held

_ASKED_AGAIN: Final = {"outcome_unknown": 0.0, "promise_pending": 0.5}  # once, after so many seconds: another node is at it
_PUT_PAUSES: Final = (0.05, 0.1, 0.2, 0.4, 0.8)  # a node under load drops what it cannot take: offer it again, then give up


class Store:
    """The blocks of one namespace.

    Args:
        kv: The client.
        geometries: Of the namespace's attention groups.
    """

    def __init__(self, kv: SyncClient, geometries: Sequence[Geometry]) -> None:
        self._kv, self._geometries = kv, geometries
        self.namespace = geometries[0].namespace
        self.shards = tuple(geometry.shard for geometry in geometries)

    def stored(self, links: Sequence[Link], reach: api.Tier = "bucket", groups: int | None = None) -> api.Found:
        """The leading run of blocks that are somewhere, no farther than `reach`: of so many groups, by default of all."""
        if not links:
            return api.Found(run=0, tiers=[])
        names = [link.prefix_id for link in links]
        return self._kv.lookup(namespace=self.namespace, prefix_ids=names, shards=self.shards[:groups], reach=reach)

    def publish(self, links: Sequence[Link], tokens: np.ndarray, held: Held) -> tuple[int, bool]:
        """Hand the node what is not stored.

        Returns:
            How many leading blocks are stored, or were taken; whether the others were not taken, or else no longer held.
        """
        run = self.stored(links).run
        if run < len(links) and run * self.namespace.block_tokens < held.first:
            return run, False
        return min(self._put(geometry, links, run, tokens, held) for geometry in self._geometries), True

    def _put(self, geometry: Geometry, links: Sequence[Link], run: int, tokens: np.ndarray, held: Held) -> int:
        size, missing = self.namespace.block_tokens, list(range(run, len(links)))
        copy_out = held.leaving(geometry)

        def fill(index: int, payload: memoryview) -> None:
            at = missing[index]
            kv, ids = geometry.payload(payload, links[at].tokens)
            copy_out(at * size, kv)
            ids[:] = tokens[at * size : at * size + ids.size]

        for pause in (*_PUT_PAUSES, None):
            if not missing:
                return len(links)
            taken = self._kv.put(self.namespace, geometry.shard, [links[at] for at in missing], fill)
            missing = [at for at, good in zip(missing, taken, strict=True) if not good]
            if missing and pause:
                time.sleep(pause)
        return missing[0] if missing else len(links)

    def commit(self, session_id: str, **settings: Any) -> api.Receipt:
        """A commit whose answer, when it gets lost, is asked for again: by its write id it is the same one."""
        settings |= {"namespace": self.namespace, "shards": self.shards}
        try:
            return self._kv.commit(session_id, **settings)
        except Unavailable as error:
            if error.kind not in _ASKED_AGAIN:
                raise
            time.sleep(_ASKED_AGAIN[error.kind])
            return self._kv.commit(session_id, **settings)


def in_memory(found: api.Found) -> int:
    """How many leading blocks are in the node's memory."""
    return next((index for index, tier in enumerate(found.tiers) if tier != "dram"), found.run)
