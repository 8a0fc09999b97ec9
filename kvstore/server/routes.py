"""The calls of :data:`kvstore.api.CALLS` as HTTP routes: path, query and JSON body together are the request."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, Final, get_origin

import msgspec
from aiohttp import web

from kvstore import api
from kvstore.errors import Invalid
from kvstore.server.acting import act
from kvstore.server.auth import access_of, counted, needs
from kvstore.server.inflight import READS, InFlight
from kvstore.server.limits import Limits
from kvstore.server.observe import Observe
from kvstore.server.ports import Service
from kvstore.server.problems import Handler

_UNREADY: Final = 503
_parts: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PARAMETER: Final = re.compile(r"\{(\w+)\}")


def call_routes(service: Service, in_flight: InFlight, limits: Limits, observe: Observe) -> list[web.RouteDef]:
    """A route for every call."""
    return [
        web.route(call.method, pattern(call.path), _handler(call, service, in_flight, limits, observe), name=call.name)
        for call in api.CALLS
    ]


def pattern(path: str) -> str:
    """A path of the table for aiohttp. A parameter may be empty: the call then says what is wrong, instead of a bare 404."""
    return _PARAMETER.sub(r"{\1:[^/]*}", path)


def _handler(call: api.Call, service: Service, in_flight: InFlight, limits: Limits, observe: Observe) -> Handler:
    types = {field.encode_name: field.type for field in msgspec.structs.fields(call.request)}

    @needs(call.scope, finishes=call.name not in READS)  # what a change does must not depend on when it is looked at
    async def handle(request: web.Request) -> web.Response:
        with counted(observe, call.name, request):
            fields = await _fields(request, types, call.name, float(limits.upload))
            answer = await in_flight.run(call.name, act(service, access_of(request), call, _convert(fields, call)))
        unready = isinstance(answer, api.Health) and not answer.ok
        return web.Response(
            body=msgspec.json.encode(answer), status=_UNREADY if unready else call.status, content_type="application/json"
        )

    return handle


async def _fields(request: web.Request, types: Mapping[str, Any], name: str, patience_s: float) -> dict[str, Any]:
    """Everything the request says, by field. Raises `Invalid` for an unknown field, or one that is said twice differently."""
    fields: dict[str, Any] = dict(request.match_info)
    said = {**_query(request, types, name), **await _body(request, types, name, patience_s)}
    for field, value in said.items():
        if field not in types:
            raise Invalid(f"unknown field {field[:64]!r} of {name}; known: {', '.join(types)}")
        if fields.setdefault(field, value) != value:
            raise Invalid(f"{field} in the path and {field} in the request differ")
    return fields


def _query(request: web.Request, types: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in request.query:
        kind = types.get(field)
        value = request.query.getall(field) if get_origin(kind) in {list, tuple} else request.query[field]
        try:
            found[field] = value if kind is None else msgspec.convert(value, kind, strict=False)
        except msgspec.ValidationError as error:
            raise Invalid(f"{name}: query parameter {field}: {error}") from None
    return found


async def _body(request: web.Request, types: Mapping[str, Any], name: str, patience_s: float) -> dict[str, Any]:
    """The JSON object's fields; {} where there is no body. Its size is bounded by the application.

    Each field is read as what it must be, and an unknown one not at all: millions of empty lists would take gigabytes.
    """
    if request.method not in {"POST", "PUT"}:
        return {}
    # A page of another site can only send what needs no permission of ours, and JSON is not among it. So it is required even
    # where there is nothing to say.
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(reason="the content type must be application/json")
    try:
        async with asyncio.timeout(patience_s):
            text = await request.read()
        parts = _parts.decode(text or b"{}")
        return {field: _value(part, types[field], f"{name}: {field}") if field in types else part for field, part in parts.items()}
    except TimeoutError:
        raise Invalid(f"the body did not arrive within {patience_s:.0f} s") from None
    except msgspec.ValidationError:
        raise Invalid("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise Invalid(f"the body is not JSON: {error}") from None


def _value(part: msgspec.Raw, kind: Any, what: str) -> Any:
    try:
        return msgspec.json.decode(part, type=kind)
    except msgspec.ValidationError as error:
        raise Invalid(f"{what}: {error}") from None


def _convert(fields: dict[str, Any], call: api.Call) -> api.Request:
    try:
        request: api.Request = msgspec.convert(fields, call.request)
        msgspec.msgpack.encode(request)  # JSON knows numbers of any size; what the socket could not carry is refused here, too
    except (msgspec.ValidationError, RecursionError, OverflowError) as error:
        raise Invalid(f"{call.name}: {error}") from None
    return request
