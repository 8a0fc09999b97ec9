"""`/v1/blocks/{namespace}/{shard}/{prefix_id}`: raw objects as streams, for peers and for clients on other hosts."""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from typing import Final

import msgspec
from aiohttp import web
from blake3 import blake3

from kvstore import api, codec
from kvstore.errors import Corrupt, Invalid, NotFound
from kvstore.ids import Link, Shard, namespace_id, prefix_id
from kvstore.server.auth import access_of, counted, needs
from kvstore.server.inflight import InFlight
from kvstore.server.limits import Limits, check_deadline
from kvstore.server.observe import Observe
from kvstore.server.ports import Room, Service
from kvstore.server.problems import problem_response
from kvstore.server.routes import pattern

PATH: Final = "/v1/blocks/{namespace}/{shard}/{prefix_id}"
MISS: Final = "X-KVTier-Miss"
DEADLINE_MS: Final = 30_000
_SLICE: Final = 256 << 10
_RANGE: Final = re.compile(r"bytes=([0-9]{0,19})-([0-9]{0,19})")
_DIGEST: Final = re.compile(r"blake3=:([A-Za-z0-9+/=]{44}):")


class _Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the query says. `tokens` is how many the block holds: with namespace and shard it gives the length."""

    tokens: int
    deadline_ms: int = DEADLINE_MS
    reach: api.Tier = "bucket"


class _Name(msgspec.Struct, frozen=True):
    """The block that a path means."""

    namespace: str
    shard: Shard
    link: Link


class Blocks:
    """The handlers of that path."""

    def __init__(self, service: Service, in_flight: InFlight, limits: Limits, observe: Observe) -> None:
        self._service, self._in_flight, self._limits, self._observe = service, in_flight, limits, observe

    def routes(self) -> list[web.RouteDef]:
        """GET, HEAD and PUT."""
        path = pattern(PATH)
        return [web.get(path, self.get, name="get_block"), web.put(path, self.put, name="put_block")]

    @needs("read")
    async def get(self, request: web.Request) -> web.StreamResponse:
        """The raw object, or a range of it. A miss is 404 with the reason in `X-KVTier-Miss`."""
        asked = _asked(request)
        name = _name(request, asked.tokens)
        tenant = access_of(request).tenant
        with counted(self._observe, "get", request):
            self._service.admit(tenant)
            leases, miss = await self._in_flight.read(
                self._service.plane.get(
                    tenant, name.namespace, name.shard, [name.link], deadline_ms=asked.deadline_ms, reach=asked.reach
                )
            )
            if not leases:
                return problem_response(NotFound(f"block {name.link.prefix_id}: {miss}").problem(), {MISS: miss})
            try:
                return await self._stream(request, leases[0].view)
            finally:
                leases[0].release()

    async def _stream(self, request: web.Request, view: memoryview) -> web.StreamResponse:
        etag = f'"{codec.block_digest(view)}"'
        headers = {"Accept-Ranges": "bytes", "ETag": etag, "Content-Type": "application/octet-stream"}
        whole = request.headers.get("If-Range", etag) != etag
        part = None if whole else _range(request.headers.get("Range", ""), view.nbytes)
        if part is not None:
            start, end = part
            if start >= end:
                return web.Response(status=416, headers={"Content-Range": f"bytes */{view.nbytes}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{view.nbytes}"
            view = view[start:end]
        response = web.StreamResponse(status=200 if part is None else 206, headers=headers)
        response.content_length = view.nbytes
        await response.prepare(request)
        if request.method != "HEAD":
            for start in range(0, view.nbytes, _SLICE):
                # A copy: the transport may still hold what it was given when the lease is over.
                await self._write(request, response, bytes(view[start : start + _SLICE]))
        await response.write_eof()
        return response

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        try:
            async with asyncio.timeout(self._limits.stall):
                await response.write(data)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # it does not read, and must not hold the lease for ever
            raise ConnectionResetError("the client does not read") from None

    @needs("write", finishes=True)
    async def put(self, request: web.Request) -> web.Response:
        """Publish a block from its payload: the tensors in storage order. `Content-Digest: blake3=:...:` is checked if given."""
        asked = _asked(request)
        name = _name(request, asked.tokens)
        plane, tenant = self._service.plane, access_of(request).tenant
        with counted(self._observe, "put", request):
            self._service.admit(tenant)
            size = await plane.payload_bytes(tenant, name.namespace, name.shard, name.link.tokens)
            if request.content_length not in {None, size}:
                raise Invalid(f"a payload of {name.link.tokens} tokens has {size} bytes here, not {request.content_length}")
            room = await plane.reserve(tenant, name.namespace, name.shard, name.link)
            taken = room is not None and await self._receive(request, room)
        return web.Response(body=msgspec.json.encode(api.Taken(taken=taken)), content_type="application/json")

    async def _receive(self, request: web.Request, room: Room) -> bool:
        try:
            async with asyncio.timeout(self._limits.upload):
                await _read_into(request, room.payload)
            wanted = _DIGEST.search(request.headers.get("Content-Digest", ""))
            if wanted is not None:
                digest = await self._service.plane.run(_digest, room.payload)
                if digest != _decoded(wanted[1]):
                    raise Corrupt("the payload does not match its Content-Digest")  # noqa: TRY301  the room is given back below
        except TimeoutError:
            room.abort()
            raise Invalid(f"the payload did not arrive within {self._limits.upload} s") from None
        except BaseException:
            room.abort()
            raise
        return await room.publish()


def _asked(request: web.Request) -> _Asked:
    try:
        asked = msgspec.convert(dict(request.query), _Asked, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"query: {error}") from None
    check_deadline(asked.deadline_ms)
    return asked


def _name(request: web.Request, tokens: int) -> _Name:
    parts = request.match_info
    return _Name(namespace_id(parts["namespace"]), Shard.parse(parts["shard"]), Link(prefix_id(parts["prefix_id"]), tokens))


def _range(header: str, size: int) -> tuple[int, int] | None:
    """The bytes [start, end) that a Range header asks for; None where there is none that we serve; empty where none exist."""
    match = _RANGE.fullmatch(header)
    if match is None or not (match[1] or match[2]):
        return None
    if not match[1]:
        return max(0, size - int(match[2])), size
    if match[2] and int(match[2]) < int(match[1]):
        return None
    return int(match[1]), min(size, int(match[2]) + 1) if match[2] else size


async def _read_into(request: web.Request, payload: memoryview) -> None:
    at = 0
    async for part in request.content.iter_any():
        if at + len(part) > payload.nbytes:
            raise Invalid(f"the payload is longer than {payload.nbytes} bytes")
        payload[at : at + len(part)] = part
        at += len(part)
    if at < payload.nbytes:
        raise Invalid(f"the payload ended after {at} of {payload.nbytes} bytes")


def _digest(payload: memoryview) -> bytes:
    return blake3(payload).digest()


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise Invalid("Content-Digest: blake3 must be base64 of 32 bytes") from None
