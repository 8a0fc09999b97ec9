"""Traces in the format of Mooncake (FAST'25): a JSON object per line, prompts as ids of blocks of 512 tokens.

{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}    milliseconds, tokens, tokens, ids
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from kvstore.errors import Invalid

BLOCK_TOKENS: Final = 512
MOST_TOKENS: Final = 1 << 22  # of one prompt
MOST_BLOCKS: Final = 1 << 25  # of all of them
_LINE: Final = 1 << 20  # bytes

_Milliseconds = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]
_Ids = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]], msgspec.Meta(max_length=MOST_TOKENS // BLOCK_TOKENS)]


class _Line(msgspec.Struct):
    timestamp: _Milliseconds
    input_length: Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)]
    output_length: _Tokens
    hash_ids: _Ids


class Request(msgspec.Struct, frozen=True):
    """One prompt.

    Attributes:
        at_s: When it arrives, since the beginning of the trace.
        tokens: Of it.
        keys: Of its blocks, 32 bytes each.
    """

    at_s: float
    tokens: int
    keys: Sequence[bytes]


def read(path: Path) -> list[Request]:
    """A trace, in the order of time. Empty lines are passed over.

    Raises:
        Invalid: Something in it is no request, or too large; the message names line and field.
    """
    found, names, blocks = list[tuple[int, Request]](), dict[int, bytes](), 0
    decoder = msgspec.json.Decoder(_Line)
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(_LINE + 1):
                number += 1
                if len(raw) > _LINE:
                    raise Invalid(f"{path.name}, line {number}: longer than {_LINE} bytes")
                if not raw.strip():
                    continue
                try:
                    line = decoder.decode(raw)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    raise Invalid(f"{path.name}, line {number}: {error}") from None
                if len(line.hash_ids) > -(-line.input_length // BLOCK_TOKENS):
                    raise Invalid(f"{path.name}, line {number}: more hash_ids than an input_length of {line.input_length} fills")
                blocks += len(line.hash_ids)
                if blocks > MOST_BLOCKS:
                    raise Invalid(f"{path.name}, line {number}: more than {MOST_BLOCKS} hash_ids up to here")
                keys = [names.setdefault(one, one.to_bytes(32, "little")) for one in line.hash_ids]
                found.append((line.timestamp, Request(line.timestamp / 1e3, line.input_length, keys)))
    except OSError as error:
        raise Invalid(
            f"cannot read {path}: {error.strerror}", remedy="name a file of JSON lines that is there; see docs/replay.md"
        ) from None
    if not found:
        raise Invalid(f"{path.name}: no requests", remedy="name a file with a request in each line; see docs/replay.md")
    found.sort(key=lambda one: one[0])
    return [request for _, request in found]
