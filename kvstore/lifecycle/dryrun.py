"""What a collection would delete, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

from kvstore.api import Doomed
from kvstore.keys import Keys
from kvstore.objects.base import ObjectMeta
from kvstore.repo.marks import Digests, Marks

Report = Callable[[Doomed], None]
Reason = Literal["expired", "superseded", "orphan", "unnamed"]
EXAMPLES: Final = 100


class DryRun:
    """Tells of each thing as it is found; keeps counts, the first few, and digests of what it takes to name reasons.

    Args:
        keys: How objects are named.
        seed: Of the digests.
        report: Who is told.
    """

    def __init__(self, keys: Keys, seed: int, report: Report | None) -> None:
        self._keys, self._report = keys, report
        self.of_expired = Marks(seed)
        self._families = Marks(seed)
        self.reasons: Counter[str] = Counter()
        self.examples: list[Doomed] = []

    def lives(self, head_key: str) -> None:
        """This family stays."""
        self._families.add_key(head_key)

    def tell(self, doomed: Doomed) -> None:
        """It would go."""
        self.reasons[doomed.reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append(doomed)
        if self._report is not None:
            self._report(doomed)

    def tell_manifests(self, garbage: Sequence[tuple[ObjectMeta, int]], digests: Digests) -> None:
        """These would go; each with its generation."""
        families = (self._keys.heads() + meta.key.removeprefix(self._keys.manifests()).rpartition("/")[0] for meta, _ in garbage)
        lives = self._families.hold(self._families.digests(families, len(garbage)))
        for (meta, gen), of_expired, living in zip(garbage, self.of_expired.hold(digests), lives, strict=True):
            reason: Reason = "expired" if of_expired else "superseded" if living else "orphan"
            self.tell(Doomed(kind="manifest", key=meta.key, gen=gen, size=meta.size, reason=reason))

    def tell_blocks(self, garbage: Sequence[tuple[ObjectMeta, int]], digests: Digests, live: Iterable[str]) -> None:
        """These would go. `live` are the named keys beside them: generations of one block stand next to each other in a listing."""
        named = {key.rpartition("/")[0] for key in live}
        for (meta, gen), of_expired in zip(garbage, self.of_expired.hold(digests), strict=True):
            superseded = meta.key.rpartition("/")[0] in named
            reason: Reason = "expired" if of_expired else "superseded" if superseded else "unnamed"
            self.tell(Doomed(kind="block", key=meta.key, gen=gen, size=meta.size, reason=reason))
