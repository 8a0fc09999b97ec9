"""Object stores: the contract, its backends, and the few things built directly on it.

The names here need nothing but the base install. Backends with dependencies are imported by module, by whoever opens them:
`kvstore.objects.s3` (obstore), `kvstore.objects.admin` (aiobotocore), `kvstore.objects.seaweed` (a SeaweedFS binary).
"""

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
from kvstore.objects.register import Reading, Register
from kvstore.objects.retry import Retrying, RetrySettings
from kvstore.objects.settings import S3Settings

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
    "Reading",
    "Refused",
    "Register",
    "RequestLog",
    "RetrySettings",
    "Retrying",
    "S3Settings",
    "Stored",
    "Unchanged",
    "Update",
    "check_key",
    "probe",
]
