"""How a branch is called before it is made.

A branch id never comes again (R7). How it begins says which commit made it; the rest is random. So whoever is promised a session
knows that much of its id, and can say what a commit was built on (I4), also to a node that never heard of the promise.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from kvstore.clock import Ids
from kvstore.ids import length_prefixed

PROMISED: Final = 16  # digits of a branch id that say who made it; the others differ from one attempt to the next


def promised(tenant: str, session: str, namespace: str, write_id: str) -> str:
    """How the id of a branch begins that is made by the commit with that write id."""
    parts = (text.encode() for text in (tenant, session, namespace, write_id))
    return blake3(length_prefixed(b"kvtier.promise.1", *parts)).hexdigest()[:PROMISED]


def made_for(promise: str, ids: Ids) -> str:
    """A new branch id that begins like that; any, for ""."""
    return promise + ids.new()[len(promise) :]


def means(branch: str, said: str) -> bool:
    """Whether a branch is the one that somebody speaks of, by its id or by what was promised of it."""
    return branch == said or (is_promise(said) and branch.startswith(said))


def is_promise(said: str) -> bool:
    """Whether it only says who made, or will make, the branch."""
    return len(said) == PROMISED
