"""Encryption of what lies in a bucket: sealed objects, keyed names, and the keys of tenants (docs/design/012-encryption.md)."""

from kvstore.sealing.disk import DiskSeals
from kvstore.sealing.keyfile import MasterKey, MasterKeys, made, spelled
from kvstore.sealing.opened import Sealing, make_keyring, rewrap_keyring, sealing_of, unlocked
from kvstore.sealing.store import SealedStore
from kvstore.sealing.tenants import TenantKeyring

__all__ = [
    "DiskSeals",
    "MasterKey",
    "MasterKeys",
    "SealedStore",
    "Sealing",
    "TenantKeyring",
    "made",
    "make_keyring",
    "rewrap_keyring",
    "sealing_of",
    "spelled",
    "unlocked",
]
