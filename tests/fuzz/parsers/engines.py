"""What engines tell of their caches, and traces that are replayed."""

import os
import tempfile
from pathlib import Path

import msgspec

from kvstore.errors import Invalid
from kvstore.mesh.engine_events import decode
from kvstore.mesh.replay_trace import BLOCK_TOKENS, read
from kvstore.mesh.residency import Residency
from kvstore.repo.testing import tiny
from parsers.target import Target

_NS = tiny(block_tokens=16)


def engine_events(data):
    try:
        batch = decode(data)
    except Invalid:
        return
    held = set()

    def told(more, fewer):
        held.update(more)
        held.difference_update(fewer)

    try:
        residency = Residency(_NS, told)
        residency.apply(batch)
        residency.apply(batch)
    except Invalid:  # a block size that does not fit ours
        return
    residency.forget()
    assert not held, "blocks are told of that were forgotten"


def trace(data):
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as file:
        file.write(data)
        file.flush()
        try:
            found = read(Path(file.name))
        except Invalid:
            return
    assert found == sorted(found, key=lambda one: one.at_s)
    for one in found:
        assert all(len(key) == 32 for key in one.keys)
        assert len(one.keys) <= -(-one.tokens // BLOCK_TOKENS)


_STORED = {
    "type": "BlockStored",
    "block_hashes": [1, b"two"],
    "parent_block_hash": None,
    "token_ids": list(range(32)),
    "block_size": 16,
    "medium": "GPU",
    "extra_keys": [None, ["salt"]],
}
_BATCHES = (
    [1.5, [["BlockStored", [1], None, list(range(16)), 16, None, "GPU", None, None]], 0],
    [
        1.5,
        [
            ["BlockStored", [2], 1, list(range(16)), 16, None, "GPU", None, [["salt"]]],
            ["BlockRemoved", [2], "GPU"],
            ["AllBlocksCleared"],
        ],
        1,
    ],
    {
        "ts": 1.0,
        "events": [_STORED, {"type": "BlockRemoved", "block_hashes": [1]}, {"type": "AllBlocksCleared"}],
        "data_parallel_rank": 2,
    },
)
_TRACE = b'{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}\n'
TARGETS = (
    Target(
        "engine_events",
        engine_events,
        tuple(map(msgspec.msgpack.encode, _BATCHES)),
        tuple(
            map(
                msgspec.msgpack.encode,
                (*_STORED, "BlockStored", "BlockRemoved", "AllBlocksCleared", "GPU", "CPU", "group_idx", None, 1 << 63, -1),
            )
        ),
    ),
    Target(
        "trace",
        trace,
        (_TRACE + b"\n" + _TRACE.replace(b"27482", b"3"), b'{"timestamp":0,"input_length":1,"output_length":0,"hash_ids":[]}'),
        (
            b"{",
            b"}",
            b"[",
            b"]",
            b",",
            b'"timestamp":',
            b'"input_length":',
            b'"output_length":',
            b'"hash_ids":',
            b"\n",
            b"9223372036854775807",
        ),
    ),
)
