"""A request of vLLM: the names of its blocks, and the session that it belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.connectors.session_names import PARENT, session_of
from kvstore.connectors.sessions import Who
from kvstore.connectors.weights import weights_digest
from kvstore.errors import Invalid
from kvstore.ids import Link, Namespace, NamespaceId, PrefixId, as_tokens, block_id, extra_key

_LANE: Final = ("lane",)


class Chain:
    """The blocks of a request, named as far as its tokens are known.

    Args:
        namespace: Theirs.
        request: vLLM's.

    Attributes:
        links: Its full blocks.
    """

    def __init__(self, namespace: Namespace, request: Any) -> None:
        self._namespace, self._request = namespace, request
        self._first = _of_all_blocks(request)
        self.links: list[Link] = []

    def upto(self, tokens: int) -> Sequence[Link]:
        """The full blocks among its first `tokens` tokens; what was named before is not named again."""
        size, known = self._namespace.block_tokens, self._request.all_token_ids
        count = min(tokens, len(known)) // size
        while len(self.links) < count:
            start = len(self.links) * size
            piece = as_tokens(known[start : start + size])
            parent: PrefixId | NamespaceId = self.links[-1].prefix_id if self.links else self._namespace.id
            extra = [*(self._first if start == 0 else ()), *_of_items(self._request, start, start + size)]
            self.links.append(Link(block_id(self._namespace.id, parent, piece, extra), size))
        return self.links[:count]


def usable_by(request: Any) -> bool:
    """Whether a request's KV follows from its tokens, and it is allowed to be looked up."""
    return getattr(request, "prompt_embeds", None) is None and not getattr(request, "skip_reading_prefix_cache", False)


def who(request: Any) -> Who | None:
    """The session of a request, None where it has none.

    Looked for in this order: `session_id` of the request (vLLM takes it from the body, `X-Session-ID`, or `vllm_xargs`), its
    `kv_transfer_params`, its `vllm_xargs`.
    """
    params = getattr(request, "kv_transfer_params", None)
    extra = getattr(getattr(request, "sampling_params", None), "extra_args", None)
    own = getattr(request, "session_id", None)
    session = (own if isinstance(own, str) else "") or session_of(params) or session_of(extra)
    if not session:
        return None
    parent = session_of(params, PARENT) or session_of(extra, PARENT)
    lane = session_of(params, _LANE) or session_of(extra, _LANE)
    return Who(session=session, parent=parent, lane=lane)


def _of_all_blocks(request: Any) -> list[bytes]:
    """What every block of a request depends on beside tokens: keys of its first one, and so of all of them."""
    keys = []
    lora = getattr(request, "lora_request", None)
    if lora is not None:
        keys.append(extra_key("lora", lora.lora_name, lora.lora_path, _adapter(lora.lora_path)))
    if request.cache_salt:
        keys.append(extra_key("salt", request.cache_salt))
    return keys


def _of_items(request: Any, start: int, end: int) -> Iterator[bytes]:
    """A key for each image or other item that has placeholder tokens in a block: which one, and where it begins."""
    for item in request.mm_features or ():
        offset, length = item.mm_position.offset, item.mm_position.length
        if offset < end and start < offset + length:
            if not item.identifier:
                raise Invalid("an item without an identity")
            yield extra_key("mm", item.identifier, str(offset - start))


def _adapter(path: str) -> str:
    """An adapter may be trained anew in the place where it lies."""
    try:
        return weights_digest(Path(path))
    except (OSError, ValueError):
        return ""  # it is named by an id of a hub, or its files are elsewhere
