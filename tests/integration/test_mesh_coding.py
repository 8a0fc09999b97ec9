"""What goes coded between nodes: as much as a slow line is worth."""

from fakes.mesh_pair import asking, idle, pair
from fakes.mesh_peers import block, mesh_node, wants_of
from fakes.node import until


async def test_a_slow_link_gets_coded_blocks():
    async with pair() as (a, b):
        wants, more = wants_of(8), wants_of(8, first=3)
        a.put(wants + more)
        b.peers._supplier(a.member).speed = 10e6
        a.peering._lending._worth.coding.value = 500e6
        got, _ = await b.read(wants)
        assert got == [block(each) for each in wants]
        coded = a.peering.counts["coded"]
        assert coded  # and some not, once the link is measured
        b.peers._supplier(a.member).speed = 2e9
        got, _ = await b.read(more)
        assert got == [block(each) for each in more]
        assert a.peering.counts["coded"] == coded
        await until(lambda: idle(a, b))


async def test_until_it_is_known_what_coding_takes_one_block_of_a_request_is_coded():
    async with mesh_node("a") as a:
        wants = wants_of(5)
        a.put(wants)
        sock = asking(a, wants, speed=10_000_000)
        await until(lambda: a.peering.counts["raw"] + a.peering.counts["coded"] == 5)
        assert a.peering.counts["coded"] == 1
        sock.close()
