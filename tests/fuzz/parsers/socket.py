"""What an engine's process says on the node's socket, however it is cut, and what the node answers."""

import contextlib

import msgspec

from kvstore import api, wire
from kvstore.errors import Corrupt, Invalid, Problem
from kvstore.server.connection import Connection, _decoded
from parsers.target import Target, same

_DECODERS = {call.name: msgspec.msgpack.Decoder(call.request) for call in api.CALLS}
_CALLS = tuple(_DECODERS)


class _Open:
    """A connection that is not over."""

    def done(self):
        return False


def _parts(data):
    """A connection that only takes its input apart."""
    connection = object.__new__(Connection)
    connection._input, connection._stalled, connection._over, connection._error = bytearray(), None, _Open(), None
    taken = []
    connection._take = taken.append
    connection._end = lambda error: setattr(connection, "_error", type(error))
    for part in data:
        if connection._error is None:
            connection.data_received(part)
    return taken, connection._error


def socket_stream(data):
    """The first byte says how it is cut."""
    cut, stream = (data[0] or 1, data[1:]) if data else (1, b"")
    whole = _parts([stream])
    assert whole[1] in {None, Corrupt}
    pieces = _parts([stream[at : at + cut] for at in range(0, len(stream), cut)])
    same([list(map(_spelled, taken)) for taken, _ in (whole,)], [list(map(_spelled, taken)) for taken, _ in (pieces,)])
    same(whole[1], pieces[1])
    for message in whole[0]:
        if isinstance(message, wire.Ask) and message.call in _DECODERS:
            with contextlib.suppress(Invalid):
                _decoded(_DECODERS[message.call], message)


def _spelled(message):
    framed = wire.frame(message)
    same(wire.frame(wire.parse_to_node(framed[4:])), framed)
    return framed


def socket_answers(data):
    try:
        found = wire.parse_to_client(data)
    except Corrupt:
        return
    framed = wire.frame(found)
    same(wire.frame(wire.parse_to_client(framed[4:])), framed)
    if isinstance(found, wire.Fault):
        found.problem.error()


def socket_requests(data):
    """The first byte says which call; the rest is its request."""
    name = _CALLS[data[0] % len(_CALLS) if data else 0]
    try:
        request = _decoded(_DECODERS[name], wire.Ask(1, name, msgspec.Raw(data[1:])))
    except Invalid:
        return
    again = _DECODERS[name].decode(msgspec.msgpack.encode(request))
    same(msgspec.msgpack.encode(again), msgspec.msgpack.encode(request))  # not the values: NaN is not itself


_HEX, _SHARD = "ab" * 32, "t0of1.p0of1.g0"
_MESSAGES = (
    wire.Ask(1, "stats", msgspec.Raw(b"\x80")),
    wire.Ask(2, "lookup", msgspec.Raw(msgspec.msgpack.encode({"namespace": _HEX, "prefix_ids": [_HEX], "shards": [_SHARD]}))),
    wire.Get(2, _HEX, _SHARD, b"\xcd" * 32, [16], 250, "bucket"),
    wire.Publish(3, _HEX, _SHARD, b"\xcd" * 32, [(16, 0, 4096)], False, 3),
    wire.Filled(3, True),
    wire.Release([(1, 3)]),
    wire.Cancel(9),
)
_ANSWERS = (
    wire.Welcome(2, "0.1.0", "a", 1 << 20, 1 << 20),
    wire.Reply(1, msgspec.Raw(b"\x80")),
    wire.Leased(2, 1, [0], [4096], ""),
    wire.Published(3, [True], False, 2),
    wire.Drained(3),
    wire.Later(4),
    wire.Fault(5, Problem(type="t", title="t", status=400, detail="d", kind="invalid", facts={"a": 1})),
)
_WORDS = tuple(msgspec.msgpack.encode(type(each).__name__) for each in (*_MESSAGES, *_ANSWERS))
_FIELDS = tuple({msgspec.msgpack.encode(field) for call in api.CALLS for field in call.request.__struct_fields__})
TARGETS = (
    Target(
        "socket_stream",
        socket_stream,
        (*tuple(bytes([7]) + wire.frame(each) for each in _MESSAGES), b"\x03" + b"".join(map(wire.frame, _MESSAGES))),
        _WORDS,
    ),
    Target("socket_answers", socket_answers, tuple(wire.frame(each)[4:] for each in _ANSWERS), _WORDS),
    Target(
        "socket_requests",
        socket_requests,
        tuple(bytes([index]) + b"\x82\xa2id\xa1s\xa9namespace\xa1n" for index in range(len(_CALLS))),
        _FIELDS,
    ),
)
