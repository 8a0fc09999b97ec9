"""The model's side of the demo: a process of its own that does what it is told, one JSON line at a time.

A line `{"do": "turn", ...}` on standard input is answered by one line on standard output. It ends with its input, so that it never
outlives the demo.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import torch
from blake3 import blake3

import kvstore
from kvstore.connectors.hf import SessionCache, crop
from kvstore.demo import model as models
from kvstore.errors import KVTierError

PACE_TOKENS: Final = 1024  # enough for the faster number of threads to show
CLEARLY: Final = 1.5
SYSTEM: Final = "You answer questions about a text, briefly."


class Threads(msgspec.Struct, frozen=True):
    """How many compute."""

    reading: int  # a prompt
    stepping: int  # a few tokens, with everything before them in the cache


class Spoken(msgspec.Struct, frozen=True):
    """What the model said, and how long the listener waited."""

    seconds: float
    first: str  # digest of the first logits
    tokens: list[int]


class Worker:
    """A model, and later a client. Every public method is a command; its keyword arguments are the line's other fields."""

    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None
        self._client: Any = None
        self._sessions: Any = None
        self._threads = Threads(1, 1)
        self._revision = ""
        self._past: Any = None  # of the last turn
        self._held: list[int] = []  # the tokens of that cache

    def load(self, reading: int = 1, stepping: int = 1) -> dict[str, Any]:
        """Load the model; convert it first where that was not done yet. The numbers are those of :class:`Threads`."""
        self._threads = Threads(reading, stepping)
        self._model, self._tokenizer = models.load(models.smollm2())
        self._forward(list(range(100, 164)), None)  # warm-up: the first calls also choose kernels
        self._forward(list(range(100, 116)), self._past)
        return {"parameters": sum(weight.numel() for weight in self._model.parameters())}

    def pace(self) -> dict[str, Any]:
        """Measure one thread and all, and go on with what is faster: for reading a prompt, and for a few tokens after it.

        A few tokens are read by many small steps, after each of which the threads wait for the last one. Where cores are shared,
        that may take ten times as long; so several threads have to be much faster to be chosen.
        """
        reading, stepping = {}, {}
        for count in sorted({1, len(os.sched_getaffinity(0))}):
            self._threads = Threads(count, count)
            reading[count] = min(self._forward(list(range(PACE_TOKENS)), None)[0] for _ in range(2))
            stepping[count] = statistics.median(self._forward(list(range(16)), self._past)[0] for _ in range(5))
        least = min(stepping, key=lambda count: stepping[count])
        self._threads = Threads(
            reading=min(reading, key=lambda count: reading[count]),
            stepping=least if stepping[least] * CLEARLY < stepping[1] else 1,
        )
        return {"threads": self._threads, "reading": reading, "stepping": stepping}

    def attach(self, url: str) -> dict[str, Any]:
        """Connect to a node."""
        if self._client is not None:
            self._client.close()
        self._client = kvstore.open_sync(url)
        self._sessions = SessionCache(self._model, self._client, model_id=models.MODEL_ID, revision=self._revision)
        self._revision = self._sessions.namespace.revision
        return {"node": self._client.health().node, "namespace": self._sessions.namespace.id}

    def prompt(self, document: str, question: str) -> dict[str, Any]:
        """Token ids of a first turn."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{document}\n\n{question}"}]
        return {"tokens": self._ids(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))}

    def follow(self, history: list[int], question: str) -> dict[str, Any]:
        """Token ids that a further question adds to a conversation."""
        ended = history[-1] == self._tokenizer.eos_token_id
        text = f"{'' if ended else '<|im_end|>'}\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return {"tokens": self._ids(text)}

    def text(self, tokens: list[int]) -> dict[str, Any]:
        """What tokens say."""
        return {"text": self._tokenizer.decode(tokens, skip_special_tokens=True).strip()}

    def compute(self, tokens: list[int], answer: int) -> dict[str, Any]:
        """A turn without a store: read everything, then answer. Remembers the cache."""
        spoken = self._speak(tokens, None, answer)
        self._held = (tokens + spoken.tokens)[: self._past.get_seq_length()]
        return {"spoken": spoken}

    def proceed(self, tokens: list[int], answer: int) -> dict[str, Any]:
        """Another turn on the cache in memory, as if there were no store; then forget that turn again."""
        spoken = self._speak(tokens, self._past, answer)
        crop(self._past, len(self._held))
        return {"spoken": spoken}

    def resume(self, session: str, tokens: list[int], answer: int) -> dict[str, Any]:
        """A turn of a stored session: all that is known of it is its id. Remembers the cache."""
        begun = time.perf_counter()
        restored = self._sessions.restore(session)
        ready = time.perf_counter() - begun
        spoken = self._speak(tokens, restored.past_key_values, answer, begun)
        held = restored.tokens.tolist()
        digest = self._digest(len(held))
        self._held = (held + tokens + spoken.tokens)[: self._past.get_seq_length()]
        status = self._client.wait(restored.restore_id)
        return {
            "spoken": spoken,
            "restore_s": ready,
            "tokens": len(held),
            "version": restored.version,
            "miss": restored.miss,
            "kv": digest,
            "by_tier": status.by_tier,
        }

    def commit(self, session: str) -> dict[str, Any]:
        """Store the last turn in the bucket."""
        begun = time.perf_counter()
        receipt = self._sessions.commit(session, self._held, self._past, durability="bucket")
        seconds = time.perf_counter() - begun
        return {"receipt": receipt, "seconds": seconds, "kv": self._digest(len(self._held))}

    def fork(self, session: str, new: str, version: int) -> dict[str, Any]:
        """A second session that begins as a version of the first."""
        begun = time.perf_counter()
        made = self._sessions.fork(session, new, version=version)
        return {"session": made, "seconds": time.perf_counter() - begun}

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _forward(self, tokens: Sequence[int], past: Any) -> tuple[float, torch.Tensor]:
        """Seconds, and the logits that follow."""
        torch.set_num_threads(self._threads.reading if past is None else self._threads.stepping)
        begun = time.perf_counter()
        with torch.inference_mode():
            output = self._model(torch.tensor([tokens]), past_key_values=past, use_cache=True, logits_to_keep=1)
        self._past = output.past_key_values
        return time.perf_counter() - begun, output.logits[0, -1]

    def _speak(self, tokens: Sequence[int], past: Any, answer: int, begun: float | None = None) -> Spoken:
        """Greedily, at most `answer` tokens."""
        begun = time.perf_counter() if begun is None else begun
        _, logits = self._forward(tokens, past)
        seconds = time.perf_counter() - begun
        first, said = blake3(logits.numpy().tobytes()).hexdigest(), [int(logits.argmax())]
        while len(said) < answer and said[-1] != self._tokenizer.eos_token_id:
            said.append(int(self._forward(said[-1:], self._past)[1].argmax()))
        return Spoken(seconds, first, said)

    def _digest(self, tokens: int) -> str:
        """Of the first tokens' KV: whether a restored cache is the same, bit for bit."""
        digest = blake3()
        for layer in self._past.layers:
            for tensor in (layer.keys, layer.values):
                digest.update(tensor[0, :, :tokens].contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()


def main() -> None:
    """Serve standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is no answer
    warnings.filterwarnings("ignore", category=FutureWarning)  # `past_key_values` is what both ends of our versions know
    worker = Worker()
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line)
        try:
            answer = getattr(worker, request.pop("do"))(**request)
        except KVTierError as error:
            answer = {"error": f"{error.message} ({error.remedy})"}
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()
