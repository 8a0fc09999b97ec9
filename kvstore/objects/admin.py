"""Rare calls about the bucket itself: make it, see to its versioning and to abandoned uploads, tag it.

The only module that imports aiobotocore (extra `node`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from kvstore.errors import KVTierError
from kvstore.objects.answers import Refusal, no_answer
from kvstore.objects.credentials import Credentials
from kvstore.objects.settings import S3Settings

_RULE: Final = "kvtier-abort-incomplete-multipart"


class BucketReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `BucketAdmin.prepare` found and did.

    Attributes:
        created: The bucket was not there.
        versioning: `Enabled`, `Suspended` or `Off`; empty where the store does not say.
        lifecycle: The rule that ends abandoned uploads is in place.
        warnings: Sentences for an operator.
    """

    created: bool
    versioning: str
    lifecycle: bool
    warnings: tuple[str, ...]


class BucketAdmin:
    """Calls about one bucket. Open it with `BucketAdmin.open`."""

    def __init__(self, client: Any, settings: S3Settings) -> None:
        self._client, self._settings = client, settings

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: S3Settings, credentials: Credentials) -> AsyncIterator[BucketAdmin]:
        """Connect lazily, with exactly these credentials: the chain is not asked."""
        config = AioConfig(
            connect_timeout=5,
            read_timeout=settings.timeout_s,
            retries={"mode": "standard", "total_max_attempts": 3},
            s3={"addressing_style": settings.addressing},
            # The default of recent SDKs adds checksums that some S3-compatible stores store as part of the object.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            proxies={},
        )
        async with get_session().create_client(
            "s3",
            region_name=settings.region,
            endpoint_url=settings.service().url,
            aws_access_key_id=credentials.access_key,
            aws_secret_access_key=credentials.secret_key,
            aws_session_token=credentials.token or None,
            verify=settings.ca_bundle or None,
            config=config,
        ) as client:
            yield cls(client, settings)

    async def prepare(self) -> BucketReport:
        """Make the bucket if it is missing, and see that it suits: every step but the first is optional for the store.

        Raises:
            KVTierError: The bucket cannot be made or reached: no rights, a name that is taken, no answer.
        """
        created = await self.create()
        warnings = []
        versioning = await self.versioning()
        if versioning == "Enabled":
            warnings.append(
                f"bucket {self._settings.bucket} keeps old versions: deleted blocks go on costing money until a lifecycle rule"
                " expires noncurrent versions"
            )
        lifecycle = await self.abort_abandoned_uploads()
        if not lifecycle:
            warnings.append(f"the store of bucket {self._settings.bucket} took no lifecycle rule against abandoned uploads")
        return BucketReport(created=created, versioning=versioning, lifecycle=lifecycle, warnings=tuple(warnings))

    async def create(self) -> bool:
        """Make the bucket; False if it was there."""
        try:
            await self._reach()
        except KVTierError as error:
            if error.kind != "no_bucket":
                raise
        else:
            return False
        region = self._settings.region
        place = {} if region == "us-east-1" or self._settings.endpoint else {"LocationConstraint": region}
        try:
            await self._ask("create_bucket", **({"CreateBucketConfiguration": place} if place else {}))
        except KVTierError as refused:
            try:
                await self._reach()  # somebody else may have made it at the same time
            except KVTierError:
                raise refused from None
            return False
        return True

    async def _reach(self) -> None:
        # Not HEAD: its answer has no body, hence no word about what is wrong.
        await self._ask("list_objects_v2", MaxKeys=1)

    async def versioning(self) -> str:
        """`Enabled`, `Suspended`, `Off`, or empty where the store does not say."""
        try:
            return str((await self._ask("get_bucket_versioning")).get("Status", "Off"))
        except KVTierError:
            return ""

    async def abort_abandoned_uploads(self, days: int = 7) -> bool:
        """See that multipart uploads nobody finished are ended, beside whatever rules there are. False: not supported.

        kvtier starts none itself; other programs that write to the bucket may.
        """
        try:
            rules = (await self._ask("get_bucket_lifecycle_configuration")).get("Rules", [])
        except KVTierError as error:
            if error.facts.get("status") != 404:
                return False
            rules = []
        if any("AbortIncompleteMultipartUpload" in rule for rule in rules):
            return True
        ours = {
            "ID": _RULE,
            "Status": "Enabled",
            "Filter": {"Prefix": ""},
            "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": days},
        }
        try:
            await self._ask("put_bucket_lifecycle_configuration", LifecycleConfiguration={"Rules": [*rules, ours]})
        except KVTierError:
            return False
        return True

    async def tags(self) -> dict[str, str]:
        """The bucket's tags."""
        try:
            found = await self._ask("get_bucket_tagging")
        except KVTierError as error:
            if error.facts.get("status") != 404:
                raise
            return {}
        return {tag["Key"]: tag["Value"] for tag in found["TagSet"]}

    async def tag(self, tags: Mapping[str, str]) -> None:
        """Add tags to those that are there."""
        merged = {**await self.tags(), **tags}
        await self._ask("put_bucket_tagging", Tagging={"TagSet": [{"Key": k, "Value": v} for k, v in merged.items()]})

    async def open_uploads(self) -> int:
        """Multipart uploads that were started and not finished, up to 1,000."""
        return len((await self._ask("list_multipart_uploads")).get("Uploads", []))

    async def purge(self, prefix: str) -> int:
        """Delete the noncurrent versions under a key prefix, then the delete markers that cover nothing any more.

        What a reader sees never changes: a marker goes only after every version below it, so that no older version of an object
        comes back. Returns how many versions and markers were deleted.
        """
        gone = 0
        async for page in self._versions(prefix):
            gone += await self._delete_versions([each for each in page.get("Versions", []) if not each["IsLatest"]])
        before = ""  # the last key of the page before: its versions may go on in this one
        async for page in self._versions(prefix):
            versions, markers = page.get("Versions", []), page.get("DeleteMarkers", [])
            last = max((each["Key"] for each in [*versions, *markers]), default=before)
            covering = {each["Key"] for each in versions} | {before} | ({last} if page.get("IsTruncated") else set())
            gone += await self._delete_versions([each for each in markers if not each["IsLatest"] or each["Key"] not in covering])
            before = last
        return gone

    async def _versions(self, prefix: str) -> AsyncIterator[dict[str, Any]]:
        """Pages of versions and delete markers under a prefix, by key."""
        place: dict[str, Any] = {}
        while True:
            page = await self._ask("list_object_versions", Prefix=prefix, **place)
            yield page
            if not page.get("IsTruncated"):
                return
            place = {"KeyMarker": page["NextKeyMarker"], "VersionIdMarker": page.get("NextVersionIdMarker", "")}

    async def _delete_versions(self, versions: Sequence[Mapping[str, Any]]) -> int:
        if not versions:
            return 0
        objects = [{"Key": each["Key"], "VersionId": each["VersionId"]} for each in versions]
        answer = await self._ask("delete_objects", Delete={"Objects": objects, "Quiet": True})
        return len(objects) - len(answer.get("Errors", []))

    async def _ask(self, operation: str, **arguments: Any) -> dict[str, Any]:
        what = f"{operation} {self._settings.bucket}"
        try:
            answer: dict[str, Any] = await getattr(self._client, operation)(Bucket=self._settings.bucket, **arguments)
        except ClientError as error:
            said = error.response.get("Error", {})
            status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
            raise Refusal(status, str(said.get("Code", "")), str(said.get("Message", ""))[:300]).error(what) from None
        except BotoCoreError as error:
            raise no_answer(what, str(error)[:300]) from error
        return answer
