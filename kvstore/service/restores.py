"""Restores: bring a session's blocks into a tier, answering at once and reporting progress.

A restore takes exactly the path of a request (`Stack.get_many`), only earlier. It is never needed for correctness.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

import msgspec

from kvstore import api
from kvstore.clock import Clock, Ids
from kvstore.errors import KVTierError, NotFound, Overloaded
from kvstore.ids import Link, Namespace, Shard, chain
from kvstore.model import BlockRef, Manifest
from kvstore.service.plane import Plane, block_wants
from tiering import Lease, Miss, Want

log = logging.getLogger(__name__)
STEP: Final = 64  # blocks asked at once: enough to fill the link, few enough to report progress


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A session's version, found: its manifest cut to the blocks that belong to it."""

    session: api.Session
    manifest: Manifest
    namespace: Namespace


Resolve = Callable[[str, api.Restore], Awaitable[Resolved]]


class Restoring:
    """One restore: its status, who watches it, the task that works."""

    def __init__(self, status: api.RestoreStatus, tenant: str, request: api.Restore, started: float) -> None:
        self.status, self.tenant, self.request, self.started = status, tenant, request, started
        self.task: asyncio.Task[None] | None = None
        self.changed = asyncio.Event()

    @property
    def over(self) -> bool:
        """Whether it came to an end."""
        return self.status.state not in {"resolving", "staging"}


class Restores:
    """All restores that run or are remembered.

    Args:
        resolve: Finds a session's version; it waits for commits of that session that this node still has to land.
        plane: The tiers.
        limit: Restores remembered; running ones beyond it are refused.
        longest: Seconds a restore works when it names no deadline.
    """

    def __init__(self, resolve: Resolve, plane: Plane, clock: Clock, ids: Ids, *, node: str, limit: int, longest: float) -> None:
        self._resolve, self._plane, self._clock, self._ids = resolve, plane, clock, ids
        self._node, self._limit, self._longest = node, limit, longest
        self._all: OrderedDict[str, Restoring] = OrderedDict()
        self._active: dict[tuple[str, bytes], Restoring] = {}
        self.outcomes: Counter[str] = Counter()

    @property
    def running(self) -> int:
        """Restores at work."""
        return len(self._active)

    def start(self, tenant: str, request: api.Restore) -> api.RestoreStatus:
        """Begin, or join the same restore where it is under way. Does no I/O."""
        key = (tenant, msgspec.msgpack.encode(request))
        same = self._active.get(key)
        if same is not None:
            return self._timed(same)
        self._forget()
        restore_id = self._ids.new()
        status = api.RestoreStatus(restore_id=restore_id, id=request.id, state="resolving", node=self._node, tier=request.tier)
        restore = Restoring(status, tenant, request, self._clock.monotonic())
        self._all[restore_id] = self._active[key] = restore
        restore.task = asyncio.create_task(self._work(restore))
        restore.task.add_done_callback(lambda _: self._active.pop(key, None))
        return status

    def _forget(self) -> None:
        while len(self._all) >= self._limit:
            old = next((key for key, restore in self._all.items() if restore.over), None)
            if old is None:
                raise Overloaded(f"{len(self._all)} restores are running; limits.restores allows {self._limit}")
            del self._all[old]

    def _find(self, tenant: str, restore_id: str) -> Restoring:
        restore = self._all.get(restore_id)
        if restore is None or restore.tenant != tenant:
            raise NotFound(f"restore {restore_id!r} is not known to this node; restores are forgotten some time after they end")
        return restore

    def status(self, tenant: str, restore_id: str) -> api.RestoreStatus:
        """How far it has come. Raises `NotFound`."""
        return self._timed(self._find(tenant, restore_id))

    async def wait(self, tenant: str, restore_id: str, seconds: float) -> api.RestoreStatus:
        """Its status when it ends, or after that long. Raises `NotFound`."""
        restore = self._find(tenant, restore_id)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not restore.over:
                    await restore.changed.wait()
        return self._timed(restore)

    async def watch(self, tenant: str, restore_id: str) -> AsyncIterator[api.RestoreStatus]:
        """Every change of its status, the last one included. Raises `NotFound`."""
        restore = self._find(tenant, restore_id)
        while True:
            changed = restore.changed
            yield self._timed(restore)
            if restore.over:
                return
            await changed.wait()

    async def cancel(self, tenant: str, restore_id: str) -> api.RestoreStatus:
        """Stop it; what is staged stays. Stopping one that ended changes nothing."""
        restore = self._find(tenant, restore_id)
        if restore.task is not None and not restore.over:
            restore.task.cancel()
            await asyncio.gather(restore.task, return_exceptions=True)
            if not restore.over:  # cancelled before its first step
                self._set(restore, state="cancelled")
        return self._timed(restore)

    async def aclose(self) -> None:
        """Stop them all."""
        tasks = [restore.task for restore in self._all.values() if restore.task is not None and not restore.over]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _timed(self, restore: Restoring) -> api.RestoreStatus:
        if restore.over:
            return restore.status
        return msgspec.structs.replace(restore.status, elapsed_ms=(self._clock.monotonic() - restore.started) * 1000)

    def _set(self, restore: Restoring, **changes: object) -> None:
        elapsed = (self._clock.monotonic() - restore.started) * 1000
        restore.status = msgspec.structs.replace(restore.status, elapsed_ms=elapsed, **changes)
        if restore.over:
            self.outcomes[restore.status.state] += 1
        changed, restore.changed = restore.changed, asyncio.Event()
        changed.set()

    async def _work(self, restore: Restoring) -> None:
        request = restore.request
        deadline = restore.started + (request.deadline_ms / 1000 or self._longest)
        try:
            async with asyncio.timeout(deadline - self._clock.monotonic()):
                found = await self._resolve(restore.tenant, request)
            await self._stage(restore, found, deadline)
        except asyncio.CancelledError:
            self._set(restore, state="cancelled")
            raise
        except TimeoutError:
            self._set(restore, state="partial", error="the deadline passed before the session was found")
        except KVTierError as error:
            self._set(restore, state="failed", error=error.message)
        except Exception:  # the task's last line of defence: a restore that dies silently would be waited for for ever
            log.exception("restore %s failed", restore.status.restore_id)
            self._set(restore, state="failed", error="internal error; the node's log has the details")

    async def _stage(self, restore: Restoring, found: Resolved, deadline: float) -> None:
        blocks = wanted_blocks(found, restore.request.tokens)
        links = [Link(block.prefix_id, block.tokens) for block in blocks]
        shards = restore.request.shards or found.manifest.shards
        columns = []
        for text in shards:
            index = found.manifest.shards.index(text) if text in found.manifest.shards else -1
            copies = {block.prefix_id: copy for block in blocks for copy in block.copies if copy.shard == index}
            columns.append(block_wants(found.namespace, Shard.parse(text), links, copies))
        rows = list(zip(*columns, strict=True))  # a block is staged when all its shards are
        self._set(
            restore,
            state="staging",
            namespace=found.session.namespace,
            lane=found.session.lane,
            version=found.session.version,
            tokens=sum(link.tokens for link in links),
            bytes=sum(want.size for row in rows for want in row),
        )
        if restore.request.tier == "bucket":
            self._set(restore, state="ready", eta_ms=0.0)
            return
        miss = await self._fill(restore, links, rows, deadline)
        self._set(restore, state="partial" if miss else "ready", eta_ms=0.0, error=miss)

    async def _fill(self, restore: Restoring, links: Sequence[Link], rows: Sequence[Sequence[Want]], deadline: float) -> str:
        """Bring the rows in, in prefix order. Returns why it stopped early, or ""."""
        stack = self._plane.tiers(restore.tenant).stack
        held: list[Lease] = []  # until the end, so that the restore never evicts its own beginning
        begun = self._clock.monotonic()
        try:
            for first in range(0, len(rows), STEP):
                step = rows[first : first + STEP]
                wants = [want for row in step for want in row]
                answers = await stack.get_many(wants, deadline=deadline)
                came = [answer for answer in answers if isinstance(answer, Lease)]
                held += came
                whole, miss = _whole_rows(step, answers)
                if restore.request.tier == "nvme" and whole:
                    kept = await stack.flush([want for row in step[:whole] for want in row], deadline=deadline)
                    if not all(kept):
                        return "the disk tier did not take every block"
                self._progress(restore, links[first : first + whole], came[: whole * len(step[0])], begun)
                if miss:
                    return f"block {first + whole} of {len(rows)}: {miss}"
        finally:
            for lease in held:
                lease.release()
        return ""

    def _progress(self, restore: Restoring, links: Sequence[Link], leases: Sequence[Lease], begun: float) -> None:
        status = restore.status
        by_tier = Counter(status.by_tier)
        for lease in leases:
            by_tier[lease.source] += lease.size
        staged = status.staged_bytes + sum(lease.size for lease in leases)
        rate = staged / max(1e-9, self._clock.monotonic() - begun)
        self._set(
            restore,
            staged_tokens=status.staged_tokens + sum(link.tokens for link in links),
            staged_bytes=staged,
            by_tier=dict(by_tier),
            eta_ms=((status.bytes or 0) - staged) / rate * 1000 if rate else None,
        )


def _whole_rows(rows: Sequence[Sequence[Want]], answers: Sequence[Lease | Miss]) -> tuple[int, str]:
    """How many leading rows are complete, and why the next one is not."""
    width = len(rows[0]) if rows else 1
    for index, answer in enumerate(answers):
        if isinstance(answer, Miss):
            return index // width, answer.value
    return len(rows), ""


def wanted_blocks(found: Resolved, tokens: Sequence[int]) -> Sequence[BlockRef]:
    """The blocks to bring: all of the version's, or the leading ones that `tokens` spells."""
    blocks = found.manifest.blocks
    if not tokens:
        return blocks
    named = chain(found.namespace, tokens, partial=True)
    run = 0
    for block, link in zip(blocks, named, strict=False):
        if block.prefix_id != link.prefix_id:
            break
        run += 1
    return blocks[:run]
