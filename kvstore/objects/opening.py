"""From a storage URL to a store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvstore.clock import Clock
from kvstore.config import StorageUrl, StoreSettings
from kvstore.objects.base import ObjectStore
from kvstore.objects.memory import MemoryStore
from kvstore.objects.s3 import S3Store
from kvstore.objects.settings import S3Settings


@asynccontextmanager
async def open_store(url: StorageUrl, settings: StoreSettings, clock: Clock) -> AsyncIterator[ObjectStore]:
    """The bare store a URL names."""
    if url.scheme == "memory":
        yield MemoryStore.named(url.host, clock)
        return
    async with S3Store.open(s3_settings(url, settings), clock=clock) as store:
        yield store


def s3_settings(url: StorageUrl, settings: StoreSettings) -> S3Settings:
    """Where the bucket of an `s3://` URL is. A custom endpoint is addressed by path, AWS by host, unless the URL says so."""
    return S3Settings(
        bucket=url.host,
        endpoint=url.endpoint,
        region=url.region or "us-east-1",
        addressing=url.addressing or ("path" if url.endpoint else "virtual"),
        ca_bundle=url.ca_bundle,
        allow_http=url.allow_http,
        instance_metadata=settings.instance_metadata,
        timeout_s=float(settings.timeout),
        max_inflight_bytes=int(settings.inflight),
        sse=settings.sse,
        sse_kms_key=settings.sse_kms_key,
    )
