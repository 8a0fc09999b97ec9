"""SGLang's HiCache on a kvtier tier, by configuration alone.

::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier",
      "module_path": "kvstore.connectors.sglang", "class_name": "KVTierStorage", "interface_v1": 1,
      "url": "kvtier+unix:///run/kvtier/node.sock", "revision": "<of the weights>"}'

Pages are stored under SGLang's own hashes, which already tell salts and extra keys apart; see docs/engines/sglang.md.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kvstore.clock import RandomIds
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.pages import Pages
from kvstore.connectors.revisions import model_name, weights_revision
from kvstore.errors import Invalid
from kvstore.ids import Namespace, Shard

log = logging.getLogger(__name__)
IDENTITY: Final = "sglang-page-hash"
_KV: Final = "kv"
_KEYS: Final = frozenset({"url", "revision", "model", "tenant", "backend_name", "module_path", "class_name", "interface_v1"})
Extents = Sequence[tuple[int, int]]
"""Address and length of the parts of one page, in order."""


class KVTierStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is installed where this runs
    """One rank's storage. Nothing that goes wrong with the tier is an error here: it is a page that is not there, or not kept.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`; its `extra_config` holds `url`, `revision` (of the weights; of a local
            folder it is found out), and optionally `model` (what it is called on every machine) and `tenant`.

    Raises:
        Invalid: A setting is missing or wrong.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        extra = dict(storage_config.extra_config or {})
        unknown = sorted(key for key in set(extra) - _KEYS if not key.startswith(("prefetch", "hicache", "tp_")))
        if unknown:
            log.warning(
                "kvtier: extra config keys that are not known here: %s; known: %s", ", ".join(unknown), ", ".join(sorted(_KEYS))
            )
        if not extra.get("url"):
            raise Invalid('extra config needs "url", such as kvtier+unix:///run/kvtier/node.sock')
        self._config, self._extra = storage_config, extra
        self._model = str(extra.get("model") or model_name(storage_config.model_name or ""))
        self._revision = weights_revision(storage_config.model_name or "", str(extra.get("revision", "")))
        self._bridge = Bridge(extra["url"])
        self._pools: dict[str, _Pool] = {}
        self._flat: _Pool | None = None
        self._generation = b""

    # --- pools ---

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang's pool of pages in host memory."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools[_KV] = self._pool(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it: of states, of an indexer."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name != _KV or name not in self._pools:  # another one in its place: the memory of the one before is not ours any more
            self._pools[name] = self._pool(name, host_pool)

    def _pool(self, name: str, host_pool: Any) -> _Pool:
        return _Pool(
            self._bridge, host_pool, lambda kind, nbytes: (self._namespace(name, host_pool, kind, nbytes), self._shard(name))
        )

    def _namespace(self, pool: str, host_pool: Any, kind: str, nbytes: int) -> Namespace:
        """Everything that the bytes of a page depend on, besides its hash."""
        config = self._config
        parts = [pool, type(host_pool).__name__, str(getattr(host_pool, "layout", "")), kind, f"page{_page_size(host_pool)}"]
        parts += [f"pp{config.pp_rank}of{config.pp_size}", f"cp{config.attn_cp_rank}of{config.attn_cp_size}"]
        parts += [f"dcp{getattr(config, 'dcp_rank', 0)}of{getattr(config, 'dcp_size', 1)}"]
        return Namespace(
            model=self._model,
            revision=self._revision,
            layers=1,
            page_bytes=nbytes,
            dtype="U8",
            layout=f"sglang/{'/'.join(parts)}/{getattr(host_pool, 'dtype', '')}",
            block_tokens=_page_size(host_pool),
            tenant=str(self._extra.get("tenant", "default")),
            identity=IDENTITY,
        )

    def _shard(self, pool: str) -> Shard:
        """Every rank has a part of its own, but where all hold the same: the latent of MLA."""
        config = self._config
        return Shard() if config.is_mla_model and pool != "mamba" else Shard(rank=config.tp_rank, ranks=config.tp_size)

    def _keys(self, keys: Sequence[str]) -> list[bytes]:
        return [self._generation + key.encode() for key in keys]

    # --- pages in place: no copy but the one into or out of SGLang's pool ---

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002  the hashes say it all
        """Length of the leading run that is stored."""
        pool = self._pools.get(_KV)
        return 0 if pool is None else pool.exists(self._keys(keys))

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002  as above
        """Bring pages into the pool; which ones came."""
        return self._moved(_KV, keys, host_indices, _Pool.load)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002  as above
        """Keep pages of the pool; which ones are kept."""
        return self._moved(_KV, keys, host_indices, _Pool.save)

    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:  # noqa: ARG002  as above
        """The longest prefix of which every pool has what its policy wants."""
        kv = self.batch_exists(keys)
        hits: dict[str, int] = {_KV: kv} if kv else {}
        restorable = list(range(1, kv + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            able = self._restorable(transfer, keys[: restorable[-1]])
            restorable = [pages for pages in restorable if pages in able]
            if able:
                hits[str(transfer.name)] = max(able)
        return PoolTransferResult(restorable[-1] if restorable else 0, hits, restorable)

    def _restorable(self, transfer: Any, keys: Sequence[str]) -> set[int]:
        """Lengths of prefixes for which a pool has its pages."""
        pool = self._pools.get(str(transfer.name))
        if pool is None:
            return set()
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return set(range(1, pool.exists(self._keys(keys)) + 1))
        if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
            trailing, there = max(1, len(transfer.keys or ())), pool.present(self._keys(keys))
            return {end for end in range(1, len(keys) + 1) if all(there[max(0, end - trailing) : end])}
        log.error("kvtier: the hit policy %s of pool %s is not known: nothing is restored", transfer.hit_policy, transfer.name)
        return set()

    def batch_get_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002  as above
        """As `batch_get_v1`, for each pool."""
        return {each.name: self._moved(str(each.name), each.keys or [], each.host_indices, _Pool.load) for each in transfers}

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002  as above
        """As `batch_set_v1`, for each pool."""
        return {each.name: self._moved(str(each.name), each.keys or [], each.host_indices, _Pool.save) for each in transfers}

    def _moved(
        self, name: str, keys: Sequence[str], host_indices: Any, move: Callable[[_Pool, Sequence[bytes], Any], int]
    ) -> list[bool]:
        pool = self._pools.get(name)
        if pool is None or host_indices is None or len(host_indices) != len(keys) * pool.page_size:
            log.error("kvtier: %d pages of pool %s do not match its indices: not moved", len(keys), name)
            return [False] * len(keys)
        done = move(pool, self._keys(keys), host_indices)
        return [True] * done + [False] * (len(keys) - done)

    # --- pages as tensors, for SGLang's generic path ---

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:  # noqa: ARG002  SGLang passes none
        """Into `target_location`, which is returned; None where it is not there."""
        return self.batch_get([key], [target_location])[0]

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:  # noqa: ARG002  as above
        """As `get`, for several."""
        if not keys or not target_locations or not all(_whole(tensor) for tensor in target_locations):
            return [None] * len(keys)
        views = [_bytes_of(tensor) for tensor in target_locations]
        pages = self._pages(views[0].size)
        done = (
            0
            if pages is None
            else pages.loaded(self._keys(keys), lambda index, page: np.copyto(views[index], np.frombuffer(page, np.uint8)))
        )
        return [*target_locations[:done], *[None] * (len(keys) - done)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002  as above
        """Keep one page; whether it is kept."""
        return self.batch_set([key], [value])

    def batch_set(self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002  as above
        """Keep several; whether all are kept."""
        if not keys or not values or len(values) != len(keys):
            return False
        views = [_bytes_of(tensor.contiguous()) for tensor in values]
        pages = self._pages(views[0].size)
        if pages is None or any(view.size != pages.nbytes for view in views):
            return False
        return pages.saved(self._keys(keys), lambda index, room: np.copyto(np.frombuffer(room, np.uint8), views[index])) == len(
            keys
        )

    def exists(self, key: str) -> bool:
        """Whether it is stored."""
        return self.batch_exists([key]) == 1

    def _pages(self, nbytes: int) -> Pages | None:
        pool = self._pools.get(_KV)
        return None if pool is None else pool.flat(nbytes)

    # --- life ---

    def clear(self) -> None:
        """Forget every page, for this process: what is stored under other weights by the same name must not be met again.

        Others keep theirs; what nobody asks for any more is collected after the node's `anonymous_ttl`.
        """
        self._generation = RandomIds().new().encode()

    def get_stats(self) -> Mapping[str, Mapping[str, int]]:
        """What happened since the start (:class:`kvstore.connectors.transfers.Counts`)."""
        counts = self._bridge.counts.all()
        return {"looks": counts["looks"], "blocks": counts["blocks"], "bytes": counts["nbytes"]}

    def close(self) -> None:
        """Let go of the tier."""
        self._bridge.close()


class _Pool:
    """SGLang's pages in host memory, and what they are called in the tier."""

    def __init__(self, bridge: Bridge, host_pool: Any, naming: Callable[[str, int], tuple[Namespace, Shard]]) -> None:
        self._bridge, self._host, self._naming = bridge, host_pool, naming
        self._known: dict[tuple[str, int], Pages] = {}
        self.page_size = _page_size(host_pool)

    def load(self, keys: Sequence[bytes], host_indices: Any) -> int:
        """Leading run of pages that came."""
        extents = self._extents(host_indices, len(keys))
        if extents is None:
            return 0
        return self._in_place(extents).loaded(keys, lambda index, page: _scatter(page, extents[index]))

    def save(self, keys: Sequence[bytes], host_indices: Any) -> int:
        """Leading run of pages that are kept."""
        extents = self._extents(host_indices, len(keys))
        if extents is None:
            return 0
        return self._in_place(extents).saved(keys, lambda index, room: _gather(extents[index], room))

    def exists(self, keys: Sequence[bytes]) -> int:
        """Leading run of pages that are stored, in place or flat."""
        return max((pages.exists(keys) for pages in self._stored()), default=0)

    def present(self, keys: Sequence[bytes]) -> list[bool]:
        """Which pages are stored, in place or flat, whatever is missing before them."""
        return [any(each) for each in zip(*(pages.present(keys) for pages in self._stored()), strict=True)] or [False] * len(keys)

    def flat(self, nbytes: int) -> Pages:
        """Pages as SGLang flattens them."""
        return self._of("flat", nbytes)

    def _in_place(self, extents: Sequence[Extents]) -> Pages:
        return self._of("parts", sum(size for _, size in extents[0]))

    def _of(self, kind: str, nbytes: int) -> Pages:
        pages = self._known.get((kind, nbytes))
        if pages is None:
            namespace, shard = self._naming(kind, nbytes)
            pages = self._known[kind, nbytes] = Pages(self._bridge, namespace, shard)
        return pages

    def _stored(self) -> Sequence[Pages]:
        if not self._known:  # nothing was moved yet: the pool tells how long a page is
            extents = self._extents(np.arange(self.page_size), 1)
            if extents is not None:
                self._in_place(extents)
            flat = getattr(self._host, "get_dummy_flat_data_page", None)
            if flat is not None:
                self.flat(_bytes_of(flat()).size)
        return list(self._known.values())

    def _extents(self, host_indices: Any, pages: int) -> Sequence[Extents] | None:
        """Where each page's parts lie; None where this pool cannot say."""
        if not pages:
            return None
        try:
            pointers, sizes = self._host.get_page_buffer_meta(host_indices)
            parts = list(zip(pointers, sizes, strict=True))
        except Exception as error:  # noqa: BLE001  whatever it is, the page is not stored
            log.warning("kvtier: a pool of layout %s cannot be stored in place: %s", getattr(self._host, "layout", "?"), error)
            return None
        each = len(parts) // pages
        extents = [parts[first : first + each] for first in range(0, each * pages, each)] if each else []
        if len(parts) % pages or len({sum(size for _, size in page) for page in extents}) != 1:
            log.warning("kvtier: %d parts of %d pages are not as many bytes for each: not moved", len(parts), pages)
            return None
        return extents


def _page_size(host_pool: Any) -> int:
    """In tokens, of all ranks together where they share out a page (DCP): SGLang counts indices that way."""
    return int(getattr(host_pool, "logical_page_size", 0) or getattr(host_pool, "page_size", 1) or 1)


def _whole(tensor: Any) -> bool:
    """Whether its bytes lie together: those of another would be written into a copy."""
    return tensor is not None and tensor.is_contiguous()


def _bytes_of(tensor: Any) -> np.ndarray:
    """A contiguous CPU tensor's bytes."""
    import torch  # noqa: PLC0415  SGLang has it

    return np.asarray(tensor.reshape(-1).view(torch.uint8).numpy())


def _scatter(page: memoryview, extents: Extents) -> None:
    at = np.frombuffer(page, np.uint8).ctypes.data
    for address, size in extents:
        ctypes.memmove(address, at, size)
        at += size


def _gather(extents: Extents, room: memoryview) -> None:
    at = np.frombuffer(room, np.uint8).ctypes.data
    for address, size in extents:
        ctypes.memmove(at, address, size)
        at += size
