"""Where a request goes: its prompt in blocks, what is where, and the router's price of each engine."""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore import codec
from kvstore.connectors.revisions import model_name
from kvstore.errors import Invalid, Overloaded, Unavailable
from kvstore.gateway.asked import LONGEST, Asked
from kvstore.gateway.decisions import Decisions
from kvstore.gateway.engines import Engine, Engines
from kvstore.gateway.whereabouts import Said, Whereabouts
from kvstore.gateway.words import Words
from kvstore.ids import Namespace, PrefixId, Shard, chain, extra_key
from kvstore.mesh.listening import Listener
from kvstore.mesh.price import Priced, Speed, Speeds
from kvstore.mesh.residency import Residency
from kvstore.mesh.router import Candidate, Prompt, Router, Ticket

log = logging.getLogger(__name__)
BLOCK_TOKENS: Final = 256  # where no node says how it cuts prompts
SETTLING_S: Final = 5.0  # from an answer's end until its KV is surely saved
_LOOK_S: Final = 5.0
# Until something was measured: an 8B model on a large GPU, a local disk, a 10 Gbit/s network. The order of magnitude decides.
ASSUMED: Final = Speeds(
    token_s=1 / 10_000,
    position_s=1e-9,
    dram=Speed(0.001, 20e9),
    nvme=Speed(0.002, 3e9),
    peer=Speed(0.003, 1e9),
    bucket=Speed(0.030, 0.5e9),
)


class Plan:
    """A request's engines, ranked; see :class:`kvstore.gateway.proxy.Choice`.

    Attributes:
        engines: The cheapest first.
        priced: What was predicted, by engine; empty where nothing is known of the prompt.
    """

    def __init__(self, routing: Routing, engines: Sequence[Engine], prompt: Prompt | None, priced: Sequence[Priced]) -> None:
        self._routing, self._prompt = routing, prompt
        self.engines = engines
        self.priced = {each.candidate: each for each in priced}

    def reasons(self, engine: Engine) -> str:
        """What was predicted, as JSON."""
        found = self.priced.get(engine.name)
        return "" if found is None else msgspec.json.encode(rounded(found)).decode()

    def sent(self, engine: Engine) -> Trip:
        """It goes there."""
        return Trip(self._routing, engine, self._prompt, self.priced.get(engine.name), self.priced.values())


class Trip:
    """A request at an engine."""

    def __init__(
        self, routing: Routing, engine: Engine, prompt: Prompt | None, priced: Priced | None, others: Iterable[Priced]
    ) -> None:
        self._routing, self._engine, self._priced = routing, engine, priced
        self._keys = set(prompt.keys) if prompt is not None else set[bytes]()
        self._ticket: Ticket | None = None
        self._number = routing.decisions.made(engine.name, others)
        if prompt is not None and priced is not None:
            self._ticket = routing.router.chosen(prompt, priced)
            if engine.settings.node:
                routing.fresh.begin(engine.settings.node, self._keys)

    def first_byte(self, seconds: float) -> None:
        """What was predicted for this engine is compared with what it took."""
        self._routing.decisions.first_byte(self._number, seconds)
        if self._ticket is None or self._priced is None:
            return
        self._routing.router.answered(self._ticket)
        priced, name = self._priced, self._engine.name
        if priced.queue_ms * 10 < priced.ms and not priced.split:  # nothing but computing
            self._routing.router.observe_compute(name, 0, priced.tokens.computed, seconds)

    def over(self) -> None:
        """Whatever came of it, it does not wait there any more."""
        self._routing.decisions.over(self._number)
        if self._ticket is not None:
            self._routing.router.answered(self._ticket)
            if self._engine.settings.node:
                self._routing.fresh.end(self._engine.settings.node, self._keys)


class Fresh:
    """Blocks that are being computed beside a node, or were until a moment ago: it has them soon.

    Args:
        monotonic: The clock.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._now: dict[str, Counter[bytes]] = {}
        self._ended: deque[tuple[float, str, set[bytes]]] = deque()

    def begin(self, node: str, keys: set[bytes]) -> None:
        """An engine computes these."""
        self._now.setdefault(node, Counter()).update(keys)

    def end(self, node: str, keys: set[bytes]) -> None:
        """It has, or failed to."""
        self._settle()
        self._ended.append((self._monotonic() + SETTLING_S, node, keys))

    def of(self, node: str) -> Collection[bytes]:
        """Those of one node."""
        self._settle()
        return self._now.get(node, ())

    def _settle(self) -> None:
        while self._ended and self._ended[0][0] < self._monotonic():
            _, node, keys = self._ended.popleft()
            counts = self._now[node]
            counts.subtract(keys)
            for key in keys:
                if not counts[key]:
                    del counts[key]


class Routing:
    """Chooses. Run `follow` and, where there are nodes, `whereabouts.keep` under a supervisor.

    Args:
        engines: Of one model.
        words: Its tokenizer.
        model: Its name, as engines' connectors know it, or its folder; "" where nodes are not asked.
        jitter: As :class:`kvstore.mesh.router.Router` takes it.
        monotonic: The clock.
        directory: Of the nodes' mesh, if there is one.

    Attributes:
        router: What ranks.
        fresh: What is being computed.
        decisions: The last ones.
        whereabouts: What nodes are asked.
    """

    def __init__(
        self,
        engines: Engines,
        words: Words,
        *,
        model: str,
        jitter: Callable[[], float],
        monotonic: Callable[[], float] = time.monotonic,
        directory: Said | None = None,
    ) -> None:
        self._engines, self._words = engines, words
        self._model = model_name(model) if model else ""
        self.router = Router(monotonic, jitter)
        self.fresh = Fresh(monotonic)
        self.decisions = Decisions(monotonic)
        beside = {each.settings.node: Shard(ranks=each.settings.ranks) for each in engines.all.values() if each.settings.node}
        self.whereabouts = Whereabouts(self.router, beside, monotonic, directory)
        self._namespace = Namespace(
            model=model or "any", revision="any", layers=1, page_bytes=1, layout="unknown", block_tokens=BLOCK_TOKENS
        )
        self._token_bytes = 1
        for engine in engines.all.values():
            self.router.join(Candidate(engine.name, engine.settings.node or engine.name, shares=False), ASSUMED)

    @property
    def namespace(self) -> Namespace:
        """Under which prompts are cut into blocks: the nodes' own, once one has said it."""
        return self._namespace

    async def choose(self, request: Asked) -> Plan:
        """See :class:`kvstore.gateway.proxy.Chooser`."""
        ready = sorted(self._engines.ready, key=lambda engine: engine.running / engine.settings.requests)
        tokens = await self._words.tokens(request, ready[0].url) if ready else None
        if not tokens or len(tokens) > LONGEST:
            return Plan(self, ready, None, [])
        return await self.plan(tokens, request.salt, ready)

    def refusal(self) -> Overloaded | Unavailable:
        """See there."""
        return self._engines.refusal()

    async def plan(self, tokens: Sequence[int], salt: str, ready: Sequence[Engine]) -> Plan:
        """As `choose`, for a prompt in tokens.

        Raises:
            Invalid: The tokens are none.
        """
        extra = {0: [extra_key("salt", salt)]} if salt else None
        blocks = [link.prefix_id for link in chain(self._namespace, _packed(tokens), extra=extra)]
        return await self.planned(blocks, len(tokens), ready)

    async def planned(self, blocks: Sequence[PrefixId], tokens: int, ready: Sequence[Engine]) -> Plan:
        """As `plan`, for a prompt of which the blocks are named."""
        keys = [bytes.fromhex(block) for block in blocks]
        if self._token_bytes > 1:
            await self.whereabouts.look(self._namespace, blocks, keys, self.fresh.of)
        prompt = Prompt(keys, tokens, self._namespace.block_tokens, self._token_bytes)
        by_name = {engine.name: engine for engine in ready}
        priced = [each for each in self.router.rank(prompt) if each.candidate in by_name]
        return Plan(self, [by_name[each.candidate] for each in priced], prompt, priced)

    async def follow(self) -> None:
        """Follow the engines' events, under the namespace that the nodes name as soon as they do. Runs until cancelled."""
        if not self._model and any(each.settings.node for each in self._engines.all.values()):
            log.warning("no model is set, so nodes are not asked what they have: set --model")
        while True:
            async with asyncio.TaskGroup() as listening:
                tasks = [listening.create_task(listener.run()) for listener in self._listeners()]
                while not await self._renamed():  # noqa: ASYNC110  nodes are asked; they do not tell
                    await asyncio.sleep(_LOOK_S)
                for task in tasks:  # they begin anew: what they know is cut differently
                    task.cancel()

    async def _renamed(self) -> bool:
        found = await self.whereabouts.namespace(self._model) if self._model else None
        if found is None or found.id == self._namespace.id:
            return False
        log.info("prompts are cut as namespace %s is, %d tokens to a block", found.id[:12], found.block_tokens)
        plan = codec.layout(found, Shard(), found.block_tokens) if found.layout == "canonical" else None
        size = plan.payload_bytes if plan is not None else found.page_bytes * found.layers
        self._namespace, self._token_bytes = found, max(2, size // found.block_tokens)
        return True

    def _listeners(self) -> list[Listener]:
        found = []
        for engine in self._engines.all.values():
            if engine.settings.events:
                residency = Residency(self._namespace, partial(self._resident, engine.name))
                found.append(Listener(engine.settings.events, engine.settings.replay, residency, topic=engine.settings.topic))
        return found

    def _resident(self, engine: str, more: Sequence[PrefixId], fewer: Sequence[PrefixId]) -> None:
        if more:
            self.router.engine_has(engine, [bytes.fromhex(each) for each in more])
        if fewer:
            self.router.engine_lost(engine, [bytes.fromhex(each) for each in fewer])


def _packed(tokens: Sequence[int]) -> Sequence[int] | NDArray[np.uint32]:
    """As an array: a prompt of 128k tokens takes numpy four milliseconds of the loop, and this one."""
    try:
        return np.frombuffer(array("I", tokens), np.uint32)
    except (TypeError, OverflowError):  # whoever cuts it says what is wrong
        return tokens


def rounded(priced: Priced) -> Priced:
    """With times to a tenth of a millisecond: predictions are no better than that."""
    times = {name: round(value, 1) for name, value in msgspec.structs.asdict(priced).items() if isinstance(value, float)}
    return msgspec.structs.replace(priced, **times)


def checked_blocks(blocks: Sequence[str]) -> list[PrefixId]:
    """PrefixIds from outside. Raises `Invalid`."""
    for block in blocks:
        if len(block) != 64 or set(block) - set("0123456789abcdef"):
            raise Invalid("prefix_ids have 64 lower-case hex digits each")
    return [PrefixId(block) for block in blocks]
