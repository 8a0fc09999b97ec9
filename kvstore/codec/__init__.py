"""Block object <-> tensors: a safetensors file with a canonical header, each tensor digested and coded alone.

A *raw* object lives in every tier: the caller lays tensors behind `layout(...).header_bytes` and calls `seal`. At a bucket or a
peer `encode` turns it into a *stored* object and `decode` turns that back, verified, into a raw one. schema/FORMAT.md, section 4,
is the specification; the safetensors library is the reading oracle of the tests.

Everything here is synchronous and pure, meant for mover threads: digests, compression and the numpy loops release the GIL.
Bytes that are not what they claim raise `Corrupt` and nothing else; a call that could never be right raises `Invalid`.
"""

from kvstore.codec.arriving import Arriving
from kvstore.codec.block import Encoded, decode, decode_in_place, decode_layers, encode, seal, tensor_range, tensors, verify
from kvstore.codec.coding import CODECS, Codec, compressed, decompressed
from kvstore.codec.header import Header, block_digest, header_length, stored_header
from kvstore.codec.layout import MAX_OBJECT_BYTES, Layout, TensorSpec, layout, shard_layers, tensor_specs
from kvstore.codec.sharing import Share

__all__ = [
    "CODECS",
    "MAX_OBJECT_BYTES",
    "Arriving",
    "Codec",
    "Encoded",
    "Header",
    "Layout",
    "Share",
    "TensorSpec",
    "block_digest",
    "compressed",
    "decode",
    "decode_in_place",
    "decode_layers",
    "decompressed",
    "encode",
    "header_length",
    "layout",
    "seal",
    "shard_layers",
    "stored_header",
    "tensor_range",
    "tensor_specs",
    "tensors",
    "verify",
]
