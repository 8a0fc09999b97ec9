"""Pages that an engine names by its own hashes: no tokens, no chain, no sessions; what it hands over comes back as it was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from kvstore import codec
from kvstore.connectors.bridge import LOAD_S, Bridge
from kvstore.connectors.transfers import LOOK_S, Look, Transfer
from kvstore.errors import Invalid
from kvstore.ids import Link, Namespace, Shard, engine_id

SAVE_S: Final = 60.0


class Pages:
    """The pages of one engine rank.

    Args:
        bridge: The way to the tier.
        namespace: Everything that must match. Its `identity` names the engine's hash scheme, its layout is opaque.
        shard: Which rank's part.

    Attributes:
        nbytes: Of one page.

    Raises:
        Invalid: The namespace is one of tokens.
    """

    def __init__(self, bridge: Bridge, namespace: Namespace, shard: Shard) -> None:
        if namespace.identity == "tokens":
            raise Invalid("namespace.identity is 'tokens': name the engine's hash scheme instead")
        self._bridge, self._namespace, self._shard = bridge, namespace, shard
        self._plan = codec.layout(namespace, shard, namespace.block_tokens)
        self.nbytes = self._plan.payload_bytes

    def links(self, keys: Sequence[bytes]) -> list[Link]:
        """How the tier calls them."""
        tokens, named = self._namespace.block_tokens, self._namespace.id
        return [Link(engine_id(named, key), tokens) for key in keys]

    def look(self, keys: Sequence[bytes]) -> Look:
        """How many leading ones are stored; see :meth:`kvstore.connectors.bridge.Bridge.look`."""
        return self._bridge.look(self._namespace, [self._shard], self.links(keys))

    def load(
        self, keys: Sequence[bytes], place: Callable[[int, memoryview], None], *, near: int = 0, deadline_s: float = LOAD_S
    ) -> Transfer:
        """Bring pages back: `place(i, bytes)` for each, in order, up to the first that is missing."""
        skip = self._plan.header_bytes
        return self._bridge.load(
            self._namespace,
            self._shard,
            self.links(keys),
            lambda index, raw: place(index, raw[skip:]),
            near=near,
            deadline_s=deadline_s,
        )

    def save(self, keys: Sequence[bytes], fill: Callable[[int, memoryview], None]) -> Transfer:
        """Hand pages over: `fill(i, room)` for each that is not stored."""
        return self._bridge.save(self._namespace, self._shard, self.links(keys), fill)

    # --- for callers on threads of their own, which may wait ---

    def exists(self, keys: Sequence[bytes]) -> int:
        """How many leading ones are stored. Waits as long as a look-up may take."""
        if not keys:
            return 0
        look, ends = self.look(keys), time.monotonic() + LOOK_S
        while (found := look.poll(LOOK_S)) is None:
            if time.monotonic() > ends + LOOK_S:
                return 0
        return found.run

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which ones are stored, whatever is missing before them. Past the time of a look-up the rest counts as missing."""
        found, ends = list[bool](), time.monotonic() + LOOK_S
        while len(found) < len(keys) and time.monotonic() < ends:
            found += [*[True] * self.exists(keys[len(found) :]), False]
        return [*found, *[False] * len(keys)][: len(keys)]

    def loaded(self, keys: Sequence[bytes], place: Callable[[int, memoryview], None], deadline_s: float = LOAD_S) -> int:
        """As `load`, to its end: how many leading ones were placed. Past it no memory of the caller's is touched."""
        return _ended(self.load(keys, place, deadline_s=deadline_s), deadline_s)

    def saved(self, keys: Sequence[bytes], fill: Callable[[int, memoryview], None]) -> int:
        """As `save`, to its end: how many leading ones are stored. Past it no memory of the caller's is read."""
        return _ended(self.save(keys, fill), SAVE_S)


def _ended(transfer: Transfer, patience_s: float) -> int:
    if not transfer.wait(patience_s):
        transfer.stop()
        return 0
    return transfer.run
