"""Changes that add nothing to a head: fork, rewind, touch, pin, delete. All they name, the head they replace names too (R10)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import msgspec

from kvstore.errors import Gone, NotFound
from kvstore.model import Branch, Head, Version
from kvstore.repo.families import Edit, Settled
from kvstore.repo.heads import next_version, versions_of

Amend = Callable[[Branch], Awaitable[Mapping[str, Branch | None]]]
"""What becomes of a branch, and of others; nothing where it stays as it is."""


class Amendment:
    """One such change. Its answer is the named branch afterwards, or as it last was where it is dropped.

    Args:
        branch: What it looks at.
        amend: What it makes of it.
        about: The branch the answer is about; `branch` by default.
    """

    write_id = ""

    def __init__(self, branch: str, amend: Amend, *, about: str = "") -> None:
        self._branch, self._amend, self._about = branch, amend, about or branch
        self.branches = frozenset({self._branch, self._about})

    async def decide(self, head: Head) -> Settled[Branch] | Edit[Branch]:
        """See `kvstore.repo.families.Change`. Raises `Gone`."""
        branch = head.branches.get(self._branch)
        if branch is None:
            raise Gone("this session was deleted, or it expired")
        changes = await self._amend(branch)
        after = changes.get(self._about, branch)
        return Edit(changes, branch if after is None else after) if changes else Settled(branch)

    async def landed(self, head: Head) -> Branch:
        """Never asked, as it has no write id of its own."""
        return head.branches[self._about]


def dropped(branch: str) -> Amendment:
    """Delete it; its name stays, dangling."""

    async def amend(_: Branch) -> Mapping[str, Branch | None]:
        return {branch: None}

    return Amendment(branch, amend)


def changed(branch: str, change: Callable[[Branch], Branch]) -> Amendment:
    """Touch, pin, unpin: fields that move no blocks."""

    async def amend(before: Branch) -> Mapping[str, Branch | None]:
        after = change(before)
        return {branch: after} if after != before else {}

    return Amendment(branch, amend)


def forked(branch: str, new: str, version: int, now: float, start: Callable[[Branch], Awaitable[Branch]]) -> Amendment:
    """A second branch that begins as a version of the first one.

    Args:
        branch: The first one.
        new: Id of the second one, never used before (R7).
        version: Which version; 0 means the current one.
        now: Store-clock seconds.
        start: Sets what the new branch lives by, and perhaps a smaller length.
    """

    async def amend(before: Branch) -> Mapping[str, Branch | None]:
        origin = find_version(before, version)
        after = msgspec.structs.replace(
            before, seq=origin.seq, manifest=origin.manifest, n=origin.n, at=now, pinned=False, history=()
        )
        return {new: await start(after)}

    return Amendment(branch, amend, about=new)


def rewound(branch: str, target: Callable[[Branch], Awaitable[tuple[str, int]]], now: float, history: int) -> Amendment:
    """Back to (manifest, n) that the branch names already; a new version."""

    async def amend(before: Branch) -> Mapping[str, Branch | None]:
        manifest, n = await target(before)
        if (manifest, n) == (before.manifest, before.n):
            return {}
        return {branch: next_version(before, manifest=manifest, n=n, at=now, history=history)}

    return Amendment(branch, amend)


def find_version(branch: Branch, version: int) -> Version:
    """A version that can be restored; 0 means the current one.

    Raises:
        NotFound: There is no such version yet.
        Gone: It is no longer kept.
    """
    kept = versions_of(branch)
    for each in kept:
        if version in {0, each.seq}:
            return each
    if version > branch.seq:
        raise NotFound(f"there is no version {version}; the session is at {branch.seq}")
    raise Gone(f"version {version} is no longer kept; {', '.join(str(each.seq) for each in kept)} are")
