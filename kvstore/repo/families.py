"""One writer per family and node: pending changes become one swap, and a lost answer is followed until its outcome is known.

A *group* is one operation. Its members are frozen while an attempt of it may still land, each branch is in it at most once, and
it keeps one write id over all attempts (R8).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

from cachetools import LRUCache

from kvstore.errors import Corrupt, Gone, KVTierError, Overloaded, TooManyBranches, Unavailable
from kvstore.model import RECENT, Branch, Head
from kvstore.repo.epochs import Epochs
from kvstore.repo.heads import Heads, Position, entries, fitted, swapped, versions_of
from kvstore.repo.root import Root, outcome_unknown

A = TypeVar("A")
A_co = TypeVar("A_co", covariant=True)
MAX_PENDING: Final = 4096  # changes of one family that wait; more is refused
_ATTEMPTS: Final = 64
_AT_ONCE: Final = 32  # members of a group that store their blocks and manifests at the same time
_IDLE_ENTRIES: Final = 65_536  # of heads that idle families keep, to go on from their last swap


class Settled(NamedTuple, Generic[A_co]):
    """Nothing has to be written: this is the answer."""

    answer: A_co


class Edit(NamedTuple, Generic[A_co]):
    """These branches change (None: is dropped), and then this is the answer. Nothing is added that the head does not name (R10)."""

    branches: Mapping[str, Branch | None]
    answer: A_co


class Addition(NamedTuple, Generic[A_co]):
    """Objects are added: `build` stores them at the epoch it is given, and says what changes."""

    build: Callable[[int], Awaitable[Edit[A_co] | Settled[A_co]]]


Plan: TypeAlias = Settled[Any] | Edit[Any] | Addition[Any]


class MovedError(Exception):
    """A manifest that the head named is absent: the head has moved on, so look again. Never leaves this package."""


class Change(Protocol[A_co]):
    """One member of a group.

    Attributes:
        branches: Those it reads or writes.
        write_id: Makes a repetition of this change the same change; "" where it is never repeated.
    """

    branches: frozenset[str]
    write_id: str

    async def decide(self, head: Head) -> Settled[A_co] | Edit[A_co] | Addition[A_co]:
        """What it makes of a head. Asked anew for every attempt."""
        ...

    async def landed(self, head: Head) -> A_co:
        """The answer where an earlier life of this node has made this change already: its write id is in the head."""
        ...


class _Ticket:
    __slots__ = ("change", "future", "sent")

    def __init__(self, change: Change[Any]) -> None:
        self.change = change
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.sent: list[Edit[Any]] = []  # by attempt

    def answer(self, value: object) -> None:
        if not self.future.done():
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # looked at: whoever asked may have left


class Families:
    """The families this node writes to."""

    def __init__(self, root: Root, heads: Heads, epochs: Epochs) -> None:
        self.root, self.heads, self.epochs = root, heads, epochs
        self._busy: dict[str, Line] = {}
        self._idle: LRUCache[str, Line] = LRUCache(_IDLE_ENTRIES, getsizeof=lambda line: line.entries)

    async def run(self, key: str, change: Change[A]) -> A:
        """Make a change, together with others of its family that wait at the same time.

        A caller who is cancelled leaves the change to land or not; it is then a lost answer to that caller.

        Args:
            key: Of the family's head.
            change: What to make of it.

        Raises:
            Gone: The family or branch is no more.
            Conflict: See `kvstore.repo.commit`.
            TooManyBranches: The family is full.
            Unavailable: `outcome_unknown` where it may have landed.
            Overloaded: Too many changes wait.
        """
        line = self._busy.get(key) or self._idle.pop(key, None) or Line(self, key)
        self._busy[key] = line
        return await line.run(change)

    def seed(self, key: str, position: Position) -> None:
        """A head that was just read or made: the next change of an idle family begins with it instead of reading it again."""
        if key not in self._busy:
            line = self._idle.pop(key, None) or Line(self, key)
            line.seed(position)
            self._idle[key] = line

    def rest(self, line: Line) -> None:
        """A line has nothing to do: keep its chain of swaps while there is room."""
        if self._busy.pop(line.key, None) is not None:
            self._idle[line.key] = line

    async def aclose(self) -> None:
        """Wait for the changes under way; each ends by its own bounds."""
        tasks = [line.task for line in self._busy.values() if line.task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)


class Line:
    """The changes of one family, one group after the other."""

    def __init__(self, families: Families, key: str, chain: Position | None = None) -> None:
        self.key = key
        self.task: asyncio.Task[None] | None = None
        self._families = families
        self._chain = chain  # the head after our last swap, while nobody is known to have swapped since
        self._waiting: deque[_Ticket] = deque()

    @property
    def entries(self) -> int:
        """About how much memory it takes while it is idle."""
        return 1 if self._chain is None else entries(self._chain.head)

    def seed(self, position: Position) -> None:
        """See `Families.seed`."""
        if self._chain is None or self._chain.head.swaps < position.head.swaps:
            self._chain = position

    async def run(self, change: Change[A]) -> A:
        """See `Families.run`."""
        if len(self._waiting) >= MAX_PENDING:
            raise Overloaded(f"{len(self._waiting)} changes wait for this family of sessions; at most {MAX_PENDING}")
        ticket = _Ticket(change)
        self._waiting.append(ticket)
        if self.task is None:
            self.task = asyncio.create_task(self._work())
            self.task.add_done_callback(lambda task: task.cancelled() or task.exception())  # its tickets carry the error
        try:
            answer: A = await asyncio.shield(ticket.future)
        except asyncio.CancelledError:
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            raise
        return answer

    async def _work(self) -> None:
        await asyncio.sleep(0)  # whoever is about to ask joins the first group
        try:
            while self._waiting:
                await self._land(self._take())
        finally:
            self.task = None
            self._families.rest(self)

    async def _land(self, group: list[_Ticket]) -> None:
        chain, self._chain = self._chain, None  # handed out once: only a swap of ours that lands makes another
        try:
            self._chain = await _Group(self._families, self.key, group).land(chain)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            for ticket in group:
                ticket.fail(error if not isinstance(error, asyncio.CancelledError) else outcome_unknown("this change"))
            if not isinstance(error, Exception):
                raise

    def _take(self) -> list[_Ticket]:
        """All that waits, in order, each branch once; the rest is the next group's."""
        taken: list[_Ticket] = []
        later: deque[_Ticket] = deque()
        seen: set[str] = set()
        for ticket in self._waiting:
            if ticket.change.branches & seen:
                later.append(ticket)
            else:
                taken.append(ticket)
            seen |= ticket.change.branches
        self._waiting = later
        return taken


class _Group:
    """Members that become one swap."""

    def __init__(self, families: Families, key: str, members: list[_Ticket]) -> None:
        self._heads, self._epochs, self._root = families.heads, families.epochs, families.root
        self._key, self._members = key, members
        alone = members[0].change.write_id if len(members) == 1 else ""
        self._write = alone or self._root.ids.new()
        self._unresolved: Position | None = None  # what an attempt tried to replace, until it is known not to have landed
        self._moved = ""  # ETag of the head under which a manifest was found absent

    async def land(self, chain: Position | None) -> Position | None:
        """Attempt until every member has its answer. Returns the head after our swap, if that was the last thing to happen."""
        for attempt in range(_ATTEMPTS):
            if attempt > 1:
                await self._root.pause(min(attempt, 6))
            try:
                ours = chain if attempt == 0 else None  # a read may give this very value back: unchanged, and trusted then
                at = ours or await self._read()
                landed = await self._attempt(at, trusted=ours is None) if self._members else None
            except KVTierError as error:
                self._reject(self._members, error)
                return None
            if not self._members:
                return landed
        self._reject(self._members, Unavailable("too many others write to this family of sessions: try again"))
        return None

    async def _read(self) -> Position:
        """The head now, and what it says about the attempt before: the table of lost answers."""
        at = await self._heads.read(self._key)
        if at is None:
            raise Gone("this family of sessions does not exist any more")
        tried = self._unresolved
        if tried is None:
            return at
        if self._write in at.head.recent and self._ours(at.head):
            for ticket in self._members:
                ticket.answer(_that_landed(ticket.sent, at.head).answer)
            self._members = []
        elif self._write in at.head.recent:
            self._unresolved = None  # another node's attempt at the same commit landed: what it made is decided on this head
            self._members[0].sent.clear()
        elif at.head.swaps - tried.head.swaps > RECENT:
            raise outcome_unknown("this change")
        elif at.etag != tried.etag:
            self._unresolved = None  # the ETag it must match is gone for good, and it is not in the head: it never will be
            for ticket in self._members:
                ticket.sent.clear()
        return at

    def _ours(self, head: Head) -> bool:
        """Whether what bears our write id is an attempt of this group: for certain where it made up the id itself."""
        return self._write != self._members[0].change.write_id or _named(self._members[0].sent, head) is not None

    async def _attempt(self, at: Position, *, trusted: bool) -> Position | None:
        """One attempt.

        Args:
            at: The head to replace.
            trusted: It was read by this operation. If not, it is our last swap's, and only a swap may rest on it: an answer
                without one could be stale.

        Returns:
            The head after our swap. None with members left: read again.
        """
        asked = [(ticket, partial(self._decide, ticket, at.head)) for ticket in self._members]
        plans = await self._plans(at, asked, trusted=trusted)
        if plans is None:
            return None
        additions = [(ticket, plan.build) for ticket, plan in plans if isinstance(plan, Addition)]
        if additions:
            ready = await self._ready(at)
            if ready is None or ready.epoch is None:
                return None
            at, epoch = ready, ready.epoch
            built = await self._plans(at, [(ticket, partial(build, epoch)) for ticket, build in additions], trusted=trusted)
            if built is None:
                return None
            plans = [(ticket, plan) for ticket, plan in plans if isinstance(plan, Edit)] + built
        edits = [(ticket, plan) for ticket, plan in plans if isinstance(plan, Edit)]
        new = self._compose(at.head, edits)
        if new is None:
            return None
        for ticket, edit in edits:
            ticket.sent.append(edit)
        before, self._unresolved = self._unresolved, at
        try:
            landed = await self._heads.swap(self._key, at, new)
        except KVTierError:  # not a lost answer: the store refused the request, or it was never sent
            self._unresolved = before
            raise
        if landed is not None:
            self._unresolved = None
            self._members = []
            for ticket, edit in edits:
                ticket.answer(edit.answer)
        return landed

    async def _decide(self, ticket: _Ticket, head: Head) -> Plan:
        if ticket.change.write_id and ticket.change.write_id in head.recent:
            return Settled(await ticket.change.landed(head))
        plan: Plan = await ticket.change.decide(head)
        return plan

    async def _plans(
        self, at: Position, asked: Sequence[tuple[_Ticket, Callable[[], Awaitable[Plan]]]], *, trusted: bool
    ) -> list[tuple[_Ticket, Plan]] | None:
        """The members' plans that need a swap; the other members get their answers. None: the head must be read first."""
        room = asyncio.Semaphore(_AT_ONCE)

        async def in_turn(plan: Callable[[], Awaitable[Plan]]) -> Plan:
            async with room:
                return await plan()

        outcomes = await asyncio.gather(*(in_turn(plan) for _, plan in asked), return_exceptions=True)
        swaps: list[tuple[_Ticket, Plan]] = []
        over: list[tuple[_Ticket, Settled[Any] | KVTierError]] = []
        for (ticket, _), outcome in zip(asked, outcomes, strict=True):
            if isinstance(outcome, MovedError) and self._moved == at.etag:
                over.append((ticket, Corrupt(f"the session's head names {outcome}, which is absent: run `kvtier fsck`")))
            elif isinstance(outcome, MovedError):
                self._moved = at.etag
                return None
            elif isinstance(outcome, Settled | KVTierError):
                over.append((ticket, outcome))
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                swaps.append((ticket, outcome))
        if over and not trusted:
            return None
        for ticket, end in over:
            if isinstance(end, KVTierError):
                self._reject([ticket], end)
            else:
                self._members.remove(ticket)
                ticket.answer(end.answer)
        return swaps

    async def _ready(self, at: Position) -> Position | None:
        """The head open (R3), with an epoch read after it (R2). None: it moved."""
        if not at.head.open:
            opened = await self._heads.swap(self._key, at, swapped(at.head, self._root.ids.new(), open=True))
            if opened is None:
                return None
            at = Position(opened.head, opened.etag)
        if at.epoch is None:
            at = Position(at.head, at.etag, (await self._epochs.read()).epoch)
        return at

    def _compose(self, head: Head, edits: list[tuple[_Ticket, Edit[Any]]]) -> Head | None:
        """The head with all edits; those that do not fit any more are refused, and taken out of `edits`. None: none is left."""
        while edits:
            changes = {branch: value for _, edit in edits for branch, value in edit.branches.items()}
            try:
                return fitted(swapped(head, self._write, branches=changes), growing=not changes.keys() <= head.branches.keys())
            except TooManyBranches as error:
                growing = [entry for entry in edits if not entry[1].branches.keys() <= head.branches.keys()] or list(edits)
                self._reject([ticket for ticket, _ in growing], error)
                edits[:] = [entry for entry in edits if entry not in growing]
        return None

    def _reject(self, tickets: Sequence[_Ticket], error: KVTierError) -> None:
        """These members end with an error; where an attempt may still land, all that can be said is that nobody knows."""
        if self._unresolved is not None and error.kind != "outcome_unknown":
            error = outcome_unknown("this change", error)
        self._members = [ticket for ticket in self._members if ticket not in tickets]
        for ticket in tickets:
            ticket.fail(error)


def _that_landed(sent: Sequence[Edit[Any]], head: Head) -> Edit[Any]:
    """Of several attempts on one ETag, the one whose manifests the head names; the last where that does not tell."""
    return _named(sent, head) or sent[-1]


def _named(sent: Sequence[Edit[Any]], head: Head) -> Edit[Any] | None:
    named = {version.manifest for branch in head.branches.values() for version in versions_of(branch)}
    for edit in sent:
        if any(branch is not None and branch.manifest in named for branch in edit.branches.values()):
            return edit
    return None
