"""The price model beside three real nodes: milliseconds to the first token, predicted and measured.

Three `kvtier serve` processes on loopback, a static mesh, SeaweedFS as the bucket, and SmolLM2-135M in bf16 as the engine. The
beginning of a prompt is in the memory of the engine's node, on its disk, in another node's memory, only in the bucket, or nowhere.
The model is calibrated on one set of prompts, and predicts another, of other lengths: `kvstore.mesh.price`, as a replay uses it.
The calibration knows nothing of the second set; the two are measured in one shuffled order.

What is stored are random keys and values under the prompts' names: they load and attend as any do. Each prompt is loaded once: then
it is nearer. Prints a JSON line for each prompt and each place; `--svg` draws them.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from _scatter import draw
from transformers import AutoModelForCausalLM

import kvstore
from kvstore.connectors.hf import SessionCache
from kvstore.connectors.hf_cache import Geometry, empty_cache
from kvstore.demo.model import smollm2
from kvstore.ids import Shard
from kvstore.mesh.price import SOURCES, Priced, Speed, Speeds, Table, price
from kvstore.mesh.testing import end_with_parent
from kvstore.objects.seaweed import SeaweedFS

PLACES: Final = ("dram", "nvme", "peer", "bucket", "computed")
BLOCK_TOKENS: Final = 256
# Tokens stored, and computed behind them. Of "computed" nothing is stored.
CALIBRATED: Final = ((512, 16), (1024, 128), (1792, 256), (2560, 48))
HELD_OUT: Final = ((256, 40), (768, 200), (1536, 20), (2048, 90), (3840, 160))
CALIBRATED_COMPUTE: Final = (256, 512, 1024, 2048)
HELD_OUT_COMPUTE: Final = (384, 768, 1536, 3072)
SEED: Final = 7


class Case(msgspec.Struct, frozen=True):
    """A prompt: where its beginning is, how many tokens of it, and how many come after."""

    place: str
    stored: int
    after: int
    number: int

    @property
    def ids(self) -> np.ndarray:
        """Its tokens: like no other prompt's from the first block on."""
        return np.random.default_rng(self.number).integers(100, 40_000, self.stored + self.after).astype(np.uint32)


class Took(msgspec.Struct, frozen=True):
    """What one prompt took: seconds of loading, and of computing; and whether a part came from elsewhere, because it was late."""

    load_s: float
    compute_s: float
    hedged: bool


class Serving:
    """One `kvtier serve`, in a process of its own."""

    def __init__(self, name: str, folder: Path, port: int, sets: Mapping[str, str], env: Mapping[str, str]) -> None:
        self.name, self.socket = name, folder / f"{name}.sock"
        told = {"node.id": name, "node.listen": "", "node.socket": str(self.socket), "peers.listen": f"127.0.0.1:{port}", **sets}
        flags = [text for key, value in told.items() for text in ("--set", f"{key}={value}")]
        self._command = [sys.executable, "-c", "from kvstore.cli.main import main; main()", "serve", "--format", "json", *flags]
        self._env, self._log = {**os.environ, **env}, (folder / f"{name}.log").open("ab")
        self.kv: Any = None
        self.start()

    def start(self) -> None:
        """Until it is ready, with a client."""
        self._process = subprocess.Popen(
            self._command,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=self._env,
            preexec_fn=end_with_parent,  # noqa: PLW1509  it makes one system call
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline(), f"{self.name} did not start: see {self._log.name}"
        self.kv = kvstore.open_sync(f"kvtier+unix://{self.socket}")

    def stop(self) -> None:
        """Its memory is gone then; its disk is not."""
        if self.kv is not None:
            self.kv.close()
            self.kv = None
        self._process.terminate()
        self._process.communicate()

    def empty(self) -> None:
        """As a node that was started again: only its disk has anything."""
        self.stop()
        self.start()

    def settle(self) -> None:
        """Wait until nothing is on its way to the disk or the bucket."""
        while any(tier.queued_bytes for tier in self.kv.stats().tiers.values()):
            time.sleep(0.05)

    def hits(self) -> dict[str, int]:
        """Blocks found so far, by tier."""
        return {name: tier.hits for name, tier in self.kv.stats().tiers.items()}


@contextmanager
def cluster(folder: Path) -> Iterator[list[Serving]]:
    """`engine` and `other` have memory, `disk` has a disk as well."""
    ports = _ports(3)
    names = ["engine", "other", "disk"]
    with ExitStack() as closing:
        seaweed = SeaweedFS.launch(folder / "store")
        closing.callback(seaweed.stop)
        seaweed.wait_ready()
        env = {"AWS_ACCESS_KEY_ID": seaweed.credentials.access_key, "AWS_SECRET_ACCESS_KEY": seaweed.credentials.secret_key}
        shared = {
            "store.url": f"s3://{seaweed.bucket}/kv?endpoint={seaweed.endpoint}",
            "peers.static": ",".join(f"{name}=127.0.0.1:{port}" for name, port in zip(names, ports, strict=True)),
        }
        found = []
        for name, port in zip(names, ports, strict=True):
            more = {"dram.size": "2GiB" if name == "engine" else "1GiB"}
            if name == "disk":
                more |= {"nvme.path": str(folder / "nvme"), "nvme.size": "2GiB"}
            found.append(Serving(name, folder, port, {**shared, **more}, env))
            closing.callback(found[-1].stop)
        yield found


def _ports(count: int) -> list[int]:
    with ExitStack() as open_:
        made = [open_.enter_context(socket.socket()) for _ in range(count)]
        for sock in made:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in made]


class Engine:
    """The model, and a cache of sessions at each node."""

    def __init__(self, nodes: Sequence[Serving]) -> None:
        torch.set_num_threads(1)  # several wait for the slowest, which on a machine that is shared is any multiple of the time
        model: Any = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16, local_files_only=True)
        self._model, self._nodes = model.eval(), {node.name: node for node in nodes}
        self.namespace = self._cache("engine").namespace
        self.token_bytes = Geometry(namespace=self.namespace, shard=Shard()).block_bytes(BLOCK_TOKENS) // BLOCK_TOKENS
        most = max(stored for stored, _ in (*CALIBRATED, *HELD_OUT))
        config = self._model.config
        shape = (1, config.num_key_value_heads, most, config.hidden_size // config.num_attention_heads)
        generator = torch.Generator().manual_seed(SEED)
        self._noise = torch.randn((2, *shape), generator=generator).to(torch.bfloat16)
        for tokens in (64, 1024):  # the first passes also choose kernels
            self._read(np.arange(tokens, dtype=np.uint32), None)

    def _cache(self, node: str) -> SessionCache:
        return SessionCache(self._model, self._nodes[node].kv, revision="1", model_id="benchmark", block_tokens=BLOCK_TOKENS)

    def store(self, cases: Sequence[Case], node: str, durability: Any) -> None:
        """Their beginnings, at a node."""
        cache = self._cache(node)
        for case in cases:
            held = empty_cache(self._model)
            for layer in range(self._model.config.num_hidden_layers):
                held.update(self._noise[0][:, :, : case.stored], self._noise[1][:, :, : case.stored], layer)
            receipt = cache.commit(f"s-{case.number}", case.ids[: case.stored], held, durability=durability)
            assert not receipt.cut, case

    def prepare(self, cases: Sequence[Case]) -> None:
        """Everything where it is to be: nodes are started again, so that only the disk and the bucket keep what is theirs."""
        at = {place: [case for case in cases if case.place == place] for place in PLACES}
        self.store(at["bucket"], "other", "bucket")
        self.store(at["nvme"], "disk", "nvme")
        for name in ("other", "disk"):
            self._nodes[name].empty()
        self.store(at["peer"], "other", "dram")
        self.store(at["dram"], "engine", "dram")
        for node in self._nodes.values():
            node.settle()

    def answer(self, case: Case) -> Took:
        """One prompt, to its first token."""
        node = self._nodes["disk" if case.place == "nvme" else "engine"]
        cache, before = self._cache(node.name), node.hits()
        began = time.perf_counter()
        found = cache.restore(f"s-{case.number}", case.ids)
        loaded = time.perf_counter()
        self._read(case.ids[found.tokens.size :], found.past_key_values)
        ended = time.perf_counter()
        assert found.tokens.size == case.stored, (case, found.tokens.size, found.miss)
        came = {name: count - before.get(name, 0) for name, count in node.hits().items() if count > before.get(name, 0)}
        allowed = {"bucket": {"bucket", "peer"}, "computed": set[str]()}.get(case.place, {case.place})
        nearby = case.place == "computed" or set(came) - {"dram"} <= allowed
        return Took(loaded - began, ended - loaded, hedged=not nearby)

    @torch.inference_mode()
    def _read(self, tokens: np.ndarray, past: Any) -> int:
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        return int(self._model(ids, past_key_values=past, use_cache=True, logits_to_keep=1).logits[0, -1].argmax())


def calibrated(seen: Sequence[tuple[Case, Took]], token_bytes: int) -> Speeds:
    """What the simulator is to take this machine for: each line with the least relative error on what was seen."""
    passes = [((case.after, (2 * case.stored + case.after - 1) * case.after / 2, 1.0), took.compute_s) for case, took in seen]
    token_s, position_s, pass_s = _line(passes)

    def speed(place: str) -> Speed:
        mine = [(case, took) for case, took in seen if case.place == place and not took.hedged]
        once, byte_s = _line([((1.0, case.stored * token_bytes), took.load_s) for case, took in mine])
        return Speed(once, 1 / max(byte_s, 1e-15))

    return Speeds(token_s, position_s, **{place: speed(place) for place in SOURCES[1:]}, pass_s=pass_s)


def _line(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """By what the numbers of each row are to be multiplied, to give its last with the least relative error; never negative."""
    table = np.array([[value / seconds for value in values] for values, seconds in rows])
    found, kept = np.zeros(table.shape[1]), list(range(table.shape[1]))
    while kept:
        part, *_ = np.linalg.lstsq(table[:, kept], np.ones(len(table)), rcond=None)
        if part.min() >= 0:
            found[kept] = part
            break
        del kept[int(part.argmin())]
    return [float(each) for each in found]


def predicted(case: Case, speeds: Speeds, token_bytes: int) -> Priced:
    """By the price that nodes are simulated with."""
    here = np.zeros((len(SOURCES), 1, 1 if case.stored else 0), np.bool_)
    if case.stored:
        here[SOURCES.index(case.place)] = True
    bounds = [0, case.stored] if case.stored else [0]
    return price(Table(["here"], [speeds]), bounds, case.stored + case.after, token_bytes, here).of(0)


def _cases(lengths: Sequence[tuple[int, int]], computed: Sequence[int], first: int, times: int) -> list[Case]:
    made: list[tuple[str, int, int]] = []
    for _ in range(times):
        made += [(place, stored, after) for place in PLACES[:-1] for stored, after in lengths]
        made += [("computed", 0, tokens) for tokens in computed]
    return [Case(place, stored, after, first + at) for at, (place, stored, after) in enumerate(made)]


def main() -> None:
    """Store, calibrate, predict, measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2, help="rounds of the calibration")
    parser.add_argument("--svg", type=Path, help="draw predicted against measured")
    asked = parser.parse_args()
    order = random.Random(SEED)
    calibrating, held_out = _cases(CALIBRATED, CALIBRATED_COMPUTE, 1000, asked.times), _cases(HELD_OUT, HELD_OUT_COMPUTE, 2000, 1)
    with tempfile.TemporaryDirectory(prefix="kvtier-model-") as name, cluster(Path(name)) as nodes:
        engine = Engine(nodes)
        engine.prepare([*calibrating, *held_out])
        every = [*calibrating, *held_out]  # in one order: what else the machine does is the same for both
        seen = {case: engine.answer(case) for case in order.sample(every, len(every))}
    speeds = calibrated([(case, seen[case]) for case in calibrating], engine.token_bytes)
    for case in calibrating:
        _tell("cost_model_calibration", case, load_ms=seen[case].load_s * 1e3, compute_ms=seen[case].compute_s * 1e3)
    _tell("cost_model_speeds", None, token_bytes=engine.token_bytes, speeds=speeds)
    points: dict[str, list[tuple[float, float]]] = {place: [] for place in PLACES}
    for case in held_out:
        told, took = predicted(case, speeds, engine.token_bytes), seen[case]
        ms = (took.load_s + took.compute_s) * 1e3
        if not took.hedged:
            points[case.place].append((told.ms, ms))
        parts = {"load_ms": took.load_s * 1e3, "compute_ms": took.compute_s * 1e3, "split": told.split, "hedged": took.hedged}
        more = {"predicted_load_ms": told.load_ms, "predicted_compute_ms": told.compute_ms}
        _tell("cost_model", case, value=ms, unit="ms", baseline=told.ms, ratio=ms / told.ms, **parts, **more)
    for place, pairs in {**points, "all": [pair for each in points.values() for pair in each]}.items():
        errors = sorted(abs(told - took) / took for told, took in pairs)
        line = {"place": place, "value": statistics.median(errors), "unit": "of measured"}
        _tell("cost_model_error", None, **line, p95=errors[min(len(errors) - 1, int(0.95 * len(errors)))], samples=len(errors))
    if asked.svg:
        under = "Three nodes, SmolLM2-135M on one thread; lines: the same, and a fifth more or less"
        asked.svg.write_text(draw("Time to first token, predicted and measured", under, points, unit="ms"))


def _tell(name: str, case: Case | None, **facts: Any) -> None:
    about = {} if case is None else {"place": case.place, "stored": case.stored, "computed": case.after}
    rounded = {key: round(value, 4) if isinstance(value, float) else value for key, value in facts.items()}
    print(msgspec.json.encode({"name": name, **about, **rounded}).decode(), flush=True)


if __name__ == "__main__":
    main()
