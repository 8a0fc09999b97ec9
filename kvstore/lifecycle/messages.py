"""What a node and its collector's process say to each other: one JSON object a line.

The node writes `Setup` first, then `Job` after `Job`, each when the one before was answered; the end of its input ends the process.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import msgspec

from kvstore import api
from kvstore.errors import Problem

MAX_LINE: Final = 16 << 20
BEAT_S: Final = 15.0
"""A process at work says something at least this often."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """The settings, as flags; and what to log. No secret: credentials come from the environment and the files of the AWS chain."""

    settings: dict[str, str]
    log_level: str = "WARNING"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """Collect once; not if another collection ended less than `fresh_s` seconds ago."""

    request: api.Collect
    fresh_s: float = 0


class Spent(msgspec.Struct, frozen=True, kw_only=True):
    """Requests to the store by verb, and bytes of bodies to it and from it, since the process started."""

    requests: dict[str, int] = {}
    sent: int = 0
    fetched: int = 0


class Progressed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="progress"):
    """How far it has come; see :class:`kvstore.lifecycle.collector.Progress`."""

    phase: str
    heads: int
    listed: int
    deleted: int
    freed: int
    spent: Spent = Spent()


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="collected"):
    """It is done; None where another node had just done it."""

    collected: api.Collected | None


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="error"):
    """It failed."""

    problem: Problem


Event: TypeAlias = Progressed | Ended | Failed
