"""What tenants and namespaces cost, as metrics. Where they are counted, namespaces are bounded: 256, and `other`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvstore import api

_WHOSE: Final = ["tenant", "namespace"]
_MAPS: Final[Mapping[str, tuple[str, str, Callable[[api.Cost], Mapping[str, int]]]]] = {
    "requests": ("op", "Requests to the store.", lambda cost: cost.requests),
    "bucket_bytes": (
        "direction",
        "Bytes of bodies to the store (in) and from it (out).",
        lambda cost: {"in": cost.sent, "out": cost.fetched},
    ),
    "tokens": ("tier", "Tokens that readers got; those of a model on several ranks once.", lambda cost: cost.tokens),
    "read_bytes": ("tier", "Bytes that readers got.", lambda cost: cost.read),
}
_COUNTS: Final[Mapping[str, tuple[str, Callable[[api.Cost], float]]]] = {
    "written_bytes": ("Bytes that writers put into memory.", lambda cost: cost.written),
    "load_seconds": ("Seconds that readers waited for what was not in memory.", lambda cost: cost.load_s),
    "recompute_seconds": ("Estimated: what computing those tokens takes, by [prices].", lambda cost: cost.recompute_s),
}
_MONEY: Final[Mapping[str, Callable[[api.Cost], float]]] = {
    "requests": lambda cost: cost.requests_cost,
    "egress": lambda cost: cost.egress_cost,
}


def cost_metrics(costs: Sequence[api.Cost], prices: api.Prices) -> Iterator[Metric]:
    """Every family, with a sample for each tenant and namespace."""
    for name, (label, about, get) in _MAPS.items():
        family = CounterMetricFamily(f"kvtier_cost_{name}", about, labels=[*_WHOSE, label])
        for cost in costs:
            for value, count in get(cost).items():
                family.add_metric([cost.tenant, cost.namespace, value], count)
        yield family
    for name, (about, of) in _COUNTS.items():
        counter = CounterMetricFamily(f"kvtier_cost_{name}", about, labels=_WHOSE)
        for cost in costs:
            counter.add_metric([cost.tenant, cost.namespace], of(cost))
        yield counter
    stored = GaugeMetricFamily("kvtier_cost_stored_bytes", "Alive in the bucket at the last collection by any node.", labels=_WHOSE)
    for cost in costs:
        if cost.stored >= 0:
            stored.add_metric([cost.tenant, cost.namespace], cost.stored)
    yield stored
    yield from _money(costs, prices)


def _money(costs: Sequence[api.Cost], prices: api.Prices) -> Iterator[Metric]:
    spent = CounterMetricFamily("kvtier_cost_spent", "Estimated by [prices].", labels=[*_WHOSE, "kind", "currency"])
    about = "Estimated by [prices]: of storing for a month what is stored now."
    month = GaugeMetricFamily("kvtier_cost_per_month", about, labels=[*_WHOSE, "currency"])
    about = "Estimated by [prices]: GPU time that loading made unnecessary. It falls where loading takes longer than computing."
    saved = GaugeMetricFamily("kvtier_cost_saved", about, labels=[*_WHOSE, "currency"])
    for cost in costs:
        whose = [cost.tenant, cost.namespace]
        for kind, of in _MONEY.items():
            spent.add_metric([*whose, kind, prices.currency], of(cost))
        month.add_metric([*whose, prices.currency], cost.month_cost)
        saved.add_metric([*whose, prices.currency], cost.saved)
    yield from (spent, month, saved)
