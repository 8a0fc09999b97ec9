"""Who asks over HTTP: access tokens, read again when their file changes, and what each route needs.

Used by the node and by the gateway. A route without `needs` is refused to everybody: forgetting it opens nothing.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from aiohttp import web
from aiohttp.typedefs import Middleware

from kvstore.access import MAX_FILE, NOBODY, WHOLE, Access, Need, Tokens, bearer, everything, id_of
from kvstore.clock import Clock
from kvstore.config import AuthSettings, TlsSettings, is_loopback
from kvstore.errors import Denied, Invalid, KVTierError
from kvstore.server.observe import Observe
from kvstore.server.problems import Handler

log = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])
ACCESS: Final = web.RequestKey("ACCESS", Access)
TENANT: Final = "default"  # of everybody, where there are no tokens
_NEEDS: Final = "kvtier_needs"
_LOOK_S: Final = 1.0  # between two looks at the file, for tokens that it had


class Door(Protocol):
    """Tells who asks."""

    @property
    def wrong(self) -> str:
        """What keeps it from going by what it was last told; "" where nothing does."""
        ...

    def admit(self, header: str) -> Access:
        """Who sent this `Authorization` header; `NOBODY` without one. Raises `Denied` for one that is not valid."""
        ...


class Open:
    """Everybody may everything, for the tenant `default`."""

    wrong = ""

    def admit(self, header: str) -> Access:  # noqa: ARG002  nobody is asked
        """See `Door`."""
        return everything(TENANT)


class Keyring:
    """The tokens of a file. One that was changed into something unreadable, or emptied, changes nothing: the last good one stays.

    Args:
        path: Of the file.
        clock: Tokens expire by its `now`.

    Attributes:
        tokens: As last read.
        wrong: Why the file as it is now is not what is in force; "" where it is.

    Raises:
        Invalid: There is no such file, anybody may write to it, or it is not a file of tokens.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path, self._clock = Path(path).expanduser(), clock
        self._seen: tuple[int, int, int] | None = self._signature()
        self.tokens = self._read()
        self._looked, self.wrong = clock.monotonic(), ""

    def admit(self, header: str) -> Access:
        """See `Door`."""
        text = bearer(header)
        if not text:
            return NOBODY
        new = id_of(text) not in self.tokens.known  # one that was just made works at once
        if new or self._clock.monotonic() - self._looked >= _LOOK_S:
            self._look()
        return self.tokens.of(text, self._clock.now())

    def _look(self) -> None:
        self._looked = self._clock.monotonic()
        try:
            seen, self._seen = self._seen, None  # a file that was gone is read when it is back, though it be the same
            self._seen = self._signature()
            if self._seen == seen:  # also where it is no good: it is not tried again before it changes
                return
            self.tokens, self.wrong = self._read(), ""
            log.info("%s was read again: %d tokens", self._path, len(self.tokens.known))
        except Invalid as error:
            why = f"{error.message}; the tokens read before stay valid"
            if why != self.wrong:  # said once, not for every request
                log.warning("%s (%s)", why, error.remedy)
            self.wrong = why

    def _signature(self) -> tuple[int, int, int]:
        try:
            found = self._path.stat()
        except OSError as error:
            raise Invalid(
                f"auth.tokens_file {self._path}: {error.strerror}", remedy=f"make one: kvtier tokens create --file {self._path}"
            ) from None
        return found.st_ino, found.st_size, found.st_mtime_ns

    def _read(self) -> Tokens:
        try:
            with open(self._path, "rb", opener=_unblocked) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise Invalid(f"auth.tokens_file {self._path} is no file")
                if mode & stat.S_IWOTH:
                    raise Invalid(f"auth.tokens_file {self._path} may be written by anybody", remedy=f"chmod o-w {self._path}")
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise Invalid(f"auth.tokens_file {self._path}: {error.strerror}") from None
        if len(data) > MAX_FILE:
            raise Invalid(f"auth.tokens_file {self._path} is longer than {MAX_FILE} bytes")
        name = f"auth.tokens_file {self._path}"
        try:
            return Tokens.parse(data.decode(), name)
        except UnicodeDecodeError:
            raise Invalid(f"{name} is not UTF-8", remedy=WHOLE) from None
        except Invalid as error:
            raise Invalid(error.message, remedy=WHOLE) from None


def _unblocked(path: str, flags: int) -> int:
    """Opens at once, a pipe that nobody writes to included: the node's loop would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def door(auth: AuthSettings, clock: Clock) -> Door:
    """What a face asks. Raises `Invalid` as `Keyring`."""
    return Keyring(auth.tokens_file, clock) if auth.tokens_file else Open()


def needs(need: Need) -> Callable[[F], F]:
    """Says what a route's handler asks of its caller."""

    def mark(handler: F) -> F:
        setattr(handler, _NEEDS, need)
        return handler

    return mark


def need_of(handler: object) -> Need | None:
    """What `needs` said of it; None where nothing was said."""
    found: Need | None = getattr(handler, _NEEDS, None)
    return found


def access_of(request: web.Request) -> Access:
    """Who sent it, as the middleware found."""
    return request[ACCESS]


def authenticated(who: Door, observe: Observe) -> Middleware:
    """Lets nobody through to a handler whose access does not include what the handler needs."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        match = request.match_info
        if match.http_exception is not None:  # no such route: there is nothing to guard
            return await handler(request)
        try:
            request[ACCESS] = access = who.admit(request.headers.get("Authorization", ""))
            need = need_of(match.handler)
            if need is None:
                raise KVTierError(f"route {match.route.name or request.path} does not say what it needs")
            access.check(need)
        except Denied as error:
            observe(match.route.name or "other", error.kind, 0.0)
            raise
        return await handler(request)

    return check


def check_exposed(host: str, port: int, auth: AuthSettings, tls: TlsSettings, *, field: str) -> None:
    """Refuse an address that others reach unless it is said who may come, and how what they say is kept from others.

    Raises:
        Invalid: With what to set.
    """
    if auth.tokens_file and auth.anonymous:
        raise Invalid("auth.tokens_file and auth.anonymous exclude each other: either callers show a token, or nobody is asked")
    if is_loopback(host):
        return
    if not auth.tokens_file and not auth.anonymous:
        raise Invalid(
            f"{field} is '{host}:{port}'; without access tokens it listens on loopback only: use 127.0.0.1:{port}",
            remedy="set auth.tokens_file (`kvtier tokens create` makes it), or auth.anonymous = true to let in whoever reaches it",
        )
    if not tls.cert and not auth.plaintext:
        raise Invalid(
            f"{field} is '{host}:{port}', and without TLS tokens and KV could be read on the way",
            remedy="set tls.cert and tls.key, or auth.plaintext = true behind something that encrypts",
        )
