"""What a node has resident after many bytes went through it, beside what it was told to hold."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from _cases import MIB
from same_host import SHARD, node

import kvstore
from kvstore import codec
from kvstore.ids import Namespace, chain

DRAM: Final = 512 * MIB
MORE: Final = 300 * MIB  # what is promised beside it
_BLOCK: Final = 8 * MIB
_SET: Final = 8  # blocks, new ones each time
_READS: Final = 6  # of each


def resident(moved_gb: float, folder: Path | None) -> dict[str, object]:
    """Put and read blocks through one client until so many GB were moved: a line of the table, in MiB."""
    space = Namespace(model="memory", revision="1", layers=1, page_bytes=_BLOCK - 8192, layout="benchmark", block_tokens=1)
    plan = codec.layout(space, SHARD, 1)
    source, target = np.ones(plan.payload_bytes, np.uint8), np.empty(plan.payload_bytes, np.uint8)

    def fill(_: int, room: memoryview) -> None:
        np.copyto(np.frombuffer(room, np.uint8), source)

    moved = turn = 0
    with (
        tempfile.TemporaryDirectory(dir=folder) as name,
        node(Path(name), "memory", DRAM) as (url, pid),
        kvstore.open_sync(url) as kv,
    ):
        while moved < moved_gb * 1e9:
            links = chain(space, np.arange(_SET, dtype=np.uint32) + np.uint32(turn * _SET))
            turn += 1
            moved += sum(kv.put(space, SHARD, links, fill)) * plan.payload_bytes
            for _ in range(_READS):
                with kv.get(space, SHARD, links, reach="dram") as blocks:
                    moved += blocks.copy_into([target] * len(blocks), skip=plan.header_bytes) * plan.payload_bytes
        found = _resident(pid)
    line = {"name": "memory", "mib": _BLOCK / MIB, "value": found / MIB, "unit": "MiB", "moved_gb": round(moved / 1e9, 1)}
    return {**line, "target": (DRAM + MORE) / MIB, "met": found <= DRAM + MORE}


def _resident(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(pid)
