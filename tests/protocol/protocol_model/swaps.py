"""A conditional PUT of a head, and what it does to everybody else."""

from collections.abc import Iterator
from typing import TypeAlias

from protocol_model.config import Config
from protocol_model.state import At, Entry, Head, State, Writer, put, replace

# (who, does what, to what): rendered only where a trace is printed
Label: TypeAlias = tuple[str, str, object]
Steps: TypeAlias = Iterator[tuple[Label, State]]


def swap(s: State, c: Config, family: int, head: Head, *, by: int = -1, write_id: int = 0, seal: bool = False) -> State:
    """A PUT If-Match of heads/<family> that succeeds."""
    if c.lost:
        head = replace(head, recent=(*head.recent, write_id)[-c.ring :])
    if c.reap:
        head = replace(head, born=False)
    return changed(s, c, family, head, by=by, counts=c.rules.seals_count_as_swaps or not seal)


def changed(s: State, c: Config, family: int, head: Head | None, *, by: int = -1, counts: bool = True) -> State:
    """heads/<family> is another one, or none. Whoever else held the old ETag has to start again."""
    again = family in s.births
    writers = tuple(
        _after_swap(w, c, i == by, counts, again) if c.writers[i].family == family else w for i, w in enumerate(s.writers)
    )
    return replace(
        s,
        heads=put(s.heads, family, head),
        writers=writers,
        flights=frozenset(f for f in s.flights if f.family != family),
        judged=frozenset(p for p in s.judged if p.family != family) if c.rules.expires_what_it_judged else s.judged,
    )


def _after_swap(w: Writer, c: Config, mine: bool, counts: bool, again: bool) -> Writer:
    if w.since >= 0 and counts:
        w = replace(w, since=min(w.since + 1, c.ring + 1))
    if mine or w.at in (At.START, At.EARLY) or not c.rules.bodies_never_repeat or (w.born and again):
        return w
    return restarted(w, c)


def fresh(w: Writer) -> Writer:
    """Back at the first step of the same commit."""
    return Writer(commit=w.commit, since=w.since)


def restarted(w: Writer, c: Config) -> Writer:
    """After a 412: read the head again, and the epoch."""
    if w.epoch >= 0 and not c.rules.epoch_again_after_412:
        return replace(fresh(w), at=At.EARLY, epoch=w.epoch)
    return fresh(w)


def landed(s: State, write_id: int) -> State:
    """Book-keeping when a commit takes effect: neither twice, nor after its caller was told that it failed."""
    if write_id in s.failed:
        return replace(s, broken=f"commit {write_id} took effect after it was reported failed")
    if write_id in s.landed:
        return replace(s, broken=f"commit {write_id} took effect twice")
    return replace(s, landed=s.landed | {write_id})


def past(c: Config, entry: Entry | None) -> tuple[Entry, ...]:
    """The history of a version that replaces `entry`."""
    return (replace(entry, history=()),) if c.history and entry else ()
