"""The last decisions of a gateway, with their reasons: for whoever wonders why a request went where it did."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Final

import msgspec

from kvstore.gateway.routes import Decision
from kvstore.mesh.price import Priced

KEPT: Final = 50
_COMPARED: Final = 16  # engines of each, the cheapest: what is kept is bounded however many engines there are


class Decisions:
    """Remembers the last `KEPT`. Nothing of a prompt is kept but its length.

    Args:
        monotonic: The clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic, self._numbers = monotonic, count(1)
        self._kept: OrderedDict[int, tuple[float, Decision]] = OrderedDict()

    def made(self, engine: str, priced: Iterable[Priced]) -> int:
        """A request was sent to an engine; `priced` are those that it was compared with, the cheapest first. Returns its number."""
        number = next(self._numbers)
        decision = Decision(number=number, age_s=0.0, engine=engine, candidates=list(islice(priced, _COMPARED)))
        self._kept[number] = self._monotonic(), decision
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return number

    def first_byte(self, number: int, seconds: float) -> None:
        """The engine began to answer so long after it was asked."""
        self._change(number, first_byte_ms=round(seconds * 1000, 1))

    def over(self, number: int) -> None:
        """The request came to an end there."""
        self._change(number, under_way=False)

    def shown(self) -> list[Decision]:
        """Newest first."""
        now = self._monotonic()
        return [msgspec.structs.replace(each, age_s=round(now - at, 1)) for at, each in reversed(self._kept.values())]

    def _change(self, number: int, **fields: object) -> None:
        found = self._kept.get(number)
        if found is not None:
            at, decision = found
            self._kept[number] = at, msgspec.structs.replace(decision, **fields)
