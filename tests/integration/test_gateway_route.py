"""`kvtier route`, asked of a gateway: a table, what it takes, and how it ends where no engine is there."""

import asyncio
import sys

import msgspec
import pytest

from kvstore.cli.route import _ask
from kvstore.config import TlsSettings
from kvstore.errors import Unavailable
from kvstore.gateway.routes import RouteAsked
from tests.integration.gateway_fleet import open_fleet

Authority = pytest.importorskip("fakes.certificates", reason="the package cryptography is not installed").Authority


@pytest.fixture
async def fleet():
    async with open_fleet() as fleet:
        yield fleet


async def route(url, said):
    code = "from kvstore.cli.main import main; main()"
    pipe = asyncio.subprocess.PIPE
    command = (sys.executable, "-c", code, "route", "-", f"--gateway={url}")
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe, env={"COLUMNS": "200"})
    out, err = await process.communicate(msgspec.json.encode(said))
    return process.returncode, out.decode(), err.decode()


@pytest.mark.parametrize("said", [list(range(300)), {"token_ids": list(range(300))}])
async def test_a_table_tells_what_was_predicted(fleet, said):
    status, out, err = await route(fleet.gateway.url, said)
    heads, *rows = [line.split() for line in out.splitlines()]
    assert (status, err) == (0, "")
    assert " ".join(heads) == "engine price ms queue load compute imbalance gpu dram nvme peer bucket computed"
    assert sorted((row[0], row[-1]) for row in rows) == [("a", "300"), ("b", "300")]
    assert all(float(row[1]) == pytest.approx(float(row[2]) + float(row[6]), abs=0.2) for row in rows)


async def test_what_is_no_prompt_is_said(fleet):
    status, _, err = await route(fleet.gateway.url, {"token_ids": "no"})
    assert status == 2
    assert err.startswith("error: ")


async def test_without_an_engine_it_ends_as_other_commands_do(fleet):
    for engine in fleet.engines.values():
        engine.well, engine.fault = False, "503"
    await fleet.ask()
    status, out, err = await route(fleet.gateway.url, [1, 2, 3])
    assert (status, out) == (4, "")
    assert err.startswith("error: no engine takes requests: ")
    assert "GET /v1/engines" in err


async def test_the_wrong_of_http_and_https_is_told(tmp_path):
    pair = Authority(tmp_path).issue("gateway", "127.0.0.1")
    tls = TlsSettings(cert=str(pair[0]), key=str(pair[1]))
    for gateway, scheme, says in (
        ({}, "https", ["write http://"]),
        ({"tls": tls}, "http", ["write https://", "SSL_CERT_FILE"]),
        ({"tls": tls}, "https", ["certificate is not trusted", "SSL_CERT_FILE"]),
    ):
        async with open_fleet(names="a", gateway=gateway) as fleet:
            url = f"{scheme}://{fleet.gateway.url.partition('://')[2]}"
            with pytest.raises(Unavailable) as caught:
                await asyncio.to_thread(_ask, url, RouteAsked(token_ids=[1]))
        assert all(word in f"{caught.value.message} {caught.value.remedy}" for word in says), caught.value


async def test_nobody_there_is_told_in_words():
    status, _, err = await route("http://127.0.0.1:1", [1])
    assert status == 4
    assert err.startswith("error: no gateway answers at http://127.0.0.1:1: Connection refused")
