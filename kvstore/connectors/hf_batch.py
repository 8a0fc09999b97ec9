"""Batches as `generate` has them: rows padded on the left, and on the right those that were done before others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore.errors import Invalid
from kvstore.ids import as_tokens


def array(tensor: Any) -> np.ndarray:
    """A tensor, wherever it is, or anything like an array: [rows, columns]."""
    found = np.asarray(tensor.detach().cpu() if hasattr(tensor, "detach") else tensor)
    if found.ndim != 2:
        raise Invalid(f"a batch has the shape [rows, columns], not {list(found.shape)}")
    return found


def pads(session_ids: Sequence[str], attention_mask: Any) -> list[int]:
    """Columns before the first token of each row.

    Raises:
        Invalid: There is no row for each session; a row has no token, or padding elsewhere than on its left.
    """
    mask = array(attention_mask) != 0
    if isinstance(session_ids, str) or len(session_ids) != len(mask) or not len(mask):
        raise Invalid(f"attention_mask has {len(mask)} rows; a session id for each is needed")
    found = [int(row.argmax()) for row in mask]
    if not all(row[pad:].all() for row, pad in zip(mask, found, strict=True)):
        raise Invalid("attention_mask: rows are padded on the left", remedy="tokenizer.padding_side = 'left'")
    return found


def prompts(input_ids: Any, attention_mask: Any, columns: Sequence[int]) -> list[np.ndarray]:
    """The token ids of each row, u32 [n], whose first tokens are in those columns."""
    ids = array(input_ids)
    if ids.shape != array(attention_mask).shape:
        raise Invalid(f"input_ids has the shape {list(ids.shape)}, and attention_mask {list(array(attention_mask).shape)}")
    return [as_tokens(row[pad:]) for row, pad in zip(ids, columns, strict=True)]


def answered(output: Any, prompt_columns: int, columns: Sequence[int], config: Any) -> list[np.ndarray]:
    """The token ids of each row after `generate`: up to its first end of sequence, without the padding behind it.

    A row that goes on behind such a token, because `generate` was told of another, loses what is behind it: that is recomputed.

    Args:
        output: [rows, columns of the prompt, then those of the answers].
        prompt_columns: Columns of the prompt.
        columns: Of the first token of each row.
        config: The model's `generation_config`.
    """
    ids, ends = array(output), np.atleast_1d(np.asarray([] if config.eos_token_id is None else config.eos_token_id))
    if len(ids) != len(columns) or ids.shape[1] < prompt_columns:
        raise Invalid(f"the output has the shape {list(ids.shape)}; it begins with {len(columns)} prompts of {prompt_columns}")
    found = []
    for row, pad in zip(ids, columns, strict=True):
        said = row[prompt_columns:]
        (ended,) = np.nonzero(np.isin(said, ends))
        said = said[: ended[0] + 1] if ended.size else said
        while not ended.size and said.size and said[-1] == config.pad_token_id:  # done for another reason
            said = said[:-1]
        found.append(as_tokens(np.concatenate([row[pad:prompt_columns], said])))
    return found
