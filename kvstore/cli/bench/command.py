"""The command: its options, its order, and how results are shown."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from kvstore.cli import output
from kvstore.cli.bench import bucket, coding, disk, memory, real
from kvstore.cli.bench.geometry import DEFAULT, Geometry, estimates, geometry
from kvstore.cli.bench.results import MIB, Ask, Line
from kvstore.cli.bench.stopping import Stopping
from kvstore.cli.config import ConfigOption, SetOption, read
from kvstore.cli.embedded import DataOption, beside, data_folder, folder_of_up
from kvstore.cli.output import Format, FormatOption
from kvstore.config import Settings, parse_bytes
from kvstore.errors import EXIT_FAILED, Invalid, KVTierError, Unavailable

BLOCK: Final = 8 * MIB
_LEAST, _MOST = BLOCK, 1 << 40
_QUICK_OBJECT: Final = 2 * MIB
_SECONDS, _QUICK_S = 40.0, 8.0  # and half of it for starting and stopping servers and cleaning up, at most
_QUICK_MOST_S, _CLEAN_S = 14.0, 2.0  # of all but imports; and of that for emptying the bucket and stopping its server
_START_S: Final = 3.0  # for the S3 server to start, in any case
_INTERRUPTED: Final = 130
_BUSY: Final = 1.2  # of the bare medium: beyond noise
_SHARES: Final = {"memory": 0.2, "disk": 0.35, "bucket": 0.35, "codec": 0.1}

app = typer.Typer(add_completion=False)


@app.command()
def bench(
    *,
    store: Annotated[str, typer.Option("--store", metavar="URL", help="Bucket to measure; the configured one by default.")] = "",
    path: Annotated[
        Path | None, typer.Option("--path", metavar="FOLDER", help="On the disk to measure; that of nvme.path by default.")
    ] = None,
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes to measure with: 512MiB, with --quick 192MiB.")] = "",
    model: Annotated[
        str, typer.Option("--model", help="Whose KV is restored: a name, or layers x KV heads x head dimension, as 32x8x128.")
    ] = DEFAULT,
    tokens: Annotated[int, typer.Option("--tokens", min=1, max=1 << 24, help="Length of the prompt to restore.")] = 4096,
    tokens_per_second: Annotated[
        float,
        typer.Option("--tokens-per-second", min=0.0, help="How fast your engine reads a prompt: what restoring competes with."),
    ] = 0.0,
    hf_model: Annotated[
        Path | None, typer.Option("--hf-model", metavar="FOLDER", help="Also: how small the KV of this model gets.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fifteen seconds, unless the machine is busy; less exact.")] = False,
    config: ConfigOption = None,
    settings: SetOption = None,
    data: DataOption = None,
    form: FormatOption = Format.table,
    json: Annotated[bool, typer.Option("--json", help="As --format json.")] = False,
) -> None:
    """What memory, disk and bucket give here, and how long restoring a prompt takes from each of them.

    Needs no node: it starts one for the DRAM tier. Everything it writes is deleted again, also on Ctrl-C. Ends with 1 where
    something could not be measured.
    """
    ends = time.monotonic() + _QUICK_MOST_S - _CLEAN_S if quick else math.inf
    kind, nbytes = geometry(model), parse_bytes(size or ("192MiB" if quick else "512MiB"), "--size")
    if not _LEAST <= nbytes <= _MOST:
        raise Invalid(f"--size is {nbytes} bytes; at least {output.size(_LEAST)}")
    ask = Ask(
        size=nbytes // BLOCK * BLOCK, block=BLOCK, object=_QUICK_OBJECT if quick else BLOCK, seconds=_QUICK_S if quick else _SECONDS
    )
    loaded = read(config, settings, {"store.url": store}).settings
    folder = _existing(path or Path(loaded.nvme.path or data_folder(data)).expanduser(), named=path is not None)
    disk.refuse_more_than_there_is(folder, ask)
    memory.refuse_more_than_there_is(ask)
    shown = _Shown(Format.json if json else form)
    try:
        with Stopping.watch() as stopping:
            for name, part in _parts(loaded, folder_of_up(data, config), folder, kind, ask, stopping, ends).items():
                shown.part(name, part)
            if hf_model is not None:
                shown.part("model", lambda take: take(next(real.measure(hf_model))))
    except KeyboardInterrupt:
        typer.echo("stopped; nothing was left behind", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    for line in estimates(shown.found, kind, tokens, tokens_per_second):
        shown.line(line)
    shown.table(f"{tokens:,} tokens of {model}, {output.size(tokens * kind.token_bytes)}")
    if shown.failed:
        raise typer.Exit(EXIT_FAILED)


Part = Callable[[Callable[[Line], None]], None]


def _parts(
    settings: Settings, data: Path | None, folder: Path, kind: Geometry, ask: Ask, stopping: Stopping, ends: float
) -> dict[str, Part]:
    """What to measure, in order; each hands its results over as they come.

    The bucket is last, and not measured where its server is not up by `ends`.
    """

    def all_of(measure: Callable[[float], Iterator[Line]], name: str) -> Part:
        def run(take: Callable[[Line], None]) -> None:
            for line in measure(_SHARES[name] * ask.seconds):
                take(line)

        return run

    def of_bucket(take: Callable[[Line], None]) -> None:
        async def run() -> None:
            async with AsyncExitStack() as closing:
                try:
                    async with asyncio.timeout(max(_START_S, ends - time.monotonic()) if ends < math.inf else None):
                        found = await closing.enter_async_context(beside(settings, data))
                except TimeoutError:
                    raise Unavailable("the S3 server did not start in time", remedy="leave --quick out") from None
                if not found.store.url:
                    take(Line(name="bucket", note="not measured: name one by --store, or set store.url"))
                    return
                async for line in bucket.measure(found, ask, _SHARES["bucket"] * ask.seconds):
                    take(line)

        stopping.run(run())

    return {
        "memory": all_of(lambda seconds: memory.measure(ask, seconds), "memory"),
        "disk": all_of(lambda seconds: disk.measure(folder, ask, seconds, stopping), "disk"),
        "codec": all_of(lambda seconds: coding.measure(kind, seconds), "codec"),
        "bucket": of_bucket,
    }


class _Shown:
    """JSON lines as they come; a table at the end."""

    def __init__(self, form: Format) -> None:
        self._form = form
        self.found: dict[str, Line] = {}
        self.failed = False

    def part(self, name: str, part: Part) -> None:
        """Run it. What it cannot measure is a result, too, and keeps nobody from the rest."""
        try:
            with output.waiting(f"measuring: {name}"):
                part(self.line)
        except KVTierError as error:
            self.line(Line(name=name, error=f"{error.message}; {error.remedy}"))

    def line(self, line: Line) -> None:
        """One more result."""
        self.found[line.name] = line
        self.failed |= bool(line.error)
        if self._form is Format.json:
            output.print_json(line)

    def table(self, restored: str) -> None:
        """Everything, for people."""
        if self._form is Format.json:
            return
        rows = [[line.name, _value(line), _of(line), line.error or line.note] for line in self.found.values()]
        output.print_table(["what", "value", "of the bare medium", ""], rows)
        if any(line.ratio is not None and line.ratio > _BUSY and _of(line) for line in self.found.values()):
            typer.echo("a tier cannot beat its medium: this machine was busy, run it again", err=True)
        typer.echo(f"restore_*: {restored}", err=True)


def _value(line: Line) -> str:
    if line.value is None:
        return "-"
    if line.unit == "hold":
        return "hold" if line.value else "DO NOT HOLD"
    value, unit = line.value, line.unit
    if unit == "us" and value >= 1e3:
        value, unit = value / 1e3, "ms"
    if unit == "GB/s":
        speed = f"{value:.2f} GB/s" if value >= 1 else f"{value * 1e3:.3g} MB/s"
        return speed + (f", {line.p50_ms:.1f} ms" if line.p50_ms is not None else "")
    return f"{value:,.0f} {unit}" if value >= 1e3 else f"{value:.3g} {unit}"


def _of(line: Line) -> str:
    return f"{line.ratio:.2f}" if line.ratio is not None and not line.name.startswith("restore_") else ""


def _existing(path: Path, *, named: bool) -> Path:
    """The folder, or where that is only configured the nearest one above it that is there: it is on the same disk."""
    path = path.absolute()
    if named:
        return path
    return next(folder for folder in (path, *path.parents) if folder.exists())
