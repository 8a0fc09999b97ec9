"""Object stores: the contract, its backends, and the few things built directly on it.

These names need nothing but the base install, except `S3Store`, which brings obstore in when it is first asked for. Bucket
administration (`kvstore.objects.admin`, aiobotocore) and the embedded server (`kvstore.objects.seaweed`) are imported by module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore.objects.base import (
    ABSENT,
    CREATE,
    OVERWRITE,
    REFUSED,
    UNCHANGED,
    Absent,
    Buffer,
    Create,
    Got,
    ObjectMeta,
    ObjectStore,
    Overwrite,
    PutMode,
    Refused,
    Stored,
    Unchanged,
    Update,
    check_key,
)
from kvstore.objects.faults import Crash, Fault, Faults, RequestLog
from kvstore.objects.memory import MemoryStore
from kvstore.objects.probe import Guarantees, probe
from kvstore.objects.retry import RetryingStore, RetrySettings
from kvstore.objects.settings import S3Settings

if TYPE_CHECKING:
    from kvstore.objects.s3 import S3Store as S3Store

__all__ = [
    "ABSENT",
    "CREATE",
    "OVERWRITE",
    "REFUSED",
    "UNCHANGED",
    "Absent",
    "Buffer",
    "Crash",
    "Create",
    "Fault",
    "Faults",
    "Got",
    "Guarantees",
    "MemoryStore",
    "ObjectMeta",
    "ObjectStore",
    "Overwrite",
    "PutMode",
    "Refused",
    "RequestLog",
    "RetrySettings",
    "RetryingStore",
    "S3Settings",
    "S3Store",
    "Stored",
    "Unchanged",
    "Update",
    "check_key",
    "probe",
]


def __getattr__(name: str) -> Any:
    if name == "S3Store":
        from kvstore.objects.s3 import S3Store  # noqa: PLC0415  obstore only where a bucket is used

        return S3Store
    raise AttributeError(name)
