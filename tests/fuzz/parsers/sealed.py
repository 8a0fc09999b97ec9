"""Sealed objects, as they come from a bucket or a disk that nobody trusts."""

import itertools

from kvstore.errors import Corrupt
from kvstore.sealing.frames import FRAME, HEADER, TAG, DataKey, Opening, UnknownKey, content_bytes, seal_into, sealed_bytes
from parsers.target import Target, same

_KEY = DataKey(b"i" * 16, b"s" * 32)
_KEYS = {_KEY.id: _KEY}
_LARGE = bytes(range(256)) * (FRAME // 256) + b"and more"  # two frames
_MOST = 1 << 20


def _sealed(content):
    target = memoryview(bytearray(sealed_bytes(len(content))))
    seal_into(_KEY, b"r" * 32, b"name", memoryview(content), target)
    return bytes(target)


_OBJECTS = tuple((content, _sealed(content)) for content in (b"some content", _LARGE))


def sealed_object(data):
    """Any bytes as an object; then a good one that comes in the order that they tell, and with a change that they tell."""
    _opened(data, [(0, len(data))])
    body = len(data) - HEADER
    assert not content_bytes(len(data)) or sealed_bytes(content_bytes(len(data))) == len(data), body
    if len(data) < 4:
        return
    content, good = _OBJECTS[data[0] % 2]
    spans = _spans(data[4:], len(good))
    same(_opened(good, spans), content)
    at = int.from_bytes(data[1:4], "little") % (8 * len(good))
    bad = bytearray(good)
    bad[at // 8] ^= 1 << at % 8
    assert _opened(bytes(bad), spans) is None, f"bit {at} was flipped, and nobody saw it"


def _opened(stored, spans):
    """What is in it; None where it is refused."""
    room, into, told = memoryview(bytearray(len(stored))), memoryview(bytearray(_MOST)), []
    opening = Opening(room, _KEYS, b"name", into, lambda start, end: told.append((start, end)))
    for start, end in spans:
        room[start:end] = stored[start:end]
        opening.arrived(start, end)
    room[:] = stored
    try:
        nbytes = opening.finish(len(stored))
    except (Corrupt, UnknownKey):
        return None
    assert all(0 <= start < end <= nbytes for start, end in told if end)
    return bytes(into[:nbytes])


def _spans(order, nbytes):
    """A partition of the object, shuffled; some of it is left out, and comes without being told."""
    cuts = sorted({0, nbytes, *(nbytes * byte // 256 for byte in order[:16])})
    spans = [(start, end) for start, end in itertools.pairwise(cuts) if start < end]
    for index, byte in enumerate(order[16 : 16 + len(spans)]):
        other = byte % len(spans)
        spans[index], spans[other] = spans[other], spans[index]
    return spans[: len(spans) - (len(order) % 2)]


TARGETS = (
    Target(
        "sealed_object",
        sealed_object,
        (*(stored[:2048] for _, stored in _OBJECTS), b"\1\0\0\0abcdefgh"),
        (b"kvtseal1", _KEY.id, bytes(TAG)),
    ),
)
