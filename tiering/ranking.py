"""Which value of a tier makes way for another: by a policy, by when it was used, and by who holds it ahead of its use."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
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

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        self._expire()
        return self._holds.held

    def admit(self, key: bytes, size: int) -> bool:
        """May this value come in?"""
        return self._policy.admit(key, size)

    def use(self, value: Ranked) -> None:
        """Somebody wants it: that ends its hold."""
        self.touch(value)
        if self._holds.pop(value.key) and not value.leases:
            self._policy.add(value.key)
        else:
            self._policy.touch(value.key)

    def touch(self, value: Ranked) -> None:
        """It was in use until now."""
        value.used = self._monotonic()

    def pin(self, value: Ranked) -> None:
        """It is read, or gone from the tier: it has no rank."""
        self._policy.remove(value.key)
        self._holds.unrank(value.key)

    def unpin(self, value: Ranked) -> None:
        """Nobody reads it any more."""
        if value.key in self._holds:
            self._holds.rank(value.key)
        elif value.used == NEVER:
            self._policy.first(value.key)
        else:
            self._policy.add(value.key)

    def lease_all(self, values: Iterable[Ranked]) -> None:
        """As `use` and then `pin` for each that nobody reads yet: the short way for hundreds at once."""
        now, held, policy = self._monotonic(), self._holds.held, self._policy
        for value in values:
            value.used = now
            if held:
                self._holds.pop(value.key)
            policy.touch(value.key)
            if not value.leases:
                policy.remove(value.key)

    def release_all(self, values: Iterable[Ranked]) -> None:
        """As `unpin` for each, which was used until now."""
        held, policy = self._holds.held, self._policy
        for value in values:
            if held and value.key in self._holds:
                self._holds.rank(value.key)
            else:
                policy.add(value.key)

    def forget(self, value: Ranked) -> None:
        """It is not in the tier any more."""
        self._policy.remove(value.key)
        self._holds.pop(value.key)

    def victim(self, *, ahead: bool) -> bytes | None:
        """The value to evict next, taken out; None where nothing may go. `ahead`: for something that nobody wants yet."""
        self._expire()
        key = self._policy.victim()
        if key is not None and not self._recent(self._values[key]):
            return key
        spare = None if ahead else self._holds.victim()
        if key is not None and (ahead or spare is not None):
            self._policy.first(key)
            key = None
        return key or spare

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
                self._policy.remove(key)
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
                self._policy.first(key)

    def _expire(self) -> None:
        self._place(self._holds.expired(self._monotonic()))

    def _place(self, keys: Iterable[bytes]) -> None:
        """Rank values that are not held any more. Such a one goes soon, unless it was used lately."""
        for key in keys:
            value = self._values[key]
            if value.leases:
                continue
            if self._recent(value):
                self._policy.add(key)
            else:
                self._policy.first(key)

    def _recent(self, value: Ranked) -> bool:
        return self._monotonic() - value.used < self._recent_s
