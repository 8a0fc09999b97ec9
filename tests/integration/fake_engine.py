"""An OpenAI-compatible server as far as a gateway sees one, which misbehaves on demand."""

import asyncio
import json
from contextlib import asynccontextmanager

from aiohttp import web


class FakeEngine:
    """`fault` is what happens to the next requests: "", "503", "refuse", "before", "middle", "hang"."""

    def __init__(self, name):
        self.name, self.fault, self.seen, self.url, self.release = name, "", [], "", asyncio.Event()
        self.release.set()

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
        await self.release.wait()
        if not json.loads(body).get("stream"):
            if self.fault:
                request.transport.abort()
            return web.json_response({"by": self.name, "usage": {"prompt_tokens": 3}})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.fault == "before":
            request.transport.abort()
            return response
        for word in ("one", "two"):
            await response.write(b'data: {"word": "%s"}\n\n' % word.encode())
            if self.fault == "middle":
                await asyncio.sleep(0.05)  # what was written gets there
                request.transport.abort()
                return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    async def tokenize(self, request):
        asked = await request.json()
        text = asked.get("prompt") or "".join(message["content"] for message in asked["messages"])
        return web.json_response({"tokens": list(text.encode()), "count": len(text)})

    async def health(self, _):
        return web.Response()

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
