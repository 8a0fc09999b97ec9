"""The HTTP face over TLS: clients that trust it, that do not, that show a certificate or a token, or none; and renewal."""

import asyncio
import json
import ssl
from unittest.mock import AsyncMock, Mock

import pytest
from fakes.node import SHARD, fake_service, filler, links_of, namespace, payload_of
from typer.testing import CliRunner

import kvstore
from kvstore import api
from kvstore.access import Tokens, new_token
from kvstore.cli.commands import app
from kvstore.cli.running import run_node
from kvstore.clock import RandomIds
from kvstore.config import AuthSettings, TlsSettings, load
from kvstore.errors import Denied, Invalid, Unavailable
from kvstore.server import tls as tls_module
from kvstore.server.app import HttpServer

Authority = pytest.importorskip("fakes.certificates", reason="the package cryptography is not installed").Authority
NS = namespace()


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def pair(authority):
    return authority.issue("node", "127.0.0.1")


@pytest.fixture
async def service():
    async with fake_service() as service:
        yield service


def settings(pair, **more):
    return TlsSettings(cert=str(pair[0]), key=str(pair[1]), **more)


def storage_url(server, **keys):
    query = "&".join(f"{name}={value}" for name, value in {"tls": "true", **keys}.items())
    return f"{server.url.replace('https', 'kvtier')}?{query}"


async def test_blocks_and_calls_travel_over_tls(service, authority, pair):
    links = links_of(NS, 12)
    async with HttpServer.open(service, "127.0.0.1:0", tls=settings(pair)) as server:
        assert server.url.startswith("https://")
        async with kvstore.open(storage_url(server, ca_bundle=authority.ca)) as kv:
            assert await kv.put(NS, SHARD, links, filler(links)) == [True] * 12
            with await kv.get(NS, SHARD, links) as blocks:
                assert payload_of(NS, blocks.leases[11])[:32].hex() == links[11].prefix_id
        with pytest.raises(Unavailable) as caught:
            await kvstore.connect(storage_url(server))  # an authority that nobody knows
        assert (caught.value.kind, "ca_bundle" in caught.value.remedy) == ("untrusted_certificate", True)
        elsewhere = storage_url(server, ca_bundle=authority.ca).replace("127.0.0.1", "localhost")
        with pytest.raises(Unavailable) as caught:  # which the certificate does not name
            await kvstore.connect(elsewhere)
        assert caught.value.kind == "untrusted_certificate"
        with pytest.raises(Unavailable, match="does it speak TLS") as caught:
            await kvstore.connect(server.url.replace("https", "kvtier"))  # in plain
        assert all(name in caught.value.remedy for name in ("tls=true", "ca_bundle="))
    async with HttpServer.open(service, "127.0.0.1:0") as server:
        with pytest.raises(Unavailable, match="does it speak TLS") as caught:
            await kvstore.connect(storage_url(server, ca_bundle=authority.ca).replace("http://", "kvtier://"))
        assert "leave tls=true out" in caught.value.remedy


async def test_only_clients_with_a_certificate_are_let_in_where_it_is_asked_for(service, tmp_path, authority, pair):
    cert, key = authority.issue("client", "client.example")
    (tmp_path / "others").mkdir()
    stranger = Authority(tmp_path / "others", "stranger").issue("client", "client.example")
    mutual = settings(pair, client_ca=str(authority.ca))
    async with HttpServer.open(service, "127.0.0.1:0", tls=mutual) as server:
        trusted = {"ca_bundle": authority.ca}
        async with kvstore.open(storage_url(server, **trusted, client_cert=cert, client_key=key)) as kv:
            assert (await kv.stats()).node == service.node_id
        for wrong in ({}, {"client_cert": stranger[0], "client_key": stranger[1]}):
            with pytest.raises(Unavailable):
                await kvstore.connect(storage_url(server, **trusted, **wrong))
    assert [name for _, name, _ in service.calls if name == "stats"] == ["stats"]


async def test_a_renewed_certificate_is_shown_without_a_restart(service, authority, pair, monkeypatch):
    monkeypatch.setattr(tls_module, "_LOOK_S", 0.05)

    async def serial(server):
        port = int(server.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context(cafile=authority.ca))
        found = writer.get_extra_info("peercert")["serialNumber"]
        writer.close()
        await writer.wait_closed()
        return found

    async with HttpServer.open(service, "127.0.0.1:0", tls=settings(pair)) as server:
        before = await serial(server)
        pair[0].write_text("half a certificate")
        await asyncio.sleep(0.3)
        assert await serial(server) == before
        authority.issue("node", "127.0.0.1")
        async with asyncio.timeout(20):
            while await serial(server) == before:  # noqa: ASYNC110  it looks at the file now and then
                await asyncio.sleep(0.05)


async def test_a_certificate_that_is_none_is_named(service, tmp_path, authority, pair):
    (tmp_path / "junk").write_text("junk")
    for wrong, says in (
        (TlsSettings(cert=str(tmp_path / "nowhere"), key=str(pair[1])), "tls.cert"),
        (TlsSettings(cert=str(pair[0]), key=str(tmp_path / "junk")), "tls.key"),
        (TlsSettings(cert=str(pair[0]), key=str(authority.issue("other", "x")[1])), "tls.key"),
        (settings(pair, client_ca=str(tmp_path / "junk")), "tls.client_ca"),
    ):
        with pytest.raises(Invalid, match=says):
            async with HttpServer.open(service, "127.0.0.1:0", tls=wrong):
                pass
    for name in ("ca_bundle", "client_cert"):
        with pytest.raises(Invalid, match=name):
            await kvstore.connect(
                f"kvtier://127.0.0.1:1?tls=true&{name}={tmp_path}/junk&client_key={tmp_path}/junk&client_cert={tmp_path}/junk"
            )


async def test_a_client_says_what_to_do_about_its_token_and_never_says_it(service, tmp_path, monkeypatch):
    text, token_id, made = new_token(RandomIds(), "default", ("read",))
    file = tmp_path / "tokens.toml"
    file.write_text(Tokens({token_id: made}).text())
    async with HttpServer.open(service, "127.0.0.1:0", auth=AuthSettings(tokens_file=str(file))) as server:
        url = server.url.replace("http", "kvtier")
        monkeypatch.setenv("KVTIER_TOKEN", text)
        async with kvstore.open(url + "?tenant=default") as kv:
            assert not (await kv.stats()).whole
            for call, kind in ((kv.collect(), "denied"), (kv.pin("x"), "denied")):
                with pytest.raises(Denied) as caught:
                    await call
                assert caught.value.kind == kind
                assert "scope" in caught.value.remedy
            with pytest.raises(Denied):
                await kv.put(NS, SHARD, links_of(NS, 1), filler(links_of(NS, 1)))
            # Reading takes no more than that: whoever wrote made the namespace known.
            await service.call("default", "put_namespace", api.PutNamespace(namespace=NS.id, fields=NS))
            with await kv.get(NS, SHARD, links_of(NS, 1)) as blocks:
                assert blocks.miss == "absent"
            assert (await kv.lookup(namespace=NS, prefix_ids=[links_of(NS, 1)[0].prefix_id])).run == 0
        monkeypatch.setenv("KVTIER_TOKEN", text[:-1] + "x")
        with pytest.raises(Denied) as caught:
            await kvstore.connect(url)
        assert caught.value.kind == "unauthenticated"
        assert "KVTIER_TOKEN" in caught.value.remedy
        assert text[:-1] not in repr(caught.value) + str(caught.value.problem())
        monkeypatch.delenv("KVTIER_TOKEN")
        async with kvstore.open(url) as kv:  # it lives, which is nobody's secret
            with pytest.raises(Denied) as caught:
                await kv.stats()
        assert caught.value.kind == "unauthenticated"


async def test_what_stands_before_a_node_may_refuse_too(monkeypatch):
    async def gatekeeper(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 4\r\n\r\nnope")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(gatekeeper, "127.0.0.1", 0)
    async with server:
        with pytest.raises(Denied) as caught:
            await kvstore.connect(f"kvtier://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert "proxy" in caught.value.remedy


def kvtier(*arguments, code=0, **environment):
    done = CliRunner(env={"KVTIER_TOKEN": None, **environment}).invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return done


async def test_the_command_line_makes_shows_and_revokes_tokens(service, tmp_path):
    file = tmp_path / "tokens.toml"
    made = json.loads(kvtier("tokens", "create", "--file", file, "--scope", "admin", "--format", "json").stdout)
    plain = kvtier("tokens", "create", "--file", file, "--expires", "0").stdout.strip()
    assert plain.startswith("kvt_")
    text = file.read_text()
    assert made["token"].rpartition("_")[2] not in text
    assert file.stat().st_mode & 0o777 == 0o600
    listed = kvtier("tokens", "ls", "--file", file, "--format", "json")
    assert made["token"] not in listed.output
    shown = {each["id"]: each for each in map(json.loads, listed.stdout.splitlines())}
    assert (shown[made["id"]]["scopes"], shown[made["id"]]["expired"]) == (["admin"], False)
    assert shown[plain.split("_")[1]]["expires"] == ""
    async with HttpServer.open(service, "127.0.0.1:0", auth=AuthSettings(tokens_file=str(file))) as server:
        url = server.url.replace("http", "kvtier")

        async def stats(token, code):
            return await asyncio.to_thread(kvtier, "stats", "--url", url, code=code, KVTIER_TOKEN=token or None)

        assert "hits" in (await stats(made["token"], 0)).output
        mine = (await stats(plain, 0)).output
        assert ("your tenant alone" in mine, "store requests" in mine) == (True, False)
        assert "KVTIER_TOKEN" in (await stats("", 1)).stderr
        wrong = made["token"][:-1] + ("0" if made["token"][-1] != "0" else "1")
        assert wrong not in (await stats(wrong, 1)).output
    file.chmod(0o640)
    kvtier("tokens", "rm", made["id"], "--file", file)
    assert file.stat().st_mode & 0o777 == 0o640  # a node of another user still reads it
    for arguments, status in ((("rm", made["token"]), 3), (("create", "--scope", "root"), 2), (("create", "--tenant", ".."), 2)):
        assert made["token"] not in kvtier("tokens", *arguments, "--file", file, code=status).output
    assert Tokens.parse(file.read_text()).known.keys() == {plain.split("_")[1]}
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


async def test_a_node_says_that_its_file_of_tokens_was_emptied_and_goes_by_what_it_knew(tmp_path, monkeypatch):
    monkeypatch.setattr("kvstore.cli.running.gc", Mock())
    monkeypatch.setattr(
        "kvstore.server.keyring.Keyring.keep", AsyncMock(side_effect=OSError)
    )  # it is looked at when somebody asks, too
    text, token_id, made = new_token(RandomIds(), "default", ("admin",))
    file, ready = tmp_path / "tokens.toml", asyncio.get_running_loop().create_future()
    file.write_text(Tokens({token_id: made}).text())
    flags = {"node.listen": "127.0.0.1:0", "dram.size": "1MiB", "auth.tokens_file": str(file)}
    running = asyncio.create_task(run_node(load(flags=flags).settings, ready.set_result))
    url = (await ready).http
    file.write_text("")
    monkeypatch.setenv("KVTIER_TOKEN", f"kvt_{'0' * 16}_{'0' * 64}")
    with pytest.raises(Denied):  # of nobody: for it the file is looked at
        await kvstore.connect(url)
    monkeypatch.setenv("KVTIER_TOKEN", text)
    async with kvstore.open(url) as kv:
        stats = await kv.stats()
        assert (stats.whole, stats.restarts["tokens"] >= 1) == (True, True)
        degraded = (await kv.ready()).degraded
    assert "empty" in degraded["access"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def doctor(tmp_path, text):
    (tmp_path / "node.toml").write_text(text)
    lines = CliRunner().invoke(app, ["doctor", "--config", str(tmp_path / "node.toml"), "--format", "json"]).stdout.splitlines()
    found = {line["name"]: line for line in map(json.loads, lines)}
    return found["access"], found.get("tls")


def test_doctor_says_who_may_come_and_with_what(tmp_path, authority, pair):
    access, tls = doctor(tmp_path, "")
    assert (access["status"], "no tokens" in access["detail"], tls) == ("ok", True, None)
    access, _ = doctor(tmp_path, '[node]\nlisten = "0.0.0.0:7878"\n')
    assert (access["status"], "auth.tokens_file" in access["remedy"]) == ("fail", True)
    file = tmp_path / "tokens.toml"
    tokens = f'[auth]\ntokens_file = "{file}"\n'
    assert doctor(tmp_path, tokens)[0]["status"] == "fail"
    file.write_text("")  # by what was to write it, and failed
    access, _ = doctor(tmp_path, tokens)
    assert (access["status"], "kvtier tokens create" in access["remedy"]) == ("fail", True)
    file.write_text(Tokens({}).text())
    assert "nobody" in doctor(tmp_path, tokens)[0]["detail"]
    kvtier("tokens", "create", "--file", file, "--tenant", "acme")
    assert "acme" in doctor(tmp_path, tokens)[0]["detail"]
    served = f"{tokens}[tls]\ncert = '{pair[0]}'\nkey = '{pair[1]}'\n[tenants.acme]\n"
    access, tls = doctor(tmp_path, served)
    assert (access["status"], access["detail"][:7]) == ("ok", "1 valid")
    assert tls["status"] == "warn"  # a test's authority signs for a day
    pair[0].write_text("junk")
    access, tls = doctor(tmp_path, served)
    assert (access["status"], tls["status"]) == ("ok", "fail")
