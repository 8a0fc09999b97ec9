"""Getting blocks into the bucket at an age that a head may add (R1), with as few bytes and requests as will do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, NamedTuple

from cachetools import LRUCache

from kvstore import codec
from kvstore.codec import Codec
from kvstore.errors import Corrupt
from kvstore.ids import BlockName, Namespace
from kvstore.model import Copy
from kvstore.objects.base import CREATE, OVERWRITE, Absent
from kvstore.objects.gate import ByteGate
from kvstore.repo.chains import Source
from kvstore.repo.choice import CodecChoice
from kvstore.repo.root import FIRST_EPOCH, Root, Run
from kvstore.repo.slices import sliced
from kvstore.repo.together import together
from tiering import Lease

_AT_ONCE: Final = 8
_MOST_PROBES: Final = 64  # in one step of the gallop
_BAD: Final = 1024
_PATIENCE_S: Final = 120.0


class Wanted(NamedTuple):
    """A block to be added to a head.

    Attributes:
        name: Which.
        older: Copies of it that are known to exist whatever their age, newest first, should its bytes be gone from this node.
    """

    name: BlockName
    older: Sequence[Copy] = ()


class Uploads:
    """Puts blocks, remembers where they are, and never does it twice at once.

    Args:
        root: Where to.
        run: Encodes on a thread.
        choice: Picks the codec of each new object.
        inflight: Most bytes being encoded and sent.
        known: Blocks whose newest copy is remembered.
        share: Finds threads that help to encode a block.
    """

    def __init__(
        self, root: Root, run: Run, choice: CodecChoice, *, inflight: int, known: int, share: codec.Share | None = None
    ) -> None:
        self._root, self._run, self._share, self.choice = root, run, share, choice
        self._inflight, self._gate = inflight, ByteGate(inflight, _PATIENCE_S)
        self._known: LRUCache[bytes, Copy] = LRUCache(known)
        self._bad: LRUCache[bytes, frozenset[int]] = LRUCache(_BAD)
        self._under_way: Counter[str] = Counter()  # bytes that wait at the gate or are behind it, by tenant
        self._flights: dict[bytes, asyncio.Future[Copy | None]] = {}
        self.counts: Counter[str] = Counter()

    # --- what is known ---

    def known(self, name: BlockName) -> Copy | None:
        """The newest copy this node has met."""
        return self._known.get(name.tier_key)

    def learn(self, name: BlockName, copy: Copy) -> None:
        """A copy exists."""
        there = self._known.get(name.tier_key)
        if there is None or there.gen <= copy.gen:
            self._known[name.tier_key] = copy

    def forget(self, name: BlockName, gen: int, *, bad: bool = False) -> None:
        """A copy is gone, or is not what it claims: whoever has valid bytes puts them over it."""
        there = self._known.get(name.tier_key)
        if there is not None and there.gen == gen:
            del self._known[name.tier_key]
        if bad:
            self._bad[name.tier_key] = self._bad.get(name.tier_key, frozenset()) | {gen}

    def key(self, name: BlockName, gen: int) -> str:
        """Where a generation of a block is."""
        return self._root.keys.block(name.namespace, str(name.shard), name.prefix_id, gen)

    # --- for commits ---

    async def secure(self, wanted: Sequence[Wanted], namespace: Namespace, epoch: int, source: Source) -> list[Copy | None]:
        """A copy of generation >= epoch - 1 of each block, put there where it is not; None from the first on that cannot be had.

        The leading ones are probed for, in steps that double, until the first miss: a chain rarely resumes.

        Args:
            wanted: In prefix order.
            namespace: Theirs.
            epoch: As R2 has it.
            source: Bytes on this node.
        """
        copies = await sliced(lambda some: [self._fresh(block.name, epoch) for block in some], wanted)
        missing = [index for index, copy in enumerate(copies) if copy is None]
        step = 1
        while missing:
            probed = missing[:step]
            found = await together(lambda index: self._probe(wanted[index].name, namespace, epoch), probed)
            for index, copy in zip(probed, found, strict=True):
                copies[index] = copy
            if None in found:
                break
            missing, step = missing[step:], min(step * 2, _MOST_PROBES)
        end = len(wanted)

        async def store(index: int) -> Copy | None:
            nonlocal end
            if index > end:
                return None  # behind a hole nothing can be used
            block = wanted[index]
            copy = await self._once(block.name, epoch, lambda: self._bring(block, namespace, epoch, source))
            if copy is None:
                end = min(end, index)
            return copy

        rest = [index for index, copy in enumerate(copies) if copy is None]
        for index, copy in zip(rest, await together(store, rest, limit=_AT_ONCE), strict=True):
            copies[index] = copy
        return [copy if index < end else None for index, copy in enumerate(copies)]

    async def offer(self, name: BlockName, namespace: Namespace, epoch: int, value: Lease) -> bool:
        """Keep an anonymous copy. False where too much is in flight already."""
        if self._fresh(name, epoch) is not None:
            return True
        if self._under_way[namespace.tenant] + self._cost(name, namespace, self.choice.current) > self._inflight:
            self.counts["offers_declined"] += 1
            return False

        async def put() -> Copy | None:
            return await self._probe(name, namespace, epoch) or await self._upload(name, namespace, epoch, value.view)

        return await self._once(name, epoch, put) is not None

    async def mend(self, name: BlockName, namespace: Namespace, epoch: int, raw: memoryview) -> Copy:
        """Put valid bytes over every copy that was found bad (Repair), and at `epoch`."""
        return await self._upload(name, namespace, epoch, raw)

    async def probe(self, name: BlockName, namespace: Namespace, epoch: int, likely: int = 0) -> Copy | None:
        """A copy of generation `epoch` or the one before, as known or as HEAD finds it; an older `likely` is looked at first."""
        fresh = self._fresh(name, epoch)
        if fresh is not None or not FIRST_EPOCH <= likely < epoch - 1:
            return fresh or await self._probe(name, namespace, epoch)
        return await self._look(name, namespace, likely) or await self._probe(name, namespace, epoch)

    async def search(self, name: BlockName, namespace: Namespace) -> Copy | None:
        """Its newest copy of any generation, by one listing: good to read, and too old to add to a head (R1)."""
        for copy in await self.generations(name):
            if _plausible(copy.bytes, name, namespace) and not self._is_bad(name, copy.gen):
                self.learn(name, copy)
                return copy
        return None

    async def renew(self, name: BlockName, copy: Copy, epoch: int) -> Copy | None:
        """Copy an older generation to `epoch` inside the store; None where it is gone."""
        if copy.gen >= epoch:  # stores refuse to copy an object onto itself
            return copy
        source = self.key(name, copy.gen)
        target = self.key(name, epoch)
        if not await self._root.store.copy(source, target):
            self.forget(name, copy.gen)
            return None
        self.counts["copied"] += 1
        renewed = Copy(0, epoch, copy.bytes, copy.header_bytes)
        self.learn(name, renewed)
        return renewed

    async def generations(self, name: BlockName) -> list[Copy]:
        """What there is of a block, newest first, by one listing."""
        prefix = self._root.keys.block_gens(name.namespace, str(name.shard), name.prefix_id)
        found: list[Copy] = []
        async for page in self._root.store.list(prefix):
            for meta in page:
                key = self._root.keys.parse_block(meta.key)
                if key is not None:
                    found.append(Copy(0, key.gen, meta.size, 0))
            break  # two or three generations at most; more than a page would be somebody's joke
        return sorted(found, key=lambda copy: -copy.gen)

    # --- inside ---

    def _fresh(self, name: BlockName, epoch: int) -> Copy | None:
        copy = self._known.get(name.tier_key)
        return copy if copy is not None and copy.gen >= epoch - 1 and not self._is_bad(name, copy.gen) else None

    def _is_bad(self, name: BlockName, gen: int) -> bool:
        return gen in self._bad.get(name.tier_key, ())

    def _cost(self, name: BlockName, namespace: Namespace, coding: Codec) -> int:
        plan = codec.layout(namespace, name.shard, name.tokens)
        return plan.raw_bytes if coding == "raw" else 2 * plan.stored_limit

    async def _once(self, name: BlockName, epoch: int, work: Callable[[], Awaitable[Copy | None]]) -> Copy | None:
        """Run `work` in the caller's own task, unless somebody is at this block: then wait for what comes of it.

        In the caller's task, because a cancelled caller must find its buffers free when it is over.
        """
        key = name.tier_key
        while (running := self._flights.get(key)) is not None:
            await asyncio.shield(running)
            copy = self._fresh(name, epoch)
            if copy is not None:
                return copy
        flight: asyncio.Future[Copy | None] = asyncio.get_running_loop().create_future()
        self._flights[key] = flight
        try:
            return await work()
        finally:
            del self._flights[key]
            flight.set_result(None)

    async def _probe(self, name: BlockName, namespace: Namespace, epoch: int) -> Copy | None:
        for gen in range(epoch, max(FIRST_EPOCH, epoch - 1) - 1, -1):
            copy = await self._look(name, namespace, gen)
            if copy is not None:
                return copy
        return None

    async def _look(self, name: BlockName, namespace: Namespace, gen: int) -> Copy | None:
        """One generation, by HEAD."""
        if self._is_bad(name, gen):
            return None
        self.counts["probes"] += 1
        meta = await self._root.store.head(self.key(name, gen))
        if isinstance(meta, Absent) or not _plausible(meta.size, name, namespace):
            return None
        copy = Copy(0, gen, meta.size, 0)
        self.learn(name, copy)
        return copy

    async def _bring(self, block: Wanted, namespace: Namespace, epoch: int, source: Source) -> Copy | None:
        name, known = block.name, self._known.get(block.name.tier_key)
        fresh = self._fresh(name, epoch)  # another of this node's uploads may have ended since it was wanted
        if fresh is not None:
            return fresh
        if known is not None and not self._is_bad(name, known.gen):
            copy = await self.renew(name, known, epoch)  # cheaper than sending the bytes again
            if copy is not None:
                return copy
        lease = await source(name)
        if lease is not None:
            try:
                return await self._upload(name, namespace, epoch, lease.view)
            except Corrupt:
                self.counts["corrupt_local"] += 1  # rotten memory is not signed as truth; the bucket may have a sound copy
            finally:
                lease.release()
        for older in block.older or await self.generations(name):
            copy = None if self._is_bad(name, older.gen) else await self.renew(name, older, epoch)
            if copy is not None:
                return copy
        return None

    async def _upload(self, name: BlockName, namespace: Namespace, epoch: int, raw: memoryview) -> Copy:
        """PUT it at `epoch`, and over every copy that was found bad."""
        if self._root.tenants is not None:
            await self._root.put_namespace(namespace)  # it says whose key seals its blocks
        coding = self.choice.pick()
        cost = self._cost(name, namespace, coding)
        self._under_way[namespace.tenant] += cost
        try:
            return await self._put(name, namespace, epoch, raw, coding, cost)
        finally:
            self._under_way[namespace.tenant] -= cost

    async def _put(self, name: BlockName, namespace: Namespace, epoch: int, raw: memoryview, coding: Codec, cost: int) -> Copy:
        async with self._gate.hold(cost):
            encoded = await self._encode(raw, name, namespace, coding)
            for gen in self._bad.pop(name.tier_key, frozenset()):
                await self._root.put(self.key(name, gen), encoded.body, OVERWRITE)
                self.counts["repaired"] += 1
            key = self.key(name, epoch)
            copy = Copy(0, epoch, encoded.nbytes, encoded.header_bytes)
            with self.choice.link.moving(encoded.nbytes):
                created = await self._root.put(key, encoded.body, CREATE)
            if created:
                self.counts["put"] += 1
            else:
                meta = await self._root.store.head(key)  # somebody else's, perhaps under another codec: its size is what HEAD says
                if isinstance(meta, Absent) or not _plausible(meta.size, name, namespace):
                    await self._root.put(key, encoded.body, OVERWRITE)
                else:
                    copy = Copy(0, epoch, meta.size, encoded.header_bytes if meta.size == encoded.nbytes else 0)
                self.counts["reused"] += 1
        self.learn(name, copy)
        return copy

    async def _encode(self, raw: memoryview, name: BlockName, namespace: Namespace, coding: Codec) -> codec.Encoded:
        if coding == "raw":
            return await self._run(codec.encode, raw, name, namespace, coding, self._share)
        with self.choice.coding.moving(len(raw)):
            encoded = await self._run(codec.encode, raw, name, namespace, coding, self._share)
        self.choice.coded(len(raw), encoded.nbytes)
        return encoded


def _plausible(size: int, name: BlockName, namespace: Namespace) -> bool:
    """Whether an object of that size may be this block: an empty or far too large one is overwritten rather than reused."""
    return 0 < size <= codec.layout(namespace, name.shard, name.tokens).stored_limit
