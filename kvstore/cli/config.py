"""`kvtier config`, and how commands that run here find their configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import typer

from kvstore.cli import output
from kvstore.cli.output import Format, FormatOption
from kvstore.config import Bytes, Loaded, Seconds, Tenant, load, masked
from kvstore.errors import Invalid, NotFound

PLACES: Final = ("kvtier.toml", "/etc/kvtier/kvtier.toml")  # the first that exists

ConfigOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file; by default ./kvtier.toml, then /etc/kvtier/kvtier.toml."),
]
SetOption: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.FIELD=VALUE", help="One setting, over file and environment; may be repeated."),
]
StoreOption: TypeAlias = Annotated[
    str, typer.Option("--store", metavar="URL", help="Which bucket, s3://bucket/prefix?...; the configured one by default.")
]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="What `kvtier serve` would use here.")


@app.callback()
def _config() -> None:
    """What `kvtier serve` would use here."""


@app.command()
def show(config: ConfigOption = None, settings: SetOption = None, form: FormatOption = Format.table) -> None:
    """Print what `kvtier serve` would use here, and where each value comes from; a running node may have others."""
    loaded = read(config, settings)
    if form is Format.json:
        for name, (value, origin) in masked(loaded).items():
            output.print_json({"name": name, "value": value, "origin": origin})
        return
    output.print_table(
        ["setting", "value", "from"],
        [[name, _readable(loaded, name, value), origin] for name, (value, origin) in masked(loaded).items()],
    )
    for name, tenant in loaded.settings.tenants.items():
        users = ", ".join(map(str, tenant.uids)) or "the node's own"
        typer.echo(f"tenant {name}: local users {users}; {_quotas(tenant)}")


def _quotas(tenant: Tenant) -> str:
    limits = {"max_bytes": tenant.max_bytes, "max_sessions": tenant.max_sessions, "requests": tenant.requests}
    return ", ".join(f"{name} {value}" for name, value in limits.items() if value) or "no quotas"


def _readable(loaded: Loaded, name: str, value: str) -> str:
    section, _, field = name.partition(".")
    real = getattr(getattr(loaded.settings, section), field)
    if isinstance(real, Bytes):
        return output.size(real)
    if isinstance(real, Seconds):
        return output.span(real) if real else "0"
    return value


def in_force(named: Path | None) -> Path | None:
    """The configuration file: the one that was named, else the first that is there; None where there is none."""
    return named or next((place for place in map(Path, PLACES) if place.is_file()), None)


def read(path: Path | None, flags: list[str] | None, more: Mapping[str, str] | None = None) -> Loaded:
    """The configuration of this machine: file, then environment, then flags.

    Args:
        path: As `--config`.
        flags: As `--set`.
        more: Further flags by `section.field`, "" where one was not given; `--set` wins over them.

    Raises:
        NotFound: A file was named and is not there.
        Invalid: What :func:`kvstore.config.load` refuses, or a file that cannot be read.
    """
    if path is not None and not path.is_file():
        raise NotFound(f"--config {path} does not exist", remedy="name a file that is there, or leave --config out")
    path = in_force(path)
    try:
        text = path.read_text() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}") from None
    given = {name: value for name, value in (more or {}).items() if value}
    loaded = load(toml=text, toml_name=str(path or ""), env=os.environ, flags={**given, **dict(map(_setting, flags or []))})
    for each in loaded.ignored:
        _warn(each)
    return loaded


@cache
def _warn(text: str) -> None:
    """Once: some commands read their configuration twice."""
    typer.echo(f"warning: {text}", err=True)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise Invalid(f"--set is {text!r}; write it like dram.size=4GiB")
    return name, value
