"""`kvtier cost`: what each tenant and namespace cost on a node since it started, and what they saved."""

from __future__ import annotations

from typing import Final

import typer

from kvstore import api, open_sync
from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption

app = typer.Typer(add_completion=False)
_SHARED: Final = "(shared)"
_COUNTED: Final = (
    "tenant",
    "namespace",
    "model",
    "requests",
    "to bucket",
    "from bucket",
    "stored",
    "tokens served",
    "GPU time saved",
)


@app.command()
def cost(*, url: UrlOption = DEFAULT_URL, form: FormatOption = Format.table) -> None:
    r"""What each tenant and namespace cost since the node started, and what they saved.

    Requests, bytes and tokens are counted. Seconds of computing and sums are estimates by \[prices] of the node's settings.
    """
    with open_sync(url) as kv:
        found = kv.stats()
    if form is Format.json:
        for each in found.cost:
            output.print_json({**_fields(each), "currency": found.prices.currency, "source": found.prices.source})
        return
    prices = found.prices
    output.print_table(
        [*_COUNTED, *_sums(prices)],
        [_row(each, prices) for each in found.cost],
        empty="nothing was counted yet",
    )
    typer.echo(f"\nsince {output.span(found.uptime_s)}; " + _basis(prices), err=True)


def _row(each: api.Cost, prices: api.Prices) -> list[object]:
    estimated = bool(each.recompute_s)
    return [
        each.tenant or _SHARED,
        output.short(each.namespace),
        each.model,
        sum(each.requests.values()),
        output.size(each.sent),
        output.size(each.fetched),
        output.size(each.stored) if each.stored >= 0 else "unknown",
        sum(each.tokens.values()),
        _signed(each.avoided_s * each.gpus) if estimated else "unknown",
        *[_sum(each, field) for field in _sums(prices).values()],
    ]


def _sums(prices: api.Prices) -> dict[str, str]:
    """What has a price: the column, and the field of a row."""
    fields = {
        "requests": ("requests_cost", max(prices.put_1000, prices.get_1000, prices.list_1000)),
        "egress": ("egress_cost", prices.gb_egress),
        "storage a month": ("month_cost", prices.gb_month),
        "saved": ("saved", prices.gpu_hour),
    }
    return {f"{name}, {prices.currency}": field for name, (field, price) in fields.items() if price}


def _basis(prices: api.Prices) -> str:
    if not _sums(prices):
        return "no sums: [prices] is not set on the node, or not shown to this caller"
    return f"sums are estimates by {prices.source or '[prices] of the node'}"


def _sum(each: api.Cost, field: str) -> str:
    return "unknown" if field == "month_cost" and each.stored < 0 else _money(getattr(each, field))


def _money(value: float) -> str:
    return f"{value:z,.4f}" if abs(value) < 1 else f"{value:,.2f}"


def _signed(seconds: float) -> str:
    return output.span(seconds) if seconds > -1 else f"-{output.span(seconds)}"  # whole seconds: no "-0 s"


def _fields(each: api.Cost) -> dict[str, object]:
    return {field: getattr(each, field) for field in each.__struct_fields__}
