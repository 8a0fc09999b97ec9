"""Which session a version was seen of. Ids come again, and each session's versions are counted from 1."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore import api

REMEMBERED: Final = 65_536
LANE_DIGITS: Final = 16  # a chain that has a lane of its own is found under the first digits of its first block


class _Version(NamedTuple):
    session: str
    namespace: str
    lane: str
    version: int


class Sightings:
    """What the answers of a node said, the latest of them, so that a commit says which session it was built on (I4)."""

    def __init__(self) -> None:
        self._branches: OrderedDict[_Version, str] = OrderedDict()

    def note(self, answer: api.Answer) -> None:
        """Learn from an answer."""
        for seen, branch in _versions(answer):
            self._branches[seen] = branch
            self._branches.move_to_end(seen)
        while len(self._branches) > REMEMBERED:
            self._branches.popitem(last=False)

    def branch_of(self, commit: api.Commit) -> str:
        """The session that a commit was built on; "" where it was built on none, or on one that was not seen here."""
        if not commit.base_version:
            return ""
        own = commit.blocks[0].prefix_id[:LANE_DIGITS] if commit.blocks else ""
        for lane in (commit.lane,) if commit.lane else (own, api.MAIN):
            found = self._branches.get(_Version(commit.id, commit.namespace, lane, commit.base_version))
            if found is not None:
                return found
        return ""


def _versions(answer: api.Answer) -> Iterator[tuple[_Version, str]]:
    match answer:
        case api.SessionPage(sessions=sessions):
            for each in sessions:
                yield from _versions(each)
        case api.Warmed(session=session):
            yield from _versions(session)
        case api.Session() | api.SessionManifest() | api.Receipt() | api.RestoreStatus():
            if answer.branch and answer.namespace is not None and answer.lane is not None and answer.version is not None:
                yield _Version(answer.id, answer.namespace, answer.lane, answer.version), answer.branch
