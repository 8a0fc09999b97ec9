"""What nodes have of a prompt: those beside the engines are asked, all at once, for as long as it is worth it.

Of others, and of those that do not answer, a directory tells.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Final, Protocol

from kvstore.client import Client
from kvstore.client.opening import connect
from kvstore.errors import KVTierError
from kvstore.gateway.failing import told
from kvstore.ids import Namespace, PrefixId, Shard, tier_key, tier_key_head
from kvstore.mesh.members import Member
from kvstore.mesh.router import Router

log = logging.getLogger(__name__)
WAIT_MS: Final = 50
_PAUSE_S: Final = 1.0  # after a look that failed: requests are not to wait for a node that says nothing
_NAMED_S: Final = 15.0  # a model that no node names for so long is said to be: its name may be wrong
_AGAIN_S: Final = 5.0  # until a node that could not be reached is tried again


class Said(Protocol):
    """A directory. :class:`kvstore.mesh.valkey.ValkeyDirectory` is one."""

    async def said(self, keys: Sequence[bytes]) -> tuple[list[tuple[Member, ...]], bool]:
        """Who is believed to have each, and whether that is all there is to say."""
        ...


class Whereabouts:
    """Tells a router what nodes hold.

    Args:
        router: Is told.
        nodes: Storage URLs of the nodes, each of which is a node's name, too; and a shard of the engine beside it, which stands for
            all of them.
        monotonic: The clock.
        directory: Of the nodes' mesh, if there is one. Its word is a hint: what a node says of itself counts.
    """

    def __init__(
        self, router: Router, nodes: Mapping[str, Shard], monotonic: Callable[[], float], directory: Said | None = None
    ) -> None:
        self._router, self._monotonic, self._directory = router, monotonic, directory
        self._ids: dict[str, str] = {}  # of nodes that were reached, as a directory names them
        self._shards = sorted(set(nodes.values()), key=str)
        self._pauses: dict[str, float] = {}  # nodes whose last look failed, and until when they are left alone
        self._nodes = {url: [str(shard)] for url, shard in nodes.items()}
        self._clients: dict[str, Client] = {}
        self._others = set[str]()  # models that were seen, and are not the one
        self._warns: float | None = None  # when it is said that none names the one

    async def keep(self) -> None:
        """Connect to nodes, those that come back included. Runs until cancelled."""
        while True:
            for url in self._nodes:
                if url not in self._clients:
                    try:
                        await self._reach(url)
                    except (KVTierError, OSError) as error:
                        log.info("node %s is not reached: %s", url, told(error))
            await asyncio.sleep(_AGAIN_S)

    async def _reach(self, url: str) -> None:
        client = await connect(url)
        try:
            stats = await client.stats()
            self._router.node_shares(url, shares=stats.mesh is not None)
            self._ids[url] = stats.node
        except BaseException:
            await client.aclose()
            raise
        self._clients[url] = client

    async def aclose(self) -> None:
        """Let go of the nodes."""
        clients, self._clients = self._clients, {}
        for client in clients.values():
            await client.aclose()

    async def namespace(self, model: str) -> Namespace | None:
        """The namespace under which a model's KV is stored: the one with most blocks. None where there is none yet."""
        answered = 0
        for client in list(self._clients.values()):
            try:
                found = (await client.list_namespaces()).namespaces
            except (KVTierError, OSError):
                continue
            answered += 1
            fits = [each for each in found if each.fields.model == model and each.fields.identity == "tokens"]
            if fits:
                return max(fits, key=lambda each: each.blocks).fields
            if new := {each.fields.model for each in found} - self._others:
                self._others |= new
                log.warning("no KV of model %r is stored yet, but of %s", model, ", ".join(sorted(new)))
        self._missed(model, answered)
        return None

    def _missed(self, model: str, answered: int) -> None:
        """Nobody knows it: what a gateway does then looks like what it does otherwise, so it is said once."""
        if self._warns is None:
            self._warns = self._monotonic() + _NAMED_S
        elif self._nodes and self._monotonic() >= self._warns:
            self._warns = math.inf
            log.warning(
                "no node names a namespace of model %r yet (%d of %d nodes answer): until one does, requests go by events and by "
                "what this gateway sent where",
                model,
                answered,
                len(self._nodes),
            )

    async def look(
        self, namespace: Namespace, prefixes: Sequence[PrefixId], keys: Sequence[bytes], fresh: Callable[[str], Collection[bytes]]
    ) -> None:
        """Ask every node how much of a chain it has, and believe it.

        Args:
            namespace: Of the chain.
            prefixes: Its blocks.
            keys: The same, as a router has them.
            fresh: Tells of a node blocks that an engine beside it computes now: it does not have them yet, and will.
        """
        if prefixes:
            asked = [url for url in self._clients if self._pauses.get(url, 0.0) <= self._monotonic()]
            asking = asyncio.gather(*(self._ask(url, namespace, prefixes, keys, fresh(url)) for url in asked))
            if self._directory is None:
                await asking
                return
            answers, (holders, complete) = await asyncio.gather(asking, self._hints(self._directory, namespace, prefixes))
            spoke = {url for url, answered in zip(asked, answers, strict=True) if answered}
            self._hinted(keys, holders, spoke, fresh, complete=complete)

    async def _hints(
        self, directory: Said, namespace: Namespace, prefixes: Sequence[PrefixId]
    ) -> tuple[list[frozenset[str]], bool]:
        """Of each block the ids of the nodes that are said to have all its shards."""
        heads = [tier_key_head(namespace.id, shard) for shard in self._shards]
        found, complete = await directory.said([tier_key(head, prefix) for head in heads for prefix in prefixes])
        named = [frozenset(member.node for member in holders) for holders in found]
        return [frozenset.intersection(*named[at :: len(prefixes)]) for at in range(len(prefixes))], complete

    def _hinted(
        self,
        keys: Sequence[bytes],
        holders: Sequence[frozenset[str]],
        answered: Collection[str],
        fresh: Callable[[str], Collection[bytes]],
        *,
        complete: bool,
    ) -> None:
        """Believe a directory of whoever has not spoken for itself."""
        router = self._router
        for url in self._nodes.keys() - answered:
            has = [key for key, nodes in zip(keys, holders, strict=True) if self._ids.get(url) in nodes]
            router.node_has(url, has, disk=True)  # which medium it is nobody says: the slower one
            if complete:
                gone = set(keys).difference(has, fresh(url))
                router.node_lost(url, [*gone])
                router.node_lost(url, [*gone], disk=True)
        beside = set(self._ids.values())
        elsewhere = [key for key, nodes in zip(keys, holders, strict=True) if nodes - beside]
        router.peers_have(elsewhere)
        if complete:
            router.peers_lost([*set(keys).difference(elsewhere)])

    async def _ask(
        self, url: str, namespace: Namespace, prefixes: Sequence[PrefixId], keys: Sequence[bytes], fresh: Collection[bytes]
    ) -> bool:
        """Whether it answered."""
        client = self._clients[url]
        try:
            async with asyncio.timeout(2 * WAIT_MS / 1e3):
                found = await client.lookup(namespace=namespace, prefix_ids=prefixes, shards=self._nodes[url], deadline_ms=WAIT_MS)
        except (KVTierError, OSError, TimeoutError) as error:
            log.info("node %s did not say what it has: %s", url, told(error))
            if url in self._pauses:  # twice in a row: until it is back, nothing can be loaded from there
                self._router.node_cleared(url)
            self._pauses[url] = self._monotonic() + _PAUSE_S
            return False
        self._pauses.pop(url, None)
        at = 0
        for tier, blocks in groupby(found.tiers):
            run = keys[at : at + len(list(blocks))]
            at += len(run)
            if tier in {"bucket", "peer"}:  # the peer says for itself what it has
                if tier == "bucket":
                    self._router.bucket_has(run)
                self._router.node_lost(url, [key for key in run if key not in fresh])
            else:
                self._router.node_has(url, run, disk=tier == "nvme")
        gone = [key for key in keys[at:] if key not in fresh]
        self._router.node_lost(url, gone)
        self._router.node_lost(url, gone, disk=True)
        return True
