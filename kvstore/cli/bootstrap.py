"""`kvtier bootstrap`: what a bucket needs before nodes use it, made by whoever may administer the store."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli import output
from kvstore.cli.config import ConfigOption, SetOption, StoreOption, read
from kvstore.cli.output import Format, FormatOption
from kvstore.config import StorageUrl
from kvstore.errors import Invalid, NotFound
from kvstore.objects.bootstrap import Step, bootstrap
from kvstore.objects.credential_chain import chain, small_chain
from kvstore.objects.credentials import Credentials
from kvstore.objects.opening import s3_settings

app = typer.Typer(add_completion=False)


@app.command(name="bootstrap")
def run(
    store: StoreOption = "",
    user: Annotated[
        Path | None,
        typer.Option("--user", metavar="FILE", help="Credentials file with the keys that nodes are to have; makes that user."),
    ] = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Make the bucket, a user that may use nothing else, and a rule that ends abandoned uploads; what is there is left.

    This process needs credentials that may administer the store (the AWS chain). Nodes need only those of `--user`.
    """
    found = read(config, settings, {"store.url": store}).settings
    url = StorageUrl.parse(found.store.url) if found.store.url else None
    if url is None or url.scheme != "s3":
        raise Invalid("which bucket?", remedy="name it with --store s3://bucket/prefix?endpoint=..., or set store.url")
    where = s3_settings(url, found.store)
    owner = asyncio.run(asyncio.to_thread(chain(where.region, instance_metadata=where.instance_metadata)))
    for step in bootstrap(where, url.path, owner, _keys_in(user, where.region) if user else None):
        _show(step, form)


def _keys_in(path: Path, region: str) -> Credentials:
    """Of the file alone: a variable with the owner's keys must not become the nodes'."""
    if not path.is_file():
        raise NotFound(f"--user {path} does not exist", remedy="name a file like ~/.aws/credentials")
    only = {"AWS_SHARED_CREDENTIALS_FILE": str(path), "AWS_CONFIG_FILE": os.devnull, "HOME": os.devnull}
    return small_chain(only, region, instance_metadata=False)


def _show(step: Step, form: Format) -> None:
    if form is Format.json:
        output.print_json(step)
    else:
        typer.echo(f"{step.what}: {step.outcome}{f': {step.detail}' if step.detail else ''}")
