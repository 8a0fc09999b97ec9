"""Garbage collection that cannot take what somebody is about to name: it seals every head it reads (R4, docs/ordering.md)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvstore.api import Collected
from kvstore.errors import Corrupt, KVTierError, Unavailable
from kvstore.model import Head
from kvstore.objects.base import OVERWRITE, ObjectMeta
from kvstore.repo import Repo
from kvstore.repo.heads import expired, swapped, versions_of
from kvstore.repo.together import together

log = logging.getLogger(__name__)
_SWAPS: Final = 64  # attempts to seal one head that others keep opening
_YOUNG: Final = 2  # generations E and E-1 may be about to be named


async def collect(repo: Repo, *, dry_run: bool = False, now: bool = False) -> Collected:
    """Expire sessions, then delete manifests and blocks that nothing names and that are two epochs old. Any number may run at once.

    Args:
        repo: Where.
        dry_run: Change nothing, and count what would be.
        now: Advance the epoch twice first, so that what is unnamed now goes at once. Otherwise it advances when PERIOD is over.

    Raises:
        Corrupt: A head or manifest cannot be read, or a head names a manifest that is absent: nothing was deleted.
        Unsupported: Something was written by a newer kvtier: nothing was deleted.
        Unavailable: The store does not answer, or a head could not be sealed. Deletions may have begun; the next run goes on.
    """
    return await _Collection(repo, dry_run=dry_run, now=now).run()


class _Collection:
    def __init__(self, repo: Repo, *, dry_run: bool, now: bool) -> None:
        self._repo, self._root, self._keys = repo, repo.root, repo.root.keys
        self._dry_run, self._at_once = dry_run, now
        self._epoch = 0
        self._clock = 0.0
        self._marks: set[str] = set()
        self._sealed = self._expired = self._failed = 0

    async def run(self) -> Collected:
        self._epoch = await self._advanced()
        self._clock = await self._root.store.now()
        heads: dict[str, Head] = {}
        async for page in self._root.store.list(self._keys.heads()):
            ours = [meta for meta in page if self._keys.parse_head(meta.key) is not None]
            for meta, head in zip(ours, await together(self._seal, ours), strict=True):
                if head is not None and not head.dead:
                    heads[meta.key] = head
        await together(self._mark, list(heads.items()))
        manifests = await self._sweep(self._keys.manifests(), self._keys.parse_manifest)
        blocks = await self._sweep(self._keys.blocks, self._block_gen)
        done = Collected(
            epoch=self._epoch,
            heads=len(heads),
            sealed=self._sealed,
            expired=self._expired,
            manifests_kept=manifests.kept,
            manifests_deleted=manifests.deleted,
            blocks_kept=blocks.kept,
            blocks_deleted=blocks.deleted,
            bytes_deleted=blocks.freed,
            failed=self._failed,
            dry_run=self._dry_run,
        )
        if not self._dry_run:
            hint = msgspec.json.encode({"v": 1, "at": self._clock, "collected": done})
            with contextlib.suppress(KVTierError):  # advisory: nothing rests on it
                await self._root.put(self._keys.collect_hint, hint, OVERWRITE)
        return done

    async def _advanced(self) -> int:
        """Step 1: the epoch this collection goes by."""
        reading = await self._repo.epochs.read()
        due = await self._root.store.now() - reading.modified > self._repo.settings.period
        steps = 2 if self._at_once else int(due)
        if self._dry_run:
            return reading.epoch + steps
        for _ in range(steps):
            reading = await self._repo.epochs.advance(reading)
        return reading.epoch

    async def _seal(self, meta: ObjectMeta) -> Head | None:
        """Step 2: this head, sealed after the epoch was read, without its expired branches. None where it is gone.

        A listing's ETag says what a head held when it was listed, so that an idle one costs nothing more.
        """
        position = self._repo.heads.known(meta.key, meta.etag) or await self._repo.heads.read(meta.key)
        for attempt in range(_SWAPS):
            if position is None or position.head.dead:
                return None
            head = position.head
            over = [name for name, branch in head.branches.items() if expired(branch, self._clock)]
            idle = not head.open and not head.branches and head.sealed_at <= self._epoch - _YOUNG
            if not head.open and not over and not idle:
                return head
            after = swapped(
                head,
                self._root.ids.new(),
                branches=dict.fromkeys(over),
                open=False,
                dead=idle,
                sealed_at=self._epoch if head.open else head.sealed_at,
            )
            landed = position if self._dry_run else await self._repo.heads.swap(meta.key, position, after)
            if landed is not None:
                self._sealed += head.open
                self._expired += len(over)
                return after
            await self._root.pause(min(attempt, 6))
            position = await self._repo.heads.read(meta.key)
        raise Unavailable(f"{meta.key} could not be sealed in {_SWAPS} attempts: others write to it all the time")

    async def _mark(self, entry: tuple[str, Head]) -> None:
        """Step 3: everything a head names, history included. What is absent is looked for in the head as it is now (R5)."""
        key, head = entry
        while absent := await self._mark_named(key, head):
            position = await self._repo.heads.read(key)
            if position is None:
                return
            head = position.head
            still = absent & {version.manifest for branch in head.branches.values() for version in versions_of(branch)}
            if still:
                raise Corrupt(f"{key} names manifest {min(still)}, which is absent: nothing was collected; run `kvtier fsck`")

    async def _mark_named(self, key: str, head: Head) -> set[str]:
        """Mark what a head names; returns the manifests that are absent."""
        tenant, family = self._keys.parse_head(key) or ("", "")
        longest: dict[str, int] = {}
        for branch in head.branches.values():
            for version in versions_of(branch):
                if version.manifest:
                    longest[version.manifest] = max(version.n, longest.get(version.manifest, 0))
        absent = set()
        for name, n in longest.items():
            manifest_key = self._keys.manifest_of(tenant, family, name)
            self._marks.add(manifest_key)
            manifest = await self._repo.manifests.get(manifest_key)
            if manifest is None:
                absent.add(name)
                continue
            for block in manifest.blocks[:n]:
                for copy in block.copies:
                    self._marks.add(self._keys.block(manifest.namespace, manifest.shards[copy.shard], block.prefix_id, copy.gen))
        return absent

    async def _sweep(self, prefix: str, gen_of: Callable[[str], int | None]) -> _Swept:
        """Step 4: delete what is unmarked and old enough, page by page. Keys that are not ours stay."""
        swept = _Swept()
        async for page in self._root.store.list(prefix):
            old = [meta for meta in page if self._is_garbage(meta.key, gen_of(meta.key))]
            left = await self._delete(old)
            gone = [meta for meta in old if meta.key not in left]
            swept.deleted += len(gone)
            swept.freed += sum(meta.size for meta in gone)
            swept.kept += len(page) - len(gone)
            self._failed += len(left)
        return swept

    def _is_garbage(self, key: str, gen: int | None) -> bool:
        return gen is not None and gen <= self._epoch - _YOUNG and key not in self._marks

    def _block_gen(self, key: str) -> int | None:
        parsed = self._keys.parse_block(key)
        return None if parsed is None else parsed.gen

    async def _delete(self, metas: Sequence[ObjectMeta]) -> set[str]:
        """Delete one batch, and once more what failed; returns what is left for the next collection."""
        left: Sequence[str] = [meta.key for meta in metas]
        if not left or self._dry_run:
            return set()
        for _ in range(2):
            left = await self._root.store.delete(left)
            if not left:
                break
        return set(left)


class _Swept(msgspec.Struct):
    kept: int = 0
    deleted: int = 0
    freed: int = 0
