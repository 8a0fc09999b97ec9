"""A session's KV, from a node on this host into `past_key_values`: 4,096 tokens of SmolLM2-135M in bf16, 94 MB.

Beside it the same bytes by the plainest means, one after the other: read from the medium (memory, O_DIRECT, GETs; unverified), then
copied once into `[layers, 2, tokens, heads, head_dim]`, as a cache wants them. Both make the memory that the cache keeps.
`restore_dram_copy` is that one copy alone, out of memory that is at hand.

The model computes one token on what was restored first, and its logits are those of the cache that was committed, bit for bit.
"""

from __future__ import annotations

import copy
import http.client
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from _cases import Case
from _node import EmptiedNode
from transformers import AutoModelForCausalLM

import kvstore
from kvstore import codec
from kvstore.clock import SystemClock
from kvstore.connectors.hf import SessionCache
from kvstore.connectors.hf_cache import Geometry, empty_cache
from kvstore.connectors.hf_deliver import Part
from kvstore.connectors.hf_fill import fill
from kvstore.demo.model import smollm2
from kvstore.ids import Shard, chain
from kvstore.objects.seaweed import SeaweedFS
from kvstore.objects.signing import UNSIGNED, sign

CASES: Final = (
    "restore_dram", "restore_dram_bare", "restore_dram_copy", "restore_nvme", "restore_nvme_bare", "restore_bucket",
    "restore_bucket_bare",
)  # fmt: skip
TOKENS: Final = 4096
SESSION: Final = "chat-42"
READERS: Final = 4  # of the file
GETS: Final = 8
_REPEATS: Final = 4  # of what needs no emptying in between


@contextmanager
def cases(size: int, folder: Path) -> Iterator[Mapping[str, Case]]:
    """See :class:`_cases.Rows`; there is one size."""
    del size
    with ExitStack() as closing:
        seaweed = SeaweedFS.launch(folder / "store")
        closing.callback(seaweed.stop)
        seaweed.wait_ready()
        env = {"AWS_ACCESS_KEY_ID": seaweed.credentials.access_key, "AWS_SECRET_ACCESS_KEY": seaweed.credentials.secret_key}
        memory = {"store.url": "memory://benchmark", "dram.size": "192MiB"}
        disk = {**memory, "nvme.path": str(folder / "nvme"), "nvme.size": "512MiB"}
        bucket = {**memory, "store.url": f"s3://{seaweed.bucket}/kv?endpoint={seaweed.endpoint}"}
        model = _model()
        sessions = {
            tier: Session(model, closing.enter_context(EmptiedNode.start(str(folder / f"{tier}.sock"), told, env)), tier, closing)
            for tier, told in (("dram", memory), ("nvme", disk), ("bucket", bucket))
        }
        bare, found = Bare(sessions["bucket"], seaweed, folder, closing), dict[str, Case]()
        for tier, session in sessions.items():
            session.check()
            calls = _REPEATS if tier == "dram" else 1
            pids = (session.pid, *((seaweed.pid,) if tier == "bucket" else ()))
            found[f"restore_{tier}"] = Case(session.restore, session.nbytes, calls, session.empty, pids)
            found[f"restore_{tier}_bare"] = Case(getattr(bare, tier), session.nbytes, calls, servers=pids[1:])
        yield {**found, "restore_dram_copy": Case(bare.copy, sessions["dram"].nbytes, _REPEATS)}


def _model() -> Any:
    """In bf16, as it would be served."""
    torch.set_num_threads(2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=torch.bfloat16, local_files_only=True)
    return model.eval()


class Session:
    """A stored session, and the node it comes from.

    Attributes:
        nbytes: Of its keys and values.
        pid: The node's.
        geometry: How its blocks lie in memory.
        links: Its blocks.
    """

    def __init__(self, model: Any, node: EmptiedNode, tier: str, closing: ExitStack) -> None:
        self._model, self._node, self._tier = model, node, tier
        self._kv = closing.enter_context(kvstore.open_sync(node.url))
        self._cache = SessionCache(model, self._kv, revision="1", model_id="benchmark")
        self.pid = node.pid
        self.geometry = Geometry(namespace=self._cache.namespace, shard=Shard())
        self.links = chain(self._cache.namespace, self.ids()[:TOKENS])
        kept = self.geometry.buffer(TOKENS)
        self.nbytes = kept.nbytes
        noise = torch.randn(kept.size, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
        kept[:] = noise.view(torch.uint16).numpy().reshape(kept.shape)
        self._original = empty_cache(model)
        fill(self._original, [[Part(self.geometry, 0, torch.from_numpy(kept).view(torch.bfloat16))]], [0], TOKENS)
        self._cache.commit(SESSION, self.ids(), self._original, durability="bucket")
        self.empty()

    @staticmethod
    def ids() -> np.ndarray:
        """The prompt: what is stored, and a token to compute."""
        return np.arange(TOKENS + 1, dtype=np.uint32) % 40_000

    def restore(self, _: int) -> Any:
        """All of it."""
        found = self._cache.restore(SESSION, self.ids())
        assert (found.tokens.size, found.miss) == (TOKENS, "")
        return found

    def empty(self) -> None:
        """So that the next restore reads what is measured."""
        if self._tier != "dram":
            assert self._node.drop("dram") == len(self.links)

    def check(self) -> None:
        """It comes from where it should, and the model computes on it what it computes on the original."""
        found = self.restore(0)
        came = self._kv.wait(found.restore_id).by_tier
        assert set(came) == {self._tier}, came
        self.empty()
        original, began = copy.deepcopy(self._original), time.perf_counter()
        logits = self._logits(found.past_key_values)
        took = time.perf_counter() - began
        assert torch.equal(logits, self._logits(original))
        print(f"restore_{self._tier}: the first forward after it took {took * 1e3:.0f} ms", file=sys.stderr)

    @torch.inference_mode()
    def _logits(self, past: Any) -> torch.Tensor:
        last = torch.tensor([[int(self.ids()[-1])]])
        found: torch.Tensor = self._model(last, past_key_values=past, use_cache=True).logits
        return found


class Bare:
    """The same bytes by the plainest means: first all is read, then all is copied. Nothing is verified."""

    def __init__(self, session: Session, seaweed: SeaweedFS, folder: Path, closing: ExitStack) -> None:
        self._session, self._seaweed = session, seaweed
        self._plan = codec.layout(session.geometry.namespace, session.geometry.shard, 256)
        room = -(-self._plan.raw_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._source, self._scratch = _memories(room, len(session.links)), _memories(room, len(session.links))
        self._pool = closing.enter_context(ThreadPoolExecutor(GETS))
        self._keys = self._listed()
        for view, key in zip(self._source, self._keys, strict=True):
            self._get(key, view)
        self._file = os.open(folder / "bare", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        closing.callback(os.close, self._file)
        for index, view in enumerate(self._source):
            assert os.pwrite(self._file, view, index * room) == room
        os.fsync(self._file)

    def dram(self, _: int) -> None:
        """Memory is read by a copy."""
        for source, target in zip(self._source, self._scratch, strict=True):
            np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))
        self._transpose(self._scratch)

    def copy(self, _: int) -> None:
        """Memory need not be read: it is there."""
        self._transpose(self._source)

    def nvme(self, _: int) -> None:
        """O_DIRECT reads, a few at a time."""
        room = len(self._scratch[0])

        def read(index: int) -> int:
            return os.preadv(self._file, [self._scratch[index]], index * room)

        with ThreadPoolExecutor(READERS) as readers:
            assert set(readers.map(read, range(len(self._scratch)))) == {room}
        self._transpose(self._scratch)

    def bucket(self, _: int) -> None:
        """GETs by `http.client`, straight into memory."""
        list(self._pool.map(self._get, self._keys, self._scratch))
        self._transpose(self._scratch)

    def _transpose(self, blocks: Sequence[memoryview]) -> None:
        """What a cache keeps is made here, as it is in a restore."""
        geometry, size = self._session.geometry, self._plan.tokens
        kept = geometry.buffer(TOKENS)
        for index, block in enumerate(blocks):
            kv, _ = geometry.read(block[: self._plan.raw_bytes], size)
            kept[:, :, index * size : (index + 1) * size] = kv

    def _get(self, key: str, into: memoryview) -> None:
        answer = self._ask(f"/{key}", "")
        view, filled = into[: self._plan.raw_bytes], 0
        while filled < len(view):
            filled += answer.readinto(view[filled:])
        assert not answer.read()

    def _listed(self) -> list[str]:
        """The blocks' keys; which is which does not matter here."""
        text = self._ask("", "list-type=2&prefix=kv%2Fblocks%2F").read().decode()
        keys = re.findall(r"<Key>([^<]+)</Key>", text)
        assert len(keys) == len(self._session.links), text
        return keys

    def _ask(self, path: str, query: str) -> http.client.HTTPResponse:
        """Over this thread's connection."""
        host = self._seaweed.endpoint.removeprefix("http://")
        connection = getattr(_local, "connection", None)
        if connection is None:
            connection = _local.connection = http.client.HTTPConnection(host)
        full = f"/{self._seaweed.bucket}{path}"
        at, payload = SystemClock().now(), UNSIGNED
        keys = self._seaweed.credentials
        headers = sign(keys, "us-east-1", method="GET", host=host, path=full, query=query, headers={}, payload=payload, at=at)
        connection.request("GET", f"{full}?{query}" if query else full, headers=headers)
        answer: http.client.HTTPResponse = connection.getresponse()
        assert answer.status == http.client.OK, answer.read()
        return answer


_local = threading.local()


def _memories(nbytes: int, count: int) -> list[memoryview]:
    """So many pieces of memory, real, and in large pages where the system gives them."""
    memory = mmap.mmap(-1, nbytes * count)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    np.frombuffer(view, np.uint8)[:] = 1
    return [view[at : at + nbytes] for at in range(0, nbytes * count, nbytes)]
