"""A request of one of several tenants, before it goes to an engine that all of them share.

An engine knows no tenants: it shares KV between requests whose tokens and `cache_salt` agree, and sessions between those that name
the same id. So both are bound to whoever asks, whatever the request says.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import quote

import msgspec
from blake3 import blake3
from multidict import CIMultiDict

from kvstore.connectors.session_names import (
    FIELD,
    HEADER,
    OTHER_HEADERS,
    PARENT,
    PARENT_FIELD,
    PARENT_HEADERS,
    SESSION,
)
from kvstore.errors import Invalid
from kvstore.gateway.asked import SMALL, Asked, size

_CONTEXT: Final = "kvtier gateway 2026 cache salt of a tenant"
_NO_HEADER: Final = re.compile(r"[\x00-\x1f\x7f]")  # what no header can carry
_INSIDE: Final = ("vllm_xargs", "kv_transfer_params")  # where engines look for ids
_NAMES: Final = frozenset(name.lower() for name in (*SESSION, *PARENT))
_HEADERS: Final = (HEADER, *OTHER_HEADERS, *PARENT_HEADERS)


def salted(tenant: str, salt: str) -> str:
    """The cache salt of a tenant's request: the same for the same two, and no other two give it."""
    return blake3(msgspec.json.encode((tenant, salt)), derive_key_context=_CONTEXT).hexdigest()


def session_name(tenant: str, session: str) -> str:
    """What a tenant's session is called at engines, and so in the store."""
    return f"{quote(tenant, safe='')}/{session}" if session else ""


def of_tenant(wanted: Asked, tenant: str, *, header: str = "") -> Asked:
    """The same request, its salt and its session bound to the tenant, and its access token taken out.

    Fields are put behind those that are there, which readers of JSON replace by the last of a name. The rest of the body stays
    byte for byte: one of 60 MiB is not made into objects.

    Args:
        wanted: As it came.
        tenant: Of the caller's token.
        header: The further header that may hold a session's id.

    Raises:
        Invalid: An id has control characters. Or ids may be hidden in `vllm_xargs` or `kv_transfer_params`: they are no objects, or
            too large to be looked into.
    """
    salt = salted(tenant, wanted.salt)
    ids = {FIELD: session_name(tenant, wanted.session), PARENT_FIELD: session_name(tenant, wanted.parent)}
    told = {name: value for name, value in ids.items() if value}
    for name, value in told.items():
        if _NO_HEADER.search(value):
            raise Invalid(f"{name} must not contain control characters")
    fields: dict[str, Any] = {
        "cache_salt": salt,
        **{name: ids[_meant(name)] for name in (*SESSION, *PARENT) if name in wanted.fields},
    }
    for place in _INSIDE:
        said = _object(place, wanted)
        kept = {name: value for name, value in said.items() if name.lower() not in _NAMES}
        if place == "vllm_xargs":
            kept |= told
        if kept != said:
            fields[place] = kept
    headers = CIMultiDict(wanted.headers)
    for name in (*_HEADERS, "Authorization", *([header] if header else [])):
        headers.popall(name, None)
    if told.get(FIELD):
        headers[HEADER] = told[FIELD]
    if told.get(PARENT_FIELD):
        headers[PARENT_HEADERS[0]] = told[PARENT_FIELD]
    front = wanted.body.rstrip()[:-1].rstrip()  # without the last brace
    body = front + (b"" if front.endswith(b"{") else b", ") + msgspec.json.encode(fields)[1:]
    return msgspec.structs.replace(wanted, body=body, headers=headers, salt=salt, session=ids[FIELD], parent=ids[PARENT_FIELD])


def _meant(name: str) -> str:
    return FIELD if name in SESSION else PARENT_FIELD


def _object(place: str, wanted: Asked) -> dict[str, Any]:
    raw = wanted.fields.get(place)
    if not raw or raw == msgspec.Raw(b"null"):
        return {}
    if size(raw) > SMALL:
        raise Invalid(f"{place} may be {SMALL} bytes at most here")
    found = msgspec.json.decode(raw)
    if not isinstance(found, dict):
        raise Invalid(f"{place} must be an object")
    return found
