"""Commands that work on the bucket itself, without a node."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from kvstore.cli.embedded import beside
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import Settings, StorageUrl
from kvstore.errors import Unsupported
from kvstore.keys import Keys
from kvstore.objects import RetryingStore
from kvstore.objects.opening import open_store
from kvstore.repo import Repo, RepoSettings
from kvstore.sealing import sealing_of
from tiering import Movers

_SETTINGS: Final = RepoSettings(init=False, cached_sessions=256, cached_manifests=4 << 20)  # each is read once or twice


@asynccontextmanager
async def repository(settings: Settings, folder: Path | None) -> AsyncIterator[Repo]:
    """The repository that these settings name, or that `kvtier up` keeps in this folder (see `beside`). It is never made here.

    Raises:
        Unsupported: There is none, or it has an unknown format.
        KVTierError: As the store raises.
    """
    clock, ids = SystemClock(), RandomIds()
    async with beside(settings, folder) as found:
        if not found.store.url:
            remedy = "set store.url, or name the folder of `kvtier up` with --data"
            raise Unsupported("there is no bucket to work on: store.url is not set", remedy=remedy)
        url = StorageUrl.parse(found.store.url)
        async with open_store(url, found.store, clock) as store, Movers.open() as movers:
            retrying = RetryingStore(store, clock, ids)
            sealing = sealing_of(found.encryption, movers.run, int(found.store.inflight))
            async with Repo.open(retrying, Keys(url.path), clock, ids, movers.run, _SETTINGS, sealing=sealing) as repo:
                yield repo
