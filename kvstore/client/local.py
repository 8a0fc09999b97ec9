"""The transport to a node on this host: calls over a Unix socket, block bytes in shared memory.

A read hands out views of the node's arena; nothing is copied. A write is copied once into this connection's window, and once
more by the node, behind the caller's back. When the node goes away the next call connects again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Self

import msgspec

from kvstore import api, codec, wire
from kvstore.blocks import Blocks
from kvstore.client.connection import CONNECT_S, Connection
from kvstore.client.fork import Birth
from kvstore.client.handshake import Met, meet
from kvstore.client.threads import on_thread
from kvstore.client.transport import Fill, block_patience, check_batch, no_answer, patience
from kvstore.errors import Closed, Invalid, KVTierError, Unavailable
from kvstore.ids import Link, Namespace, Shard, pack_prefixes

RETRY_S: Final = 0.5  # after a failed attempt to connect, calls fail at once for that long
SPACE_S: Final = 10.0  # a write waits that long for room in the window; then what is left is dropped
PIECES: Final = 4  # of the window: while the node takes one over, the next is filled


class LocalTransport:
    """See :class:`kvstore.client.transport.Transport`."""

    def __init__(self, path: str, tenant: str) -> None:
        self._path, self._tenant = path, tenant
        self._birth = Birth()
        self._closed = False
        self._connection: Connection | None = None
        self._connecting = asyncio.Lock()
        self._retry_at, self._refused = 0.0, ""
        self._known: dict[str, api.PutNamespace] = {}  # said again to a node that was started anew

    @classmethod
    async def open(cls, path: str, *, tenant: str = "default") -> Self:
        """Connect.

        Raises:
            Unavailable: No node listens at `path`.
            Denied: This user may not act for the tenant.
            Unsupported: The node's version is too far away (kind `version_mismatch`).
        """
        transport = cls(path, tenant)
        await transport._connected()
        return transport

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """See `Transport`."""
        connection = await self._connected()
        answer = await _call(connection, name, request)
        if isinstance(request, api.PutNamespace):
            self._known[request.namespace] = request
        return answer

    async def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: api.Tier) -> Blocks:
        """See `Transport`."""
        check_batch(links)
        connection = await self._connected()
        packed, tokens = pack_prefixes([link.prefix_id for link in links]), [link.tokens for link in links]
        wanted, part = namespace.id, str(shard)
        try:
            answer = await connection.ask(
                lambda number: wire.Get(number, wanted, part, packed, tokens, deadline_ms, reach),
                block_patience(deadline_ms),
                connection.take_back,
            )
        except TimeoutError:
            return Blocks([], "timeout")
        if not isinstance(answer, wire.Leased):
            raise Unavailable("the node answered a read with something else")
        return connection.lend(answer)

    async def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """See `Transport`."""
        check_batch(links)
        blocks = [_Block(link, codec.layout(namespace, shard, link.tokens).payload_bytes) for link in links]
        connection = await self._connected()
        largest = max((block.size for block in blocks), default=0)
        if largest > connection.space.size:
            raise Invalid(
                f"a block of {largest} bytes does not fit the write window of {connection.space.size}: raise [dram] window"
            )
        return await _Put(connection, namespace.id, str(shard), blocks, fill).run()

    async def meet(self) -> Met:
        """A second connection, for a thread of its own. Raises as `open`."""
        await self._connected()  # so that a node that was started anew knows the namespaces
        return await meet(self._path, self._tenant, timeout_s=CONNECT_S)

    async def aclose(self) -> None:
        """See `Transport`."""
        self._closed = True
        connection, self._connection = self._connection, None
        if connection is not None and self._birth.here:
            await connection.aclose()

    async def _connected(self) -> Connection:
        self._check()
        if self._connection is not None and self._connection.lost is None:
            return self._connection
        async with self._connecting:
            self._check()
            if self._connection is None or self._connection.lost is not None:
                self._connection = await self._connect()
            return self._connection

    def _check(self) -> None:
        self._birth.check()
        if self._closed:
            raise Closed("this client is closed")

    async def _connect(self) -> Connection:
        now = asyncio.get_running_loop().time()
        if now < self._retry_at:
            raise Unavailable(self._refused)
        if self._connection is not None:
            await self._connection.aclose()
        try:
            connection = await Connection.open(self._path, self._tenant)
        except KVTierError as error:
            self._retry_at, self._refused = now + RETRY_S, error.message
            raise
        try:
            for request in list(self._known.values()):
                await _call(connection, "put_namespace", request)
        except BaseException:
            await connection.aclose()
            raise
        return connection


async def _call(connection: Connection, name: str, request: api.Request) -> api.Answer:
    body = msgspec.Raw(msgspec.msgpack.encode(request))
    try:
        answer = await connection.ask(lambda number: wire.Ask(number, name, body), patience(name, request))
    except TimeoutError:
        raise no_answer(name, "the node did not answer in time", late=True) from None
    except Unavailable:
        if connection.lost is not None:
            raise no_answer(name, "the connection was lost before the answer came", late=False) from None
        raise
    if not isinstance(answer, wire.Reply):
        raise Unavailable(f"{name}: the node answered with something else")
    kind: type[api.Answer] = api.BY_NAME[name].answer
    return msgspec.msgpack.decode(answer.body, type=kind)


class _Block(msgspec.Struct, frozen=True):
    """What is to be written, and the length of its payload."""

    link: Link
    size: int


class _Piece(msgspec.Struct, frozen=True):
    """Consecutive blocks that are filled and published together, and where each lies in the window."""

    first: int
    blocks: Sequence[_Block]
    offsets: Sequence[int]


class _Put:
    """One write: blocks go through the window in pieces, in order."""

    def __init__(self, connection: Connection, namespace: str, shard: str, blocks: Sequence[_Block], fill: Fill) -> None:
        self._connection, self._namespace, self._shard = connection, namespace, shard
        self._blocks, self._fill = blocks, fill

    async def run(self) -> list[bool]:
        """Whether each block was taken."""
        published: list[asyncio.Task[list[bool]]] = []
        taken: list[bool] = []
        first = 0
        try:
            while first < len(self._blocks) and (piece := await self._room(first)) is not None:
                await self._filled(piece)
                published.append(asyncio.create_task(self._publish(piece)))
                first += len(piece.blocks)
            for task in published:
                taken += await asyncio.shield(task)
        finally:
            for task in published:  # what was filled is published, also when nobody waits for it any more
                task.add_done_callback(_looked_at)
        return taken + [False] * (len(self._blocks) - len(taken))

    async def _room(self, first: int) -> _Piece | None:
        """Room for a piece: its first block waits for it, the others take what is free. So nobody holds room while waiting."""
        space, size = self._connection.space, self._blocks[first].size
        offset = await space.take(size, SPACE_S)
        if offset is None:
            self._connection.check()
            return None
        offsets, left = [offset], space.size // PIECES - size
        for block in self._blocks[first + 1 :]:
            offset = space.take_now(block.size) if block.size <= left else None
            if offset is None:
                break
            offsets.append(offset)
            left -= block.size
        return _Piece(first, self._blocks[first : first + len(offsets)], offsets)

    async def _filled(self, piece: _Piece) -> None:
        try:
            await on_thread(self._copy_in, piece)
        except BaseException:
            self._free(piece)
            raise

    def _copy_in(self, piece: _Piece) -> None:
        window, pages = self._connection.window, self._connection.window_pages
        end = max(offset + block.size for offset, block in zip(piece.offsets, piece.blocks, strict=True))
        if not pages.ready(end):
            pages.fill(end)
        for index, (offset, block) in enumerate(zip(piece.offsets, piece.blocks, strict=True), piece.first):
            self._fill(index, window[offset : offset + block.size])

    async def _publish(self, piece: _Piece) -> list[bool]:
        packed = pack_prefixes([block.link.prefix_id for block in piece.blocks])
        extents = [(block.link.tokens, offset, block.size) for block, offset in zip(piece.blocks, piece.offsets, strict=True)]
        try:
            answer = await self._connection.ask(
                lambda number: wire.Publish(number, self._namespace, self._shard, packed, extents),
                block_patience(0),
                drained=lambda: self._free(piece),
            )
        except TimeoutError:
            raise Unavailable("the node did not take over what was published in time", kind="timeout") from None
        if not isinstance(answer, wire.Published) or len(answer.taken) != len(extents):
            raise Unavailable("the node answered a publication with something else")
        return answer.taken

    def _free(self, piece: _Piece) -> None:
        for offset, block in zip(piece.offsets, piece.blocks, strict=True):
            self._connection.space.give(offset, block.size)


def _looked_at(task: asyncio.Task[list[bool]]) -> None:
    """Spare asyncio its report of an error that nobody awaited."""
    if not task.cancelled():
        task.exception()
