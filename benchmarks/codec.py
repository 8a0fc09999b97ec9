"""Cases of the codec, on real KV: SmolLM2-135M's of a page of prose, in bfloat16.

`codec` decodes whole objects, digests and lengths checked, into their destination; `codec_plain` does only what no decoder of such
bytes can leave out, zstd of the same frames and a merge of the planes. `codec_lone` decodes and `codec_encode_lone` encodes a block
of 32 MiB with the help of idle movers; `codec_one` and `codec_encode` do so on one thread. Run by itself it prints the ratio of raw
to stored bytes.

    python benchmarks/codec.py
"""

from __future__ import annotations

import os
import pydoc_data.topics
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import zstandard
from _cases import Case
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvstore import codec
from kvstore.connectors.hf_cache import Geometry
from kvstore.demo.model import smollm2
from kvstore.ids import BlockName, Namespace, Shard, chain
from tiering import Movers
from tiering.movers import be_nice

CASES = ("codec", "codec_plain", "codec_one", "codec_lone", "codec_encode", "codec_encode_lone")
NAMESPACE = Namespace(model="smollm2", revision="1", layers=30, kv_heads=3, head_dim=64, dtype="BF16", block_tokens=256)
BLOCKS = 4
LARGE = msgspec.structs.replace(NAMESPACE, block_tokens=1456)  # 32 MiB
CORES = len(os.sched_getaffinity(0))


class Blocks:
    """Raw objects of a real prefix, and what is stored of them.

    Args:
        namespace: How long a block is.
        tokens: A whole number of blocks.
        kv: Theirs.
    """

    def __init__(self, namespace: Namespace, tokens: np.ndarray, kv: np.ndarray) -> None:
        shard, self.namespace = Shard(), namespace
        self.names = [BlockName(namespace.id, shard, link.prefix_id, link.tokens) for link in chain(namespace, tokens)]
        self.plan = codec.layout(namespace, shard, namespace.block_tokens)
        geometry = Geometry(namespace=namespace, shard=shard)
        self.raw = []
        for index, name in enumerate(self.names):
            raw = np.empty(self.plan.raw_bytes, np.uint8).data
            values, ids = geometry.payload(raw[self.plan.header_bytes :], name.tokens)
            at = slice(index * name.tokens, (index + 1) * name.tokens)
            values[...], ids[...] = kv[:, :, at], tokens[at]
            codec.seal(raw, name, namespace)
            self.raw.append(raw)
        self.stored = [codec.encode(raw, name, namespace, "bp-zstd") for raw, name in zip(self.raw, self.names, strict=True)]
        self.into = np.zeros(self.plan.raw_bytes, np.uint8).data

    def decode(self, index: int, share: codec.Share | None = None) -> None:
        """As a reader does."""
        codec.decode(memoryview(self.stored[index].body), self.names[index], self.namespace, self.into, share)

    def encode(self, index: int, share: codec.Share | None = None) -> None:
        """As a writer does."""
        codec.encode(self.raw[index], self.names[index], self.namespace, "bp-zstd", share)

    def planes(self) -> list[list[tuple[bytes, bytes]]]:
        """Of every block and tensor, the low plane and the frame of the high one: as stored, but without a checksum to verify."""
        found = []
        for one, name in zip(self.stored, self.names, strict=True):
            header = codec.stored_header(memoryview(one.body), name, self.namespace)
            payload, half = memoryview(one.body)[header.header_bytes :], self.plan.sizes[0] // 2
            bounds = list(pairwise(header.starts))[:-1]  # the last ones are the token ids
            found.append([(bytes(payload[a : a + half]), _without_checksum(payload[a + half : b])) for a, b in bounds])
        return found


def _without_checksum(frame: memoryview) -> bytes:
    """The same compressed bytes; bit 2 of the fifth byte says whether four bytes of checksum are behind them (RFC 8878)."""
    return bytes([*frame[:4], frame[4] & ~4]) + bytes(frame[5:-4])


def _real_kv(tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [n], and their KV, [layers, 2, n, kv_heads, head_dim] as uint16."""
    folder = smollm2()
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
    text = "\n\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    ids = AutoTokenizer.from_pretrained(folder, local_files_only=True)(text[: tokens * 8], return_tensors="pt").input_ids
    cache = DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=ids[:, :tokens], past_key_values=cache, use_cache=True, logits_to_keep=1)
    found: list[Any] = cache.layers
    layers = [torch.stack([layer.keys[0], layer.values[0]]).transpose(1, 2) for layer in found]
    return ids[0, :tokens].numpy().astype(np.uint32), torch.stack(layers).view(torch.uint16).numpy()


@contextmanager
def cases(size: int, folder: Path) -> Iterator[Mapping[str, Case]]:  # noqa: ARG001  a block of this model has the size it has
    """Decoding and encoding; per call one block, of 5.6 or 32 MiB."""
    torch.set_num_threads(2)
    tokens, kv = _real_kv(LARGE.block_tokens)
    blocks, large = _small(tokens, kv), Blocks(LARGE, tokens, kv)
    planes, decompressor = blocks.planes(), zstandard.ZstdDecompressor()
    # Of its own, and a whole block, as a reader's: a small one that is used again and again would never leave the cache.
    whole, size = np.zeros(blocks.plan.raw_bytes, np.uint8), blocks.plan.sizes[0]
    targets = [whole[at : at + size].reshape(-1, 2) for at in blocks.plan.offsets[: len(planes[0])]]

    def plain(index: int) -> None:
        for target, (low, frame) in zip(targets, planes[index], strict=True):
            target[:, 0] = np.frombuffer(low, np.uint8)
            target[:, 1] = np.frombuffer(decompressor.decompress(frame), np.uint8)

    size_of, size_of_large = blocks.plan.raw_bytes, large.plan.raw_bytes
    with ThreadPoolExecutor(CORES, initializer=be_nice) as pool:
        share = Movers(pool, CORES).share
        yield {
            "codec": Case(blocks.decode, size_of, BLOCKS),
            "codec_plain": Case(plain, size_of, BLOCKS),
            "codec_one": Case(lambda _: large.decode(0), size_of_large, 3),
            "codec_lone": Case(lambda _: large.decode(0, share), size_of_large, 3),
            "codec_encode": Case(lambda _: large.encode(0), size_of_large, 3),
            "codec_encode_lone": Case(lambda _: large.encode(0, share), size_of_large, 3),
        }


def _small(tokens: np.ndarray, kv: np.ndarray) -> Blocks:
    count = BLOCKS * NAMESPACE.block_tokens
    return Blocks(NAMESPACE, tokens[:count], kv[:, :, :count])


def main() -> None:
    """The ratio, and that decoding gives back what was there."""
    blocks = _small(*_real_kv(BLOCKS * NAMESPACE.block_tokens))
    for index, raw in enumerate(blocks.raw):
        blocks.decode(index)
        assert blocks.into == raw
    stored, raw_bytes = sum(one.nbytes for one in blocks.stored), BLOCKS * blocks.plan.raw_bytes
    line = {
        "name": "codec_ratio",
        "value": round(raw_bytes / stored, 4),
        "unit": "raw/stored",
        "target": 1.44,
        "tokens": BLOCKS * 256,
    }
    print(msgspec.json.encode({**line, "met": raw_bytes / stored >= 1.44}).decode())


if __name__ == "__main__":
    main()
