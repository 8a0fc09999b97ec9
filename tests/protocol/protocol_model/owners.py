"""Everybody else: the epoch, late requests, and owners who rewind, fork, restore, renew, expire and kill in one swap each."""

from protocol_model.config import Config
from protocol_model.state import Entry, Head, Place, State, put, replace
from protocol_model.swaps import Label, Steps, changed, landed, past, swap
from protocol_model.writers import born

EPOCH, NETWORK, OWNER, CLOCK, EXPIRY, REAPER = "epoch", "network", "owner", "clock", "expiry", "reaper"


def owner_steps(s: State, c: Config) -> Steps:
    """What may happen besides commits and collections."""
    yield from _epoch(s, c)
    for flight in sorted(s.flights):
        arrived = landed(swap(s, c, flight.family, flight.head, write_id=flight.write_id), flight.write_id)
        yield (NETWORK, "delivers a late swap", flight.write_id), arrived
    for family, head in enumerate(s.heads):
        if c.reap:
            yield from _late(s, c, head, family)
        if head is None or head.dead:
            continue
        for branch, entry in enumerate(head.branches):
            if entry:
                place = Place(family, branch)
                if c.edits:
                    yield from _edit(s, c, head, place, entry)
                if c.ttl:
                    yield from _expire(s, c, head, place, entry)
        if not c.rules.names_stay_in_family:
            yield from _fork_across(s, c, head, family)
        if c.reap and not head.open and not any(head.branches):
            yield from _kill(s, c, head, family)


def _epoch(s: State, c: Config) -> Steps:
    if s.epoch < c.max_epoch:
        yield (EPOCH, "becomes", s.epoch + 1), replace(s, epoch=s.epoch + 1)
    if s.epoch and not c.rules.epoch_only_grows:
        yield (EPOCH, "is restored from a backup", s.epoch - 1), replace(s, epoch=s.epoch - 1)


def _changed(s: State, c: Config, head: Head, place: Place, entry: Entry | None) -> State:
    done = swap(s, c, place.family, head.with_branch(place.branch, entry))
    return replace(done, due=done.due - {place})


def _edit(s: State, c: Config, head: Head, place: Place, entry: Entry) -> Steps:
    def swapped(does: str, new: Entry | None, at: Place = place) -> tuple[Label, State]:
        return (OWNER, f"swap: {does}", (at, new) if new else at), _changed(s, c, head, at, new)

    yield swapped("drop", None)
    if entry.n > 1:
        yield swapped("rewind", replace(entry, n=entry.n - 1, history=past(c, entry)))
    if entry.history:
        yield swapped("restore the version before", replace(entry.history[0], history=past(c, entry)))
    if entry.n < len(entry.manifest.refs) and not c.rules.only_commits_grow:
        yield swapped("grow", replace(entry, n=len(entry.manifest.refs)))
    for other, taken in enumerate(head.branches):
        if taken is None:
            for version in (entry, *entry.history):
                yield swapped("fork into", replace(version, history=()), Place(place.family, other))


def _expire(s: State, c: Config, head: Head, place: Place, entry: Entry) -> Steps:
    if place not in s.due:
        yield (CLOCK, "makes due", place), replace(s, due=s.due | {place})
    else:
        yield (OWNER, "swap: resume and renew", place), _changed(s, c, head, place, entry)
        if place not in s.judged:
            yield (EXPIRY, "GET head, judges expired", place), replace(s, judged=s.judged | {place})
    if place in s.judged:
        expired = _changed(s, c, head, place, None)
        broken = "" if place in s.due else "a resumed branch was expired"
        yield (EXPIRY, "swap: expire", place), replace(expired, judged=expired.judged - {place}, broken=broken)


def _fork_across(s: State, c: Config, head: Head, family: int) -> Steps:
    for other, source in enumerate(s.heads):
        if other != family and source and source.branches[0] and not head.branches[0]:
            place = Place(family, 0)
            yield (OWNER, "swap: fork across into", (place, source.branches[0])), _changed(s, c, head, place, source.branches[0])


def _kill(s: State, c: Config, head: Head, family: int) -> Steps:
    if c.rules.kills_before_deleting:
        yield (REAPER, "swap: kill head", family), swap(s, c, family, replace(head, dead=True))
    elif family not in s.doomed_heads:
        yield (REAPER, "decides to DELETE head", family), replace(s, doomed_heads=s.doomed_heads | {family})


def _late(s: State, c: Config, head: Head | None, family: int) -> Steps:
    """What may arrive at the end of a head: a DELETE at any time, and twice; a PUT only for as long as stores take it."""
    if head is None and family in s.births:
        yield (
            (NETWORK, "delivers a late PUT of empty head", family),
            replace(s, heads=put(s.heads, family, born(c)), births=s.births - {family}),
        )
    if head is not None and family in s.doomed_heads:
        gone = changed(s, c, family, None)
        yield (NETWORK, "delivers a DELETE of head", family), replace(gone, idle=s.idle - {family})
    if head is None or not head.dead:
        return
    if family not in s.idle:
        quiet = replace(s, idle=s.idle | {family}, births=s.births - {family})
        yield (CLOCK, "dead head unchanged for a week", family), changed(quiet, c, family, head)
    if family not in s.doomed_heads and (family in s.idle or not c.rules.waits_before_deleting):
        yield (REAPER, "decides to DELETE dead head", family), replace(s, doomed_heads=s.doomed_heads | {family})
