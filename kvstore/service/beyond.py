"""What is beyond a node's own tiers: other nodes and the bucket, asked for as long as a reader waits."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol

from kvstore.clock import Clock
from kvstore.errors import Invalid, KVTierError, NotFound
from kvstore.ids import Link, Namespace, Shard
from kvstore.service.registry import Registry
from kvstore.service.wants import block_wants
from tiering import Flights, Miss, Origin, Want

_LINGER: Final = 32  # questions to the bucket that go on when whoever asked ran out of time


class BucketOrigin(Origin, Protocol):
    """The bucket, which also remembers what it was asked."""

    async def contains(self, wants: Sequence[Want], *, until: float = 0.0, missed: bool = False) -> int:
        """Leading run that it holds; see :meth:`kvstore.repo.blocks.BucketOrigin.contains`."""
        ...

    def known(self, wants: Sequence[Want]) -> int:
        """Length of the leading run that earlier answers say it holds. Asks nobody."""
        ...


class Beyond:
    """Asks them.

    Args:
        registry: Known namespaces, and the bucket's.
        bucket: If there is one.
        peers: Other nodes, if there are any.
        clock: For deadlines.
    """

    def __init__(self, registry: Registry, bucket: BucketOrigin | None, peers: Origin | None, clock: Clock) -> None:
        self.bucket, self.peers = bucket, peers
        self._registry, self._clock = registry, clock
        self._questions: Flights[Any] = Flights(lambda _: None, linger=_LINGER, linger_cost=_LINGER)

    async def aclose(self) -> None:
        """End questions that nobody waits for."""
        await self._questions.aclose()

    def __bool__(self) -> bool:
        """Whether there is anybody."""
        return self.bucket is not None or self.peers is not None

    async def at_peers(self, fields: Namespace, shards: Sequence[Shard], links: Sequence[Link], deadline: float) -> int:
        """Leading run of `links` that peers are believed to hold for every shard."""
        run = len(links)
        if self.peers is None or not run or not self.peers.ready():
            return 0
        try:
            async with asyncio.timeout(self.left(deadline)):
                for shard in shards:
                    run = await self.peers.contains(block_wants(fields, shard, links[:run])) if run else 0
        except TimeoutError:
            return 0
        return run

    async def in_bucket(
        self,
        fields: Namespace,
        shards: Sequence[Shard],
        links: Sequence[Link],
        deadline: float | None,
        *,
        missed: bool,
    ) -> int:
        """Leading run of `links` that the bucket holds for every shard; what it has said of them before, where it takes too long.

        The question goes on then, so that a slow bucket asked again and again comes to be known.
        """
        bucket = self.bucket
        if bucket is None:
            return 0
        wanted = [block_wants(fields, shard, links) for shard in shards]

        async def ask() -> int:
            run, until = len(links), math.inf if deadline is None else deadline
            for wants in wanted:
                run = await bucket.contains(wants[:run], until=until, missed=missed)
            return run

        key = ("run", missed, fields.id, tuple(map(str, shards)), tuple(link.prefix_id for link in links))
        try:
            async with self._questions.join(key, ask, seconds=self.left(deadline), cost=1) as run:
                return int(run)
        except (TimeoutError, KVTierError):
            return min(bucket.known(wants) for wants in wanted)

    async def fields(self, tenant: str, namespace: str, deadline: float | None) -> Namespace | Miss:
        """A namespace's fields; a miss where only the bucket could tell, and it does not in time.

        Raises:
            NotFound: It is not known to this tenant.
            Invalid: It is no namespace's id.
        """
        known = self._registry.known(tenant, namespace)
        if known is not None:
            return known
        ask = partial(self._registry.get, tenant, namespace)
        try:
            async with self._questions.join(("namespace", tenant, namespace), ask, seconds=self.left(deadline), cost=1) as fields:
                assert isinstance(fields, Namespace)
                return fields
        except TimeoutError:
            return Miss.TIMEOUT
        except (NotFound, Invalid):
            raise
        except KVTierError:
            return Miss.UNAVAILABLE

    def left(self, deadline: float | None) -> float | None:
        """Seconds until then."""
        return None if deadline is None else max(0.0, deadline - self._clock.monotonic())
