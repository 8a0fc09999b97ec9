"""An OpenAI-compatible server as far as a gateway sees one, which misbehaves on demand."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web


class FakeEngine:
    """`fault` is what happens to the next requests: "503", "400", "refuse", "before", "middle", "redirect", "huge head", "flood".

    `headers` go with answers, `tokens` is what `/tokenize` answers, `well` what `/health` says. Requests wait for `release`,
    streams midway for `between`.
    """

    def __init__(self, name):
        self.name, self.fault, self.seen, self.url, self.release = name, "", [], "", asyncio.Event()
        self.between, self.headers, self.tokens, self.well = asyncio.Event(), {}, None, True
        self.release.set()
        self.between.set()

    async def complete(self, request):
        body = await request.read()
        self.seen.append((request.path, body, dict(request.headers)))
        if self.fault == "503":
            return web.Response(status=503)
        if self.fault == "refuse":
            request.transport.abort()
            return web.Response()
        if self.fault == "400":
            return web.json_response({"error": {"message": "no such model"}}, status=400)
        if self.fault == "redirect":
            raise web.HTTPTemporaryRedirect(f"{self.url}/elsewhere")
        if self.fault == "huge head":
            return web.Response(headers={"X-Long": "x" * 20_000})
        await self.release.wait()
        if self.fault == "flood":
            return await self.flood(request)
        if not json.loads(body).get("stream"):
            if self.fault:
                request.transport.abort()
            return web.json_response({"by": self.name, "usage": {"prompt_tokens": 3}}, headers=self.headers)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fault == "before":
            request.transport.abort()
            return response
        for word in ("one", "two"):
            await response.write(b'data: {"word": "%s"}\n\n' % word.encode())
            await self.between.wait()
            if self.fault == "middle":
                await asyncio.sleep(0.05)  # what was written gets there
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def flood(self, request):
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(400):
            await response.write(b"x" * (64 << 10))
        return response

    async def elsewhere(self, request):
        self.seen.append((request.path, await request.read(), dict(request.headers)))
        return web.json_response({"by": self.name})

    async def tokenize(self, request):
        if self.tokens is not None:
            return web.Response(body=self.tokens, content_type="application/json")
        asked = await request.json()
        text = asked.get("prompt") or "".join(message["content"] for message in asked["messages"])
        return web.json_response({"tokens": list(text.encode()), "count": len(text)})

    async def health(self, _):
        return web.Response(status=200 if self.well else 503)

    async def models(self, _):
        return web.json_response({"data": [{"id": "m"}]})

    @asynccontextmanager
    async def running(self, port=0):
        app = web.Application(client_max_size=1 << 30)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self.complete),
                web.post("/v1/completions", self.complete),
                web.post("/tokenize", self.tokenize),
                web.post("/elsewhere", self.elsewhere),
                web.get("/health", self.health),
                web.get("/v1/models", self.models),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self.release.set()
            await runner.cleanup()
