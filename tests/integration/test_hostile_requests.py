"""Requests that no client of ours would send: each is refused by name, and costs nobody else anything."""

import json
import tracemalloc

import aiohttp
import pytest
from fakes.service import NS, links, node
from yarl import URL

from kvstore import api, wire
from kvstore.errors import Corrupt
from kvstore.model import BlockRef, Manifest
from kvstore.objects import MemoryStore
from kvstore.server.app import HttpServer
from kvstore.service.staging import Plan, Resolved

SHARD = "t0of1.p0of1.g0"
BLOCK = f"/v1/blocks/{NS.id}/{SHARD}/{links(1)[0].prefix_id}"
HUGE = "1" + "0" * 400
FRAMES = {
    "nested": b"\x94\xa3Ask\x01\xa6health" + b"\x91" * 200_000,
    "wide": b"\x94\xa3Ask\x01\xa6health" + b"\xdc\xff\xff" * 5000,
    "not text": b"\x94\xa3Ask\x01\xa2\xff\xfe\x80",
}


@pytest.fixture
async def http():
    """`await http(method, path, body)`: status and problem of a whole node."""
    async with (
        node(MemoryStore()) as service,
        HttpServer.open(service, "127.0.0.1:0") as server,
        aiohttp.ClientSession() as session,
    ):

        async def send(method, path, body=None):
            url = URL(server.url + path, encoded=True)
            headers = {} if body is None else {"Content-Type": "application/json"}
            async with session.request(method, url, data=body, headers=headers) as response:
                return response.status, json.loads(await response.read() or b"{}")

        yield send


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/sessions/s/restore", f'{{"version":{HUGE}}}'),
        ("POST", "/v1/sessions/s/restore", f'{{"deadline_ms":{HUGE}}}'),
        ("POST", "/v1/sessions/s/restore", f'{{"max_bytes":{HUGE}}}'),
        ("POST", "/v1/sessions/s/restore", f'{{"tokens":[{HUGE}]}}'),
        ("POST", "/v1/sessions/s/restore", json.dumps({"shards": [SHARD] * 2})),
        ("POST", "/v1/sessions/s/restore", json.dumps({"shards": [f"t0of1.p{stage}of4096.g0" for stage in range(4096)] + [SHARD]})),
        ("POST", "/v1/lookup", f'{{"namespace":"{NS.id}","prefix_ids":[],"deadline_ms":{HUGE}}}'),
        ("POST", "/v1/lookup", f'{{"namespace":"{NS.id}","prefix_ids":[],"shards":[]}}'),
        ("GET", "/v1/sessions?cursor=" + "1" * 4400, None),
        ("GET", "/v1/sessions?cursor=00.x", None),
        ("GET", "/v1/sessions?limit=" + HUGE, None),
        ("GET", f"{BLOCK}?tokens=16&deadline_ms={HUGE}", None),
        ("GET", f"{BLOCK}?tokens=16&deadline_ms=-1", None),
        ("GET", f"{BLOCK}?tokens={HUGE}", None),
    ],
)
async def test_numbers_and_lists_of_any_size_are_refused(http, method, path, body):
    status, problem = await http(method, path, body)
    assert (status, problem["kind"]) == (400, "invalid")


@pytest.mark.parametrize("body", [b'{"a":[' + b"[]," * 2_000_000 + b"[]]}", b'{"prefix_ids":[' + b"[]," * 2_000_000 + b"[]]}"])
async def test_a_body_costs_no_more_memory_than_its_text(http, body):
    tracemalloc.start()
    try:
        status, problem = await http("POST", "/v1/lookup", body)
        assert (status, problem["kind"]) == (400, "invalid")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(body)
    finally:
        tracemalloc.stop()


async def test_a_look_up_is_bounded_by_blocks_times_shards(http):
    shards = [f"t{rank}of16.p0of1.g0" for rank in range(16)]
    asked = {"namespace": NS.id, "prefix_ids": ["0" * 64] * 40_000, "shards": shards}
    status, problem = await http("POST", "/v1/lookup", json.dumps(asked))
    assert (status, problem["kind"]) == (400, "invalid")
    status, found = await http("POST", "/v1/lookup", json.dumps(asked | {"shards": shards[:2], "reach": "dram"}))
    assert (status, found) == (200, {"run": 0, "tiers": []})


@pytest.mark.parametrize("body", FRAMES.values(), ids=FRAMES)
def test_a_frame_that_cannot_be_parsed_is_corrupt(body):
    for parse in (wire.parse_to_node, wire.parse_to_client):
        with pytest.raises(Corrupt):
            parse(body)


def test_a_restore_of_very_many_shards_goes_in_small_steps():
    blocks = tuple(BlockRef(link.prefix_id, link.tokens, ()) for link in links(3))
    manifest = Manifest(namespace=NS.id, shards=(SHARD,), block_tokens=16, tokens=48, blocks=blocks)
    session = api.Session(id="s", namespace=NS.id, lane="main", version=1, tokens=48, blocks=3)
    found = Resolved(session=session, manifest=manifest, namespace=NS)
    ranks = [f"t{rank}of4096.p0of1.g0" for rank in range(4096)]
    assert [len(step.wants) for step in Plan(found, shards=ranks).steps()] == [4096] * 3
    assert [len(step.wants) for step in Plan(found, shards=ranks[:16]).steps()] == [48]
