"""A sealed object: a header, then frames that each verify alone, so that layers open while those behind them still come.

schema/FORMAT.md, section 10, is the specification. Every object has a key of its own, made of the data key and 256 random bits, so
that counting frames is all the nonce there need be: no pair of key and nonce ever comes twice, however many objects a tenant has.

Everything here is synchronous and pure but for the salt. AES releases the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final, TypeAlias

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import Corrupt

MAGIC: Final = b"kvtseal1"
FRAME: Final = 256 << 10
"""Bytes of content in a frame: dear enough that a call costs nothing beside it, and small enough to lie in a core's cache."""
TAG: Final = 16
KEY_ID: Final = 16
SALT: Final = 32
HEADER: Final = len(MAGIC) + KEY_ID + SALT + 8
_DOMAIN: Final = b"kvtier.seal.1"

Arrived: TypeAlias = Callable[[int, int], None]


class UnknownKey(Exception):
    """The object was sealed under a key that is not at hand. Not damage: nobody may repair on the strength of it."""


class DataKey(msgspec.Struct, frozen=True):
    """What a tenant's objects are sealed under.

    Attributes:
        id: 16 random bytes; stands in the clear in every object.
        secret: 32 random bytes.
    """

    id: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"DataKey({self.id.hex()})"


def sealed_bytes(content: int) -> int:
    """How long the sealed object of so many bytes is."""
    return HEADER + content + TAG * max(1, -(-content // FRAME))


def content_bytes(sealed: int) -> int:
    """The inverse of `sealed_bytes`; 0 for a length that no sealed object has."""
    body = sealed - HEADER
    content = body - TAG * -(-body // (FRAME + TAG))
    return content if content > 0 and sealed_bytes(content) == sealed else 0


def seal_into(key: DataKey, salt: bytes, name: bytes, content: memoryview, target: memoryview) -> None:
    """Seal.

    Args:
        key: Under which.
        salt: 32 random bytes, never used before.
        name: What the object is; nobody can pass it off as another.
        content: Bytes.
        target: `sealed_bytes(len(content))` bytes, which do not overlap them.
    """
    head = MAGIC + key.id + salt + len(content).to_bytes(8, "little")
    target[:HEADER] = head
    cipher, bound = _cipher(key, salt), head + name
    for index, (plain, place) in enumerate(_spans(len(content))):
        cipher.encrypt_into(_nonce(index), content[plain[0] : plain[1]], bound, target[place[0] : place[1]])


class Opening:
    """Opens a sealed object as it comes, on the threads that bring it.

    Args:
        sealed: Where its bytes arrive.
        keys: By id.
        name: What was asked for.
        into: Where the content is to be; at least as long as it is.
        arrived: As `kvstore.objects.base.Arrived`: told which bytes of `into` are in place. It raises nothing.
    """

    def __init__(
        self, sealed: memoryview, keys: Mapping[bytes, DataKey], name: bytes, into: memoryview, arrived: Arrived | None = None
    ) -> None:
        self._sealed, self._keys, self._name, self._into, self._tell = sealed, keys, name, into, arrived
        self._lock = threading.Lock()
        self._told = False
        self._begin()

    def _begin(self) -> None:
        self._early: list[tuple[int, int]] = []  # what came before the header was complete
        self._frames: _Frames | None = None
        self._missing: list[int] = []
        self._open: set[int] = set()
        self._error: Exception | None = None
        self._attempt = object()

    def arrived(self, start: int, end: int) -> None:
        """Bytes [start, end) are there; `arrived(0, 0)`: none is, whatever was said. From any thread; it raises nothing."""
        with self._lock:
            if start == end:
                self._begin()
                if self._told and self._tell is not None:
                    self._told = False
                    self._tell(0, 0)
                return
            attempt, frames = self._attempt, self._frames
            ready = self._ready(start, end)
            frames = self._frames
        if frames is None:
            return
        for index in ready:
            try:
                frames.open(index, self._sealed, self._into)
            except Corrupt as error:
                with self._lock:
                    if attempt is self._attempt:
                        self._error = error
                return
            with self._lock:
                if attempt is not self._attempt:
                    return
                self._open.add(index)
                self._told = True
            if self._tell is not None:
                self._tell(*frames.plain(index))

    def finish(self, nbytes: int) -> int:
        """The object is all there, and so long: open what is still closed. Returns how many bytes of `into` are its content.

        Raises:
            Corrupt: It is not that object, or not intact. `into` holds garbage.
            UnknownKey: Its key is not among those that were given.
        """
        frames = self._frames
        if frames is None:
            frames = self._frames = self._read_header(min(nbytes, len(self._sealed)))
        elif self._error is not None:
            raise self._error
        if nbytes != sealed_bytes(frames.content):
            raise Corrupt(f"sealed object: {nbytes} bytes where its header says {sealed_bytes(frames.content)}")
        for index in range(frames.count):
            if index not in self._open:
                frames.open(index, self._sealed, self._into)
        return frames.content

    def _ready(self, start: int, end: int) -> list[int]:
        """Frames that these bytes complete."""
        if self._error is not None:
            return []
        if self._frames is not None:
            return self._completed(self._frames, start, end)
        self._early.append((start, end))
        there = 0
        for first, last in sorted(self._early):
            if first > there:
                break
            there = max(there, last)
        if there < HEADER:
            return []
        try:
            self._frames = self._read_header(there)
        except (Corrupt, UnknownKey) as error:
            self._error = error
            return []
        self._missing = [last - first for _, (first, last) in _spans(self._frames.content)]
        return [index for span in self._early for index in self._completed(self._frames, *span)]

    def _completed(self, frames: _Frames, start: int, end: int) -> list[int]:
        done = []
        start, end = max(start, HEADER) - HEADER, min(end, sealed_bytes(frames.content)) - HEADER
        for index in range(start // (FRAME + TAG), min(frames.count, -(-end // (FRAME + TAG)))):
            first = index * (FRAME + TAG)
            self._missing[index] -= max(0, min(end, first + FRAME + TAG) - max(start, first))
            if not self._missing[index]:
                done.append(index)
        return done

    def _read_header(self, there: int) -> _Frames:
        return frames_of(bytes(self._sealed[: min(there, HEADER)]), self._keys, self._name, len(self._into))


class _Frames:
    """The frames of one object."""

    def __init__(self, head: bytes, key: DataKey, name: bytes) -> None:
        self.content = int.from_bytes(head[-8:], "little")
        self.count = max(1, -(-self.content // FRAME))
        self._cipher, self._bound = _cipher(key, head[len(MAGIC) + KEY_ID : -8]), head + name

    def plain(self, index: int) -> tuple[int, int]:
        """Which bytes of the content a frame holds."""
        return index * FRAME, min((index + 1) * FRAME, self.content)

    def open(self, index: int, sealed: memoryview, into: memoryview, *, base: int = HEADER, start: int = 0) -> None:
        """Open a frame. `sealed` begins at byte `base` of the object less its header, `into` at byte `start` of its content."""
        first, last = self.plain(index)
        at = index * (FRAME + TAG) + base
        try:
            self._cipher.decrypt_into(
                _nonce(index), sealed[at : at + last - first + TAG], self._bound, into[first - start : last - start]
            )
        except InvalidTag:
            raise Corrupt(f"sealed object: frame {index} is not what was sealed under this name") from None


def frames_of(head: bytes, keys: Mapping[bytes, DataKey], name: bytes, most: int) -> _Frames:
    """What a sealed object's header says. `most` bounds its content, before anything is believed.

    Raises:
        Corrupt: It is no such header.
        UnknownKey: Its key is not among these.
    """
    if len(head) < HEADER or not head.startswith(MAGIC):
        raise Corrupt("sealed object: it does not begin as one")
    content = int.from_bytes(head[-8:], "little")
    if content > most:
        raise Corrupt(f"sealed object: {content} bytes where at most {most} were expected")
    key = keys.get(head[len(MAGIC) : len(MAGIC) + KEY_ID])
    if key is None:
        raise UnknownKey(head[len(MAGIC) : len(MAGIC) + KEY_ID].hex())
    return _Frames(head, key, name)


def _spans(content: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """For each frame: its place in the content, and in the sealed object."""
    cuts = [*range(0, content, FRAME), content] if content else [0, 0]
    return [
        ((first, last), (HEADER + first + TAG * index, HEADER + last + TAG * (index + 1)))
        for index, (first, last) in enumerate(pairwise(cuts))
    ]


def _nonce(index: int) -> bytes:
    return index.to_bytes(12, "little")


def _cipher(key: DataKey, salt: bytes) -> AESGCM:
    return AESGCM(blake3(_DOMAIN + salt, key=key.secret).digest())
