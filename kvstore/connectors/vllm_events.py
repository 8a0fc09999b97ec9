"""What the tier holds of an engine's blocks, in the words of vLLM's KV events: routers know blocks by vLLM's own hashes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from kvstore.connectors.vllm_scheduler import News

MEDIUM: Final = "STORAGE"
OWNER: Final = "kvtier"


def events(news: Iterable[News], hash_tokens: int) -> Iterator[Any]:
    """VLLM's events: `BlockStored` for what every rank has saved, `BlockRemoved` for what a load did not find any more.

    Args:
        news: From the scheduler's half.
        hash_tokens: Tokens of each of vLLM's hashes.
    """
    for each in news:
        request, first, end = each.request, each.start // hash_tokens, each.end // hash_tokens
        hashes = [maybe_convert_block_hash(value) for value in request.block_hashes[first:end]]
        if not hashes:
            continue
        if each.gone:
            yield _made(BlockRemoved, block_hashes=hashes, medium=MEDIUM, ownership=OWNER)
            continue
        lora = request.lora_request
        yield _made(
            BlockStored,
            block_hashes=hashes,
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[first - 1]) if first else None,
            token_ids=list(request.all_token_ids[first * hash_tokens : end * hash_tokens]),
            block_size=hash_tokens,
            lora_id=lora.lora_int_id if lora else None,
            lora_name=lora.lora_name if lora else None,
            medium=MEDIUM,
            ownership=OWNER,
            session_id=each.session or None,
        )


def _made(kind: Any, **fields: Any) -> Any:
    """An event with those of the fields that this version of vLLM knows."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
