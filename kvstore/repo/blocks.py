"""Blocks as the hierarchy sees them: the bucket as the origin behind every tier. What it hands over has been verified."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np

from kvstore import codec
from kvstore.errors import Corrupt, KVTierError
from kvstore.ids import BlockName, Namespace
from kvstore.model import Copy
from kvstore.objects.base import Absent, Got, Unchanged
from kvstore.objects.gate import ByteGate
from kvstore.payer import Paying
from kvstore.repo.epochs import Epochs
from kvstore.repo.root import FIRST_EPOCH, Root, Run
from kvstore.repo.together import together
from kvstore.repo.uploads import Uploads
from tiering import Lease, Miss, Tell, Want

_MOST_PROBES: Final = 64  # in one step of the gallop
_BEHIND: Final = 32  # copies to a newer generation under way; more is dropped
_LIST_S: Final = 0.1  # a listing is not begun with less time left than this
_MOST_LISTS: Final = 8  # in one look-up: a chain grew in as many epochs, and its other blocks are of the same ones
_PATIENCE_S: Final = 120.0


class BlockWant(msgspec.Struct, frozen=True):
    """What the origin needs to find a block: the `ref` of a :class:`tiering.Want`.

    Attributes:
        name: Which block.
        namespace: Its fields: they bound every length.
        copy: Where a manifest, or an earlier answer, says it is.
    """

    name: BlockName
    namespace: Namespace
    copy: Copy | None = None


def want(namespace: Namespace, name: BlockName, copy: Copy | None = None) -> Want:
    """How to ask the hierarchy for a block."""
    size = codec.layout(namespace, name.shard, name.tokens).raw_bytes
    return Want(name.tier_key, size, BlockWant(name, namespace, copy))


class BucketOrigin:
    """Reads, offers and looks up blocks of the bucket. See :class:`tiering.Origin`.

    Args:
        root: Where.
        epochs: For generations.
        uploads: What is known of blocks, and how they get there.
        run: Verifies and decodes on a thread.
        expects_raw: Whether objects of unknown size are most likely raw.
        inflight: Most bytes of coded objects held while they are decoded.
        share: Finds threads that help to verify or decode a block.
    """

    name = "bucket"

    def __init__(
        self,
        root: Root,
        epochs: Epochs,
        uploads: Uploads,
        run: Run,
        *,
        expects_raw: Callable[[], bool],
        inflight: int,
        share: codec.Share | None = None,
    ) -> None:
        self._root, self._epochs, self._uploads, self._run, self._share = root, epochs, uploads, run, share
        self._expects_raw, self._gate = expects_raw, ByteGate(inflight, _PATIENCE_S)
        self._behind: set[asyncio.Task[Any]] = set()
        self.counts: Counter[str] = Counter()

    async def fetch(self, want: Want, into: memoryview, tell: Tell | None = None) -> Miss | None:
        """Fill `into` with the verified raw object, and tell of its tensors as they come.

        A named copy is read at once, and looked for under its other generations when it is gone: two requests for a block that
        is not there. Otherwise the generations e and e-1 are tried.
        """
        ref = want.ref
        if not isinstance(ref, BlockWant):
            return Miss.ABSENT
        try:
            with Paying(ref.namespace.tenant, ref.namespace.id):
                miss = await self._fetch(ref, into, tell)
        except KVTierError as error:
            self.counts[f"failed_{error.kind}"] += 1
            return Miss.TIMEOUT if error.kind == "timeout" else Miss.UNAVAILABLE
        self.counts["hits" if miss is None else miss.value] += 1
        return miss

    async def offer(self, want: Want, value: Lease) -> bool:
        """Upload a block that no session names, at the current epoch. False where too much is in flight, or the store fails."""
        ref = want.ref
        if not isinstance(ref, BlockWant):
            return False
        try:
            with Paying(ref.namespace.tenant, ref.namespace.id):
                return await self._uploads.offer(ref.name, ref.namespace, await self._epochs.recent(), value)
        except KVTierError as error:
            self.counts[f"offer_{error.kind}"] += 1
            return False

    async def contains(self, wants: Sequence[Want], *, until: float = 0.0, missed: bool = False) -> int:
        """Length of the leading run that is in the bucket; each is looked at, in steps that double, until the first miss.

        A session's blocks may be of generations that nobody told this node. So the first miss is looked for by one listing of its
        own prefix, where time allows; those behind it are looked at under the generation found. A chain that is nowhere costs one
        listing, and one of a session one for each epoch in which it grew.

        Args:
            wants: In prefix order.
            until: A point on the monotonic clock that says whether there is time to list.
            missed: The first was just read in vain.
        """
        ref = wants[0].ref if wants else None
        if not isinstance(ref, BlockWant):
            return 0
        run, step, older, lists = 0, 1, 0, _MOST_LISTS
        try:
            with Paying(ref.namespace.tenant, ref.namespace.id):
                while run < len(wants):
                    holds = partial(self._holds, older)
                    found = [False] if missed else await together(holds, wants[run : run + step], limit=_MOST_PROBES)
                    missed = False
                    if False not in found:
                        run, step = run + len(found), min(step * 2, _MOST_PROBES)
                        continue
                    run += found.index(False)
                    listed = await self._list(wants[run].ref) if lists and self._has_time(until) else None
                    if listed is None:
                        break
                    run, step, older, lists = run + 1, 1, listed.gen, lists - 1
        except KVTierError as error:
            self.counts[f"failed_{error.kind}"] += 1
        return run

    def known(self, wants: Sequence[Want]) -> int:
        """Length of the leading run that earlier answers say is in the bucket. Asks nobody."""
        run = 0
        for want in wants:
            copy = self._uploads.known(want.ref.name) if isinstance(want.ref, BlockWant) else None
            if copy is None or copy.gen < self._epochs.latest - 1:
                break
            run += 1
        return run

    async def inspect(self, want: Want) -> Miss | None:
        """Whether exactly the named copy is there and sound; its bytes are thrown away. Raises as the store does."""
        ref = want.ref
        if not isinstance(ref, BlockWant) or ref.copy is None:
            return Miss.ABSENT
        into = np.empty(want.size, np.uint8).data
        miss = await self._read(ref, ref.copy, into)
        if miss is None:
            try:
                # Its raw digests, too, which a reader trusts.
                await self._run(codec.verify, into, ref.name, ref.namespace, self._share)
            except Corrupt:
                return Miss.CORRUPT
        return miss

    async def aclose(self) -> None:
        """Wait for copies under way."""
        await asyncio.gather(*self._behind, return_exceptions=True)

    # --- inside ---

    async def _holds(self, likely: int, want: Want) -> bool:
        ref = want.ref
        if not isinstance(ref, BlockWant):
            return False
        if ref.copy is not None:
            return await self._exists(ref.name, ref.copy)
        epoch, older = await self._epochs.recent(), self._uploads.known(ref.name)
        if older is not None and older.gen < epoch - 1:  # some session names it, or it may be gone by now
            if await self._exists(ref.name, older):
                return True
            self._uploads.forget(ref.name, older.gen)
        return await self._uploads.probe(ref.name, ref.namespace, epoch, likely) is not None

    async def _list(self, ref: object) -> Copy | None:
        """The newest copy of a block that no earlier answer and no manifest placed."""
        return await self._uploads.search(ref.name, ref.namespace) if isinstance(ref, BlockWant) and ref.copy is None else None

    async def _exists(self, name: BlockName, copy: Copy) -> bool:
        return not isinstance(await self._root.store.head(self._uploads.key(name, copy.gen)), Absent)

    async def _fetch(self, ref: BlockWant, into: memoryview, tell: Tell | None) -> Miss | None:
        named = ref.copy or self._uploads.known(ref.name)
        if named is not None:
            likely = [named]
        else:
            epoch = await self._epochs.recent()
            likely = [Copy(0, gen, 0, 0) for gen in range(epoch, max(FIRST_EPOCH, epoch - 1) - 1, -1)]
        miss = await self._first_sound(ref, likely, into, tell)
        if miss is None or named is None:
            return miss
        tried = {copy.gen for copy in likely}
        others = [copy for copy in await self._uploads.generations(ref.name) if copy.gen not in tried]
        second = await self._first_sound(ref, others, into, tell)
        return None if second is None else _worse(miss, second)

    async def _first_sound(self, ref: BlockWant, copies: Sequence[Copy], into: memoryview, tell: Tell | None) -> Miss | None:
        worst = Miss.ABSENT
        for copy in copies:
            miss = await self._read(ref, copy, into, tell)
            if miss is None:
                return None
            worst = _worse(miss, worst)
        return worst

    def _has_time(self, until: float) -> bool:
        return self._root.clock.monotonic() + _LIST_S < until

    async def _read(self, ref: BlockWant, copy: Copy, into: memoryview, tell: Tell | None = None) -> Miss | None:
        """One generation of a block."""
        name, key = ref.name, self._uploads.key(ref.name, copy.gen)
        try:
            in_place = copy.bytes == into.nbytes or (copy.bytes == 0 and self._expects_raw())
            got = await (self._read_raw(ref, key, into, tell) if in_place else self._read_coded(ref, key, into, tell, copy.bytes))
        except Corrupt:
            self._uploads.forget(name, copy.gen, bad=True)
            self.counts["corrupt_reads"] += 1
            return Miss.CORRUPT
        if got is None:
            self._uploads.forget(name, copy.gen)
            return Miss.ABSENT
        sound = Copy(0, copy.gen, got.size, copy.header_bytes)
        self._uploads.learn(name, sound)
        if ref.copy is None and (copy.gen < self._epochs.latest or not self._epochs.fresh):
            self._spawn(self._renew(name, sound))
        return None

    async def _read_raw(self, ref: BlockWant, key: str, into: memoryview, tell: Tell | None) -> Got | None:
        """Straight into the destination. Whoever repaired the object may have coded it otherwise: then it is decoded after all."""
        arriving = _arriving(into, ref, into, tell)
        try:
            got = await self._root.store.get(key, into=into, arrived=arriving.arrived)
        except Corrupt:  # longer than the raw object
            return await self._read_coded(ref, key, into, tell)
        if isinstance(got, Absent | Unchanged):
            return None
        if got.size == into.nbytes:
            await self._finish(arriving, got)
        else:
            _overwritten(tell)
            await self._run(codec.decode, memoryview(bytes(got.data)), ref.name, ref.namespace, into, self._share)
        return got

    async def _read_coded(self, ref: BlockWant, key: str, into: memoryview, tell: Tell | None, nbytes: int = 0) -> Got | None:
        """Beside the destination, and decoded to it. `nbytes` is its length where it is known: no more is asked for then."""
        limit = codec.layout(ref.namespace, ref.name.shard, ref.name.tokens).stored_limit
        room = min(nbytes, limit) or limit
        async with self._gate.hold(room):
            stored = np.empty(room, np.uint8).data  # touched only as far as it is filled
            arriving = _arriving(stored, ref, into, tell)
            try:
                got = await self._root.store.get(key, into=stored, arrived=arriving.arrived)
            except Corrupt:
                if room == limit:
                    raise
                got = None  # longer than it was: repaired under another codec
            if isinstance(got, Absent | Unchanged):
                return None
            if got is not None:
                await self._finish(arriving, got)
        return got or await self._read_coded(ref, key, into, tell)

    async def _finish(self, arriving: codec.Arriving, got: Got) -> None:
        """Nothing is left to do where the threads that brought the bytes have done it."""
        if arriving.complete:
            arriving.finish(got.size)
        else:
            await self._run(arriving.finish, got.size, self._share)

    async def _renew(self, name: BlockName, copy: Copy) -> None:
        """Copy a useful anonymous block to the newest epoch, so that it outlives the next collections.

        Whoever only reads what it knows would never hear of a new epoch otherwise.
        """
        try:
            await self._uploads.renew(name, copy, await self._epochs.recent())
        except KVTierError as error:
            self.counts[f"renew_{error.kind}"] += 1

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        if len(self._behind) >= _BEHIND:
            work.close()
            self.counts["renew_dropped"] += 1
            return
        task = asyncio.create_task(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)


def _arriving(stored: memoryview, ref: BlockWant, into: memoryview, tell: Tell | None) -> codec.Arriving:
    """Another attempt to fill `into`, and the end of what was told of the last one."""
    _overwritten(tell)
    return codec.Arriving(stored, ref.name, ref.namespace, into, tell)


def _overwritten(tell: Tell | None) -> None:
    if tell is not None:
        tell(0)


def _worse(one: Miss, other: Miss) -> Miss:
    return Miss.CORRUPT if Miss.CORRUPT in {one, other} else one
