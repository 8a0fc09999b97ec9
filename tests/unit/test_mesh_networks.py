"""Nodes speak to nobody outside of the networks that are theirs, whatever a directory says."""

import asyncio

import pytest

from kvstore.errors import Invalid
from kvstore.mesh.link import Links
from kvstore.mesh.members import Member
from kvstore.mesh.networks import trusting


@pytest.mark.parametrize(
    ("networks", "inside", "outside"),
    [
        ((), ["127.0.0.1", "::1", "::ffff:127.0.0.1"], ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%eth0"]),
        (("10.0.0.0/8",), ["10.1.2.3", "::ffff:10.1.2.3"], ["127.0.0.1", "11.0.0.1"]),
        (("10.0.0.0/8", "fd00::/8"), ["10.1.2.3", "fd00::1%eth0"], ["fe80::1"]),
    ],
)
def test_who_is_trusted(networks, inside, outside):
    trusted = trusting(networks)
    assert [trusted(host) for host in [*inside, *outside]] == [True] * len(inside) + [False] * len(outside)


async def test_a_member_elsewhere_than_in_the_configured_networks_is_told_nothing():
    asked = asyncio.Event()

    async def come(_, writer):
        asked.set()
        writer.close()

    async with await asyncio.start_server(come, "127.0.0.1", 0) as server:
        member = Member("b", 1, *server.sockets[0].getsockname()[:2])
        async with Links.open(networks=["10.0.0.0/8"]) as links:
            with pytest.raises(OSError, match="is in no network"):
                await links.holds(member, [bytes(32)])
            with pytest.raises(OSError, match=r"127\.0\.0\.1, the address of b, is in no network"):
                await links.to(member).holds([bytes(32)])
    with pytest.raises(Invalid, match=r"peers\.networks"):
        async with Links.open(networks=["10.0.0.0/40"]):
            pass
