"""What the benchmarks share: a server of their own, a session to measure with, and one JSON object per line."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np

from kvstore.ids import Link, Namespace, Shard, chain
from kvstore.objects.seaweed import SeaweedFS

SHARD = Shard()
# 2 MiB a block: what 256 tokens of a small model with grouped-query attention weigh in bf16.
NAMESPACE = Namespace(model="benchmark", revision="1", layers=16, kv_heads=2, head_dim=64, dtype="BF16", block_tokens=256)
BLOCK_BYTES = 16 * 2 * 256 * 2 * 64 * 2 + 256 * 4
TOKENS = np.arange(1 << 20, dtype=np.uint32)


@contextmanager
def server() -> Iterator[tuple[SeaweedFS, Path]]:
    """A SeaweedFS whose credentials are in the environment, and a folder for tiers; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="kvtier-bench-") as name:
        seaweed = SeaweedFS.launch(Path(name) / "store")
        try:
            seaweed.wait_ready()
            os.environ["AWS_ACCESS_KEY_ID"] = seaweed.credentials.access_key
            os.environ["AWS_SECRET_ACCESS_KEY"] = seaweed.credentials.secret_key
            yield seaweed, Path(name)
        finally:
            seaweed.stop()


def url(seaweed: SeaweedFS, root: str, **more: str) -> str:
    """A node embedded in this process, on that server."""
    options = "".join(f"&{name}={value}" for name, value in more.items())
    return f"s3://{seaweed.bucket}/{root}?endpoint={seaweed.endpoint}{options}"


def links(blocks: int) -> list[Link]:
    """A session's blocks."""
    return chain(NAMESPACE, TOKENS[: blocks * NAMESPACE.block_tokens])


def payload(index: int) -> bytes:
    """One block's tensors: incompressible keys and values, and its token ids."""
    size = NAMESPACE.block_tokens
    return np.random.default_rng(index).bytes(BLOCK_BYTES - 4 * size) + TOKENS[index * size : (index + 1) * size].tobytes()


def fill(first: int) -> Callable[[int, memoryview], None]:
    """For `put`: writes the payloads of blocks from `first` on."""
    return lambda index, room: room.__setitem__(slice(None), payload(first + index))


def report(name: str, unit: str, values: Sequence[float], baseline: Sequence[float], **facts: object) -> None:
    """Medians of both, of the same run, and their ratio."""
    value, base = statistics.median(values), statistics.median(baseline)
    line = {"name": name, "value": round(value, 3), "unit": unit, "baseline": round(base, 3), "ratio": round(value / base, 3)}
    print(msgspec.json.encode({**line, "samples": len(values), **facts}).decode(), flush=True)
