"""How small the KV of a real model gets: a Hugging Face folder's, of a page of prose."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from kvstore import codec
from kvstore.cli.bench.results import Line
from kvstore.connectors.base import model_namespace
from kvstore.errors import Invalid, Unsupported
from kvstore.ids import BlockName, Shard, as_tokens, chain

_TOKENS: Final = 256
_BLOCKS: Final = 3
_PROSE: Final = "pydoc_data.topics"  # of Python's own documentation: there wherever this runs


def measure(folder: Path) -> Iterator[Line]:
    """Raises `Unsupported` without the extra `hf`, `Invalid` for a folder that holds no such model."""
    try:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
        cache = importlib.import_module("kvstore.connectors.hf_cache")
        hold = importlib.import_module("kvstore.connectors.hf_held").hold
    except ModuleNotFoundError as error:
        raise Unsupported(f"--hf-model needs {error.name}", remedy="pip install 'kvtier[hf]'") from error
    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, local_files_only=True)
        words = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError) as error:
        raise Invalid(
            f"--hf-model {folder}: {str(error).splitlines()[0]}", remedy="a folder that `from_pretrained` reads"
        ) from None
    topics: dict[str, str] = importlib.import_module(_PROSE).topics
    text = "\n\n".join(topics[name] for name in sorted(topics))[: 16 * _TOKENS * _BLOCKS]
    ids = words(text, return_tensors="pt").input_ids[:, : _TOKENS * _BLOCKS]
    past = cache.empty_cache(model)
    with torch.inference_mode():
        model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
    space = model_namespace(cache.decoder_config(model), revision="bench", dtype="BF16", block_tokens=_TOKENS)
    shard, tokens = Shard(), as_tokens(cache.as_ids(ids))
    geometry, plan = cache.Geometry(namespace=space, shard=shard), codec.layout(space, shard, _TOKENS)
    stored, links, copy_out = 0, chain(space, tokens), hold(past, space).leaving(geometry)
    for index, link in enumerate(links):
        raw = np.empty(plan.raw_bytes, np.uint8).data
        values, names = geometry.payload(raw[plan.header_bytes :], link.tokens)
        copy_out(index * _TOKENS, values)
        names[:] = tokens[index * _TOKENS : (index + 1) * _TOKENS]
        name = BlockName(space.id, shard, link.prefix_id, link.tokens)
        codec.seal(raw, name, space)
        stored += codec.encode(raw, name, space, "bp-zstd").nbytes
    yield Line(
        name="codec_ratio_real",
        value=len(links) * plan.raw_bytes / stored,
        unit="raw/stored",
        note=f"bf16 KV of {space.model}, {len(links) * _TOKENS} tokens of prose",
    )
