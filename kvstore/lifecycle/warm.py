"""Shared prefixes: a system prompt or a document whose KV stays for everyone in a tenant, however long nobody asks for it.

A node computes no KV, so a prefix begins as somebody's session. Publishing it makes a pinned fork that never expires, and pinned
sessions are neither collected nor evicted. Other prompts share its blocks by name, as they share any. Only their *age* is special:
a look-up asks for the two youngest generations of a block, and those of a prefix stay at the one it was committed at. So every node
learns now and then where the blocks of its tenants' prefixes are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final

from kvstore.api import Session
from kvstore.clock import Clock
from kvstore.errors import Corrupt, Denied, Gone, NotFound, Unavailable
from kvstore.ids import BlockName, NamespaceId, Shard
from kvstore.model import Copy, Manifest
from kvstore.repo import Repo

log = logging.getLogger(__name__)
PREFIX: Final = "warm/"
"""What ids of sessions that keep a shared prefix begin with."""
LEARN_EVERY_S: Final = 300.0
_MOST_COPIES: Final = 32_768  # of one tenant, half of what a node remembers of all blocks by default
_PAGE: Final = 100
_LOOK_AGAIN_S: Final = 5.0


async def publish(
    repo: Repo,
    tenant: str,
    session: str,
    namespace: str = "",
    lane: str = "",
    *,
    as_: str = "",
    version: int = 0,
    tokens: int | None = None,
) -> Session:
    """Make a session's version a shared prefix: a pinned fork without expiry. One swap; no blocks move.

    Args:
        repo: Where.
        tenant: Whose.
        session: The one that holds the prefix.
        namespace: Its; the only one by default.
        lane: Its; the only one by default.
        as_: What it is called after `warm/`; the session's id by default.
        version: 0 means the current one.
        tokens: Only the whole blocks within that many; None means all.

    Raises:
        AlreadyExists: There is one of that name: delete it first, or name this one otherwise.
        Invalid: Not one whole block is within `tokens`.
        NotFound: There is no such session.
        Gone: It was deleted, or it expired.
    """
    name = PREFIX + (as_ or session).removeprefix(PREFIX)
    made = await repo.sessions.fork(tenant, session, namespace, lane, name, version=version, ttl=0, pinned=True, tokens=tokens)
    with suppress(Unavailable):  # it is published; this node learns of it as the others do
        _, manifest = await repo.sessions.resolve(tenant, made.id, made.namespace, made.lane)
        _remember(repo, manifest, _MOST_COPIES)
    return made


async def learn(repo: Repo, tenant: str) -> int:
    """Know where the blocks of a tenant's prefixes are. Returns how many copies were learnt; what is too much is left out."""
    known, cursor = 0, ""
    while known < _MOST_COPIES:
        page = await repo.sessions.list(tenant, PREFIX, cursor, _PAGE)
        for session in page.sessions:
            if not session.pinned:
                continue  # somebody's own, and looking it up would renew it
            try:
                _, manifest = await repo.sessions.resolve(tenant, session.id, session.namespace, session.lane)
            except (Corrupt, Denied, Gone, NotFound):
                continue  # gone since it was listed; what is damaged, or has no key, `fsck` names
            known += _remember(repo, manifest, _MOST_COPIES - known)
        cursor = page.cursor
        if not cursor:
            break
    return known


async def keep_learning(repo: Callable[[], Repo], tenants: Collection[str], clock: Clock, missed: Callable[[], None]) -> None:
    """Learn again and again: others publish, too. Runs until cancelled.

    Args:
        repo: The repository of the moment; raises `Unavailable` until it is reached.
        tenants: Those that this node serves.
        clock: This host's.
        missed: Told for each tenant whose prefixes could not be looked up, as when its keys are gone.
    """
    while True:
        try:
            for tenant in tenants:
                try:
                    await learn(repo(), tenant)
                except (Corrupt, Denied, Gone) as error:
                    log.warning("shared prefixes of tenant %s were not looked up: %s", tenant, error)
                    missed()
        except Unavailable:
            await clock.sleep(_LOOK_AGAIN_S)  # the node says what is wrong with its bucket
        else:
            await clock.sleep(LEARN_EVERY_S)


def _remember(repo: Repo, manifest: Manifest, most: int) -> int:
    shards = [Shard.parse(shard) for shard in manifest.shards]
    learnt = 0
    for block in manifest.blocks:
        for copy in block.copies:
            if learnt == most:
                return learnt
            name = BlockName(NamespaceId(manifest.namespace), shards[copy.shard], block.prefix_id, block.tokens)
            repo.uploads.learn(name, Copy(0, copy.gen, copy.bytes, copy.header_bytes))
            learnt += 1
    return learnt
