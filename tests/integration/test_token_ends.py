"""What a node or gateway is still answering when the token that was let in expires or is revoked."""

import asyncio
import json
from datetime import UTC, datetime

import aiohttp
import pytest
from fakes.clock import HandClock
from fakes.node import SHARD, fake_service, filler, links_of, namespace, until
from yarl import URL

import kvstore
from kvstore import api
from kvstore.access import SCOPES, Tokens, new_token
from kvstore.clock import RandomIds
from kvstore.config import AuthSettings
from kvstore.server.app import HttpServer
from kvstore.server.metrics import Metrics
from tests.integration.gateway_fleet import CHAT, open_fleet

NS = namespace()
LINK = links_of(NS, 1)[0]
BLOCK = f"/v1/blocks/{NS.id}/{SHARD}/{LINK.prefix_id}?tokens=16"
NOBODY = {"Authorization": f"Bearer kvt_{'0' * 16}_{'0' * 64}"}  # whose token is not known: for it the file is looked at


class Counts(Metrics):
    """What was told of requests."""

    def __init__(self):
        super().__init__()
        self.told = []

    def observe(self, op, outcome, seconds):
        self.told.append((op, outcome))
        super().observe(op, outcome, seconds)


class Guarded:
    """A node that asks for one token, `text`, and what the clock says meanwhile."""

    def __init__(self, service, url, http, file, clock, text, made, counts):
        self.service, self.url, self.http, self.file, self.clock = service, url, http, file, clock
        self.text, self.made, self.counts, self.restore_id = text, made, counts, ""

    def get(self, path, **how):
        return self.http.get(URL(self.url + path, encoded=True), **how)

    async def expire(self):
        await self.clock.advance(self.made.expires.timestamp() - self.clock.now() + 1)

    async def revoke(self):
        await until(lambda: self.clock.sleepers)
        self.file.write_text(Tokens({}).text())
        await self.clock.advance(1)


@pytest.fixture
async def guarded(tmp_path, monkeypatch):
    clock, file, counts = HandClock(), tmp_path / "tokens.toml", Counts()
    text, token_id, made = new_token(RandomIds(), "default", SCOPES, datetime.fromtimestamp(clock.now() + 5, UTC))
    file.write_text(Tokens({token_id: made}).text())
    monkeypatch.setenv("KVTIER_TOKEN", text)
    async with (
        fake_service() as service,
        HttpServer.open(service, "127.0.0.1:0", metrics=counts, auth=AuthSettings(tokens_file=str(file)), clock=clock) as server,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {text}"}) as http,
    ):
        async with kvstore.open(server.url.replace("http", "kvtier")) as kv:
            await kv.put(NS, SHARD, [LINK], filler([LINK]))
        found = Guarded(service, server.url, http, file, clock, text, made, counts)
        found.restore_id = (await service.restore("default", api.Restore(id="s"))).restore_id
        yield found


@pytest.mark.parametrize("how", ["expire", "revoke"])
async def test_a_stream_of_events_ends_with_its_token(guarded, how):
    async with guarded.get(f"/v1/restores/{guarded.restore_id}/events") as answer:
        assert (await answer.content.readuntil(b"\n\n")).startswith(b"event: resolving")
        await getattr(guarded, how)()
        with pytest.raises(aiohttp.ClientError):  # it broke off: this is no end of the restore
            await asyncio.wait_for(answer.content.read(), 20)
    assert [each for each in guarded.counts.told if each[1] != "ok"] == [("restore_events", "unauthenticated")]


@pytest.mark.parametrize("how", ["expire", "revoke"])
@pytest.mark.parametrize(("path", "op"), [(BLOCK, "get"), ("/v1/restores/{}?wait_ms=60000", "get_restore")])
async def test_a_read_that_waits_is_refused_when_its_token_ends(guarded, path, op, how):
    guarded.service.plane.gate = asyncio.Event()
    waiting = asyncio.create_task(guarded.get(path.format(guarded.restore_id)).__aenter__())
    await until(lambda: guarded.service.plane.waiting or guarded.service.calls[-1][1] == "get_restore")
    await getattr(guarded, how)()
    async with asyncio.timeout(20):
        answer = await waiting
        problem = await answer.json()
    assert (answer.status, problem["kind"]) == (401, "unauthenticated")
    assert guarded.text not in str(problem)
    assert not guarded.service.plane.waiting
    assert [each for each in guarded.counts.told if each[1] != "ok"] == [(op, "unauthenticated")]  # once


async def test_a_change_is_finished_though_its_token_ends(guarded):
    begun, finish = asyncio.Event(), asyncio.Event()

    async def commit(tenant, request):
        begun.set()
        await finish.wait()
        return api.Done()

    guarded.service.answers["commit"] = commit
    body = {"base_version": 0, "blocks": []}
    asking = asyncio.create_task(guarded.http.post(f"{guarded.url}/v1/sessions/s/commit", json=body).__aenter__())
    await begun.wait()
    reading = asyncio.create_task(guarded.get(f"/v1/restores/{guarded.restore_id}?wait_ms=60000").__aenter__())
    await until(lambda: guarded.service.calls[-1][1] == "get_restore")
    await guarded.expire()
    assert (await reading).status == 401  # so what was to end has ended
    finish.set()
    assert (await asking).status == 200


async def test_a_block_that_is_being_put_is_taken_though_its_token_ends(guarded):
    link, finish, memory = links_of(NS, 2)[1], asyncio.Event(), guarded.service.plane.tiers["default"]
    size, before = await guarded.service.plane.payload_bytes("default", NS.id, SHARD, 16), memory.used

    async def payload():
        yield bytes(size // 2)
        await finish.wait()
        yield bytes(size - size // 2)

    path = BLOCK.replace(LINK.prefix_id, link.prefix_id)
    putting = asyncio.create_task(guarded.http.put(URL(guarded.url + path, encoded=True), data=payload()).__aenter__())
    await until(lambda: memory.used > before)  # there is room for it
    reading = asyncio.create_task(guarded.get(f"/v1/restores/{guarded.restore_id}?wait_ms=60000").__aenter__())
    await until(lambda: guarded.service.calls[-1][1] == "get_restore")
    await guarded.expire()
    assert (await reading).status == 401  # so what was to end has ended
    finish.set()
    answer = await putting
    assert (answer.status, await answer.json()) == (200, {"taken": True})


async def test_a_token_that_stays_valid_ends_nothing(guarded):
    other = new_token(RandomIds(), "default", SCOPES)
    async with guarded.get(f"/v1/restores/{guarded.restore_id}/events") as answer:
        await answer.content.readuntil(b"\n\n")
        token_id = guarded.text.split("_")[1]
        guarded.file.write_text(Tokens({token_id: guarded.made, other[1]: other[2]}).text())
        async with guarded.get("/v1/stats", headers={"Authorization": f"Bearer {other[0]}"}) as there:
            assert there.status == 200  # so the file was read
        await guarded.service.advance(guarded.restore_id, state="ready", version=1)
        assert b"event: ready" in await answer.content.read()


async def test_a_gateway_gives_an_answer_that_was_begun_to_its_end(tmp_path):
    text, token_id, made = new_token(RandomIds(), "acme", ("write",))
    file = tmp_path / "tokens.toml"
    file.write_text(Tokens({token_id: made}).text())
    async with open_fleet(names="a", gateway={"auth": AuthSettings(tokens_file=str(file))}) as fleet:
        fleet.engines["a"].between.clear()
        body, url = json.dumps({"model": "m", "messages": [], "stream": True}), fleet.gateway.url + CHAT
        mine = {"Authorization": f"Bearer {text}"}
        async with fleet.client.post(url, data=body, headers=mine) as answer:
            await answer.content.readuntil(b"\n\n")
            file.write_text(Tokens({}).text())
            for header in (NOBODY, mine):
                async with fleet.client.post(url, data=body, headers=header) as refused:
                    assert refused.status == 401
            fleet.engines["a"].between.set()
            assert (await answer.content.read()).endswith(b"data: [DONE]\n\n")
