"""Under which names a request says whose it is: one list, for what vLLM hands to a connector and for what only its server sees.

They are headers of a request, or fields of its body's `kv_transfer_params` and `vllm_xargs`; letter case does not count.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

FIELD: Final = "session_id"
HEADER: Final = "X-Session-ID"
OTHER_HEADERS: Final = ("x-claude-code-session-id", "session-id")
SESSION: Final = (FIELD, HEADER, *OTHER_HEADERS)
"""The first of these that is there counts."""

PARENT_FIELD: Final = "parent_session_id"
PARENT_HEADERS: Final = ("X-Parent-Session-ID", "x-claude-code-parent-session-id", "parent-session-id")
PARENT: Final = (PARENT_FIELD, *PARENT_HEADERS)

MOST_BODY: Final = 64 << 20
"""Bytes of a body that is looked into; a larger one goes on as it is."""


def session_of(params: Any, keys: Sequence[str] = SESSION) -> str:
    """The first session id that a request's parameters hold under one of these names, letter case aside; "" where there is none."""
    if not isinstance(params, dict):
        return ""
    lowered = {str(key).lower(): value for key, value in params.items()}
    for key in keys:
        value = lowered.get(key.lower())
        if isinstance(value, str) and value:
            return value
    return ""


def fields_of(body: bytes) -> dict[str, Any] | None:
    """The JSON object that a body is; None where it is something else, or too large to be looked into."""
    if len(body) > MOST_BODY:
        return None
    try:
        fields = json.loads(body.decode())
    except (ValueError, RecursionError):  # not UTF-8, no JSON, nested too deep
        return None
    return fields if isinstance(fields, dict) else None


def with_xargs(body: bytes, fields: Mapping[str, Any], ids: Mapping[str, str]) -> bytes | None:
    """A body with ids in its `vllm_xargs`, where what it says already stays; None where it has something else there.

    The rest stays byte for byte. Where `vllm_xargs` was there before, it is there twice: Python's JSON readers take the last one.

    Args:
        body: Of a request.
        fields: What `fields_of` found in it.
        ids: By name.
    """
    said = fields.get("vllm_xargs") or {}
    if not isinstance(said, dict):
        return None
    added = json.dumps({"vllm_xargs": {**ids, **said}})[1:]
    return body.rstrip()[:-1] + (", " if fields else "").encode() + added.encode()
