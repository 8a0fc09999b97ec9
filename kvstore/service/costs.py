"""What tenants and namespaces cost and save: counts of this node, and estimates by the prices it was told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from kvstore import api
from kvstore.accounts import Account, Accounts
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

    def of(self, tenant: str, usage: Sequence[api.Usage]) -> list[api.Cost]:
        """Of a tenant, and of the node's own work; of everybody where `tenant` is "". Largest first.

        Args:
            tenant: Whose.
            usage: What is alive in the bucket, of the same.
        """
        alive = {(each.tenant, each.namespace): each.bytes for each in usage}
        accounts = [account for account in self._accounts if not tenant or account.tenant in {tenant, ""}]
        known = {(account.tenant, account.namespace) for account in accounts}
        accounts += [Account(*of) for of in alive if of not in known]  # stored, and not used through this node
        return sorted((self._cost(each, alive) for each in accounts), key=_size, reverse=True)

    def _cost(self, account: Account, alive: Mapping[tuple[str, str], int]) -> api.Cost:
        prices, stored = self.prices, alive.get((account.tenant, account.namespace), 0)
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
            requests_cost=_of_requests(account.requests.items(), prices),
            egress_cost=account.fetched / _GB * prices.gb_egress,
            month_cost=stored / _GB * prices.gb_month,
            saved=avoided / 3600 * account.gpus * prices.gpu_hour,
        )


def _of_requests(counts: Iterable[tuple[str, int]], prices: api.Prices) -> float:
    return sum(count / 1000 * float(getattr(prices, _CLASS[verb])) for verb, count in counts if verb in _CLASS)


def _size(cost: api.Cost) -> tuple[int, int, str]:
    return sum(cost.tokens.values()), sum(cost.requests.values()) + cost.stored, cost.namespace
