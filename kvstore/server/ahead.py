"""Room that a writer is promised before it names its blocks, so that it need not wait for an answer to each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from kvstore import wire
from kvstore.server.ports import Ahead as Slot
from kvstore.server.ports import Plane

_KEPT_S: Final = 2 * wire.AHEAD_S
_SHARE: Final = 4  # of the window: as much of the arena at most is promised to its client, or one block


class Ahead:
    """Of one connection: blocks of one kind, the last it asked for, for a second after that.

    Args:
        plane: Makes the room.
        tenant: Whose.
        window: Bytes of the connection's window.
        unread: Whether the client has sent what nobody has looked at.
    """

    def __init__(self, plane: Plane, tenant: str, window: int, unread: Callable[[], bool]) -> None:
        self._plane, self._tenant, self._window, self._unread = plane, tenant, window, unread
        self._kind: tuple[str, str, int] | None = None
        self._slots: list[Slot] = []
        self._ends: asyncio.TimerHandle | None = None

    def slots(self, publish: wire.Publish) -> list[Slot]:
        """What these blocks may use up; all else is given back."""
        if self._slots and _kind(publish) != self._kind:
            self._give_back()
        return self._slots

    def promise(self, publish: wire.Publish) -> int:
        """Make the room that a publication asks for behind its own; for how many blocks there is some now."""
        kind = _kind(publish)
        if kind is None or publish.ahead < 1:
            self._give_back()
            return 0
        self._kind = kind
        nbytes = publish.extents[0][2]
        most = min(publish.ahead, wire.MAX_AHEAD, max(1, self._window // _SHARE // nbytes))
        if len(self._slots) < most:
            self._slots += self._plane.ahead(self._tenant, *kind, most - len(self._slots))
        if self._slots:
            self._plane.writing(self._tenant).add(self._unread)
            self._keep()
        return len(self._slots)

    def close(self) -> None:
        """Give all of it back."""
        self._give_back()
        if self._ends is not None:
            self._ends.cancel()
        self._plane.writing(self._tenant).discard(self._unread)

    def _keep(self) -> None:
        if self._ends is not None:
            self._ends.cancel()
        self._ends = asyncio.get_running_loop().call_later(_KEPT_S, self._end)

    def _end(self) -> None:
        if self._unread():  # the loop was held up: this may be what the room was promised for
            self._keep()
        else:
            self.close()

    def _give_back(self) -> None:
        slots, self._slots = self._slots, []
        self._plane.not_wanted(self._tenant, slots)


def _kind(publish: wire.Publish) -> tuple[str, str, int] | None:
    tokens = {extent[0] for extent in publish.extents}
    return (publish.namespace, publish.shard, tokens.pop()) if len(tokens) == 1 else None
