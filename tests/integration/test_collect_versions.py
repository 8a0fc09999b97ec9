"""A bucket that keeps old versions (B52): a warning, and cleaning when told to, only under the root."""

import pytest

from kvstore import api
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import load
from kvstore.lifecycle.direct import DirectCollector
from kvstore.objects import CREATE, OVERWRITE, S3Store
from kvstore.objects.admin import BucketAdmin
from kvstore.repo.testing import Shelf, commit, opened, tiny

NS = tiny()
NOW = api.Collect(now=True)


@pytest.fixture
async def admin(seaweed):
    bucket = f"versioned-{RandomIds().new()[:8]}"
    async with BucketAdmin.open(seaweed.settings(bucket=bucket), seaweed.credentials) as admin:
        await admin.create()
        await admin._ask("put_bucket_versioning", VersioningConfiguration={"Status": "Enabled"})
        yield admin


async def versions(admin, prefix) -> tuple[int, int, int]:
    """(current, noncurrent, delete markers) under a prefix."""
    found = [page async for page in admin._versions(prefix)]
    every = [each for page in found for each in page.get("Versions", [])]
    markers = [each for page in found for each in page.get("DeleteMarkers", [])]
    current = sum(each["IsLatest"] for each in every)
    return current, len(every) - current, len(markers)


@pytest.mark.seaweed
async def test_b52_a_versioned_bucket_is_warned_of_and_cleaned_when_told_to(seaweed, admin, root, monkeypatch):
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    where = admin._settings
    clock, ids = SystemClock(), RandomIds()
    url = f"s3://{where.bucket}/r?endpoint={seaweed.endpoint}"
    async with S3Store.open(where, credentials=lambda: seaweed.credentials) as store:
        await store.put("elsewhere", b"1", CREATE)
        await store.put("elsewhere", b"2", OVERWRITE)
        async with opened(store, clock, ids) as repo:
            await repo.put_namespace(NS)
            await commit(repo, Shelf(), "s", range(8), 0, NS)
            await commit(repo, Shelf(), "t", range(100, 140), 0, NS)
            await repo.sessions.delete("default", "t")
            async with DirectCollector.open(load(flags={"store.url": url}).settings, clock, ids) as direct:
                warned = await direct.run(NOW)
                assert (warned.blocks_deleted, warned.purged) == (10, 0)
                (warning,) = warned.warnings
                assert "keeps old versions" in warning
                assert "--purge-versions" in warning
                _, noncurrent, markers = await versions(admin, "r/")
                assert noncurrent >= 10
                assert markers >= 10
                assert (await direct.run(api.Collect(dry_run=True, purge_versions=True))).purged == 0
                before = {meta.key: meta.etag async for page in store.list("") for meta in page}
                purged = await direct.run(api.Collect(purge_versions=True))
                assert purged.purged >= noncurrent + markers
                assert purged.warnings == []
            assert (await repo.sessions.get("default", "s")).tokens == 8
        left = {meta.key: meta.etag async for page in store.list("") for meta in page}
        assert left.keys() == before.keys()
        assert (await versions(admin, "r/blocks/"))[1:] == (0, 0)
        assert (await versions(admin, "r/manifests/"))[1:] == (0, 0)
        assert await versions(admin, "elsewhere") == (1, 1, 0)


class Recorded(BucketAdmin):
    """Pages of a listing that was written down, and what was deleted of it."""

    def __init__(self, pages):
        self.pages, self.deleted = pages, []

    async def _ask(self, operation, **arguments):
        if operation == "list_object_versions":
            at = int(arguments.get("KeyMarker", 0))
            more = {"IsTruncated": True, "NextKeyMarker": at + 1} if at + 1 < len(self.pages) else {}
            versions, markers = self.pages[at]
            left = [[each for each in some if (each["Key"], each["VersionId"]) not in self.deleted] for some in (versions, markers)]
            return {"Versions": left[0], "DeleteMarkers": left[1], **more}
        objects = [(each["Key"], each["VersionId"]) for each in arguments["Delete"]["Objects"]]
        failed = [pair for pair in objects if pair[1] == "stays"]
        self.deleted += [pair for pair in objects if pair not in failed]
        return {"Errors": [{"Key": key} for key, _ in failed]}


def version(key, name, latest=False):
    return {"Key": key, "VersionId": name, "IsLatest": latest}


async def test_a_marker_goes_only_after_every_version_below_it_also_across_pages():
    """A marker that went first would bring an older version of a deleted object back."""
    admin = Recorded(
        [
            (
                [version("a", "1"), version("b", "stays")],
                [version("a", "2", True), version("b", "2", True), version("c", "m", True)],
            ),
            ([version("c", "stays"), version("d", "2", True), version("d", "1")], [version("d", "0"), version("e", "m", True)]),
        ]
    )
    assert await admin.purge("") == 5
    assert sorted(admin.deleted) == [("a", "1"), ("a", "2"), ("d", "0"), ("d", "1"), ("e", "m")]
