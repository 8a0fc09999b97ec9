"""Whose values a tier holds that several share, and which of them goes first."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiering.policy import Policy


class Owner:
    """One of them.

    Attributes:
        held: Its bytes, those included that room is set aside for.
        policy: Ranks its values.
    """

    __slots__ = ("held", "policy")

    def __init__(self, policy: Policy) -> None:
        self.held = 0
        self.policy = policy


class Owners:
    """Whoever would hold most gives way, and nobody who holds less than who asks: one may fill what the others leave, no more.

    Not synchronised: its owner calls it under the owner's own lock.

    Args:
        numbers: Who they are. What is found of anybody else goes before all that is theirs; where there is one only, it is its own.
        policy: Makes each one's ranking.
    """

    def __init__(self, numbers: Sequence[int], policy: Callable[[], Policy]) -> None:
        self._present = {number: Owner(policy()) for number in numbers}
        alone = len(self._present) == 1
        self._gone = next(iter(self._present.values())) if alone else Owner(policy())
        self._all = list(self._present.values())

    def of(self, number: int) -> Owner:
        """Whose this is."""
        return self._present.get(number, self._gone)

    def victim(self, asking: Owner | None) -> bytes | None:
        """Take out the value that should go first for one that asks, or for nobody in particular; None where nothing may go."""
        key = self._gone.policy.victim()
        if key is not None or len(self._all) < 2:
            return key
        most = max(self._all, key=_held)
        key = most.policy.victim()
        if key is not None or most is asking:
            return key
        for owner in sorted(self._all, key=_held, reverse=True):
            key = owner.policy.victim()
            if key is not None or owner is asking:
                break
        return key


def _held(owner: Owner) -> int:
    return owner.held
