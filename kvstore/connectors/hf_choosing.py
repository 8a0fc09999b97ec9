"""Compute or load, for one model: its speed is learned from its own passes, and what is not waited for is staged behind them."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.client.choice import Choice, Loading, Stored
from kvstore.connectors.hf_passes import Passes
from kvstore.errors import KVTierError
from kvstore.ids import Link, Namespace

if TYPE_CHECKING:
    from kvstore.client import SyncClient
    from kvstore.connectors.hf_cache import Geometry

_BEHIND: Final = 8


class Choosing:
    """What a `SessionCache` with `compute_or_load` knows.

    Args:
        model: The model; its passes are timed by hooks that go with this object.
        kv: The client.
        geometry: Of the first attention group, which is what is chosen about: of a window's, only the end is ever loaded.
        choice: What is known already, or True.
    """

    def __init__(self, model: Any, kv: SyncClient, geometry: Geometry, choice: bool | Choice) -> None:
        self._kv, self._geometry = kv, geometry
        self._choice = choice if isinstance(choice, Choice) else Choice()
        self.passes = Passes(model, self._choice.observe_compute)
        weakref.finalize(self, self.passes.remove)
        self._behind: deque[str] = deque(maxlen=_BEHIND)  # restores of what was not waited for

    def can(self, prompt: np.ndarray) -> bool:
        """Whether the model's speed is known. Learns first what there is to be learned."""
        self.passes.tell()
        for _ in range(len(self._behind)):
            restore_id = self._behind.popleft()
            try:
                status = self._kv.get_restore(restore_id)
            except KVTierError:
                continue  # the node has forgotten it, or is another one now
            if status.state in {"resolving", "staging"}:
                self._behind.append(restore_id)
            elif status.by_tier.get("bucket"):
                self._choice.observe_load("bucket", status.by_tier["bucket"], status.elapsed_ms / 1000)
        return self._choice.costs.compute(0, prompt.size) is not None

    def now(self) -> float:
        """By the choice's clock."""
        return self._choice.monotonic()

    def loading(self, links: Sequence[Link], tiers: Sequence[str], prompt: np.ndarray, deadline_ms: int, began: float) -> Loading:
        """What to load of these blocks, which are in those tiers."""
        stored = [
            Stored(link.tokens, self._geometry.block_bytes(link.tokens), tier) for link, tier in zip(links, tiers, strict=True)
        ]
        return self._choice.begin(stored, prompt.size, deadline=began + deadline_ms / 1000, began=began)

    def stage(self, session_id: str, namespace: Namespace, version: int | None, prompt: np.ndarray, deadline_ms: int) -> str:
        """Bring what was not waited for nearer, behind the computing, which tells how fast it would have been. Its restore id."""
        try:
            begun = self._kv.restore(
                session_id,
                namespace=namespace,
                version=version,
                tokens=prompt.tolist(),
                deadline_ms=deadline_ms,
                priority="speculative",
            )
        except KVTierError:
            return ""  # nobody waits for it
        self._behind.append(begun.restore_id)
        return begun.restore_id
