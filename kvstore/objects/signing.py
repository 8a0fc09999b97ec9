"""AWS Signature Version 4, for the requests that kvtier sends on sockets of its own.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from typing import Final
from urllib.parse import quote

from kvstore.objects.credentials import Credentials

UNSIGNED: Final = "UNSIGNED-PAYLOAD"
"""Large bodies are not hashed for the signature: TLS, and the digest inside each block, protect them."""


def encode_path(path: str) -> str:
    """A key as it stands in a request line and in a signature."""
    return quote(path, safe="/-_.~")


def encode_query(query: Sequence[tuple[str, str]]) -> str:
    """A query in the canonical order and escaping that the signature prescribes."""
    return "&".join(f"{quote(k, safe='-_.~')}={quote(v, safe='-_.~')}" for k, v in sorted(query))


def sign(
    credentials: Credentials,
    region: str,
    *,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    payload: str,
    at: float,
) -> dict[str, str]:
    """All headers of the request, with `Authorization`.

    Args:
        credentials: Whose request it is.
        region: Of the bucket.
        method: Upper case.
        host: The Host header.
        path: As `encode_path` gives it.
        query: As `encode_query` gives it.
        headers: Further headers, lower case; all of them are signed.
        payload: SHA-256 of the body in hex, or `UNSIGNED`.
        at: Seconds since the epoch; a store refuses more than 15 minutes of difference from its own clock.
    """
    stamp = _stamp(int(at))
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    signed = {**headers, "host": host, "x-amz-content-sha256": payload, "x-amz-date": stamp}
    if credentials.token:
        signed["x-amz-security-token"] = credentials.token
    names = sorted(signed)
    canonical = "\n".join([method, path, query, *(f"{n}:{signed[n].strip()}" for n in names), "", ";".join(names), payload])
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.digest(_key(credentials.secret_key, scope), to_sign.encode(), "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


@lru_cache(maxsize=4)
def _stamp(at: int) -> str:
    """A second."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y%m%dT%H%M%SZ")


@lru_cache(maxsize=4)
def _key(secret: str, scope: str) -> bytes:
    """The key of a day."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key
