"""The name machine: one session name, the heads it has pointed to, and everybody who creates, deletes, commits, expires and reaps.

Invariants I3, I4 and I6 of docs/ordering.md. A session here is a family with one branch; its index is its true incarnation.
"""

import enum
from collections.abc import Iterator
from typing import TypeAlias

import msgspec

from protocol_model.rules import Rules
from protocol_model.state import Value, put, replace


class Life(enum.IntEnum):
    """What has become of a session's head."""

    EMPTY = 0
    LIVE = 1
    ENDED = 2  # its branch was dropped: deleted, expired or abandoned
    DEAD = 3  # killed by a swap, for good
    GONE = 4  # deleted from the bucket


class Session(Value, frozen=True):
    """A family made under the name. `id` is what the name and stale holders know it by."""

    id: int
    life: Life = Life.EMPTY
    acknowledged: bool = False
    doomed: bool = False  # a DELETE of its head is on its way


class Doing(enum.IntEnum):
    """Where a process stands."""

    IDLE = 0
    FREE = 1  # creator: saw that the name is free, and holds its ETag
    HEAD = 2  # creator: has put an empty head
    BRANCH = 3  # creator: has committed the branch
    BEATEN = 4  # creator: another took the name
    OWES = 5  # creator: has written the name and not the branch; only a mutant comes here
    HOLDS = 6  # deleter, committer: resolved the name, and will act on what it found


class Process(Value, frozen=True):
    """Its state, and the incarnation it works on."""

    doing: Doing = Doing.IDLE
    session: int = -1


class Names(Value, frozen=True):
    """Everything. `pointer` is the incarnation the name points to, -1 where it is missing."""

    pointer: int
    sessions: tuple[Session, ...]
    processes: tuple[Process, ...]
    delete_in_flight: bool = False
    broken: str = ""


Steps: TypeAlias = Iterator[tuple[tuple[str, str, object], Names]]
ROLES = ("create", "create", "delete", "delete", "commit", "commit")


class NameConfig(msgspec.Struct, frozen=True):
    """One instance: how many sessions may be made under the name."""

    about: str
    incarnations: int = 3
    rules: Rules = Rules()

    def but(self, **changes: object) -> "NameConfig":
        """The same with some fields replaced."""
        return msgspec.structs.replace(self, **changes)


class NameMachine:
    """Two creators, two deleters and two committers who may hold a stale answer, expiry, and a reaper of empty heads."""

    def __init__(self, config: NameConfig) -> None:
        self.config, self.rules = config, config.rules

    def initial(self) -> Names:
        """No such name yet."""
        return Names(-1, (), (Process(),) * len(ROLES))

    def violation(self, s: Names) -> str:
        """What is wrong, or nothing."""
        for i, session in enumerate(s.sessions):
            if session.acknowledged and session.life == Life.GONE:
                return f"the head of acknowledged session {i} was deleted"
            if session.acknowledged and session.life == Life.LIVE and s.pointer != i:
                return f"acknowledged session {i} is not reachable by its name"
        return s.broken

    def steps(self, s: Names) -> Steps:
        """Every request that may be the next to take effect."""
        for i, role in enumerate(ROLES):
            yield from self._create(s, i) if role == "create" else self._act(s, i, role)
        for i, session in enumerate(s.sessions):
            if session.life == Life.LIVE and session.acknowledged:
                yield ("expiry", "drops session", i), _with(s, i, life=Life.ENDED)
            if session.life in (Life.EMPTY, Life.ENDED):
                yield from self._reap(s, i)
            if session.doomed:
                yield ("network", "delivers a late DELETE of head", i), _with(s, i, life=Life.GONE, doomed=False)
        if s.pointer >= 0 and not _taken(s) and not (s.delete_in_flight or self.rules.dangling_name_stays):
            yield ("reaper", "decides to DELETE name", s.pointer), replace(s, delete_in_flight=True)
        if s.delete_in_flight:
            yield ("network", "delivers a late DELETE of the name", ""), self._pointed(s, -1)

    def _create(self, s: Names, i: int) -> Steps:
        me, who = s.processes[i], f"p{i}"
        new = len(s.sessions)
        match me.doing:
            case Doing.IDLE if not _taken(s) and new < self.config.incarnations:
                yield (who, "GET name, free", ""), _moved(s, i, Doing.FREE)
            case Doing.FREE:
                made = replace(s, sessions=(*s.sessions, Session(new if self.rules.branch_ids_once else 0)))
                if self.rules.branch_before_name:
                    yield (who, "PUT head, empty", new), _moved(made, i, Doing.HEAD, new)
                else:
                    yield (who, "swap name to", new), _moved(self._pointed(made, new), i, Doing.OWES, new)
            case Doing.HEAD if s.sessions[me.session].life == Life.EMPTY:
                yield (who, "commit branch", me.session), _moved(_with(s, me.session, life=Life.LIVE), i, Doing.BRANCH, me.session)
            case Doing.HEAD:
                yield (who, "head is dead, starts again", me.session), _moved(s, i, Doing.IDLE)
            case Doing.BRANCH:
                named = _with(self._pointed(s, me.session), me.session, acknowledged=True)
                yield (who, "swap name, acknowledges", me.session), _moved(named, i, Doing.IDLE)
            case Doing.BEATEN:
                life = s.sessions[me.session].life if me.session >= 0 else Life.ENDED
                dropped = _with(s, me.session, life=Life.ENDED) if life == Life.LIVE else s
                yield (who, "412, the name is taken", ""), _moved(dropped, i, Doing.IDLE)
            case Doing.OWES:
                late = _with(s, me.session, life=Life.LIVE, acknowledged=True)
                yield (who, "commit branch, acknowledges", me.session), _moved(late, i, Doing.IDLE)

    def _act(self, s: Names, i: int, role: str) -> Steps:
        """Acts on the branch id it resolved, whenever that was."""
        me, who = s.processes[i], f"p{i}"
        if me.doing == Doing.IDLE and _taken(s):
            yield (who, "resolves name to", s.pointer), _moved(s, i, Doing.HOLDS, s.pointer)
        elif me.doing == Doing.HOLDS:
            done = _moved(s, i, Doing.IDLE)
            wanted = s.sessions[me.session].id
            hit = next((j for j, x in enumerate(s.sessions) if x.life == Life.LIVE and x.id == wanted), None)
            if hit is None:
                yield (who, f"{role}: Gone", me.session), done
                return
            if hit != me.session:
                done = replace(done, broken=f"a stale {role} for session {me.session} hit session {hit}")
            if role == "delete":
                done = replace(_with(done, hit, life=Life.ENDED), delete_in_flight=s.delete_in_flight or not self.rules.name_stays)
            yield (who, role, hit), done

    def _reap(self, s: Names, i: int) -> Steps:
        if self.rules.kills_before_deleting:
            yield ("reaper", "swap: kill head", i), _with(s, i, life=Life.DEAD)
        elif not s.sessions[i].doomed:
            yield ("reaper", "decides to DELETE head", i), _with(s, i, doomed=True)

    def _pointed(self, s: Names, to: int) -> Names:
        """A conditional PUT of the name that succeeds (or a DELETE): every creator who holds the old ETag is beaten."""
        s = replace(s, pointer=to)
        if not self.rules.claims_what_it_judged:
            return s
        holding = (Doing.FREE, Doing.HEAD, Doing.BRANCH)
        return replace(s, processes=tuple(replace(p, doing=Doing.BEATEN) if p.doing in holding else p for p in s.processes))


def _taken(s: Names) -> bool:
    return s.pointer >= 0 and s.sessions[s.pointer].life == Life.LIVE


def _with(s: Names, session: int, **changes: object) -> Names:
    return replace(s, sessions=put(s.sessions, session, replace(s.sessions[session], **changes)))


def _moved(s: Names, i: int, doing: Doing, session: int = -1) -> Names:
    return replace(s, processes=put(s.processes, i, Process(doing, session)))
