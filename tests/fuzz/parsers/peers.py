"""What nodes of a mesh say to each other, and what their directory holds."""

import msgspec

from kvstore.errors import Invalid
from kvstore.ids import Shard
from kvstore.mesh import frames
from kvstore.mesh.entries import WIDTH, pack, unpack
from kvstore.repo.testing import tiny
from kvstore.server import peering
from parsers.target import Target, same
from tiering import Miss


def peer_frames(data):
    whole = data[: frames.FRAME_BYTES].ljust(frames.FRAME_BYTES, b"\0")
    try:
        frame = frames.parse_frame(whole)
    except frames.Malformed:
        pass
    else:
        miss = frame.miss
        again = (
            frames.found(frame.place, frame.nbytes, coded=frame.coded) if miss is None else frames.missed(frame.place, miss)[:-2]
        )
        same(again, whole)
    lives = unpack(data)
    if len(lives) * WIDTH == len(data):
        same(pack(lives), data)


def peer_requests(data):
    head, _, body = data.partition(b"\r\n\r\n")
    try:
        path, length = peering._parsed(head)
        assert isinstance(path, str)
        assert 0 <= length <= frames.MOST_BODY
    except frames.Malformed:
        pass
    try:
        ask = msgspec.msgpack.decode(body, type=frames.Ask)
        same(msgspec.msgpack.decode(msgspec.msgpack.encode(ask), type=frames.Ask), ask)
        Shard.parse(ask.shard)
        assert ask.namespace.id
    except (msgspec.MsgspecError, Invalid):
        pass


_ASK = msgspec.msgpack.encode(frames.Ask(namespace=tiny(), shard="t0of1.p0of1.g0", prefixes=b"\xcd" * 32, tokens=(4,)))
TARGETS = (
    Target(
        "peer_frames",
        peer_frames,
        (
            frames.found(3, 4096, coded=True),
            frames.found(0, 4096, coded=False),
            frames.missed(1, next(iter(Miss))),
            pack([7, 1 << 39]),
        ),
        (b"\r\n", b"0000000010"),
        256,
    ),
    Target(
        "peer_requests",
        peer_requests,
        (frames.request(frames.BLOCKS, "h:1", _ASK), frames.request(frames.HOLDS, "h", msgspec.msgpack.encode(bytes(64)))),
        (
            b"\r\n",
            b"POST ",
            b" HTTP/1.1",
            b"Content-Length: ",
            b"Content-Type: ",
            frames.MEDIA_TYPE.encode(),
            *map(msgspec.msgpack.encode, (*frames.Ask.__struct_fields__, *tiny().__struct_fields__)),
        ),
    ),
)
