"""The values of the session machine: what the bucket holds, and what each process remembers."""

import enum
from collections.abc import Iterator
from typing import TypeVar

import msgspec

T = TypeVar("T")

MANIFEST = -1  # stands where a block has its prefix


class Value(msgspec.Struct, frozen=True, order=True, array_like=True, gc=False):
    """Ordered, so that a set of them can be walked and encoded in one order in every process."""


class Object(Value, frozen=True):
    """A block (a prefix in a generation), or a manifest (the blocks it lists, in a generation)."""

    gen: int
    prefix: int = MANIFEST
    refs: tuple["Object", ...] = ()

    def __str__(self) -> str:
        return f"{'pqr'[self.prefix]}@{self.gen}" if self.prefix >= 0 else f"[{' '.join(map(str, self.refs))}]@{self.gen}"


class Entry(Value, frozen=True):
    """A branch: the first `n` blocks of its manifest, and the version before, where history is kept."""

    manifest: Object
    n: int
    history: tuple["Entry", ...] = ()

    @property
    def blocks(self) -> tuple[Object, ...]:
        """What it restores to."""
        return self.manifest.refs[: self.n]

    def __str__(self) -> str:
        return f"{self.manifest}:{self.n}" + "".join(f" (was {e})" for e in self.history)


class Head(Value, frozen=True):
    """heads/<family>.

    Attributes:
        recent: The write ids of the last swaps, 0 where nobody will ever ask for it.
        born: It is the body of the creating PUT, so it has that ETag; only where heads are deleted, as it returns nowhere else.
    """

    open: bool
    branches: tuple[Entry | None, ...]
    dead: bool = False
    recent: tuple[int, ...] = ()
    born: bool = False

    def with_branch(self, at: int, entry: Entry | None) -> "Head":
        """This head, with one branch replaced."""
        return msgspec.structs.replace(self, branches=put(self.branches, at, entry))


class At(enum.IntEnum):
    """How far a writer has come with its commit."""

    START = 0
    EARLY = 1  # knows an epoch without having read the head: only mutants come here
    HEAD = 2
    EPOCH = 3
    BLOCK = 4
    READY = 5


class Writer(Value, frozen=True):
    """A writer in the middle of a commit.

    Attributes:
        epoch: As it read it, -1 before.
        block: What it will add.
        manifest: What it has put, where manifests are objects.
        commit: How many commits it has finished; with its index this makes the write id.
        since: Swaps of the head since the one its last attempt was built on, up to one more than the ring holds; -1 while no
            answer was lost.
        unwritten: Nobody wrote `block`; ghost.
        held: The head it read; only where a repeated body makes the comparison matter.
        born: What it holds is the ETag of the creating PUT's body, while another copy of that PUT is under way.
    """

    at: At = At.START
    epoch: int = -1
    block: Object | None = None
    manifest: Object | None = None
    commit: int = 0
    since: int = -1
    unwritten: bool = False
    held: Head | None = None
    born: bool = False


class Pending(Value, frozen=True):
    """A manifest a collector has seen named by a family's head and not read yet."""

    family: int
    entry: Entry


class Collector(Value, frozen=True):
    """A collection under way, or none."""

    busy: bool = False
    epoch: int = -1
    unsealed: frozenset[int] = frozenset()
    unread: frozenset[Pending] = frozenset()
    marks: frozenset[Object] = frozenset()


class Flight(Value, frozen=True):
    """A swap that was sent, whose sender gave up waiting, and that may still arrive."""

    family: int
    write_id: int
    head: Head


class Place(Value, frozen=True):
    """A branch of a family."""

    family: int
    branch: int

    def __str__(self) -> str:
        return f"{self.family}.{self.branch}"


class State(Value, frozen=True):
    """Everything. `due`, `landed` and `failed` are ghosts: what an all-knowing observer would note.

    Attributes:
        sent: Families whose creating PUT was sent, and `births` those of which one more copy of it may still arrive; only where
            heads are deleted.
        idle: Dead heads that did not change for longer than any request may be under way.
    """

    epoch: int
    heads: tuple[Head | None, ...]
    writers: tuple[Writer, ...]
    collectors: tuple[Collector, ...]
    doomed: frozenset[Object] = frozenset()
    doomed_heads: frozenset[int] = frozenset()
    flights: frozenset[Flight] = frozenset()
    sent: frozenset[int] = frozenset()
    births: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    due: frozenset[Place] = frozenset()
    judged: frozenset[Place] = frozenset()
    landed: frozenset[int] = frozenset()
    failed: frozenset[int] = frozenset()
    broken: str = ""


replace = msgspec.structs.replace


def put(seq: tuple[T, ...], i: int, value: T) -> tuple[T, ...]:
    """`seq` with its i-th element replaced."""
    return (*seq[:i], value, *seq[i + 1 :])


def named(head: Head | None) -> Iterator[Object]:
    """Every object a head names, directly or through its manifests, history included."""
    for entry in head.branches if head else ():
        if entry:
            for version in (entry, *entry.history):
                yield version.manifest
                yield from version.blocks
