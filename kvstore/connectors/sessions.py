"""Sessions of an engine: what a request computed becomes the next version of the session that it belongs to.

An engine is never told of a conflict. A request that goes on where a session ended becomes its next version; one that edits what
was there before (a template that leaves out what the model thought) replaces it; one that only repeats the beginning of it changes
nothing. One that ran beside others of its session and went another way, as parallel sub-agents do, gets a lane of its own; so does
one that finds somebody else's version in its place.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Lock
from typing import TYPE_CHECKING, Final

import msgspec

from kvstore import api
from kvstore.clock import RandomIds
from kvstore.connectors.bridge import Bridge
from kvstore.connectors.tips import Tip, Tips
from kvstore.errors import AlreadyExists, Conflict, Gone, NotFound, Unavailable
from kvstore.ids import Link, Namespace, Shard

if TYPE_CHECKING:
    from kvstore.client import SyncClient

_TRIES: Final = 4
_ASKED_AGAIN: Final = {"outcome_unknown": 0.0, "promise_pending": 0.5}  # after so many seconds: another node is at it
_LANE_DIGITS: Final = 16


class Who(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a request belongs to.

    Attributes:
        session: The session's id.
        parent: The session that it is a fork of, where it does not exist yet; "" where it begins with itself.
        lane: Which of parallel sub-agents, where the caller says so.
        ttl_s: How long it lives unused; the node's default where None.
        durability: What a receipt promises; the node's default where None.
    """

    session: str
    parent: str = ""
    lane: str = ""
    ttl_s: int | None = None
    durability: api.Durability | None = None


class Turn:
    """One request of a session, from its beginning to its end."""

    def __init__(self, who: Who) -> None:
        self.who = who
        self.alone = True


class Sessions:
    """The sessions of one model that an engine works on.

    Args:
        bridge: The way to the tier.
        namespace: The model's.
        shards: All of them: a version names blocks of which every rank has saved its part.
    """

    def __init__(self, bridge: Bridge, namespace: Namespace, shards: Sequence[Shard]) -> None:
        self._bridge, self._namespace, self._shards = bridge, namespace, tuple(shards)
        self._tips = Tips()
        self._running: dict[str, set[Turn]] = {}
        self._lock = Lock()
        self.counts: Counter[str] = Counter()
        """Commits by `extended`, `edited`, `known`, `laned`, `forked`, `conflict`."""

    def begin(self, who: Who) -> Turn:
        """A request begins. `end` or `drop` must follow."""
        turn = Turn(who)
        with self._lock:
            others = self._running.setdefault(who.session, set())
            for other in others:
                other.alone = turn.alone = False
            others.add(turn)
        return turn

    def drop(self, turn: Turn) -> None:
        """It is over, and left nothing."""
        with self._lock:
            others = self._running.get(turn.who.session, set())
            others.discard(turn)
            if not others:
                self._running.pop(turn.who.session, None)

    def end(self, turn: Turn, links: Sequence[Link]) -> Future[api.Receipt] | None:
        """It is over, and these blocks were saved, of every shard: they become the session's version.

        Returns:
            What will be acknowledged; None where there is nothing to commit, or too much waits already.
        """
        self.drop(turn)
        return self.so_far(turn, links)

    def so_far(self, turn: Turn, links: Sequence[Link]) -> Future[api.Receipt] | None:
        """As `end`, of a request that goes on: what it saved until now becomes a version already."""
        if not links:
            return None
        return self._bridge.call("commit", lambda kv: self._commit(kv, turn, links))

    # --- on the bridge's thread ---

    def _commit(self, kv: SyncClient, turn: Turn, links: Sequence[Link]) -> api.Receipt:
        who, write_id, waited = turn.who, RandomIds().new(), set[str]()
        tip = self._tip(kv, turn, links)
        for attempt in range(_TRIES):
            if tip.holds(links):
                self.counts["known"] += 1
                return self._known(who, tip, links)
            try:
                receipt = kv.commit(
                    who.session,
                    namespace=self._namespace,
                    lane=tip.lane,
                    base_version=tip.version,
                    branch=tip.branch,
                    base_prefix_id=tip.last,
                    blocks=links,
                    shards=self._shards,
                    ttl_s=who.ttl_s,
                    durability=who.durability,
                    write_id=write_id,
                )
            except (Conflict, AlreadyExists):
                self.counts["conflict"] += 1
                if attempt == _TRIES - 1:
                    raise
                tip, write_id = self._after_conflict(kv, who, tip, links), RandomIds().new()
            except Gone:  # the session it was built on is no more: this is the first version of a new one
                if attempt == _TRIES - 1:
                    raise
                self._forget(who, links)
                tip, write_id = Tip(lane=tip.lane), RandomIds().new()
            except Unavailable as error:
                if error.kind not in _ASKED_AGAIN or error.kind in waited:
                    raise
                waited.add(error.kind)
                time.sleep(_ASKED_AGAIN[error.kind])
            else:
                self.counts["extended" if not tip.version or tip.goes_on_as(links) else "edited"] += 1
                self._remember(who, links, receipt, tip)
                return receipt
        raise AssertionError("unreachable")

    def _tip(self, kv: SyncClient, turn: Turn, links: Sequence[Link]) -> Tip:
        """What these blocks are the next version of."""
        who = turn.who
        tips = [tip for tip in self._tips.of(who.session, links) if who.lane in {"", tip.lane}]
        related = [tip for tip in tips if tip.goes_on_as(links) or tip.holds(links)]
        if related:
            return max(related, key=lambda tip: tip.blocks)
        if tips and (turn.alone or who.lane):
            return tips[-1]
        if tips:
            self.counts["laned"] += 1
            return Tip(lane=_lane(links))
        return self._stored(kv, who, who.lane, links) or self._forked(kv, who) or Tip(lane=who.lane)

    def _stored(self, kv: SyncClient, who: Who, lane: str, links: Sequence[Link]) -> Tip | None:
        """Where the store says that it ends; None where there is no such lane, or it holds another conversation altogether."""
        try:
            found = kv.manifest(who.session, namespace=self._namespace, lane=lane or api.MAIN)
        except (NotFound, Gone):
            return None
        if not lane and found.blocks and found.blocks[0].prefix_id != links[0].prefix_id:
            return None  # the node knows a lane for it
        return Tip.of(lane, found.version, found.blocks, found.branch, named=found.lane)

    def _forked(self, kv: SyncClient, who: Who) -> Tip | None:
        """A new session that begins as its parent is."""
        if not who.parent or who.parent == who.session or who.lane:
            return None
        try:
            forked = kv.fork(who.parent, as_=who.session, namespace=self._namespace)
        except (NotFound, Gone, AlreadyExists):
            return None
        self.counts["forked"] += 1
        return Tip(version=forked.version, branch=forked.branch)

    def _after_conflict(self, kv: SyncClient, who: Who, tip: Tip, links: Sequence[Link]) -> Tip:
        """Somebody else's version is where this one should go: behind it, if it is the beginning of this; else beside it."""
        self._forget(who, links)
        stored = self._stored(kv, who, tip.lane, links)
        if stored is not None and (stored.holds(links) or (stored.goes_on_as(links) and stored.version != tip.version)):
            return stored
        self.counts["laned"] += 1
        return Tip(lane=_lane(links))

    def _remember(self, who: Who, links: Sequence[Link], receipt: api.Receipt, tip: Tip) -> None:
        self._tips.put(
            who.session,
            Tip.of(tip.lane, receipt.version, links[: receipt.blocks], receipt.branch, receipt.durability, receipt.lane),
        )

    def _known(self, who: Who, tip: Tip, links: Sequence[Link]) -> api.Receipt:
        return api.Receipt(
            id=who.session,
            namespace=self._namespace.id,
            lane=tip.named or tip.lane,
            version=tip.version,
            tokens=sum(link.tokens for link in links),
            blocks=len(links),
            durability=tip.durability,
            branch=tip.branch,
        )

    def _forget(self, who: Who, links: Sequence[Link]) -> None:
        self._tips.forget(who.session, links)


def _lane(links: Sequence[Link]) -> str:
    return links[-1].prefix_id[:_LANE_DIGITS]
