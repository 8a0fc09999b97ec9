"""A directory in a Valkey or Redis: members by leases, and who has which block."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import Any, Final, Self

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.directory_url import DirectoryUrl
from kvstore.mesh.entries import LEAVE, SHORT, Command, Names, bucket_of, unpack
from kvstore.mesh.lease import Lease, Onlooker
from kvstore.mesh.members import Member
from kvstore.mesh.patience import Patience, within
from kvstore.mesh.server import Server

log = logging.getLogger(__name__)
_SLICE: Final = 512  # keys of one round trip
_BATCH: Final = 256  # entries written in one: a millisecond or two of the server's only thread
_WRITE_S: Final = 2.0
_WRONG: Final = 4096


class ValkeySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a node uses a directory.

    Attributes:
        mesh: Name of the mesh; several may share a server.
        lease_s: A member that says nothing for so long is none.
        renew_s: Pause between two signs of life.
        answer_s: How long a look-up waits for the server, whatever it does.
        write_s: Pause between two batches of news.
        queue: Entries waiting to be written; more are dropped, counted, and repaired later.
        connections: Look-ups at the server at once.
    """

    mesh: str = "default"
    lease_s: float = 5.0
    renew_s: float = 1.0
    answer_s: float = 0.25
    write_s: float = 0.05
    queue: int = 1 << 16
    connections: int = 4


class DirectoryStats(msgspec.Struct):
    """What happened since it was opened.

    Attributes:
        looks: Look-ups that the server was asked for.
        silences: Look-ups that it did not answer in time, or refused.
        spared: Look-ups that it was not asked for, because it had been silent.
        written: Entries written: added, dropped, or found to be wrong.
        overflows: Entries that did not fit the queue.
        failures: Batches whose outcome is unknown.
        repaired: Entries that were missing and were added, when this node's inventory was compared.
        taken: Entries that were wrong and were taken away by that.
        dead: Entries of lives that are over, taken away by that.
        last_error: What went wrong last.
    """

    looks: int = 0
    silences: int = 0
    spared: int = 0
    written: int = 0
    overflows: int = 0
    failures: int = 0
    repaired: int = 0
    taken: int = 0
    dead: int = 0
    last_error: str = ""


class ValkeyDirectory:
    """See :class:`kvstore.mesh.members.Directory`. It belongs to one event loop.

    Whoever opens it keeps `keep` and `tell` running. Until `keep` has reached the server, and whenever it has not lately, every
    look-up is answered at once with nothing.

    Attributes:
        stats: Counters.
    """

    def __init__(self, server: Server, names: Names, lease: Lease, settings: ValkeySettings, clock: Clock, ids: Ids) -> None:
        self.stats = DirectoryStats()
        self._server, self._names, self._lease = server, names, lease
        self._settings, self._clock, self._ids = settings, clock, ids
        self._readers = asyncio.Semaphore(settings.connections)
        self._reading, self._writing = Patience(clock), Patience(clock)
        self._writes = asyncio.Lock()  # two writes about one block must reach the server in their order
        self._reached = self._quick = self._tried = False
        self._since = clock.monotonic()
        self._losses = 0
        self._own: dict[bytes, bool] = {}  # the first bytes of a key, and whether this node has it: what was said last is true
        self._wrong: dict[tuple[bytes, int], None] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        url: DirectoryUrl,
        node: str,
        host: str,
        port: int,
        settings: ValkeySettings | None = None,
        *,
        clock: Clock,
        ids: Ids,
        environ: Mapping[str, str],
    ) -> AsyncIterator[Self]:
        """A directory for as long as the block lasts; at its end this node leaves. Nothing waits for the server to be there.

        Args:
            url: Where it is.
            node: This node's id; no other member may have it.
            host: Where others reach its peer listener.
            port: The same.
            settings: Bounds.
            clock: Time.
            ids: Spreads the signs of life.
            environ: Where the credentials are: KVTIER_DIRECTORY_USER and KVTIER_DIRECTORY_PASSWORD.

        Raises:
            Invalid: The mesh's name cannot be one.
        """
        settings = settings or ValkeySettings()
        names = Names(settings.mesh)
        server = Server(url, environ)
        lease = Lease(names, node, host, port, settings.lease_s, clock)
        async with cls._opened(server, names, lease, settings, clock, ids) as opened:
            yield opened

    @classmethod
    @asynccontextmanager
    async def observe(
        cls, url: DirectoryUrl, settings: ValkeySettings, *, clock: Clock, ids: Ids, environ: Mapping[str, str]
    ) -> AsyncIterator[Self]:
        """One of which this process is no member: it says nothing. Whoever opens it keeps `keep` running, and no more."""
        names = Names(settings.mesh)
        async with cls._opened(Server(url, environ), names, Onlooker(names, clock), settings, clock, ids) as opened:
            yield opened

    @classmethod
    @asynccontextmanager
    async def _opened(
        cls, server: Server, names: Names, lease: Lease, settings: ValkeySettings, clock: Clock, ids: Ids
    ) -> AsyncIterator[Self]:
        directory = cls(server, names, lease, settings, clock, ids)
        try:
            yield directory
        finally:
            await directory.leave()
            with suppress(Exception):
                await within(1.0, server.aclose())

    @property
    def me(self) -> Member | None:
        """This life of this node; None until the directory has been reached. One that lost its place goes on as another life."""
        return self._lease.me

    @property
    def ready(self) -> bool:
        """Whether entries can be written now."""
        return self._reached and self._lease.me is not None and not self._lease.replaced

    @property
    def lives(self) -> int:
        """Grows whenever this node becomes a member, or another life of it does: whoever knows what it has says so again."""
        return self._lease.lives

    @property
    def losses(self) -> int:
        """Grows whenever entries of this node may be missing or wrong: whoever knows what it has compares then."""
        return self._losses

    def reason(self) -> str:
        """What is wrong with it now, for people; "" where nothing is."""
        if self._lease.replaced:
            return "another process is a member under this node's id: give each node an id of its own"
        if self._reached:
            return "" if self._quick else "it answers too slowly to be asked"
        return f"no answer for {self._clock.monotonic() - self._since:.0f} s: {self.stats.last_error or 'not asked yet'}"

    # What everyone asks

    def members(self) -> Sequence[Member]:
        """The others, as last known, by name."""
        return self._lease.view.others

    async def locate(self, keys: Sequence[bytes]) -> list[tuple[Member, ...]]:
        """Others that are believed to hold each key; at most 12 of them. What the server has not said in time is ()."""
        return (await self.said(keys))[0]

    async def said(self, keys: Sequence[bytes]) -> tuple[list[tuple[Member, ...]], bool]:
        """As `locate`; and whether that is all that the server has."""
        found: list[tuple[Member, ...]] = [()] * len(keys)
        if not keys or not self._quick or not self._reading.ask():
            self.stats.spared += bool(keys)
            return found, not keys
        self.stats.looks += 1
        try:
            await within(self._settings.answer_s, self._look(keys, found))
        except Exception as error:  # noqa: BLE001  whatever it is, the directory has said nothing
            self.stats.silences += 1
            self._failed(error)
            self._reading.silent()
            return found.copy(), False  # what comes later, all the same, changes nothing that was answered
        self._reading.answered()
        return found, True

    async def _look(self, keys: Sequence[bytes], found: list[tuple[Member, ...]]) -> None:
        async with self._readers:
            for first in range(0, len(keys), _SLICE):
                values = await self._server.look([self._names.look(key) for key in keys[first : first + _SLICE]])
                for index, value in enumerate(values, first):
                    if value is not None:
                        found[index] = self._holders(keys[index], value)

    def _holders(self, key: bytes, value: bytes) -> tuple[Member, ...]:
        lives = self._lease.view.lives
        holders = []
        for life in unpack(value):
            if life in lives:
                holders.append(lives[life])
            elif self._lease.over(life):
                self._not_at(key, life)
        return tuple(holders)

    # What this node says

    def added(self, keys: Sequence[bytes]) -> None:
        """This node has these now."""
        self._say(keys, has=True)

    def dropped(self, keys: Sequence[bytes]) -> None:
        """This node has these no more."""
        self._say(keys, has=False)

    def wrong(self, member: Member, keys: Sequence[bytes]) -> None:
        """That member was asked for these, and has them not."""
        for key in keys:
            self._not_at(key, member.incarnation)

    def _say(self, keys: Iterable[bytes], *, has: bool) -> None:
        own, room = self._own, self._settings.queue
        for key in keys:
            short = key[:SHORT]
            if len(own) < room or short in own:
                own[short] = has
            else:
                self.stats.overflows += 1
                self._losses += 1

    def _not_at(self, key: bytes, life: int) -> None:
        if len(self._wrong) < _WRONG:  # whoever meets the same entry again says so again
            self._wrong[key[:SHORT], life] = None

    # In the background

    async def keep(self) -> None:
        """Keep this node's place among the members, and hear of the others. Never ends."""
        while True:
            begun = self._clock.monotonic()
            try:
                answer = await within(_WRITE_S, self._server.ask([self._lease.request()]))
                self._lease.renewed(answer[0])
            except Exception as error:  # noqa: BLE001  whatever it is, and be it no directory of ours
                self._failed(error)
                self._reach(reached=False)
            else:
                self._reach(reached=True)
            # A look-up would have waited as long as this did.
            self._quick = self._reached and self._clock.monotonic() - begun <= self._settings.answer_s
            await self._clock.sleep(self._settings.renew_s * (0.75 + self._ids.jitter() / 2))

    async def tell(self) -> None:
        """Write what was said. Never ends."""
        while True:
            await self._clock.sleep(self._settings.write_s)
            await self.flush()

    async def flush(self) -> None:
        """Write what has been said, in batches, unless the server is out of reach."""
        while (self._own or self._wrong) and self.ready and self._writing.ask():
            begun = self._clock.monotonic()
            async with self._writes:
                await self._write()
            if self._own:  # much to say: leave the server to others for three times as long as it took
                await self._clock.sleep(3 * (self._clock.monotonic() - begun))

    async def correct(self, buckets: Sequence[int], held: Callable[[int], Iterable[bytes]]) -> bool:
        """Make this node's entries in some buckets what it really has.

        Args:
            buckets: Of the numbers below 65,536.
            held: The first 8 bytes of each key that this node has in a bucket, when it is asked.

        Returns:
            Whether it was done.
        """
        if not buckets:
            return True
        if not self.ready or not self._writing.ask():
            return False
        async with self._writes:
            me, view = self._lease.me, self._lease.view
            assert me is not None
            commands = [
                self._names.correct(bucket, me.incarnation, held(bucket), view.newest, living)
                for bucket, living in zip(buckets, self._lease.living(buckets), strict=True)
            ]
            answers = await self._sent(commands)
        for added, taken, dead in answers or ():
            self.stats.repaired += added
            self.stats.taken += taken
            self.stats.dead += dead
        return answers is not None

    async def _write(self) -> None:
        me = self._lease.me
        assert me is not None
        own = dict(islice(self._own.items(), _BATCH))
        wrong = list(islice(self._wrong, _BATCH))
        for short in own:
            del self._own[short]
        for pair in wrong:
            del self._wrong[pair]
        said: dict[tuple[int, int], tuple[list[bytes], list[bytes]]] = {}
        for short, has in own.items():
            said.setdefault((bucket_of(short), me.incarnation), ([], []))[0 if has else 1].append(short)
        for short, life in wrong:
            said.setdefault((bucket_of(short), life), ([], []))[1].append(short)
        commands = [self._names.change(bucket, life, *changes) for (bucket, life), changes in said.items()]
        if await self._sent(commands) is not None:
            self.stats.written += len(own) + len(wrong)
            return
        self._losses += 1  # some of it may have been written, or may be yet
        for short, has in own.items():
            if short not in self._own:
                self._say([short], has=has)

    async def _sent(self, commands: Sequence[Command]) -> list[Any] | None:
        try:
            answers = await within(_WRITE_S, self._server.ask(commands))
        except Exception as error:  # noqa: BLE001  whatever it is, nobody knows what was written
            self.stats.failures += 1
            self._failed(error)
            self._writing.silent()
            return None
        self._writing.answered()
        return answers

    def _failed(self, error: Exception) -> None:
        self.stats.last_error = str(error)[:500] or type(error).__name__

    def _reach(self, *, reached: bool) -> None:
        if reached == self._reached and self._tried:
            return
        self._reached, self._tried, self._since = reached, True, self._clock.monotonic()
        if reached:
            log.info("the directory answers")
        else:
            log.warning("the directory does not answer: %s", self.stats.last_error)

    async def leave(self) -> None:
        """Say that this node is no member any more, once nobody keeps `keep` running. Who knows of it hears at the next renewal."""
        me, ready = self._lease.me, self.ready
        self._lease.me = None
        if ready and me is not None:
            command = LEAVE.call(self._names.membership, me.node, me.incarnation)
            with suppress(Exception):
                await within(self._settings.answer_s, self._server.ask([command]))
