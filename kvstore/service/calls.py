"""What each call of :data:`kvstore.api.CALLS` does on a node: a thin hand-over to the part that knows.

Every face (HTTP, Unix socket, embedded) comes through here, so that limits, tenancy and errors are the same everywhere.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.clock import Clock, Ids
from kvstore.config import Settings
from kvstore.errors import Denied, Invalid, NotFound, Unsupported
from kvstore.ids import Namespace, prefix_id
from kvstore.keys import check_id
from kvstore.lifecycle.health import Health, StoreSigns
from kvstore.lifecycle.removal import drop_namespace, drop_tenant
from kvstore.lifecycle.warm import publish
from kvstore.lifecycle.worker import Collections
from kvstore.mesh.opening import Mesh
from kvstore.objects.gate import ByteGate
from kvstore.payer import Paying
from kvstore.repo import Repo
from kvstore.repo.slices import sliced
from kvstore.service.bucket import Bucket
from kvstore.service.commits import Commits
from kvstore.service.costs import Costs
from kvstore.service.hinting import Hints
from kvstore.service.plane import Plane
from kvstore.service.quotas import Quotas
from kvstore.service.registry import Registry
from kvstore.service.restores import Restores
from kvstore.service.staging import Resolved
from kvstore.service.stats import latency, store_stats, tier_stats
from kvstore.service.wants import parse_shards

if TYPE_CHECKING:
    from kvstore.mesh.publishing import Publisher

MAX_LABELS, MAX_LABEL_BYTES, MAX_TTL, MAX_WAIT_MS, MAX_HOLD_MS = 32, 256, 10 * 365 * 86400, 60_000, 600_000
_RESOLVING: Final = 16  # sessions that are looked up at once for restores
_SETTLE_S: Final = 30.0  # a call that reads a session waits that long for this node's own commits to land


class Service:
    """The calls of one node.

    Args:
        node_id: Shown in answers.
        version: Of kvtier.
        settings: The node's.
        bucket: The repository, once it is reached.
        health: What is degraded.
        signs: How the bucket's store is doing.
        restarts: Of background tasks.
        accounts: What was done for whom.
        events: Who is told of what comes and goes, if anybody.
    """

    def __init__(
        self,
        *,
        node_id: str,
        version: str,
        settings: Settings,
        clock: Clock,
        bucket: Bucket,
        registry: Registry,
        plane: Plane,
        commits: Commits,
        collections: Collections,
        ids: Ids,
        health: Health,
        signs: StoreSigns,
        restarts: Mapping[str, int],
        accounts: Accounts,
        mesh: Mesh | None = None,
        events: Publisher | None = None,
    ) -> None:
        self.node_id, self.version, self.settings, self._clock = node_id, version, settings, clock
        self._bucket, self._registry, self.plane, self._commits = bucket, registry, plane, commits
        self._collections, self._mesh, self._events = collections, mesh, events
        self._health, self._signs, self._restarts = health, signs, restarts
        self._started = clock.monotonic()
        limits = settings.limits
        self._restores = Restores(
            self.resolve,
            plane,
            clock,
            ids,
            node=node_id,
            settings=settings.prestage,
            limit=limits.restores // max(1, len(settings.tenants)),
            longest=float(limits.restore),
        )
        self._resolving = ByteGate(_RESOLVING, None)  # of sessions
        self._costs = Costs(accounts, registry, settings.prices)
        self.quotas = Quotas(settings.tenants, accounts, lambda: collections.usage, self._count_sessions, self._committed_to, clock)
        self._hints = Hints(self._restores, self.resolve, plane, clock, settings.prestage)

    async def aclose(self) -> None:
        """Stop what runs on behalf of callers that were answered already."""
        await self._hints.aclose()
        await self._restores.aclose()

    def admit(self, tenant: str) -> None:
        """Count a request that is no call of the table. Raises `Overloaded` where the tenant has made too many."""
        self.quotas.take(tenant)

    async def call(self, tenant: str, name: str, request: api.Request) -> api.Answer:
        """Run a call by its name in the table. Raises `KVTierError`."""
        call = api.BY_NAME.get(name)
        if call is None or not isinstance(request, call.request):
            raise Invalid(f"unknown call {name!r}; known: {', '.join(api.BY_NAME)}")
        if call.scope != "open":
            self.plane.tiers(tenant)  # refuses a tenant that is not served
        if isinstance(request, api.OfSession):
            check_id(request.id, "session id")
        with Paying(tenant):
            async with self.quotas.admitted(tenant, name, request):
                answer: api.Answer = await getattr(self, name)(tenant, request)
        return answer

    @property
    def repo(self) -> Repo:
        """The protocol. Raises `Unsupported` in stage 1, `Unavailable` until the bucket was reached."""
        return self._bucket.repo

    # --- restores ---

    async def restore(self, tenant: str, request: api.Restore) -> api.RestoreStatus:
        """Answered without I/O."""
        _ = self.repo
        if len(request.tokens) > api.MAX_TOKENS or request.deadline_ms < 0 or request.max_bytes < 0:
            raise Invalid(f"tokens must be at most {api.MAX_TOKENS}, and deadline_ms and max_bytes at least 0")
        if not 0 <= (request.hold_ms or 0) <= MAX_HOLD_MS:
            raise Invalid(f"hold_ms must be 0 to {MAX_HOLD_MS}")
        if request.tier == "device":
            raise Unsupported("tier 'device' is memory of an engine's own process, which no node can reach: restore to 'dram'")
        if request.tier == "nvme" and not self.settings.nvme.path:
            raise Unsupported("tier 'nvme' needs a disk tier: set [nvme] path")
        if request.shards:
            parse_shards(request.shards)
        return self._restores.start(tenant, request)

    async def get_restore(self, tenant: str, request: api.GetRestore) -> api.RestoreStatus:
        """Progress, or the end where it comes within `wait_ms`."""
        if not 0 <= request.wait_ms <= MAX_WAIT_MS:
            raise Invalid(f"wait_ms must be 0 to {MAX_WAIT_MS}")
        return await self._restores.wait(tenant, request.restore_id, request.wait_ms / 1000)

    async def cancel_restore(self, tenant: str, request: api.OfRestore) -> api.RestoreStatus:
        """Stop."""
        return await self._restores.cancel(tenant, request.restore_id)

    def watch(self, tenant: str, restore_id: str) -> AsyncIterator[api.RestoreStatus]:
        """Progress, as it happens."""
        return self._restores.watch(tenant, restore_id)

    async def hint(self, tenant: str, request: api.Hint) -> api.Hinted:
        """Answered without I/O."""
        _ = self.repo
        return self._hints.take(tenant, request)

    async def resolve(self, tenant: str, request: api.Restore) -> Resolved:
        """Find a session's version for a restore."""
        await self._settled(tenant, request.id)
        async with self._resolving.hold(1):
            return await self._resolve(tenant, request)

    async def _resolve(self, tenant: str, request: api.Restore) -> Resolved:
        namespace = request.namespace
        if request.model and not namespace:
            namespace = await self._namespace_of_model(tenant, request)
        session, manifest = await self.repo.sessions.resolve(tenant, request.id, namespace, request.lane, request.version)
        return Resolved(session=session, manifest=manifest, namespace=await self._registry.held(tenant, session.namespace))

    async def _namespace_of_model(self, tenant: str, request: api.Restore) -> str:
        held = await self.repo.sessions.namespaces_of(tenant, request.id)
        for namespace in held:
            if (await self._registry.held(tenant, namespace)).model == request.model:
                return namespace
        raise NotFound(f"session {request.id!r} holds nothing for model {request.model!r}")

    async def _count_sessions(self, tenant: str, most: int) -> int:
        return await self.repo.sessions.count(tenant, most)

    async def _committed_to(self, tenant: str, request: api.Commit) -> api.Session:
        return await self.repo.sessions.get(tenant, request.id, request.namespace, request.lane)

    async def _settled(self, tenant: str, session: str) -> None:
        await self._commits.settle(tenant, session, self._clock.monotonic() + _SETTLE_S)

    # --- sessions ---

    async def list_sessions(self, tenant: str, request: api.ListSessions) -> api.SessionPage:
        """A page."""
        if not 1 <= request.limit <= 1000:
            raise Invalid("limit must be 1 to 1000")
        return await self.repo.sessions.list(tenant, request.prefix, request.cursor, request.limit)

    async def get_session(self, tenant: str, request: api.OfSession) -> api.Session:
        """One."""
        await self._settled(tenant, request.id)
        return await self.repo.sessions.get(tenant, request.id, request.namespace, request.lane)

    async def versions(self, tenant: str, request: api.OfSession) -> api.Versions:
        """Its versions."""
        await self._settled(tenant, request.id)
        return await self.repo.sessions.versions(tenant, request.id, request.namespace, request.lane)

    async def manifest(self, tenant: str, request: api.GetManifest) -> api.SessionManifest:
        """Its blocks."""
        await self._settled(tenant, request.id)
        return await self.repo.sessions.manifest(tenant, request.id, request.namespace, request.lane, request.version)

    async def create_session(self, tenant: str, request: api.CreateSession) -> api.Session:
        """An empty one."""
        _check_labels(request.labels)
        fields = await self._registry.get(tenant, request.namespace)
        lane, ttl = request.lane or api.MAIN, self._ttl(request.ttl_s)
        sliding = self.settings.lifecycle.sliding if request.sliding is None else request.sliding
        return await self.repo.sessions.create(tenant, request.id, fields, lane, ttl=ttl, sliding=sliding, labels=request.labels)

    async def commit(self, tenant: str, request: api.Commit) -> api.Receipt:
        """Next version."""
        if not self._bucket.configured:
            _ = self.repo  # raises, saying what to configure
        _check_labels(request.labels)
        fields = await self._registry.get(tenant, request.namespace)
        await check_commit(request, fields)
        self._ttl(request.ttl_s)
        await self.plane.settled(tenant)
        self.plane.grown(tenant, fields, request.shards, request.blocks)
        if self._events is not None:
            self._events.grown(request.id, fields.id, request.shards, request.blocks)
        return await self._commits.commit(tenant, request, request.durability or self.settings.store.durability)

    async def fork(self, tenant: str, request: api.Fork) -> api.Session:
        """A second session."""
        check_id(request.as_, "as")
        await self._settled(tenant, request.id)
        ttl = None if request.ttl_s is None else self._ttl(request.ttl_s)
        return await self.repo.sessions.fork(
            tenant, request.id, request.namespace, request.lane, request.as_, version=request.version, ttl=ttl
        )

    async def warm(self, tenant: str, request: api.Warm) -> api.Warmed:
        """Publish, and bring it into memory here."""
        if request.version < 0 or (request.tokens is not None and request.tokens < 1):
            raise Invalid("version must be at least 0, and tokens at least 1")
        await self._settled(tenant, request.id)
        session = await publish(
            self.repo,
            tenant,
            request.id,
            request.namespace,
            request.lane,
            as_=request.as_,
            version=request.version,
            tokens=request.tokens,
        )
        status = self._restores.start(tenant, api.Restore(id=session.id, namespace=session.namespace, lane=session.lane))
        return api.Warmed(session=session, restore_id=status.restore_id)

    async def rewind(self, tenant: str, request: api.Rewind) -> api.Session:
        """Back."""
        if (request.version is None) == (request.tokens is None):
            raise Invalid("rewind needs exactly one of version and tokens")
        await self._settled(tenant, request.id)
        return await self.repo.sessions.rewind(
            tenant, request.id, request.namespace, request.lane, version=request.version, tokens=request.tokens
        )

    async def touch(self, tenant: str, request: api.Touch) -> api.Session:
        """Renew."""
        ttl = None if request.ttl_s is None else self._ttl(request.ttl_s)
        return await self.repo.sessions.touch(tenant, request.id, request.namespace, request.lane, ttl=ttl)

    async def pin(self, tenant: str, request: api.OfSession) -> api.Session:
        """Keep."""
        return await self.repo.sessions.pin(tenant, request.id, request.namespace, request.lane, pinned=True)

    async def unpin(self, tenant: str, request: api.OfSession) -> api.Session:
        """Let go."""
        return await self.repo.sessions.pin(tenant, request.id, request.namespace, request.lane, pinned=False)

    async def delete_session(self, tenant: str, request: api.OfSession) -> api.Done:
        """Delete."""
        await self._settled(tenant, request.id)
        await self.repo.sessions.delete(tenant, request.id, request.namespace, request.lane)
        return api.Done()

    def _ttl(self, asked: int | None) -> int:
        ttl = int(self.settings.lifecycle.session_ttl) if asked is None else asked
        if not 0 <= ttl <= MAX_TTL:
            raise Invalid(f"ttl_s is {ttl}; it must be 0 (never expires) to {MAX_TTL}")
        return ttl

    # --- namespaces, look-up, operation ---

    async def list_namespaces(self, tenant: str, _: api.Nothing) -> api.Namespaces:
        """All."""
        alive = {usage.namespace: usage for usage in self._collections.stats(tenant).usage}
        return await self._registry.all(tenant, alive)

    async def put_namespace(self, tenant: str, request: api.PutNamespace) -> api.Done:
        """Register."""
        await self._registry.put(tenant, request.namespace, request.fields)
        return api.Done()

    async def delete_namespace(self, tenant: str, request: api.OfNamespace) -> api.Dropped:
        """All of a model's."""
        repo, fields = self.repo, await self._registry.get(tenant, request.namespace)
        return await drop_namespace(repo, tenant, fields.id)

    async def delete_tenant(self, tenant: str, request: api.OfTenant) -> api.Dropped:
        """All."""
        if request.tenant != tenant:
            raise Denied(
                f"a node drops only the sessions of its caller's own tenant, which is {tenant!r}",
                remedy="whoever operates the bucket drops others': `kvtier tenants rm TENANT --store URL`",
            )
        return await drop_tenant(self.repo, tenant)

    async def lookup(self, tenant: str, request: api.Lookup) -> api.Found:
        """Leading run."""
        return await self.plane.lookup(tenant, request)

    async def collect(self, tenant: str, request: api.Collect) -> api.Collected:
        """Once."""
        _ = self.repo  # raises, saying what to configure
        return await self._collections.collect(request)

    async def stats(self, tenant: str, _: api.Nothing) -> api.Stats:
        """As it stands; tiers are the caller's, the disk is shared."""
        tiers = self.plane.tiers(tenant)
        return api.Stats(
            node=self.node_id,
            version=self.version,
            uptime_s=self._clock.monotonic() - self._started,
            tiers=tier_stats(tiers, self.plane.reads),
            leases=tiers.dram.leases,
            queued_bytes=self.plane.queued(tenant),
            restores=self._restores.running,
            commits={
                **self._commits.outcomes,
                "pending": self._commits.pending,
                "pending_bytes": self._commits.pending_bytes,
            },
            store_requests=self._bucket.requests(),
            store=self.settings.store.url,
            restored=dict(self._restores.outcomes),
            lateness={priority: latency(found) for priority, found in self._restores.lateness.items()},
            held_bytes=tiers.dram.held,
            hints={**self._hints.counts, "scheduled": self._hints.scheduled},
            reads=dict(self.plane.reads.requests),
            tokens_missed=dict(self.plane.reads.missed),
            bucket=store_stats(self._signs),
            restarts=dict(self._restarts),
            collector=self._collections.stats(tenant),
            mesh=self._mesh.stats() if self._mesh is not None else None,
            events=dict(self._events.counts) if self._events is not None else {},
            cost=self._costs.now(self._collections.usage),
            prices=self._costs.prices,
        )

    async def health(self, tenant: str, _: api.Nothing) -> api.Health:
        """Alive, or this would not answer."""
        return api.Health(ok=True, node=self.node_id, version=self.version)

    async def ready(self, tenant: str, _: api.Nothing) -> api.Health:
        """May be sent work; a tier never fails a request, so a degraded node is still ready."""
        degraded = self._health.degraded()
        return api.Health(ok="starting" not in degraded, node=self.node_id, version=self.version, degraded=degraded)


async def check_commit(request: api.Commit, namespace: Namespace) -> None:
    """Refuse a commit that could not be restored. Raises `Invalid`, naming the field."""
    if not 1 <= len(request.blocks) <= api.MAX_BLOCKS:
        raise Invalid(f"blocks has {len(request.blocks)} entries; it must have 1 to {api.MAX_BLOCKS}")
    if request.base_version < 0:
        raise Invalid("base_version must be at least 0")
    if request.base_prefix_id:
        prefix_id(request.base_prefix_id)
    parse_shards(request.shards)
    if request.write_id and not (len(request.write_id) == 32 and set(request.write_id) <= set("0123456789abcdef")):
        raise Invalid("write_id must be 32 lower-case hex digits")
    last = len(request.blocks) - 1

    def check(some: Sequence[int]) -> Iterable[None]:
        for index in some:
            link = request.blocks[index]
            prefix_id(link.prefix_id)
            smallest = 1 if index == last else namespace.block_tokens
            if not smallest <= link.tokens <= namespace.block_tokens:
                raise Invalid(
                    f"blocks[{index}].tokens is {link.tokens}; only the last block may hold fewer than {namespace.block_tokens}"
                )
        return ()

    await sliced(check, range(last + 1))


def _check_labels(labels: Mapping[str, str]) -> None:
    if len(labels) > MAX_LABELS or any(len(text.encode()) > MAX_LABEL_BYTES for pair in labels.items() for text in pair):
        raise Invalid(f"labels must be at most {MAX_LABELS}, each key and value at most {MAX_LABEL_BYTES} bytes")
