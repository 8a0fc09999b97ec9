"""LMCache's multiprocess server on a kvtier tier, by configuration alone.

::

    lmcache server ... --l2-adapter '{"type": "plugin", "module_path": "kvstore.connectors.lmcache_l2",
      "class_name": "KVTierL2Adapter", "adapter_params": {"url": "kvtier+unix:///run/kvtier/node.sock"}}'

Objects are stored under LMCache's own keys; see docs/engines/lmcache.md.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, Final, NamedTuple

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from kvstore.connectors.bounded import Bounded
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.pages import Pages
from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.errors import Invalid
from kvstore.ids import Namespace, Shard, length_prefixed

log = logging.getLogger(__name__)
_KEYS: Final = frozenset({"url", "revision", "tenant"})
_CONNECT_S: Final = 5.0  # a server rather starts late than cold; without a node it starts then, and one that comes later is found
_LOAD_S: Final = 10.0
_WAITING: Final = 256  # tasks of a kind; LMCache is told at once that a further one failed


class _Kind(NamedTuple):
    """Keys whose objects have one shape, of one rank: where one is missing, those after it are of no use to a prefix."""

    model: str
    rank: int
    group: int
    salt: str


class KVTierL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is installed where this runs
    """A node behind LMCache's memory. What goes wrong with it is an object that is not there, or not kept.

    Nothing is locked: an object that leaves the node's memory between a look-up and its load is on disk or in the bucket. Nothing
    is deleted or accounted either: the node keeps its tiers within their sizes, and collects what nobody uses.

    Args:
        params: `url`; `revision`, of the weights, or an object that names one for each model id (of a local folder it is found
            out); `tenant`.
        l1_memory_desc: Not used.

    Raises:
        Invalid: A parameter is missing or wrong.
    """

    def __init__(self, params: Mapping[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002  LMCache hands it over
        super().__init__()
        if unknown := sorted(set(params) - _KEYS):
            raise Invalid(f"adapter_params has unknown keys: {', '.join(unknown)}; known: {', '.join(sorted(_KEYS))}")
        if not params.get("url"):
            raise Invalid('adapter_params needs "url", such as kvtier+unix:///run/kvtier/node.sock')
        self._params = dict(params)
        self._bridge = Bridge(str(params["url"]))
        self._stores, self._looks, self._loads = _Tasks("store", 1), _Tasks("look", 1), _Tasks("load", 2)
        self._ids = count(1)
        self._pages: dict[tuple[_Kind, str], Pages | None] = {}
        self._bridge.wait_connected(_CONNECT_S)
        self._layouts: dict[_Kind, tuple[str, int]] = {}  # of objects that were seen here, for a look-up without a hint

    # --- descriptors that say that something is done ---

    def get_store_event_fd(self) -> int:
        """Readable when a store task has ended."""
        return self._stores.fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Readable when a look-up has ended."""
        return self._looks.fd

    def get_load_event_fd(self) -> int:
        """Readable when a load task has ended."""
        return self._loads.fd

    # --- store ---

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Keep objects; their memory is read until the task has ended."""

        def store() -> L2StoreResult:
            kept, nbytes = 0, 0
            for pages, at in self._by_pages(keys, objects):
                run = pages.saved([_name(keys[i]) for i in at], _out_of([objects[i] for i in at]))
                kept, nbytes = kept + run, nbytes + run * pages.nbytes
            return L2StoreResult(kept == len(keys), nbytes)

        return self._stores.submit(next(self._ids), store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, Any]:
        """What ended since this was last asked."""
        return self._stores.pop_all()

    # --- look up ---

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Which objects are stored."""

        def look() -> Any:
            found = Bitmap(len(keys))
            for kind, at in _parts(keys):
                hint = group_layout_descs.get(kind.group)
                layout = self._layouts.get(kind) if hint is None else _layout(hint.shapes, hint.dtypes)
                pages = None if layout is None else self._of(kind, layout)
                if pages is not None:  # not only a leading run: a sliding window wants the end, whatever is missing before
                    for i, there in zip(at, pages.present([_name(keys[i]) for i in at]), strict=True):
                        if there:
                            found.set(i)
            return found

        return self._looks.submit(next(self._ids), look, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Any:
        """Once, when it has ended; None before."""
        return self._looks.pop(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """Nothing was locked."""

    # --- load ---

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Bring objects into LMCache's memory, which is written until the task has ended."""

        def load() -> Any:
            came = Bitmap(len(keys))
            for pages, at in self._by_pages(keys, objects):
                run = pages.loaded([_name(keys[i]) for i in at], _into([objects[i] for i in at]), _LOAD_S)
                for i in at[:run]:
                    came.set(i)
            return came

        return self._loads.submit(next(self._ids), load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Any:
        """Once, when it has ended; None before."""
        return self._loads.pop(task_id)

    # --- life ---

    def report_status(self) -> dict[str, Any]:
        """Whether a node was reached, and what happened (:class:`kvstore.connectors.transfers.Counts`)."""
        counts = self._bridge.counts.all()
        return {
            "is_healthy": self._bridge.connected,
            "type": type(self).__name__,
            "looks": counts["looks"],
            "blocks": counts["blocks"],
            "bytes": counts["nbytes"],
        }

    def close(self) -> None:
        """Let go of the tier. Past this no memory of LMCache's is touched."""
        self._bridge.close()
        for each in (self._stores, self._looks, self._loads):
            each.close()

    # --- parts ---

    def _by_pages(self, keys: Sequence[Any], objects: Sequence[Any]) -> Iterable[tuple[Pages, list[int]]]:
        """Where the keys of each kind are; without those that have no name here."""
        for kind, at in _parts(keys):
            layouts: dict[tuple[str, int], list[int]] = {}
            for i in at:
                layouts.setdefault(_layout_of(objects[i]), []).append(i)
            for layout, those in layouts.items():
                self._layouts[kind] = layout
                fitting = [i for i in those if objects[i].get_size() == layout[1]]  # a serde's buffers are narrowed: not kept
                pages = self._of(kind, layout)
                if pages is not None and fitting:
                    yield pages, fitting

    def _of(self, kind: _Kind, layout: tuple[str, int]) -> Pages | None:
        known = kind._replace(rank=0, salt=""), layout[0]  # ranks and salts are told apart by the keys
        if known not in self._pages:
            try:
                self._pages[known] = Pages(self._bridge, self._namespace(kind, *layout), Shard())
            except Invalid as error:
                log.error("kvtier: nothing of model %s is kept or found: %s", kind.model, error)  # noqa: TRY400  its words say it all
                self._pages[known] = None
        return self._pages[known]

    def _namespace(self, kind: _Kind, layout: str, nbytes: int) -> Namespace:
        given = self._params.get("revision", "")
        return Namespace(
            model=model_name(kind.model),
            revision=weights_revision(kind.model, str(given.get(kind.model, "") if isinstance(given, Mapping) else given)),
            layers=1,
            page_bytes=nbytes,
            dtype="U8",
            layout=f"lmcache-l2/{kind.group}/{layout}",
            block_tokens=1,  # LMCache says nothing of tokens here
            tenant=str(self._params.get("tenant") or "default"),
            identity="lmcache-object-key",
        )


class _Tasks:
    """Tasks of one kind: what they return waits until it is fetched, and a descriptor becomes readable."""

    def __init__(self, name: str, threads: int) -> None:
        self._notifier = create_event_notifier()
        self._workers = Bounded(f"kvtier-l2-{name}", threads, _WAITING)
        self._done: dict[int, Any] = {}
        self._lock = threading.Condition()
        self._running, self._closed = 0, False

    @property
    def fd(self) -> int:
        return int(self._notifier.fileno())

    def submit(self, task: int, work: Callable[[], Any], failed: Any) -> int:
        def run() -> None:
            with self._lock:
                if self._closed:
                    return
                self._running += 1
            result = failed
            try:
                result = work()
            except Exception:
                log.exception("kvtier: an unexpected error: taken as a miss")
            finally:
                self._end(task, result)

        if self._workers.submit(run) is None:
            with self._lock:
                self._running += 1
            self._end(task, failed)
        return task

    def _end(self, task: int, result: Any) -> None:
        with self._lock:
            self._running -= 1
            self._lock.notify_all()
            if not self._closed:
                self._done[task] = result
                self._notifier.notify()

    def pop(self, task: int) -> Any:
        with self._lock:
            return self._done.pop(task, None)

    def pop_all(self) -> dict[int, Any]:
        with self._lock:
            done, self._done = self._done, {}
        return done

    def close(self) -> None:
        self._workers.close()
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: self._running == 0)  # each of them ends by itself, in a bounded time
            self._notifier.close()


def _parts(keys: Sequence[Any]) -> Iterable[tuple[_Kind, list[int]]]:
    parts: dict[_Kind, list[int]] = {}
    for i, key in enumerate(keys):
        parts.setdefault(_Kind(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt), []).append(i)
    return parts.items()


def _layout(shapes: Sequence[Any], dtypes: Sequence[Any]) -> tuple[str, int]:
    """Shapes and dtypes as text, and how many bytes that is."""
    both = list(zip(shapes, dtypes, strict=True))
    text = ";".join(f"{dtype}[{','.join(map(str, shape))}]" for shape, dtype in both)
    return text, sum(math.prod(shape) * dtype.itemsize for shape, dtype in both)


def _layout_of(chunk: Any) -> tuple[str, int]:
    meta = chunk.metadata
    return _layout(meta.shapes or [meta.shape], meta.dtypes or [meta.dtype])


def _name(key: Any) -> bytes:
    rank = key.kv_rank.to_bytes(8, "little", signed=True)
    return length_prefixed(key.chunk_hash, rank, key.cache_salt.encode())


def _bytes_of(chunk: Any) -> np.ndarray:
    return np.frombuffer(memoryview(chunk.byte_array).cast("B"), np.uint8)


def _out_of(chunks: Sequence[Any]) -> Callable[[int, memoryview], None]:
    return lambda i, page: np.copyto(np.frombuffer(page, np.uint8), _bytes_of(chunks[i]))


def _into(chunks: Sequence[Any]) -> Callable[[int, memoryview], None]:
    return lambda i, page: np.copyto(_bytes_of(chunks[i]), np.frombuffer(page, np.uint8))
