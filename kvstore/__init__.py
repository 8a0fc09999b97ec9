"""kvtier: a persistent tier for the KV cache of LLM inference engines.

>>> async with kvstore.open("kvtier+unix:///run/kvtier/node.sock") as kv:
...     status = await kv.wait(await kv.restore("chat-42", model=namespace))
...     print(status.version, status.tokens)
"""

from kvstore.blocks import BlockLease, Blocks, DeviceBlocks
from kvstore.client import Client, SyncClient, connect, open, open_sync  # noqa: A004  `kvstore.open` is the name
from kvstore.errors import (
    AlreadyExists,
    Closed,
    Conflict,
    Corrupt,
    Denied,
    Gone,
    Invalid,
    KVTierError,
    NotFound,
    Overloaded,
    TooManyBranches,
    Unavailable,
    Unsupported,
)
from kvstore.ids import Group, Link, Namespace, Shard, block_id, chain, engine_id

__all__ = [
    "AlreadyExists",
    "BlockLease",
    "Blocks",
    "Client",
    "Closed",
    "Conflict",
    "Corrupt",
    "Denied",
    "DeviceBlocks",
    "Gone",
    "Group",
    "Invalid",
    "KVTierError",
    "Link",
    "Namespace",
    "NotFound",
    "Overloaded",
    "Shard",
    "SyncClient",
    "TooManyBranches",
    "Unavailable",
    "Unsupported",
    "block_id",
    "chain",
    "connect",
    "engine_id",
    "open",
    "open_sync",
]
