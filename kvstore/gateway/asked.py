"""What a request to an engine asks for, as far as routing cares: whose it is, and what its prompt is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

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
ENGINE: Final = "X-KVTier-Engine"
ROUTE: Final = "X-KVTier-Route"
_HOPS: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# What is said between the gateway and one side: bodies come in without their compression, and answers are asked for without any.
_OURS: Final = frozenset({"host", "content-length", "content-encoding", "accept-encoding", "expect"})
_THEIRS: Final = frozenset({"content-length", "date", "server", ENGINE.lower(), ROUTE.lower()})


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
    headers: CIMultiDict[str]
    session: str = ""
    parent: str = ""
    salt: str = ""
    stream: bool = False
    tokens: tuple[int, ...] | None = None


def asked(path: str, body: bytes, headers: CIMultiDictProxy[str], *, header: str = "") -> Asked:
    """Understand a request.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        body: As it came.
        headers: As they came.
        header: A further one that may hold a session's id.

    Raises:
        Invalid: The body is no JSON object; a header or the salt is no text.
    """
    fields = fields_of(body)
    if fields is None:
        raise Invalid("the body must be a JSON object")
    lowered = {name.lower(): value for name, value in headers.items()}
    salt, prompt = fields.get("cache_salt"), fields.get("prompt")
    salt = salt if isinstance(salt, str) else ""
    if not _are_text([salt, *lowered, *lowered.values()]):
        raise Invalid("headers and cache_salt must be UTF-8")
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
    return Asked(
        path=path,
        body=body,
        fields=fields,
        headers=_end_to_end(headers, _OURS),
        session=found[FIELD],
        parent=found[PARENT_FIELD],
        salt=salt,
        stream=fields.get("stream") is True,
        tokens=_tokens(prompt),
    )


def passed_on(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of an answer that are the client's, too."""
    return _end_to_end(headers, _THEIRS)


def _end_to_end(headers: CIMultiDictProxy[str], without: frozenset[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in headers.getall("Connection", ()) for name in value.split(",")}
    left_out = _HOPS | without | named
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in left_out)


def _are_text(words: Iterable[str]) -> bool:
    try:
        "".join(words).encode()
    except UnicodeEncodeError:  # bytes that were no UTF-8, or half of a surrogate pair
        return False
    return True


def _first(places: list[Any], names: tuple[str, ...]) -> str:
    return next(filter(None, (session_of(place, names) for place in places)), "")


def _tokens(prompt: object) -> tuple[int, ...] | None:
    if not isinstance(prompt, list) or not prompt or not all(type(token) is int and 0 <= token < 1 << 32 for token in prompt):
        return None
    return tuple(prompt)
