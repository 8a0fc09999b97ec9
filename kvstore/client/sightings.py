"""Which session a version was seen of, and how it ended. Ids come again, and each session's versions are counted from 1."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from kvstore import api

REMEMBERED: Final = 65_536
LANE_DIGITS: Final = 16  # a chain that has a lane of its own is found under the first digits of its first block
_UNSAID: Final = "?"  # before those digits: a promise to a chain that named no lane; it may be in `main`, or in its own


class _Version(NamedTuple):
    session: str
    namespace: str
    lane: str
    version: int


class Seen(NamedTuple):
    """What a client knows of a version.

    Attributes:
        branch: The session it is of, as `Session.branch` or `Receipt.branch` says it.
        last: PrefixId of its last block; "" where that was not seen.
        turn: Which of its sightings is the latest.
    """

    branch: str = ""
    last: str = ""
    turn: int = 0


class Sightings:
    """What the answers of a node said, the latest of them, so that a commit says what it was built on (I4)."""

    def __init__(self) -> None:
        self._seen: OrderedDict[_Version, Seen] = OrderedDict()
        self._turn = 0

    def note(self, request: api.Request, answer: api.Answer) -> None:
        """Learn from an answer."""
        for version, branch, last in _committed(request, answer) if isinstance(request, api.Commit) else _versions(answer):
            self._turn += 1
            self._seen[version] = Seen(branch, last, self._turn)
            self._seen.move_to_end(version)
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def base_of(self, commit: api.Commit) -> Seen:
        """What a commit was built on; nothing where it was built on none, or on one that was not seen here."""
        if not commit.base_version:
            return Seen()
        if commit.lane:
            return self._in(commit.lane, commit) or Seen()
        own, main = self._in(_own(commit), commit), self._in(api.MAIN, commit)
        promise = self._in(_UNSAID + _own(commit), commit)
        if own is not None or promise is None:
            return max((one for one in (own, promise) if one is not None), key=_turn, default=main) or Seen()
        if main is None or main.turn < promise.turn:
            return promise
        return main if main.branch.startswith(promise.branch) else Seen()  # of two chains nobody knows which has `main`

    def _in(self, lane: str, commit: api.Commit) -> Seen | None:
        return self._seen.get(_Version(commit.id, commit.namespace, lane, commit.base_version))


def _own(commit: api.Commit) -> str:
    return commit.blocks[0].prefix_id[:LANE_DIGITS] if commit.blocks else ""


def _turn(seen: Seen) -> int:
    return seen.turn


def _committed(commit: api.Commit, answer: api.Answer) -> Iterator[tuple[_Version, str, str]]:
    """What a receipt says. It names a version that ends as the commit does, unless that was cut, or is in a longer one."""
    if isinstance(answer, api.Receipt) and answer.branch:
        lane = answer.lane if commit.lane or answer.durability == "bucket" else _UNSAID + _own(commit)
        whole = commit.blocks and not answer.cut and answer.version > commit.base_version
        last = commit.blocks[-1].prefix_id if whole else ""
        yield _Version(answer.id, answer.namespace, lane, answer.version), answer.branch, last


def _versions(answer: api.Answer) -> Iterator[tuple[_Version, str, str]]:
    match answer:
        case api.SessionPage(sessions=sessions):
            for each in sessions:
                yield from _versions(each)
        case api.Warmed(session=session):
            yield from _versions(session)
        case api.Session() | api.SessionManifest() | api.RestoreStatus():
            if answer.branch and answer.namespace is not None and answer.lane is not None and answer.version is not None:
                last = answer.blocks[-1].prefix_id if isinstance(answer, api.SessionManifest) and answer.blocks else ""
                yield _Version(answer.id, answer.namespace, answer.lane, answer.version), answer.branch, last
