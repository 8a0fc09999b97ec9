"""Memory: a plain copy, and a node's DRAM tier read by another process, this one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from kvstore import codec, open_sync
from kvstore.cli.bench.results import MIB, Ask, Line, timed
from kvstore.cli.machine import memory_limit
from kvstore.cli.output import size
from kvstore.client import SyncClient
from kvstore.errors import Invalid, Unavailable
from kvstore.ids import Namespace, Shard, chain

# The node asks to be ended with us (PR_SET_PDEATHSIG), so that nothing is left behind however we end.
_NODE: Final = "import ctypes; ctypes.CDLL(None).prctl(1, 9); from kvstore.cli.main import main; main()"
_MANY: Final = 512
_HEADER: Final = 8192  # of a raw object, at most, for a block as small as these


def room_needed(ask: Ask) -> int:
    """Bytes of memory that this part takes: the node's arena and window, and two buffers here."""
    return 3 * ask.size + 256 * MIB


def refuse_more_than_there_is(ask: Ask) -> None:
    """Raises `Invalid` where it would not fit."""
    left, by = memory_limit()
    if room_needed(ask) > left:
        raise Invalid(
            f"measuring with {size(ask.size)} takes {size(room_needed(ask))} of memory, and {by} leaves {size(left)}",
            remedy="a smaller --size",
        )


def measure(ask: Ask, seconds: float) -> Iterator[Line]:
    """A copy; then leases and copies of blocks that another process holds."""
    source, target = (np.ones(ask.size, np.uint8) for _ in range(2))
    step = ask.block
    parts = [slice(at * step, at * step + step) for at in range(ask.blocks)]

    def copy(index: int) -> int:
        np.copyto(target[parts[index % len(parts)]], source[parts[index % len(parts)]])
        return step

    bare = timed(copy, 64 * len(parts), seconds / 8)
    yield bare.line("memory_copy", "one thread, from memory to memory")
    with _node(ask.size + 64 * MIB) as url, open_sync(url) as kv:
        space = Namespace(model="bench", revision="1", layers=1, page_bytes=step - _HEADER, layout="bench", block_tokens=1)
        links, shard = chain(space, np.arange(ask.blocks, dtype=np.uint32)), Shard()
        plan = codec.layout(space, shard, 1)
        if not all(kv.put(space, shard, links, lambda at, room: room.__setitem__(slice(None), bytes([at % 251]) * room.nbytes))):
            raise Unavailable("the node did not take what was to be measured", remedy="a smaller --size")

        def get(index: int) -> int:
            at = index % len(links)
            place = target[at * step : at * step + plan.payload_bytes]
            with kv.get(space, shard, [links[at]]) as blocks:
                return plan.payload_bytes * blocks.copy_into([place], skip=plan.header_bytes)

        def lease(index: int) -> int:
            with kv.get(space, shard, [links[index % len(links)]]) as blocks:
                return len(blocks)

        timed(get, len(links), seconds / 8, warm=False)  # pages of both processes are new once
        yield timed(get, 64 * len(links), seconds / 4).line("dram_get", "a block of another process, copied out", bare)
        yield _in_us(timed(lease, 2000, seconds / 8).line("dram_lease", "a block of another process, where it lies"))
        yield _in_us(timed(_look_ups(kv), 2000, seconds / 8).line("lookup_512", "which of 512 blocks are in memory"))


def _look_ups(kv: SyncClient) -> Callable[[int], int]:
    space, shard = Namespace(model="names", revision="1", layers=1, page_bytes=4096, layout="bench", block_tokens=1), Shard()
    links = chain(space, np.arange(_MANY, dtype=np.uint32))
    kv.put(space, shard, links, lambda at, room: room.__setitem__(slice(None), bytes([at % 251]) * room.nbytes))
    names = [link.prefix_id for link in links]

    def look(_: int) -> int:
        found = kv.lookup(namespace=space, prefix_ids=names).run
        if found < _MANY:
            raise Unavailable(f"the node has {found} of {_MANY} blocks that it took", remedy="try again; a smaller --size")
        return found

    return look


def _in_us(line: Line) -> Line:
    return msgspec.structs.replace(line, value=(line.p50_ms or 0.0) * 1e3, unit="us")


@contextmanager
def _node(dram: int) -> Iterator[str]:
    """A node with memory alone: the URL of its socket."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as folder, (Path(folder) / "log").open("w+b") as log:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        told = {
            "KVTIER_NODE_SOCKET": f"{folder}/node.sock",
            "KVTIER_NODE_LISTEN": "",
            "KVTIER_DRAM_SIZE": str(dram),
            "KVTIER_STORE_URL": "",
            "KVTIER_NVME_PATH": "",
        }
        process = subprocess.Popen(
            [sys.executable, "-c", _NODE, "serve", "--format", "json", "--log-level", "error"],
            stdout=subprocess.PIPE,
            stderr=log,
            env=kept | told,
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                log.seek(0)
                words = log.read()[-300:].decode(errors="replace").strip()
                raise Unavailable("the node to be measured did not start", remedy=f"it said: {words}")
            yield f"kvtier+unix://{told['KVTIER_NODE_SOCKET']}"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
