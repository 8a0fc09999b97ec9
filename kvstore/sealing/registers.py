"""What the bucket holds of keys: only ever wrapped under a master key."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from kvstore.model import FORMAT_VERSION, Body
from kvstore.sealing.keyfile import Wrapped


class Keyring(Body, frozen=True, kw_only=True):
    """The register `keyring`: the root's name key. Created once, before `format.json` says that the root is sealed."""

    v: int = FORMAT_VERSION
    write: str
    names: Wrapped


class StoredKey(msgspec.Struct, frozen=True):
    """A tenant's data key. `id` is 32 hex digits."""

    id: str
    wrapped: Wrapped


class TenantKeys(Body, frozen=True, kw_only=True):
    """The register `keys/<tenant>`: a tenant's data keys, the current one first.

    Attributes:
        write: Fresh in every body, as in all registers.
        keys: Never empty while the tenant lives.
        destroyed: Somebody deleted them on purpose. Final (R12).
    """

    SEGMENTS: ClassVar[int] = 2
    v: int = FORMAT_VERSION
    write: str
    keys: tuple[StoredKey, ...] = ()
    destroyed: bool = False
