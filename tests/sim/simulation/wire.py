"""A node's connection to the store, its clock, and its death.

A request travels, takes effect, and its answer travels back, each for a random while. What may go wrong on the way is drawn from
the world's one source of randomness. Requests are the network's: they go on when the node that sent them is dead.
"""

import asyncio
import contextvars
import hashlib
import math
from dataclasses import dataclass

from kvstore.errors import Unavailable
from kvstore.objects import REFUSED, Absent, Crash, Got, Refused, Unchanged
from kvstore.objects.base import Stored

START = 1_700_000_000.0
PAGE = 25  # keys of a listing, so that others get in between its pages
LONGEST = 300.0  # seconds a request or a node may stand still: many collections


@dataclass
class Rates:
    """How often, for each request."""

    held: float = 0.006  # on its way there, then carried out and answered
    slow: float = 0.004  # on its way back
    lost: float = 0.006  # carried out, and the answer never comes
    dropped: float = 0.004  # never carried out
    late: float = 0.006  # given up by the node, carried out long after
    busy: float = 0.004
    resent: float = 0.010  # a conditional PUT that lands, and is answered 412 because something sent it twice
    twice: float = 0.006  # a conditional PUT that lands and is answered, and arrives once more long after
    pause: float = 0.004  # the whole node stands still
    crash: float = 0.004  # before it is sent, or once it is carried out

    @classmethod
    def none(cls):
        return cls(*([0.0] * 10))

    @classmethod
    def lossy(cls):
        """Nodes that live long, and hear little."""
        return cls(lost=0.1, resent=0.1, held=0.002, pause=0.001, crash=0.001)


class Wire:
    """An object store, as one life of a node sees it. See :class:`kvstore.objects.base.ObjectStore`."""

    def __init__(self, world, life):
        self._world, self._life = world, life

    async def get(self, key, *, range=None, into=None, if_none_match=None, arrived=None):  # noqa: A002  the contract's own names
        got = await self._ask("get", key, lambda: self._world.memory.get(key, range=range, if_none_match=if_none_match))
        if isinstance(got, Got) and into is not None:
            into[: len(got.data)] = got.data
            return Got(into[: len(got.data)], got.etag, got.size, got.modified)
        return got

    async def head(self, key):
        return await self._ask("head", key, lambda: self._world.memory.head(key))

    async def put(self, key, body, mode):
        return await self._ask(
            "put", key, lambda: self._world.write(self._life, key, mode, bytes(body)), mode=mode, body=bytes(body)
        )

    async def copy(self, source, target):
        return await self._ask("copy", target, lambda: self._world.copy(self._life, source, target))

    async def list(self, prefix, *, start_after=""):
        while True:
            page = await self._ask("list", prefix, lambda after=start_after: self._page(prefix, after))
            if page:
                yield page
            if len(page) < PAGE:
                return
            start_after = page[-1].key

    async def _page(self, prefix, after):
        objects = self._world.memory._objects
        keys = sorted(key for key in objects if key.startswith(prefix) and key > after)
        return [objects[key][1] for key in keys[:PAGE]]

    async def delete(self, keys):
        keys = list(keys)
        return await self._ask(
            "delete", keys[0] if keys else "", lambda: self._world.delete(self._life, keys), body="\n".join(keys).encode()
        )

    async def now(self):
        return await self._ask("now", "", self._world.memory.now)

    async def aclose(self):
        pass

    async def _ask(self, verb, key, call, mode=None, body=b""):
        life, world = self._life, self._world
        life.alive()
        number = world.begin(life, verb, key, mode, body)
        answer = life.expect()
        world.carry(_carried(world, life, number, world.fate(mode), call, answer))
        try:
            return await answer
        finally:
            life.waiting.pop(answer, None)


async def _carried(world, life, number, fate, call, answer):
    """A request on its way, as the network sees it."""
    if fate.kind == "crash" and fate.first:
        life.die()
        world.end(number, "crash before")
        return
    if fate.kind == "pause":
        life.until = max(life.until, world.now + fate.long)
        world.count("pauses")
    if fate.kind in {"dropped", "busy"}:
        await asyncio.sleep(fate.there)
        kind = "store_busy" if fate.kind == "busy" else "unavailable"
        await _answer(world, life, number, answer, Unavailable(f"request {number}: {fate.kind}", kind=kind))
        return
    if fate.kind == "late":
        world.count("late")
        await asyncio.sleep(fate.there)
        await _answer(world, life, number, answer, Unavailable(f"request {number}: given up", kind="timeout"))
        await asyncio.sleep(fate.long)
        world.end(number, "late " + _word(await call()))
        return
    if fate.kind == "held":
        world.count("stalls")
    await asyncio.sleep(fate.there + (fate.long if fate.kind == "held" else 0))
    result = await call()
    if fate.kind == "crash":
        world.end(number, "crash after " + _word(result))
        life.die()
        return
    if fate.kind == "slow":
        world.count("stalls")
    await asyncio.sleep(fate.back + (fate.long if fate.kind == "slow" else 0))
    if fate.kind == "lost":
        world.count("lost")
        result = Unavailable(f"request {number}: the answer was lost", kind="timeout")
    elif fate.kind == "resent" and isinstance(result, Stored):
        world.count("lost")
        result = REFUSED
    await _answer(world, life, number, answer, result)
    if fate.kind == "twice":
        world.count("twice")
        await asyncio.sleep(fate.long)
        world.end(number, "again " + _word(await call()))


async def _answer(world, life, number, answer, result):
    """Hand it over, once the node moves again."""
    while life.until > world.now:  # noqa: ASYNC110  it is a time, which may move on while we wait
        await asyncio.sleep(life.until - world.now)
    world.end(number, _word(result))
    if answer.done():
        return
    if isinstance(result, Exception):
        answer.set_exception(result)
    else:
        answer.set_result(result)


def _word(result):
    match result:
        case Stored() | Got():
            return f"ok {result.etag}"
        case Absent() | Refused() | Unchanged():
            return type(result).__name__
        case Unavailable():
            return result.kind
        case float():
            return f"{result:.6f}"
        case list():
            return f"{len(result)} keys"
    return str(result)


@dataclass
class Fate:
    kind: str
    there: float
    back: float
    long: float
    first: bool


def draw(random, rates, conditional, longest):
    """What becomes of a request. The same number of draws for each, so that one request's fate never depends on another's."""
    there, back, long = (random.random() for _ in range(3))
    first, lot = random.random() < 0.5, random.random()
    kind = ""
    for name, rate in vars(rates).items():
        if lot < rate:
            kind = name if name not in {"resent", "twice"} or conditional else ""
            break
        lot -= rate
    return Fate(kind, _spread(there, 0.001, 0.2), _spread(back, 0.001, 0.05), _spread(long, 1.0, longest), first)


def _spread(share, low, high):
    """Log-uniform."""
    return low * math.exp(share * math.log(high / low))


LIFE = contextvars.ContextVar("LIFE", default=None)


def task_of_its_life(loop, work, **options):
    """A task factory: whatever a node's code starts ends with that life of the node."""
    task, context = asyncio.Task(work, loop=loop, **options), options.get("context")
    life = LIFE.get() if context is None else context.get(LIFE)
    if life is not None:
        life.tasks[task] = None
        task.add_done_callback(life.tasks.pop)
    return task


class Life:
    """From one start of a node to its end. All its code waits either for an answer or for its clock, and both stop with it."""

    def __init__(self, world, node, number):
        self.world, self.node, self.number = world, node, number
        self.dead = False
        self.until = 0.0  # standing still until then
        self.waiting, self.tasks = {}, {}  # in order
        self.ended = asyncio.get_running_loop().create_future()

    def __str__(self):
        return f"{self.node.name}.{self.number}"

    def alive(self):
        if self.dead:
            raise Crash(f"{self} is dead")

    def start(self, work):
        """Run something as the node's own."""
        token = LIFE.set(self)
        task = asyncio.get_running_loop().create_task(work)
        LIFE.reset(token)
        task.add_done_callback(lambda over: over.cancelled() or over.exception())  # looked at: whoever asked may have left
        return task

    def expect(self):
        future = asyncio.get_running_loop().create_future()
        self.waiting[future] = None
        return future

    def die(self):
        if self.dead:
            return
        self.dead = True
        self.world.count("crashes")
        self.world.note(f"{self} dies")
        waiting, self.waiting = list(self.waiting), {}
        for future in waiting:
            if not future.done():
                future.set_exception(Crash(f"{self} died"))
                future.exception()
        if not self.ended.done():
            self.ended.set_result(None)

    async def buried(self):
        """Wait until nothing of it is left. The dead finish nothing: neither their work nor the closing of it."""
        await self.ended
        while self.tasks:
            for task in list(self.tasks):
                task.cancel()
            await asyncio.sleep(0.001)

    async def sleep(self, seconds):
        """Real seconds of the world, and as long as the node stands still."""
        self.alive()
        over = self.expect()
        handle = asyncio.get_running_loop().call_later(max(0.0, seconds), self._wake, over)
        try:
            await over
        finally:
            handle.cancel()
            self.waiting.pop(over, None)

    def _wake(self, over):
        if self.until > self.world.now:
            asyncio.get_running_loop().call_later(self.until - self.world.now, self._wake, over)
        elif not over.done():
            over.set_result(None)


class HostClock:
    """A host's idea of the time: off by up to an hour, and a little fast or slow."""

    def __init__(self, life, offset, rate):
        self._life, self._offset, self._rate = life, offset, rate
        self._boot = life.world.now

    def now(self):
        return START + self._offset + self._life.world.now * self._rate

    def monotonic(self):
        return (self._life.world.now - self._boot) * self._rate

    async def sleep(self, seconds):
        await self._life.sleep(seconds / self._rate)


class StoreClock:
    """The store's own, and that of whoever looks on from outside."""

    def __init__(self, world):
        self._world = world

    def now(self):
        return START + self._world.now

    def monotonic(self):
        return self._world.now

    async def sleep(self, seconds):
        await asyncio.sleep(seconds)


def digest(body):
    return hashlib.blake2b(body, digest_size=8).hexdigest() if body else ""
