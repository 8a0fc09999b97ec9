"""I4, for everybody who uses the client: it says which session a commit was built on, without being asked."""

import pytest
from fakes.kv import publish
from fakes.service import ME, NS, links, node

from kvstore import api
from kvstore.client import Client
from kvstore.errors import Gone
from kvstore.objects import MemoryStore


class Direct:
    """A transport without a wire; see `kvstore.client.transport.Transport`."""

    def __init__(self, service):
        self.service, self.sent = service, []

    async def call(self, name, request):
        self.sent.append(request)
        return await self.service.call(ME, name, request)


@pytest.fixture
async def service():
    async with node(MemoryStore()) as service:
        assert all(await publish(service, ME, NS, links(4)))
        yield service


def client(service):
    return Client(Direct(service))


async def commit(kv, base, blocks, **fields):
    return await kv.commit("s", namespace=NS.id, base_version=base, blocks=links(blocks), durability="bucket", **fields)


async def seen_by(kv, how):
    """Version 1, as a client comes to know it."""
    match how:
        case "get":
            await kv.get_session("s", namespace=NS.id)
        case "manifest":
            await kv.manifest("s", namespace=NS.id)
        case "restore":
            await kv.wait(await kv.restore("s", namespace=NS.id))
        case "list":
            assert [one.id async for one in kv.sessions()] == ["s"]


@pytest.mark.parametrize("how", ["get", "manifest", "restore", "list", "commit"])
async def test_i4_a_client_is_told_that_its_session_is_gone_whatever_the_id_means_now(service, how):
    writer, other = client(service), client(service)
    mine = await commit(writer if how == "commit" else other, 0, 1)
    await seen_by(writer, how)
    await other.delete_session("s", namespace=NS.id)
    later = await commit(other, 0, 1)
    assert later.branch != mine.branch
    with pytest.raises(Gone):
        await commit(writer, 1, 2)
    assert (await other.get_session("s", namespace=NS.id)).version == 1
    assert (await commit(other, 1, 2)).version == 2


async def test_a_client_that_was_told_of_the_later_session_continues_that_one(service):
    writer, other = client(service), client(service)
    await commit(writer, 0, 1)
    await other.delete_session("s", namespace=NS.id)
    await commit(other, 0, 1)
    await writer.get_session("s", namespace=NS.id)
    assert (await commit(writer, 1, 2)).version == 2


async def test_parallel_chains_of_one_id_keep_apart(service):
    """Each has a lane of its own, which the client need not name."""
    kv = client(service)
    assert all(await publish(service, ME, NS, links(2, first=7)))
    for base in (0, 1):
        for first in (0, 7):
            receipt = await kv.commit(
                "s", namespace=NS.id, base_version=base, blocks=links(base + 1, first=first), durability="bucket"
            )
            assert receipt.version == base + 1
    assert len({request.branch for request in kv._transport.sent if isinstance(request, api.Commit)} - {""}) == 2


async def test_what_the_caller_says_goes(service):
    kv = client(service)
    await commit(kv, 0, 1)
    with pytest.raises(Gone):
        await commit(kv, 1, 2, branch="0" * 32)
    assert (await commit(kv, 1, 2, branch="")).version == 2
