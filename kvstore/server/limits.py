"""Bounds of the faces: each protects the node from a client that is slow, broken or hostile."""

from __future__ import annotations

from typing import Final

import msgspec

from kvstore.config import Bytes, Seconds
from kvstore.errors import Invalid

MAX_DEADLINE_MS: Final = 600_000  # of a read


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """See each; sizes in bytes, times in seconds.

    Attributes:
        connections: On the Unix socket at a time.
        window: Write window of each connection.
        leases: Blocks that one connection holds at a time; a read beyond them is a shorter run (`full`).
        hello: How long a connection may take to say who it is, or over HTTP what it wants first.
        stall: How long an answer may wait for a client that does not read.
        drain: How long a stop waits for what was accepted.
        requests: Of HTTP at a time, event streams included; there may be twice as many connections.
        body: Of a JSON request: 65,536 blocks of a long session fit well.
        upload: How long the body of a request may take to arrive.
        tenants: Among how many `connections` and `requests` are shared out.
    """

    connections: int = 64
    window: Bytes = Bytes(64 << 20)
    leases: int = 65_536
    hello: Seconds = Seconds(5)
    stall: Seconds = Seconds(30)
    drain: Seconds = Seconds(30)
    requests: int = 1024
    body: Bytes = Bytes(16 << 20)
    upload: Seconds = Seconds(60)
    tenants: int = 1


STANDARD: Final = Limits()


def check_deadline(deadline_ms: int) -> int:
    """The deadline of a read, unchanged. Raises `Invalid` where it is negative, or too far away to be one."""
    if not 0 <= deadline_ms <= MAX_DEADLINE_MS:
        raise Invalid(f"deadline_ms is {deadline_ms}; it must be 0 to {MAX_DEADLINE_MS}")
    return deadline_ms
