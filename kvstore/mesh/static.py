"""A directory without a server: the members are configured, and they are asked themselves what they hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from cachetools import TTLCache

from kvstore.clock import Clock
from kvstore.mesh.members import Member
from kvstore.mesh.patience import Patience, within
from kvstore.mesh.seldom import Seldom

Holds = Callable[[Member, Sequence[bytes]], Awaitable[list[bool]]]
"""Asks a peer which of these keys it has; in the order asked."""

log = logging.getLogger(__name__)
_REMEMBERED_S: Final = 10.0
_REMEMBERED: Final = 1 << 16  # keys; about 20 MB


class StaticDirectory:
    """See :class:`kvstore.mesh.members.Directory`. It belongs to one event loop.

    A peer that has a key is believed to have it for ten seconds; that it has not is never remembered. One that does not answer is
    left alone for a while, longer each time; meanwhile it is no member, and what was said is forgotten.

    Args:
        members: The others.
        holds: Asks one of them.
        clock: Time.
        answer_s: How long a look-up waits for all of them together.
    """

    def __init__(self, members: Sequence[Member], holds: Holds, clock: Clock, *, answer_s: float = 0.25) -> None:
        self._members, self._holds, self._answer_s = tuple(members), holds, answer_s
        self._patience = {member: Patience(clock) for member in self._members}
        self._seldom = Seldom(clock)
        self._known: TTLCache[bytes, tuple[Member, ...]] = TTLCache(_REMEMBERED, _REMEMBERED_S, timer=clock.monotonic)

    def members(self) -> Sequence[Member]:
        """The others, without those that are left alone now."""
        return tuple(member for member in self._members if not self._patience[member].resting)

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
        except Exception as error:  # noqa: BLE001  whatever it is, a peer that does not answer has said nothing
            if not patience.silent_lately:
                self._known.clear()  # what it said with the rest: the others are soon asked again
                if self._seldom(member.node):
                    log.warning("%s does not answer: %s", member.node, str(error)[:500] or type(error).__name__)
            patience.silent()
            return []
        patience.answered()
        return answer

    async def _asked(self, member: Member, keys: Sequence[bytes]) -> list[bool]:
        return await self._holds(member, keys)
