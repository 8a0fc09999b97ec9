"""The leases of one connection, by the numbers its client knows them by."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import wire
from kvstore.errors import Corrupt
from kvstore.server.ports import Pin, Plane
from tiering import Lease


class Held:
    """Numbered from 1 on; a number is never used twice."""

    def __init__(self, plane: Plane, tenant: str) -> None:
        self._plane, self._tenant = plane, tenant
        self._leases: dict[int, Lease | Pin] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._leases)

    def add(self, leases: Sequence[Lease | Pin]) -> int:
        """Hold these; the number of the first, the others follow."""
        first, self._next = self._next, self._next + len(leases)
        self._leases.update(zip(range(first, self._next), leases, strict=True))
        return first

    def release(self, runs: Sequence[tuple[int, int]]) -> None:
        """Let go of runs of numbers; of one that is not held, nothing.

        Raises:
            Corrupt: They name more leases than a connection can hold.
        """
        left, pop = wire.MAX_BATCH, self._leases.pop
        for _, count in runs:
            left -= count
            if count < 0 or left < 0:
                raise Corrupt("more leases are released than a connection can hold")
        found = [pop(number, None) for first, count in runs for number in range(first, first + count)]
        self._let_go([lease for lease in found if lease is not None])

    def release_all(self) -> None:
        """Let go of everything."""
        leases, self._leases = list(self._leases.values()), {}
        self._let_go(leases)

    def _let_go(self, leases: Sequence[Lease | Pin]) -> None:
        pins = []
        for lease in leases:
            if isinstance(lease, Lease):
                lease.release()
            else:
                pins.append(lease)
        if pins:
            self._plane.unpin(self._tenant, pins)
