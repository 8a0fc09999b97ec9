"""Makes a bucket fit for nodes, as who runs the store: the bucket, a user that may use nothing else, a rule for abandoned uploads.

The only module that imports minio-py (extra `bootstrap`). What a node does itself when it meets a missing bucket is in
:mod:`kvstore.objects.admin`; this also makes the user that nodes are, which takes the rights that nodes are not to have.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, Literal

import msgspec
import urllib3
from minio import Minio, MinioAdmin
from minio.commonconfig import ENABLED, Filter
from minio.credentials.providers import StaticProvider
from minio.error import InvalidResponseError, MinioAdminException, S3Error, ServerError
from minio.lifecycleconfig import AbortIncompleteMultipartUpload, LifecycleConfig, Rule

from kvstore.errors import KVTierError
from kvstore.keys import Keys
from kvstore.objects.answers import Refusal, no_answer
from kvstore.objects.credentials import Credentials
from kvstore.objects.settings import S3Settings

_RULE: Final = "kvtier-abort-incomplete-multipart"
_APPLIED: Final = "XMinioAdminPolicyChangeAlreadyApplied"
_MISSING: Final = frozenset({"NoSuchLifecycleConfiguration", "NoSuchKey"})


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was seen to.

    Attributes:
        outcome: `made`, `set` (again), `there` already, or `unsupported` by this store.
        detail: For people.
    """

    what: Literal["bucket", "uploads", "policy", "user", "access"]
    outcome: Literal["made", "set", "there", "unsupported"]
    detail: str = ""


def policy(bucket: str, root: str) -> dict[str, object]:
    """What nodes need, as an IAM policy: list the bucket; read, write and delete under `root` (everywhere where that is "")."""
    under = f"{root}/*" if root else "*"
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Effect": "Allow",
                "Action": ["s3:ListBucket", "s3:GetBucketLocation", "s3:GetBucketVersioning"],
                "Resource": [f"arn:aws:s3:::{bucket}"],
            },
            {
                "Effect": "Allow",
                "Action": ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"],
                "Resource": [f"arn:aws:s3:::{bucket}/{under}"],
            },
        ],
    }


def bootstrap(where: S3Settings, root: str, owner: Credentials, user: Credentials | None, *, days: int = 7) -> Iterator[Step]:
    """See that everything is there; what is there already is left, so that it can be run at every start. Blocking.

    Args:
        where: The bucket.
        root: Prefix of the keys that nodes use.
        owner: May administer the store.
        user: The keys that nodes are to have, chosen by whoever runs this; None makes no user.
        days: After so many an upload that nobody finished is ended.

    Yields:
        What was seen to, in order.

    Raises:
        KVTierError: The bucket cannot be made or reached; or the user's keys do not open it, with a remedy.
    """
    with _errors(f"bucket {where.bucket}"):
        client = _client(where, owner)
        there = client.bucket_exists(where.bucket)
        if not there:
            try:
                client.make_bucket(where.bucket, None if where.endpoint else where.region)
            except S3Error as error:
                if error.code not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:  # made by somebody else meanwhile
                    raise
    yield Step(what="bucket", outcome="there" if there else "made", detail=where.bucket)
    yield _uploads(client, where.bucket, days)
    if user is not None:
        yield from _user(where, root, owner, user)
        yield _access(where, root, user)


def _uploads(client: Minio, bucket: str, days: int) -> Step:
    """A rule beside whatever rules there are."""
    about = f"uploads that nobody finished end after {days} days"
    try:
        rules = list(_rules(client, bucket))
        if any(rule.abort_incomplete_multipart_upload for rule in rules):
            return Step(what="uploads", outcome="there", detail=about)
        ours = Rule(
            ENABLED,
            rule_filter=Filter(prefix=""),
            rule_id=_RULE,
            abort_incomplete_multipart_upload=AbortIncompleteMultipartUpload(days_after_initiation=days),
        )
        client.set_bucket_lifecycle(bucket, LifecycleConfig([*rules, ours]))
        if not any(rule.abort_incomplete_multipart_upload for rule in _rules(client, bucket)):
            return Step(what="uploads", outcome="unsupported", detail="the store took the rule and does not have it")
    except (S3Error, ServerError, InvalidResponseError, ValueError) as error:
        # MinIO has no such action: it ends uploads itself, a day after they were begun, unless told otherwise.
        said = error.code if isinstance(error, S3Error) else type(error).__name__
        return Step(what="uploads", outcome="unsupported", detail=f"the store takes no such rule ({said})")
    return Step(what="uploads", outcome="made", detail=about)


def _rules(client: Minio, bucket: str) -> list[Rule]:
    try:
        found = client.get_bucket_lifecycle(bucket)
    except S3Error as error:
        if error.code not in _MISSING:
            raise
        return []
    return list(found.rules) if found else []


def _user(where: S3Settings, root: str, owner: Credentials, user: Credentials) -> Iterator[Step]:
    """By MinIO's own API for administrators, where the store has it."""
    name = f"kvtier-{where.bucket}"
    service = where.service()
    admin = MinioAdmin(
        endpoint=service.authority,
        credentials=StaticProvider(owner.access_key, owner.secret_key, owner.token or None),
        region=where.region,
        secure=service.tls,
        http_client=_pool(where),
    )
    # Asked first, and by GET: another store could take what follows for objects of a bucket named `minio`.
    if not _administers(admin):
        detail = "the store has no API of MinIO for administrators: its own configuration has to name the user and what it may"
        yield Step(what="user", outcome="unsupported", detail=detail)
        return
    with _errors("the user of nodes"):
        admin.policy_add(name, policy=policy(where.bucket, root))
        yield Step(what="policy", outcome="set", detail=name)
        admin.user_add(user.access_key, user.secret_key)
        try:
            admin.attach_policy([name], user=user.access_key)
        except MinioAdminException as error:
            if _APPLIED not in str(error):
                raise
        yield Step(what="user", outcome="set", detail=user.access_key)


def _administers(admin: MinioAdmin) -> bool:
    with suppress(MinioAdminException, ValueError, urllib3.exceptions.HTTPError):
        return isinstance(json.loads(admin.info()), dict)
    return False


def _access(where: S3Settings, root: str, user: Credentials) -> Step:
    """The user's keys open the prefix: shown by listing it, which writes nothing."""
    try:
        with _errors(f"keys {user.access_key} in bucket {where.bucket}"):
            next(iter(_client(where, user).list_objects(where.bucket, prefix=Keys(root).probe("bootstrap"))), None)
    except KVTierError as error:
        remedy = f"give the store's configuration a user with this key, who may list, read and write {where.bucket}"
        raise type(error)(error.message, kind=error.kind, remedy=remedy) from None
    return Step(what="access", outcome="there", detail=f"{user.access_key} lists {where.bucket}")


def _client(where: S3Settings, keys: Credentials) -> Minio:
    service = where.service()
    return Minio(
        service.authority,
        access_key=keys.access_key,
        secret_key=keys.secret_key,
        session_token=keys.token or None,
        secure=service.tls,
        region=where.region,
        http_client=_pool(where),
    )


def _pool(where: S3Settings) -> urllib3.PoolManager:
    """Three attempts at a store that is starting; no proxies, as for every other request to the bucket."""
    trust: dict[str, Any] = {}
    if where.service().tls:
        trust = {"ssl_context": ssl.create_default_context(cafile=where.ca_bundle or None)}
    retries = urllib3.Retry(total=3, backoff_factor=0.5, status_forcelist=[500, 502, 503, 504], raise_on_status=False)
    return urllib3.PoolManager(timeout=urllib3.Timeout(connect=5, read=where.timeout_s), retries=retries, **trust)


@contextmanager
def _errors(what: str) -> Iterator[None]:
    """The library's errors as ours, without what it quotes of requests."""
    try:
        yield
    except S3Error as error:
        raise Refusal(error.response.status, error.code or "", (error.message or "")[:300]).error(what) from None
    except MinioAdminException as error:
        raise Refusal(int(error._code), _admin_code(str(error))).error(what) from None  # noqa: SLF001  no public word for it
    except (ServerError, InvalidResponseError, urllib3.exceptions.HTTPError) as error:
        raise no_answer(what, type(error).__name__) from None


def _admin_code(text: str) -> str:
    _, _, rest = text.partition('"Code":"')
    return rest.partition('"')[0][:80]
