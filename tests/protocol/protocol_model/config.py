"""The instances of the session machine: who takes part, what they may do, and where the bound lies."""

from __future__ import annotations

import msgspec

from protocol_model.rules import Rules
from protocol_model.state import Place


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """One instance.

    Attributes:
        about: For a reader of the results.
        writers: The branch each writer commits to.
        prefixes: A session is at most this many blocks long.
        missing: Families that do not exist at first.
        manifests: Manifests are objects of their own, read one by one.
        edits: Owners drop, rewind, fork and restore branches.
        history: A branch keeps naming its previous version.
        copies: A writer may also COPY what it adds from another family or an older generation.
        ttl: Branches fall due, are renewed and expire.
        reap: Heads without branches are killed, and deleted when they were dead for long; a creating PUT may arrive twice.
        lost: Answers get lost and requests arrive late; each writer makes `commits` commits.
        ring: How many write ids a head remembers.
        max_epoch: The bound of the exploration.
    """

    about: str
    families: int = 1
    branches: int = 1
    prefixes: int = 2
    writers: tuple[Place, ...] = (Place(0, 0), Place(0, 0))
    collectors: int = 1
    missing: frozenset[int] = frozenset()
    manifests: bool = False
    edits: bool = False
    history: bool = False
    copies: bool = False
    ttl: bool = False
    reap: bool = False
    lost: bool = False
    commits: int = 2
    ring: int = 3
    max_epoch: int = 5
    rules: Rules = Rules()

    def but(self, **changes: object) -> Config:
        """The same with some fields replaced."""
        return msgspec.structs.replace(self, **changes)
