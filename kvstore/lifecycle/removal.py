"""Dropping many sessions at once: all of one model after a weight update, or all of a tenant.

Each goes as a single deletion does, by a swap of its head: any number of removals may run beside writers and collections, one that
stops anywhere is simply started again, and their blocks go with the next collections.

Two things stay. Names are never deleted (R7); they dangle, about 200 bytes each. A namespace's fields stay readable under its id,
about 500 bytes: a session may be committed at any moment by a node that knows them, and a deletion, which no store makes
conditional and which may arrive late, would leave that session without what it is read by.
"""

from __future__ import annotations

import logging
from typing import Final

from kvstore.api import Dropped
from kvstore.errors import Corrupt, Gone, Unavailable, Unsupported
from kvstore.ids import NamespaceId
from kvstore.keys import check_id, escape
from kvstore.model import Branch, Head
from kvstore.objects.base import ObjectMeta
from kvstore.repo import Repo
from kvstore.repo.families import Edit, Settled
from kvstore.repo.together import together

log = logging.getLogger(__name__)
_LOOKS: Final = 16  # at one head: somebody forks it all the time
_NO_KEYS: Final = "`kvtier tenants rm` without --key drops its sessions, and collections delete their blocks"
_MANIFESTS: Final = 4  # read at once for one head, of the 16 heads that are looked at together


async def drop_namespace(repo: Repo, tenant: str, namespace: NamespaceId) -> Dropped:
    """Drop every session of a namespace, pinned ones too. Sessions that are made while it runs may stay.

    Raises:
        Unavailable: The store does not answer. What was dropped stays so; the next call goes on.
    """
    return await _Removal(repo, tenant, namespace).run()


async def drop_tenant(repo: Repo, tenant: str) -> Dropped:
    """Drop every session of a tenant, pinned ones too. As `drop_namespace`."""
    return await _Removal(repo, tenant, None).run()


async def forget_tenant(repo: Repo, tenant: str) -> Dropped:
    """Delete a tenant's keys, so that no copy of anything it stored is ever read again; then drop its sessions (R12).

    Raises:
        Unsupported: `not_encrypted`: there are no keys.
        Unavailable: As `drop_tenant`.
    """
    if repo.root.tenants is None:
        raise Unsupported("this root is not encrypted, so its tenants have no keys", kind="not_encrypted", remedy=_NO_KEYS)
    await repo.root.tenants.destroy(escape(check_id(tenant, "tenant")))
    return await drop_tenant(repo, tenant)


class _Removal:
    """One run over a tenant's heads, a page at a time.

    It looks at heads, not at names: a branch whose name was never written is found, too.
    """

    def __init__(self, repo: Repo, tenant: str, namespace: NamespaceId | None) -> None:
        self._repo, self._keys = repo, repo.root.keys
        self._tenant, self._namespace = check_id(tenant, "tenant"), namespace
        self._sessions = self._families = self._failed = 0

    async def run(self) -> Dropped:
        async for page in self._repo.root.store.list(self._keys.heads(self._tenant)):
            await together(self._one, [meta for meta in page if self._keys.parse_head(meta.key) is not None])
        return Dropped(sessions=self._sessions, families=self._families, failed=self._failed)

    async def _one(self, meta: ObjectMeta) -> None:
        try:
            dropped = await self._emptied(meta)
        except (Corrupt, Unsupported) as error:  # one that cannot be read must not keep the others alive
            log.warning("sessions of %s were not dropped: %s", meta.key, error)
            self._failed += 1
            return
        self._sessions += dropped
        self._families += dropped > 0

    async def _emptied(self, meta: ObjectMeta) -> int:
        """Drop until a look at the head shows nothing more: forks of a session that was there are dropped with it."""
        dropped, position = 0, self._repo.heads.known(meta.key, meta.etag)
        for _ in range(_LOOKS):
            position = position or await self._repo.heads.read(meta.key)
            if position is None:
                return dropped
            over = await self._over(meta.key, position.head)
            if over is not None and not over:
                return dropped
            try:
                dropped += await self._repo.families.run(meta.key, _Dropping(over)) if over else 0
            except Gone:
                return dropped  # the head itself was ended, and reaped
            position = None
        raise Unavailable(f"{meta.key} could not be emptied in {_LOOKS} attempts: others fork its sessions all the time")

    async def _over(self, key: str, head: Head) -> frozenset[str] | None:
        """Branches that go. None: the head has moved on, and must be looked at again.

        Raises:
            Corrupt: It names a manifest that is absent, or one that cannot be read.
        """
        if self._namespace is None:
            return frozenset(head.branches)
        tenant, family = self._keys.parse_head(key) or ("", "")
        names = sorted({branch.manifest for branch in head.branches.values() if branch.manifest})
        keys = [self._keys.manifest_of(tenant, family, name) for name in names]
        found = dict(zip(names, await together(self._repo.manifests.get, keys, limit=_MANIFESTS), strict=True))
        absent = {name for name, manifest in found.items() if manifest is None}
        if absent:
            now = await self._repo.heads.read(key)
            still = absent & {branch.manifest for branch in now.head.branches.values()} if now is not None else set()
            if still:
                raise Corrupt(f"{key} names manifest {min(still)}, which is absent: run `kvtier fsck`")
            return None
        ours = {name for name, manifest in found.items() if manifest is not None and manifest.namespace == self._namespace}
        return frozenset(name for name, branch in head.branches.items() if branch.manifest in ours)


class _Dropping:
    """Several branches of one head go in one swap. See :class:`kvstore.repo.families.Change`; its answer is how many went."""

    write_id = ""

    def __init__(self, branches: frozenset[str]) -> None:
        self.branches = branches

    async def decide(self, head: Head) -> Settled[int] | Edit[int]:
        there: dict[str, Branch | None] = dict.fromkeys(self.branches & head.branches.keys())
        return Edit(there, len(there)) if there else Settled(0)

    async def landed(self, head: Head) -> int:
        """Never asked, as it has no write id of its own."""
        raise NotImplementedError
