"""`--reap`: delete dead heads and dangling names that nobody touched for a week. Off by default: this rests on clocks.

A dead head is final, and a swap of it fails once it is gone; only a *creating* PUT that was sent long ago and arrives after the
deletion could bring it back to life. Stores refuse requests signed more than 15 minutes ago, so a week is ample.

A name is judged right before it is deleted, and still somebody may claim it in between, over the value that was judged: their
session would live, and be unreachable by its name until it expires. Whoever reuses names that dangled for a week does not reap.
"""

from __future__ import annotations

from typing import Final

from kvstore.api import Doomed
from kvstore.errors import Corrupt
from kvstore.lifecycle.dryrun import DryRun
from kvstore.lifecycle.sweep import delete
from kvstore.objects.base import ObjectMeta
from kvstore.repo import Repo

REAP_S: Final = 7 * 86400.0


class Reaper:
    """Deletes what is long dead.

    Args:
        repo: Where.
        now: Store-clock seconds.
        dry_run: Told instead of deleting.
    """

    def __init__(self, repo: Repo, now: float, dry_run: DryRun | None) -> None:
        self._repo, self._before, self._dry_run = repo, now - REAP_S, dry_run
        self.deleted = self.failed = 0

    def old(self, meta: ObjectMeta) -> bool:
        """Whether it has not changed for a week, by the store's clock."""
        return meta.modified <= self._before

    async def head(self, meta: ObjectMeta) -> None:
        """Delete a head that was read and is dead."""
        await self._delete(meta, Doomed(kind="head", key=meta.key, gen=0, size=meta.size, reason="dead"))

    async def name(self, meta: ObjectMeta) -> None:
        """Delete a name if it dangles."""
        keys = self._repo.root.keys
        if not self.old(meta) or keys.parse_name(meta.key) is None:
            return
        try:
            held = await self._repo.finder.names.read(meta.key)
        except Corrupt:
            return  # `fsck` names it
        if held is None or held.etag != meta.etag:
            return
        tenant = meta.key.removeprefix(keys.root).split("/")[1]
        position = await self._repo.heads.read(keys.heads() + f"{tenant}/{held.name.family}")
        if position is None or held.name.branch not in position.head.branches:
            await self._delete(meta, Doomed(kind="name", key=meta.key, gen=0, size=meta.size, reason="dangling"))

    async def _delete(self, meta: ObjectMeta, doomed: Doomed) -> None:
        if self._dry_run is not None:
            self._dry_run.tell(doomed)
            return
        left = await delete(self._repo.root, [meta.key])
        self.failed += len(left)
        self.deleted += 1 - len(left)
