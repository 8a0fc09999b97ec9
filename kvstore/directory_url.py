"""Where a directory of blocks is: one string, as `mesh.directory` spells it. No password is ever in it."""

from __future__ import annotations

from typing import Final
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from kvstore.errors import Invalid

SCHEMES: Final = {"valkey": False, "redis": False, "valkeys": True, "rediss": True}
KEYS: Final = ("cluster", "ca_bundle")
USER, PASSWORD, PASSWORD_FILE = "KVTIER_DIRECTORY_USER", "KVTIER_DIRECTORY_PASSWORD", "KVTIER_DIRECTORY_PASSWORD_FILE"


class DirectoryUrl(msgspec.Struct, frozen=True, kw_only=True):
    """A Valkey or Redis: `valkey://host:port/0`, `valkeys://` with TLS; `redis://` and `rediss://` mean the same.

    Attributes:
        host: Of the server, or of any node of a cluster.
        port: The same.
        db: Number of the database; 0 in a cluster.
        tls: Whether to speak TLS, and to verify the server.
        cluster: Whether it is a cluster, whose nodes are to be found out (`?cluster=yes`).
        ca_bundle: PEM file of the authority that signed the server's certificate; the system's authorities by default.
    """

    host: str
    port: int
    db: int = 0
    tls: bool = False
    cluster: bool = False
    ca_bundle: str = ""

    @classmethod
    def parse(cls, text: str) -> DirectoryUrl:
        """Take a URL apart.

        Raises:
            Invalid: Unknown scheme or key, credentials, or a part that is missing. What it was is not repeated.
        """
        try:
            parts = urlsplit(text)
            port = parts.port or 6379
        except ValueError:
            raise Invalid("the directory's URL is no URL; write it like valkey://10.0.0.5:6379") from None
        if parts.scheme not in SCHEMES:
            raise Invalid(f"the directory's URL has an unknown scheme; known: {', '.join(f'{one}://' for one in SCHEMES)}")
        if "@" in parts.netloc:
            raise Invalid(
                "the directory's URL must not carry credentials", remedy=f"take them out of it and set {USER} and {PASSWORD}"
            )
        if not parts.hostname:
            raise Invalid(f"the directory's URL needs a host: {parts.scheme}://10.0.0.5:6379")
        db = unquote(parts.path).strip("/") or "0"
        if not db.isdecimal() or len(db) > 5:
            raise Invalid(
                f"the directory's URL ends with the number of a database, like {parts.scheme}://{parts.hostname}:{port}/0"
            )
        more = dict.fromkeys(KEYS, "")
        for key, value in parse_qsl(parts.query, keep_blank_values=True):
            if key not in more:
                raise Invalid(f"the directory's URL has an unknown key; known: {', '.join(KEYS)}")
            more[key] = value
        if more["cluster"] not in {"", "yes", "no"}:
            raise Invalid("the directory's URL: cluster is yes or no")
        cluster = more["cluster"] == "yes"
        if cluster and db != "0":
            raise Invalid("the directory's URL: a cluster has one database only, 0")
        return cls(
            host=parts.hostname, port=port, db=int(db), tls=SCHEMES[parts.scheme], cluster=cluster, ca_bundle=more["ca_bundle"]
        )
