"""A directory without a server: the members are configured, and they are asked themselves what they hold."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cachetools import TTLCache

from kvstore.clock import Clock
from kvstore.mesh.members import Member
from kvstore.mesh.patience import Patience, within

Holds = Callable[[Member, Sequence[bytes]], Awaitable[list[bool]]]
"""Asks a peer which of these keys it has; in the order asked."""

_REMEMBERED_S: Final = 10.0
_REMEMBERED: Final = 1 << 16  # keys; about 20 MB


class StaticDirectory:
    """See :class:`kvstore.mesh.members.Directory`. It belongs to one event loop.

    A peer that has a key is believed to have it for ten seconds; that it has not is never remembered. One that does not answer is
    left alone for a while, longer each time.

    Args:
        members: The others.
        holds: Asks one of them.
        clock: Time.
        answer_s: How long a look-up waits for all of them together.
    """

    def __init__(self, members: Sequence[Member], holds: Holds, clock: Clock, *, answer_s: float = 0.25) -> None:
        self._members, self._holds, self._answer_s = tuple(members), holds, answer_s
        self._patience = {member: Patience(clock) for member in self._members}
        self._known: TTLCache[bytes, tuple[Member, ...]] = TTLCache(_REMEMBERED, _REMEMBERED_S, timer=clock.monotonic)

    def members(self) -> Sequence[Member]:
        """The others."""
        return self._members

    async def locate(self, keys: Sequence[bytes]) -> list[tuple[Member, ...]]:
        """Others that hold each key, as they say themselves; whoever has not answered in time holds nothing."""
        unknown = [key for key in keys if key not in self._known]
        said = await asyncio.gather(*(self._ask(member, unknown) for member in self._members)) if unknown else []
        found = {key: self._known.get(key, ()) for key in keys}
        for member, answer in zip(self._members, said, strict=False):
            for key, has in zip(unknown, answer, strict=False):
                if has and member not in found[key]:
                    found[key] += (member,)
        for key in unknown:
            if found[key]:
                self._known[key] = found[key]
        return [found[key] for key in keys]

    def added(self, keys: Sequence[bytes]) -> None:
        """Nobody is told: whoever wants to know asks."""

    def dropped(self, keys: Sequence[bytes]) -> None:
        """As `added`."""

    def wrong(self, member: Member, keys: Sequence[bytes]) -> None:
        """That member was asked for these, and has them not: ask again next time."""
        for key in keys:
            left = tuple(one for one in self._known.pop(key, ()) if one != member)
            if left:
                self._known[key] = left

    async def _ask(self, member: Member, keys: Sequence[bytes]) -> list[bool]:
        patience = self._patience[member]
        if not patience.ask():
            return []
        try:
            answer = await within(self._answer_s, self._asked(member, keys))
        except Exception:  # noqa: BLE001  whatever it is, a peer that does not answer has said nothing
            patience.silent()
            return []
        patience.answered()
        return answer

    async def _asked(self, member: Member, keys: Sequence[bytes]) -> list[bool]:
        return await self._holds(member, keys)
