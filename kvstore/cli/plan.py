"""`kvtier plan`: what a load takes of memory, disk and bucket, and what it costs. Asks nobody; docs/sizing.md explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from kvstore import api
from kvstore.cli import output
from kvstore.cli.bench.geometry import DEFAULT, geometry
from kvstore.cli.config import ConfigOption, SetOption, read
from kvstore.cli.machine import ENGINES, NODE_BYTES
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.planning import DAY, Line, Load, capacity, month
from kvstore.config import parse_seconds
from kvstore.config.loading import prefill_of
from kvstore.errors import Invalid
from kvstore.ids import Namespace

app = typer.Typer(add_completion=False)
_TIME: Final = "TIME"


@app.command()
def plan(
    *,
    sessions: Annotated[float, typer.Option("--sessions", min=0.001, help="New sessions a day, over all nodes.")],
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=api.MAX_TOKENS, help="Of a session at its end.")],
    turns: Annotated[int, typer.Option("--turns", min=1, help="Of a session.")] = 10,
    model: Annotated[
        str, typer.Option("--model", help="A name, or layers x KV heads x head dimension in two bytes, as 32x8x128.")
    ] = DEFAULT,
    namespace: Annotated[
        Path | None,
        typer.Option("--namespace", metavar="FILE.json", help="Instead of --model: a namespace's fields, for any shape."),
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=4096, help="Tensor-parallel ranks.")] = 1,
    nodes: Annotated[int, typer.Option("--nodes", min=1, help="Sessions are spread over so many.")] = 1,
    lasts: Annotated[str, typer.Option("--lasts", metavar=_TIME, help="From a session's first turn to its last.")] = "1h",
    dram_for: Annotated[str, typer.Option("--dram-for", metavar=_TIME, help="It stays in memory so long without a turn.")] = "10m",
    nvme_for: Annotated[str, typer.Option("--nvme-for", metavar=_TIME, help="And so long on disk.")] = "1d",
    ttl: Annotated[str, typer.Option("--ttl", metavar=_TIME, help="And so long in the bucket; lifecycle.session_ttl.")] = "",
    cold: Annotated[float, typer.Option("--cold", min=0, max=1, help="Share of later turns that begin from the bucket.")] = 0.1,
    ratio: Annotated[float, typer.Option("--ratio", min=0.5, help="Raw by stored bytes: 1 raw, about 1.45 bp-zstd of bf16.")] = 1.0,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    r"""How much memory, disk and bucket a load takes, and how many requests. With \[prices], what that costs.

    Arithmetic with means: peaks, prefixes that sessions share and hits in engines' own caches are not in it.
    """
    found = read(config, settings).settings
    load = Load(
        namespace=_fields(namespace) if namespace else _shape(model),
        ranks=ranks,
        tokens=tokens,
        turns=turns,
        sessions=sessions / DAY,
        lasts=parse_seconds(lasts, "--lasts"),
        dram_for=parse_seconds(dram_for, "--dram-for"),
        nvme_for=parse_seconds(nvme_for, "--nvme-for"),
        ttl=parse_seconds(ttl, "--ttl") if ttl else found.lifecycle.session_ttl,
        nodes=nodes,
        cold=cold,
        ratio=ratio,
        collect_every=found.lifecycle.collect_interval or found.lifecycle.anonymous_ttl,
    )
    prices = msgspec.convert(found.prices, api.Prices, from_attributes=True)
    prefill = prefill_of(found.prices).get(load.namespace.model, found.prices.prefill)
    lines = [*capacity(load, beside=ENGINES * found.dram.window + NODE_BYTES), *month(load, prices, prefill)]
    if form is Format.json:
        for line in lines:
            output.print_json(line)
        return
    output.print_table(["what", "how much", "how"], [[line.name, _readable(line), line.how] for line in lines])
    typer.echo(f"\n{_assumed(load)}", err=True)


def _shape(text: str) -> Namespace:
    shape = geometry(text)
    return Namespace(model=text, revision="plan", layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim)


def _assumed(load: Load) -> str:
    """What it was computed for, whether said or by default."""
    times = {"lasts": load.lasts, "dram-for": load.dram_for, "nvme-for": load.nvme_for, "ttl": load.ttl}
    said = [f"{name} {output.span(seconds)}" for name, seconds in times.items()]
    return ", ".join(
        [f"for model {load.namespace.model}", f"turns {load.turns}", *said, f"cold {load.cold:g}", f"ratio {load.ratio:g}"]
    )


def _fields(path: Path) -> Namespace:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Namespace)
    except (OSError, msgspec.MsgspecError) as error:
        raise Invalid(f"--namespace {path} does not hold a namespace's fields as JSON: {error}") from None


def _readable(line: Line) -> str:
    if line.unit == "bytes":
        return output.size(line.value)
    if line.unit == "bytes/s":
        return f"{output.size(line.value)}/s"
    return f"{line.value:,.0f} {line.unit}" if line.value >= 100 else f"{line.value:,.2f} {line.unit}"
