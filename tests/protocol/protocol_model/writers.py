"""A commit, request by request: read the head (open or create it first), read the epoch, get the block, put the manifest, swap."""

from protocol_model.config import Config
from protocol_model.state import At, Entry, Flight, Head, Object, State, Writer, put, replace
from protocol_model.swaps import Steps, changed, fresh, landed, past, restarted, swap


class Turn:
    """Writer `i`, about to move in state `s`."""

    def __init__(self, s: State, c: Config, i: int) -> None:
        self.s, self.c, self.i, self.me, self.who = s, c, i, s.writers[i], f"w{i}"
        self.family, self.branch = c.writers[i].family, c.writers[i].branch
        self.head = s.heads[self.family] if not self.me.born else Head(open=True, branches=(None,) * c.branches)
        self.entry = self.head.branches[self.branch] if self.head else None
        self.stored = self.entry.blocks if self.entry else ()

    @property
    def write_id(self) -> int:
        """Kept over all attempts of this commit; no other commit has it."""
        return 10 * (self.i + 1) + self.me.commit

    def to(self, s: State, **changes: object) -> State:
        """`s`, with this writer moved on."""
        return replace(s, writers=put(s.writers, self.i, replace(s.writers[self.i], **changes)))

    def back(self, s: State) -> State:
        """`s`, with this writer back at the first step of its commit."""
        return replace(s, writers=put(s.writers, self.i, fresh(s.writers[self.i])))

    def over(self, s: State) -> State:
        """`s`, with this writer done with its commit."""
        commit = self.me.commit + 1 if self.c.lost else 0
        return replace(s, writers=put(s.writers, self.i, Writer(commit=commit)))


def writer_steps(s: State, c: Config, i: int) -> Steps:
    """What writer `i` may do next."""
    turn = Turn(s, c, i)
    if (turn.head and turn.head.dead) or (c.lost and turn.me.commit >= c.commits):
        return
    match turn.me.at:
        case At.START | At.EARLY:
            yield from _ask_or_read_head(turn)
        case At.HEAD:
            yield (turn.who, "GET epoch", s.epoch), turn.to(s, at=At.EPOCH, epoch=s.epoch)
        case At.EPOCH:
            yield from _get_block(turn)
        case At.BLOCK:
            yield from _put_manifest(turn)
        case At.READY:
            yield from _swap(turn)


def _ask_or_read_head(turn: Turn) -> Steps:
    s, c, me = turn.s, turn.c, turn.me
    if me.since >= 0 and c.rules.looks_for_its_id:
        assert turn.head is not None
        if turn.write_id in turn.head.recent:
            ok = turn.over(s)
            if turn.write_id not in s.landed:
                ok = replace(ok, broken=f"commit {turn.write_id} was acknowledged and never landed")
            yield (turn.who, "finds its write id, acknowledges", turn.write_id), ok
            return
        if me.since > c.ring and c.rules.distrusts_full_ring:
            yield (turn.who, "reports Unavailable", turn.write_id), turn.over(s)
            return
        if not c.rules.lost_is_unknown:
            yield (turn.who, "reports failure", turn.write_id), turn.over(replace(s, failed=s.failed | {turn.write_id}))
            return
    if len(turn.stored) == c.prefixes and not c.lost:
        return
    if not c.rules.epoch_after_head and me.at == At.START:
        yield (turn.who, "GET epoch", s.epoch), turn.to(s, at=At.EARLY, epoch=s.epoch)
        return
    yield from _read_head(turn)


def _read_head(turn: Turn) -> Steps:
    s, c, head = turn.s, turn.c, turn.head
    at = At.EPOCH if turn.me.at == At.EARLY else At.HEAD

    def holding(t: State) -> State:
        held = None if c.rules.bodies_never_repeat else t.heads[turn.family]
        return turn.to(t, at=at, held=held)

    if head is None and c.reap:
        yield from _create_once(turn)
    elif head is None and c.rules.creates_empty:
        empty = Head(open=True, branches=(None,) * c.branches)
        yield (turn.who, "PUT head, empty, If-None-Match", turn.family), holding(swap(s, c, turn.family, empty, by=turn.i))
    elif head is None or head.open or not c.rules.opens_before_adding:
        yield (turn.who, "GET head", turn.family), holding(s)
    else:
        opened = swap(s, c, turn.family, replace(head, open=True), by=turn.i)
        yield (turn.who, "swap head to open", turn.family), holding(opened)


def _create_once(turn: Turn) -> Steps:
    """Where heads are deleted: one PUT for each family id, of which the network may make two; whoever hears nothing gives up."""
    s, c, family = turn.s, turn.c, turn.family
    if family in s.sent and c.rules.family_ids_once:
        return
    sent = replace(s, sent=s.sent | {family}, births=s.births | {family})
    made = changed(sent, c, family, born(c), by=turn.i)
    yield (turn.who, "PUT head, empty, If-None-Match", family), turn.to(made, at=At.HEAD, born=True)
    yield (turn.who, "PUT head, empty, still in flight", family), sent


def born(c: Config) -> Head:
    """What a creating PUT writes."""
    return Head(open=True, branches=(None,) * c.branches, born=True)


def _get_block(turn: Turn) -> Steps:
    s, c, me = turn.s, turn.c, turn.me
    after = At.BLOCK if c.manifests else At.READY
    prefix = len(turn.stored)
    if prefix == c.prefixes:  # only where answers get lost: a commit that adds nothing can be lost too
        yield (turn.who, "has nothing to add", ""), turn.to(s, at=after)
        return
    oldest = max(0, me.epoch - c.rules.window)
    for gen in range(oldest, me.epoch + 1) if c.rules.keys_carry_generation else [0]:
        does = "PUT block" if gen == me.epoch else "HEAD finds block"
        block = Object(gen, prefix)
        yield (turn.who, does, block), turn.to(s, at=after, block=block)
    for block in sorted(_kept(turn, prefix, oldest)):
        yield (turn.who, "keeps block", block), turn.to(s, at=after, block=block)
    if c.copies:
        yield from _copy_block(turn, prefix, after)


def _kept(turn: Turn, prefix: int, oldest: int) -> set[Object]:
    """What this very head names, in whichever branch or version, may be named again at any age."""
    entries = [version for e in (turn.head.branches if turn.head else ()) if e for version in (e, *e.history)]
    named = turn.c.rules.keeps_only_named
    blocks = {block for e in entries for block in (e.blocks if named else e.manifest.refs)}
    return {block for block in blocks if block.prefix == prefix and block.gen < oldest}


def _copy_block(turn: Turn, prefix: int, after: At) -> Steps:
    """The source may be any older generation, this family's or another's; whoever deletes it does not wait for us."""
    s, me = turn.s, turn.me
    for gen in range(me.epoch):
        target = Object(me.epoch if turn.c.rules.copies_into_own_epoch else gen, prefix)
        yield (turn.who, "COPY into block", (target, "from generation", gen)), turn.to(s, at=after, block=target)
    if turn.c.rules.checks_copy:
        yield (turn.who, "COPY, 404, commit is cut", ""), turn.back(s)
    else:
        missing = Object(me.epoch, prefix)
        yield (turn.who, "COPY, 404, goes on with", missing), turn.to(s, at=after, block=missing, unwritten=True)


def _put_manifest(turn: Turn) -> Steps:
    me, own = turn.me, turn.c.rules.manifest_carries_own_epoch
    for gen in [me.epoch] if own else range(me.epoch + 1):
        manifest = Object(gen, refs=_extended(turn))
        yield (turn.who, "PUT manifest", manifest), turn.to(turn.s, at=At.READY, manifest=manifest)


def _extended(turn: Turn) -> tuple[Object, ...]:
    return (*turn.stored, turn.me.block) if turn.me.block else turn.stored


def _next_version(turn: Turn) -> Entry | None:
    if turn.me.block is None:
        return turn.entry
    manifest = turn.me.manifest or Object(0, refs=_extended(turn))
    return Entry(manifest, len(manifest.refs), past(turn.c, turn.entry))


def _swap(turn: Turn) -> Steps:
    s, c, me, family = turn.s, turn.c, turn.me, turn.family
    if not c.rules.bodies_never_repeat and me.held != turn.head:
        yield (turn.who, "swap head, 412", family), replace(s, writers=put(s.writers, turn.i, restarted(me, c)))
        return
    if me.born and s.heads[family] != born(c):
        yield (turn.who, "swap head, 412", family), replace(s, writers=put(s.writers, turn.i, restarted(me, c)))
        return
    head = replace(turn.head or Head(open=True, branches=(None,) * c.branches), open=True)
    entry = _next_version(turn)
    head = head.with_branch(turn.branch, entry)
    done = swap(s, c, family, head, by=turn.i, write_id=turn.write_id)
    if me.unwritten:
        done = replace(done, broken=f"head {family} names {me.block}, which nobody wrote")
    if c.lost:
        done = landed(done, turn.write_id)
    yield (turn.who, "swap head", entry), turn.over(done)
    more = me.commit + 1 < c.commits if c.lost else len(turn.stored) + 1 < c.prefixes
    if more:  # an unbroken chain of its own swaps: the epoch stays good
        held = None if c.rules.bodies_never_repeat else head
        yield (turn.who, "swap head, keeps its epoch", entry), turn.to(turn.over(done), at=At.EPOCH, epoch=me.epoch, held=held)
    if c.lost:
        yield from _swap_and_lose_the_answer(turn, head, entry)


def _swap_and_lose_the_answer(turn: Turn, head: Head, entry: Entry | None) -> Steps:
    s, c, family = turn.s, turn.c, turn.family
    asks = turn.to(s, since=0)
    arrived = landed(swap(asks, c, family, head, by=turn.i, write_id=turn.write_id), turn.write_id)
    yield (turn.who, "swap head, answer lost", entry), turn.back(arrived)
    sent = replace(asks, flights=s.flights | {Flight(family, turn.write_id, head)})
    yield (turn.who, "swap head, still in flight", entry), turn.back(sent)
