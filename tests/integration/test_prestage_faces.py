"""Priorities, budgets and hints through a real node's faces."""

import json
from contextlib import asynccontextmanager

import aiohttp
import pytest
from fakes.node import SHARD, filler, links_of, namespace

import kvstore
from kvstore.clock import RandomIds
from kvstore.config import Bytes, DramSettings, Settings, StoreSettings
from kvstore.errors import Unsupported
from kvstore.node import Node
from kvstore.server.app import HttpServer
from kvstore.server.limits import Limits
from kvstore.server.local import LocalServer

NS = namespace()


@asynccontextmanager
async def faces(tmp_path):
    """The URLs of a node with an empty memory, on a store that holds the session `agent` of 12 blocks."""
    store = f"memory://{RandomIds().new()}"
    async with kvstore.open(f"{store}?dram=16MiB") as kv:
        links = links_of(NS, 12)
        await kv.put(NS, SHARD, links, filler(links))
        await kv.commit("agent", namespace=NS, base_version=0, blocks=links, durability="bucket")
        settings = Settings(store=StoreSettings(url=store), dram=DramSettings(size=Bytes(16 << 20)))
        async with Node.open(settings) as node:
            path = str(tmp_path / "node.sock")
            async with (
                LocalServer.open(node.service, path, limits=Limits(window=4 << 20, drain=5)),
                HttpServer.open(node.service, "127.0.0.1:0") as http,
            ):
                yield {"unix": f"kvtier+unix://{path}", "http": http.url.replace("http", "kvtier"), "page": http.url}


@pytest.mark.parametrize("face", ["unix", "http"])
async def test_a_client_restores_by_priority_within_a_budget_and_gives_hints(tmp_path, face):
    async with faces(tmp_path) as urls, kvstore.open(urls[face]) as kv:
        whole = await kv.wait(await kv.restore("agent", tier="bucket"))
        half = await kv.wait(await kv.restore("agent", priority="speculative", max_bytes=whole.bytes // 2, hold_ms=60_000))
        assert (half.state, half.priority, half.staged_bytes) == ("partial", "speculative", whole.bytes // 2)
        assert (await kv.stats()).held_bytes == half.staged_bytes
        hinted = await kv.hint("agent", event="tool_return")
        assert (await kv.wait(hinted.restore_id)).state == "ready"
        assert (await kv.hint("agent", event="resume_at", in_s=3600.0)).taken
        assert (await kv.hint("agent", event="final")).taken
        stats = await kv.stats()
        assert stats.hints == {"tool_return": 1, "resume_at": 1, "final": 1, "scheduled": 0}
        assert stats.restored == {"interactive ready": 2, "speculative partial": 1}
        with pytest.raises(Unsupported, match="device"):
            await kv.restore("agent", tier="device")


async def test_events_and_metrics_tell_of_a_speculative_restore(tmp_path):
    async with faces(tmp_path) as urls, aiohttp.ClientSession(urls["page"]) as http:
        wanted = {"priority": "speculative", "deadline_ms": 30_000}
        async with http.post("/v1/sessions/agent/restore", json=wanted) as response:
            assert response.status == 202
            begun = await response.json()
        async with http.get(f"/v1/restores/{begun['restore_id']}/events") as response:
            told = [json.loads(line[6:]) async for line in response.content if line.startswith(b"data: ")]
        assert (told[-1]["state"], told[-1]["priority"], told[-1]["late_ms"]) == ("ready", "speculative", 0.0)
        async with http.post("/v1/sessions/agent/hint", json={"event": "tool_start"}) as response:
            assert (response.status, (await response.json())["taken"]) == (202, True)
        async with http.get("/metrics") as response:
            page = await response.text()
        assert 'kvtier_restores_total{outcome="ready",priority="speculative"} 1.0' in page
        assert 'kvtier_restore_lateness_seconds_bucket{le="0.0001",priority="speculative"} 1.0' in page
        assert 'kvtier_restore_lateness_seconds_count{priority="speculative"} 1.0' in page
        assert 'kvtier_hints_total{event="tool_start"} 1.0' in page
        assert "kvtier_hints_scheduled 0.0" in page
        assert "agent" not in page
