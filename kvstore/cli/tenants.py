"""`kvtier tenants`: all that one tenant has."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from kvstore import open_sync
from kvstore.api import Dropped
from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, read
from kvstore.cli.embedded import DataOption, folder_of_up
from kvstore.cli.namespaces import YesOption, print_dropped
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.remote import DEFAULT_URL, UrlOption
from kvstore.cli.repository import repository
from kvstore.config import Settings
from kvstore.lifecycle.removal import drop_tenant, forget_tenant

app = typer.Typer(no_args_is_help=True, add_completion=False, help="All that one tenant has.")


@app.callback()
def _tenants() -> None:
    """All that one tenant has."""


@app.command("rm")
def rm(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose sessions go.")],
    *,
    yes: YesOption = False,
    key: Annotated[
        bool,
        typer.Option(
            "--key", help="Delete its keys first: no copy of what it stored is read again. On an encrypted bucket itself."
        ),
    ] = False,
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Work on this bucket from here, without a node: s3://bucket/prefix?...")
    ] = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    url: UrlOption = DEFAULT_URL,
    form: FormatOption = Format.table,
) -> None:
    """Drop every session of a tenant, pinned ones too. Their blocks go with the next collections.

    Asks a node, which does it for its caller's own tenant only; with --store, --config, --set or --data it works on the bucket
    itself, for any tenant. May be repeated, and interrupted. With --key the tenant's id cannot be used again under this prefix.
    """
    if not yes:
        what = "Delete the keys and" if key else "Drop"
        typer.confirm(f"{what} every session of tenant {tenant!r}?", abort=True, err=True)
    if key or store or config is not None or settings or data is not None:
        loaded = read(config, settings, {"store.url": store})
        dropped = asyncio.run(_directly(loaded.settings, folder_of_up(data, config), tenant, key=key))
    else:
        with open_sync(url) as kv:
            dropped = kv.delete_tenant(tenant)
    print_dropped(dropped, form)


async def _directly(settings: Settings, folder: Path | None, tenant: str, *, key: bool) -> Dropped:
    async with repository(settings, folder) as repo:
        with output.waiting("dropping sessions"):
            return await (forget_tenant if key else drop_tenant)(repo, tenant)
