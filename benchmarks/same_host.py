"""Memory of a node on this host, from another process: copies, leases, writes, look-ups."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from _cases import MIB, Case

import kvstore
from kvstore import codec
from kvstore.client.sync import SyncClient
from kvstore.ids import Link, Namespace, Shard, chain

CASES: Final = ("memcpy_out", "dram_get_copy", "dram_lease", "dram_lease_512", "memcpy_in", "dram_put", "lookup")
SHARD: Final = Shard()
SET: Final = 512 * MIB  # of distinct bytes: less would sit in the cache
BURST: Final = 256 * MIB  # that an engine writes before it computes again
MANY: Final = 512
_LEASES: Final = 500


@contextmanager
def cases(size: int, folder: Path) -> Iterator[Mapping[str, Case]]:
    """Nodes in processes of their own: writes have one for themselves, for they evict. The client is the blocking one."""
    with (
        node(folder, "reads", SET + 64 * MIB) as (full, reader),
        node(folder, "writes", 3 * BURST) as (empty, writer),
        kvstore.open_sync(full) as reads,
        kvstore.open_sync(empty) as writes,
    ):
        yield {**_reads(reads, size, reader), **_names(reads, reader), **_writes(writes, size, writer)}


def _reads(kv: SyncClient, size: int, pid: int) -> Mapping[str, Case]:
    """One block a call: copied out into the caller's buffer, and leased alone."""
    space = _namespace(size)
    links = chain(space, np.arange(SET // size, dtype=np.uint32))
    kv.put(space, SHARD, links, lambda index, room: room.__setitem__(slice(None), bytes([index % 251]) * room.nbytes))
    plan = codec.layout(space, SHARD, 1)
    source, target = _memory(SET), _memory(SET)
    nbytes, header = plan.payload_bytes, plan.header_bytes
    places = [target[i * size : i * size + nbytes] for i in range(len(links))]

    def get(i: int) -> None:
        with kv.get(space, SHARD, [links[i]]) as blocks:
            assert blocks.copy_into([places[i]], skip=header) == 1

    def lease(i: int) -> None:
        with kv.get(space, SHARD, [links[i % len(links)]]) as blocks:
            assert len(blocks) == 1

    return {
        "memcpy_out": Case(_memcpy(target, source, size, nbytes), nbytes, len(links)),
        "dram_get_copy": Case(get, nbytes, len(links), servers=(pid,)),
        "dram_lease": Case(lease, nbytes, _LEASES, servers=(pid,)),
    }


def _writes(kv: SyncClient, size: int, pid: int) -> Mapping[str, Case]:
    """One block a call, until the call is over: the caller's buffer is its own again. The node ends its part untimed."""
    space = _namespace(size, "writes")
    source, target = _memory(BURST), _memory(BURST)
    nbytes = codec.layout(space, SHARD, 1).payload_bytes
    into, out_of = target.ctypes.data, source.ctypes.data
    turn = [0]

    def links() -> list[Link]:
        return chain(space, np.arange(BURST // size, dtype=np.uint32) + np.uint32(turn[0] * 4096))

    now = [links()]

    def plain(i: int) -> None:
        ctypes.memmove(into + i * size, out_of + i * size, nbytes)

    def put(i: int) -> None:
        def fill(_: int, room: memoryview) -> None:
            np.copyto(np.frombuffer(room, np.uint8), source[i * size : i * size + nbytes])

        assert kv.put(space, SHARD, now[0][i : i + 1], fill) == [True]

    def after() -> None:
        kv.get(space, SHARD, now[0], reach="dram").release()  # waits until the node has copied and digested it all
        turn[0] += 1
        now[0] = links()

    return {
        "memcpy_in": Case(_memcpy(target, source, size, nbytes), nbytes, BURST // size),
        "dram_put": Case(put, nbytes, BURST // size, after=after, servers=(pid,)),
    }


def _names(kv: SyncClient, pid: int) -> Mapping[str, Case]:
    """Many blocks in one call, whatever their size: leased, and looked up."""
    space = _namespace(16 * 1024, "names")
    links = chain(space, np.arange(MANY, dtype=np.uint32))
    kv.put(space, SHARD, links, lambda index, room: room.__setitem__(slice(None), bytes([index % 251]) * room.nbytes))
    prefixes = [link.prefix_id for link in links]

    def lease(_: int) -> None:
        with kv.get(space, SHARD, links) as blocks:
            assert len(blocks) == MANY

    def look(_: int) -> None:
        assert kv.lookup(namespace=space, prefix_ids=prefixes).run == MANY

    each = MANY * codec.layout(space, SHARD, 1).payload_bytes
    return {
        "dram_lease_512": Case(lease, each, _LEASES, servers=(pid,)),
        "lookup": Case(look, each, _LEASES, servers=(pid,)),
    }


def _memcpy(target: np.ndarray, source: np.ndarray, step: int, nbytes: int) -> Callable[[int], None]:
    """Copies `nbytes` at every multiple of `step`."""

    def run(i: int) -> None:
        ctypes.memmove(target.ctypes.data + i * step, source.ctypes.data + i * step, nbytes)

    return run


def _namespace(size: int, name: str = "reads") -> Namespace:
    """Blocks of one token and `size` bytes, header included."""
    return Namespace(model=name, revision="1", layers=1, page_bytes=size - 8192, layout="benchmark", block_tokens=1)


def _memory(nbytes: int) -> np.ndarray:
    """In large pages where the system gives them, as an engine's pool is."""
    memory = mmap.mmap(-1, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    array[:] = 1
    return array


@contextmanager
def node(folder: Path, name: str, dram: int) -> Iterator[tuple[str, int]]:
    """A node with memory alone, as `kvtier serve` runs it: its URL and its process."""
    command = [str(Path(sys.executable).with_name("kvtier")), "serve", "--format", "json"]
    told = {"KVTIER_NODE_SOCKET": str(folder / f"{name}.sock"), "KVTIER_NODE_LISTEN": "", "KVTIER_DRAM_SIZE": str(dram)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **told})
    try:
        assert process.stdout is not None
        ready = msgspec.json.decode(process.stdout.readline(), type=dict[str, str | int])
        yield str(ready["url"]), process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
