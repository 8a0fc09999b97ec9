"""Compute or load: how much of a stored prefix is worth loading, decided again after every step of the loading.

A prefix is of use from its beginning only, so the choice is a split: load the tokens [0, s), compute [s, n). Loading goes step by
step, and waits only so long that stopping there costs at most 5 % more than having computed everything: a tier that is slower than
it was, or of which nothing is known, is given up in time. docs/design/006-compute-or-load.md has the reasons.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.blocks import Blocks
from kvstore.cost import Costs
from kvstore.ids import Link, Namespace, Shard

if TYPE_CHECKING:
    from kvstore.client.sync import SyncClient

SLACK: Final = 0.05  # that loading may cost more than computing everything
AT_ONCE: Final = 0.4  # of one prompt's computing: the most that is put at risk for it, however much was saved before
WINDOW_BYTES: Final = 64 << 20  # in one step: enough to keep a bucket's link busy, far below any arena
CHEAPER: Final = "compute"  # why a prefix was not loaded: computing it is cheaper
_WAITED: Final = 0.8  # of what may be lost this much is spent waiting; the rest is for what comes around it
_SAFE: Final = 0.8  # a step is taken if it is expected within this part of the time it has ...
_SURE: Final = 0.5  # ... or within this part of what may be put at risk for a tier that is known
_WORTH: Final = 0.98  # of the time without it: less of a gain is within the error
_LONG_S: Final = 3600.0  # no step takes longer


class Stored(msgspec.Struct, frozen=True):
    """A block that could be loaded.

    Attributes:
        tokens: Of KV in it.
        nbytes: Of its raw object.
        tier: The nearest one that has it; "" where that is not known.
    """

    tokens: int
    nbytes: int
    tier: str = ""


class Step(msgspec.Struct, frozen=True):
    """What to ask for next: `blocks` blocks from `first` on, all from one tier, within `deadline_ms`."""

    first: int
    blocks: int
    deadline_ms: int


class Choice:
    """Decides for one model on one machine, and learns from what it is told. One for all sessions, on one thread at a time.

    Before it was told of two passes of the model (`observe_compute`) it loads everything.

    Of every prompt's computing 5 % may be lost to loading. What was not lost, and what loading saved, is kept (`saved`), and is put
    at risk only for tiers whose speed is known. So the sum over all prompts is never more than 1.05 times their computing.

    Args:
        slack: By how much loading may be slower than computing everything, as a part of that.
        monotonic: The clock.

    Attributes:
        costs: What was learned.
        saved: Seconds, never negative.
    """

    def __init__(self, *, slack: float = SLACK, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.slack, self.monotonic = slack, monotonic
        self.costs = Costs(monotonic)
        self.saved = 0.0

    def observe_compute(self, start: int, tokens: int, seconds: float) -> None:
        """The model has read `tokens` tokens behind `start` others in so many seconds. A step of decoding does not count."""
        self.costs.observe_compute(start, tokens, seconds)

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Somebody else has loaded so many bytes of a tier, such as a restore that went on behind the computing."""
        self.costs.observe_load(tier, nbytes, seconds)

    def begin(
        self, blocks: Sequence[Stored], prompt: int | None, *, deadline: float = math.inf, began: float | None = None
    ) -> Loading:
        """Load what is worth it of these blocks.

        Args:
            blocks: A leading run of a prompt's, in order.
            prompt: Tokens of the whole prompt, all of which are there in the end, loaded or computed; None where what is not loaded
                cannot be computed, so that there is no choice.
            deadline: On the clock: when loading ends in any case.
            began: When the caller began to find these blocks; now by default. That is part of what loading costs.
        """
        return Loading(self, blocks, prompt, deadline, self.monotonic() if began is None else began)


class Loading:
    """One prefix on its way: `step`, ask for that, `came`, and again until there is no step; `end` where the caller stops earlier.

    Attributes:
        miss: Why less is loaded than there is: `compute`, `timeout`, or "" where nothing is missing (or the caller has stopped).
    """

    def __init__(self, choice: Choice, blocks: Sequence[Stored], prompt: int | None, deadline: float, began: float) -> None:
        self._choice, self._costs, self._blocks, self._deadline, self._began = choice, choice.costs, blocks, deadline, began
        whole = None if prompt is None else self._costs.compute(0, prompt)
        self._prompt, self._whole = 0 if whole is None else prompt or 0, whole or 0.0
        self._done, self._tokens, self._ended = 0, 0, False
        self._asked: tuple[Step, float] | None = None
        self.miss = ""
        own = choice.slack * self._whole
        self._risk = _WAITED * own  # what may be lost to a tier of which little is known
        self._trusting = max(self._risk, _WAITED * min(own + choice.saved, AT_ONCE * self._whole))

    @property
    def free(self) -> bool:
        """Whether there is no choice: the model's speed is not known, or only what is stored can be delivered."""
        return not self._prompt

    def step(self) -> Step | None:
        """What to ask for now; None where that was all."""
        if self._ended or self._done == len(self._blocks):
            self.end()
            return None
        now = self._choice.monotonic()
        left = self._deadline - now
        if self.free:
            count = self._window(self._done, math.inf)
        else:
            spent = now - self._began
            count = min(self.split(spent) - self._done, self._window(self._done, self._room(self._tokens, spent)))
            left = min(left, self._patience(count, spent))
        if left <= 0 or not count:
            self.miss = CHEAPER if now < self._deadline else "timeout"
            self.end()
            return None
        step = Step(self._done, count, max(1, int(min(left, _LONG_S) * 1000)))
        self._asked = (step, now)
        return step

    def came(self, blocks: int) -> None:
        """So many leading blocks of the step have come, and are copied."""
        assert self._asked is not None
        (step, asked), self._asked = self._asked, None
        wanted = self._blocks[step.first : step.first + step.blocks]
        self._costs.observe_load(
            wanted[0].tier, sum(block.nbytes for block in wanted), self._choice.monotonic() - asked, whole=blocks == step.blocks
        )
        self._done += blocks
        self._tokens += sum(block.tokens for block in wanted[:blocks])
        if blocks < step.blocks and (self.free or not blocks):
            self.miss = "timeout" if self.free else CHEAPER
            self.end()

    def end(self) -> None:
        """No more is loaded. A second call does nothing."""
        if not (self._ended or self.free):
            lost = self._choice.monotonic() - self._began - self._computing(0, self._tokens)
            saved = self._choice.saved + self._choice.slack * self._whole - lost
            self._choice.saved = min(max(0.0, saved), self._whole)
        self._ended = True

    def split(self, spent: float = 0.0) -> int:
        """How many of all blocks to load, when `spent` seconds have brought those that are here.

        The least of `load(s) + compute(s, prompt)` over every s that can be reached, by steps as `step` would take them, without
        ever waiting longer than is allowed. A tier of which nothing is known counts as free: it is tried, and the limit of the
        waiting is what that may cost.
        """
        at, done, took = self._done, self._tokens, 0.0
        best, least = at, self._computing(done, self._prompt) * _WORTH
        while at < len(self._blocks):
            count = self._window(at, self._room(done, spent + took, at))
            if not count:
                break
            took += self._expected(at, count)
            done += sum(block.tokens for block in self._blocks[at : at + count])
            at += count
            total = took + self._computing(done, self._prompt)
            if total <= least:
                best, least = at, total
        return best

    def _window(self, first: int, room: float) -> int:
        """How many blocks of one tier to ask for at once, expected within `room` seconds: all may come together, at the end."""
        tier, nbytes, count = self._blocks[first].tier, 0, 0
        for block in self._blocks[first:]:
            nbytes += block.nbytes
            if block.tier != tier or (count and nbytes > WINDOW_BYTES):
                break
            if room < math.inf:
                expected = self._costs.load(tier, nbytes)
                if expected is None:
                    return int(room > 0)
                if expected > room:
                    break
            count += 1
        return count

    def _expected(self, first: int, count: int) -> float:
        """Seconds for these blocks, of one tier; 0 where nothing is known of it."""
        blocks = self._blocks[first : first + count]
        return self._costs.load(blocks[0].tier, sum(block.nbytes for block in blocks)) or 0.0

    def _bound(self, done: int, risk: float) -> float:
        """How long loading may have taken with `done` tokens here and no more: then the sum is bounded, if it stops."""
        return self._computing(0, done) + risk

    def _room(self, done: int, spent: float, at: int | None = None) -> float:
        """How long the next step, at block `at`, may be expected to take, with `done` tokens here after `spent` seconds."""
        room = _SAFE * (self._bound(done, self._risk) - spent)
        if self._costs.trusts(self._blocks[self._done if at is None else at].tier):
            room = max(room, _SURE * (self._bound(done, self._trusting) - spent))
        return room

    def _patience(self, count: int, spent: float) -> float:
        """How long the next step, of so many blocks, is waited for."""
        patience = self._bound(self._tokens, self._risk) - spent
        return max(patience, self._expected(self._done, count) / _SURE) if count else patience

    def _computing(self, start: int, stop: int) -> float:
        return self._costs.compute(start, stop) or 0.0  # passes are forgotten after hours: then there is no more time to wait


def steps(
    kv: SyncClient, namespace: Namespace, shard: Shard, links: Sequence[Link], loading: Loading
) -> Generator[tuple[Sequence[Link], Blocks], None, None]:
    """Ask a node for what `loading` wants of these blocks, step by step: what was asked for; what came, lent until the next one.

    Whoever takes them copies them out before asking for more. Where they came incomplete for another reason than time, it is over.
    """
    try:
        while (step := loading.step()) is not None:
            window = links[step.first : step.first + step.blocks]
            with kv.get(namespace, shard, window, deadline_ms=step.deadline_ms) as blocks:
                try:
                    yield window, blocks
                finally:
                    loading.came(len(blocks))  # also where that was enough
            if blocks.miss not in {"", "timeout"}:
                loading.miss = blocks.miss
                return
    finally:
        loading.end()
