"""The peers as an origin of the hierarchy, before the bucket: whom to ask for which block, and when to stop waiting."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Final, Protocol, Self

from kvstore.clock import Clock
from kvstore.mesh.delivery import Delivery
from kvstore.mesh.link import Link
from kvstore.mesh.members import Directory, Member, owner
from kvstore.mesh.seldom import Seldom
from kvstore.mesh.supplier import PeerSettings, Supplier
from kvstore.repo import BlockWant
from tiering import Lease, Miss, Tell, Want

log = logging.getLogger(__name__)
_LOOK_S: Final = 5.0  # between two looks at who is a member


class Lines(Protocol):
    """A way to reach members. TCP's is :class:`kvstore.mesh.link.Links`."""

    def to(self, member: Member) -> Link:
        """The link to a member."""
        ...

    def keep(self, members: Sequence[Member]) -> None:
        """Forget all others."""
        ...


class Peers:
    """Blocks from other nodes' tiers, and through the owner of each from the bucket. See :class:`tiering.Origin`.

    Args:
        node: This one's id.
        directory: Who has what, as far as is known.
        links: To members.
        clock: For rests.
        settings: Bounds.
        placement: Whether a block that nobody has is asked of its owner, who reads it from the bucket for all.

    Attributes:
        counts: Of fetches by how they ended, and of what happened on the way: `corrupt`, `wrong`, `hedged`, `through`.
        asked_of: Blocks that each member was asked for, by how that ended. What is said of who is no member any more is forgotten.
    """

    name = "peer"

    def __init__(
        self,
        node: str,
        directory: Directory,
        links: Lines,
        clock: Clock,
        settings: PeerSettings | None = None,
        *,
        placement: bool = True,
    ) -> None:
        self._node, self._directory, self._links, self._clock = node, directory, links, clock
        self._settings, self._placement = settings or PeerSettings(), placement
        self._suppliers: dict[Member, Supplier] = {}
        self._seldom = Seldom(clock)
        self._asked: list[tuple[bytes, asyncio.Future[tuple[Member, ...]]]] = []  # of the directory, in this tick
        self._locating: set[asyncio.Task[None]] = set()
        self.counts: Counter[str] = Counter()
        self.asked_of: defaultdict[str, Counter[str]] = defaultdict(Counter)

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        node: str,
        directory: Directory,
        links: Lines,
        clock: Clock,
        settings: PeerSettings | None = None,
        *,
        placement: bool = True,
    ) -> AsyncIterator[Self]:
        """For the length of the block; then what is under way is cut."""
        peers = cls(node, directory, links, clock, settings, placement=placement)
        try:
            yield peers
        finally:
            await peers._stop()

    # --- as an origin ---

    async def fetch(self, want: Want, into: memoryview, tell: Tell | None = None) -> Miss | None:
        """From a holder, verified; where there is none, from the block's owner, who reads it through."""
        block = want.ref
        if not isinstance(block, BlockWant):
            return Miss.ABSENT
        miss = await self._fetch(want, block, into, tell)
        self.counts["hits" if miss is None else miss.value] += 1
        return miss

    async def offer(self, want: Want, value: Lease) -> bool:  # noqa: ARG002  the seam's signature
        """Nothing: a new block stays where it was made."""
        return False

    def ready(self) -> bool:
        """Whether there is anybody to ask."""
        return bool(self._directory.members())

    async def contains(self, wants: Sequence[Want]) -> int:
        """Length of the leading run that somebody is believed to have."""
        found = await self._directory.locate([want.key for want in wants])
        return [*map(bool, found), False].index(False)

    # --- for others ---

    def owns(self, key: bytes) -> bool:
        """Whether this node is the one that fetches that block for all."""
        return owner(key, [self._node, *(member.node for member in self._directory.members())]) == self._node

    def speed(self, member: Member) -> float:
        """Bytes a second that come from that member, as measured; 0 while unknown."""
        supplier = self._suppliers.get(member)
        return supplier.speed if supplier is not None else 0.0

    async def watch(self) -> None:
        """Forget who is no member any more. Runs until cancelled."""
        while True:
            members = self._directory.members()
            self._links.keep(members)
            for member in self._suppliers.keys() - set(members):
                await self._suppliers.pop(member).aclose()
            for node in self.asked_of.keys() - {member.node for member in members}:
                del self.asked_of[node]
            await self._clock.sleep(_LOOK_S)

    # --- inside ---

    async def _fetch(self, want: Want, block: BlockWant, into: memoryview, tell: Tell | None) -> Miss | None:
        holders = await self._locate(want.key)
        suppliers = self._ranked(want, holders)
        found: Miss = Miss.UNAVAILABLE if len(suppliers) < len(holders) else Miss.ABSENT
        for tried, supplier in enumerate(suppliers):
            if tried and tell is not None:
                tell(0)
            miss = await self._asked_of(supplier, Delivery(want, block, into, tell), through=False)
            if miss is None or miss is Miss.TIMEOUT:
                return miss
            found = found if miss is Miss.ABSENT else miss
        reader = self._owner(want) if self._placement else None
        if reader is None:
            return found
        if holders and tell is not None:
            tell(0)
        self.counts["through"] += 1
        miss = await self._asked_of(reader, Delivery(want, block, into, tell), through=True)
        return found if miss is Miss.ABSENT else miss

    def _ranked(self, want: Want, holders: Sequence[Member]) -> list[Supplier]:
        """Those worth asking, the soonest first; who is as soon as another by the block's key, so that load spreads."""
        suppliers = [each for each in map(self._supplier, holders) if each.has_room(want.size)]
        if len(suppliers) > 1:
            first = owner(want.key, [each.member.node for each in suppliers])
            suppliers.sort(key=lambda each: (each.expected(want.size), each.member.node != first))
        return suppliers[: self._settings.tries]

    def _owner(self, want: Want) -> Supplier | None:
        members = {member.node: member for member in self._directory.members()}
        name = owner(want.key, [self._node, *members])
        if name == self._node:
            return None
        supplier = self._supplier(members[name])
        return supplier if supplier.has_room(want.size) else None

    async def _asked_of(self, supplier: Supplier, delivery: Delivery, *, through: bool) -> Miss | None:
        miss = await self._ask(supplier, delivery, through=through)
        self.asked_of[supplier.member.node]["hits" if miss is None else miss.value] += 1
        return miss

    async def _ask(self, supplier: Supplier, delivery: Delivery, *, through: bool) -> Miss | None:
        """One block of one peer. TIMEOUT: longer than it should take, so that whoever is next should be asked."""
        if not supplier.rest.over:
            return Miss.UNAVAILABLE
        settings, want = self._settings, delivery.want
        seconds = settings.patience_s + settings.slack * supplier.expected(want.size) + settings.through_s * through
        supplier.put(delivery, through=through)
        try:
            miss = await delivery.outcome(seconds)
        finally:
            supplier.load -= want.size
        if delivery.late and miss is not None:
            self.counts["hedged"] += 1
            if not through:
                supplier.rest.silent()
            return Miss.TIMEOUT
        if miss is not Miss.UNAVAILABLE:
            supplier.rest.answered()
        if miss is Miss.CORRUPT:
            self.counts["corrupt"] += 1
            if self._seldom(f"corrupt {supplier.member.node}"):
                log.warning("%s sent a block that is not what it claims", supplier.member.node)
        if (miss is Miss.ABSENT or miss is Miss.CORRUPT) and not through:
            self.counts["wrong"] += 1
            self._directory.wrong(supplier.member, [want.key])
        return miss

    def _supplier(self, member: Member) -> Supplier:
        supplier = self._suppliers.get(member)
        if supplier is None:
            supplier = self._suppliers[member] = Supplier(member, self._links.to(member), self._settings, self._clock)
        return supplier

    async def _locate(self, key: bytes) -> tuple[Member, ...]:
        """Who has it, asked together with all that is asked in this tick."""
        loop = asyncio.get_running_loop()
        if not self._asked:
            loop.call_soon(self._locate_all)
        found: asyncio.Future[tuple[Member, ...]] = loop.create_future()
        self._asked.append((key, found))
        return await found

    def _locate_all(self) -> None:
        asked, self._asked = self._asked, []
        task = asyncio.create_task(self._answer(asked))
        self._locating.add(task)
        task.add_done_callback(self._locating.discard)

    async def _answer(self, asked: Sequence[tuple[bytes, asyncio.Future[tuple[Member, ...]]]]) -> None:
        found: list[tuple[Member, ...]] = [()] * len(asked)
        try:
            found = await self._directory.locate([key for key, _ in asked])
        except Exception as error:  # noqa: BLE001  a directory's word is a hint, and so is its silence
            if self._seldom("directory"):
                log.warning("the directory does not say who has what: %r", error)
        finally:
            for (_, future), members in zip(asked, found, strict=False):
                if not future.done():
                    future.set_result(members)

    async def _stop(self) -> None:
        for task in self._locating:
            task.cancel()
        await asyncio.gather(*self._locating, return_exceptions=True)
        for supplier in self._suppliers.values():
            await supplier.aclose()
