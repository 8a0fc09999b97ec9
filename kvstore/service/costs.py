"""What tenants and namespaces cost and save: counts of this node, and estimates by the prices it was told."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from kvstore import api
from kvstore.accounts import MOST, OTHER, Account, Accounts
from kvstore.config import PricesSettings
from kvstore.config.loading import prefill_of
from kvstore.service.registry import Registry

_GB: Final = 1e9
_CLASS: Final = {"put": "put_1000", "copy": "put_1000", "get": "get_1000", "head": "get_1000", "list": "list_1000"}


class Costs:
    """Works them out when somebody asks.

    Args:
        accounts: What was counted.
        registry: Which model a namespace is of.
        settings: `[prices]`.
    """

    def __init__(self, accounts: Accounts, registry: Registry, settings: PricesSettings) -> None:
        self._accounts, self._registry = accounts, registry
        self.prices = msgspec.convert(settings, api.Prices, from_attributes=True)
        self._prefill, self._of_model = settings.prefill, prefill_of(settings)

    def now(self, usage: Sequence[api.Usage]) -> list[api.Cost]:
        """Of every tenant and namespace, and of the node's own work; the largest first.

        Args:
            usage: What is alive in the bucket. It may tell of more namespaces than have an account: the others' bytes go together.
        """
        accounts = {(account.tenant, account.namespace): account for account in self._accounts}
        stored: Counter[tuple[str, str]] = Counter()
        for each in usage:
            whose = (each.tenant, each.namespace)
            if whose not in accounts and len(accounts) >= MOST:
                whose = (each.tenant, OTHER)
            accounts.setdefault(whose, Account(*whose))
            stored[whose] += each.bytes
        rows = [self._cost(account, stored.get(whose, -1 if account.namespace else 0)) for whose, account in accounts.items()]
        return sorted(rows, key=_size, reverse=True)

    def _cost(self, account: Account, stored: int) -> api.Cost:
        prices = self.prices
        fields = self._registry.known(account.tenant, account.namespace)
        model = fields.model if fields is not None else ""
        rate = self._of_model.get(model, self._prefill)
        recompute = sum(account.tokens.values()) / rate if rate else 0.0
        avoided = recompute - account.load_s if rate else 0.0
        return api.Cost(
            tenant=account.tenant,
            namespace=account.namespace,
            model=model,
            requests=dict(account.requests),
            sent=account.sent,
            fetched=account.fetched,
            stored=stored,
            tokens=dict(account.tokens),
            read=dict(account.read),
            written=account.written,
            load_s=account.load_s,
            recompute_s=recompute,
            avoided_s=avoided,
            gpus=account.gpus,
            requests_cost=of_requests(account.requests.items(), prices),
            egress_cost=account.fetched / _GB * prices.gb_egress,
            month_cost=max(0, stored) / _GB * prices.gb_month,
            saved=avoided / 3600 * account.gpus * prices.gpu_hour,
        )


def of_requests(counts: Iterable[tuple[str, int]], prices: api.Prices) -> float:
    """What so many requests cost, by verb (`put`, `copy`, `get`, `head`, `list`; others are free)."""
    return sum(count / 1000 * float(getattr(prices, _CLASS[verb])) for verb, count in counts if verb in _CLASS)


def _size(cost: api.Cost) -> tuple[int, int, str]:
    return sum(cost.tokens.values()), sum(cost.requests.values()) + max(0, cost.stored), cost.namespace
