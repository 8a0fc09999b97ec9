"""What is known of keys that an engine asks for one by one: they are asked for together, once a step, and never waited for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Final

from kvstore.connectors.transfers import Look

MISS: Final = ""
# Of one request about one group: the first says where its run ends, the others what a window wants before that.
_QUESTIONS: Final = 4


class _Key:
    """One key. `tier` is where it is, `MISS`, or None while that is not known."""

    __slots__ = ("asked", "requests", "tier")

    def __init__(self) -> None:
        self.asked, self.tier = False, None  # type: tuple[bool, str | None]
        self.requests: set[str] = set()


class _Request:
    """One request of the engine: what it asked for, and how often a group of it was asked about."""

    __slots__ = ("keys", "questions")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.questions: Counter[Hashable] = Counter()


class Verdicts:
    """Of all requests that live. A verdict stands as long as a request that asked for it.

    Args:
        look: Asks how many leading ones of some keys are stored.
    """

    def __init__(self, look: Callable[[Sequence[bytes]], Look]) -> None:
        self._look = look
        self._keys: dict[bytes, _Key] = {}
        self._requests: dict[str, _Request] = {}
        self._next: dict[tuple[str, Hashable], list[bytes]] = {}
        self._looks: list[tuple[list[bytes], Look]] = []
        self._read_this_step = False

    def of(self, key: bytes, request: str, group: Hashable) -> str | None:
        """The tier that a key is in, `MISS`, or None: ask again in the next step.

        Args:
            key: The engine's.
            request: Who asks. It should ask in the order in which a missing key makes those after it worthless.
            group: Keys of different groups do not depend on each other.
        """
        if not self._read_this_step:
            self._read()
        known = self._keys.get(key)
        if known is None:
            known = self._keys[key] = _Key()
        if request not in known.requests:
            known.requests.add(request)
            self._requests.setdefault(request, _Request()).keys.append(key)
        if known.tier is None and not known.asked:
            known.asked = True
            self._next.setdefault((request, group), []).append(key)
        return known.tier

    def ask(self) -> None:
        """The end of a step: ask for what was wanted in it."""
        self._read()
        for (name, group), keys in self._next.items():
            request = self._requests.get(name)
            if request is not None and request.questions[group] == _QUESTIONS:
                self.miss(keys)
            elif wanted := [key for key in keys if key in self._keys]:
                if request is not None:
                    request.questions[group] += 1
                self._looks.append((wanted, self._look(wanted)))
        self._next.clear()
        self._read_this_step = False

    def near(self, keys: Sequence[bytes]) -> int:
        """How many leading ones are in a node's memory."""
        near = [key in self._keys and self._keys[key].tier == "dram" for key in keys]
        return [*near, False].index(False)

    def miss(self, keys: Sequence[bytes]) -> None:
        """These are not to be had, whatever a look-up says: loading them failed."""
        for key in keys:
            if (known := self._keys.get(key)) is not None:
                known.tier = MISS

    def forget(self, request: str) -> None:
        """It has ended."""
        for key in self._requests.pop(request, _Request()).keys:
            known = self._keys[key]
            known.requests.discard(request)
            if not known.requests:
                del self._keys[key]

    def _read(self) -> None:
        """Take the answers that are there. What comes after the first key that is missing is asked for again where it is wanted."""
        self._read_this_step = True
        waiting = []
        for keys, look in self._looks:
            found = look.poll(0.0)
            if found is None:
                waiting.append((keys, look))
                continue
            for key, tier in zip(keys, [*found.tiers[: found.run], MISS], strict=False):
                if (known := self._keys.get(key)) is not None and known.tier is None:
                    known.tier = tier
            for key in keys[found.run + 1 :]:
                if (known := self._keys.get(key)) is not None:
                    known.asked = False
        self._looks = waiting
