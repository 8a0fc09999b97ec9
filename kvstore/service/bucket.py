"""The bucket as a node has it: perhaps not yet, perhaps not now.

A store that is out of reach when a node starts must not keep the node's local tiers from serving: the node starts degraded,
tries again in the background, and says so in its readiness. A store that is *wrong* (unsafe, refused credentials, unknown format)
is an error at start, because waiting does not mend it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack

from kvstore.clock import Clock, Ids
from kvstore.errors import Denied, KVTierError, Unavailable, Unsupported
from kvstore.ids import Namespace, NamespaceId
from kvstore.lifecycle.health import StoreSigns, skew_reason
from kvstore.repo import BlockWant, Repo
from tiering import Lease, Miss, Tell, Want

log = logging.getLogger(__name__)
_FIRST_WAIT, _LONGEST_WAIT, _CHECK_EVERY = 0.5, 15.0, 10.0
_SLOW_S = 5.0  # a small read that takes longer is worth telling
_NAMESPACE_S = 2.0
PART, CLOCK = "bucket", "clock"  # names among what is degraded


class Bucket:
    """Opens the repository, keeps trying while the store is out of reach, and is the hierarchy's last origin.

    Args:
        connect: Opens store and repository; None in stage 1.
        signs: What requests to its store tell.
        degraded: Where the node's readiness collects what it cannot give now.
        full: Whether a tenant has as much in the bucket as it may have: then it takes nothing that no session names.
    """

    name = "bucket"

    def __init__(
        self,
        connect: Callable[[], AbstractAsyncContextManager[Repo]] | None,
        signs: StoreSigns,
        degraded: dict[str, str],
        clock: Clock,
        ids: Ids,
        full: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._full = full
        self._connect, self._signs, self._degraded, self._clock, self._ids = connect, signs, degraded, clock, ids
        self._lifetime = AsyncExitStack()
        self._repo: Repo | None = None
        self._naming: set[asyncio.Task[None]] = set()

    @property
    def configured(self) -> bool:
        """Whether this node has a bucket at all (stage 3)."""
        return self._connect is not None

    @property
    def repo(self) -> Repo:
        """The protocol on the bucket.

        Raises:
            Unsupported: Stage 1: no bucket is configured.
            Unavailable: It has not been reached yet.
        """
        if self._repo is not None:
            return self._repo
        if self._connect is None:
            raise Unsupported("this node has no bucket, so it holds no sessions: set [store] url")
        raise Unavailable(f"the bucket has not been reached since this node started: {self._degraded.get(PART, 'starting')}")

    def requests(self) -> dict[str, int]:
        """Store requests so far, by `verb outcome`."""
        total: Counter[tuple[str, str]] = sum((counter.requests for counter in self._signs.counters), Counter())
        return {f"{verb} {outcome}": count for (verb, outcome), count in sorted(total.items())}

    async def open(self) -> None:
        """First attempt. Raises what waiting would not mend."""
        if self._connect is None:
            return
        try:
            self._repo = await self._lifetime.enter_async_context(self._connect())
        except Unavailable as error:
            self._degraded[PART] = f"{error.kind}: {error.message}"
            log.warning("starting without the bucket, trying again: %s", error)

    async def watch(self) -> None:
        """Keep trying to connect; once connected, keep an eye on its health. Runs until cancelled."""
        wait = _FIRST_WAIT
        while self._connect is not None:
            try:
                if self._repo is None:
                    self._repo = await self._lifetime.enter_async_context(self._connect())
                    log.info("the bucket is reached")
                await self._look(self._repo)
                wait = _FIRST_WAIT
                await self._clock.sleep(_CHECK_EVERY)
            except KVTierError as error:
                if error.kind == "circuit_open":
                    self._degraded.pop(PART, None)  # the breaker tells that itself, and knows first when it is over
                else:
                    self._degraded[PART] = f"{error.kind}: {error.message}"
                await self._clock.sleep(wait * (0.5 + self._ids.jitter()))
                wait = min(wait * 2, _LONGEST_WAIT)

    async def _look(self, repo: Repo) -> None:
        """Whether the store answers, in good time, and by a clock like ours."""
        begun = self._clock.monotonic()
        await repo.check()
        took = self._clock.monotonic() - begun
        skew = skew_reason(await repo.root.now() - self._clock.now())
        slow = f"slow: a read of format.json took {took:.0f} s" if took > _SLOW_S else ""
        for part, why in ((PART, slow), (CLOCK, skew)):
            if why:
                self._degraded[part] = why
            else:
                self._degraded.pop(part, None)

    async def aclose(self) -> None:
        """Let go of repository and store."""
        self._repo = None
        for task in self._naming:
            task.cancel()
        await asyncio.gather(*self._naming, return_exceptions=True)
        await self._lifetime.aclose()

    # --- as the hierarchy's origin ---

    async def fetch(self, want: Want, into: memoryview, tell: Tell | None = None) -> Miss | None:
        """From the bucket, verified."""
        return Miss.UNAVAILABLE if self._repo is None else await self._repo.origin.fetch(want, into, tell)

    async def offer(self, want: Want, value: Lease) -> bool:
        """Keep an anonymous copy."""
        if self._repo is None or (isinstance(want.ref, BlockWant) and self._full(want.ref.namespace.tenant)):
            return False
        return await self._repo.origin.offer(want, value)

    def ready(self) -> bool:
        """Whether its store was reached and is not left alone."""
        return self._repo is not None and self._signs.breaker.state == "closed"

    async def contains(self, wants: Sequence[Want], *, until: float = 0.0, missed: bool = False) -> int:
        """Leading run; see :meth:`kvstore.repo.blocks.BucketOrigin.contains`."""
        return 0 if self._repo is None else await self._repo.origin.contains(wants, until=until, missed=missed)

    def known(self, wants: Sequence[Want]) -> int:
        """Leading run that earlier answers say is there."""
        return 0 if self._repo is None else self._repo.origin.known(wants)

    # --- as the registry's store ---

    async def put_namespace(self, namespace: Namespace) -> None:
        """Keep its fields readable.

        A bucket that fails or takes its time must not keep an engine from its local tiers: then the first commit does this, which
        needs it anyway.
        """
        if self._repo is None:
            return
        task = asyncio.create_task(self._repo.put_namespace(namespace))
        self._naming.add(task)
        task.add_done_callback(self._named)
        done, _ = await asyncio.wait((task,), timeout=_NAMESPACE_S)
        error = task.exception() if done and not task.cancelled() else None
        if error is not None and not isinstance(error, Unavailable | Denied):
            raise error

    def _named(self, task: asyncio.Task[None]) -> None:
        self._naming.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("a namespace is not in the bucket yet: %s", error)

    async def namespace(self, namespace: NamespaceId) -> Namespace | None:
        """Its fields."""
        return await self.repo.namespace(namespace) if self.configured else None

    async def namespaces(self, tenant: str) -> list[Namespace]:
        """A tenant's."""
        return await self.repo.namespaces(tenant) if self.configured else []
