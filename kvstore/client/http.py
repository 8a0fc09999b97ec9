"""The transport to a node over TCP: calls as JSON, blocks as streams that are verified before anybody sees them."""

from __future__ import annotations

import asyncio
import base64
import os
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Final, Self
from urllib.parse import quote, urlencode

import msgspec
from blake3 import blake3

from kvstore import api, codec, wire
from kvstore.blocks import BlockLease, Blocks
from kvstore.client.credential import Credential, client_context
from kvstore.client.fork import Birth
from kvstore.client.threads import on_thread
from kvstore.client.transport import START, Fill, block_patience, check_batch, no_answer, patience
from kvstore.config import StorageUrl, is_loopback
from kvstore.errors import Closed, Corrupt, Denied, Invalid, KVTierError, Problem, Unavailable, Unsupported
from kvstore.ids import BlockName, Link, Namespace, Shard

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise Unsupported(f"kvtier:// URLs need the package {error.name}", remedy="pip install 'kvtier[node]'") from error

STREAMS: Final = 8  # blocks in flight at a time
CONNECT_S: Final = 5.0
MAX_ANSWER: Final = 64 << 20
_SLICE: Final = 256 << 10
_REFUSED: Final = frozenset({401, 403})
_WHO: Final = "set KVTIER_TOKEN or KVTIER_TOKEN_FILE, or token_file= in the URL; is there a proxy before the node?"
_OVER_TLS: Final = "where the node has [tls], add tls=true to the URL, and ca_bundle=FILE for an authority of your own"
_IN_PLAIN: Final = "where the node has no [tls], leave tls=true out; from another host that takes allow_http=true"
_JSON: Final = {"Content-Type": "application/json"}


class HttpTransport:
    """See :class:`kvstore.client.transport.Transport`."""

    def __init__(self, base: str, session: aiohttp.ClientSession, credential: Credential) -> None:
        self._base, self._session, self._credential = base, session, credential
        self._birth, self._met = Birth(), False

    @classmethod
    async def open(cls, url: StorageUrl) -> Self:
        """Connect to the node at `kvtier://host:port`.

        Raises:
            Invalid: The host is not this one, and neither `tls=true` nor `allow_http=true` says how KV may travel.
            Denied: The node does not take the token.
            Unavailable: Nobody answers.
            Unsupported: The node's version is too far away, or the URL names a tenant and there is no token, which says so.
        """
        if not (url.tls or url.allow_http or is_loopback(url.host)):
            raise Invalid(
                f"kvtier://{url.host} is another host, and KV would travel unencrypted: add tls=true, "
                "or allow_http=true to accept that"
            )
        credential = Credential.find(url, os.environ)
        if url.tenant != "default" and not credential:
            raise Unsupported(
                "over TCP the access token says which tenant is meant, and there is none",
                remedy="set KVTIER_TOKEN or KVTIER_TOKEN_FILE, or use kvtier+unix://",
            )
        host = f"[{url.host}]" if ":" in url.host else url.host
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4 * STREAMS, ssl=client_context(url) or True),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
            headers={"Accept-Encoding": "identity"},
        )
        transport = cls(f"{'https' if url.tls else 'http'}://{host}:{url.port}", session, credential)
        try:
            health = await transport.call("health", api.Nothing())
            if isinstance(health, api.Health):
                wire.check_versions(health.version, version("kvtier"))
        except BaseException:
            await session.close()
            raise
        return transport

    async def call(self, name: str, request: api.Request) -> api.Answer:
        """See `Transport`."""
        call = api.BY_NAME[name]
        fields = msgspec.to_builtins(request)
        path = call.path.format(**{key: quote(str(value), safe="") for key, value in fields.items()})
        body = None
        if call.method in {"GET", "DELETE"}:
            path += _query(fields, inside=call.path)
        else:
            body = msgspec.json.encode(request)
        async with self._request(name, call.method, path, patience(name, request), body=body) as response:
            content = await _read(response)
            if response.status >= 400 and not (name == "ready" and response.status == 503):
                raise _error(response.status, content)
        kind: type[api.Answer] = call.answer
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise Unavailable(f"{name}: the answer is not a {kind.__name__}: {error}") from None

    async def get(self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int, reach: api.Tier) -> Blocks:
        """See `Transport`."""
        check_batch(links)
        ends = asyncio.get_running_loop().time() + block_patience(deadline_ms)
        names = deque(BlockName(namespace.id, shard, link.prefix_id, link.tokens) for link in links)
        running: deque[asyncio.Task[memoryview | str]] = deque()
        blocks: list[BlockLease] = []
        try:
            while names or running:
                while names and len(running) < STREAMS:
                    running.append(asyncio.create_task(self._fetch(namespace, names.popleft(), reach, ends)))
                found = await running.popleft()
                if isinstance(found, str):
                    return Blocks(blocks, found)
                blocks.append(BlockLease(found, _nothing))
            return Blocks(blocks, "")
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """See `Transport`."""
        check_batch(links)
        running: deque[asyncio.Task[bool]] = deque()
        taken: list[bool] = []
        try:
            for index, link in enumerate(links):
                if len(running) == STREAMS:
                    taken.append(await running.popleft())
                payload = memoryview(bytearray(codec.layout(namespace, shard, link.tokens).payload_bytes))
                await on_thread(fill, index, payload)
                name = BlockName(namespace.id, shard, link.prefix_id, link.tokens)
                running.append(asyncio.create_task(self._send(name, payload.toreadonly())))
            while running:
                taken.append(await running.popleft())
            return taken
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def aclose(self) -> None:
        """See `Transport`."""
        if self._birth.here:
            await self._session.close()

    async def _fetch(self, namespace: Namespace, name: BlockName, reach: api.Tier, ends: float) -> memoryview | str:
        """A verified raw object, or why there is none."""
        left = max(0.001, ends - asyncio.get_running_loop().time())
        path = _block_path(name, reach=reach, deadline_ms=str(int(left * 1000)))
        into = memoryview(bytearray(codec.layout(namespace, name.shard, name.tokens).raw_bytes))
        try:
            async with self._request("get", "GET", path, left) as response:
                if response.status == 404 and (miss := response.headers.get("X-KVTier-Miss")):
                    return miss
                if response.status != 200:
                    raise _error(response.status, await _read(response))
                if not await _read_into(response, into):
                    return "corrupt"
            await on_thread(codec.verify, into, name, namespace)
        except Corrupt:
            return "corrupt"
        except Unavailable as error:
            if error.kind != "timeout":
                raise
            return "timeout"
        return into

    async def _send(self, name: BlockName, payload: memoryview) -> bool:
        digest = base64.b64encode((await on_thread(blake3, payload)).digest()).decode()
        headers = {
            "Content-Type": "application/octet-stream",
            "Content-Length": str(payload.nbytes),
            "Content-Digest": f"blake3=:{digest}:",
        }
        path = _block_path(name)
        async with self._request("put", "PUT", path, block_patience(0), body=_slices(payload), headers=headers) as response:
            content = await _read(response)
            if response.status >= 400:
                raise _error(response.status, content)
        return msgspec.json.decode(content, type=api.Taken).taken

    @asynccontextmanager
    async def _request(
        self,
        name: str,
        method: str,
        path: str,
        timeout_s: float,
        *,
        body: bytes | AsyncIterator[memoryview] | None = None,
        headers: dict[str, str] = _JSON,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        self._birth.check()
        if self._session.closed:
            raise Closed("this client is closed")
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method,
                    URL(self._base + path, encoded=True),
                    data=body,
                    headers={**headers, **self._credential.headers()},
                    allow_redirects=False,
                ) as response,
            ):
                self._met = True
                yield response
        except aiohttp.ClientConnectorCertificateError as error:
            raise Unavailable(
                f"{self._base}: its certificate is not trusted ({error.certificate_error})",
                kind="untrusted_certificate",
                remedy="set ca_bundle= in the URL to the authority that signed it, and name the host as it does",
            ) from None
        except aiohttp.ClientConnectorSSLError as error:
            raise Unavailable(f"{self._base}: TLS failed ({error.strerror}): does it speak TLS?", remedy=_IN_PLAIN) from None
        except aiohttp.ClientConnectorError as error:
            raise Unavailable(f"{self._base}: no node listens there ({error.strerror})", remedy=START) from None
        except TimeoutError:
            raise no_answer(name, f"the node did not answer within {timeout_s:g} s", late=True) from None
        except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
            if self._met or self._base.startswith("https"):
                raise no_answer(name, f"the connection failed ({error})", late=False) from None
            raise Unavailable(
                f"{self._base}: closed the connection without an answer: does it speak TLS?", remedy=_OVER_TLS
            ) from None
        except aiohttp.ClientError as error:
            raise no_answer(name, f"the connection failed ({error})", late=False) from None


def _query(fields: dict[str, object], inside: str) -> str:
    """Fields that are not in the path and say something."""
    given = {key: value for key, value in fields.items() if f"{{{key}}}" not in inside and value not in (None, "", [], ())}
    text = urlencode({key: str(value).lower() if isinstance(value, bool) else value for key, value in given.items()}, doseq=True)
    return f"?{text}" if text else ""


def _block_path(name: BlockName, **query: str) -> str:
    return f"/v1/blocks/{name.namespace}/{name.shard}/{name.prefix_id}?" + urlencode({"tokens": name.tokens, **query})


async def _slices(payload: memoryview) -> AsyncIterator[memoryview]:
    for start in range(0, payload.nbytes, _SLICE):
        yield payload[start : start + _SLICE]


async def _read(response: aiohttp.ClientResponse) -> bytes:
    parts, size = [], 0
    async for part in response.content.iter_any():
        size += len(part)
        if size > MAX_ANSWER:
            raise Unavailable(f"the node's answer is longer than {MAX_ANSWER} bytes")
        parts.append(part)
    return b"".join(parts)


async def _read_into(response: aiohttp.ClientResponse, into: memoryview) -> bool:
    """Fill `into` exactly; False where the body is shorter or longer."""
    at = 0
    async for part in response.content.iter_any():
        if at + len(part) > into.nbytes:
            return False
        into[at : at + len(part)] = part
        at += len(part)
    return at == into.nbytes


def _error(status: int, content: bytes) -> KVTierError:
    try:
        return msgspec.json.decode(content, type=Problem).error()
    except msgspec.MsgspecError:
        if status in _REFUSED:  # by something before the node
            return Denied(f"HTTP status {status}, and no problem document", remedy=_WHO)
        return Unavailable(f"HTTP status {status}, and no problem document: is there a kvtier node at this address?")


def _nothing() -> None:
    """These bytes are the client's own: nobody lent them."""
