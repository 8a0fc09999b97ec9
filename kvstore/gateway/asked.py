"""What a request to an engine asks for, as far as routing cares: whose it is, and what its prompt is.

A body is not made into objects as a whole: 60 MiB of `{}` would be a gigabyte of them, and seconds in which nothing else is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final

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
    session_of,
    with_xargs,
)
from kvstore.errors import Invalid

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
LONGEST: Final = 1 << 21  # tokens of a prompt that is looked into; no engine takes longer ones
MOST_LOOKED_INTO: Final = 16 << 20  # bytes of a prompt
SMALL: Final = 1 << 16  # bytes of a field that says whose a request is
# Who asks for what; read where they are short.
_READ: Final[tuple[str, ...]] = (*SESSION, *PARENT, "kv_transfer_params", "vllm_xargs", "cache_salt", "stream")
PROMPT: Final = (  # besides `messages` or `prompt`
    "model",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "add_special_tokens",
    "chat_template_kwargs",
)
_NAMES: Final = {f"field_{at}": name for at, name in enumerate((*_READ, "messages", "prompt", *PROMPT))}
_ABSENT: Final = msgspec.Raw()
_BODY: Final = msgspec.json.Decoder(
    msgspec.defstruct("_Body", [(each, msgspec.Raw, _ABSENT) for each in _NAMES], rename=_NAMES)
)  # all else is passed over, however much it is
_TOKENS: Final = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]])
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
        fields: Those of its body that matter here, as JSON.
        headers: To be sent on.
        session: Its session's id, or "".
        parent: The session that this one is a fork of, or "".
        salt: Its cache salt, or "".
        stream: Whether the answer comes in pieces.
        tokens: Its prompt, where the body has it as token ids.
    """

    path: str
    body: bytes
    fields: dict[str, msgspec.Raw]
    headers: CIMultiDict[str]
    session: str = ""
    parent: str = ""
    salt: str = ""
    stream: bool = False
    tokens: list[int] | None = None

    def field(self, name: str) -> Any:
        """What a field says; None where it is not there, or too long to be looked into. Raises `msgspec.MsgspecError`."""
        raw = self.fields.get(name)
        return msgspec.json.decode(raw) if raw and size(raw) <= MOST_LOOKED_INTO else None


def asked(path: str, body: bytes, headers: CIMultiDictProxy[str], *, header: str = "") -> Asked:
    """Understand a request.

    Args:
        path: `CHAT` or `COMPLETIONS`.
        body: As it came.
        headers: As they came.
        header: A further one that may hold a session's id.

    Raises:
        Invalid: The body is no JSON object; a header is no text.
    """
    try:
        found = msgspec.structs.astuple(_BODY.decode(body))
        raw = {name: each for name, each in zip(_NAMES.values(), found, strict=True) if each}
        read = {name: msgspec.json.decode(raw[name]) for name in _READ if name in raw and size(raw[name]) <= SMALL}
    except (msgspec.MsgspecError, RecursionError) as error:
        raise Invalid(f"the body must be a JSON object: {error}") from None
    fields: dict[str, Any] = {**raw, **read}
    lowered = {name.lower(): value for name, value in headers.items()}
    if not _are_text([*lowered, *lowered.values()]):
        raise Invalid("headers must be UTF-8")
    salt = fields.get("cache_salt")
    inside = [fields, fields.get("kv_transfer_params"), fields.get("vllm_xargs")]
    names = (HEADER, *OTHER_HEADERS, *([header] if header else []))
    said = {FIELD: _first(inside, SESSION), PARENT_FIELD: _first(inside, PARENT)}
    ids = {
        FIELD: said[FIELD] or session_of(lowered, names),
        PARENT_FIELD: said[PARENT_FIELD] or session_of(lowered, PARENT_HEADERS),
    }
    only_in_headers = {name: value for name, value in ids.items() if value and not said[name]}
    if only_in_headers and fields:  # an engine shows its connector no headers
        body = with_xargs(body, fields, only_in_headers) or body
    return Asked(
        path=path,
        body=body,
        fields=raw,
        headers=_end_to_end(headers, _OURS),
        session=ids[FIELD],
        parent=ids[PARENT_FIELD],
        salt=salt if isinstance(salt, str) else "",
        stream=fields.get("stream") is True,
        tokens=_tokens(raw.get("prompt")) if path == COMPLETIONS else None,
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
    except UnicodeEncodeError:  # bytes that were no UTF-8
        return False
    return True


def size(raw: msgspec.Raw) -> int:
    """Bytes of a field as it came."""
    return memoryview(raw).nbytes


def _first(places: list[Any], names: tuple[str, ...]) -> str:
    return next(filter(None, (session_of(place, names) for place in places)), "")


def _tokens(prompt: msgspec.Raw | None) -> list[int] | None:
    if prompt is None or size(prompt) > MOST_LOOKED_INTO:
        return None
    try:
        return _TOKENS.decode(prompt) or None
    except msgspec.MsgspecError:  # a text, or several prompts
        return None
