"""Cases of the codec, on real KV: SmolLM2-135M's of a page of prose, in bfloat16.

`codec` decodes whole objects, digests and lengths checked, into their destination; `codec_plain` does only what no decoder of such
bytes can leave out, zstd and a merge of the planes. Run by itself it prints the ratio of raw to stored bytes.

    python benchmarks/codec.py
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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

CASES = ("codec", "codec_plain", "codec_encode")
NAMESPACE = Namespace(model="smollm2", revision="1", layers=30, kv_heads=3, head_dim=64, dtype="BF16", block_tokens=256)
BLOCKS = 4


class Blocks:
    """Raw objects of a real prefix, and what is stored of them."""

    def __init__(self) -> None:
        tokens, kv = _real_kv(BLOCKS * NAMESPACE.block_tokens)
        shard = Shard()
        self.names = [BlockName(NAMESPACE.id, shard, link.prefix_id, link.tokens) for link in chain(NAMESPACE, tokens)]
        self.plan = codec.layout(NAMESPACE, shard, NAMESPACE.block_tokens)
        geometry = Geometry(namespace=NAMESPACE, shard=shard)
        self.raw = []
        for index, name in enumerate(self.names):
            raw = np.empty(self.plan.raw_bytes, np.uint8).data
            values, ids = geometry.payload(raw[self.plan.header_bytes :], name.tokens)
            at = slice(index * name.tokens, (index + 1) * name.tokens)
            values[...], ids[...] = kv[:, :, at], tokens[at]
            codec.seal(raw, name, NAMESPACE)
            self.raw.append(raw)
        self.stored = [codec.encode(raw, name, NAMESPACE, "bp-zstd") for raw, name in zip(self.raw, self.names, strict=True)]
        self.into = np.zeros(self.plan.raw_bytes, np.uint8).data

    def decode(self, index: int) -> None:
        """As a reader does."""
        codec.decode(memoryview(self.stored[index].body), self.names[index], NAMESPACE, self.into)

    def encode(self, index: int) -> None:
        """As a writer does."""
        codec.encode(self.raw[index], self.names[index], NAMESPACE, "bp-zstd")

    def planes(self) -> list[list[tuple[bytes, bytes]]]:
        """Of every block and tensor, the low plane and the frame of the high one."""
        compressor = zstandard.ZstdCompressor(level=1)
        found = []
        for raw in self.raw:
            tensors = [view for name, view in codec.tensors(raw, self.names[0], NAMESPACE).items() if name != "token_ids"]
            pairs = [np.ascontiguousarray(view).view(np.uint8).reshape(-1, 2) for view in tensors]
            found.append([(pair[:, 0].tobytes(), compressor.compress(pair[:, 1].tobytes())) for pair in pairs])
        return found


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
    """Decoding and encoding; per call one block of 5.6 MiB."""
    torch.set_num_threads(2)
    blocks = Blocks()
    planes, decompressor = blocks.planes(), zstandard.ZstdDecompressor()
    # Of its own, and a whole block, as a reader's: a small one that is used again and again would never leave the cache.
    whole, size = np.zeros(blocks.plan.raw_bytes, np.uint8), blocks.plan.sizes[0]
    targets = [whole[at : at + size].reshape(-1, 2) for at in blocks.plan.offsets[: len(planes[0])]]

    def plain(index: int) -> None:
        for target, (low, frame) in zip(targets, planes[index], strict=True):
            target[:, 0] = np.frombuffer(low, np.uint8)
            target[:, 1] = np.frombuffer(decompressor.decompress(frame), np.uint8)

    size_of = blocks.plan.raw_bytes
    yield {
        "codec": Case(blocks.decode, size_of, BLOCKS),
        "codec_plain": Case(plain, size_of, BLOCKS),
        "codec_encode": Case(blocks.encode, size_of, BLOCKS),
    }


def main() -> None:
    """The ratio, and that decoding gives back what was there."""
    blocks = Blocks()
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
