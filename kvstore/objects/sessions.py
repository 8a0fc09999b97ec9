"""Registers and small objects, through obstore, with the credentials of the moment.

obstore's own credential chain ignores profile files and asks the instance-metadata address when it finds nothing; and whatever it
is not told, it takes from `AWS_*` variables: a session token, an endpoint, a proxy. So each client is told everything, and built
anew when credentials rotate.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from obstore.exceptions import BaseError
from obstore.store import S3Store as Client

from kvstore.errors import Corrupt, Denied, Unavailable
from kvstore.objects.answers import no_answer, put_outcome, refusal_in
from kvstore.objects.base import (
    ABSENT,
    UNCHANGED,
    Absent,
    Arrived,
    Create,
    Got,
    ObjectMeta,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    Update,
)
from kvstore.objects.credentials import Credentials, Rotation
from kvstore.objects.gate import ByteGate
from kvstore.objects.http1 import SLICE
from kvstore.objects.settings import S3Settings
from kvstore.objects.threads import Threads, until_over

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Credential

_T = TypeVar("_T")
_RENEWABLE: Final = frozenset({"bad_credentials", "expired_credentials"})
_CONNECT_S: Final = 5
_OBSTORE: Final = (BaseError, FileNotFoundError, ValueError)


class UnsaidLength(Unavailable):
    """Somebody cut a body into chunks, and obstore reads none of unsaid length."""


class Session:
    """Credentials, and two obstore clients that sign with them; neither sends anything twice.

    The clients differ in how long a request may take: writes end on their own, because nobody may walk away from one; reads are
    cut off by the caller's deadline, which depends on a size that is known only when the answer starts.

    Args:
        credentials: Whose.
        settings: Where the bucket is.
        gate: Bounds the bytes under way.
        authorities: To trust besides the system's, as PEM text.
        small: Bytes of the largest body that is put.
        threads: Lay larger bodies to their place.
    """

    def __init__(
        self, credentials: Credentials, settings: S3Settings, gate: ByteGate, authorities: str, small: int, threads: Threads
    ) -> None:
        self.credentials = credentials
        self._small, self._threads = small, threads
        self._settings, self._gate = settings, gate
        self._reads = _client(settings, credentials, authorities, settings.deadline_s(settings.max_inflight_bytes))
        self._writes = _client(settings, credentials, authorities, settings.deadline_s(small))

    async def get(
        self,
        key: str,
        span: tuple[int, int] | None,
        target: memoryview | None,
        if_none_match: str | None,
        arrived: Arrived | None = None,
        *,
        held: bool = False,
    ) -> Got | Absent | Unchanged | None:
        """As the contract's `get`; None where the range holds no bytes (416). With `held`, the caller keeps room at the gate."""
        most = self._settings.max_inflight_bytes if target is None else len(target)
        options: GetOptions = {} if span is None else {"range": span}
        if if_none_match:
            options["if_none_match"] = if_none_match
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._settings.timeout_s) as deadline:
                answer = await self._reads.get_async(key, options=options)
                meta, size = answer.meta, answer.range[1] - answer.range[0]
                if size > most:
                    raise Corrupt(f"GET {key}: {size} bytes where at most {most} were expected")
                deadline.reschedule(loop.time() + self._settings.deadline_s(size))
                async with nullcontext() if held else self._gate.hold(size):
                    data = memoryview(await answer.bytes_async())
        except _OBSTORE as error:
            refusal = refusal_in(error)
            if refusal.key_absent:
                return ABSENT
            if refusal.status == 416:
                return None
            if refusal.status == 304:
                return UNCHANGED
            if not refusal.status and "Content-Length Header missing" in refusal.message:
                raise UnsaidLength(f"GET {key}: an answer without the length of its body") from None
            raise refusal.error(f"GET {key}") from None
        except TimeoutError:
            raise no_answer(f"GET {key}", "no answer in time", kind="timeout") from None
        if target is not None:
            if len(data) < self._small:
                target[: len(data)] = data
            else:
                await self._threads.run(partial(_land, data, target[: len(data)], arrived))
            data = target[: len(data)]
        return Got(data, meta["e_tag"] or "", meta["size"], meta["last_modified"].timestamp())

    async def head(self, key: str) -> ObjectMeta | int:
        """What there is, or the status of an answer whose meaning its missing body would have told.

        Raises:
            Unavailable: No answer, or a failure of the store.
        """
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                meta = await self._reads.head_async(key)
        except _OBSTORE as error:
            refusal = refusal_in(error)
            if 300 <= refusal.status < 500 and refusal.status != 429:
                return refusal.status
            raise refusal.error(f"HEAD {key}") from None
        except TimeoutError:
            raise no_answer(f"HEAD {key}", "no answer in time", kind="timeout") from None
        return ObjectMeta(key, meta["size"], meta["e_tag"] or "", meta["last_modified"].timestamp())

    async def put(self, key: str, body: memoryview, mode: PutMode) -> Stored | Refused:
        """As the contract's `put`, in one request."""
        how: Any = "create" if isinstance(mode, Create) else {"e_tag": mode.etag} if isinstance(mode, Update) else "overwrite"
        try:
            done = await _to_its_end(self._writes.put_async(key, body, mode=how, use_multipart=False))
        except _OBSTORE as error:
            return put_outcome(refusal_in(error), mode, f"PUT {key}")
        return Stored(done["e_tag"] or "")

    async def copy(self, source: str, target: str) -> bool:
        """As the contract's `copy`."""
        try:
            await _to_its_end(self._writes.copy_async(source, target))
        except _OBSTORE as error:
            refusal = refusal_in(error)
            if refusal.key_absent:
                return False
            raise refusal.error(f"COPY {source}") from None
        return True


class Sessions:
    """The session of the moment.

    Args:
        rotation: Where credentials come from.
        build: A session for credentials.
    """

    def __init__(self, rotation: Rotation, build: Callable[[Credentials], Session]) -> None:
        self._rotation, self._build = rotation, build
        self._current: Session | None = None

    async def use(self, attempt: Callable[[Session], Awaitable[_T]]) -> _T:
        """Run a request; once more if the store rejected its credentials and there are newer ones by now.

        A request that was rejected for its credentials was not carried out, so this holds for conditional writes too.
        """
        session = self._of(await self._rotation.get())
        try:
            return await attempt(session)
        except Denied as error:
            if error.kind not in _RENEWABLE:
                raise
            renewed = await self._rotation.get(rejected=session.credentials)
            if renewed == session.credentials:
                raise
        return await attempt(self._of(renewed))

    def _of(self, credentials: Credentials) -> Session:
        if self._current is None or self._current.credentials != credentials:
            self._current = self._build(credentials)
        return self._current


def _land(body: memoryview, target: memoryview, arrived: Arrived | None) -> None:
    """Copy a body to its place and tell of it, slice by slice, so that who looks at it finds it in the cache."""
    source, into = np.frombuffer(body, np.uint8), np.frombuffer(target, np.uint8)  # copied without the interpreter's lock
    for start in range(0, len(source), SLICE):
        end = min(start + SLICE, len(source))
        np.copyto(into[start:end], source[start:end])
        if arrived is not None:
            arrived(start, end)


async def _to_its_end(sending: Awaitable[_T]) -> _T:
    """The outcome of a write by obstore, which reads the caller's buffer for as long as it runs, cancelled or not."""
    ended = asyncio.ensure_future(sending)
    if await until_over(ended):
        raise asyncio.CancelledError
    return ended.result()


def _client(settings: S3Settings, credentials: Credentials, authorities: str, timeout_s: float) -> Client:
    address = settings.address()

    def provider() -> S3Credential:
        token = credentials.token or None
        return {
            "access_key_id": credentials.access_key,
            "secret_access_key": credentials.secret_key,
            "token": token,
            "expires_at": None,
        }

    encryption: dict[str, Any] = {"aws_server_side_encryption": settings.encryption} if settings.sse else {}
    if settings.sse_kms_key:
        encryption["aws_sse_kms_key_id"] = settings.sse_kms_key
    return Client(
        settings.bucket,
        endpoint=address.url,
        aws_endpoint_url_s3=address.url,  # AWS_ENDPOINT_URL_S3 would win over `endpoint`
        region=settings.region,
        virtual_hosted_style_request=settings.addressing == "virtual",
        skip_signature=False,
        credential_provider=provider,
        **encryption,
        retry_config={"max_retries": 0, "retry_timeout": timedelta(seconds=60)},
        client_options={
            "allow_http": not address.tls,
            "timeout": timedelta(seconds=timeout_s),
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "proxy_url": address.url,  # with its exclusion this means no proxy, whatever HTTP_PROXY says
            "proxy_excludes": address.host,
            **({"root_certificate": authorities} if authorities else {}),
        },
    )
