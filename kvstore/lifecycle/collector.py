"""Garbage collection that cannot take what somebody is about to name: it seals every head it reads (R4, docs/ordering.md)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Final, TypeAlias

import msgspec

from kvstore import api
from kvstore.config import LifecycleSettings
from kvstore.errors import Unavailable
from kvstore.ids import NamespaceId
from kvstore.lifecycle.capacity import Candidate, LeastWorth, last_used, standing, worth
from kvstore.lifecycle.dryrun import DryRun, Report
from kvstore.lifecycle.hints import CollectHint, UsageHint, read_hint, write_hint
from kvstore.lifecycle.kept import Kept
from kvstore.lifecycle.marking import Marking, Outline
from kvstore.lifecycle.reaping import Reaper
from kvstore.lifecycle.sweep import YOUNG, Bookmark, Sweep, Swept
from kvstore.lifecycle.usage import UsageCount
from kvstore.model import Branch, Head, dump, parse
from kvstore.objects.base import ObjectMeta
from kvstore.repo import Repo
from kvstore.repo.heads import Position, expired, swapped
from kvstore.repo.marks import Marks
from kvstore.repo.together import together

_SWAPS: Final = 64  # attempts to seal one head that others keep opening
_HEADS_KEPT: Final = 24 << 20  # about 15,000 heads
_UNKNOWN_LAYERS: Final = 32  # of a namespace that nobody registered


class CollectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a collector behaves.

    Attributes:
        max_bytes: Of live blocks; above it the least useful sessions are dropped. 0: no limit.
        max_skew_s: Seconds by which this host's clock may differ from the store's; None: whatever. Safety does not rest on it: a
            host that is so far off is misconfigured, and nothing destructive should be done from there.
    """

    max_bytes: int = 0
    max_skew_s: float | None = 300.0

    @classmethod
    def of(cls, lifecycle: LifecycleSettings) -> CollectSettings:
        """As a node is told."""
        return cls(max_bytes=int(lifecycle.max_bytes), max_skew_s=float(lifecycle.max_skew) or None)


class Progress(msgspec.Struct, kw_only=True):
    """How far a collection has come.

    Attributes:
        phase: What it does now.
        listed: Objects seen.
        deleted: Objects deleted.
        freed: Bytes of those.
    """

    phase: str = "heads"
    heads: int = 0
    listed: int = 0
    deleted: int = 0
    freed: int = 0


class KnownHead(msgspec.Struct, frozen=True):
    """A sealed head as it was read, encoded, without what only swaps need."""

    etag: str
    body: bytes


Page: TypeAlias = Sequence[ObjectMeta]
Watch: TypeAlias = Callable[[Progress], None]


async def collect(repo: Repo, *, dry_run: bool = False, now: bool = False, max_skew_s: float | None = 300.0) -> api.Collected:
    """One collection, by a collector that remembers nothing. See :class:`Collector`."""
    return await Collector(repo, CollectSettings(max_skew_s=max_skew_s)).run(api.Collect(dry_run=dry_run, now=now))


class Collector:
    """Expires sessions, then deletes manifests and blocks that nothing names and that are two epochs old. Any number may run.

    It holds 8 bytes for each live block, and otherwise constants, however large the bucket is. What it has read is remembered for
    its next run, so that an idle head costs nothing but its line in the listing. A run that stops anywhere is simply started again.

    Args:
        repo: Where.
        settings: How.
    """

    def __init__(self, repo: Repo, settings: CollectSettings | None = None) -> None:
        self._repo, self._settings = repo, settings or CollectSettings()
        self._marking = Marking(repo)
        self._heads: Kept[KnownHead] = Kept(_HEADS_KEPT)

    async def fresh(self, within_s: float) -> bool:
        """Whether a collection, this one or another node's, ended less than so many seconds ago."""
        root = self._repo.root
        hint = await read_hint(root, root.keys.collect_hint, CollectHint)
        return hint is not None and hint.collected is not None and 0 <= await root.now() - hint.at < within_s

    async def run(self, request: api.Collect, *, report: Report | None = None, watch: Watch | None = None) -> api.Collected:
        """Collect once. One run at a time.

        Args:
            request: What to do.
            report: In a dry run, told of each thing that would go, as it is found.
            watch: Told of progress, page by page.

        Raises:
            Corrupt: A head or manifest cannot be read, or a head names a manifest that is absent: nothing was deleted.
            Unsupported: Something was written by a newer kvtier: nothing was deleted.
            Unavailable: The store does not answer, or a head could not be sealed. Deletions may have begun; the next run goes on.
                `clock_skew`: this host's clock is off: nothing was done.
        """
        done = await _Collection(self._repo, self._settings, self._marking, self._heads, request, report, watch).run()
        self._heads.turn()
        self._marking.turn()
        return done


class _Collection:
    """One run."""

    def __init__(
        self,
        repo: Repo,
        settings: CollectSettings,
        marking: Marking,
        known: Kept[KnownHead],
        request: api.Collect,
        report: Report | None,
        watch: Watch | None,
    ) -> None:
        self._repo, self._root, self._keys = repo, repo.root, repo.root.keys
        self._settings, self._request, self._marking, self._known, self._watch = settings, request, marking, known, watch
        self._marks = Marks(marking.seed)
        self._dry_run = DryRun(self._keys, marking.seed, report) if request.dry_run else None
        self._cheapest = LeastWorth()
        self._progress = Progress()
        self._epoch = 0
        self._clock = 0.0
        self._sealed = self._expired = 0

    async def run(self) -> api.Collected:
        self._clock = await self._checked_clock()
        self._epoch = await self._advanced()
        reaper = Reaper(self._root, self._clock, self._dry_run)
        await self._heads(reaper)
        sweep = Sweep(self._root, self._marks, self._epoch, self._dry_run)
        manifests, blocks = Swept(), Swept()
        async for page in self._pages("manifests", self._keys.manifests(), manifests):
            await sweep.manifests(page, manifests)
        usage = await self._blocks(sweep, blocks)
        done = api.Collected(
            epoch=self._epoch,
            heads=self._progress.heads,
            sealed=self._sealed,
            expired=self._expired,
            manifests_kept=manifests.kept,
            manifests_deleted=manifests.deleted,
            blocks_kept=blocks.kept,
            blocks_deleted=blocks.deleted,
            bytes_deleted=blocks.freed,
            failed=manifests.failed + blocks.failed + reaper.failed,
            dry_run=self._request.dry_run,
            evicted=await self._evict(usage.total),
            reaped=reaper.deleted,
            live_bytes=usage.total,
            usage=await usage.by_tenant(self._root),
            reasons=dict(self._dry_run.reasons) if self._dry_run is not None else {},
            examples=self._dry_run.examples if self._dry_run is not None else [],
        )
        if self._dry_run is None:
            at = await self._root.now()
            await write_hint(self._root, self._keys.usage_hint, UsageHint(at=at, usage=done.usage))
            await write_hint(self._root, self._keys.collect_hint, CollectHint(at=at, epoch=self._epoch, collected=done))
        return done

    async def _checked_clock(self) -> float:
        """The store's clock, where this host's agrees with it."""
        now = await self._root.store.now()
        ahead, limit = self._root.clock.now() - now, self._settings.max_skew_s
        if limit is not None and abs(ahead) > limit and self._dry_run is None:
            raise Unavailable(
                f"this host's clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the store's, and a collection"
                f" allows {limit:.0f} s: nothing was collected",
                kind="clock_skew",
            )
        return now

    async def _advanced(self) -> int:
        """Step 1: the epoch this collection goes by."""
        reading = await self._repo.epochs.read()
        due = self._clock - reading.modified > self._repo.settings.period
        steps = 2 if self._request.now else int(due)
        if self._dry_run is not None:
            return reading.epoch + steps
        for _ in range(steps):
            reading = await self._repo.epochs.advance(reading)
        return reading.epoch

    async def _pages(self, phase: str, prefix: str, swept: Swept | None = None, *, after: str = "") -> AsyncIterator[Page]:
        """A listing; progress is told after each page."""
        deleted, freed = self._progress.deleted, self._progress.freed
        self._progress.phase = phase
        async for page in self._root.store.list(prefix, start_after=after):
            yield page
            self._progress.listed += len(page)
            if swept is not None and self._dry_run is None:
                self._progress.deleted, self._progress.freed = deleted + swept.deleted, freed + swept.freed
            if self._watch is not None:
                self._watch(self._progress)

    # --- steps 2 and 3: heads ---

    async def _heads(self, reaper: Reaper) -> None:
        """Seal every head, and mark what it names. A head's names are marked after its own seal; nothing is deleted before all are.

        Marking one head while others are not sealed yet changes nothing: after its seal a head gains only what is too young for us.
        """

        async def one(meta: ObjectMeta) -> None:
            head = await self._seal(meta)
            if head is None:
                return
            if head.dead:
                dead.append(meta)
                return
            self._progress.heads += 1
            if self._dry_run is not None and head.branches:
                self._dry_run.lives(meta.key)
            named = await self._marking.mark(meta.key, head, self._marks)
            if self._settings.max_bytes:
                await self._weigh(meta.key, head, named)

        dead: list[ObjectMeta] = []
        async for page in self._pages("heads", self._keys.heads()):
            await together(one, [meta for meta in page if self._keys.parse_head(meta.key) is not None])
            if self._request.reap:
                await reaper.heads(dead)
            dead.clear()

    async def _seal(self, meta: ObjectMeta) -> Head | None:
        """This head, sealed after the epoch was read, without its expired branches. None where it is gone, or ended just now.

        A listing's ETag says what a head held when it was listed, so that an idle one costs nothing more.
        """
        known = self._known.get(meta.key)
        if known is not None and known.etag == meta.etag:
            head = parse(known.body, Head, meta.key)
            if self._at_rest(head):
                return head
        position = self._repo.heads.known(meta.key, meta.etag) or await self._repo.heads.read(meta.key)
        for attempt in range(_SWAPS):
            if position is None or (position.head.dead and position.etag != meta.etag):
                return None
            head = position.head
            if self._at_rest(head):
                self._remember(meta.key, position)
                return head
            over = {name: branch for name, branch in head.branches.items() if expired(branch, self._clock)}
            idle = self._idle(head)
            after = swapped(
                head,
                self._root.ids.new(),
                branches=dict.fromkeys(over),
                open=False,
                dead=idle,
                sealed_at=self._epoch if head.open else head.sealed_at,
            )
            landed = None
            if self._dry_run is not None:
                await self._tell_expired(meta.key, head, over)
            else:
                landed = await self._repo.heads.swap(meta.key, position, after)
            if landed is not None:
                self._remember(meta.key, landed)
            if landed is not None or self._dry_run is not None:
                self._sealed += head.open
                self._expired += len(over)
                return None if idle else after
            await self._root.pause(min(attempt, 6))
            position = await self._repo.heads.read(meta.key)
        raise Unavailable(f"{meta.key} could not be sealed in {_SWAPS} attempts: others write to it all the time")

    def _idle(self, head: Head) -> bool:
        return not head.open and not head.branches and head.sealed_at <= self._epoch - YOUNG

    def _at_rest(self, head: Head) -> bool:
        """Whether there is nothing to swap."""
        if head.dead:
            return True
        return not head.open and not self._idle(head) and not any(expired(b, self._clock) for b in head.branches.values())

    def _remember(self, key: str, position: Position) -> None:
        body = dump(msgspec.structs.replace(position.head, recent=()), key)  # never swapped again: it is only looked at
        self._known.put(key, KnownHead(position.etag, body), 300 + len(key) + len(body))

    async def _tell_expired(self, key: str, head: Head, over: Mapping[str, Branch]) -> None:
        assert self._dry_run is not None
        named = await self._marking.mark(key, msgspec.structs.replace(head, branches=dict(over)), self._dry_run.of_expired)
        for name, branch in over.items():
            self._dry_run.tell(
                api.Doomed(kind="session", key=key, gen=0, size=_weight(branch, named), reason="expired", branch=name)
            )

    # --- step 4: blocks ---

    async def _blocks(self, sweep: Sweep, swept: Swept) -> UsageCount:
        """Sweep the blocks, from where an earlier collection of this epoch stopped."""
        hint = await read_hint(self._root, self._keys.collect_hint, CollectHint) if self._dry_run is None else None
        after, usage = "", UsageCount(self._keys.blocks)
        if hint is not None and hint.epoch == self._epoch and hint.after.startswith(self._keys.blocks):
            after, usage = hint.after, UsageCount(self._keys.blocks, hint.usage)
        bookmark = Bookmark(self._root, self._epoch, usage)
        async for page in self._pages("blocks", self._keys.blocks, swept, after=after):
            await sweep.blocks(page, swept, usage)
            if self._dry_run is None:
                await bookmark.turn(page[-1].key)
        return usage

    # --- the limit ---

    async def _weigh(self, key: str, head: Head, named: Mapping[str, Outline]) -> None:
        """Consider a head's sessions for eviction."""
        for name, branch in head.branches.items():
            outline = named.get(branch.manifest)
            if branch.pinned or outline is None:
                continue
            fields = await self._root.namespace(NamespaceId(outline.namespace))
            nbytes = outline.weight(branch.n)
            layers = fields.layers if fields is not None else _UNKNOWN_LAYERS
            value = worth(outline.length(branch.n), layers, nbytes, self._clock - last_used(branch))
            self._cheapest.add(value, Candidate(head=key, branch=name, judged=standing(branch), nbytes=nbytes))

    async def _evict(self, live: int) -> int:
        """Drop the least useful sessions, as far as the bucket is over its limit. Returns how many; their bytes go later."""
        limit = self._settings.max_bytes
        if not limit or live <= limit:
            return 0
        chosen = self._cheapest.choose(live - limit)
        return sum(await together(self._drop, list(chosen.items())))

    async def _drop(self, entry: tuple[str, list[Candidate]]) -> int:
        """Swap sessions out of the head as it is now, unless they changed since they were judged (I5)."""
        key, candidates = entry
        if self._dry_run is not None:
            for one in candidates:
                self._dry_run.tell(
                    api.Doomed(kind="session", key=key, gen=0, size=one.nbytes, reason="capacity", branch=one.branch)
                )
            return len(candidates)
        over: list[str] = []
        for attempt in range(_SWAPS):
            position = await self._repo.heads.read(key)
            branches = position.head.branches if position is not None else {}
            gone = sum(name not in branches for name in over)  # by a swap of ours whose answer was lost, or by somebody else's
            over = [one.branch for one in candidates if _unchanged(one, branches.get(one.branch))]
            if position is None or not over:
                return gone
            after = swapped(position.head, self._root.ids.new(), branches=dict.fromkeys(over))
            if await self._repo.heads.swap(key, position, after) is not None:
                return gone + len(over)
            await self._root.pause(min(attempt, 6))
        return 0  # somebody writes to it all the time, so that its sessions are in use


def _unchanged(candidate: Candidate, branch: Branch | None) -> bool:
    return branch is not None and not branch.pinned and standing(branch) == candidate.judged


def _weight(branch: Branch, named: Mapping[str, Outline]) -> int:
    outline = named.get(branch.manifest)
    return outline.weight(branch.n) if outline is not None else 0
