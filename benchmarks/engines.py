"""Time to first token in vLLM on the CPU, as vLLM measures it: cold, its own caches, its `fs` tier, and kvtier by either way in.

Three engines live side by side, and take their turns round by round. Run it in the environment of scripts/test-engines:

    .venv-engines/bin/python benchmarks/engines.py --tokens 4000 --dtype bfloat16 --rounds 5
"""

from __future__ import annotations

import argparse
import importlib
import pydoc_data.topics
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _bench import report
from tokenizers import Tokenizer

from kvstore.demo.model import smollm2

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "engines"))
harness: Any = importlib.import_module("harness")
CHUNK = 256
SERVER: dict[str, str] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as a server runs: the scheduler in a process of its own
CONNECTOR, TIER, FS = "connector", "secondary tier", "fs tier"


def offloading(tier: dict[str, str]) -> dict[str, Any]:
    """Native offloading of vLLM with one secondary tier."""
    extra = {"spec_name": "CpuTieringSpec", "spec_module_path": "cpu_tiering", "cpu_bytes_to_use": 300_000_000, "block_size": CHUNK}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | {"secondary_tiers": [tier]},
    }


def configuration(name: str, url: str, folder: Path) -> dict[str, Any]:
    """`kv_transfer_config` of an engine."""
    if name == FS:
        return offloading({"type": "fs", "root_dir": str(folder / "fs")})
    if name == TIER:
        return offloading({"type": "KVTierSecondaryTier", "module_path": "kvstore.connectors.vllm_tier", "url": url})
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"url": url},
    }


def prompts(model: Path, tokens: int, count: int) -> list[list[int]]:
    """Token ids of English prose; no two share a prefix."""
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return [ids[at * tokens : (at + 1) * tokens + 1] for at in range(count)]


class Bench:
    """Samples by what was measured: seconds to the first token, and how many prompt tokens were not computed."""

    def __init__(self, node: Any) -> None:
        self._node = node
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cached: dict[str, list[int]] = defaultdict(list)

    def sample(self, row: str, engine: Any, ids: list[int]) -> None:
        """One answer of one token."""
        (answer,) = engine.generate(ids, max_tokens=1)
        self.seconds[row].append(answer.first_token_s)
        self.cached[row].append(answer.cached)

    def stored(self, row: str, engine: Any, ids: list[int]) -> None:
        """A prompt that nobody has seen, until the tier has it."""
        self.sample(row, engine, ids)
        engine.generate(self._middle(ids), max_tokens=1)
        engine.generate(list(range(100, 120)), max_tokens=4)  # steps in which what was computed is handed down
        self._node.settled()

    def restored(self, row: str, engine: Any, ids: list[int], prepare: Callable[[], None]) -> None:
        """The same prompt when the engine has forgotten it."""
        prepare()
        in_host_memory = not row.startswith(CONNECTOR)  # only vLLM's own offloading keeps anything there
        engine.forget(connector=in_host_memory)
        engine.generate(self._middle(ids), max_tokens=1)  # its client finds the node again
        engine.forget(connector=in_host_memory)
        self.sample(row, engine, ids)

    @staticmethod
    def _middle(ids: list[int]) -> list[int]:
        """Shares no block with the whole prompt. It is stored with it: a new one would be saved while the whole one is timed."""
        return ids[100 : 100 + 2 * CHUNK]


def main() -> None:
    """Measure, and print a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engines", default=f"{FS},{TIER},{CONNECTOR}", help="which of them, with commas between")
    options = parser.parse_args()
    model, names = smollm2(), options.engines.split(",")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        store = harness.Store(folder / "store")
        stack.callback(store.stop)
        sizes = {"KVTIER_DRAM_SIZE": "512MiB", "KVTIER_NVME_SIZE": "1GiB"}
        node = stack.enter_context(harness.Node(folder, {"KVTIER_STORE_URL": store.url("bench"), **sizes, **store.environment}))
        node.start()
        length = {"max_model_len": options.tokens + 64, "max_num_batched_tokens": options.tokens + 64, "dtype": options.dtype}
        engines = {
            name: stack.enter_context(
                harness.Engine(
                    name.replace(" ", "-"),
                    folder,
                    model,
                    connector=configuration(name, node.url, folder),
                    environment=SERVER,
                    **length,
                )
            )
            for name in names
        }
        bench = Bench(node)
        for number, ids in enumerate(prompts(model, options.tokens, 1 + options.rounds)):
            for name, engine in engines.items():
                bench.stored(f"{name}: cold", engine, ids)
                bench.sample(f"{name}: local hit", engine, ids)
                bench.restored(f"{name}: nearest", engine, ids, node.settled)
                if name != FS:
                    bench.restored(f"{name}: nvme", engine, ids, node.restart)
                    bench.restored(f"{name}: bucket", engine, ids, node.wipe)
            if number == 0:  # first calls pay for what later ones find done
                bench.seconds.clear()
                bench.cached.clear()
        for engine in engines.values():
            engine.close()
    local = bench.seconds[f"{names[0]}: local hit"]
    for row, samples in bench.seconds.items():
        facts = {"cached": statistics.median(bench.cached[row]), "tokens": options.tokens + 1, "dtype": options.dtype}
        report(row, "s", samples, local, **facts, least=round(min(samples), 3), most=round(max(samples), 3))


if __name__ == "__main__":
    main()
