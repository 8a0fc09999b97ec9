"""`kvtier fsck`: check a root, and repair what the protocol allows anybody to repair."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from kvstore.errors import Gone, KVTierError
from kvstore.ids import BlockName
from kvstore.model import Branch, Version
from kvstore.repo.blocks import want
from kvstore.repo.checking import Check, Named, Report
from kvstore.repo.edits import Amendment, dropped
from kvstore.repo.heads import versions_of
from kvstore.repo.repository import Repo

__all__ = ["Report", "fsck"]
WEEK_S: Final = 7 * 86400.0


async def fsck(repo: Repo, *, deep: bool = False, repair: bool = False, grace: float = WEEK_S) -> Report:
    """Check a root while others work on it.

    Args:
        repo: Where.
        deep: Read every named block and verify its digests.
        repair: Put sound bytes over bad copies where another generation has them; shorten branches to what is sound (a rewind,
            by swaps); drop branches without name and expiry that are older than `grace`.
        grace: Seconds by the store's clock in which a create may still be under way.

    Raises:
        Unavailable: The store does not answer, or the epoch is missing.
        Unsupported: Something was written by a newer kvtier.
    """
    check = Check(repo)
    report = await check.run(deep=deep, grace=grace)
    if repair:
        await _Repairs(repo, check).run()
    return report


class _Repairs:
    def __init__(self, repo: Repo, check: Check) -> None:
        self._repo, self._check, self._done = repo, check, check.report.repaired

    async def run(self) -> None:
        mended: dict[tuple[BlockName, int], bool] = {}
        for named in self._check.bad:
            at = (named.name, named.copy.gen)
            if at not in mended:
                mended[at] = await self._mended(named)
        bad = [named for named in self._check.bad if not mended[named.name, named.copy.gen]]
        sound = {key: n for key, n in self._check.sound.items() if n < 0}
        for named in bad:
            sound[named.manifest] = min(named.index, sound.get(named.manifest, named.index))
        now = await self._repo.root.now()
        for head_key, head in self._check.heads.items():
            for branch_id, branch in head.branches.items():
                if any(self._check.manifest_key(head_key, version.manifest) in sound for version in versions_of(branch)):
                    await self._amend(
                        head_key, branch_id, self._shortened(head_key, branch_id, sound, now), "shortened to what is sound"
                    )
        for head_key, branch_id in self._check.nameless:
            await self._amend(head_key, branch_id, dropped(branch_id), "dropped: it had no name and no expiry")

    async def _mended(self, named: Named) -> bool:
        """Whether a bad copy was replaced by the bytes of another generation."""
        fields = await self._repo.namespace(named.name.namespace)
        if fields is None:
            return False
        asked = want(fields, named.name, named.copy)
        raw = memoryview(bytearray(asked.size))
        if await self._repo.origin.fetch(asked, raw) is not None:
            return False
        self._repo.uploads.forget(named.name, named.copy.gen, bad=True)
        await self._repo.uploads.mend(named.name, fields, (await self._repo.epochs.read()).epoch, raw)
        self._done.append(f"{self._repo.uploads.key(named.name, named.copy.gen)}: replaced by the bytes of another generation")
        return True

    async def _amend(self, head_key: str, branch_id: str, amendment: Amendment, what: str) -> None:
        try:
            await self._repo.families.run(head_key, amendment)
        except Gone:
            return
        except KVTierError as error:
            self._done.append(f"{head_key} branch {branch_id}: not {what}: {error.message}")
            return
        self._done.append(f"{head_key} branch {branch_id}: {what}")

    def _shortened(self, head_key: str, branch_id: str, sound: Mapping[str, int], now: float) -> Amendment:
        """The newest version as far as it is sound; older ones only if they are whole (R10: no length grows)."""

        def whole(version: Version) -> int:
            return min(version.n, sound.get(self._check.manifest_key(head_key, version.manifest), version.n))

        async def amend(branch: Branch) -> Mapping[str, Branch | None]:
            history = tuple(version for version in branch.history if whole(version) == version.n)
            best = next((version for version in versions_of(branch) if whole(version) >= 0), None)
            manifest, n = (best.manifest, whole(best)) if best is not None else ("", 0)
            after = msgspec.structs.replace(branch, history=history)
            if (manifest, n) != (branch.manifest, branch.n):
                after = msgspec.structs.replace(after, seq=branch.seq + 1, manifest=manifest, n=n, at=now)
            return {branch_id: after} if after != branch else {}

        return Amendment(branch_id, amend)
