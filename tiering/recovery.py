"""What a disk tier still has after a restart, however it was stopped."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from pathlib import Path

from tiering.extents import PAGE
from tiering.index import META, SLOTS, Change, Index
from tiering.owners import Owners
from tiering.policy import Lru
from tiering.sealer import SALT
from tiering.slab import Placed, Slab

_RECORD = struct.Struct("<QQQ16s")  # offset, size, seq, digest
_RUNNING = b"running"  # the boot id under which the tier is in use; absent after a clean stop


def record(placed: Placed) -> Change:
    """The index entry of a slot."""
    value = _RECORD.pack(placed.offset, placed.size, placed.seq, placed.digest) + placed.salt
    return Change(SLOTS, placed.name, value)


def boot_id() -> str:
    """A name for this run of the kernel: while it stays, whatever was written is still there."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def recover(index: Index, slab: Slab, limit: int, owners: Sequence[int]) -> tuple[list[Placed], int]:
    """Read the index, believe what can be believed, and mark the tier as running. Blocking.

    After a clean stop, or when only the process died, the index is right: a slot is overwritten only after its old entry is
    gone. If the machine went down instead, that rests on the disk having kept the promise of a flush; so every slot must
    show its header. Values are checked at every read in any case.

    Args:
        index: Just opened.
        slab: Of its final size.
        limit: Payload bytes; where it was lowered, those values are dropped that would be evicted, by age.
        owners: Who shares the tier.

    Returns:
        What is there, oldest first; and how many entries were dropped (they are out of the index).

    Raises:
        OSError: The index cannot be written.
    """
    meta = dict(index.load(META))
    listed = index.load(SLOTS)
    claims = [_parse(name, value) for name, value in listed]
    placed = without_overlap(claim for claim in claims if claim is not None and _inside(claim, slab.size))
    now = boot_id().encode()
    if meta.get(_RUNNING, now) != now:
        placed = [claim for claim in placed if slab.has_header(claim)]
    placed.sort(key=lambda claim: claim.seq)
    placed = _fitting(placed, limit, Owners(owners, Lru))
    kept = {claim.name for claim in placed}
    lost = [Change(SLOTS, name, None) for name, _ in listed if name not in kept]
    index.submit([*lost, Change(META, _RUNNING, now)]).result()
    return placed, len(lost)


def stopped() -> Change:
    """Mark a clean stop."""
    return Change(META, _RUNNING, None)


def without_overlap(claims: Iterable[Placed]) -> list[Placed]:
    """Of claims to the same bytes only the latest stands."""
    standing: list[Placed] = []
    for claim in sorted(claims, key=lambda claim: claim.offset):
        while standing and standing[-1].offset + standing[-1].length > claim.offset and standing[-1].seq < claim.seq:
            standing.pop()
        if not standing or standing[-1].offset + standing[-1].length <= claim.offset:
            standing.append(claim)
    return standing


def _fitting(placed: list[Placed], limit: int, owners: Owners) -> list[Placed]:
    """What is left, in its order, when all that is too much has gone as if it were evicted."""
    used = sum(one.size for one in placed)
    if used <= limit:
        return placed
    left = {one.name: one for one in placed}
    for one in placed:
        owner = owners.of(one.who)
        owner.held += one.size
        owner.policy.add(one.name)
    while used > limit and (name := owners.victim(None)) is not None:
        gone = left.pop(name)
        owners.of(gone.who).held -= gone.size
        used -= gone.size
    return list(left.values())


def _parse(name: bytes, value: bytes) -> Placed | None:
    if len(name) not in {32, 40} or len(value) not in {_RECORD.size, _RECORD.size + SALT}:
        return None
    offset, size, seq, digest = _RECORD.unpack_from(value)
    return Placed(name[:32], offset, size, seq, digest, value[_RECORD.size :], int.from_bytes(name[32:], "little"))


def _inside(claim: Placed, size: int) -> bool:
    return claim.size > 0 and claim.offset % PAGE == 0 and claim.offset + claim.length <= size
