"""The blocking client's short way to a node on this host: reads, look-ups and writes on the calling thread.

What the node cannot answer at once (`Later`), and whatever goes wrong, takes the long way instead, over the loop; the answer is
the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from kvstore import api, codec, wire
from kvstore.blocks import Blocks
from kvstore.client.ahead import Kind
from kvstore.client.fork import Birth
from kvstore.client.handshake import Met
from kvstore.client.line import SMALL, Extent, Line
from kvstore.client.transport import Fill, block_patience, check_batch, patience
from kvstore.errors import KVTierError, Unavailable
from kvstore.ids import Link, Namespace, Shard, pack_prefixes

SPACE_S: Final = 10.0  # a write waits that long for room in the window; then what is left is dropped
PIECE: Final = 4 << 20  # filled and published together: small pieces stay in the cache, and let the node begin early
_HEAD: Final = 128  # bytes of a message around its body, at most
_POLL_S: Final = 0.001  # another thread may hear that there is room
_MOST: Final = 4096  # blocks; more take the long way
_found: Final = msgspec.msgpack.Decoder(api.Found)


class Asked:
    """A look-up that whoever asked comes back for: nothing here waits.

    Args:
        line: The way to the node.
        body: The look-up.
    """

    def __init__(self, line: Line, body: msgspec.Raw) -> None:
        self._line, self._body = line, body
        self._number: int | None = None

    def send(self) -> None:
        """Ask, unless it was. Where that must wait, the next `poll` tries again. Raises as `poll`."""
        if self._number is None:
            self._number = self._line.begin(lambda number: wire.Ask(number, "lookup", self._body, wait=False))

    def poll(self) -> api.Found | None:
        """The answer, None while there is none.

        Raises:
            Unavailable: The node has to wait for it (kind `timeout`), or is gone: ask it in another way.
            KVTierError: Whatever the node answered.
        """
        self.send()
        said = None if self._number is None else self._line.answer(self._number)
        if said is None:
            return None
        self._number = None
        if not isinstance(said, wire.Reply):
            raise Unavailable("the node does not know at once", kind="timeout")
        return _found.decode(said.body)

    def wait(self, seconds: float) -> None:
        """Sleep until the node says something, or that long, in whole milliseconds. Raises `Unavailable`."""
        self._line.listen(seconds)

    def drop(self) -> None:
        """Nobody comes back for it."""
        if self._number is not None:
            self._line.drop(self._number)
            self._number = None


class Direct:
    """One line, opened when it is first needed and again when it was lost.

    Args:
        meet: Connects, on whatever loop.
        later: Calls a function after so many seconds, on some thread.
    """

    def __init__(self, meet: Callable[[], Met], later: Callable[[float, Callable[[], None]], None]) -> None:
        self._meet, self._later = meet, later
        self._birth = Birth()
        self._opening = threading.Lock()
        self._line: Line | None = None
        self._closed = False

    def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: api.Tier) -> Blocks | None:
        """All of these blocks, from memory; None where that takes the long way."""
        if len(links) > _MOST or (line := self._ready()) is None:
            return None
        packed, tokens = pack_prefixes([link.prefix_id for link in links]), [link.tokens for link in links]
        named, part = namespace.id, shard.text
        try:
            answer = line.ask(
                lambda number: wire.Get(number, named, part, packed, tokens, deadline_ms, reach, wait=False),
                block_patience(deadline_ms),
            )
            return line.lend(answer) if isinstance(answer, wire.Leased) else None
        except TimeoutError:
            return Blocks([], "timeout")
        except KVTierError:
            if line.lost is None:
                raise
            return None
        except KeyboardInterrupt:
            line.interrupted()
            raise

    def lookup(self, request: api.Lookup) -> api.Found | None:
        """The answer, from the node's memory; None where that takes the long way."""
        if len(request.prefix_ids) > _MOST or (line := self._ready()) is None:
            return None
        body = msgspec.Raw(msgspec.msgpack.encode(request))
        try:
            answer = line.ask(lambda number: wire.Ask(number, "lookup", body, wait=False), patience("lookup", request))
        except TimeoutError:
            return api.Found(run=0, tiers=[])
        except KVTierError:
            if line.lost is None:
                raise
            return None
        except KeyboardInterrupt:
            line.interrupted()
            raise
        return _found.decode(answer.body) if isinstance(answer, wire.Reply) else None

    def ask(self, request: api.Lookup) -> Asked | None:
        """As `lookup`, without waiting; None where it takes the long way."""
        line = self._line
        if line is None or line.lost is not None or not self._birth.here:
            return None
        body = msgspec.msgpack.encode(request)
        if len(body) > SMALL - _HEAD:
            return None
        asked = Asked(line, msgspec.Raw(body))
        try:
            asked.send()
        except KVTierError:
            return None
        return asked

    def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool] | None:
        """Whether each block was taken; None where that takes the long way. `fill` is called on this thread."""
        check_batch(links)
        if (line := self._ready()) is None:
            return None
        sizes = [codec.layout(namespace, shard, link.tokens).payload_bytes for link in links]
        if max(sizes, default=0) > len(line.window):
            return None  # the long way says what to do about it
        taken: list[bool] = []
        try:
            while len(taken) < len(links):
                first = len(taken)
                line.hear()
                extents = _room(line, sizes[first:])
                if not extents:
                    break
                piece = _Piece(line, namespace, shard, first, links[first : first + len(extents)], extents)
                taken += piece.put(fill)
        except KeyboardInterrupt:
            line.interrupted()
            raise
        return taken + [False] * (len(links) - len(taken))

    def close(self) -> None:
        """Let go of the line, and of every lease."""
        self._closed = True
        line = self._line
        if line is not None and self._birth.here:
            line.lost = line.lost or Unavailable("the client closed the connection")
            line.close()

    def _ready(self) -> Line | None:
        """A line; None where it must be opened by a thread that is not this one, or cannot be."""
        line = self._line
        if line is not None and line.lost is None:
            self._birth.check()
            return line
        if self._closed or not self._birth.here:
            return None  # the long way says so
        with self._opening:
            if self._line is None or self._line.lost is not None:
                try:
                    self._line = Line(self._meet(), self._later)
                except KVTierError:
                    return None
            return self._line


def _room(line: Line, sizes: Sequence[int]) -> list[Extent]:
    """Extents for the next few blocks, at least one; none where there was no room in time."""
    ends = time.monotonic() + SPACE_S
    while not (extents := line.take_room(sizes, PIECE)) and time.monotonic() < ends:
        line.listen(_POLL_S)
    return extents


class _Piece:
    """Blocks that are filled and published together: the first of them is number `first` of the write."""

    def __init__(
        self, line: Line, namespace: Namespace, shard: Shard, first: int, links: Sequence[Link], extents: Sequence[Extent]
    ) -> None:
        self._line, self._first, self._links, self._extents = line, first, links, extents
        self._namespace, self._shard = namespace.id, shard.text
        tokens = {link.tokens for link in links}
        self._kind = (self._namespace, self._shard, tokens.pop()) if len(tokens) == 1 else None

    def put(self, fill: Fill) -> list[bool]:
        """Whether each block was taken. Where the node has promised that, nothing is said to it before they are filled."""
        line, now = self._line, time.monotonic()
        self._ahead = line.ahead.wanted(len(self._links), self._extents[0][1], now) if self._kind else 0
        try:
            if self._kind is not None and line.ahead.claim(self._kind, len(self._links), now):
                return self._promised(fill, self._kind)
            return self._announced(fill)
        except TimeoutError:
            raise Unavailable("the node did not take over what was published in time", kind="timeout") from None

    def _promised(self, fill: Fill, kind: Kind) -> list[bool]:
        line, extents = self._line, self._extents
        try:
            self._fill(fill)
        except BaseException:
            line.ahead.waive(len(extents))
            line.give_room(extents)
            raise
        make = self._message(filled=True)
        return line.hand_over(make, extents, kind, block_patience(0))

    def _announced(self, fill: Fill) -> list[bool]:
        line, good = self._line, False
        number = line.publish(self._message(filled=False), self._extents, self._kind)
        try:
            self._fill(fill)
            good = True
        finally:
            taken = line.filled(number, good=good, patience_s=block_patience(0))
        return taken

    def _message(self, *, filled: bool) -> Callable[[int], wire.Publish]:
        packed = pack_prefixes([link.prefix_id for link in self._links])
        blocks = [(link.tokens, offset, size) for link, (offset, size) in zip(self._links, self._extents, strict=True)]
        return lambda number: wire.Publish(number, self._namespace, self._shard, packed, blocks, filled, self._ahead)

    def _fill(self, fill: Fill) -> None:
        line = self._line
        end = max(offset + size for offset, size in self._extents)
        if not line.window_pages.ready(end):
            line.window_pages.fill(end)
        for index, (offset, size) in enumerate(self._extents, self._first):
            fill(index, line.window[offset : offset + size])
