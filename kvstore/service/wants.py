"""From the names in a request to what the tiers are asked for, and from their answers to the run that a reader can use."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from kvstore.errors import Invalid
from kvstore.ids import BlockName, Link, Namespace, PrefixId, Shard, prefix_id
from kvstore.model import Copy
from kvstore.repo import want
from tiering import Miss, Reach, Want

REACH: Final = {"dram": Reach.DRAM, "nvme": Reach.DISK, "bucket": Reach.ORIGIN}  # near to far; tiers bear these names
MAX_SHARDS: Final = 4096


def parse_shards(texts: Sequence[str]) -> list[Shard]:
    """Shards from outside. Raises `Invalid` for a wrong name, none, too many, or one that is named twice."""
    if not 1 <= len(texts) <= MAX_SHARDS or len(set(texts)) != len(texts):
        raise Invalid(f"shards must be 1 to {MAX_SHARDS} different names")
    return [Shard.parse(text) for text in texts]


def block_wants(
    namespace: Namespace, shard: Shard, links: Iterable[Link], copies: Mapping[PrefixId, Copy] | None = None
) -> list[Want]:
    """What to ask the tiers for. `copies` says where a manifest found each block. Raises `Invalid` for a wrong name or length."""
    known: Mapping[PrefixId, Copy] = copies or {}
    return [
        want(namespace, BlockName(namespace.id, shard, prefix_id(link.prefix_id), link.tokens), known.get(link.prefix_id))
        for link in links
    ]


class Released(Protocol):
    """A lease of any tier."""

    def release(self) -> None:
        """Give it back."""
        ...


L = TypeVar("L", bound=Released)


def leading_run(answers: Iterable[L | Miss]) -> tuple[list[L], str]:
    """Leases up to the first miss, and why it was one; what was leased behind a hole is let go, for nobody can use it."""
    run: list[L] = []
    why = ""
    for answer in answers:
        if isinstance(answer, Miss):
            why = why or answer.value
        elif why:
            answer.release()
        else:
            run.append(answer)
    return run, why


def tier_reach(reach: str) -> Reach:
    """The hierarchy's name for the farthest tier to ask. Raises `Invalid`."""
    if reach not in REACH:
        raise Invalid(f"reach is {reach!r}; it must be one of {', '.join(REACH)}")
    return REACH[reach]
