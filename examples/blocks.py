"""What an engine with a loop of its own does: names a prompt's blocks, asks for them, publishes what was missing, commits.

    kvtier up                        # in another terminal
    python examples/blocks.py        # twice: the second time all blocks are there

KVTIER_URL names another node. Needs kvtier[node]; over a node's socket (kvtier+unix://...) nothing but kvtier. With
KVTIER_URL=memory://example and kvtier[embed] the store is inside this program, and gone when it ends. The KV here is made up of
numbers that follow from the tokens; a real one comes from the engine's cache.
"""

import os
import sys

import numpy as np

import kvstore
from kvstore import codec
from kvstore.client import SyncClient
from kvstore.errors import KVTierError

# Whatever is not equal in here shares no block: name the weights exactly.
NAMESPACE = kvstore.Namespace(model="example/tiny", revision="1", layers=4, kv_heads=2, head_dim=64, dtype="F16", block_tokens=64)
SHARD = kvstore.Shard()  # the whole model on one device; tensor or pipeline parallel ranks each name their own


def main(url: str) -> None:
    """One turn: what is stored comes first, the rest is computed."""
    tokens = np.arange(1000, dtype=np.uint32) % 331
    with kvstore.open_sync(url) as kv:
        loaded = load(kv, tokens)
        print(f"{len(loaded) * NAMESPACE.block_tokens} of {tokens.size} tokens were loaded")
        save(kv, tokens, len(loaded))
        print(f"{len(load(kv, tokens)) * NAMESPACE.block_tokens} are there for the next turn")


def load(kv: SyncClient, tokens: np.ndarray) -> list[np.ndarray]:
    """KV of the longest stored prefix of tokens [n]: for each block f16 [layers, 2, block_tokens, kv_heads, head_dim]."""
    links = kvstore.chain(NAMESPACE, tokens)
    if not links:
        return []
    plan = codec.layout(NAMESPACE, SHARD, NAMESPACE.block_tokens)
    # A miss, a deadline, a broken block: all make the run shorter, none is an error.
    with kv.get(NAMESPACE, SHARD, links, deadline_ms=2000) as blocks:
        buffers = [np.empty(plan.payload_bytes, np.uint8) for _ in blocks.leases]
        whole = blocks.copy_into(buffers, skip=plan.header_bytes)
    return [buffer[: plan.offsets[-1]].view(np.float16).reshape(shape()) for buffer in buffers[:whole]]


def save(kv: SyncClient, tokens: np.ndarray, stored: int) -> None:
    """Publish what comes after the first `stored` blocks, and make all of them the next version of the session `example`."""
    links = kvstore.chain(NAMESPACE, tokens)
    missing = links[stored:]

    def fill(index: int, payload: memoryview) -> None:
        """The tensors of the layers, then the token ids (`codec.layout` says where each lies)."""
        at = (stored + index) * NAMESPACE.block_tokens
        own = tokens[at : at + missing[index].tokens]
        ids = codec.layout(NAMESPACE, SHARD, own.size).offsets[-1]
        np.frombuffer(payload[:ids], np.float16).reshape(shape())[:] = computed(own)
        np.frombuffer(payload[ids:], "<u4")[:] = own

    taken = kv.put(NAMESPACE, SHARD, missing, fill) if missing else []
    if not all(taken):  # dropped, because more came than can be written: the next turn tries again
        return
    try:
        version = kv.get_session("example", namespace=NAMESPACE).version
    except kvstore.NotFound:
        version = 0
    receipt = kv.commit("example", namespace=NAMESPACE, base_version=version, blocks=links, durability="bucket")
    print(f"version {receipt.version}: {receipt.tokens} tokens, {receipt.durability}")


def shape() -> tuple[int, ...]:
    """Of a block's KV as it is stored: layer by layer, keys, then values."""
    return NAMESPACE.layers, 2, NAMESPACE.block_tokens, NAMESPACE.kv_heads, NAMESPACE.head_dim


def computed(tokens: np.ndarray) -> np.ndarray:
    """Instead of a model."""
    return np.broadcast_to(tokens[None, None, :, None, None], shape()).astype(np.float16)


if __name__ == "__main__":
    try:
        main(os.environ.get("KVTIER_URL", "kvtier://127.0.0.1:7878"))
    except KVTierError as error:
        sys.exit(f"error: {error.message}\n  {error.remedy}")
