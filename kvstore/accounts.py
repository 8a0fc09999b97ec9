"""What was done for each tenant and namespace: plain counts, from which costs are worked out when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

MOST: Final = 256
OTHER: Final = "other"  # no namespace's id


class Account:
    """Of one namespace, since the node started; the counts of an account only grow.

    Attributes:
        tenant: Whose; "" for what the node did for itself.
        namespace: Its id; "" for a tenant's work that is of none, `OTHER` for all that have no account of their own.
        requests: To the store, by verb: every one that was sent, repeated and second ones included.
        sent: Bytes of bodies to the store.
        fetched: Bytes of bodies from the store.
        kept: Bytes of objects that came to be by this.
        tokens: That readers got, by tier; of a model on several ranks those of the first alone, for the others read the same.
        read: Bytes that readers got, by tier, on every rank.
        written: Bytes that writers put into memory.
        load_s: Seconds that readers waited where memory did not have all; of the first rank alone.
        gpus: Ranks that it was read for.
    """

    __slots__ = ("fetched", "gpus", "kept", "load_s", "namespace", "read", "requests", "sent", "tenant", "tokens", "written")

    def __init__(self, tenant: str, namespace: str) -> None:
        self.tenant, self.namespace = tenant, namespace
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.read: Counter[str] = Counter()
        self.sent = self.fetched = self.kept = self.written = 0
        self.load_s = 0.0
        self.gpus = 1


class Accounts:
    """One for each namespace, in a bounded number: those that come when there are `most` share one of their tenant.

    Which have one of their own never changes while a node lives: a counter that moved its past elsewhere would be read as a jump.
    Tenants are not bounded here: whoever opens an account checks that the node serves them.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._all: dict[tuple[str, str], Account] = {}

    def of(self, tenant: str, namespace: str = "") -> Account:
        """The account that this is counted in."""
        found = self._all.get((tenant, namespace))
        return found if found is not None else self._open(tenant, namespace)

    def __iter__(self) -> Iterator[Account]:
        return iter(list(self._all.values()))

    def _open(self, tenant: str, namespace: str) -> Account:
        if namespace not in {"", OTHER} and len(self._all) >= self._most:
            return self.of(tenant, OTHER)
        made = self._all[tenant, namespace] = Account(tenant, namespace)
        return made
