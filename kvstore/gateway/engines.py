"""The engines behind a gateway: which of them may be sent a request now."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from kvstore.client.credential import Credential
from kvstore.errors import Invalid, NotFound, Overloaded, Unavailable
from kvstore.gateway.failing import told

log = logging.getLogger(__name__)
CHECK_S: Final = 1.0
LOOK: Final = "retry with back-off; GET /v1/engines of the gateway says which engines are up"
_CHECK_WAIT_S: Final = 2.0
_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")  # it is in paths, headers and metrics
_DOWN_AFTER: Final = 2  # checks that fail in a row; a request that cannot connect says so at once


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engines.<name>]`.

    Attributes:
        url: Where its OpenAI-compatible server listens, without `/v1`.
        node: Storage URL of the kvtier node beside it (`kvtier://host:7878`); "" where there is none.
        ranks: Its tensor-parallel size.
        events: Where it publishes KV events (`tcp://host:5557`); "" where it does not.
        replay: Where it sends again what was missed of them.
        topic: Of its events.
        requests: Most requests that it is sent at a time; others wait for other engines, or are refused.
        key_file: File with the API key that it wants, if any: sent instead of what clients send, and read again when it changes.
    """

    url: str
    node: str = ""
    ranks: int = 1
    events: str = ""
    replay: str = ""
    topic: str = ""
    requests: int = 256
    key_file: str = ""


class Engine:
    """One engine, as it is now.

    Attributes:
        name: Its name.
        settings: What was said of it.
        url: Its base.
        up: Whether it answered lately.
        draining: Whether it is to get no more requests.
        running: Requests that it works on for us.
        sent: Requests that it was sent.
        failed: Those that it failed before its first byte.
        key: What it is shown.
    """

    def __init__(self, name: str, settings: EngineSettings) -> None:
        if not _NAME.fullmatch(name):
            raise Invalid(f"an engine's name is {name!r}; it may have letters, digits and ._-, 64 at most")
        parts = urlsplit(settings.url)
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
            raise Invalid(f"engines.{name}.url is {settings.url!r}; write it like http://127.0.0.1:8000")
        if settings.requests < 1 or settings.ranks < 1:
            raise Invalid(f"engines.{name}.requests and .ranks must be at least 1")
        self.name, self.settings = name, settings
        self.url = settings.url.rstrip("/").removesuffix("/v1")
        self.key = Credential(file=settings.key_file)
        self.up, self.draining = False, False
        self.running = self.sent = self.failed = 0
        self._missed = 0

    def __str__(self) -> str:
        return f"{self.name} ({self.url})"

    @property
    def ready(self) -> bool:
        """Whether it may be sent a request."""
        return self.up and not self.draining and self.running < self.settings.requests

    @contextmanager
    def working(self) -> Iterator[None]:
        """While it has a request of ours."""
        self.running += 1
        self.sent += 1
        try:
            yield
        finally:
            self.running -= 1

    def down(self, why: str) -> None:
        """It failed as a server, not as an engine."""
        self.failed += 1
        if self.up:
            log.warning("engine %s is down: %s", self, why)
        self.up, self._missed = False, _DOWN_AFTER

    def checked(self, why: str) -> None:
        """What a look at its health said; "" where all is well."""
        if not why:
            if not self.up:
                log.info("engine %s is up", self)
            self.up, self._missed = True, 0
            return
        self._missed += 1
        if self._missed >= _DOWN_AFTER:
            if self.up:
                log.warning("engine %s is down: %s", self, why)
            self.up = False


class Engines:
    """All of them.

    Args:
        settings: By name.
        session: For looks at their health.
    """

    def __init__(self, settings: Mapping[str, EngineSettings], session: aiohttp.ClientSession) -> None:
        if not settings:
            raise Invalid("a gateway needs engines: --engine a=http://127.0.0.1:8000, or [engines.a] url = ... in gateway.toml")
        self.all = {name: Engine(name, each) for name, each in settings.items()}
        self._session = session

    def get(self, name: str) -> Engine:
        """One of them. Raises `NotFound`."""
        found = self.all.get(name)
        if found is None:
            raise NotFound(f"no engine {name!r}; there are {', '.join(self.all)}")
        return found

    @property
    def ready(self) -> list[Engine]:
        """Those that may be sent a request."""
        return [engine for engine in self.all.values() if engine.ready]

    def refusal(self) -> Overloaded | Unavailable:
        """Why none may be sent a request: those that could are full, or there are none. Where they are is not told to everybody."""
        if any(engine.up and not engine.draining for engine in self.all.values()):
            return Overloaded("every engine that is up has as many requests as it may have", remedy=LOOK)
        states = ", ".join(f"{engine.name} is {'drained' if engine.up else 'down'}" for engine in self.all.values())
        return Unavailable(f"no engine takes requests: {states}", remedy=LOOK)

    async def look(self) -> None:
        """One look at all of them."""
        await asyncio.gather(*map(self._look, self.all.values()))

    async def watch(self) -> None:
        """Keep looking. Runs until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(CHECK_S)

    async def _look(self, engine: Engine) -> None:
        try:
            wait = aiohttp.ClientTimeout(total=_CHECK_WAIT_S)
            async with self._session.get(f"{engine.url}/health", allow_redirects=False, timeout=wait) as answer:
                engine.checked("" if answer.status == 200 else f"/health answers {answer.status}")
        except (aiohttp.ClientError, TimeoutError) as error:
            engine.checked(told(error))
