"""How long a model takes to read a prompt, seen from outside: hooks around its forward passes."""

from __future__ import annotations

import importlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from kvstore.cost import LEAST_TOKENS

_PENDING: Final = 8  # passes of a GPU whose end was not seen yet


class Passes:
    """Times every forward pass over 16 tokens or more of one sequence, and tells of it. Steps of decoding pass by at no cost.

    On a GPU, where a pass only queues work, by events on its stream: nobody waits for them, `tell` looks at what has ended since.

    Args:
        model: Any `PreTrainedModel`.
        observe: Told (tokens before, tokens, seconds).
    """

    def __init__(self, model: Any, observe: Callable[[int, int, float], None]) -> None:
        self._observe = observe
        self._running: tuple[int, int, Any] | None = None
        self._queued: deque[tuple[int, int, Any, Any]] = deque(maxlen=_PENDING)
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, with_kwargs=True),
        ]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def tell(self) -> None:
        """Tell of the passes that have ended on a GPU."""
        while self._queued and self._queued[0][3].query():
            start, tokens, begun, ended = self._queued.popleft()
            self._observe(start, tokens, begun.elapsed_time(ended) / 1000)

    def _before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running = None
        ids = args[0] if args else kwargs.get("input_ids")
        if ids is None or ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < LEAST_TOKENS:
            return
        past = kwargs.get("cache", kwargs.get("past_key_values"))  # the former from transformers 5.24 on
        start = 0 if past is None else int(past.get_seq_length())
        self._running = (start, int(ids.shape[1]), _moment(ids.device))

    def _after(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any], __: Any) -> None:
        if self._running is None:
            return
        (start, tokens, begun), self._running = self._running, None
        if isinstance(begun, float):
            self._observe(start, tokens, time.perf_counter() - begun)
        else:
            device = (args[0] if args else kwargs["input_ids"]).device
            self._queued.append((start, tokens, begun, _moment(device)))


def _moment(device: Any) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    cuda = importlib.import_module("torch.cuda")  # the model's own; importing this module brings none
    event = cuda.Event(enable_timing=True)
    event.record(cuda.current_stream(device))
    return event
