"""A collection, request by request: read E, seal every head, read every manifest named, then doom what is old and unmarked."""

from collections.abc import Iterator

from protocol_model.config import Config
from protocol_model.state import Collector, Entry, Object, Pending, Place, State, put, replace
from protocol_model.swaps import Steps, swap


def collector_steps(s: State, c: Config, i: int) -> Steps:
    """What collector `i` may do next. It may stop for ever after any step."""
    me, who = s.collectors[i], f"c{i}"
    if not me.busy:
        if s.epoch >= c.rules.keep or not c.rules.keys_carry_generation or not c.rules.epoch_before_seals:
            epoch = s.epoch if c.rules.epoch_before_seals else -1
            started = Collector(busy=True, epoch=epoch, unsealed=frozenset(range(c.families)))
            yield (who, "GET epoch, LIST heads", epoch), replace(s, collectors=put(s.collectors, i, started))
        return
    for family in sorted(me.unsealed):
        yield from _seal(s, c, i, family)
    for pending in sorted(me.unread):
        yield from _read_manifest(s, c, i, pending)
    sealed = not me.unsealed or not c.rules.seals_every_head_first
    read = not me.unread or not c.rules.reads_every_manifest_first
    if sealed and read:
        victims = _old(s, c, me.epoch if c.rules.epoch_before_seals else s.epoch) - me.marks
        swept = replace(s, doomed=s.doomed | victims, collectors=put(s.collectors, i, Collector()))
        yield (who, "decides to delete", victims), swept


def _seal(s: State, c: Config, i: int, family: int) -> Steps:
    head, t, does = s.heads[family], s, "reads head"
    if head and c.rules.seals:
        expired = frozenset(p for p in s.due if p.family == family)
        branches = tuple(None if Place(family, b) in expired else e for b, e in enumerate(head.branches))
        if head.open or branches != head.branches:
            t = swap(replace(s, due=s.due - expired), c, family, replace(head, open=False, branches=branches), seal=True)
            does = "seals head"
    me = t.collectors[i]
    t = replace(t, collectors=put(t.collectors, i, replace(me, unsealed=me.unsealed - {family})))
    yield (f"c{i}", does, family), _note(t, c, i, family)


def _note(s: State, c: Config, i: int, family: int) -> State:
    """The collector has just read this head: its manifests are to be read, or its blocks marked where manifests are no objects."""
    me, head = s.collectors[i], s.heads[family]
    versions = [v for e in (head.branches if head else ()) if e for v in _versions(e, c)]
    if c.manifests:
        unread = me.unread | {Pending(family, v) for v in versions}
        me = replace(me, unread=unread, marks=me.marks | _useful(c, me, (v.manifest for v in versions)))
    else:
        me = replace(me, marks=me.marks | _useful(c, me, (b for v in versions for b in v.blocks)))
    return replace(s, collectors=put(s.collectors, i, me))


def _versions(entry: Entry, c: Config) -> Iterator[Entry]:
    yield replace(entry, history=())
    if c.rules.marks_history:
        yield from entry.history


def _read_manifest(s: State, c: Config, i: int, pending: Pending) -> Steps:
    me, who, manifest = s.collectors[i], f"c{i}", pending.entry.manifest
    rest = me.unread - {pending}
    marked = replace(me, unread=rest, marks=me.marks | _useful(c, me, pending.entry.blocks))
    yield (who, "GET manifest", manifest), replace(s, collectors=put(s.collectors, i, marked))
    if manifest in s.doomed:
        skipped = replace(s, collectors=put(s.collectors, i, replace(me, unread=rest)))
        if c.rules.reads_head_again_after_404:
            others = frozenset(p for p in rest if p.family != pending.family)
            skipped = replace(s, collectors=put(s.collectors, i, replace(me, unread=others)))
            skipped = _note(skipped, c, i, pending.family)
        yield (who, "GET manifest, 404", manifest), skipped


def _useful(c: Config, me: Collector, marks: Iterator[Object] | tuple[Object, ...]) -> frozenset[Object]:
    """Marks on what is no victim are idle: leaving them out keeps the space small."""
    if me.epoch < 0 or not c.rules.keys_carry_generation:
        return frozenset(marks)
    return frozenset(o for o in marks if o.gen <= me.epoch - c.rules.keep)


def _old(s: State, c: Config, epoch: int) -> frozenset[Object]:
    """Every object that may exist and is old enough to be deleted; of manifests, those that anybody could still come to name."""
    gens = range(epoch - c.rules.keep + 1) if c.rules.keys_carry_generation else range(1)
    blocks = frozenset(Object(gen, prefix) for gen in gens for prefix in range(c.prefixes))
    if not c.manifests:
        return blocks
    held = [v.manifest for h in s.heads if h for e in h.branches if e for v in (e, *e.history)]
    held += [p.entry.manifest for k in s.collectors for p in k.unread]
    held += [w.manifest for w in s.writers if w.manifest]
    return blocks | frozenset(o for o in held if o.gen <= epoch - c.rules.keep)
