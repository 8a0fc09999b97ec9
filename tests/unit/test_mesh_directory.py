"""What a directory is made of, without a server: its URL, its entries, leases, and patience with who does not answer."""

import asyncio
import hashlib

import pytest

from kvstore.clock import VirtualClock
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid
from kvstore.mesh.entries import MOST_HOLDERS, Names, bucket_of, pack, unpack
from kvstore.mesh.lease import Lease
from kvstore.mesh.members import Member
from kvstore.mesh.patience import Patience, within


def key(n):
    return hashlib.sha256(str(n).encode()).digest()


class TestUrl:
    def test_what_it_says(self):
        assert DirectoryUrl.parse("valkey://10.0.0.5") == DirectoryUrl(host="10.0.0.5", port=6379)
        assert DirectoryUrl.parse("redis://cache:7000/3") == DirectoryUrl(host="cache", port=7000, db=3)
        secure = DirectoryUrl.parse("valkeys://[fd00::5]:6380?cluster=yes&ca_bundle=/etc/ca.pem")
        assert secure == DirectoryUrl(host="fd00::5", port=6380, tls=True, cluster=True, ca_bundle="/etc/ca.pem")
        assert DirectoryUrl.parse("rediss://cache").tls

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "http://cache",
            "valkey://",
            "valkey://cache:port",
            "valkey://cache:99999",
            "valkey://cache/x",
            "valkey://cache?retry=1",
            "valkey://cache?cluster=maybe",
            "valkey://cache/1?cluster=yes",
            "valkey://[::1",
        ],
    )
    def test_what_it_refuses(self, text):
        with pytest.raises(Invalid):
            DirectoryUrl.parse(text)

    @pytest.mark.parametrize("text", ["valkey://me:hunter2@cache", "valkey://:hunter2@cache", "valkeys://hunter2@cache:1/0"])
    def test_credentials_are_refused_and_not_repeated(self, text):
        with pytest.raises(Invalid) as refused:
            DirectoryUrl.parse(text)
        assert "hunter2" not in refused.value.message + refused.value.remedy
        assert "KVTIER_DIRECTORY_PASSWORD" in refused.value.remedy


class TestEntries:
    def test_a_damaged_entry_is_whatever_can_be_read(self):
        lives = [1, 2**40 - 1, 60_764_500_000]
        assert unpack(pack(lives)) == tuple(lives)
        assert unpack(pack(lives)[:-1]) == tuple(lives[:-1])
        assert unpack(b"") == ()
        assert len(unpack(b"x" * 4000)) == MOST_HOLDERS

    def test_meshes_share_no_key_and_no_mesh_reaches_into_another(self):
        one, other = Names("one"), Names("other")
        assert not set(one.membership) & set(other.membership)
        assert one.bucket(5) != other.bucket(5)
        for name in ("", "a:b", "a{b}", "a b", "x" * 65, "é"):
            with pytest.raises(Invalid):
                Names(name)

    def test_each_key_has_one_bucket(self):
        assert {bucket_of(bytes([high, low]) + bytes(30)) for high in range(256) for low in range(256)} == set(range(65536))


def renewal(life, *, replaced=0, newest=0, version=b"v", members=None):
    lines = None
    if members is not None:
        lines = [part for m in members for part in (m.node.encode(), f"{m.incarnation} 99 {m.port} {m.host}".encode())]
    return [life, replaced, newest or life, version, lines]


class TestLease:
    def lease(self, clock=None):
        return Lease(Names("m"), "a", "host-a", 1, 5.0, clock or VirtualClock())

    def test_the_first_answer_gives_a_life_and_the_next_request_asks_for_it_again(self):
        lease = self.lease()
        assert lease.me is None
        b = Member("b", 6, "host-b", 2)
        lease.renewed(renewal(7, members=[Member("a", 7, "host-a", 1), b]))
        assert lease.me == Member("a", 7, "host-a", 1)
        assert lease.view.others == (b,)
        assert lease.lives == 1
        assert b"v" in lease.request()
        assert 7 in lease.request()

    def test_no_news_changes_nothing(self):
        lease = self.lease()
        b = Member("b", 6, "host-b", 2)
        lease.renewed(renewal(7, members=[b]))
        lease.renewed(renewal(7))
        assert lease.view.others == (b,)
        assert lease.lives == 1

    def test_after_a_loss_of_the_directory_the_others_have_a_lease_of_time_to_come_back(self):
        clock = VirtualClock()
        lease = self.lease(clock)
        b = Member("b", 6, "host-b", 2)
        lease.renewed(renewal(7, members=[b]))
        lease.renewed(renewal(8, members=[]))
        assert lease.lives == 2
        assert lease.view.others == (b,)
        assert lease.over(7)
        clock.advance(5.1)
        lease.renewed(renewal(8, version=b"w", members=[]))
        assert lease.view.others == ()

    def test_a_life_is_over_only_if_it_is_gone_and_not_newer_than_what_was_heard(self):
        lease = self.lease()
        lease.renewed(renewal(7, newest=9, members=[Member("b", 6, "host-b", 2)]))
        assert [life for life in range(12) if lease.over(life)] == [0, 1, 2, 3, 4, 5, 8, 9]

    def test_one_member_cleans_each_bucket(self):
        every = [Member(name, 10 + i, "h", i + 1) for i, name in enumerate("abc")]
        turns = []
        for me in every:
            lease = Lease(Names("m"), me.node, me.host, me.port, 5.0, VirtualClock())
            lease.renewed(renewal(me.incarnation, members=every))
            living = lease.living(range(9))
            turns.append({bucket for bucket in range(9) if living[bucket]})
            assert set(living) == {b"", pack([10, 11, 12])}
        assert sorted(bucket for turn in turns for bucket in turn) == list(range(9))

    def test_nobody_but_the_newest_life_of_a_node_is_a_member(self):
        lease = self.lease()
        lease.renewed(renewal(7, replaced=1, members=[Member("a", 8, "elsewhere", 1)]))
        assert lease.replaced
        assert lease.view.others == ()
        assert lease.living([0]) == [b""]

    def test_lines_that_are_none_of_ours_are_left_out(self):
        lease = self.lease()
        lease.renewed([7, 0, 7, b"v", [b"b", b"", b"c", b"x y z", b"d", b"4 5 \xff h", b"e", b"4 5 6 host", b"f"]])
        assert lease.view.others == (Member("e", 4, "host", 6),)


class TestPatience:
    def test_who_is_silent_is_left_alone_for_longer_each_time_and_one_asks_for_all(self):
        clock = VirtualClock()
        patience = Patience(clock)
        pauses = []
        for _ in range(7):
            assert patience.ask()
            patience.silent()
            waited = 0.0
            while not patience.ask():
                clock.advance(0.25)
                waited += 0.25
            assert not patience.ask()  # another one is asking
            patience.silent()
            pauses.append(waited)
            clock.advance(100)
        assert pauses == sorted(pauses)
        assert pauses[0] == 1.0
        assert pauses[-1] == 15.0
        patience.answered()
        assert patience.ask()
        assert patience.ask()

    def test_many_who_were_waiting_together_count_as_one(self):
        clock = VirtualClock()
        patience = Patience(clock)
        for _ in range(50):
            patience.silent()
        clock.advance(1.0)
        assert patience.ask()

    def test_who_asks_and_never_says_how_it_ended_keeps_nobody_from_asking(self):
        clock = VirtualClock()
        patience = Patience(clock)
        patience.silent()
        clock.advance(1.0)
        assert patience.ask()
        clock.advance(1.0)
        assert patience.ask()


class TestWithin:
    async def test_an_outcome_in_time_is_the_outcome(self):
        async def well():
            return 5

        async def badly():
            raise OSError("no")

        assert await within(30, well()) == 5
        with pytest.raises(OSError, match="no"):
            await within(30, badly())

    async def test_what_does_not_come_is_cancelled_and_not_waited_for(self):
        over = asyncio.Event()

        async def stubborn():
            try:
                await asyncio.Event().wait()
            finally:
                await over.wait()

        with pytest.raises(TimeoutError):
            await within(0.01, stubborn())
        over.set()

    async def test_a_caller_that_is_cancelled_takes_it_along(self):
        ended = asyncio.Event()

        async def work():
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        caller = asyncio.create_task(within(60, work()))
        await asyncio.sleep(0.01)
        caller.cancel()
        await ended.wait()
