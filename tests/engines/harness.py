"""Engines, a node and a store as processes that tests start, kill, wipe and damage. See README.md for how to use it."""

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Timer
from typing import Any

import msgspec

import kvstore
from kvstore.clock import RandomIds
from kvstore.demo.processes import Node as DemoNode
from kvstore.demo.processes import Process
from kvstore.errors import Unavailable
from kvstore.objects import OVERWRITE, S3Store
from kvstore.objects.seaweed import SeaweedFS

HERE = Path(__file__).parent
COMMAND_S = 120.0  # an engine that needs longer for one command hangs
LOAD_S = 240.0
QUIET = 6  # times in a row that nothing may be queued, before that counts: what was just accepted is queued a moment later


class Answer(msgspec.Struct, frozen=True):
    """What an engine said to one prompt.

    Attributes:
        tokens: Generated ids.
        cached: Prompt tokens it did not compute (`num_cached_tokens`): from its own cache or from the tier.
        first_token_s: Seconds from the request to the first token, as the engine measures it.
        seconds: Wall time of the whole call, shared by the prompts of one call.
    """

    tokens: list[int]
    text: str
    finish_reason: str | None
    cached: int
    first_token_s: float | None
    kv_transfer_params: dict[str, Any] | None
    seconds: float


@dataclass
class Started:
    """One engine process of this run, for the closing summary."""

    name: str
    seconds: float = 0.0


STARTED: list[Started] = []


class EngineFailed(Exception):
    """A command failed inside the engine, or the engine ended or hung. Its message ends with the log's last lines."""


class Engine:
    """One engine process. `with` starts it, and ends it in whatever way the block ends.

    Args:
        name: Of its log file.
        folder: For its log and caches.
        model: Folder of the model.
        connector: `kv_transfer_config`, or None for an engine without a tier.
        environment: More environment variables.
        llm: More arguments of `vllm.LLM`.
    """

    def __init__(self, name, folder, model, *, connector=None, environment=None, **llm):
        self.name, self._log = name, Path(folder) / f"{name}.log"
        self._id = f"kvtier-{RandomIds().new()}"
        self._fields = {"model": str(model), **llm}
        if connector:
            self._fields["kv_transfer_config"] = {"engine_id": self._id, **connector}
        self._folder = Path(folder)
        self._environment = {
            "PYTHONPATH": str(HERE),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the scheduler runs in this very process
            "VLLM_CACHE_ROOT": str(self._folder / "vllm"),
            "VLLM_CONFIG_ROOT": str(self._folder / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(self._folder / "torch"),
            **(environment or {}),
        }

    def __enter__(self):
        self._started, self._begun = Started(self.name), time.monotonic()
        STARTED.append(self._started)
        self._process = Process(
            self.name,
            "from engine_child import main; main()",
            folder=self._folder,
            environment=self._environment,
            talks=True,
        )
        try:
            self.ask("load", timeout_s=LOAD_S, **self._fields)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with suppress(ProcessLookupError):
            os.killpg(self._process.child.pid, signal.SIGKILL)  # and what it has started, which vLLM leaves behind
        self._process.__exit__()
        for left in Path("/dev/shm").glob(f"vllm_offload_{self._id}*"):  # vLLM leaves it there when it is killed
            left.unlink()
        self._started.seconds = time.monotonic() - self._begun

    @property
    def log(self) -> str:
        """All it has written so far."""
        return self._log.read_text(errors="replace")

    def ask(self, do, *, timeout_s=COMMAND_S, **fields):
        """Run a command of :class:`engine_child.Child` and return its answer. Raises `EngineFailed`."""
        child = self._process.child
        guard = Timer(timeout_s, child.kill)
        guard.start()
        try:
            child.stdin.write(msgspec.json.encode({"do": do, **fields}) + b"\n")
            child.stdin.flush()
            line = child.stdout.readline()
        except BrokenPipeError:
            line = b""
        finally:
            guard.cancel()
        if not line:
            raise self._failed(f"ended, or took longer than {timeout_s:.0f} s, during {do!r}")
        answer = msgspec.json.decode(line)
        if "error" in answer:
            raise self._failed(f"could not {do}: {answer['error']}")
        return answer["answer"]

    def _failed(self, what):
        lines = self.log.strip().splitlines()[-25:]
        return EngineFailed(f"engine {self.name} {what}\n" + "\n".join(f"    {line}" for line in lines))

    def generate(self, *prompts, timeout_s=COMMAND_S, **sampling) -> list[Answer]:
        """Greedy by default, 8 tokens. A prompt is a list of token ids, or a dict as `LLM.generate` takes it (`cache_salt`).

        Further keywords go to `SamplingParams`: `extra_args={"kv_transfer_params": {...}}` is the connector's way in.
        """
        sampling = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, **sampling}
        answers = self.ask("generate", timeout_s=timeout_s, prompts=list(prompts), sampling=sampling)
        return [msgspec.convert(each, Answer) for each in answers]

    def forget(self, *, connector=False):
        """Drop the engine's own prefix cache; with `connector`, also what its connector keeps in the engine's memory."""
        return self.ask("forget", connector=connector)

    def call(self, function, timeout_s=COMMAND_S, **arguments):
        """Run `module:function` of this folder inside the engine, with the `LLM` as first argument; its result must be JSON."""
        return self.ask("call", timeout_s=timeout_s, function=function, arguments=arguments)

    def close(self):
        """As a server that is told to stop: the engine shuts its connector down, and the process ends by itself."""
        self.ask("close")
        self._process.child.stdin.close()
        self._process.child.wait(30)

    def kill(self):
        """As a crash would end it."""
        self._process.kill()


class Store:
    """A SeaweedFS on fixed ports: what it acknowledged is there again after `stop` and `start`."""

    def __init__(self, folder: Path, bucket: str = "engines"):
        self._folder, self._bucket = folder, bucket
        self.start()

    def start(self):
        self._server = SeaweedFS.launch(self._folder, self._bucket)
        self._server.wait_ready()

    def stop(self):
        self._server.stop()

    def url(self, root):
        return f"s3://{self._bucket}/{root}?endpoint={self._server.endpoint}"

    @property
    def environment(self):
        keys = self._server.credentials
        return {"AWS_ACCESS_KEY_ID": keys.access_key, "AWS_SECRET_ACCESS_KEY": keys.secret_key}

    def blocks(self, root) -> dict[str, int]:
        """Keys of all stored blocks under a root, and their sizes."""
        return self._run(self._blocks, root)

    def corrupt(self, key):
        """Flip one bit in the middle of an object's second half, where no header is."""
        self._run(self._corrupt, key)

    def delete(self, *keys):
        self._run(self._delete, *keys)

    def _run(self, work, *arguments):
        async def run():
            async with S3Store.open(self._server.settings(), credentials=lambda: self._server.credentials) as store:
                return await work(store, *arguments)

        return asyncio.run(run())

    @staticmethod
    async def _blocks(store, root):
        found = {}
        async for page in store.list(f"{root}/"):
            found |= {each.key: each.size for each in page if "/t0of" in each.key}
        return found

    @staticmethod
    async def _corrupt(store, key):
        data = bytearray((await store.get(key)).data)
        data[len(data) * 3 // 4] ^= 1
        await store.put(key, bytes(data), OVERWRITE)

    @staticmethod
    async def _delete(store, *keys):
        await store.delete(keys)


class Node(DemoNode):
    """`kvtier serve` with DRAM, a disk tier and a bucket. `start`, `stop`, `kill`, `lose_disk` and `url` are the demo's."""

    def start(self):
        try:
            super().start()
        except Unavailable as error:
            raise RuntimeError(f"{error}: {error.remedy}") from None

    def pause(self):
        """It answers nothing, and keeps its connections, until `resume`."""
        self._process.child.send_signal(signal.SIGSTOP)

    def resume(self):
        """After `pause`."""
        self._process.child.send_signal(signal.SIGCONT)

    def settled(self, timeout_s=60.0):
        """Wait until everything it accepted is on disk and in the bucket."""
        ends, quiet = time.monotonic() + timeout_s, 0
        with kvstore.open_sync(self.url) as client:
            while quiet < QUIET:
                stats = client.stats()
                waits = (stats.queued_bytes, stats.commits["pending"])  # what was promised is committed once its blocks are there
                quiet = 0 if any(waits) else quiet + 1
                assert time.monotonic() < ends, f"{waits[0]} bytes and {waits[1]} commits still wait"
                time.sleep(0.05)

    def wipe(self):
        """Killed, its memory and disk lost, and started anew: only the bucket is left."""
        self.kill()
        self.lose_disk()
        self.start()

    def restart(self):
        """Stopped in order and started: what was in its memory is on disk only."""
        self.stop()
        self.start()

    @property
    def stats(self):
        """As `kvtier stats` shows them: `leases`, `tiers`, `store_requests`."""
        with kvstore.open_sync(self.url) as client:
            return client.stats()
