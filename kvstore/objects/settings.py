"""Where an S3 bucket is and how to reach it: data only; `kvstore.objects.s3` opens it."""

from __future__ import annotations

import ipaddress
import re
from typing import Final, Literal
from urllib.parse import urlsplit

import msgspec

from kvstore.errors import Invalid

_BUCKET: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_REGION: Final = re.compile(r"[A-Za-z0-9-]{1,40}")
_KMS_KEY: Final = re.compile(r"[A-Za-z0-9:/_.-]{1,2048}")
_SLOWEST: Final = 1 << 20  # bytes per second: a link slower than this counts as broken


class Endpoint(msgspec.Struct, frozen=True):
    """The one host every request of a store goes to. `path` is what stands before the key, without a slash at its end."""

    tls: bool
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """The Host header: the port only where it is not the scheme's own."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return name if self.port == (443 if self.tls else 80) else f"{name}:{self.port}"

    @property
    def url(self) -> str:
        """Scheme and authority."""
        return f"{'https' if self.tls else 'http'}://{self.authority}"


class S3Settings(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket. Requests go to it directly: proxies of the environment are not asked.

    Attributes:
        bucket: Its name.
        endpoint: URL of the service; empty means AWS in `region`.
        region: Part of every signature.
        addressing: `path` (`host/bucket/key`) or `virtual` (`bucket.host/key`).
        ca_bundle: PEM file with authorities to trust besides the system's.
        allow_http: Permit `http://` on an address that is not loopback.
        instance_metadata: Permit the cloud's instance-metadata address as a source of credentials.
        timeout_s: Deadline of a request, besides a second for each MiB it carries.
        max_inflight_bytes: Most bytes under way in either direction; more waits.
        connections: Threads, and so connections, that move large objects.
        sse: What every PUT and COPY asks the store to encrypt with: its own keys (`s3`), or a key of its key service (`kms`).
        sse_kms_key: Which; empty is the bucket's own.
    """

    bucket: str
    endpoint: str = ""
    region: str = "us-east-1"
    addressing: Literal["path", "virtual"] = "path"
    ca_bundle: str = ""
    allow_http: bool = False
    instance_metadata: bool = False
    timeout_s: float = 30.0
    max_inflight_bytes: int = 256 << 20
    connections: int = 16
    sse: Literal["", "s3", "kms"] = ""
    sse_kms_key: str = ""

    def __post_init__(self) -> None:
        if not _BUCKET.fullmatch(self.bucket):
            raise Invalid(f"bucket {self.bucket!r} is no bucket name: 3 to 63 letters, digits, dots and dashes")
        if not _REGION.fullmatch(self.region):
            raise Invalid(f"region {self.region!r} is no region name, such as us-east-1")
        if self.timeout_s <= 0 or self.max_inflight_bytes < 1 or self.connections < 1:
            raise Invalid("timeout_s, max_inflight_bytes and connections must be positive")
        if self.sse_kms_key and (self.sse != "kms" or not _KMS_KEY.fullmatch(self.sse_kms_key)):
            raise Invalid("sse_kms_key is the id or ARN of a key, and goes with sse = kms")
        service = self.service()
        if not service.tls and not self.allow_http and not _loopback(service.host):
            raise Invalid(
                f"endpoint {self.endpoint} is plain http to another machine: use https, or allow_http=true on a network you trust"
            )

    def service(self) -> Endpoint:
        """The service's own address, for calls about buckets.

        Raises:
            Invalid: `endpoint` is no plain http or https URL.
        """
        try:
            url = urlsplit(self.endpoint or f"https://s3.{self.region}.amazonaws.com")
            port = url.port
        except ValueError:
            raise Invalid(f"endpoint {self.endpoint!r} is no URL such as https://s3.example.com") from None
        if url.scheme not in {"http", "https"} or not url.hostname or url.path not in {"", "/"} or url.query or url.fragment:
            raise Invalid(f"endpoint {self.endpoint!r} is no URL such as https://s3.example.com (without a path)")
        if url.username or url.password:
            raise Invalid("the endpoint must not carry credentials: set them in the environment or a profile")
        tls = url.scheme == "https"
        return Endpoint(tls, url.hostname, port or (443 if tls else 80), "")

    def address(self) -> Endpoint:
        """Where requests for this bucket's keys go."""
        service = self.service()
        if self.addressing == "virtual":
            return Endpoint(service.tls, f"{self.bucket}.{service.host}", service.port, "")
        return Endpoint(service.tls, service.host, service.port, f"/{self.bucket}")

    @property
    def encryption(self) -> str:
        """As S3 spells it; empty for none."""
        return {"": "", "s3": "AES256", "kms": "aws:kms"}[self.sse]

    def encryption_headers(self) -> dict[str, str]:
        """Of each request that writes an object."""
        headers = {"x-amz-server-side-encryption": self.encryption} if self.sse else {}
        return headers | ({"x-amz-server-side-encryption-aws-kms-key-id": self.sse_kms_key} if self.sse_kms_key else {})

    def deadline_s(self, nbytes: int) -> float:
        """How long a request that carries so many bytes may take, in seconds."""
        return self.timeout_s + nbytes / _SLOWEST


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
