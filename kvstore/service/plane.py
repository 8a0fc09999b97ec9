"""The data plane of a node: names in, leases out. Bytes never pass through here as copies."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

import msgspec

from kvstore import api, codec
from kvstore.accounts import Account, Accounts
from kvstore.clock import Clock
from kvstore.errors import Denied, Invalid
from kvstore.ids import BlockName, Link, Namespace, PrefixId, Shard, pack_prefixes
from kvstore.lifecycle.prestage import Turns
from kvstore.repo import BlockWant
from kvstore.service.beyond import Beyond, BucketOrigin
from kvstore.service.landing import Landing
from kvstore.service.names import Names
from kvstore.service.registry import Registry
from kvstore.service.wants import block_wants, leading_run, parse_shards, tier_reach
from tiering import DramSlot, DramTier, Lease, Miss, Movers, Origin, Reach, Stack, Want
from tiering.dram import DramValue

FARTHER: Final = ["dram", "nvme"]  # of this node
_MOST_LOOKED_UP: Final = 8 * api.MAX_BLOCKS  # the loop looks at them in one go
_UNSEALED: Final = 512 << 20  # copied and not digested; a quarter of memory is a bound too
_NAMES: Final = 16  # shards of namespaces whose keys are remembered
_MOST_CHANGES: Final = 16  # between peers, the bucket and this node, in one look-up
_AHEAD: Final = 8  # this part of a tenant's memory at most is promised to blocks without a name
_NAMELESS: Final = bytes(32)  # the key of what has none yet; it never comes to be one
_TURNS: Final = 64  # of the loop, within which what was sent is read


class Arena(msgspec.Struct, frozen=True):
    """A tenant's read arena, to be handed to its clients. The descriptor is sealed against writing."""

    fd: int
    size: int


class TenantTiers(msgspec.Struct, frozen=True):
    """What one tenant's blocks live in; the disk and the bucket below are shared, its arena is not."""

    dram: DramTier
    stack: Stack
    uids: tuple[int, ...]


class Reads(msgspec.Struct):
    """What readers asked of a node since it was opened.

    Attributes:
        requests: By `get` or `lookup`, and `complete`, `partial` or `miss`.
        hit: Tokens leased, by the tier they came from.
        missed: Tokens asked for and not leased, by the reason.
    """

    requests: Counter[str] = msgspec.field(default_factory=Counter)
    hit: Counter[str] = msgspec.field(default_factory=Counter)
    missed: Counter[str] = msgspec.field(default_factory=Counter)

    def asked(self, op: str, run: int, of: int) -> None:
        """One request found a leading run of so many blocks."""
        self.requests[f"{op} {'complete' if run == of else 'partial' if run else 'miss'}"] += 1

    def pinned(self, names: Names | None, tokens: Sequence[int]) -> None:
        """One request got leases on all of its blocks, from memory."""
        total = sum(tokens)
        self.requests["get complete"] += 1
        self.hit["dram"] += total
        if names is not None:
            names.read("dram", total)

    def leased(self, names: Names | None, links: Sequence[Link], leases: Sequence[Lease], miss: str, seconds: float) -> None:
        """One request for these blocks got these leases, after so many seconds."""
        self.asked("get", len(leases), len(links))
        for link, lease in zip(links, leases, strict=False):
            self.hit[lease.source] += link.tokens
            if names is not None:
                names.read(lease.source, link.tokens, lease.size)
        if names is not None and names.first:
            names.account.load_s += seconds
        if miss:
            self.missed[miss] += sum(link.tokens for link in links[len(leases) :])


class Room:
    """A place for one block's payload, in the arena. Exactly one of `publish` and `abort` ends it.

    Attributes:
        payload: Writable; the tensors in storage order, exactly `Plane.payload_bytes` long.
    """

    def __init__(
        self, slot: DramSlot, name: BlockName, namespace: Namespace, stack: Stack, movers: Movers, account: Account
    ) -> None:
        self._slot, self._name, self._namespace, self._stack, self._movers = slot, name, namespace, stack, movers
        self._account = account
        self.payload = slot.view[codec.layout(namespace, name.shard, name.tokens).header_bytes :]

    async def publish(self) -> bool:
        """Digest what was written, make it visible, and queue it for disk and bucket."""
        try:
            await self._movers.run(codec.seal, self._slot.view, self._name, self._namespace)
        except BaseException:
            self._slot.abort()
            raise
        self._stack.publish(self._slot).release()
        self._account.written += self._slot.want.size
        return True

    def abort(self) -> None:
        """Give the room back."""
        self._slot.abort()


class Plane:
    """Blocks of every tenant, by name.

    Args:
        tiers: By tenant.
        registry: Known namespaces.
        origin: The bucket, where there is one.
        clock: For deadlines.
        movers: Threads for digests and copies.
        turns: Who may move bytes now: reads always, restores when it is their turn.
        peers: Other nodes, where there are any.
        accounts: Where reads and writes are counted by namespace.

    Attributes:
        reads: Counts.
    """

    def __init__(
        self,
        tiers: Mapping[str, TenantTiers],
        registry: Registry,
        origin: BucketOrigin | None,
        clock: Clock,
        movers: Movers,
        turns: Turns,
        peers: Origin | None = None,
        accounts: Accounts | None = None,
    ) -> None:
        self.turns, self._accounts = turns, accounts or Accounts()
        self._tiers, self._registry, self._clock, self._movers = tiers, registry, clock, movers
        self._beyond = Beyond(registry, origin, peers, clock)
        self._names: dict[tuple[str, str], Names] = {}
        self._landing = Landing(movers, min(_UNSEALED, sum(each.dram.limit for each in tiers.values()) // 4))
        self._ahead: Counter[str] = Counter()  # bytes promised, by tenant
        self._writing: dict[str, set[Callable[[], bool]]] = {}
        self.reads = Reads()

    async def aclose(self) -> None:
        """Land what was published; end questions to the bucket that nobody waits for."""
        await self._landing.aclose()
        await self._beyond.aclose()

    @property
    def run(self) -> Callable[..., Awaitable[object]]:
        """Runs a function on the mover threads, to its real end also when the caller is cancelled."""
        return self._movers.run

    @property
    def tenants(self) -> int:
        """How many share this node."""
        return len(self._tiers)

    def tiers(self, tenant: str) -> TenantTiers:
        """A tenant's tiers. Raises `Denied` where the node does not serve it."""
        found = self._tiers.get(tenant)
        if found is None:
            raise Denied(
                f"tenant {tenant!r} is not served by this node",
                remedy=f"add [tenants.{tenant}] to its settings: they list every tenant that the node serves, `default` too",
            )
        return found

    def allowed(self, uid: int, tenant: str) -> bool:
        """Whether a local user may act for a tenant: the node's own user always, others by the table."""
        found = self._tiers.get(tenant)
        return found is not None and (uid == os.getuid() or uid in found.uids)

    def arena(self, tenant: str) -> Arena:
        """The tenant's read arena."""
        dram = self.tiers(tenant).dram
        return Arena(dram.fd, dram.size)

    async def get(
        self, tenant: str, namespace: str, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: str
    ) -> tuple[list[Lease], str]:
        """Lease the longest leading run of blocks; the word says why it ended, "" where it is complete.

        Raises:
            NotFound: The namespace is not known to this tenant.
            Invalid: A block is named wrongly.
        """
        begun, names = self._clock.monotonic(), None
        deadline = begun + deadline_ms / 1000 if deadline_ms else None
        stack, farthest = self.tiers(tenant).stack, tier_reach(reach)
        await self.settled(tenant, deadline)
        fields = await self._beyond.fields(tenant, namespace, deadline)
        if isinstance(fields, Miss):
            run, miss = list[Lease](), fields.value
        else:
            wants, names = block_wants(fields, shard, links), self._names_of(fields, str(shard), shard)
            with self.turns.request():
                run, miss = leading_run(await stack.get_many(wants, deadline=deadline, reach=farthest))
                if miss == Miss.ABSENT.value and farthest is Reach.ORIGIN and self._beyond.bucket is not None:
                    miss = await self._lengthen(run, stack, fields, shard, links, deadline)
        self.reads.leased(names, links, run, miss, self._clock.monotonic() - begun)
        return run, miss

    def pin_now(self, tenant: str, namespace: str, shard: str, prefixes: bytes, tokens: Sequence[int]) -> list[DramValue] | None:
        """Lease all of these blocks if every one is in memory; None where that takes longer to tell (`get` does).

        What is got is given to `pinned` as soon as the reader has its answer, and to `unpin` in the end.

        Args:
            tenant: Whose.
            namespace: Its id.
            shard: Which shard, as text.
            prefixes: PrefixIds, 32 bytes each.
            tokens: The length of each.

        Raises:
            Invalid: A block is named wrongly.
        """
        names = self._known(tenant, namespace, shard)
        if names is None:
            return None
        if len(prefixes) != 32 * len(tokens):
            raise Invalid(f"{len(prefixes)} bytes of prefix_ids for {len(tokens)} blocks")
        return self._tiers[tenant].dram.pin_all(names.keys(prefixes), names.sizes(tokens))

    def pinned(self, tenant: str, namespace: str, shard: str, pins: Sequence[DramValue], tokens: Sequence[int]) -> None:
        """Count what `pin_now` gave, and what it means for eviction."""
        self._tiers[tenant].dram.pinned(pins)
        self.reads.pinned(self._known(tenant, namespace, shard), tokens)

    def unpin(self, tenant: str, pins: Sequence[DramValue]) -> None:
        """Give back what `pin_now` gave."""
        self._tiers[tenant].dram.unpin_all(pins)

    def rooms_now(
        self,
        tenant: str,
        namespace: str,
        shard: str,
        prefixes: bytes,
        tokens: Sequence[int],
        slots: list[DramSlot] | None = None,
    ) -> list[Room | None] | None:
        """As `reserve`, for several; None where the namespace is not at hand (`reserve` finds out).

        `slots` of `ahead` that fit are used up first.
        """
        names = self._known(tenant, namespace, shard)
        if names is None:
            return None
        if len(prefixes) != 32 * len(tokens):
            raise Invalid(f"{len(prefixes)} bytes of prefix_ids for {len(tokens)} blocks")
        fields, stack = names.namespace, self._tiers[tenant].stack
        wants = names.wants(prefixes, tokens)
        if not slots:
            return [self._room(stack, fields, each) for each in wants]
        return [self._room(stack, fields, each, self._named(tenant, slots, each)) for each in wants]

    def ahead(self, tenant: str, namespace: str, shard: str, tokens: int, count: int) -> list[DramSlot]:
        """Room for blocks that have no name yet: as many as there is room for, within a part of the tenant's memory.

        Each is used up by `rooms_now`, or given to `not_wanted`.
        """
        names = self._known(tenant, namespace, shard)
        if names is None:
            return []
        [size], dram = names.sizes([tokens]), self._tiers[tenant].dram
        slots = list[DramSlot]()
        while len(slots) < count and self._ahead[tenant] + size <= dram.limit // _AHEAD:
            slot = dram.reserve(Want(_NAMELESS, size))
            if isinstance(slot, Miss):
                break
            self._ahead[tenant] += size
            slots.append(slot)
        return slots

    def not_wanted(self, tenant: str, slots: Sequence[DramSlot]) -> None:
        """Take back what `ahead` gave."""
        for slot in slots:
            self._ahead[tenant] -= slot.want.size
            slot.abort()

    def _named(self, tenant: str, slots: list[DramSlot], wanted: Want) -> DramSlot | None:
        if not slots or slots[-1].want.size != wanted.size:
            return None
        slot = slots.pop()
        self._ahead[tenant] -= wanted.size
        slot.want = wanted
        return slot

    def writing(self, tenant: str) -> set[Callable[[], bool]]:
        """Who may have sent blocks of a tenant that nobody has looked at yet; each tells whether there is something unread.

        A writer with room ahead goes on before this node has heard of its blocks, and whoever it tells of them must find them.
        """
        return self._writing.setdefault(tenant, set())

    @property
    def copying(self) -> bool:
        """Whether the bytes of writers are being copied just now."""
        return self._landing.copying

    def land(
        self, tenant: str, rooms: Sequence[Room], copies: Sequence[Callable[[], None]], copied: Callable[[], None], *, soon: bool
    ) -> None:
        """Take rooms over that `copies` will fill; see :meth:`kvstore.service.landing.Landing.take`."""
        self._landing.take(tenant, rooms, copies, copied, soon=soon)

    def grown(self, tenant: str, namespace: Namespace, shards: Sequence[str], links: Sequence[Link]) -> None:
        """A session has become this: what was published for it is one chain, and goes on from what was there before."""
        if len(links) * len(shards) > _MOST_LOOKED_UP:
            return  # the loop has no time for this; they keep what rank they have
        packed, stack = pack_prefixes([link.prefix_id for link in links]), self.tiers(tenant).stack
        for shard in shards:
            keys = self._names_of(namespace, shard).keys(packed)
            stack.asked(keys, len(keys))

    def queued(self, tenant: str) -> int:
        """Bytes of a tenant that are published, and not yet in every tier that they are meant for."""
        return self._landing.queued(tenant) + sum(self.tiers(tenant).stack.queued.values())

    async def settled(self, tenant: str, deadline: float | None = None) -> None:
        """Wait for what the tenant has published by now. Whoever is told that a block is published finds it."""
        for _ in range(_TURNS):
            if not self._unread(tenant):
                break
            await asyncio.sleep(0)
        if self._landing.pending(tenant):
            await self._landing.settled(tenant, self._beyond.left(deadline))

    async def reserve(self, tenant: str, namespace: str, shard: Shard, link: Link) -> Room | None:
        """Room for one block's payload; None where everything that could make way is leased (counted as dropped)."""
        fields = await self._registry.get(tenant, namespace)
        return self._room(self.tiers(tenant).stack, fields, block_wants(fields, shard, [link])[0])

    def _unread(self, tenant: str) -> bool:
        writing = self._writing.get(tenant)
        return bool(writing) and any(unread() for unread in writing or ())

    def _room(self, stack: Stack, fields: Namespace, wanted: Want, named: DramSlot | None = None) -> Room | None:
        slot = named or stack.reserve(wanted)
        if isinstance(slot, Miss):
            return None
        assert isinstance(wanted.ref, BlockWant)
        return Room(slot, wanted.ref.name, fields, stack, self._movers, self._accounts.of(fields.tenant, fields.id))

    async def payload_bytes(self, tenant: str, namespace: str, shard: Shard, tokens: int) -> int:
        """Length of a block's payload, behind its header."""
        plan = codec.layout(await self._registry.get(tenant, namespace), shard, tokens)
        return plan.raw_bytes - plan.header_bytes

    def lookup_now(self, tenant: str, request: api.Lookup) -> api.Found | None:
        """How much of a chain is in the tiers of this node, if that is the whole answer; None where it takes longer (`lookup`).

        Raises:
            Invalid: The chain is named wrongly, or too long.
        """
        if len(request.prefix_ids) > api.MAX_BLOCKS:
            raise Invalid(f"prefix_ids has {len(request.prefix_ids)} entries; at most {api.MAX_BLOCKS}")
        if len(request.prefix_ids) * len(request.shards) > _MOST_LOOKED_UP:
            raise Invalid(
                f"{len(request.prefix_ids)} prefix_ids of {len(request.shards)} shards; at most {_MOST_LOOKED_UP} together"
            )
        shards = parse_shards(request.shards)
        fields = self._registry.known(tenant, request.namespace)
        if fields is None:
            return None
        tiers = self._here(tenant, fields, shards, request.prefix_ids)
        elsewhere = request.reach == "bucket" and bool(self._beyond)
        if len(tiers) < len(request.prefix_ids) and (elsewhere or self._landing.pending(tenant) or self._unread(tenant)):
            return None
        self.reads.asked("lookup", len(tiers), len(request.prefix_ids))
        return api.Found(run=len(tiers), tiers=tiers)

    async def lookup(self, tenant: str, request: api.Lookup) -> api.Found:
        """How much of a chain is somewhere. Local tiers are asked in one pass; the bucket only for what they lack."""
        found = self.lookup_now(tenant, request)
        if found is not None:
            return found
        deadline = self._clock.monotonic() + request.deadline_ms / 1000
        await self.settled(tenant, deadline)
        shards = parse_shards(request.shards)
        fields = await self._beyond.fields(tenant, request.namespace, deadline)
        if isinstance(fields, Miss):
            self.reads.asked("lookup", 0, len(request.prefix_ids))
            return api.Found(run=0, tiers=[])
        tiers = self._here(tenant, fields, shards, request.prefix_ids)
        if request.reach == "bucket":
            await self._lengthen_found(tenant, fields, shards, request.prefix_ids, tiers, deadline)
        self.reads.asked("lookup", len(tiers), len(request.prefix_ids))
        return api.Found(run=len(tiers), tiers=tiers)

    async def _lengthen_found(
        self, tenant: str, fields: Namespace, shards: Sequence[Shard], prefixes: Sequence[str], tiers: list[str], deadline: float
    ) -> None:
        """Lengthen a run of this node's tiers by what peers and the bucket have, and by what is here again behind that."""
        beyond = self._beyond
        here = self._places(tenant, fields, shards, prefixes) if beyond.peers is not None else []
        for _ in range(_MOST_CHANGES):
            start = len(tiers)
            rest = [Link(PrefixId(text), fields.block_tokens) for text in prefixes[start:]]
            run, where = await beyond.at_peers(fields, shards, rest, deadline), "peer"
            if not run and rest:
                run, where = await beyond.in_bucket(fields, shards, rest, deadline, missed=False), "bucket"
            tiers += [here[at] or where for at in range(start, start + run)] if here else [where] * run
            if not run or beyond.peers is None:
                return
            tiers += _leading(here[len(tiers) :])

    def _here(self, tenant: str, fields: Namespace, shards: Sequence[Shard], prefixes: Sequence[str]) -> list[str]:
        """The farthest tier that every shard of a block is in, for each block of the leading run that is in this node's tiers."""
        return _leading(self._places(tenant, fields, shards, prefixes))

    def _places(self, tenant: str, fields: Namespace, shards: Sequence[Shard], prefixes: Sequence[str]) -> list[str | None]:
        """The same for every block, None where this node lacks one of its shards."""
        packed, stack = pack_prefixes(prefixes), self.tiers(tenant).stack
        places = []
        for shard in shards:
            names = self._names_of(fields, str(shard), shard)
            if prefixes:
                names.sizes([fields.block_tokens])  # refuses a shard that is none of this namespace
            places.append(stack.locate(names.keys(packed)))
        if len(places) == 1:
            return places[0]
        return [
            None if None in columns else max((str(tier) for tier in columns), key=FARTHER.index)
            for columns in zip(*places, strict=True)
        ]

    def _known(self, tenant: str, namespace: str, shard: str) -> Names | None:
        names = self._names.get((namespace, shard))
        if names is not None and names.namespace.tenant == tenant:
            return names  # an id always means the same fields
        fields = self._registry.known(tenant, namespace)
        return None if fields is None else self._names_of(fields, shard)

    def _names_of(self, fields: Namespace, text: str, shard: Shard | None = None) -> Names:
        names = self._names.get((fields.id, text))
        if names is None:
            if len(self._names) >= _NAMES:
                self._names.clear()
            account = self._accounts.of(fields.tenant, fields.id)
            names = self._names[fields.id, text] = Names(fields, shard or Shard.parse(text), account)
        return names

    async def _lengthen(
        self,
        run: list[Lease],
        stack: Stack,
        fields: Namespace,
        shard: Shard,
        links: Sequence[Link],
        deadline: float | None,
    ) -> str:
        """Lease what the bucket has behind `run` under older generations, too; why there is no more.

        Only whoever looks for them knows of those: a session's blocks are of the epochs in which it grew.
        """
        rest = links[len(run) :]
        try:
            found = await self._beyond.in_bucket(fields, [shard], rest, deadline, missed=True)
            wants = block_wants(fields, shard, rest[:found])
            more, miss = leading_run(await stack.get_many(wants, deadline=deadline)) if found else ([], Miss.ABSENT.value)
        except BaseException:
            for lease in run:
                lease.release()
            raise
        run += more
        return miss or (Miss.ABSENT.value if found < len(rest) else "")


def _leading(places: list[str | None]) -> list[str]:
    return [str(tier) for tier in (places[: places.index(None)] if None in places else places)]
