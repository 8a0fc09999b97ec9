"""How long vLLM's scheduler is kept by each question to kvtier: with a warm node, and with one that stands still and says nothing.

A real engine's own scheduler asks, in the process that is measured. Run it in the environment of scripts/test-engines:

    .venv-engines/bin/python benchmarks/engine_lookups.py --requests 1000 --stopped 5 --seconds 200
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from engines import CHUNK, CONNECTOR, TIER, configuration, harness, prompts

from kvstore.demo.model import smollm2

REST = 8  # tokens behind the last whole block, which are computed


def said(row: str, calls: dict[str, list[float]], answers: dict[str, list[float]], **facts: object) -> None:
    """A line of JSON for each of what was asked."""
    for name, seconds in calls.items():
        ms = [each * 1e3 for each in seconds]
        cuts = statistics.quantiles(ms, n=1000) if len(ms) > 1 else ms * 999
        shown = {"p50": cuts[499], "p99": cuts[989], "p999": cuts[998], "max": max(ms)}
        shown["answer_max"] = max(answers[name], default=0) * 1e3
        line = {"row": row, "asked": name, "calls": len(ms), **{key: round(value, 3) for key, value in shown.items()}, **facts}
        print(msgspec.json.encode(line).decode(), flush=True)


class Asked:
    """One engine, and how long its scheduler's questions took."""

    def __init__(self, name: str, engine: Any, seconds: float) -> None:
        self._name, self._engine, self._seconds = name, engine, seconds

    def ask(self, row: str, ids: list[list[int]], requests: int) -> None:
        """So many requests, or as many as there is time for, each when the engine has forgotten everything."""
        ends, done, cached = time.monotonic() + self._seconds, 0, 0
        while done < requests and time.monotonic() < ends:
            some = [ids[number % len(ids)] for number in range(min(requests - done, len(ids)))]
            cached += self._engine.call("vllm_calls:ask_again", prompts=some, connector=self._name == TIER)
            done += len(some)
        times = self._engine.call("vllm_calls:lookup_times")
        said(f"{self._name}: {row}", times["calls"], times["answers"], requests=done, cached=round(cached / done))


def main() -> None:
    """Measure, and print a line of JSON for each row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4, help="whole blocks of a prompt")
    parser.add_argument("--requests", type=int, default=1000, help="with a warm node")
    parser.add_argument(
        "--stopped", type=int, default=5, help="requests with a node that is stopped; vLLM gets each one's blocks after 10 s"
    )
    parser.add_argument("--seconds", type=float, default=200.0, help="of a row, at most")
    parser.add_argument("--engines", default=f"{CONNECTOR},{TIER}", help="which of them, with commas between")
    options = parser.parse_args()
    model, tokens = smollm2(), options.blocks * CHUNK + REST
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvtier-bench-")))
        store = harness.Store(folder / "store")
        stack.callback(store.stop)
        node = stack.enter_context(harness.Node(folder, {"KVTIER_STORE_URL": store.url("bench"), **store.environment}))
        node.start()
        length = {"max_model_len": tokens + 64, "max_num_batched_tokens": tokens + 64, "dtype": "bfloat16"}
        for name in options.engines.split(","):
            settings = {"connector": configuration(name, node.url, folder), **length}
            with harness.Engine(name.replace(" ", "-"), folder, model, **settings) as engine:
                ids, asked = prompts(model, tokens, 4), Asked(name, engine, options.seconds)
                for each in ids:
                    engine.generate(each, max_tokens=1)
                    engine.generate(list(range(100, 120)), max_tokens=4)  # steps in which what was computed is handed down
                node.settled()
                engine.call("vllm_calls:time_lookups")
                asked.ask("first", ids, 4)
                asked.ask("warm", ids, options.requests)
                node.pause()
                try:
                    asked.ask("stopped", ids, options.stopped)
                finally:
                    node.resume()
                asked.ask("again", ids, 8)
                engine.close()


if __name__ == "__main__":
    main()
