"""A node: the one place that wires the parts together, and that opens and closes them in order."""

from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from kvstore.accounts import Accounts
from kvstore.clock import Clock, Ids, RandomIds, SystemClock
from kvstore.config import Settings, StorageUrl
from kvstore.errors import Denied, Invalid, Unsupported
from kvstore.keys import Keys
from kvstore.lifecycle.collector import CollectSettings
from kvstore.lifecycle.health import Health, StoreSigns, collector_reason
from kvstore.lifecycle.prestage import Turns
from kvstore.lifecycle.runners import InProcess, Subprocess
from kvstore.lifecycle.warm import keep_learning
from kvstore.lifecycle.worker import Collections
from kvstore.mesh.inventory import Holder
from kvstore.mesh.opening import Mesh
from kvstore.mesh.peers import Peers
from kvstore.objects import ObjectStore, RetryingStore, S3Store, probe
from kvstore.objects.breaker import BreakingStore
from kvstore.objects.counting import CountingStore
from kvstore.objects.hedge import HedgingStore
from kvstore.objects.opening import open_store
from kvstore.objects.ranged import RangedStore
from kvstore.repo import Repo, RepoSettings
from kvstore.sealing import DiskSeals, MasterKeys, sealing_of
from kvstore.service.bucket import PART as BUCKET
from kvstore.service.bucket import Bucket
from kvstore.service.calls import Service
from kvstore.service.commits import Commits
from kvstore.service.local import LocalCommits
from kvstore.service.plane import Plane, TenantTiers
from kvstore.service.registry import Registry
from kvstore.service.room import refuse_more_disk_than_there_is
from kvstore.service.stats import watch_tiers
from kvstore.service.supervisor import Supervisor
from tiering import (
    SECOND_SIGHT_KEYS,
    DiskTier,
    DramTier,
    Lru,
    Movers,
    Origin,
    SealedOtherwise,
    SecondSight,
    Stack,
    StackSettings,
    TierError,
)

if TYPE_CHECKING:
    from kvstore.mesh.publishing import Publisher

DEFAULT_TENANT = "default"
_ELSEWHERE = (
    "or point nvme.path at an empty folder: blocks come from the bucket again, but no commit that only the old folder holds"
)


class Node:
    """Everything one process holds. Open it with `Node.open`; faces use `service`.

    Attributes:
        settings: What it was told.
        service: Its calls and its data plane.
        tiers: Of each tenant.
        registry: Namespaces that it knows.
        movers: Threads.
        clock: Time.
        mesh: Its part in a mesh, if any.
        health: What it cannot promise just now; faces tell it what they cannot.
        background: Keeps tasks running; faces have theirs kept by it, too.
    """

    def __init__(
        self,
        settings: Settings,
        service: Service,
        tiers: Mapping[str, TenantTiers],
        registry: Registry,
        movers: Movers,
        clock: Clock,
        mesh: Mesh | None,
        background: Supervisor,
        health: Health,
    ) -> None:
        self.settings, self.service, self.health = settings, service, health
        self.tiers, self.registry, self.movers, self.clock, self.mesh = tiers, registry, movers, clock, mesh
        self.background = background

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: Settings, *, clock: Clock | None = None, ids: Ids | None = None, store: ObjectStore | None = None
    ) -> AsyncIterator[Node]:
        """A running node, drained and closed at the end of the block.

        Args:
            settings: Everything else.
            clock: Time; the system's by default.
            ids: Names; random by default.
            store: Instead of the one that `settings.store.url` names.

        Raises:
            Invalid: Settings contradict each other.
            Unsupported: The store is unsafe, or its root has an unknown format.
            Denied: The store refuses the credentials.
        """
        clock, ids = clock or SystemClock(), ids or RandomIds()
        node_id = settings.node.id or socket.gethostname()
        degraded: dict[str, str] = {"starting": "tiers are being opened"}
        async with AsyncExitStack() as lifetime:
            movers = await lifetime.enter_async_context(Movers.open())
            signs, health, accounts = StoreSigns(clock, ids), Health(degraded), Accounts()
            connect = None
            if settings.store.url or store is not None:
                connect = partial(_repository, settings, movers, clock, ids, signs, accounts, store)
            bucket = Bucket(connect, signs, degraded, clock, ids, full=lambda tenant: service.quotas.full(tenant))  # noqa: PLW0108  no service yet
            lifetime.push_async_callback(bucket.aclose)
            await bucket.open()
            disk = await lifetime.enter_async_context(_disk(settings, movers)) if settings.nvme.path else None
            mesh = await _mesh(settings, node_id, clock, ids, health, lifetime)
            origins: list[Origin] = [*([mesh.peers] if mesh else []), *([bucket] if bucket.configured else [])]
            tiers = await _tenants(settings, origins, disk, movers, clock, lifetime)
            events, held = await _heard(settings, tiers, disk, clock, lifetime)
            if mesh:
                await mesh.tell_of(held, movers.run, clock)
            registry, turns = Registry(bucket), Turns(speculative=settings.prestage.speculative)
            beyond = bucket if bucket.configured else None
            plane = Plane(tiers, registry, beyond, clock, movers, turns, peers=mesh.peers if mesh else None, accounts=accounts)
            lifetime.push_async_callback(plane.aclose)
            if bucket.configured:
                health.ask(BUCKET, signs.faults)
                health.ask("breaker", signs.breaker.reason)
            watch_tiers(health, tiers, disk, clock)
            background = Supervisor(clock, ids)
            local = LocalCommits(plane, registry, bucket, disk)
            commits = Commits(
                local,
                disk.journal if disk is not None else None,
                clock,
                ids,
                pending_bytes=int(settings.limits.pending_commits) // len(tiers),
            )
            lifetime.push_async_callback(commits.drain, float(settings.limits.drain))
            here = store is not None or not settings.store.url.startswith("s3:")
            collections = _collections(settings, bucket, clock, accounts, here=here)
            lifetime.push_async_callback(collections.aclose)
            interval = int(settings.lifecycle.collect_interval)
            health.ask("collector", lambda: collector_reason(collections.stats(""), interval))
            service = Service(
                node_id=node_id,
                version=version("kvtier"),
                settings=settings,
                clock=clock,
                bucket=bucket,
                registry=registry,
                plane=plane,
                commits=commits,
                collections=collections,
                ids=ids,
                health=health,
                signs=signs,
                restarts=background.restarts,
                accounts=accounts,
                mesh=mesh,
                events=events,
            )
            lifetime.push_async_callback(service.aclose)
            lifetime.push_async_callback(background.aclose)
            background.run("bucket", bucket.watch)
            background.run("health", partial(health.watch, clock))
            for name, work in events.work.items() if events else ():
                background.run(name, work)
            background.run("replay", partial(_replay, commits, degraded))
            if bucket.configured:
                background.run("collect", collections.keep)
                missed = partial(plane.reads.asked, "lookup", 0, 1)
                background.run("warm", partial(keep_learning, lambda: bucket.repo, list(tiers), clock, missed))
            yield cls(settings, service, tiers, registry, movers, clock, mesh, background, health)

    @asynccontextmanager
    async def joined(self, mesh: Mesh) -> AsyncIterator[None]:
        """A member of its mesh for the length of the block. Others ask it for blocks then: it listens to them before and after."""
        for name, work in mesh.background.items():
            self.background.run(name, work)
        try:
            yield
        finally:
            await self.background.stop(mesh.background)
            await mesh.leave()


@asynccontextmanager
async def _repository(
    settings: Settings, movers: Movers, clock: Clock, ids: Ids, signs: StoreSigns, accounts: Accounts, store: ObjectStore | None
) -> AsyncIterator[Repo]:
    """Probe the store, then open the root in it.

    Between the two stand, from the store upwards: what counts, so that it sees every request that is sent, second GETs included;
    what hedges, so that a cancelled loser is nobody's verdict on the store; the breaker, which judges single attempts; and what
    retries, so that a breaker that opens ends its attempts at once. Above them all, what reads by ranges: each is a request of its
    own to the others.
    """
    async with AsyncExitStack() as lifetime:
        root = ""
        if store is None:
            url = StorageUrl.parse(settings.store.url)
            root = url.path
            store = await lifetime.enter_async_context(open_store(url, settings.store, clock))
        signs.window = store.window if isinstance(store, S3Store) else None
        counter = CountingStore(store, accounts)
        signs.counters.append(counter)
        keys = Keys(root)
        if isinstance(store, S3Store):
            await store.check_encryption(keys.probe(ids.new()))
        found = await probe(counter, keys.probe(ids.new()), clock, ids)
        repo_settings = RepoSettings(
            history=settings.lifecycle.history,
            session_ttl=int(settings.lifecycle.session_ttl),
            sliding=settings.lifecycle.sliding,
            period=int(settings.lifecycle.anonymous_ttl),
            codec=settings.store.codec,
            inflight=int(settings.store.inflight),
        )
        seen = {"conditional_writes": True, "conditional_get": found.conditional_get}
        hedging = await lifetime.enter_async_context(HedgingStore.open(counter, clock, signs.hedges))
        breaking = BreakingStore.open(hedging, signs.breaker, clock, keys.format, signs.faults.saw)
        retrying = RetryingStore(await lifetime.enter_async_context(breaking), clock, ids, rest=signs.breaker.rest)
        opening = Repo.open(
            RangedStore(retrying),
            keys,
            clock,
            ids,
            movers.run,
            repo_settings,
            guarantees=seen,
            corrupt_reads=signs.corrupt_reads,
            sealing=sealing_of(settings.encryption, movers.run, int(settings.store.inflight)),
            share=movers.share,
        )
        repo = await lifetime.enter_async_context(opening)
        signs.choice = repo.uploads.choice
        yield repo


@asynccontextmanager
async def _disk(settings: Settings, movers: Movers) -> AsyncIterator[DiskTier]:
    path, size, key_file = _folder(settings.nvme.path), int(settings.nvme.size), settings.encryption.key_file
    owners = [_number(name) for name in _served(settings)]
    policy = partial(SecondSight, SECOND_SIGHT_KEYS // len(owners)) if settings.nvme.admission == "second" else Lru
    async with AsyncExitStack() as lifetime:
        try:
            await movers.run(refuse_more_disk_than_there_is, path, size)
            seals = DiskSeals(MasterKeys.read(key_file)) if key_file else None
            opening = DiskTier.open(path, size, movers, policy=policy, seals=seals, owners=owners)
            disk = await lifetime.enter_async_context(opening)
        except Denied as error:
            remedy = f"restore the key file, {_ELSEWHERE}"
            raise Denied(f"nvme.path {path}: {error.message}", kind=error.kind, remedy=remedy) from error
        except SealedOtherwise as error:
            remedy = f"{'leave encryption.key_file empty' if key_file else 'set encryption.key_file'}, {_ELSEWHERE}"
            raise Invalid(f"nvme.path {path}: {error}", remedy=remedy) from error
        except (TierError, OSError) as error:
            remedy = "name a folder of this node alone, with room for nvme.size"
            raise Invalid(f"nvme.path {path}: {error}", remedy=remedy) from error
        yield disk


def _folder(text: str) -> Path:
    return Path(text).expanduser()


async def _mesh(settings: Settings, node_id: str, clock: Clock, ids: Ids, health: Health, lifetime: AsyncExitStack) -> Mesh | None:
    if not settings.peers.listen:
        return None
    opening = Mesh.open(settings.peers, node_id, bucket=bool(settings.store.url), clock=clock, ids=ids, environ=os.environ)
    mesh = await lifetime.enter_async_context(opening)
    health.ask("mesh", mesh.reason)
    return mesh


async def _heard(
    settings: Settings, tiers: Mapping[str, TenantTiers], disk: DiskTier | None, clock: Clock, lifetime: AsyncExitStack
) -> tuple[Publisher | None, list[Holder]]:
    """Who publishes what the tiers have, if anybody; and the tiers, for whoever else wants to hear of it."""
    node = settings.node
    held: list[Holder] = [*(each.dram for each in tiers.values()), *([disk] if disk else [])]
    if not node.events:
        return None, held
    try:
        from kvstore.mesh.publishing import Publisher  # noqa: PLC0415  ZeroMQ is an extra
    except ModuleNotFoundError as error:
        raise Unsupported(f"node.events needs the package {error.name}", remedy="pip install 'kvtier[mesh]'") from None
    opening = Publisher.open(node.events, node.events_replay, settings.peers.networks, clock)
    events = await lifetime.enter_async_context(opening)
    return events, [events.hear(each, "NVME" if each is disk else "DRAM") for each in held]


async def _tenants(
    settings: Settings, origins: Sequence[Origin], disk: DiskTier | None, movers: Movers, clock: Clock, lifetime: AsyncExitStack
) -> dict[str, TenantTiers]:
    """An arena and a hierarchy for each tenant; memory is shared out evenly, the disk by need, what is beyond it is common."""
    uids = _served(settings)
    share, ahead = int(settings.dram.size) // len(uids), settings.prestage
    behind, drain = int(settings.limits.write_behind), float(settings.limits.drain)
    bounds = StackSettings(behind_bytes=behind, drain_s=drain, lenders=frozenset({Peers.name}))
    tiers = {}
    for name, allowed in uids.items():
        opening = DramTier.open(
            "dram", share, movers, held=ahead.held / 100, recent_s=float(ahead.recent), monotonic=clock.monotonic
        )
        dram = await lifetime.enter_async_context(opening)
        stack = await lifetime.enter_async_context(
            Stack.open(dram, disk, origins, bounds, who=_number(name), monotonic=clock.monotonic)
        )
        tiers[name] = TenantTiers(dram, stack, allowed)
    return tiers


def _served(settings: Settings) -> dict[str, tuple[int, ...]]:
    """Every tenant of a node, and the local users that may act for it."""
    return {name: tenant.uids for name, tenant in settings.tenants.items()} or {DEFAULT_TENANT: ()}


def _number(tenant: str) -> int:
    """Whose a value on the disk is, in this life of a node and the next."""
    return xxhash.xxh3_64_intdigest(tenant.encode())


async def _replay(commits: Commits, degraded: dict[str, str]) -> None:
    """Land what an earlier life promised, before this node calls itself ready."""
    found = await commits.replay()
    degraded.pop("starting", None)
    if found:
        degraded["commits"] = f"{found} commits of an earlier life of this node are being taken up"
        await commits.settled()
        degraded.pop("commits", None)


def _collections(settings: Settings, bucket: Bucket, clock: Clock, accounts: Accounts, *, here: bool) -> Collections:
    """Collections in a process of their own, where they cost the serving loop nothing; here only if the store lives here, too."""
    interval = int(settings.lifecycle.collect_interval)
    runner = (
        InProcess(lambda: bucket.repo, CollectSettings.of(settings.lifecycle))
        if here
        else Subprocess(settings, keep=interval > 0, accounts=accounts)
    )
    return Collections(runner, lambda: bucket.repo, clock, interval)
