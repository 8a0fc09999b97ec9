"""What this node's tiers have, told to whoever subscribes: numbered batches over ZeroMQ, in the words of vLLM's KV events.

A tier's events name a block by its PrefixId, which depends on all tokens before it: so it needs no parent to be understood, and has
none until a commit says which blocks follow each other. A node knows no token ids; `token_ids` is empty.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Self

import msgspec
import zmq
import zmq.asyncio

from kvstore.clock import Clock
from kvstore.config import is_loopback, parse_address
from kvstore.errors import AlreadyExists, Invalid
from kvstore.ids import Link, NamespaceId, Shard, tier_key, tier_key_head
from kvstore.mesh.inventory import Holder
from kvstore.mesh.networks import trusting
from kvstore.repo import BlockWant
from tiering import Watch

log = logging.getLogger(__name__)
OWNER: Final = "kvtier"
_END: Final = (-1).to_bytes(8, "big", signed=True)
_QUEUE: Final = 1 << 16  # moves that wait to be told
_GROWN: Final = 256  # commits that wait
_NAMED: Final = 1 << 18  # blocks whose names are remembered while they are here: about 75 MB
_TELL_S: Final = 0.05
_QUIET_S: Final = 5.0
_BATCH: Final = 1024  # blocks
_KEPT: Final = 10_000  # batches that can be had again, and
_KEPT_BYTES: Final = 16 << 20
_REQUEST: Final = 1024  # bytes of one


class _Block:
    """What an event says of a block, and where it was said to be."""

    __slots__ = ("media", "namespace", "prefix", "session", "shard", "tokens")

    def __init__(self, ref: BlockWant) -> None:
        name = ref.name
        self.prefix, self.tokens = bytes.fromhex(name.prefix_id), name.tokens
        self.namespace, self.shard = name.namespace, str(name.shard)
        self.media = set[str]()
        self.session = ""  # the last that was told


class Overheard:
    """A tier of which this hears, and one more listener as well. See :class:`kvstore.mesh.inventory.Holder`.

    Args:
        tier: Nobody else watches it.
        medium: As events call it.
        hear: Told of every value that comes and goes; see :data:`tiering.Watch`.
    """

    def __init__(self, tier: Holder, medium: str, hear: Callable[[str, bytes, int, object], None]) -> None:
        self.medium, self._tier, self._hear = medium, tier, hear
        self._other: Watch | None = None
        tier.watch(self._told)

    def contains_many(self, keys: Sequence[bytes]) -> list[bool]:
        """Which are here now."""
        return self._tier.contains_many(keys)

    def keys(self) -> list[bytes]:
        """All that are here now."""
        return self._tier.keys()

    def watch(self, told: Watch | None) -> None:
        """Tell one more."""
        self._other = told

    def close(self) -> None:
        """Tell nobody any more."""
        self._tier.watch(None)

    def _told(self, key: bytes, by: int, ref: object) -> None:
        self._hear(self.medium, key, by, ref)
        if (other := self._other) is not None:
            other(key, by, ref)


class Publisher:
    """Make one with `open`, have it `hear` of tiers, and keep its `work` running.

    Attributes:
        counts: `batches`, `blocks`; `dropped`: moves that were too many at once, after which all is told anew; `unnamed`: blocks on
            the disk since an earlier life, which are told of once they are read; `replays`; `refused`.
    """

    def __init__(self, sockets: _Sockets, clock: Clock) -> None:
        self.counts: Counter[str] = Counter()
        self._sockets, self._clock = sockets, clock
        self._tiers: list[Overheard] = []
        self._moves: deque[tuple[str, bytes, int, object]] = deque()
        self._grown: deque[tuple[str, NamespaceId, Sequence[str], Sequence[Link]]] = deque()
        self._blocks: dict[bytes, _Block] = {}
        self._lost = False
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, events: str, replay: str, networks: Sequence[str], clock: Clock) -> AsyncIterator[Self]:
        """Listen for subscribers until the end of the block.

        Args:
            events: `tcp://host:port`.
            replay: The same, where batches can be had again; "" nowhere.
            networks: Whose addresses may connect; none: this host's alone.
            clock: Time.

        Raises:
            Invalid: No such address, or one beyond loopback with no networks.
            AlreadyExists: It is taken.
        """
        for field, text in (("node.events", events), ("node.events_replay", replay or events)):
            host, _ = parse_address(text.removeprefix("tcp://"), field)
            if not is_loopback(host) and not networks:
                raise Invalid(f"{field} is {text!r}, beyond this host, and peers.networks is empty: no network is trusted")
        sockets = _Sockets(networks)
        publisher = cls(sockets, clock)
        try:
            sockets.bind(events, replay)
            publisher._publish([_CLEARED])  # what an earlier life said is over
            yield publisher
        finally:
            for tier in publisher._tiers:
                tier.close()
            sockets.close()

    @property
    def work(self) -> Mapping[str, Callable[[], Any]]:
        """Loops to be kept running, by name."""
        return {"events": self.tell, "events again": self.answer, "events guard": self.guard}

    def hear(self, tier: Holder, medium: str) -> Overheard:
        """Of one more tier; whoever else watches it watches what this returns."""
        heard = Overheard(tier, medium, self._hear)
        self._tiers.append(heard)
        return heard

    def grown(self, session: str, namespace: NamespaceId, shards: Sequence[str], links: Sequence[Link]) -> None:
        """A session has become this. Never waits."""
        if len(self._grown) < _GROWN:
            self._grown.append((session, namespace, shards, links))

    async def tell(self) -> None:
        """Tell what comes and goes, and from time to time that nothing did: who missed something notices then. Never ends."""
        said, quiet = self._number, self._clock.monotonic()
        while True:
            await self._clock.sleep(_TELL_S)
            await self.flush()
            if self._number == said and self._clock.monotonic() - quiet >= _QUIET_S:
                self._say([])
            if self._number != said:
                said, quiet = self._number, self._clock.monotonic()

    async def flush(self) -> None:
        """Tell what has come and gone until now."""
        if self._lost:
            await self._anew()
        while self._moves:
            self._publish(_merged(self._moved([self._moves.popleft() for _ in range(min(_BATCH, len(self._moves)))])))
            await asyncio.sleep(0)
        while self._grown:
            for events in self._committed(*self._grown.popleft()):
                self._publish(events)
                await asyncio.sleep(0)

    async def answer(self) -> None:
        """Send batches again to whoever missed some. Never ends."""
        while True:
            client, first = await self._sockets.asked()
            self.counts["replays"] += 1
            for at, (number, payload) in enumerate(list(self._kept)):
                if number >= first:
                    await self._sockets.again(client, number.to_bytes(8, "big"), payload)
                if not at % 64:
                    await asyncio.sleep(0)
            await self._sockets.again(client, _END, b"")

    async def guard(self) -> None:
        """Let nobody in but whom the networks name. Never ends."""
        while True:
            self.counts["refused"] += not await self._sockets.asked_in()

    def _hear(self, medium: str, key: bytes, by: int, ref: object) -> None:
        """On any thread, under a tier's lock."""
        if len(self._moves) < _QUEUE:
            self._moves.append((medium, key, by, ref))
        else:
            self.counts["dropped"] += 1
            self._lost = True

    def _moved(self, moves: Iterable[tuple[str, bytes, int, object]]) -> Iterator[dict[str, Any]]:
        for medium, key, by, ref in moves:
            block = self._blocks.get(key)
            if block is None and by > 0:
                block = self._named(key, ref)
                if block is not None:  # on the disk since an earlier life, perhaps
                    for tier in self._tiers:
                        if tier.medium != medium and tier.contains_many([key])[0]:
                            block.media.add(tier.medium)
                            yield _stored(block, tier.medium)
            if block is None:
                continue
            if by > 0 and medium not in block.media:
                block.media.add(medium)
                yield _stored(block, medium)
            elif by < 0 and medium in block.media:
                block.media.discard(medium)
                yield _removed(block, medium)
                if not block.media:
                    del self._blocks[key]

    def _named(self, key: bytes, ref: object) -> _Block | None:
        if not isinstance(ref, BlockWant) or len(self._blocks) >= _NAMED:
            self.counts["unnamed"] += 1
            return None
        block = self._blocks[key] = _Block(ref)
        return block

    def _committed(
        self, session: str, namespace: NamespaceId, shards: Sequence[str], links: Sequence[Link]
    ) -> Iterator[list[dict[str, Any]]]:
        """Of each shard the blocks that were not told of for this session yet: those behind the last that was."""
        for shard in shards:
            head = tier_key_head(namespace, Shard.parse(shard))
            new = deque[tuple[_Block, bytes | None]]()
            for at in range(len(links) - 1, -1, -1):
                block = self._blocks.get(tier_key(head, links[at].prefix_id))
                if block is not None and block.session == session:
                    break
                if block is not None:
                    block.session = session
                    new.appendleft((block, bytes.fromhex(links[at - 1].prefix_id) if at else None))
                if len(new) == _BATCH:
                    break  # what is older was told at an earlier commit, or is told without its session
            yield _merged(
                _stored(block, medium, parent, session) for medium in _MEDIA for block, parent in new if medium in block.media
            )

    async def _anew(self) -> None:
        """Too much came at once: a number is left out, which subscribers notice, and all is told from the beginning."""
        log.warning("more blocks came and went at once than could be told of: all are told anew")
        self._lost = False
        self._number += 1
        self._publish([_CLEARED])
        for block in self._blocks.values():
            block.media.clear()
            block.session = ""
        self._moves.clear()
        for tier in self._tiers:
            keys = [key for key in self._blocks if tier.contains_many([key])[0]]
            for start in range(0, len(keys), _BATCH):
                self._publish(_merged(self._moved((tier.medium, key, 1, None) for key in keys[start : start + _BATCH])))
                await asyncio.sleep(0)
        self._blocks = {key: block for key, block in self._blocks.items() if block.media}

    def _publish(self, events: list[dict[str, Any]]) -> None:
        if events:
            self._say(events)

    def _say(self, events: list[dict[str, Any]]) -> None:
        payload = msgspec.msgpack.encode([self._clock.now(), events, 0])
        self._sockets.say(self._number.to_bytes(8, "big"), payload)
        self._kept.append((self._number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > _KEPT or self._kept_bytes > _KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._number += 1
        self.counts["batches"] += 1
        self.counts["blocks"] += sum(len(event.get("block_hashes", ())) for event in events)


_CLEARED: Final = {"type": "AllBlocksCleared"}
_MEDIA: Final = ("DRAM", "NVME")


def _stored(block: _Block, medium: str, parent: bytes | None = None, session: str = "") -> dict[str, Any]:
    """As vLLM's, and what only a tier knows: `namespace` and `shard`."""
    return {
        "type": "BlockStored",
        "block_hashes": [block.prefix],
        "parent_block_hash": parent,
        "token_ids": [],
        "block_size": block.tokens,
        "lora_id": None,
        "medium": medium,
        "lora_name": None,
        "ownership": OWNER,
        "session_id": session or None,
        "namespace": block.namespace,
        "shard": block.shard,
    }


def _removed(block: _Block, medium: str) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": [block.prefix],
        "medium": medium,
        "ownership": OWNER,
        "namespace": block.namespace,
        "shard": block.shard,
    }


def _merged(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbours that differ in their block alone, or follow each other, as one."""
    found: list[dict[str, Any]] = []
    for event in events:
        last = found[-1] if found else {}
        parent = event.get("parent_block_hash")
        follows = parent == last["block_hashes"][-1] if parent and last else parent is None and not last.get("parent_block_hash")
        if last and follows and all(last.get(key) == event.get(key) for key in _ALIKE):
            last["block_hashes"] += event["block_hashes"]
        else:
            found.append(event)
    return found


_ALIKE: Final = ("type", "medium", "block_size", "session_id", "namespace", "shard")


class _Sockets:
    """ZeroMQ's."""

    def __init__(self, networks: Sequence[str]) -> None:
        self._trusted = trusting(networks)
        self._context = zmq.asyncio.Context()
        self._door = self._context.socket(zmq.REP)
        self._door.bind("inproc://zeromq.zap.01")
        self._plain = zmq.Context(self._context)  # the same one: what is said by these never waits
        self._pub = self._plain.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        for socket in (self._pub, self._replay):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 2 * _KEPT)
            socket.setsockopt(zmq.MAXMSGSIZE, _REQUEST)
            socket.setsockopt(zmq.ZAP_DOMAIN, b"kvtier")

    def bind(self, events: str, replay: str) -> None:
        for socket, where in ((self._pub, events), (self._replay, replay)):
            try:
                if where:
                    socket.bind(where)
            except zmq.ZMQError as error:
                if error.errno == zmq.EADDRINUSE:
                    raise AlreadyExists(f"{where} is in use", remedy="set another node.events") from None
                raise Invalid(f"{where}: {error}", remedy="write node.events like tcp://127.0.0.1:5557") from None

    def say(self, number: bytes, payload: bytes) -> None:
        """To all subscribers; whoever reads too slowly misses it."""
        self._pub.send_multipart([b"", number, payload])

    async def asked(self) -> tuple[bytes, int]:
        """Who wants batches again, and from which number on."""
        while True:
            frames = await self._replay.recv_multipart()
            if len(frames) == 3 and len(frames[2]) == 8:
                return frames[0], int.from_bytes(frames[2], "big")

    async def again(self, client: bytes, number: bytes, payload: bytes) -> None:
        """To one who asked."""
        await self._replay.send_multipart([client, b"", number, payload])

    async def asked_in(self) -> bool:
        """Answer whoever knocks next; whether it may come in. ZeroMQ asks with its ZAP, RFC 27."""
        frames = await self._door.recv_multipart()
        known = len(frames) >= 6 and self._trusted(frames[3].decode())
        status = [b"200", b"OK"] if known else [b"400", b"not in peers.networks"]
        await self._door.send_multipart([b"1.0", frames[1] if len(frames) > 1 else b"", *status, b"", b""])
        return known

    def close(self) -> None:
        self._pub.close(0)
        self._context.destroy(linger=0)
