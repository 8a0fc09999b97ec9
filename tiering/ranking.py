"""Which value of a tier makes way for another: by a policy, by when it was used, and by who holds it ahead of its use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Protocol

from tiering.policy import Policy
from tiering.prefetch import Holds

NEVER = float("-inf")


class Ranked(Protocol):
    """A value as its rank depends on it.

    Attributes:
        key: Its key.
        size: Bytes.
        leases: How many read it; one that is read has no rank.
        used: When somebody last wanted it, which bringing it in ahead of its use is not.
    """

    key: bytes
    size: int
    leases: int
    used: float


class Ranking:
    """What was not used lately goes first; then what is held; what was used lately goes last, and never for what is ahead.

    Not synchronised: the tier calls it under its own lock.

    Args:
        values: The tier's.
        policy: Who goes first, apart from that.
        holds: Who is spared.
        recent_s: Seconds that count as lately.
        monotonic: The clock.
    """

    def __init__(
        self, values: Mapping[bytes, Ranked], policy: Policy, holds: Holds, *, recent_s: float, monotonic: Callable[[], float]
    ) -> None:
        self._values, self._policy, self._holds = values, policy, holds
        self._recent_s, self._monotonic = recent_s, monotonic
        self._unused: OrderedDict[bytes, None] = OrderedDict()  # what the policy ranks, longest unused first: it has its own order

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        self._expire()
        return self._holds.held

    def admit(self, key: bytes, size: int) -> bool:
        """May this value come in?"""
        return self._policy.admit(key, size)

    def asked(self, keys: Sequence[bytes], told: int = 0) -> None:
        """One request wants these; see :class:`tiering.policy.Policy`."""
        self._policy.asked(keys, told)

    def use(self, value: Ranked) -> None:
        """Somebody wants it: that ends its hold."""
        self.touch(value)
        if self._holds.pop(value.key) and not value.leases:
            self._add(value.key)
        else:
            self._policy.touch(value.key)
            if value.key in self._unused:
                self._unused.move_to_end(value.key)

    def touch(self, value: Ranked) -> None:
        """It was in use until now."""
        value.used = self._monotonic()

    def pin(self, value: Ranked) -> None:
        """It is read, or gone from the tier: it has no rank."""
        self._remove(value.key)
        self._holds.unrank(value.key)

    def unpin(self, value: Ranked) -> None:
        """Nobody reads it any more."""
        if value.key in self._holds:
            self._holds.rank(value.key)
        elif value.used == NEVER:
            self._first(value.key)
        else:
            self._add(value.key)

    def lease_all(self, values: Iterable[Ranked]) -> None:
        """As `use` and then `pin` for each: the short way for hundreds at once, which are leased already."""
        now, held = self._monotonic(), self._holds.held
        for value in values:
            value.used = now
            if held:
                self._holds.pop(value.key)
            self._remove(value.key)

    def release_all(self, values: Iterable[Ranked]) -> None:
        """As `unpin` for each, which was used until now."""
        held = self._holds.held
        for value in values:
            if held and value.key in self._holds:
                self._holds.rank(value.key)
            else:
                self._add(value.key)

    def forget(self, value: Ranked) -> None:
        """It is not in the tier any more."""
        self._remove(value.key)
        self._holds.pop(value.key)

    def victim(self, *, ahead: bool) -> bytes | None:
        """The value to evict next, taken out; None where nothing may go. `ahead`: for something that nobody wants yet."""
        self._expire()
        longest = next(iter(self._unused), None)
        recent = longest is None or self._recent(self._values[longest])  # and so is all else that is ranked
        if recent and ahead:
            return None
        if recent and (spare := self._holds.victim()) is not None:
            return spare
        key = self._policy.victim()
        if ahead and key is not None and longest is not None and self._recent(self._values[key]):
            self._policy.add(key)
            self._policy.remove(longest)
            key = longest
        if key is not None:
            del self._unused[key]
        return key

    def hold(self, owner: Hashable, keys: Iterable[bytes], *, seconds: float, yielding: bool) -> int:
        """See :meth:`tiering.DramTier.hold`."""
        self._expire()
        self._holds.group(owner, until=self._monotonic() + seconds, yielding=yielding)
        held = 0
        for key in keys:
            value = self._values.get(key)
            if value is None or not self._holds.put(owner, key, value.size):
                break
            if not value.leases:
                self._remove(key)
                self._holds.rank(key)
            held += 1
        return held

    def let_go(self, owner: Hashable) -> None:
        """See :meth:`tiering.DramTier.let_go`."""
        self._place(self._holds.end(owner))

    def demote(self, keys: Iterable[bytes]) -> None:
        """See :meth:`tiering.DramTier.demote`."""
        for key in keys:
            value = self._values.get(key)
            if value is not None and not value.leases and key not in self._holds:
                value.used = NEVER
                self._first(key)

    def _expire(self) -> None:
        self._place(self._holds.expired(self._monotonic()))

    def _place(self, keys: Iterable[bytes]) -> None:
        """Rank values that are not held any more. Such a one goes soon, unless it was used lately."""
        for key in keys:
            value = self._values[key]
            if value.leases:
                continue
            if self._recent(value):
                self._add(key)
            else:
                self._first(key)

    def _recent(self, value: Ranked) -> bool:
        return self._monotonic() - value.used < self._recent_s

    def _add(self, key: bytes) -> None:
        self._policy.add(key)
        self._unused[key] = None
        self._unused.move_to_end(key)

    def _first(self, key: bytes) -> None:
        self._policy.first(key)
        self._unused[key] = None
        self._unused.move_to_end(key, last=False)

    def _remove(self, key: bytes) -> None:
        self._policy.remove(key)
        self._unused.pop(key, None)
