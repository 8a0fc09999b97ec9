"""One peer over TCP: how bytes come from it. What is asked of whom is decided elsewhere (`peers`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Final, Protocol, Self, TypeVar

from kvstore.mesh import frames
from kvstore.mesh.connections import Connections, LinkSettings
from kvstore.mesh.delivery import Delivery
from kvstore.mesh.exchange import Blocks, Carried, Dead, Exchange, Question, run
from kvstore.mesh.members import Member
from kvstore.mesh.networks import trusting
from kvstore.mesh.tls import PeerTls

T = TypeVar("T")
_HOLDS_S: Final = 0.25


class Link(Protocol):
    """How bytes come from one peer. TCP's is :class:`TcpLink`."""

    async def carry(self, batch: Sequence[Delivery], *, through: bool, speed: int) -> Carried:
        """Ask for blocks of one shard of one namespace, and fill their places as they come.

        What was begun has ended when this returns. What was not, because the exchange failed or was cut, is as it was.
        Whoever is cancelled cuts it. Raises nothing else.

        Args:
            batch: At most `frames.MOST_BLOCKS`.
            through: See :class:`kvstore.mesh.frames.Ask`, as `speed`.
            speed: Bytes a second.
        """
        ...

    async def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of these the peer has in its tiers.

        Raises:
            OSError: It is out of reach, or does not say so in time (`TimeoutError`).
            Malformed: What it says is no answer.
        """
        ...


class Links:
    """Links to the members of a mesh, and the threads that they share."""

    def __init__(self, settings: LinkSettings, trusted: Callable[[str], bool], tls: PeerTls | None) -> None:
        self.settings, self.trusted, self.tls = settings, trusted, tls
        self.threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer")
        # Who waits for a bucket must not keep others from what is there; questions are short, and must not wait for blocks.
        self.waiters = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer-through")
        self.askers = ThreadPoolExecutor(settings.threads, thread_name_prefix="kvtier-peer-ask")
        self._links: dict[Member, TcpLink] = {}

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: LinkSettings | None = None, *, networks: Sequence[str] = (), tls: PeerTls | None = None
    ) -> AsyncIterator[Self]:
        """For the length of the block. Whoever uses them has left by its end.

        Args:
            settings: Bounds.
            networks: Where members may be, whatever a directory says; none: on this host.
            tls: What members have to show, and are shown; without, connections are plain.

        Raises:
            Invalid: No such network.
        """
        links = cls(settings or LinkSettings(), trusting(networks), tls)
        try:
            yield links
        finally:
            links.keep(())
            for pool in (links.threads, links.waiters, links.askers):
                await asyncio.to_thread(pool.shutdown)

    def to(self, member: Member) -> TcpLink:
        """The link to a member."""
        link = self._links.get(member)
        if link is None:
            link = self._links[member] = TcpLink(member, self)
        return link

    def keep(self, members: Sequence[Member]) -> None:
        """Forget all others."""
        for member in self._links.keys() - set(members):
            self._links.pop(member).close()

    async def holds(self, member: Member, keys: Sequence[bytes]) -> list[bool]:
        """See :meth:`Link.holds`."""
        return await self.to(member).holds(keys)


class TcpLink:
    """See :class:`Link`."""

    def __init__(self, member: Member, links: Links) -> None:
        self._links = links
        self._connections = Connections(member, links.settings, links.trusted, links.tls)

    async def carry(self, batch: Sequence[Delivery], *, through: bool, speed: int) -> Carried:
        """See :meth:`Link.carry`."""
        exchange = Blocks(self._connections, batch, through=through, speed=speed)
        for delivery in batch:
            delivery.left = exchange.left
        try:
            return await self._exchanged(self._links.waiters if through else self._links.threads, exchange)
        except OSError as error:  # no connection could be made
            return Carried(0, 0.0, f"{type(error).__name__}: {error}")

    async def holds(self, keys: Sequence[bytes]) -> list[bool]:
        """See :meth:`Link.holds`."""
        answers: list[bool] = []
        for at in range(0, len(keys), frames.MOST_KEYS):
            part = keys[at : at + frames.MOST_KEYS]
            question = Question(self._connections, part)
            async with asyncio.timeout(_HOLDS_S):
                said = await self._exchanged(self._links.askers, question)
            answers += said
        return answers

    def close(self) -> None:
        """Let go of idle connections, and keep none from now on."""
        self._connections.close()

    async def _exchanged(self, threads: ThreadPoolExecutor, exchange: Exchange[T]) -> T:
        """On a kept connection; where there is none, or it turns out dead, a new one. Raises `OSError` where none can be made."""
        kept = self._connections.take()
        if kept is not None:
            try:
                return await run(threads, partial(exchange.run, kept, kept=True), exchange.cut)
            except Dead:
                pass
        fresh = await self._connections.dialled()  # here: a peer that is not there must hold no thread
        return await run(threads, partial(exchange.run, fresh), exchange.cut)
