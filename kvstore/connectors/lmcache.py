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
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from lmcache.integration.vllm.utils import get_size_bytes
from lmcache.v1.protocol import RemoteMetadata
from lmcache.v1.storage_backend.connector import ConnectorAdapter
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kvstore.connectors.bridge import LOAD_S, Bridge
from kvstore.connectors.pages import SAVE_S, Pages
from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.connectors.transfers import Stopped, Transfer
from kvstore.errors import Corrupt, Invalid
from kvstore.ids import Namespace, Shard

log = logging.getLogger(__name__)
R = TypeVar("R")
NAME: Final = "kvtier"
_SETTING: Final = "remote_storage_plugin.{}.{}"
_MARGIN: Final = 0.9  # of the time that LMCache waits: what came until then is used


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
        self._patience_s = min(LOAD_S, float(context.config.blocking_timeout_secs))
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
        pages, got, run = self._of(keys), list[Any](), 0
        transfer = pages.load(_names(keys), lambda _, page: got.append(self._chunk(page)), deadline_s=self._patience_s * _MARGIN)
        try:
            run = await _over(transfer, self._patience_s)
        finally:
            _let_go(got[run:])  # what came, and was not vouched for, or is not wanted any more
        return got[:run]

    async def get(self, key: Any) -> Any:
        """One chunk; None where it is not there."""
        return (await self.batched_get([key]))[0]

    def _chunk(self, page: memoryview) -> Any:
        """A page's chunk, copied into memory of LMCache's. Raises `Stopped` where LMCache has none: those before it are used."""
        said = RemoteMetadata.deserialize(bytes(page[-self.remote_metadata_bytes :]))
        if not 0 < said.length == get_size_bytes(said.shapes, said.dtypes) <= len(page) - self.remote_metadata_bytes:
            raise Corrupt(f"a chunk says that it has {said.length} bytes")
        # Not `busy_loop`: waiting for others to give memory back has no end, and a chunk that is not there is computed.
        chunk = self._memory.allocate(said.shapes, said.dtypes, said.fmt, busy_loop=False)
        if chunk is None:
            log.warning("kvtier: LMCache has no room for a chunk: raise max_local_cpu_size")
            raise Stopped
        np.copyto(_bytes_of(chunk), np.frombuffer(page, np.uint8)[: said.length])
        return chunk

    def support_batched_put(self) -> bool:
        """Yes."""
        return True

    async def batched_put(self, keys: Sequence[Any], memory_objs: Sequence[Any]) -> None:
        """Keep chunks, or drop what cannot be kept now. No byte of theirs is read after this is over, or was cancelled."""
        pages = self._of(keys)
        room = pages.nbytes - self.remote_metadata_bytes
        fitting = [(key, chunk) for key, chunk in zip(keys, memory_objs, strict=True) if chunk.get_size() <= room]
        if len(fitting) < len(keys):
            log.warning("kvtier: %d chunks have more than the %d bytes of a full one: not kept", len(keys) - len(fitting), room)
        if fitting:
            names = _names([key for key, _ in fitting])
            await _over(pages.save(names, lambda index, page: _fill(fitting[index][1], page, self.remote_metadata_bytes)), SAVE_S)

    async def put(self, key: Any, memory_obj: Any) -> None:
        """As `batched_put`, for one."""
        await self.batched_put([key], [memory_obj])

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
        return await asyncio.get_running_loop().run_in_executor(None, work)


async def _over(transfer: Transfer, patience_s: float) -> int:
    """How many leading chunks moved. Past this no memory of LMCache's is touched, however it ended."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def tell() -> None:
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(ended.set)

    transfer.then(tell)
    try:
        await asyncio.wait_for(ended.wait(), patience_s)
    except TimeoutError:
        log.warning("kvtier: %d chunks took longer than %.0f s: gone on without", len(transfer.links), patience_s)
        return 0
    finally:
        transfer.stop()
    return transfer.run


def _names(keys: Sequence[Any]) -> list[bytes]:
    return [key.to_string().encode() for key in keys]


def _bytes_of(chunk: Any) -> np.ndarray:
    return np.frombuffer(memoryview(chunk.byte_array).cast("B"), np.uint8)


def _fill(chunk: Any, page: memoryview, trailer: int) -> None:
    source, target = _bytes_of(chunk), np.frombuffer(page, np.uint8)
    np.copyto(target[: source.size], source)
    target[source.size : -trailer] = 0
    said = RemoteMetadata(source.size, chunk.get_shapes(), chunk.get_dtypes(), chunk.get_memory_format())
    target[-trailer:] = np.frombuffer(said.serialize(), np.uint8)


def _let_go(chunks: Sequence[Any]) -> None:
    for chunk in chunks:
        chunk.ref_count_down()
