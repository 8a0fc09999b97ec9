"""What vLLM (and SGLang, which speaks the same) says of its KV cache, decoded: batches of MessagePack, arrays or maps by version.

Nothing in a batch is believed before its type is seen; what is not understood is left out and counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from kvstore.errors import Invalid

MAX_BATCH_BYTES: Final = 64 << 20
_ON_THE_DEVICE: Final = ("GPU", "gpu", None)

Hash = int | bytes
"""An engine's own name of a block."""


class Stored(msgspec.Struct, frozen=True):
    """Blocks that follow each other are on the device now.

    Attributes:
        hashes: Their names, in prefix order.
        parent: The block before the first; None at the beginning of a prompt.
        tokens: Of all of them.
        block_tokens: Of each.
        extra: For each block, what else its KV depends on, in vLLM's spelling; empty where nothing does.
        lora: The adapter's name, or "".
    """

    hashes: tuple[Hash, ...]
    parent: Hash | None
    tokens: tuple[int, ...]
    block_tokens: int
    extra: tuple[tuple[Any, ...], ...] = ()
    lora: str = ""


class Removed(msgspec.Struct, frozen=True):
    """These are not on the device any more."""

    hashes: tuple[Hash, ...]


class Cleared(msgspec.Struct, frozen=True):
    """Nothing is."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True):
    """What one engine step did.

    Attributes:
        events: In order; those of other media (an engine's own offloading, or this tier) are left out.
        rank: Data-parallel rank that says it.
        unknown: How many events were not understood.
    """

    events: tuple[Event, ...]
    rank: int = 0
    unknown: int = 0


_FIELDS: Final[Mapping[str, Sequence[str]]] = {  # in the order in which array-like versions send them
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}


def decode(payload: bytes) -> Batch:
    """One published batch.

    Raises:
        Invalid: It is no batch.
    """
    if len(payload) > MAX_BATCH_BYTES:
        raise Invalid(f"a batch of KV events has {len(payload)} bytes; at most {MAX_BATCH_BYTES}")
    try:
        found = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"a batch of KV events is no MessagePack: {error}") from None
    if isinstance(found, dict):
        found = [found.get("ts"), found.get("events"), found.get("data_parallel_rank")]
    if not isinstance(found, list) or len(found) < 2 or not isinstance(found[1], list):
        raise Invalid("a batch of KV events is [time, events, rank]")
    rank = found[2] if len(found) > 2 and isinstance(found[2], int) else 0
    events, unknown = list[Event](), 0
    for each in found[1]:
        name, fields = _named(each)
        if name not in _FIELDS:
            unknown += 1
        elif fields.get("medium") in _ON_THE_DEVICE and not fields.get("group_idx"):
            try:
                events.append(_event(name, fields))
            except msgspec.ValidationError:
                unknown += 1
    return Batch(tuple(events), rank, unknown)


def _named(event: object) -> tuple[str, dict[str, Any]]:
    if isinstance(event, dict):
        return str(event.get("type")), event
    if isinstance(event, list) and event and isinstance(event[0], str):
        return event[0], dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))
    return "", {}


def _event(name: str, fields: Mapping[str, Any]) -> Event:
    if name == "AllBlocksCleared":
        return Cleared()
    hashes = fields.get("block_hashes")
    if name == "BlockRemoved":
        return msgspec.convert({"hashes": hashes}, Removed)
    extra = fields.get("extra_keys") or ()
    stored = msgspec.convert(
        {
            "hashes": hashes,
            "parent": fields.get("parent_block_hash"),
            "tokens": fields.get("token_ids"),
            "block_tokens": fields.get("block_size"),
            "extra": [each or () for each in extra] if isinstance(extra, list) else extra,
            "lora": fields.get("lora_name") or "",
        },
        Stored,
    )
    if stored.block_tokens < 1 or len(stored.tokens) != len(stored.hashes) * stored.block_tokens:
        raise msgspec.ValidationError("tokens do not fit the blocks")
    if len(stored.extra) not in {0, len(stored.hashes)}:
        raise msgspec.ValidationError("extra_keys do not fit the blocks")
    return stored
