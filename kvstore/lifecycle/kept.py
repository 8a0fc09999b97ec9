"""What one collection read and the next one needs again."""

from __future__ import annotations

from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """Values by key, bounded by weight. A full one takes no more.

    Collections go through everything in the same order each time, so that evicting the least recent would push out every entry
    just before it is asked for. Here what got in stays for as long as every run asks for it.

    Args:
        limit: Weight, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._used, self._run = limit, 0, 0
        self._entries: dict[str, tuple[V, int, int]] = {}

    def get(self, key: str) -> V | None:
        """The value, if it is held; it is for the next run, too."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries[key] = (found[0], found[1], self._run)
        return found[0]

    def put(self, key: str, value: V, weight: int) -> None:
        """Hold a value, replacing an older one, if there is room."""
        old = self._entries.pop(key, None)
        self._used -= old[1] if old is not None else 0
        if self._used + weight <= self._limit:
            self._entries[key] = (value, weight, self._run)
            self._used += weight

    def turn(self) -> None:
        """A run is over: what it did not ask for is gone from the bucket, and let go."""
        for key in [key for key, (_, _, run) in self._entries.items() if run != self._run]:
            self._used -= self._entries.pop(key)[1]
        self._run += 1

    @property
    def used(self) -> int:
        """Weight of what is held."""
        return self._used
