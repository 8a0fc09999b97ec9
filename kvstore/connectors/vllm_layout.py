"""Where the bytes of a block lie in vLLM's cache, and in ours.

vLLM gives each layer a tensor [blocks, heads, tokens, content] of any strides, where content is a head's key and then its value
(MLA: the latent). The canonical layout wants [tokens, heads, dim] for keys and values: a transposition, which views do. The CPU
backend orders the inside of a block as its instructions like it, so there a block is so many bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.codec.layout import TOKEN_IDS, Layout
from kvstore.connectors.vllm_messages import NOWHERE
from kvstore.errors import Unsupported
from kvstore.ids import DTYPE_BYTES, Namespace

if TYPE_CHECKING:
    import torch

_INTEGERS: Final = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}  # numpy has no bfloat16, and bits are bits


def views(cache: Any, namespace: Namespace, blocks: int) -> list[Any]:
    """A layer's cache as the tensors of the layout: each [n * blocks, ...], where the first index is the block's, or its part's.

    Args:
        cache: The layer's tensor, [blocks * n, heads, tokens / n, content].
        namespace: Says which layout.
        blocks: How many the engine has.

    Returns:
        k and v, or c (MLA), or the bytes (opaque), as integers of the same width.

    Raises:
        Unsupported: It has other dimensions, or a block's bytes do not lie together.
    """
    import torch  # noqa: PLC0415  only an engine has it

    if cache.ndim != 4 or cache.shape[0] % blocks:
        raise Unsupported(f"a cache of shape {tuple(cache.shape)} for {blocks} blocks", remedy="vLLM 0.32 or later")
    if namespace.page_bytes:
        return [_pages(cache, blocks)]
    bits = cache.view(getattr(torch, _INTEGERS[cache.element_size()]))
    if namespace.mla_rank:
        if cache.shape[1] != 1 or cache.shape[3] != namespace.mla_rank + namespace.mla_rope:
            raise Unsupported(f"a cache of shape {tuple(cache.shape)} is no latent of {namespace.mla_rank}+{namespace.mla_rope}")
        return [bits[:, 0]]
    dim = namespace.head_dim
    if cache.shape[3] != 2 * dim or cache.element_size() != DTYPE_BYTES[namespace.dtype]:
        raise Unsupported(
            f"a cache of shape {tuple(cache.shape)} of {cache.dtype} holds no keys and values of {dim} {namespace.dtype}"
        )
    return [bits[..., :dim].transpose(1, 2), bits[..., dim:].transpose(1, 2)]


def _pages(cache: Any, blocks: int) -> Any:
    """A block's bytes in the order in which they lie, u8 [blocks, bytes]."""
    import torch  # noqa: PLC0415  an extra, or the engine's own

    order = sorted((1, 2, 3), key=lambda axis: (-cache.stride(axis), cache.shape[axis]))
    ordered = cache.permute(0, *order)
    parts = cache.shape[0] // blocks
    size = cache[0].numel() * cache.element_size()
    if not ordered[0].is_contiguous() or (parts > 1 and ordered.stride(0) * cache.element_size() != size):
        raise Unsupported("the bytes of a block do not lie together", remedy="VLLM_KV_CACHE_LAYOUT=LBHNC")
    flat = ordered.view(torch.uint8)
    return flat.as_strided((blocks, size * parts), (flat.stride(0) * parts, 1))


class HostPages:
    """The blocks of one attention group in a CPU's memory.

    Args:
        plan: Of a block of ours.
        caches: The layers' tensors, in the plan's order.
        namespace: Theirs.
        blocks: How many blocks the engine has.
        pages: How many of them make one of ours.

    Attributes:
        nbytes: Of one of our blocks.
    """

    def __init__(self, plan: Layout, caches: Sequence[torch.Tensor], namespace: Namespace, blocks: int, pages: int) -> None:
        found = [view for cache in caches for view in views(cache, namespace, blocks)]
        named = [spec for spec in plan.specs if spec.name != TOKEN_IDS]
        if len(found) != len(named):
            raise Unsupported(f"{len(found)} tensors where the layout has {len(named)}")
        self._plan, self._views, self._pages = plan, self._held(found), pages
        for view, size, spec in zip(self._views, plan.sizes, named, strict=False):
            if self._part_bytes(view) * pages * (view.shape[0] // blocks) != size:
                raise Unsupported(f"{spec.name} has {size} bytes, and {pages} blocks of shape {tuple(view.shape[1:])} have others")
        self._parts = found[0].shape[0] // blocks
        self.nbytes = plan.payload_bytes

    def mark(self) -> Any:
        """On the engine's thread: what the engine has begun by now. `read` and `write` come after it."""
        return None

    def read(self, pages: Sequence[int], tokens: np.ndarray, payload: memoryview, mark: Any) -> None:  # noqa: ARG002  a device's
        """Copy a block out of the engine's memory.

        Args:
            pages: The engine's blocks that make it up.
            tokens: The ids, u32 [n].
            payload: Where its tensors go.
            mark: From `mark`.
        """
        whole = np.frombuffer(payload, np.uint8)
        rows = self._rows(pages)
        for view, offset, size in zip(self._views, self._plan.offsets, self._plan.sizes, strict=False):
            region = whole[offset : offset + size].view(view.dtype).reshape(len(rows), *view.shape[1:])
            for index, row in enumerate(rows):
                region[index] = view[row]
        self._put_tokens(whole, tokens)

    def write(self, pages: Sequence[int], raw: memoryview, mark: Any) -> None:  # noqa: ARG002  a device's
        """Copy a block into the engine's memory.

        Args:
            pages: The engine's blocks that make it up; `NOWHERE` where one is not wanted.
            raw: The whole raw object.
            mark: From `mark`.
        """
        whole = np.frombuffer(raw, np.uint8)[self._plan.header_bytes :]
        rows = self._rows(pages)
        for view, offset, size in zip(self._views, self._plan.offsets, self._plan.sizes, strict=False):
            region = whole[offset : offset + size].view(view.dtype).reshape(len(rows), *view.shape[1:])
            for index, row in enumerate(rows):
                if row != NOWHERE:
                    view[row] = region[index]

    def _rows(self, pages: Sequence[int]) -> list[int]:
        parts = self._parts
        return [NOWHERE if page == NOWHERE else page * parts + part for page in pages for part in range(parts)]

    def _put_tokens(self, whole: np.ndarray, tokens: np.ndarray) -> None:
        if self._plan.specs[-1].name == TOKEN_IDS:
            whole[self._plan.offsets[-1] :][: self._plan.sizes[-1]] = np.ascontiguousarray(tokens, "<u4").view(np.uint8)

    @staticmethod
    def _held(found: list[Any]) -> list[Any]:
        return [view.numpy() for view in found]

    @staticmethod
    def _part_bytes(view: Any) -> int:
        return math.prod(map(int, view.shape[1:])) * int(view.dtype.itemsize)
