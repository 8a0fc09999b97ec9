"""One sequence's KV out of a store: of a session, or of whoever computed the same beginning; all of it, or what is worth it."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from kvstore import api
from kvstore.client.choice import CHEAPER, steps
from kvstore.connectors.arrivals import arrivals
from kvstore.connectors.base import agreeing
from kvstore.connectors.hf_deliver import Arrived, arrive
from kvstore.connectors.hf_store import Store, in_memory
from kvstore.errors import Gone, NotFound, Overloaded, Unavailable
from kvstore.ids import Link, chain

if TYPE_CHECKING:
    from kvstore.client import SyncClient
    from kvstore.connectors.hf_cache import Geometry
    from kvstore.connectors.hf_choosing import Choosing

log = logging.getLogger(__name__)
MAX_REMEMBERED: Final = 4096  # sessions whose version is remembered for the next commit


class Bases:
    """Which version of a session the next commit builds on: the one that was last restored or committed here."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, tuple[int, str]] = OrderedDict()

    def get(self, session_id: str) -> tuple[int, str]:
        """The version, and which session of that id it is one of; (0, "") where there is none."""
        return self._found.get(session_id, (0, ""))

    def remember(self, session_id: str, found: api.Session | api.SessionManifest | api.Receipt) -> None:
        """It is this one now."""
        self._found[session_id] = (found.version, found.branch)
        self._found.move_to_end(session_id)
        if len(self._found) > MAX_REMEMBERED:
            self._found.popitem(last=False)

    def forget(self, session_id: str) -> None:
        """There is no such session."""
        self._found.pop(session_id, None)


class Reader:
    """Reads the first attention group's KV of a prompt; see `hf_deliver.complete` for the others.

    Args:
        kv: The client.
        model: The model.
        geometry: Of the first group.
        store: The blocks.
        bases: Told what was found.
        choosing: Says what is worth loading; all is loaded where None.
    """

    def __init__(
        self, kv: SyncClient, model: Any, geometry: Geometry, store: Store, bases: Bases, choosing: Choosing | None
    ) -> None:
        self._kv, self._model, self._geometry, self._store = kv, model, geometry, store
        self._namespace, self._bases, self._choosing = store.namespace, bases, choosing

    def session(self, session_id: str, prompt: np.ndarray | None, version: int | None, deadline_ms: int) -> Arrived:
        """Of a session; of one that does not exist, what others have computed. Raises as `SessionCache.restore`."""
        try:
            if prompt is not None and self._choosing is not None and self._choosing.can(prompt):
                return self._loaded_or_computed(self._choosing, session_id, prompt, version, deadline_ms)
            return self._loaded(session_id, prompt, version, deadline_ms)
        except (NotFound, Gone):
            if prompt is None:
                raise
            self._bases.forget(session_id)
            return self.shared(prompt, deadline_ms)
        except (Unavailable, Overloaded) as error:
            if prompt is None:
                raise
            return nothing(error)

    def _loaded(self, session_id: str, prompt: np.ndarray | None, version: int | None, deadline_ms: int) -> Arrived:
        with ThreadPoolExecutor(1, "kvtier-restore") as beside:  # two questions at once
            begun = beside.submit(  # answered at once; it stages what is then taken window by window
                self._kv.restore,
                session_id,
                namespace=self._namespace,
                version=version,
                tokens=() if prompt is None else prompt.tolist(),
                deadline_ms=deadline_ms,
                shards=self._store.shards[:1],  # of the others only the end is needed; it is asked for when it is known
            )
            found = self._kv.manifest(session_id, namespace=self._namespace, version=version or 0)
            restore_id = begun.result().restore_id
        self._bases.remember(session_id, found)
        links = self._common(found.blocks, prompt)
        near = in_memory(self._store.stored(links, reach="dram", groups=1))
        return self._all(links, near, prompt, deadline_ms, version=found.version, restore_id=restore_id)

    def _loaded_or_computed(
        self, choosing: Choosing, session_id: str, prompt: np.ndarray, version: int | None, deadline_ms: int
    ) -> Arrived:
        """As `_loaded`; what is not worth waiting for is staged behind the computing."""
        began = choosing.now()
        found = self._kv.manifest(session_id, namespace=self._namespace, version=version or 0)
        self._bases.remember(session_id, found)
        links = self._common(found.blocks, prompt)
        here = self._store.stored(links, reach="nvme", groups=1)
        tiers = here.tiers + ["bucket"] * (len(links) - here.run)
        row = self._chosen(choosing, links, tiers, prompt, deadline_ms, began, version=found.version)
        if row.miss != CHEAPER:
            return row
        restore_id = choosing.stage(session_id, self._namespace, version, prompt, deadline_ms)
        return msgspec.structs.replace(row, restore_id=restore_id)

    def shared(self, prompt: np.ndarray, deadline_ms: int) -> Arrived:
        """Of the full blocks that a prompt begins with, whichever sessions they came from. A store in trouble has none."""
        try:
            chooses = self._choosing is not None and self._choosing.can(prompt)
            began = self._choosing.now() if self._choosing is not None else 0.0
            links = chain(self._namespace, prompt)
            found = self._store.stored(links)
            links = links[: found.run]
            if self._choosing is not None and chooses:
                return self._chosen(self._choosing, links, found.tiers, prompt, deadline_ms, began)
            return self._all(links, in_memory(found), prompt, deadline_ms)
        except (Unavailable, Overloaded) as error:
            return nothing(error)

    def _all(self, links: Sequence[Link], near: int, prompt: np.ndarray | None, deadline_ms: int, **about: Any) -> Arrived:
        arriving = arrivals(self._kv, self._namespace, self._geometry.shard, links, near=near, deadline_ms=deadline_ms)
        return arrive(self._geometry, self._model, links, arriving, prompt, far=near < len(links), **about)

    def _chosen(
        self,
        choosing: Choosing,
        links: Sequence[Link],
        tiers: Sequence[str],
        prompt: np.ndarray,
        deadline_ms: int,
        began: float,
        **about: Any,
    ) -> Arrived:
        loading = choosing.loading(links, tiers, prompt, deadline_ms, began)
        arriving = steps(self._kv, self._namespace, self._geometry.shard, links, loading)
        return arrive(self._geometry, self._model, links, arriving, prompt, far=False, loading=loading, **about)

    def _common(self, links: Sequence[Link], prompt: np.ndarray | None) -> Sequence[Link]:
        """Those that a prompt can use: of the first block that differs, too, the beginning may be common."""
        return links if prompt is None else links[: agreeing(self._namespace, links, prompt) + 1]


def nothing(error: Exception) -> Arrived:
    """What came out of a store in trouble."""
    log.warning("kvtier: nothing was restored, the prompt is recomputed: %s", error)
    return Arrived(miss=str(error))
