"""Collections straight on the store that a configuration names: what the collector's own process and `kvtier collect` run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import msgspec

from kvstore import api
from kvstore.accounts import Accounts
from kvstore.clock import Clock, Ids
from kvstore.config import Settings, StorageUrl
from kvstore.errors import Unsupported
from kvstore.keys import Keys
from kvstore.lifecycle.collector import Collector, CollectSettings, Watch
from kvstore.lifecycle.dryrun import Report
from kvstore.lifecycle.messages import Spent
from kvstore.objects import RetryingStore, S3Settings, probe
from kvstore.objects.base import ObjectStore
from kvstore.objects.counting import CountingStore
from kvstore.objects.credential_chain import chain
from kvstore.objects.opening import open_store, s3_settings
from kvstore.objects.paced import PacedStore
from kvstore.repo import Repo, RepoSettings
from kvstore.sealing import sealing_of
from tiering import Movers

_KEPT_HEADS: Final = 256  # decoded ones; the collector remembers the others in a fraction of the memory


class DirectCollector:
    """A collector with a store of its own. Open it with `open`.

    Attributes:
        collector: What works on the repository.
    """

    def __init__(self, collector: Collector, accounts: Accounts, root: str, where: S3Settings | None) -> None:
        self.collector, self._accounts, self._root, self._where = collector, accounts, root, where

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings, clock: Clock, ids: Ids) -> AsyncIterator[DirectCollector]:
        """For as long as the block runs.

        Raises:
            Unsupported: There is no bucket, it is unsafe, or its root has an unknown format.
            KVTierError: As the store raises.
        """
        if not settings.store.url:
            raise Unsupported("there is no bucket to collect: store.url is not set", remedy="set store.url")
        url, lifecycle = StorageUrl.parse(settings.store.url), settings.lifecycle
        keys = Keys(url.path)
        async with AsyncExitStack() as lifetime:
            accounts = Accounts()
            store: ObjectStore = CountingStore(await lifetime.enter_async_context(open_store(url, settings.store, clock)), accounts)
            if lifecycle.collect_rate:
                store = PacedStore(store, lifecycle.collect_rate, clock)
            await probe(store, keys.probe(ids.new()), clock, ids)
            movers = await lifetime.enter_async_context(Movers.open())
            how = RepoSettings(init=False, period=int(lifecycle.anonymous_ttl), cached_sessions=_KEPT_HEADS, cached_manifests=1)
            sealing = sealing_of(settings.encryption, movers.run, int(settings.store.inflight))
            opening = Repo.open(RetryingStore(store, clock, ids), keys, clock, ids, movers.run, how, sealing=sealing)
            repo = await lifetime.enter_async_context(opening)
            collector = Collector(repo, CollectSettings.of(lifecycle))
            yield cls(collector, accounts, keys.root, s3_settings(url, settings.store) if url.scheme == "s3" else None)

    def spent(self) -> Spent:
        """What it asked of the store by now, for whomever; looks at the bucket's versions are not counted."""
        requests: Counter[str] = Counter()
        for account in self._accounts:
            requests.update(account.requests)
        return Spent(
            requests=requests, sent=sum(each.sent for each in self._accounts), fetched=sum(each.fetched for each in self._accounts)
        )

    async def run(self, request: api.Collect, *, report: Report | None = None, watch: Watch | None = None) -> api.Collected:
        """One collection, and what a versioned bucket needs besides. Raises as :meth:`Collector.run`."""
        done = await self.collector.run(request, report=report, watch=watch)
        return done if self._where is None else await self._versions(self._where, request, done)

    async def _versions(self, where: S3Settings, request: api.Collect, done: api.Collected) -> api.Collected:
        from kvstore.objects.admin import BucketAdmin  # noqa: PLC0415  tens of MiB, that a bucket in memory does not need

        credentials = await asyncio.to_thread(chain(where.region, instance_metadata=where.instance_metadata))
        async with BucketAdmin.open(where, credentials) as admin:
            if await admin.versioning() not in {"Enabled", "Suspended"}:
                return done
            if request.purge_versions and not request.dry_run:
                return msgspec.structs.replace(done, purged=await admin.purge(self._root))
        warning = (
            f"bucket {where.bucket} keeps old versions of everything that was deleted or replaced, and they cost money:"
            " switch versioning off, let a lifecycle rule expire noncurrent versions, or collect with --purge-versions"
        )
        return msgspec.structs.replace(done, warnings=[*done.warnings, warning])


def told(settings: Settings) -> dict[str, str]:
    """What a collector has to know of a node's settings, as `kvstore.config.load` takes flags. No secret is among them."""
    return {
        f"{name}.{field}": _spelled(getattr(section, field))
        for name, section in (("store", settings.store), ("lifecycle", settings.lifecycle), ("encryption", settings.encryption))
        for field in section.__struct_fields__
    }


def _spelled(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
