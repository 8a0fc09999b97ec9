"""A bucket on any S3-compatible service whose conditional writes are real (`kvstore.objects.probe` finds out).

Registers and small objects go through obstore, whose threads leave the interpreter alone; larger ones go through sockets of our
own, as do listings and batch deletions. Nothing is ever sent again behind the caller's back: retries have one place,
:class:`kvstore.objects.retry.RetryingStore`, where they are budgeted.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from kvstore.clock import Clock, SystemClock
from kvstore.errors import Closed, Invalid, Unavailable, Unsupported
from kvstore.objects import fork
from kvstore.objects.answers import no_answer
from kvstore.objects.base import (
    ABSENT,
    PAGE,
    UNCHANGED,
    Absent,
    Arrived,
    Buffer,
    Got,
    ObjectMeta,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    check_key,
)
from kvstore.objects.credential_chain import chain
from kvstore.objects.credentials import Credentials, Rotation
from kvstore.objects.direct import Direct
from kvstore.objects.sessions import Session, Sessions, UnsaidLength
from kvstore.objects.settings import S3Settings
from kvstore.objects.sockets import Sockets
from kvstore.objects.window import Window

LARGE: Final = 1 << 20
"""From this size on, bodies move through sockets of our own: without a copy, and what a PUT's answer says is seen."""
LARGE_TLS: Final = 6 << 20
"""The same for what is read over TLS, which comes to Python in records of 16 KiB: obstore takes 2 and 4 MiB faster, and not 8."""
_BUCKET_SEEN_S: Final = 10.0  # how long proof that the bucket exists lasts; a HEAD's bare 404 does not say what is missing


class S3Store:
    """See :class:`kvstore.objects.base.ObjectStore`. Open it with `S3Store.open`.

    Attributes:
        window: How much may be under way at it now.
    """

    def __init__(
        self,
        settings: S3Settings,
        credentials: Callable[[], Credentials],
        clock: Clock,
        tls: ssl.SSLContext | None,
        authorities: str,
    ) -> None:
        self._clock, self._settings = clock, settings
        self.window = Window(settings.max_inflight_bytes, settings.timeout_s, clock)
        gate = self.window.gate
        self._sockets = Sockets(settings.address(), tls, settings.connections)
        self._direct = Direct(settings, self._sockets, clock)
        self._large_read = LARGE if tls is None else LARGE_TLS
        self._sessions = Sessions(
            Rotation(credentials, clock),
            lambda found: Session(found, settings, gate, authorities, LARGE, self._sockets.threads),
        )
        self._bucket_seen = float("-inf")
        self._closed = False
        self._under_way = 0
        self._quiet = asyncio.Event()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: S3Settings, *, credentials: Callable[[], Credentials] | None = None, clock: Clock | None = None
    ) -> AsyncIterator[S3Store]:
        """A store; nothing is sent before its first call.

        Args:
            settings: Where the bucket is.
            credentials: Looks credentials up (blocking, in a thread), again whenever they may have changed; by default the standard
                AWS chain.
            clock: Host's clock, for signatures.

        Raises:
            Closed: kind `forked`, in a child of a process that had a store open.
            Invalid: The CA bundle cannot be read.
        """
        fork.refuse_in_child()
        look_up = credentials or chain(settings.region, instance_metadata=settings.instance_metadata)
        authorities, tls = await asyncio.to_thread(_trust, settings)
        store = cls(settings, look_up, clock or SystemClock(), tls, authorities)
        fork.opened()
        try:
            yield store
        finally:
            await store.aclose()

    async def get(
        self,
        key: str,
        *,
        range: tuple[int, int] | None = None,  # noqa: A002  the contract's own name
        into: memoryview | None = None,
        if_none_match: str | None = None,
        arrived: Arrived | None = None,
    ) -> Got | Absent | Unchanged:
        """See :class:`kvstore.objects.base.ObjectStore`. Without `into`, more than `max_inflight_bytes` is `Corrupt`."""
        target = None if into is None else into.cast("B")

        async def attempt(session: Session) -> Got | Absent | Unchanged | None:
            if range is not None and range[0] >= range[1]:
                return None
            size = 0 if target is None else len(target) if range is None else min(len(target), range[1] - range[0])
            if target is None or size < LARGE:
                return await session.get(key, range, target, if_none_match)
            async with self.window.hold(len(target), "get"):
                if arrived is not None:
                    arrived(0, 0)
                if size < self._large_read:
                    try:
                        return await session.get(key, range, target, if_none_match, arrived, held=True)
                    except UnsaidLength:
                        self._large_read = LARGE  # here nothing says its length
                return await self._direct.get(key, range, target, if_none_match, session.credentials, arrived)

        with self._call(key):
            found = await self._sessions.use(attempt)
            if found is None:
                found = await self._nothing(key, if_none_match)
            self._saw_bucket()
            return found

    async def head(self, key: str) -> ObjectMeta | Absent:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        with self._call(key):
            found = await self._sessions.use(lambda session: self._head(key, session))
            self._saw_bucket()
            return found

    async def put(self, key: str, body: Buffer, mode: PutMode) -> Stored | Refused:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        view = memoryview(body).cast("B")

        async def attempt(session: Session) -> Stored | Refused:
            if len(view) < LARGE:
                return await session.put(key, view, mode)
            return await self._direct.put(key, view, mode, session.credentials)

        with self._call(key):
            async with self.window.hold(len(view), "put"):
                done = await self._sessions.use(attempt)
            self._saw_bucket()
            return done

    async def check_encryption(self, key: str) -> None:
        """See that the store encrypts as `sse` asks, by writing a throw-away object.

        Raises:
            Unsupported: It does not.
            KVTierError: As any request.
        """
        if not self._settings.sse:
            return
        with self._call(key):
            wrong = await self._sessions.use(lambda session: self._direct.encrypts(key, session.credentials))
        await self.delete([key])
        if wrong:
            asked = f"store.sse = {self._settings.sse}"
            remedy = "give the store that key, or a key service; or choose another store.sse, or none and [encryption] key_file"
            raise Unsupported(f"the store does not encrypt as {asked} asks: {wrong}", remedy=remedy)

    async def copy(self, source: str, target: str) -> bool:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        with self._call(source, target):
            return await self._sessions.use(lambda session: session.copy(source, target))

    async def list(self, prefix: str, *, start_after: str = "") -> AsyncIterator[Sequence[ObjectMeta]]:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        token, seen = "", {""}
        while True:
            with self._call():
                page = await self._sessions.use(lambda session: self._direct.page(prefix, start_after, token, session.credentials))
                self._saw_bucket()
            if page.objects:
                yield page.objects
            if not page.token:
                return
            if page.token in seen:
                raise no_answer(f"LIST {prefix}", "the store repeats a page of its listing")
            seen.add(token := page.token)

    async def delete(self, keys: Sequence[str]) -> Sequence[str]:
        """See :class:`kvstore.objects.base.ObjectStore`. One request per 1,000 keys."""
        left: list[str] = []
        for at in range(0, len(keys), PAGE):
            batch = keys[at : at + PAGE]
            with self._call(*batch):
                left += await self._sessions.use(partial(self._delete, batch))
        return left

    async def now(self) -> float:
        """See :class:`kvstore.objects.base.ObjectStore`. In whole seconds."""
        with self._call():
            return await self._sessions.use(lambda session: self._direct.date(session.credentials))

    async def aclose(self) -> None:
        """See :class:`kvstore.objects.base.ObjectStore`."""
        self._closed = True
        if fork.in_child():
            return  # its threads are the parent's
        while self._under_way:
            self._quiet.clear()
            await self._quiet.wait()
        await self._sockets.aclose()

    @contextmanager
    def _call(self, *keys: str) -> Iterator[None]:
        fork.refuse_in_child()
        if self._closed:
            raise Closed("this store was closed")
        for key in keys:
            check_key(key)
        self._under_way += 1
        try:
            yield
        except Unavailable as error:
            if error.kind == "store_busy":
                self.window.busy()
            raise
        finally:
            self._under_way -= 1
            self._quiet.set()

    async def _delete(self, keys: Sequence[str], session: Session) -> Sequence[str]:
        return await self._direct.delete(keys, session.credentials)

    async def _head(self, key: str, session: Session) -> ObjectMeta | Absent:
        found = await session.head(key)
        if isinstance(found, ObjectMeta):
            return found
        if found == 404 and self._clock.monotonic() - self._bucket_seen < _BUCKET_SEEN_S:
            return ABSENT
        # The answer to a HEAD has no body, so a missing bucket looks like a missing key, and expired keys like missing rights.
        return await self._direct.first_byte(key, session.credentials)

    async def _nothing(self, key: str, if_none_match: str | None) -> Got | Absent | Unchanged:
        """What a range outside the object gives."""
        there = await self._sessions.use(lambda session: self._head(key, session))
        if isinstance(there, Absent):
            return there
        if there.etag == if_none_match:
            return UNCHANGED
        return Got(memoryview(b""), there.etag, there.size, there.modified)

    def _saw_bucket(self) -> None:
        self._bucket_seen = self._clock.monotonic()


def _trust(settings: S3Settings) -> tuple[str, ssl.SSLContext | None]:
    """Authorities to trust besides the system's, as PEM text; and a context, for an https endpoint."""
    try:
        authorities = Path(settings.ca_bundle).read_text() if settings.ca_bundle else ""
        if not settings.address().tls:
            return authorities, None
        tls = ssl.create_default_context()
        if authorities:
            tls.load_verify_locations(cadata=authorities)
    except (OSError, ValueError) as error:
        raise Invalid(f"ca_bundle {settings.ca_bundle!r} cannot be used: {error}") from error
    return authorities, tls
