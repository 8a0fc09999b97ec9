"""How much of a disk that several share the promises of each hold: what is held cannot make room for anybody."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvstore.errors import Overloaded
from tiering import Want


class Parts:
    """Bytes that promises of each tenant hold. A block that several of them hold counts once.

    Args:
        most: Bytes that those of one tenant may hold.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._holds: dict[str, Counter[bytes]] = {}  # by tenant: of each block
        self._bytes: Counter[str] = Counter()

    def refuse(self, tenant: str, wants: Sequence[Want]) -> None:
        """Raises `Overloaded` where a promise of these would hold more than a tenant may."""
        held, holds = self._bytes[tenant], self._holds.get(tenant, Counter())
        more = sum({want.key: want.size for want in wants if want.key not in holds}.values())
        if held + more > self._most:
            raise Overloaded(
                f"promised commits hold {held} bytes of the disk, and this one needs {more} more: "
                f"at most {self._most} of a tenant, an even part of nvme.size"
            )

    def take(self, tenant: str, wants: Sequence[Want]) -> None:
        """A promise holds these."""
        holds = self._holds.setdefault(tenant, Counter())
        for want in wants:
            holds[want.key] += 1
            if holds[want.key] == 1:
                self._bytes[tenant] += want.size

    def give(self, tenant: str, wants: Sequence[Want]) -> None:
        """Undo one `take`; what is not held is ignored."""
        holds = self._holds.get(tenant, Counter())
        for want in wants:
            if holds[want.key] > 1:
                holds[want.key] -= 1
            elif holds[want.key]:
                del holds[want.key]
                self._bytes[tenant] -= want.size
        if not holds:
            self._holds.pop(tenant, None)
