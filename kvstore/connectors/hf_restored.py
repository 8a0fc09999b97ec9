"""What a restore for a Hugging Face model delivers."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from transformers import DynamicCache, StaticCache


class Row(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was delivered of one sequence. The model computes the tokens that follow.

    Attributes:
        tokens: The token ids whose KV it is, u32 [n].
        version: The session's version; 0 where no session was found.
        restore_id: Under which the node tells from which tiers the bytes came (`get_restore`); "" where there was no session. With
            `compute_or_load`, what it stages behind the computing; "" where there is no such thing.
        miss: Why it is shorter than what is stored of the prompt; "" where nothing is missing. `compute`: loading the rest would
            take longer than computing it. `batch`: another row of the batch has more to compute.
    """

    tokens: np.ndarray
    version: int = 0
    restore_id: str = ""
    miss: str = ""

    def __repr__(self) -> str:  # token ids would be pages of it
        return f"{type(self).__name__}(tokens.size={self.tokens.size}, version={self.version}, miss={self.miss!r})"


class Restored(Row, frozen=True, kw_only=True, eq=False):
    """What was delivered of one sequence.

    Attributes:
        past_key_values: A `DynamicCache`, or the static one that was to be filled; it belongs to the caller, and changing it
            changes nothing that is stored. Its `get_seq_length()` is the number of tokens.
    """

    past_key_values: DynamicCache | StaticCache

    @property
    def cache(self) -> Mapping[str, Any]:
        """`generate(input_ids, **past.cache)`: the cache, under the name that the installed transformers has for it."""
        return _arguments(self.past_key_values)


class RestoredBatch(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What was delivered of a batch.

    Attributes:
        past_key_values: As in `Restored`, of all rows; its columns are the first ones of the batch's, padding included.
        rows: Of each sequence. What all of them have is delivered, counted from the end of the prompts.
    """

    past_key_values: DynamicCache | StaticCache
    rows: tuple[Row, ...]

    @property
    def cache(self) -> Mapping[str, Any]:
        """As `Restored.cache`."""
        return _arguments(self.past_key_values)


def _arguments(cache: Any) -> Mapping[str, Any]:
    found: Mapping[str, Any] = importlib.import_module("kvstore.connectors.hf_fill").arguments(cache)
    return found
