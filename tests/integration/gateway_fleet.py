"""Engines, a gateway before them and a client: what tests of the gateway have in common."""

from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from kvstore.gateway.app import Gateway
from kvstore.gateway.engines import EngineSettings
from kvstore.gateway.proxy import Bounds
from kvstore.gateway.settings import GatewaySettings
from tests.integration.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"


class Fleet:
    """Engines, a gateway and a client."""

    def __init__(self, engines, gateway, client):
        self.engines, self.gateway, self.client = engines, gateway, client

    async def ask(self, text="hello", *, path=CHAT, headers=None, **fields):
        """Status, headers and body of one answer."""
        body = {"model": "m", **({"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}), **fields}
        async with self.client.post(self.gateway.url + path, json=body, headers=headers, allow_redirects=False) as answer:
            return answer.status, answer.headers, await answer.read()

    async def by(self, text="hello", **fields):
        """Which engine answered."""
        _, headers, _ = await self.ask(text, **fields)
        return headers["X-KVTier-Engine"]

    async def states(self):
        """What the gateway says of its engines."""
        async with self.client.get(f"{self.gateway.url}/v1/engines") as answer:
            return await answer.json()


@asynccontextmanager
async def open_fleet(*, engine=None, gateway=None, bounds=None, host="127.0.0.1", names="ab"):
    """Engines by `names`; the other arguments are settings of each, of the gateway, its bounds, and what they call this machine."""
    async with AsyncExitStack() as lifetime:
        engines = {name: await lifetime.enter_async_context(FakeEngine(name).running()) for name in names}
        table = {name: EngineSettings(url=one.url.replace("127.0.0.1", host), **(engine or {})) for name, one in engines.items()}
        limits = Bounds(**{"first_s": 20, "idle_s": 5, **(bounds or {})})
        opening = Gateway.open(GatewaySettings(engines=table, listen="127.0.0.1:0", bounds=limits, **(gateway or {})))
        running = await lifetime.enter_async_context(opening)
        client = await lifetime.enter_async_context(aiohttp.ClientSession())
        yield Fleet(engines, running, client)
