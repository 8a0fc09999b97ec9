"""A node's part in a mesh, put together: who else is there, what they have, and how it comes here."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final, Self

from kvstore.api import MeshStats
from kvstore.clock import Clock, Ids
from kvstore.config import PeersSettings, parse_address, static_peers
from kvstore.directory_url import DirectoryUrl
from kvstore.errors import Invalid, Unsupported
from kvstore.mesh.inventory import Holder, Inventory, Run
from kvstore.mesh.link import Links
from kvstore.mesh.members import Directory, Member
from kvstore.mesh.peers import Peers
from kvstore.mesh.static import StaticDirectory
from kvstore.mesh.supplier import PeerSettings
from kvstore.mesh.tls import PeerTls

log = logging.getLogger(__name__)
Work = Callable[[], Awaitable[None]]
_NOBODY_ELSE_S: Final = 2.0  # of patience with a peer, where the only other way is computing


class Mesh:
    """What one node has of it. Make one with `open`.

    Attributes:
        directory: Who is there.
        peers: The origin.
        background: Loops to be kept running, by name.
        reason: What is wrong with the directory now, for people; "" where nothing is.
        tls: What peers show each other, if anything.
    """

    def __init__(
        self,
        directory: Directory,
        peers: Peers,
        background: dict[str, Work],
        reason: Callable[[], str],
        tls: PeerTls | None,
        lifetime: AsyncExitStack,
    ) -> None:
        self.directory, self.peers, self.background, self.reason = directory, peers, background, reason
        self.tls, self._lifetime = tls, lifetime

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: PeersSettings, node: str, *, bucket: bool, clock: Clock, ids: Ids, environ: Mapping[str, str]
    ) -> AsyncIterator[Self]:
        """For the length of the block; at its end this node has left. Nothing waits for others to be there.

        Args:
            settings: With `listen`.
            node: This node's id.
            bucket: Whether there is one behind the peers: then no peer is waited for long.
            clock: Time.
            ids: Names and spread.
            environ: Where a directory's credentials are.

        Raises:
            Invalid: An address that does not fit, or a certificate that is none.
            Unsupported: A directory is named, and its client is not installed.
        """
        host, port = parse_address(settings.advertise or settings.listen, "peers.advertise")
        if not settings.advertise and _anywhere(host):
            raise Invalid(
                f"peers.listen is {settings.listen!r}, which is every interface", remedy="set peers.advertise to what others reach"
            )
        tls = PeerTls.of(settings)
        async with AsyncExitStack() as lifetime:
            links = await lifetime.enter_async_context(Links.open(networks=settings.networks, tls=tls))
            background: dict[str, Work] = {}
            directory: Directory
            reason: Callable[[], str] = str
            if settings.directory:
                try:
                    from kvstore.mesh.valkey import ValkeyDirectory, ValkeySettings  # noqa: PLC0415  its client is an extra
                except ModuleNotFoundError as error:
                    raise Unsupported(f"a directory needs the package {error.name}", remedy="pip install 'kvtier[mesh]'") from None
                url, bounds = DirectoryUrl.parse(settings.directory), ValkeySettings(mesh=settings.mesh)
                opening = ValkeyDirectory.open(url, node, host, port, bounds, clock=clock, ids=ids, environ=environ)
                directory = valkey = await lifetime.enter_async_context(opening)
                background |= {"directory": valkey.keep, "directory news": valkey.tell}
                reason = valkey.reason
            else:
                named = static_peers(settings.static)
                others = [Member(name, 0, *address) for name, address in named.items() if name != node]
                for other in others:
                    if (other.host, other.port) == (host, port):
                        raise Invalid(
                            f"peers.static says that {other.node} is at {host}:{port}, where this node is, and node.id is {node!r}",
                            remedy=f"set node.id to {other.node!r}, or correct peers.static",
                        )
                if node not in named:
                    log.warning("peers.static does not name this node, %s: others that have the same list never ask it", node)
                directory = StaticDirectory(others, links.holds, clock)
            patience = PeerSettings() if bucket else PeerSettings(patience_s=_NOBODY_ELSE_S)
            opened = Peers.open(node, directory, links, clock, patience, placement=bucket and settings.placement)
            peers = await lifetime.enter_async_context(opened)
            background["peers"] = peers.watch
            yield cls(directory, peers, background, reason, tls, lifetime)

    async def leave(self) -> None:
        """Others are not to ask this node any more. Its loops have ended."""
        directory: Any = self.directory
        if not isinstance(directory, StaticDirectory):
            await directory.leave()

    def stats(self) -> MeshStats:
        """As it stands."""
        return MeshStats(
            members=[member.node for member in self.directory.members()],
            fetches=dict(self.peers.counts),
            by_member={node: dict(counts) for node, counts in self.peers.asked_of.items()},
            directory=self.reason(),
        )

    async def tell_of(self, tiers: Sequence[Holder], run: Run, clock: Clock) -> None:
        """From now on the directory, where there is one, knows what these tiers hold.

        Args:
            tiers: All of this node's. They are closed after this mesh, or told of as they empty.
            run: For what takes long.
            clock: Time.
        """
        directory: Any = self.directory
        if not isinstance(directory, StaticDirectory):
            inventory = await self._lifetime.enter_async_context(Inventory.open(tiers, directory, run, clock))
            self.background |= {"inventory": inventory.tell, "inventory repair": inventory.repair}


def _anywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False
