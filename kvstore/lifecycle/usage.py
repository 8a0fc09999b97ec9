"""How large what is alive is, by namespace: counted while a collection goes through the listing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvstore.api import Usage
from kvstore.errors import KVTierError
from kvstore.ids import NamespaceId
from kvstore.lifecycle.hints import MOST_USAGE
from kvstore.repo.root import Root

_DIGITS: Final = 64


class UsageCount:
    """Counts and bytes by namespace id.

    Args:
        prefix: Of block keys, before the namespace.
        earlier: What was counted before a stop.
    """

    def __init__(self, prefix: str, earlier: Sequence[Usage] = ()) -> None:
        self._at = len(prefix)
        self._counts = {usage.namespace: [usage.blocks, usage.bytes] for usage in earlier}

    def add(self, key: str, size: int) -> None:
        """One live block object."""
        namespace = key[self._at : self._at + _DIGITS]
        count = self._counts.get(namespace)
        if count is None:
            count = self._counts[namespace] = [0, 0]
        count[0] += 1
        count[1] += size

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return sum(nbytes for _, nbytes in self._counts.values())

    def counted(self) -> list[Usage]:
        """So far, largest first, without tenants."""
        largest = sorted(self._counts.items(), key=lambda entry: (-entry[1][1], entry[0]))[:MOST_USAGE]
        return [Usage(tenant="", namespace=namespace, blocks=blocks, bytes=nbytes) for namespace, (blocks, nbytes) in largest]

    async def by_tenant(self, root: Root) -> list[Usage]:
        """As `counted`, with the tenant of each namespace; "" where nobody registered it."""
        found = []
        for usage in self.counted():
            fields = None
            try:
                fields = await root.namespace(NamespaceId(usage.namespace))
            except KVTierError:
                fields = None  # unreadable: `fsck` says so
            tenant = fields.tenant if fields is not None else ""
            found.append(Usage(tenant=tenant, namespace=usage.namespace, blocks=usage.blocks, bytes=usage.bytes))
        return found
