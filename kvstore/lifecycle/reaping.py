"""`--reap`: delete heads that were dead for a week (R11). Off by default: it is the one thing that rests on a clock.

A dead head is final, and its creating PUT was sent once, before it existed (R7). A copy of that PUT would bring it back to life if
it arrived after the deletion; stores refuse requests that were signed more than 15 minutes ago, so a week is ample. The DELETE
itself may then be as late as it likes.

Names are never deleted: a session may claim a dangling one at any time, and no DELETE can be told to respect that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.api import Doomed
from kvstore.lifecycle.dryrun import DryRun
from kvstore.lifecycle.sweep import delete
from kvstore.objects.base import ObjectMeta
from kvstore.repo.root import Root

REAP_S: Final = 7 * 86400.0


class Reaper:
    """Deletes heads that are long dead.

    Args:
        root: Where.
        now: Store-clock seconds.
        dry_run: Told instead of deleting.
    """

    def __init__(self, root: Root, now: float, dry_run: DryRun | None) -> None:
        self._root, self._before, self._dry_run = root, now - REAP_S, dry_run
        self.deleted = self.failed = 0

    async def heads(self, dead: Sequence[ObjectMeta]) -> None:
        """Of dead heads, each in the very version that was listed, delete those a week old by the store's clock; up to a page."""
        old = [meta for meta in dead if meta.modified <= self._before]
        if self._dry_run is not None:
            for meta in old:
                self._dry_run.tell(Doomed(kind="head", key=meta.key, gen=0, size=meta.size, reason="dead"))
        elif old:
            left = await delete(self._root, [meta.key for meta in old])
            self.failed += len(left)
            self.deleted += len(old) - len(left)
