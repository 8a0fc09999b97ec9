"""Whom a node asks for a block, in what order, and when it stops waiting. Links are scripted; no sockets."""

import asyncio
from contextlib import AsyncExitStack

import msgspec
import pytest
from fakes.mesh_peers import NS, Counted, Told, block, wants_of
from fakes.node import until

from kvstore.clock import VirtualClock
from kvstore.mesh import frames
from kvstore.mesh.coding import Worth
from kvstore.mesh.exchange import Carried
from kvstore.mesh.members import Member, owner
from kvstore.mesh.peers import Peers
from kvstore.mesh.supplier import PeerSettings
from tiering import DramTier, Lease, Miss, Movers, Stack, StackSettings

A, B, C = (Member(name, 1, "127.0.0.1", port) for port, name in enumerate("abc", 1))


class Line:
    """A link that answers by `say(want, through)`: bytes, or a miss; or fails, or never answers."""

    def __init__(self, say=block):
        self.say, self.batches, self.fails, self.hangs = say, [], "", False
        self.flow = (0, 0.0)

    async def carry(self, batch, *, through, speed):
        self.batches.append(([each.want.key for each in batch], through, speed))
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        if self.fails:
            return Carried(0, 0.0, self.fails)
        for delivery in batch:
            if not delivery.begin(lambda: None):
                continue
            said = self.say(delivery.want)
            if not isinstance(said, Miss):
                delivery.into[:] = said
            delivery.end(said if isinstance(said, Miss) else None)
        return Carried(*self.flow)

    async def holds(self, keys):
        return [False] * len(keys)


class Lines(dict):
    def to(self, member):
        return self[member]

    def keep(self, members):
        self.kept = list(members)


def absent(want):
    return Miss.ABSENT


class Case:
    def __init__(self, peers, directory, lines):
        self.peers, self.directory, self.lines = peers, directory, lines

    async def fetch(self, want, tell=None):
        place = bytearray(want.size)
        miss = await self.peers.fetch(want, memoryview(place), tell)
        return bytes(place) if miss is None else miss


@pytest.fixture
async def case():
    directory, lines = Told(), Lines({member: Line() for member in (A, B, C)})
    directory.others = dict.fromkeys(lines)
    settings = PeerSettings(patience_s=0.05, through_s=0.05, unmeasured=1e9)
    async with Peers.open("me", directory, lines, VirtualClock(), settings) as peers:
        yield Case(peers, directory, lines)


def owned_by(node, count=1):
    return [each for each in wants_of(60) if owner(each.key, ["me", "a", "b", "c"]) == node][:count]


async def test_one_tick_is_one_question_and_one_request_for_each_lane(case):
    wants = wants_of(10)
    case.directory.places = {each.key: (A,) for each in wants}
    got = await asyncio.gather(*(case.fetch(each) for each in wants))
    assert got == [block(each) for each in wants]
    assert case.directory.asked == 1
    assert [keys for keys, _, _ in case.lines[A].batches] == [[each.key for each in part] for part in (wants[:5], wants[5:])]


async def test_the_next_holder_is_asked_where_one_has_not_what_is_said_of_it(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A, B)
    for member in (A, B):
        case.lines[member].say = lambda want, member=member: Miss.ABSENT if member == case.first else block(want)
    case.first = A if owner(want.key, ["a", "b"]) == "a" else B
    assert await case.fetch(want) == block(want)
    assert case.directory.wrongs == [(case.first.node, want.key)]
    assert case.peers.asked_of == {node: {"absent" if node == case.first.node else "hits": 1} for node in ("a", "b")}


async def test_a_corrupt_block_is_another_sources_and_told_of(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A,)
    for line in case.lines.values():
        line.say = lambda want: Miss.CORRUPT
    told = []
    assert await case.fetch(want, told.append) is Miss.CORRUPT
    assert ("a", want.key) in case.directory.wrongs
    assert case.peers.counts["corrupt"] >= 1
    assert set(told) <= {0}


async def test_the_sooner_holder_is_asked_first(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A, B, C)
    for member, speed in ((A, 1e6), (B, 9e9), (C, 1e7)):
        case.peers._supplier(member).speed = speed
    await case.fetch(want)
    assert [len(case.lines[member].batches) for member in (A, B, C)] == [0, 1, 0]


async def test_load_counts_as_much_as_speed(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A, B)
    case.peers._supplier(A).speed, case.peers._supplier(B).speed = 2e9, 1e9
    case.peers._supplier(A).load = 100 << 20
    await case.fetch(want)
    assert [len(case.lines[member].batches) for member in (A, B)] == [0, 1]


async def test_who_has_too_much_to_send_is_not_asked_for_more(case):
    (want,) = owned_by("me")
    case.directory.places[want.key] = (A,)
    case.peers._supplier(A).load = 1 << 30
    assert await case.fetch(want) is Miss.UNAVAILABLE
    case.peers._supplier(A).load, case.peers._supplier(A).speed = 60_000_000, 10_000_000.0
    assert await case.fetch(want) is Miss.UNAVAILABLE
    assert case.lines[A].batches == []


async def test_a_block_that_nobody_has_is_asked_of_its_owner_through_to_the_bucket(case):
    (want,) = owned_by("b")
    assert await case.fetch(want) == block(want)
    assert case.lines[B].batches == [([want.key], True, 0)]


async def test_what_is_mine_is_asked_of_nobody(case):
    (want,) = owned_by("me")
    assert await case.fetch(want) is Miss.ABSENT
    assert case.peers.owns(want.key)
    assert all(line.batches == [] for line in case.lines.values())


async def test_a_holder_that_proves_wrong_leaves_the_block_to_its_owner(case):
    (want,) = owned_by("c")
    case.directory.places[want.key] = (A,)
    case.lines[A].say = absent
    assert await case.fetch(want) == block(want)
    assert case.lines[C].batches == [([want.key], True, 0)]


async def test_a_holder_that_does_not_answer_is_not_waited_for(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A,)
    case.lines[A].hangs = True
    assert await case.fetch(want) is Miss.TIMEOUT
    assert (case.peers.counts["hedged"], case.peers.asked_of) == (1, {"a": {"timeout": 1}})
    (other,) = wants_of(1, first=1)
    case.directory.places[other.key] = (A,)
    await case.fetch(other)
    assert len(case.lines[A].batches) == 1  # it is left alone for a while


async def test_who_was_left_alone_is_tried_again(case):
    wants = wants_of(6)
    case.directory.places = {each.key: (A,) for each in wants}
    case.directory.others = {A: None}
    case.lines[A].fails = "refused"
    assert await case.fetch(wants[0]) in {Miss.UNAVAILABLE, Miss.ABSENT}
    case.lines[A].fails = ""
    assert isinstance(await case.fetch(wants[1]), Miss)
    await case.peers._clock.sleep(1.1)
    got = await asyncio.gather(*(case.fetch(each) for each in wants[2:]))
    assert got == [block(each) for each in wants[2:]]


async def test_a_directory_that_fails_has_said_nothing(case):
    async def locate(keys):
        raise OSError("no route")

    case.directory.locate = locate
    (mine,), (another,) = owned_by("me"), owned_by("a")
    assert await case.fetch(mine) is Miss.ABSENT
    assert await case.fetch(another) == block(another)


async def test_nothing_is_asked_where_nobody_is(case):
    case.directory.others = {}
    assert not case.peers.ready()
    assert await case.fetch(wants_of(1)[0]) is Miss.ABSENT


async def test_contains_is_what_the_directory_says(case):
    wants = wants_of(4)
    case.directory.places = {each.key: (A,) for each in (wants[0], wants[1], wants[3])}
    assert await case.peers.contains(wants) == 2


async def test_a_speed_is_what_was_measured_and_tells_the_peer(case):
    wants = wants_of(2)
    case.directory.places = {each.key: (A,) for each in wants}
    case.lines[A].flow = (8 << 20, 0.5)
    await case.fetch(wants[0])
    assert case.peers.speed(A) == pytest.approx(16 << 20)
    await case.fetch(wants[1])
    assert case.lines[A].batches[1][2] == 16 << 20


async def test_on_a_slow_link_a_request_is_for_what_comes_in_a_tenth_of_a_second(case):
    wants = wants_of(8)
    case.directory.places = {each.key: (A,) for each in wants}
    supplier = case.peers._supplier(A)
    supplier.speed = wants[0].size * 20  # two in a tenth of a second
    await asyncio.gather(*(case.fetch(each) for each in wants))
    assert [len(keys) for keys, _, _ in case.lines[A].batches] == [2, 2, 2, 2]


async def test_blocks_of_another_shard_are_another_request(case):
    other = msgspec.structs.replace(NS, revision="2")
    wants = [*wants_of(2), *wants_of(2, ns=other)]
    case.directory.places = {each.key: (A,) for each in wants}
    got = await asyncio.gather(*(case.fetch(each) for each in wants))
    assert got == [block(each) for each in wants]
    assert [len(keys) for keys, _, _ in case.lines[A].batches] == [2, 2]


async def test_what_was_cut_for_anothers_sake_is_asked_for_again(case):
    wants = wants_of(2)
    case.directory.places = {each.key: (A,) for each in wants}
    once = []

    async def carry(batch, *, through, speed):
        if not once:
            once.append(batch)
            return Carried(0, 0.0)  # cut before anything began
        return await Line().carry(batch, through=through, speed=speed)

    case.lines[A].carry = carry
    assert await case.fetch(wants[0]) == block(wants[0])


async def test_who_leaves_is_forgotten(case):
    (want,) = wants_of(1)
    case.directory.places[want.key] = (A,)
    case.lines[A].hangs = True
    fetching = asyncio.create_task(case.fetch(want))
    await until(lambda: case.lines[A].batches)
    case.directory.others = {B: None}
    watching = asyncio.create_task(case.peers.watch())
    assert isinstance(await fetching, Miss)
    assert A not in case.peers._suppliers
    assert case.lines.kept == [B]
    watching.cancel()


# --- what comes from a peer makes way first ---


async def _stack(life, origin, lenders):
    movers = await life.enter_async_context(Movers.open())
    size = wants_of(1)[0].size
    dram = await life.enter_async_context(DramTier.open("dram", 4 * size, movers))
    return await life.enter_async_context(Stack.open(dram, None, [origin], StackSettings(lenders=frozenset(lenders))))


async def _read(stack, wants):
    for lease in await stack.get_many(wants):
        assert isinstance(lease, Lease)
        lease.release()


@pytest.mark.parametrize("again", [False, True])
async def test_what_a_peer_lent_makes_way_until_it_is_used_again(again):
    origin = Counted()
    origin.name = "peer"
    async with AsyncExitStack() as life:
        stack = await _stack(life, origin, {"peer"})
        own, lent, new = wants_of(2), wants_of(2, first=1), wants_of(1, first=2)
        for each in own:
            slot = stack.reserve(each)
            slot.view[:] = block(each)
            stack.publish(slot).release()
        await _read(stack, lent)
        if again:
            await _read(stack, lent)
        slot = stack.reserve(new[0])
        slot.view[:] = block(new[0])
        slot.commit().release()
        here = stack.dram.contains_many([each.key for each in (*own, *lent)])
        assert here.count(False) == 1
        if again:
            assert here[2:] == [True, True] or here[:2] != [True, True]
        else:
            assert here[:2] == [True, True]
            assert not all(here[2:])


async def test_a_lender_is_offered_nothing():
    origin, offered = Counted(), []
    origin.name = "peer"

    async def offer(want, value):
        offered.append(want.key)
        return True

    origin.offer = offer
    async with AsyncExitStack() as life:
        stack = await _stack(life, origin, {"peer"})
        slot = stack.reserve(wants_of(1)[0])
        slot.view[:] = block(wants_of(1)[0])
        stack.publish(slot).release()
        assert stack.queued == {}
    assert offered == []


# --- words ---


@pytest.mark.parametrize("miss", list(Miss))
def test_a_miss_is_spelled_and_read(miss):
    data = frames.missed(3, miss)
    assert frames.parse_frame(data[: frames.FRAME_BYTES]) == frames.Frame(3, 0, False, miss)
    assert data[frames.FRAME_BYTES :] == frames.LINE_END


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4 << 30])
def test_an_object_is_announced_and_read(nbytes, coded):
    assert frames.parse_frame(frames.found(511, nbytes, coded=coded)) == frames.Frame(511, nbytes, coded, None)


def test_a_chunk_is_http():
    data = frames.found(0, 5, coded=False) + b"12345" + frames.LINE_END + frames.LAST
    line, rest = data.split(b"\r\n", 1)
    size = int(line, 16)
    assert rest[size:] == b"\r\n0\r\n\r\n"


def test_coding_pays_on_slow_links_only():
    worth = Worth(VirtualClock())
    assert not worth.pays(0)
    assert worth.pays(12.5e6)
    assert not worth.pays(2e9)
    worth.coding.value = 5e6  # this machine is busy
    assert not worth.pays(12.5e6)


def test_what_does_not_shrink_is_not_coded():
    worth = Worth(VirtualClock())
    for _ in range(20):
        worth.coded(100, 100)
    assert not worth.pays(12.5e6)
