"""The storage URL: one string that an engine's config can carry."""

from __future__ import annotations

from typing import Any, Final, Literal, get_type_hints
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import msgspec

from kvstore.config.quantities import Bytes, convert
from kvstore.config.sections import CodecName, Durability
from kvstore.errors import Invalid
from kvstore.keys import Keys, check_id

SCHEMES: Final = ("kvtier+unix", "kvtier", "s3", "memory")
URL_KEYS: Final = (
    "endpoint", "region", "addressing", "ca_bundle", "allow_http", "dram", "nvme", "nvme_path", "codec", "tenant", "durability",
    "device", "device_bytes", "key_file", "tls", "token_file", "client_cert", "client_key",
)  # fmt: skip
_NODES: Final = {  # how whoever has a browser's address names a node
    "http": "for a node write kvtier://HOST:PORT",
    "https": "for a node write kvtier://HOST:PORT?tls=true, and ca_bundle=FILE for an authority of your own",
}
_OVER_TCP: Final = ("tls", "token_file", "client_cert", "client_key")


class StorageUrl(msgspec.Struct, frozen=True, kw_only=True):
    """One string that says where a client stores KV: a node (`kvtier+unix`, `kvtier`), or a bucket that it embeds (`s3`, `memory`).

    Attributes:
        host: Bucket of `s3`, name of `memory`, host of `kvtier`.
        path: Socket path, or key prefix in the bucket.
        port: Of `kvtier`; 7878 by default.
        tenant: Whose KV; `default` unless the URL says otherwise.
        device: Where an embedded node keeps blocks for the engine, as torch spells it (`cuda:0`; `cpu` runs the same code).
        device_bytes: How many bytes of that device's memory.
        key_file: Master keys: what an embedded node stores is sealed, in the bucket and on its disk.
        tls: Whether `kvtier` is spoken over TLS; `ca_bundle` names authorities instead of the system's.
        token_file: File that holds an access token for the node, instead of KVTIER_TOKEN or KVTIER_TOKEN_FILE.
        client_cert: Certificate that the client shows, where the node asks for one; PEM.
        client_key: Its key.
    """

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""
    endpoint: str = ""
    region: str = ""
    addressing: Literal["path", "virtual", ""] = ""
    ca_bundle: str = ""
    allow_http: bool = False
    dram: Bytes = Bytes(0)
    nvme: Bytes = Bytes(0)
    nvme_path: str = ""
    codec: CodecName | Literal[""] = ""
    tenant: str = "default"
    durability: Durability | Literal[""] = ""
    device: str = ""
    device_bytes: Bytes = Bytes(1 << 30)
    key_file: str = ""
    tls: bool = False
    token_file: str = ""
    client_cert: str = ""
    client_key: str = ""

    @classmethod
    def parse(cls, text: str) -> StorageUrl:
        """Take a URL apart.

        Raises:
            Invalid: Unknown scheme or key (the message names the known ones), credentials in the URL, or a part that is missing.
        """
        try:
            parts = urlsplit(text)
        except ValueError as error:  # brackets that hold no IPv6 address
            raise Invalid(f"the storage URL is no URL: {error}") from None
        if parts.scheme not in SCHEMES:
            raise Invalid(
                f"storage URL scheme {parts.scheme!r} is unknown; known: {', '.join(f'{s}://' for s in SCHEMES)}",
                remedy=_NODES.get(parts.scheme, ""),
            )
        if parts.username is not None or parts.password is not None:
            raise Invalid(
                "a storage URL must not carry credentials: use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            )
        fields: dict[str, Any] = {}
        hints = get_type_hints(cls)
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key not in URL_KEYS:
                raise Invalid(f"storage URL key {key!r} is unknown; known: {', '.join(URL_KEYS)}")
            fields[key] = convert(hints[key], value, f"storage URL key {key}")
        check_id(fields.get("tenant", "default"), "tenant")
        try:
            port = parts.port or 0
        except ValueError:
            raise Invalid("storage URL port must be 0 to 65535") from None
        url = cls(scheme=parts.scheme, host=parts.hostname or "", port=port, path=unquote(parts.path), **fields)
        return url._checked(parts.netloc)

    def store_url(self) -> str:
        """This bucket as `[store] url` says it: without what describes a node."""
        keys = ("endpoint", "region", "addressing", "ca_bundle")
        query = {key: getattr(self, key) for key in keys if getattr(self, key)} | (
            {"allow_http": "true"} if self.allow_http else {}
        )
        path = f"/{self.path}" if self.path else ""
        return f"{self.scheme}://{self.host}{path}" + (f"?{urlencode(query)}" if query else "")

    def _checked(self, netloc: str) -> StorageUrl:
        if "@" in self.endpoint:
            raise Invalid("storage URL key endpoint must not carry credentials")
        if self.device and self.scheme in {"kvtier+unix", "kvtier"}:
            raise Invalid(
                "storage URL key device is for s3:// and memory://: a node has no access to memory of an engine's process"
            )
        if self.key_file and self.scheme in {"kvtier+unix", "kvtier"}:
            raise Invalid("storage URL key key_file is for s3:// and memory://: a node has [encryption] key_file")
        if self.scheme != "kvtier" and (said := [key for key in _OVER_TCP if getattr(self, key)]):
            raise Invalid(
                f"storage URL key {said[0]} is for kvtier://: a socket knows its users, and a bucket has its own credentials"
            )
        if (self.client_cert or (self.ca_bundle and self.scheme == "kvtier")) and not self.tls:
            raise Invalid("certificates in the storage URL are of use with tls=true only")
        if bool(self.client_cert) != bool(self.client_key):
            raise Invalid("storage URL keys client_cert and client_key go together")
        if self.scheme == "kvtier+unix":
            if netloc or not self.path.startswith("/") or self.path == "/":
                raise Invalid("kvtier+unix needs the absolute path of a socket: kvtier+unix:///run/kvtier/node.sock")
            return self
        if not self.host:
            raise Invalid(f"{self.scheme}:// needs {'a bucket' if self.scheme == 's3' else 'a name'} after the slashes")
        if self.scheme == "kvtier":
            return msgspec.structs.replace(self, port=self.port or 7878)
        root = self.path.strip("/")
        Keys(root)  # refuses a prefix that could not be a key
        return msgspec.structs.replace(self, host=netloc, port=0, path=root)
