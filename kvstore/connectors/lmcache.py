"""LMCache's remote storage on a kvtier tier, by configuration alone.

::

    remote_storage_plugins: ["kvtier"]
    extra_config:
      remote_storage_plugin.kvtier.module_path: kvstore.connectors.lmcache
      remote_storage_plugin.kvtier.class_name: KVTierAdapter
      remote_storage_plugin.kvtier.url: kvtier+unix:///run/kvtier/node.sock

Chunks are stored under LMCache's own keys; see docs/engines/lmcache.md.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.connectors.bridge import Bridge
from kvstore.connectors.pages import Pages
from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.errors import Invalid
from kvstore.ids import Namespace, Shard

log = logging.getLogger(__name__)
R = TypeVar("R")
NAME: Final = "kvtier"
_SETTING: Final = "remote_storage_plugin.{}.{}"


class KVTierAdapter(ConnectorAdapter):  # type: ignore[misc]  # LMCache is installed where this runs
    """What LMCache looks for; it makes the connector."""

    def __init__(self) -> None:
        super().__init__(f"plugin://{NAME}")

    def create_connector(self, context: Any) -> KVTierRemote:
        """A connector for one worker, or for the scheduler, which only asks what is there.

        Raises:
            Invalid: A setting is missing or wrong.
        """
        return KVTierRemote(context)


class KVTierRemote(RemoteConnector):  # type: ignore[misc]  # as above
    """One worker's remote storage. What goes wrong with the tier is a chunk that is not there, or not kept.

    Args:
        context: LMCache's `ConnectorContext`.
    """

    def __init__(self, context: Any) -> None:
        super().__init__(context.config, context.metadata)
        extra, plugin = context.config.extra_config or {}, context.plugin_name or NAME
        settings = {key: str(extra.get(_SETTING.format(plugin, key), "")) for key in ("url", "revision", "model", "tenant")}
        if not settings["url"]:
            raise Invalid(f"extra_config needs {_SETTING.format(plugin, 'url')}, such as kvtier+unix:///run/kvtier/node.sock")
        self._config, self._metadata = context.config, context.metadata
        self._model = settings["model"] or model_name(context.metadata.model_name)
        self._revision = weights_revision(context.metadata.model_name, settings["revision"])
        self._tenant = settings["tenant"] or "default"
        self._memory = context.local_cpu_backend
        self._bridge = Bridge(settings["url"])
        layers = max(1, int(context.metadata.kv_shape[0]))
        self._chunks = self._pages(self.full_chunk_size_bytes, "chunk")
        self._layers = self._pages(-(-self.full_chunk_size_bytes // layers), "layer")

    def _pages(self, nbytes: int, kind: str) -> Pages:
        """A page is a chunk, and behind it what LMCache says of it: a chunk that is not full ends in zeros."""
        metadata, config = self._metadata, self._config
        parts = [kind, "x".join(map(str, metadata.kv_shape)), str(metadata.kv_dtype), self.meta_fmt.name, str(config.remote_serde)]
        namespace = Namespace(
            model=self._model,
            revision=self._revision,
            layers=1,
            page_bytes=nbytes + self.remote_metadata_bytes,
            dtype="U8",
            layout=f"lmcache/{'/'.join(parts)}",
            block_tokens=int(metadata.chunk_size),
            tenant=self._tenant,
            identity=f"lmcache-{config.pre_caching_hash_algorithm}",
        )
        return Pages(self._bridge, namespace, Shard())  # workers are told apart by the keys

    # --- what is there ---

    def support_batched_contains(self) -> bool:
        """Yes."""
        return True

    def batched_contains(self, keys: Sequence[Any]) -> int:
        """Length of the leading run that is stored."""
        return self._of(keys).exists(_names(keys))

    async def batched_async_contains(self, lookup_id: str, keys: Sequence[Any], pin: bool = False) -> int:  # noqa: ARG002  LMCache's signature
        """As `batched_contains`."""
        return await self._aside(partial(self.batched_contains, keys))

    def exists_sync(self, key: Any) -> bool:
        """Whether it is stored."""
        return self.batched_contains([key]) == 1

    async def exists(self, key: Any) -> bool:
        """Whether it is stored."""
        return await self._aside(partial(self.exists_sync, key))

    # --- chunks ---

    def support_batched_get(self) -> bool:
        """Yes."""
        return True

    async def batched_get(self, keys: Sequence[Any]) -> list[Any]:
        """The leading run of chunks, in LMCache's own memory; None for the others."""
        found = await self.batched_get_non_blocking("", keys)
        return [*found, *[None] * (len(keys) - len(found))]

    async def batched_get_non_blocking(self, lookup_id: str, keys: Sequence[Any]) -> list[Any]:  # noqa: ARG002  LMCache's signature
        """The leading run of chunks."""
        getting = self._begun(partial(self._get, keys))
        try:
            return await asyncio.shield(getting)
        except asyncio.CancelledError:
            getting.add_done_callback(lambda done: None if done.exception() else _let_go(done.result()))
            raise

    async def get(self, key: Any) -> Any:
        """One chunk; None where it is not there."""
        return (await self.batched_get([key]))[0]

    def _get(self, keys: Sequence[Any]) -> list[Any]:
        pages, got = self._of(keys), list[Any]()
        try:
            run = pages.loaded(_names(keys), lambda _, page: got.append(self._chunk(page)))
        except BaseException:
            _let_go(got)
            raise
        _let_go(got[run:])  # what came, and was not vouched for
        return got[:run]

    def _chunk(self, page: memoryview) -> Any:
        """A page's chunk, copied into memory of LMCache's. Raises `_NoRoom`."""
        said = RemoteMetadata.deserialize(bytes(page[-self.remote_metadata_bytes :]))
        chunk = self._memory.allocate(said.shapes, said.dtypes, said.fmt)
        if chunk is None:
            raise _NoRoomError("LMCache has no room for a chunk: raise max_local_cpu_size")
        into = np.frombuffer(memoryview(chunk.byte_array).cast("B"), np.uint8)
        if into.size != said.length:
            chunk.ref_count_down()
            raise _NoRoomError(f"LMCache gave {into.size} bytes for a chunk of {said.length}")
        np.copyto(into, np.frombuffer(page, np.uint8)[: said.length])
        return chunk

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Keep chunks, or drop what cannot be kept now. LMCache gives its references back when this is over, cancelled or not."""
        putting = self._begun(partial(self._put, keys, memory_objs))
        try:
            await asyncio.shield(putting)
        except asyncio.CancelledError:
            await asyncio.wait([putting])  # until then their memory is read
            raise

    async def put(self, key: Any, memory_obj: Any) -> None:
        """As `batched_put`, for one."""
        await self.batched_put([key], [memory_obj])

    def _put(self, keys: Sequence[Any], chunks: Sequence[Any]) -> None:
        pages = self._of(keys)
        room = pages.nbytes - self.remote_metadata_bytes
        fitting = [(key, chunk) for key, chunk in zip(keys, chunks, strict=True) if chunk.get_size() <= room]
        if len(fitting) < len(keys):
            log.warning(
                "kvtier: %d chunks are larger than %d bytes, which a full chunk has: not kept", len(keys) - len(fitting), room
            )
        if fitting:
            pages.saved(
                _names([key for key, _ in fitting]), lambda index, page: _fill(fitting[index][1], page, self.remote_metadata_bytes)
            )

    # --- the rest ---

    def support_ping(self) -> bool:
        """Yes."""
        return True

    async def ping(self) -> int:
        """0 where the node answers."""
        asked = self._bridge.call("ping", lambda kv: kv.health())
        if asked is None:
            return 1
        try:
            await asyncio.wrap_future(asked)
        except Exception:  # noqa: BLE001  said and counted by the bridge
            return 1
        return 0

    async def list(self) -> list[str]:
        """Nothing: a tier knows chunks by digests of their keys."""
        return []

    def remove_sync(self, key: Any) -> bool:  # noqa: ARG002  LMCache's signature
        """No: what nobody uses any more is collected."""
        return False

    async def close(self) -> None:
        """Let go of the tier."""
        await self._aside(self._bridge.close)

    def _of(self, keys: Sequence[Any]) -> Pages:
        """Whole chunks, or with `use_layerwise` one layer of each."""
        return self._layers if keys and hasattr(keys[0], "layer_id") else self._chunks

    async def _aside(self, work: Callable[[], R]) -> R:
        return await self._begun(work)

    def _begun(self, work: Callable[[], R]) -> asyncio.Future[R]:
        return asyncio.get_running_loop().run_in_executor(None, work)


class _NoRoomError(Exception):
    """A chunk cannot be handed over."""


def _names(keys: Sequence[Any]) -> list[bytes]:
    return [key.to_string().encode() for key in keys]


def _fill(chunk: Any, page: memoryview, trailer: int) -> None:
    source = np.frombuffer(memoryview(chunk.byte_array).cast("B"), np.uint8)
    target = np.frombuffer(page, np.uint8)
    np.copyto(target[: source.size], source)
    target[source.size : -trailer] = 0
    said = RemoteMetadata(source.size, chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format())
    target[-trailer:] = np.frombuffer(said.serialize(), np.uint8)


def _let_go(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()
