"""A tier beside an engine: nothing here makes the engine wait, or raises into it.

Whatever goes wrong is a miss when KV is asked for, and a drop when it is offered; both are counted. The engine starts, and goes on,
without a node; one that comes later is found.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Final, Self, TypeVar

from kvstore import api, codec
from kvstore.client.fork import Birth
from kvstore.client.opening import open_sync
from kvstore.config import StorageUrl
from kvstore.connectors.arrivals import arrivals
from kvstore.connectors.bounded import Bounded
from kvstore.connectors.transfers import LOOK_S, Counts, Look, Stopped, Transfer
from kvstore.errors import KVTierError, Unavailable
from kvstore.ids import Link, Namespace, Shard

if TYPE_CHECKING:
    from kvstore.client import SyncClient

log = logging.getLogger(__name__)
R = TypeVar("R")
LOAD_S: Final = 30.0
_REOPEN_S: Final = (0.5, 1.0, 2.0, 5.0)  # between attempts to reach a node; the last one again and again
_SAID_S: Final = 60.0  # the same trouble is logged once in that time
_EXIT_S: Final = 2.0  # for copies under way, when the interpreter ends
_QUESTIONS, _LOADS, _SAVES, _CALLS = 256, 64, 256, 256


class Bridge:
    """One engine process's way to a tier. Close it when the engine shuts down; an interpreter that ends does not wait for it.

    In a forked child it finds nothing and takes nothing: the child opens its own.

    Args:
        url: A storage URL.

    Attributes:
        counts: What happened.

    Raises:
        Invalid: The URL cannot be right, whatever is there.
    """

    _shared: ClassVar[dict[str, Bridge]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, url: str) -> None:
        StorageUrl.parse(url)
        self._url, self._birth = url, Birth()
        self._users = 1
        self.counts = Counts()
        self._kv: SyncClient | None = None
        self._closing = threading.Event()
        self._said: dict[str, float] = {}
        self._questions = Bounded("kvtier-look", 1, _QUESTIONS)
        self._loads = Bounded("kvtier-load", 2, _LOADS)
        self._saves = Bounded("kvtier-save", 1, _SAVES)
        self._calls = Bounded("kvtier-call", 1, _CALLS)
        self._workers = (self._questions, self._loads, self._saves, self._calls)
        self._opener = threading.Thread(target=self._open, name="kvtier-open", daemon=True)
        self._opener.start()
        _open.add(self)

    @classmethod
    def shared(cls, url: str) -> Self:
        """The one of this process for a URL: an engine whose parts are in one process embeds one node, not one for each.

        Every one who asks closes it.
        """
        with cls._sharing:
            bridge = cls._shared.get(url)
            if bridge is None or not bridge.here:
                bridge = cls._shared[url] = cls(url)
            else:
                bridge._users += 1
        assert isinstance(bridge, cls)
        return bridge

    def news(self) -> dict[str, dict[str, int]]:
        """What was counted since this was last asked, by attribute of `Counts` and outcome: for metrics that add it up."""
        return self.counts.news()

    @property
    def here(self) -> bool:
        """Whether it was made in this process: a forked child has none of its threads."""
        return self._birth.here

    @property
    def connected(self) -> bool:
        """Whether a node has been reached."""
        return self._kv is not None

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a node has been reached: for tests, and for who would rather start late than cold."""
        self._opener.join(timeout_s)
        return self.connected

    # --- what an engine asks ---

    def look(self, namespace: Namespace, shards: Sequence[Shard], links: Sequence[Link]) -> Look:
        """How much of a chain is stored for all of these shards. Moves nothing."""
        ends = time.monotonic() + LOOK_S
        kv = self._kv
        if kv is None:
            return Look(None, lambda: None, len(links), self.counts, why="unavailable")

        def ask() -> api.Found:
            deadline_ms = max(1, int((ends - time.monotonic()) * 1000))
            return kv.lookup(namespace=namespace, prefix_ids=names, shards=shards, deadline_ms=deadline_ms)

        names = [link.prefix_id for link in links]
        at_once = kv.begin_lookup(namespace=namespace, prefix_ids=names, shards=shards, deadline_ms=int(LOOK_S * 1000))
        return Look(at_once, lambda: self._questions.submit(lambda: self._telling("look-up", ask)), len(links), self.counts)

    def load(
        self,
        namespace: Namespace,
        shard: Shard,
        links: Sequence[Link],
        place: Callable[[int, memoryview], None],
        *,
        near: int = 0,
        settle: Callable[[], None] | None = None,
        deadline_s: float = LOAD_S,
    ) -> Transfer:
        """Bring blocks into the engine's memory.

        Args:
            namespace: Theirs.
            shard: Whose part of each.
            links: The blocks, in prefix order.
            place: Called with (i, object) on some thread, in order, to copy the raw object of `links[i]`
                (:func:`kvstore.codec.layout` says where its tensors lie); its bytes were verified, and are lent for the call.
            near: How many leading ones are in the node's memory, where a look-up said so.
            settle: Waits until the copies that `place` began have ended; called before what was lent is given back.
            deadline_s: What has not arrived by then is lost.
        """
        transfer = Transfer(links, settle)
        guarded = transfer.guarded(place)

        def work() -> int:
            return self._telling("load", lambda: self._load(namespace, shard, links, guarded, near, transfer.settle, deadline_s))

        if not transfer.begin(self._loads, work):
            self.counts.add("blocks", "lost", len(links))
        return transfer

    def _load(
        self,
        namespace: Namespace,
        shard: Shard,
        links: Sequence[Link],
        place: Callable[[int, memoryview], None],
        near: int,
        settle: Callable[[], None],
        deadline_s: float,
    ) -> int:
        done = 0
        try:
            with closing(
                arrivals(self._client(), namespace, shard, links, near=near, deadline_ms=max(1, int(deadline_s * 1000)))
            ) as arriving:
                for _, blocks in arriving:
                    before = done
                    try:
                        for lease in blocks.leases:
                            place(done, lease.view)
                            done += 1
                            self.counts.add("nbytes", "loaded", lease.size)
                    finally:
                        settle()
                        if not blocks.intact:  # the node died while this was copied
                            done = before
                    if done < before + len(blocks.leases):
                        break
        except Stopped:
            pass
        finally:
            self.counts.add("blocks", "loaded", done)
            self.counts.add("blocks", "lost", len(links) - done)
        return done

    def save(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Callable[[int, memoryview], None]) -> Transfer:
        """Offer blocks out of the engine's memory, which must stay as it is until the transfer is done, or was stopped.

        Args:
            namespace: Theirs.
            shard: Whose part of each.
            links: The blocks.
            fill: Called with (i, payload) on some thread, in order, to copy the tensors of `links[i]` there, unless it is stored
                already.
        """
        transfer = Transfer(links)
        guarded = transfer.guarded(fill)

        def work() -> int:
            return self._telling("save", lambda: self._save(namespace, shard, links, guarded))

        if not transfer.begin(self._saves, work):
            self.counts.add("blocks", "dropped", len(links))
        return transfer

    def _save(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Callable[[int, memoryview], None]) -> int:
        taken = list[bool]()
        known = 0
        try:
            kv = self._client()
            names = [link.prefix_id for link in links]
            known = kv.lookup(namespace=namespace, prefix_ids=names, shards=(shard,)).run
            self.counts.add("blocks", "known", known)
            if known < len(links):
                taken = kv.put(namespace, shard, links[known:], lambda index, payload: fill(known + index, payload))
        except Stopped:
            pass
        finally:
            self.counts.add("blocks", "saved", sum(taken))
            self.counts.add("nbytes", "saved", sum(taken) * codec.layout(namespace, shard, namespace.block_tokens).raw_bytes)
            self.counts.add("blocks", "dropped", len(links) - known - sum(taken))
        return known + (taken.index(False) if False in taken else len(taken))

    def call(self, what: str, work: Callable[[SyncClient], R]) -> Future[R] | None:
        """A call about sessions, after those before it. None where too many wait; an error is counted, and is the future's."""

        def run() -> R:
            outcome = "error"
            try:
                done = self._telling(what, lambda: work(self._client()))
                outcome = "ok"
                return done
            except KVTierError as error:
                outcome = error.kind
                raise
            finally:
                self.counts.add("calls", outcome)

        future = self._calls.submit(run)
        if future is None:
            self.counts.add("calls", "busy")
        return future

    def close(self) -> None:
        """Let go of every lease. What was saved and is with the node stays; what waits here is dropped."""
        if not self._birth.here:
            return  # nothing of it is the child's
        with self._sharing:
            self._users -= 1
            if self._users > 0:
                return
            if self._shared.get(self._url) is self:
                del self._shared[self._url]
        self._end()

    def leave(self) -> None:
        """The interpreter ends: close it, whoever else uses it, and give copies under way a moment.

        Its threads are daemons; none of them may be in the middle of the engine's memory when that goes.
        """
        self._end()
        for each in self._workers:
            each.join(_EXIT_S)

    def _end(self) -> None:
        self._closing.set()
        for each in self._workers:
            each.close()
        self._opener.join(1.0)
        if self._kv is not None:
            self._kv.close()

    # --- parts ---

    def _client(self) -> SyncClient:
        if self._kv is None:
            raise Unavailable(f"no node has answered at {self._url} yet")
        return self._kv

    def _open(self) -> None:
        for attempt in count():
            try:
                kv = open_sync(self._url)
            except Exception as error:  # noqa: BLE001  whatever it is, the engine runs without a tier until it is mended
                self._say("open", error)
            else:
                self._kv = kv
                if self._closing.is_set():
                    kv.close()
                return
            if self._closing.wait(_REOPEN_S[min(attempt, len(_REOPEN_S) - 1)]):
                return

    def _telling(self, what: str, work: Callable[[], R]) -> R:
        try:
            return work()
        except Exception as error:
            self._say(what, error)
            raise

    def _say(self, what: str, error: Exception) -> None:
        """Log trouble, and the same trouble not again and again."""
        key, now = f"{what} {getattr(error, 'kind', type(error).__name__)}", time.monotonic()
        if now - self._said.get(key, -_SAID_S) < _SAID_S:
            return
        self._said[key] = now
        expected = isinstance(error, KVTierError)
        log.warning("kvtier: %s failed, the engine goes on without: %s", what, error, exc_info=None if expected else error)


_open: weakref.WeakSet[Bridge] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    for bridge in [each for each in _open if each.here]:
        bridge.leave()
