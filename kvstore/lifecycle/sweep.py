"""Step 4 of a collection: go through a listing, and delete what is unmarked and old enough."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from kvstore.lifecycle.dryrun import DryRun
from kvstore.lifecycle.hints import CollectHint, write_hint
from kvstore.lifecycle.usage import UsageCount
from kvstore.objects.base import ObjectMeta
from kvstore.repo.marks import Digests, Marks
from kvstore.repo.root import Root

YOUNG: Final = 2
"""Generations E and E-1 may be about to be named."""
_HINT_EVERY: Final = 64  # pages between two words about where a sweep is: few requests, and little to do again


class Swept(msgspec.Struct):
    """What a sweep did: objects kept, deleted, failed to delete; and bytes of the deleted ones."""

    kept: int = 0
    deleted: int = 0
    failed: int = 0
    freed: int = 0


class Sweep:
    """Deletes, page by page. Keys that are not ours stay.

    Args:
        root: Where.
        marks: Complete (R4).
        epoch: The collection's.
        dry_run: Told instead of deleting.
    """

    def __init__(self, root: Root, marks: Marks, epoch: int, dry_run: DryRun | None) -> None:
        self._root, self._keys, self._marks, self._epoch, self._dry_run = root, root.keys, marks, epoch, dry_run

    async def manifests(self, page: Sequence[ObjectMeta], swept: Swept) -> None:
        """One page of manifests."""
        digests = self._marks.digests((meta.key for meta in page), len(page))
        unmarked = [index for index, marked in enumerate(self._marks.hold(digests).tolist()) if not marked]
        parsed = [(index, self._keys.parse_manifest(page[index].key)) for index in unmarked]
        old = [(index, gen) for index, gen in parsed if gen is not None and gen <= self._epoch - YOUNG]
        if self._dry_run is not None:
            self._dry_run.tell_manifests([(page[index], gen) for index, gen in old], _of(digests, old))
        await self._take(page, [page[index] for index, _ in old], swept)

    async def blocks(self, page: Sequence[ObjectMeta], swept: Swept, usage: UsageCount) -> None:
        """One page of blocks; counts the live ones."""
        digests = self._marks.digests((meta.key for meta in page), len(page))
        live: list[str] = []
        old: list[tuple[int, int]] = []
        for index, marked in enumerate(self._marks.hold(digests).tolist()):
            meta = page[index]
            if marked:
                usage.add(meta.key, meta.size)
                live.append(meta.key)
                continue
            parsed = self._keys.parse_block(meta.key)
            if parsed is not None and parsed.gen <= self._epoch - YOUNG:
                old.append((index, parsed.gen))
        if self._dry_run is not None:
            self._dry_run.tell_blocks([(page[index], gen) for index, gen in old], _of(digests, old), live)
        await self._take(page, [page[index] for index, _ in old], swept)

    async def _take(self, page: Sequence[ObjectMeta], old: Sequence[ObjectMeta], swept: Swept) -> None:
        left = set() if self._dry_run is not None else await delete(self._root, [meta.key for meta in old])
        swept.deleted += len(old) - len(left)
        swept.freed += sum(meta.size for meta in old if meta.key not in left)
        swept.kept += len(page) - len(old) + len(left)
        swept.failed += len(left)


class Bookmark:
    """Where a sweep of blocks is, written down now and then, so that the next one need not begin at the beginning.

    Only within the same epoch, and only a saving: marks are always made anew, and garbage that is passed over goes the next time.
    """

    def __init__(self, root: Root, epoch: int, usage: UsageCount) -> None:
        self._root, self._epoch, self._usage = root, epoch, usage
        self._pages = 0

    async def turn(self, last: str) -> None:
        """A page is done; `last` is its last key."""
        self._pages += 1
        if self._pages % _HINT_EVERY == 0:
            at = await self._root.now()
            await write_hint(
                self._root,
                self._root.keys.collect_hint,
                CollectHint(at=at, epoch=self._epoch, after=last, usage=self._usage.counted()),
            )


async def delete(root: Root, keys: Sequence[str]) -> set[str]:
    """Delete one batch, and once more what failed; returns what is left for the next collection."""
    left = keys
    for _ in range(2):
        if not left:
            break
        left = await root.store.delete(left)
    return set(left)


def _of(digests: Digests, chosen: Sequence[tuple[int, int]]) -> Digests:
    return digests[[index for index, _ in chosen]]
