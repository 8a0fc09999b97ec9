"""What a node needs of its bucket, and whether it is there: credentials, guarantees, clock, versioning, the root itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import ClassVar, Final, ParamSpec, TypeVar

import msgspec

from kvstore.cli.machine import Finding
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import Settings, StorageUrl
from kvstore.errors import Denied, KVTierError
from kvstore.keys import Keys
from kvstore.model import SEALED_VERSION, Body, Epoch, Format, parse
from kvstore.objects import Absent, Got, ObjectStore, S3Settings, S3Store, Unchanged, probe
from kvstore.objects.admin import BucketAdmin
from kvstore.objects.credential_chain import chain
from kvstore.objects.credentials import Credentials
from kvstore.objects.opening import s3_settings
from kvstore.repo.root import Root
from kvstore.sealing import sealing_of

P = ParamSpec("P")
R = TypeVar("R")
_SKEW_WARN_S: Final = 60.0
_SKEW_FAIL_S: Final = 300.0  # stores refuse signatures from 900 s on


async def examine(settings: Settings) -> AsyncIterator[Finding]:
    """Everything that can be known about the bucket. Stops at the first thing that makes the next ones pointless."""
    readable = True
    try:
        sealing_of(settings.encryption, _here, 0)
    except KVTierError as error:  # told even where the store cannot be asked
        readable = False
        yield _failed("encryption", error)
    if not settings.store.url:
        yield Finding(
            name="store",
            status="warn",
            detail="none: local tiers and peers only",
            remedy="sessions need one: set store.url. For the store of `kvtier up` name its folder with --data",
        )
        return
    url = StorageUrl.parse(settings.store.url)
    if url.scheme != "s3":
        yield Finding(name="store", status="warn", detail=f"{settings.store.url} is for tests", remedy="use an s3:// URL")
        return
    where = s3_settings(url, settings.store)
    try:
        credentials = await asyncio.to_thread(chain(where.region, instance_metadata=where.instance_metadata))
    except Denied as error:
        yield _failed("credentials", error)
        return
    yield _credentials(credentials)
    sound = True
    async with S3Store.open(where) as store:
        if where.sse:
            finding = await _server_side(store, Keys(url.path), where)
            yield finding
            if finding.status == "fail":
                return
        async for finding in _store(store, Keys(url.path), where):
            sound = sound and finding.status != "fail"
            yield finding
        if sound and readable:
            yield await _encryption(store, Keys(url.path), settings)
    if sound:
        yield await _versioning(where, credentials)


def _credentials(found: Credentials) -> Finding:
    shown = f"{found.access_key[:4]}...{found.access_key[-4:]}" if len(found.access_key) > 8 else "a short key"
    kind = "temporary" if found.token else "permanent"
    return Finding(name="credentials", status="ok", detail=f"{kind}: {shown}")


async def _store(store: ObjectStore, keys: Keys, where: S3Settings) -> AsyncIterator[Finding]:
    clock, ids = SystemClock(), RandomIds()
    try:
        found = await probe(store, keys.probe(ids.new()), clock, ids)
    except KVTierError as error:
        if error.kind in {"unavailable", "timeout"}:  # whose usual remedy is to ask the doctor
            service = where.endpoint or f"AWS in {where.region}"
            remedy = f"see that the store runs at {service}, and that this host can reach it; or correct store.url"
            yield Finding(name="guarantees", status="fail", detail=f"{error.kind}: {error.message}", remedy=remedy)
        else:
            yield _failed("guarantees", error)
        return
    yield Finding(
        name="guarantees", status="ok", detail="conditional writes, strong reads and lists hold; one of several writers wins"
    )
    skew = abs(found.clock_skew_s)
    yield Finding(
        name="clock",
        status="ok" if skew < _SKEW_WARN_S else "warn" if skew < _SKEW_FAIL_S else "fail",
        detail=f"{skew:.0f} s from the store's",
        remedy="" if skew < _SKEW_WARN_S else "set this host's clock (NTP): stores refuse requests signed 15 minutes off",
    )
    if not found.conditional_get:
        yield Finding(
            name="conditional reads",
            status="warn",
            detail="an unchanged object is sent again",
            remedy="none needed: resuming a session costs a few kilobytes more",
        )
    yield await _root(store, keys)


async def _root(store: ObjectStore, keys: Keys) -> Finding:
    """Whether the prefix is empty, one of ours, damaged, or partly older than the rest of it."""
    where = keys.root or "the whole bucket"
    restore = "restore the whole prefix to one point in time into an empty one; never bring back an older `epoch` alone"
    try:
        form, epoch, hint = [await store.get(key) for key in (keys.format, keys.epoch, keys.collect_hint)]
        if isinstance(form, Got) and isinstance(epoch, Got):
            now = parse(epoch.data, Epoch, keys.epoch).epoch
            sealed = parse(form.data, Format, keys.format).v == SEALED_VERSION
            seen = _collected(hint, keys.collect_hint)
            if seen <= now:
                how = "sealed sessions" if sealed else "sessions"
                return Finding(name="root", status="ok", detail=f"{where} holds {how} of kvtier, epoch {now}")
            detail = (
                f"epoch is {now}, and a collection went by {seen}: an older copy was restored, and collections may delete too much"
            )
            return Finding(name="root", status="fail", detail=detail, remedy=f"stop every node; {restore}")
    except KVTierError as error:
        return _failed("root", error)
    if not isinstance(form, Got) and not isinstance(epoch, Got):
        return Finding(name="root", status="ok", detail=f"{where} is new; the first node initialises it")
    missing = keys.epoch if isinstance(form, Got) else keys.format
    return Finding(name="root", status="fail", detail=f"{missing} is missing", remedy=restore)


async def _server_side(store: S3Store, keys: Keys, where: S3Settings) -> Finding:
    try:
        await store.check_encryption(keys.probe(RandomIds().new()))
    except KVTierError as error:
        return _failed("sse", error)
    return Finding(name="sse", status="ok", detail=f"the store encrypts what it is given ({where.encryption})")


async def _encryption(store: ObjectStore, keys: Keys, settings: Settings) -> Finding:
    """Whether key file and root belong together."""
    clock, ids = SystemClock(), RandomIds()
    try:
        sealing = sealing_of(settings.encryption, _here, 0)
        form = await store.get(keys.format)
        if isinstance(form, Got):
            await Root.open(store, keys, clock, ids, init=False, sealing=sealing)
    except KVTierError as error:
        return _failed("encryption", error)
    if sealing is None:
        return Finding(name="encryption", status="ok", detail="none by kvtier; the store may encrypt its disks")
    return Finding(name="encryption", status="ok", detail=f"master key {sealing.masters.current.id}")


async def _here(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    return fn(*args, **kwargs)


class _Collected(msgspec.Struct, frozen=True):
    epoch: int


class _Hint(Body, frozen=True):
    """What is of interest in `hints/collect`."""

    SEGMENTS: ClassVar[int] = 2
    collected: _Collected


def _collected(hint: Got | Absent | Unchanged, key: str) -> int:
    """The epoch that the last collection went by; 0 where that is not known."""
    with suppress(KVTierError):
        return parse(hint.data, _Hint, key).collected.epoch if isinstance(hint, Got) else 0
    return 0


async def _versioning(where: S3Settings, credentials: Credentials) -> Finding:
    async with BucketAdmin.open(where, credentials) as admin:
        state = await admin.versioning()
    if state == "Enabled":
        return Finding(
            name="versioning",
            status="warn",
            detail=f"bucket {where.bucket} keeps old versions of registers and deleted blocks",
            remedy="switch it off, or expire noncurrent versions by a lifecycle rule: they cost money until then",
        )
    return Finding(name="versioning", status="ok", detail=state or "the store does not say")


def _failed(name: str, error: KVTierError) -> Finding:
    return Finding(name=name, status="fail", detail=f"{error.kind}: {error.message}", remedy=error.remedy)
