"""What collections leave in the bucket for the next one. Advisory: nothing rests on it, and any of it may be gone or wrong."""

from __future__ import annotations

from typing import ClassVar, Final, TypeVar

import msgspec

from kvstore.api import Collected, Usage
from kvstore.errors import KVTierError
from kvstore.model import FORMAT_VERSION, Body, dump, parse
from kvstore.objects.base import OVERWRITE
from kvstore.repo.root import Root

H = TypeVar("H", bound=Body)
MOST_USAGE: Final = 1000  # namespaces that are told apart; a hint is a small object


class CollectHint(Body, frozen=True, kw_only=True):
    """`hints/collect`.

    Attributes:
        at: Store-clock seconds when it was written.
        epoch: The collection's.
        after: The last block key it had swept when it was written; "" at its end.
        usage: Live blocks up to there.
        collected: What it did; None before its end.
    """

    SEGMENTS: ClassVar[int] = 2
    v: int = FORMAT_VERSION
    at: float
    epoch: int
    after: str = ""
    usage: list[Usage] = msgspec.field(default_factory=list)
    collected: Collected | None = None


class UsageHint(Body, frozen=True, kw_only=True):
    """`hints/usage`: what was alive at the end of the last collection."""

    SEGMENTS: ClassVar[int] = 2
    v: int = FORMAT_VERSION
    at: float
    usage: list[Usage]


async def read_hint(root: Root, key: str, kind: type[H]) -> H | None:
    """A hint, if there is one that can be read."""
    try:
        body = await root.register(key)
        return None if body is None else parse(body, kind, key)
    except KVTierError:
        return None


async def write_hint(root: Root, key: str, hint: CollectHint | UsageHint) -> None:
    """Leave a hint, if the store takes it."""
    try:
        await root.store.put(key, dump(hint, key), OVERWRITE)
    except KVTierError:
        return
