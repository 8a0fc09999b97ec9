"""Settings: where they come from, what they are, and the storage URL."""

from kvstore.config.addresses import is_loopback, parse_address, static_peers
from kvstore.config.loading import Loaded, load, masked
from kvstore.config.quantities import Bytes, Seconds, parse_bytes, parse_seconds
from kvstore.config.sections import (
    SECTIONS,
    AuthSettings,
    CodecName,
    DramSettings,
    Durability,
    LifecycleSettings,
    LimitSettings,
    NodeSettings,
    NvmeSettings,
    PeersSettings,
    PrestageSettings,
    PricesSettings,
    Section,
    Settings,
    StoreSettings,
    Tenant,
    TlsSettings,
)
from kvstore.config.storage_url import SCHEMES, URL_KEYS, StorageUrl

__all__ = [
    "SCHEMES",
    "SECTIONS",
    "URL_KEYS",
    "AuthSettings",
    "Bytes",
    "CodecName",
    "DramSettings",
    "Durability",
    "LifecycleSettings",
    "LimitSettings",
    "Loaded",
    "NodeSettings",
    "NvmeSettings",
    "PeersSettings",
    "PrestageSettings",
    "PricesSettings",
    "Seconds",
    "Section",
    "Settings",
    "StorageUrl",
    "StoreSettings",
    "Tenant",
    "TlsSettings",
    "is_loopback",
    "load",
    "masked",
    "parse_address",
    "parse_bytes",
    "parse_seconds",
    "static_peers",
]
