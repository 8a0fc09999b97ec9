"""The merge machine: commits that meet each other, rewinds and lost answers on the branches of one head (step 6 of a commit).

Collection does not matter here, contents do: a version is a row of blocks, and a block has a token and the shards stored of it.
Every version ever made is kept in the state, so that what an acknowledgement claims and what a swap destroys can be judged. The
head itself shows a commit only its current version, a few before it, and the write ids that landed.
"""

import enum
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from protocol_model.contents import Block, Content, Versions, answer, covers, judge, row, tokens
from protocol_model.rules import Rules
from protocol_model.state import Value, put, replace


class Known(Value, frozen=True):
    """What a writer knows of a branch: the version it builds on, what that held, and what its engine holds now."""

    seq: int = 0
    content: Content = ()
    holds: tuple[int, ...] = ()


class Member(Value, frozen=True):
    """A branch's commit within a group. `version` is the seq that its last attempt makes, -1 before one was sent."""

    branch: int
    mine: Content
    version: int = -1

    def __str__(self) -> str:
        return f"{self.branch}:{row(self.mine)}"


class At(enum.IntEnum):
    """How far a writer has come."""

    GATHERING = 0
    ASKING = 1  # has a frozen group, and reads the head
    READY = 2


class Writer(Value, frozen=True):
    """A node's commits. `unknown`: an answer was lost.

    `again`: the node died, and the callers of its group ask again, one after the other; `repeats` are those still to come.
    """

    known: tuple[Known, ...]
    group: tuple[Member, ...] = ()
    at: At = At.GATHERING
    unknown: bool = False
    operation: int = 0
    again: bool = False
    repeats: tuple[Member, ...] = ()


class Flight(Value, frozen=True):
    """A swap on its way, and what its sender knew. Any other swap makes its ETag stale."""

    write_id: int
    contents: tuple[tuple[int, Content], ...]
    known: tuple[Known, ...]


class Log(Value, frozen=True):
    """Everything. A branch is the row of all its versions.

    Where nodes die, `makers` says of each version which member's commit its manifest is of, and `took` which took effect (ghost).
    """

    branches: tuple[Versions, ...]
    writers: tuple[Writer, ...]
    landed: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    flights: frozenset[Flight] = frozenset()
    broken: str = ""
    makers: tuple[tuple[int, ...], ...] = ()
    took: frozenset[int] = frozenset()


class MergeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        shards: What each writer stores of every block it commits, as bits.
        charge: The branches each writer commits to.
        tokens: How many different continuations there are.
        length: A version is at most this many blocks long.
        versions: A branch has at most this many versions.
        history: How many older versions a head names.
        rewinds: Owners rewind, too.
        dies: A node whose group may have landed dies, and its callers ask again.
        operations: Commits (groups) per writer.
    """

    about: str
    shards: tuple[int, ...] = (1, 1)
    charge: tuple[tuple[int, ...], ...] = ((0,), (0,))
    branches: int = 1
    tokens: int = 2
    length: int = 2
    versions: int = 5
    history: int = 2
    rewinds: bool = True
    dies: bool = False
    operations: int = 2
    rules: Rules = Rules()

    def but(self, **changes: object) -> "MergeConfig":
        """The same with some fields replaced."""
        return msgspec.structs.replace(self, **changes)


Label: TypeAlias = tuple[str, str, object]
Steps: TypeAlias = Iterator[tuple[Label, Log]]


class MergeMachine:
    """Writers that gather groups of commits, and owners who rewind. Invariant I2 of docs/ordering.md, and what step 6 promises."""

    def __init__(self, config: MergeConfig) -> None:
        self.config, self.rules = config, config.rules

    def initial(self) -> Log:
        """Empty branches that every writer has seen."""
        c = self.config
        makers = ((0,),) * c.branches if c.dies else ()
        return Log((((),),) * c.branches, (Writer((Known(),) * c.branches),) * len(c.shards), makers=makers)

    def violation(self, s: Log) -> str:
        """What a step found wrong."""
        return s.broken

    def steps(self, s: Log) -> Steps:
        """Every request that may be the next to take effect."""
        for i in range(len(s.writers)):
            yield from self._writer(s, i)
        for flight in sorted(s.flights):
            yield ("network", "delivers a late swap", flight.write_id), self._landed(s, flight)
        if self.config.rewinds:
            for branch, versions in enumerate(s.branches):
                if len(versions) < self.config.versions and versions[-1]:
                    shorter = versions[-1][:-1]
                    yield ("owner", "swap: rewind", f"{branch}:{row(shorter)}"), self._swapped(s, ((branch, shorter),))

    def _writer(self, s: Log, i: int) -> Steps:
        me, who = s.writers[i], f"w{i}"
        if me.operation == self.config.operations:
            return
        if me.at == At.READY:
            yield from self._swap(s, i)
            return
        if me.at == At.GATHERING or not self.rules.group_is_frozen:
            for member in self._commits(me, i):
                yield (who, "gathers a commit", member), _to(s, i, group=(*me.group, member))
        if me.group:
            yield from self._read_head(s, i)
        if self.config.dies and me.unknown and len(me.group) > 1:
            first, *others = me.group
            repeated = _to(s, i, group=(first,), repeats=tuple(others), again=True, unknown=False)
            yield (who, "dies, and each caller asks again", me.group), repeated

    def _commits(self, me: Writer, i: int) -> Iterator[Member]:
        """What the engine may come up with next: one token more, another last token, or one less."""
        taken = {m.branch for m in me.group} if self.rules.branch_once_in_group else set[int]()
        for branch in self.config.charge[i]:
            if branch not in taken:
                for after in self._continuations(me.known[branch].holds):
                    yield Member(branch, tuple(Block(token, self.config.shards[i]) for token in after))

    def _continuations(self, holds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        for token in range(self.config.tokens):
            if len(holds) < self.config.length:
                yield (*holds, token)
            if holds and token != holds[-1]:
                yield (*holds[:-1], token)
        if len(holds) > 1:
            yield holds[:-1]

    def _read_head(self, s: Log, i: int) -> Steps:
        me, who = s.writers[i], f"w{i}"
        if me.unknown and self.rules.looks_for_its_id and _write_id(me, i) in s.landed:
            for member in me.group:
                s = self._acknowledged(s, i, member, member.version)
            yield (who, "finds its write id, acknowledges", _write_id(me, i)), _over(s, i)
            return
        made = self._made(s, i) if me.again and self.rules.finds_a_members_version else 0
        if made:
            yield (who, "finds the version it made, acknowledges", made), _over(self._acknowledged(s, i, me.group[0], made), i)
            return
        t, rest, fates = s, list[Member](), list[str]()
        for member in me.group:
            versions = s.branches[member.branch]
            found = answer(versions, self.config.history, me.known[member.branch].seq, member.mine, self.rules)
            fates.append("contained" if found.contained else "Conflict" if found.write is None else "to be written")
            if found.contained:
                t = self._acknowledged(t, i, member, len(versions) - 1)
            elif found.write is None:
                t = _refused(t, i, member)
            else:
                rest.append(member)
        yield (who, f"GET head: {', '.join(fates)}", me.group), _to(t, i, at=At.READY, group=tuple(rest)) if rest else _over(t, i)

    def _made(self, s: Log, i: int) -> int:
        """The version, among those that the head names, that this member's commit made; 0: none."""
        branch = s.writers[i].group[0].branch
        makers, base = s.makers[branch], s.writers[i].known[branch].seq
        named = range(max(base + 1, len(makers) - 1 - self.config.history), len(makers))
        return next((seq for seq in named if makers[seq] == _write_id(s.writers[i], i)), 0)

    def _swap(self, s: Log, i: int) -> Steps:
        me, who = s.writers[i], f"w{i}"
        if any(len(s.branches[m.branch]) == self.config.versions for m in me.group):
            return  # the bound of this exploration
        sent = tuple(replace(m, version=len(s.branches[m.branch])) for m in me.group)
        contents = tuple((m.branch, self._content(s, me, m)) for m in me.group)
        flight = Flight(_write_id(me, i), contents, me.known)
        done = self._landed(s, flight)
        asking = _to(done, i, at=At.ASKING, group=sent, unknown=True)
        for member in sent:
            done = self._acknowledged(done, i, member, member.version)
        yield (who, "swap head, acknowledges", sent), _over(done, i)
        yield (who, "swap head, answer lost", sent), asking
        in_flight = replace(s, flights=s.flights | {flight})
        yield (who, "swap head, still in flight", sent), _to(in_flight, i, at=At.ASKING, group=sent, unknown=True)

    def _content(self, s: Log, me: Writer, member: Member) -> Content:
        known = me.known[member.branch]
        found = answer(s.branches[member.branch], self.config.history, known.seq, member.mine, self.rules)
        assert found.write is not None, "the head has not moved since it was read"
        return found.write

    def _landed(self, s: Log, flight: Flight) -> Log:
        """A commit's swap takes effect: is its author entitled to that?"""
        broken = "a commit took effect twice" if flight.write_id in s.landed else s.broken
        for branch, content in flight.contents:
            known = flight.known[branch]
            broken = broken or judge(s.branches[branch], content, known.seq, known.content)
            if _member_id(flight.write_id, branch) in s.refused:
                broken = "a commit took effect after it was answered with Conflict"
            if _member_id(flight.write_id, branch) in s.took:
                broken = "a commit took effect twice"
        s = self._swapped(s, flight.contents, flight.write_id)
        return replace(s, landed=s.landed | {flight.write_id}, broken=broken)

    def _swapped(self, s: Log, contents: tuple[tuple[int, Content], ...], write_id: int = 0) -> Log:
        """A conditional PUT of the head that succeeds: one new version for each branch; every other ETag is stale.

        A rewind goes on naming the manifest of the version before.
        """
        branches, makers, took = s.branches, s.makers, s.took
        for branch, content in contents:
            new = (*s.branches[branch], content)  # of two members for one branch the last wins: a swap makes one version
            branches = put(branches, branch, new)
            if self.config.dies:
                maker = _member_id(write_id, branch) if write_id else s.makers[branch][-1]
                makers = put(makers, branch, (*s.makers[branch], maker))
                took |= {maker} - {0}
        writers = tuple(replace(w, at=At.ASKING) if w.at == At.READY else w for w in s.writers)
        return replace(s, branches=branches, writers=writers, flights=frozenset(), makers=makers, took=took)

    def _acknowledged(self, s: Log, i: int, member: Member, version: int) -> Log:
        """The caller is told that `version` holds its commit. Is it so, and what will the caller build on?"""
        versions, known = s.branches[member.branch], s.writers[i].known[member.branch]
        if not any(covers(content, member.mine) for content in versions[known.seq :]):
            s = replace(s, broken=f"a commit of {row(member.mine)} to branch {member.branch} was acknowledged and is not stored")
        if not self.rules.acknowledges_own_version:
            known = Known(len(versions) - 1, member.mine, tokens(member.mine))
        elif tokens(versions[version]) == tokens(member.mine):
            known = Known(version, versions[version], tokens(member.mine))
        else:  # that version holds more than the caller has seen: not one to build on
            known = replace(known, holds=tokens(member.mine))
        return _knowing(s, i, member.branch, known)


def _write_id(me: Writer, i: int) -> int:
    """Of two digits; who asks again is alone, and its id that of the member it was."""
    write_id = 10 * (i + 1) + me.operation
    return _member_id(write_id, me.group[0].branch) if me.again else write_id


def _member_id(write_id: int, branch: int) -> int:
    """Of three digits."""
    return write_id if write_id >= 100 else 10 * write_id + branch


def _to(s: Log, i: int, **changes: object) -> Log:
    return replace(s, writers=put(s.writers, i, replace(s.writers[i], **changes)))


def _over(s: Log, i: int) -> Log:
    me = s.writers[i]
    if me.repeats:
        return _to(s, i, group=me.repeats[:1], repeats=me.repeats[1:], at=At.ASKING, unknown=False)
    return replace(s, writers=put(s.writers, i, Writer(me.known, operation=me.operation + 1)))


def _knowing(s: Log, i: int, branch: int, known: Known) -> Log:
    return _to(s, i, known=put(s.writers[i].known, branch, known))


def _refused(s: Log, i: int, member: Member) -> Log:
    """The caller is told Conflict, and takes what is stored for its new base."""
    write_id = _write_id(s.writers[i], i)
    if write_id in s.landed or _member_id(write_id, member.branch) in s.took:
        s = replace(s, broken="a commit that took effect was answered with Conflict")
    stored = s.branches[member.branch][-1]
    s = _knowing(s, i, member.branch, Known(len(s.branches[member.branch]) - 1, stored, tokens(stored)))
    return replace(s, refused=s.refused | {_member_id(write_id, member.branch)})
