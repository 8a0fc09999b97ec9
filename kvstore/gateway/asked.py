"""What a request to an engine asks for, as far as routing cares: whose it is, and what its prompt is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from kvstore.connectors.session_names import (
    FIELD,
    HEADER,
    OTHER_HEADERS,
    PARENT,
    PARENT_FIELD,
    PARENT_HEADERS,
    SESSION,
    fields_of,
    session_of,
    with_xargs,
)
from kvstore.errors import Invalid

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
_HOPS: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding", "upgrade"}
)


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """One request.

    Attributes:
        path: Of the API.
        body: To be sent on: what came, and the session's id where only a header said it.
        fields: What is in it.
        headers: To be sent on.
        session: Its session's id, or "".
        parent: The session that this one is a fork of, or "".
        salt: Its cache salt, or "".
        stream: Whether the answer comes in pieces.
        tokens: Its prompt, where the body has it as token ids.
    """

    path: str
    body: bytes
    fields: dict[str, Any]
    headers: dict[str, str]
    session: str = ""
    parent: str = ""
    salt: str = ""
    stream: bool = False
    tokens: tuple[int, ...] | None = None


def asked(path: str, body: bytes, headers: Mapping[str, str], *, header: str = "") -> Asked:
    """Understand a request.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        body: As it came.
        headers: As they came; names in any case.
        header: A further one that may hold a session's id.

    Raises:
        Invalid: The body is no JSON object.
    """
    fields = fields_of(body)
    if fields is None:
        raise Invalid("the body must be a JSON object")
    lowered = {name.lower(): value for name, value in headers.items()}
    inside = [fields, fields.get("kv_transfer_params"), fields.get("vllm_xargs")]
    names = (HEADER, *OTHER_HEADERS, *([header] if header else []))
    said = {FIELD: _first(inside, SESSION), PARENT_FIELD: _first(inside, PARENT)}
    found = {
        FIELD: said[FIELD] or session_of(lowered, names),
        PARENT_FIELD: said[PARENT_FIELD] or session_of(lowered, PARENT_HEADERS),
    }
    only_in_headers = {name: value for name, value in found.items() if value and not said[name]}
    if only_in_headers:  # an engine shows its connector no headers
        body = with_xargs(body, fields, only_in_headers) or body
    salt, prompt = fields.get("cache_salt"), fields.get("prompt")
    return Asked(
        path=path,
        body=body,
        fields=fields,
        headers={name: value for name, value in headers.items() if name.lower() not in _HOPS | {"host", "content-length"}},
        session=found[FIELD],
        parent=found[PARENT_FIELD],
        salt=salt if isinstance(salt, str) else "",
        stream=fields.get("stream") is True,
        tokens=_tokens(prompt),
    )


def passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of an answer that are the client's, too."""
    return {name: value for name, value in headers.items() if name.lower() not in _HOPS | {"content-length", "date", "server"}}


def _first(places: list[Any], names: tuple[str, ...]) -> str:
    return next(filter(None, (session_of(place, names) for place in places)), "")


def _tokens(prompt: object) -> tuple[int, ...] | None:
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        return None
    return tuple(prompt)
