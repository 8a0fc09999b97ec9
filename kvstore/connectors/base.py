"""What connectors share: the namespace of a model, and how much of a session a prompt can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvstore.connectors.revisions import model_name
from kvstore.errors import Unsupported
from kvstore.ids import Group, Link, Namespace, PrefixId, block_id, canonical_json

# These rescale the frequencies by the length of the whole sequence, so K of a prefix depends on what comes after it.
_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def model_namespace(
    config: Mapping[str, Any],
    *,
    revision: str,
    dtype: str,
    tenant: str = "default",
    block_tokens: int = 256,
    model: str = "",
    lora: str = "",
    groups: tuple[Group, ...] = (Group(),),
) -> Namespace:
    """The namespace of a decoder, from its configuration as Hugging Face spells it (`config.json`).

    Args:
        config: The decoder's own fields: of a multimodal model, those of its text part.
        revision: Revision or digest of the weights.
        dtype: Of the KV tensors, in safetensors' spelling.
        tenant: As in `Namespace`.
        block_tokens: As in `Namespace`.
        lora: As in `Namespace`.
        groups: As in `Namespace`.
        model: Model id; by default where the configuration was loaded from. Of a local folder only the last part counts, so that
            the same model resumes on a machine that keeps it elsewhere.

    Raises:
        Unsupported: The KV of a prefix would not be the same in every prompt that begins with it, or has no canonical layout.
        Invalid: As `Namespace`.
    """
    rope = rope_text(config)
    if config.get("kv_lora_rank"):
        raise Unsupported("this engine expands the latent of MLA before it caches it; the expanded form has no canonical layout")
    heads = config["num_attention_heads"]
    quantization = config.get("quantization_config")
    return Namespace(
        model=model or model_name(str(config.get("_name_or_path") or config.get("model_type") or "")),
        revision=revision,
        layers=config["num_hidden_layers"],
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        rope=rope,
        quantization=canonical_json(quantization) if quantization else "none",
        lora=lora,
        dtype=dtype,
        block_tokens=block_tokens,
        tenant=tenant,
        groups=groups,
    )


def rope_text(config: Mapping[str, Any]) -> str:
    """A configuration's RoPE as `Namespace.rope` holds it; "" where it has none.

    Raises:
        Unsupported: It depends on the length of the whole sequence, so the keys of a prefix differ from prompt to prompt.
    """
    rope = config.get("rope_parameters") or {
        key: config[key] for key in ("rope_theta", "rope_scaling") if config.get(key) is not None
    }
    for part in (rope, *(value for value in rope.values() if isinstance(value, Mapping))):
        kind = part.get("rope_type", part.get("type"))
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise Unsupported(
                f"RoPE of type {kind!r} makes the keys of a prefix depend on the length of the whole sequence",
                remedy="run this model without kvtier, or with a RoPE that does not depend on it",
            )
    return canonical_json(rope) if rope else ""


def agreeing(namespace: Namespace, links: Sequence[Link], tokens: np.ndarray) -> int:
    """How many leading blocks of a session hold what the prompt begins with.

    Args:
        namespace: Of the session.
        links: Of the session's version, in prefix order.
        tokens: The prompt, u32 [n] (`kvstore.ids.as_tokens`).
    """
    parent: PrefixId | None = None
    start = 0
    for index, link in enumerate(links):
        piece = tokens[start : start + link.tokens]
        if piece.size < link.tokens:
            return index
        parent = block_id(namespace.id, parent or namespace.id, piece)
        if parent != link.prefix_id:
            return index
        start += link.tokens
    return len(links)


def usable(found: int, prompt: int) -> int:
    """Tokens of a prompt that a cache may cover when `found` of them are stored.

    At least one is left to compute: the logits that follow the prompt are not stored.
    """
    return max(0, min(found, prompt - 1))


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Length of the common beginning of two flat arrays."""
    n = min(left.size, right.size)
    differs = left[:n] != right[:n]
    return int(differs.argmax()) if differs.any() else n
