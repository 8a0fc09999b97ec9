"""Who asks, by the tokens of a file that is read again when it changes; or everybody, where there is none."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Final, Protocol

from kvstore.access import MAX_FILE, NOBODY, WHOLE, Access, Token, Tokens, bearer, everything, id_of
from kvstore.clock import Clock
from kvstore.config import AuthSettings
from kvstore.errors import Invalid
from kvstore.service.latest import Latest

log = logging.getLogger(__name__)
TENANT: Final = "default"  # of everybody, where there are no tokens
_LOOK_S: Final = 1.0  # between two looks at the file, for tokens that it had
_PATIENCE_S: Final = 5.0  # with a file that does not answer; reading one of thousands of tokens takes a slow machine a few seconds
_BACK: Final = "put the file back: a new one revokes every token that is not in it"
_Seen = tuple[int, int, int, int]


class Door(Protocol):
    """Tells who asks."""

    @property
    def wrong(self) -> str:
        """What keeps it from going by what it was last told; "" where nothing does."""
        ...

    async def admit(self, header: str) -> Access:
        """Who sent this `Authorization` header; `NOBODY` without one. Raises `Denied` for one that is not valid."""
        ...

    def ending(self, access: Access, end: asyncio.Timeout) -> AbstractContextManager[None]:
        """While the block runs, `end` comes when what `access` was admitted by expires or is taken back."""
        ...

    async def keep(self) -> None:
        """Learn of changes. Runs until cancelled, or returns where there are none."""
        ...


class Open:
    """Everybody may everything, for the tenant `default`."""

    wrong = ""

    async def admit(self, header: str) -> Access:  # noqa: ARG002  nobody is asked
        """See `Door`."""
        return everything(TENANT)

    def ending(self, access: Access, end: asyncio.Timeout) -> AbstractContextManager[None]:  # noqa: ARG002  nothing is taken back
        """See `Door`."""
        return nullcontext()

    async def keep(self) -> None:
        """See `Door`."""


class Keyring:
    """The tokens of a file. One that was changed into something unreadable, or emptied, changes nothing: the last good one stays.

    It is read on a thread: one of thousands of tokens takes most of a second, in which others are to be answered.

    Args:
        path: Of the file.
        clock: Tokens expire by its `now`.

    Attributes:
        tokens: As last read.
        look: Has them be as the file is now.
        wrong: Why the file as it is now is not what is in force; "" where it is.

    Raises:
        Invalid: There is no such file, anybody may write to it, or it is not a file of tokens.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        self._path, self._clock = Path(path).expanduser(), clock
        self._lost = f"{_BACK}; where there was none: kvtier tokens create --file {self._path}"
        self._seen: _Seen | None = self._signature()
        self.tokens, self.wrong = self._tokens(self._read()), ""
        self._lost = _BACK
        self.look = Latest(self._look)
        self._under_way: dict[asyncio.Timeout, tuple[str, Token]] = {}

    async def admit(self, header: str) -> Access:
        """See `Door`."""
        text = bearer(header)
        if not text:
            return NOBODY
        token_id = id_of(text)
        if token_id and token_id not in self.tokens.known:  # one that was just made works at once
            with suppress(TimeoutError):  # then what was read before says whose it is
                async with asyncio.timeout(_PATIENCE_S):
                    await self.look()
        return self.tokens.of(text, self._clock.now())

    @contextmanager
    def ending(self, access: Access, end: asyncio.Timeout) -> Iterator[None]:
        """See `Door`."""
        held = self.tokens.known.get(access.token)
        if held is not None:
            self._under_way[end] = access.token, held
        try:
            yield
        finally:
            self._under_way.pop(end, None)

    async def keep(self) -> None:
        """See `Door`."""
        while True:
            await asyncio.wait([self.look.run()], timeout=_LOOK_S)  # a file that does not answer keeps no token from expiring
            self._end()
            await self._clock.sleep(_LOOK_S)

    def _end(self) -> None:
        """End what is under way for tokens that are valid no more."""
        now, at = self._clock.now(), asyncio.get_running_loop().time()
        for end, (token_id, held) in self._under_way.items():
            if not self.tokens.holds(token_id, held, now) and not end.expired():
                end.reschedule(at)

    async def _look(self) -> None:
        try:
            seen, self._seen = self._seen, None  # what cannot be read is tried again, though it be the same then
            now = await asyncio.to_thread(self._signature)
            data = await asyncio.to_thread(self._read) if now != seen else None
            self._seen = now  # also where it is no good: it is not tried again before it changes
            if data is None:
                return
            self.tokens, self.wrong = await asyncio.to_thread(self._tokens, data), ""
            log.info("%s was read again: %d tokens", self._path, len(self.tokens.known))
            self._end()
        except Exception as error:  # noqa: BLE001  whatever it is, what is in force is not what the file says now
            found = error if isinstance(error, Invalid) else Invalid(f"auth.tokens_file {self._path}: {type(error).__name__}")
            why = f"{found.message}; the tokens read before stay valid"
            if why != self.wrong:  # said once, not for every request
                log.warning("%s (%s)", why, found.remedy)
            self.wrong = why

    def _signature(self) -> _Seen:
        try:
            found = self._path.stat()
        except OSError as error:
            raise Invalid(f"auth.tokens_file {self._path}: {error.strerror}", remedy=self._lost) from None
        return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns  # the last: its mode, and a time that was put back

    def _read(self) -> bytes:
        name = f"auth.tokens_file {self._path}"
        try:
            with open(self._path, "rb", opener=_unblocked) as file:
                mode = os.fstat(file.fileno()).st_mode
                if not stat.S_ISREG(mode):
                    raise Invalid(f"{name} is no file")
                if mode & stat.S_IWOTH:
                    raise Invalid(f"{name} may be written by anybody", remedy=f"chmod o-w {self._path}")
                return file.read(MAX_FILE + 1)
        except OSError as error:
            raise Invalid(f"{name}: {error.strerror}") from None

    def _tokens(self, data: bytes) -> Tokens:
        name = f"auth.tokens_file {self._path}"
        if len(data) > MAX_FILE:
            raise Invalid(f"{name} is longer than {MAX_FILE} bytes")
        try:
            return Tokens.parse(data.decode(), name)
        except UnicodeDecodeError:
            raise Invalid(f"{name} is not UTF-8", remedy=WHOLE) from None
        except Invalid as error:
            raise Invalid(error.message, remedy=WHOLE) from None


def _unblocked(path: str, flags: int) -> int:
    """Opens at once, a pipe that nobody writes to included: a thread would wait for a writer for ever."""
    return os.open(path, flags | os.O_NONBLOCK)


def door(auth: AuthSettings, clock: Clock) -> Door:
    """What a face asks. Raises `Invalid` as `Keyring`."""
    return Keyring(auth.tokens_file, clock) if auth.tokens_file else Open()
