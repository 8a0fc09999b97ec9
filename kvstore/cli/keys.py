"""`kvtier keys`: the key file, and the keys that an encrypted bucket holds wrapped under it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

import msgspec
import typer

from kvstore.api import Dropped
from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, StoreOption, read
from kvstore.cli.embedded import DataOption, folder_of_up
from kvstore.cli.namespaces import YesOption, print_dropped
from kvstore.cli.output import Format, FormatOption
from kvstore.cli.repository import repository
from kvstore.config import Settings
from kvstore.errors import Invalid, NotFound, Unsupported
from kvstore.keys import check_id, escape
from kvstore.lifecycle.removal import forget_tenant
from kvstore.repo import Repo
from kvstore.sealing import MasterKeys, TenantKeyring, made, rewrap_keyring, spelled

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Keys of an encrypted bucket.")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A tenant's keys: how many, and the master keys that they are wrapped under."""

    tenant: str
    keys: int
    masters: list[str]
    deleted: bool


class Rotated(msgspec.Struct, frozen=True, kw_only=True):
    """What was wrapped anew, or which tenant has a new data key."""

    master: str
    rewrapped: int = 0
    tenant: str = ""


@app.callback()
def _keys() -> None:
    """Keys of an encrypted bucket."""


@app.command("new")
def new(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The key file; made if it is not there.")],
    *,
    name: Annotated[str, typer.Option("--id", metavar="ID", help="What the key is called; a date, say.")] = "1",
) -> None:
    """Put a fresh master key at the front of a key file: from then on it is the one that wraps; the others still unwrap.

    Keep a copy where the bucket is not: without its master key nothing in it can be read by anybody.
    """
    key, before = made(name), ""
    if file.exists():
        if key.id in MasterKeys.read(str(file)).ids:
            raise Invalid(f"{file} has a key {key.id!r} already", remedy="choose another --id")
        before = file.read_text()
    fresh = file.with_name(f"{file.name}.new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.write(spelled(key) + ("\n" + before if before else ""))
        written.flush()
        os.fsync(written.fileno())
    fresh.replace(file)
    typer.echo(f"{file}: key {key.id} wraps from now on", err=True)


@app.command("ls")
def ls(
    store: StoreOption = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Which tenants have keys in the bucket, and under which master keys."""
    for each in asyncio.run(_listed(read(config, settings, {"store.url": store}).settings, folder_of_up(data, config))):
        if form is Format.json:
            output.print_json(each)
        else:
            state = "deleted" if each.deleted else f"{each.keys} under {', '.join(each.masters)}"
            typer.echo(f"{each.tenant}: {state}")


@app.command("rotate")
def rotate(
    tenant: Annotated[str, typer.Argument(metavar="[TENANT]", help="A new data key for what this tenant stores from now on.")] = "",
    *,
    store: StoreOption = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Wrap all keys in the bucket under the first key of the key file; or, for a tenant, make a new data key.

    No block is rewritten. All nodes need the file before. Once it has ended well, and they were restarted, older master keys may
    leave the file.
    """
    loaded = read(config, settings, {"store.url": store}).settings
    done = asyncio.run(_rotated(loaded, folder_of_up(data, config), tenant))
    if form is Format.json:
        output.print_json(done)
    else:
        typer.echo(f"tenant {tenant}: a new data key" if tenant else f"{done.rewrapped} wrapped anew under {done.master}")


@app.command("rm")
def rm(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help="Whose keys go.")],
    *,
    yes: YesOption = False,
    store: StoreOption = "",
    data: DataOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Delete a tenant's keys, so that no copy of what it stored is ever read again, then drop its sessions. There is no way back.

    Nodes that use the keys now let go of them within a minute. Its id cannot be used again under this prefix.
    """
    if not yes:
        typer.confirm(f"Delete the keys of tenant {tenant!r}, for good?", abort=True, err=True)
    print_dropped(
        asyncio.run(_removed(read(config, settings, {"store.url": store}).settings, folder_of_up(data, config), tenant)), form
    )


def _ring(repo: Repo, settings: Settings, folder: Path | None) -> TenantKeyring:
    if repo.root.tenants is None:
        where = settings.store.url or f"the store of `kvtier up` in {folder}"
        remedy = "name an encrypted one with --store, --config or --data"
        raise Unsupported(f"{where} is not encrypted: it holds no keys", kind="not_encrypted", remedy=remedy)
    return repo.root.tenants


async def _listed(settings: Settings, folder: Path | None) -> list[Shown]:
    async with repository(settings, folder) as repo:
        return [
            Shown(
                tenant=unquote(tenant),
                keys=len(value.keys),
                masters=sorted({key.wrapped.master for key in value.keys}),
                deleted=value.destroyed,
            )
            for tenant, value in await _ring(repo, settings, folder).all()
        ]


async def _rotated(settings: Settings, folder: Path | None, tenant: str) -> Rotated:
    async with repository(settings, folder) as repo:
        root, ring = repo.root, _ring(repo, settings, folder)
        if tenant:
            if not await ring.rotate(escape(check_id(tenant, "tenant"))):
                raise NotFound(f"tenant {tenant!r} has no key yet")
            return Rotated(master=ring.masters.current.id, tenant=tenant)
        done = [await ring.rewrap(each) for each, _ in await ring.all()]
        done.append(await rewrap_keyring(root.store, root.keys, ring.masters, root.ids))
        return Rotated(master=ring.masters.current.id, rewrapped=sum(done))


async def _removed(settings: Settings, folder: Path | None, tenant: str) -> Dropped:
    async with repository(settings, folder) as repo:
        with output.waiting("deleting keys, dropping sessions"):
            return await forget_tenant(repo, tenant)
