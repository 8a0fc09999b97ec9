"""Which commands exist, and how an error becomes a message and an exit status.

Exit status: 0 done, 1 failed, 2 wrong usage, 3 not found, 4 unavailable (:data:`kvstore.errors.KINDS`).
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from kvstore.errors import KINDS, KVTierError, Unsupported

# Help must not wait for what the commands import, so their names and first lines stand here.
COMMANDS: Final = {
    "up": ("up", "One machine, everything: an embedded S3 store unless you name one, and a node."),
    "serve": ("serve", "Run a node with the configuration of this machine."),
    "doctor": ("doctor", "Check the store's guarantees, disk, memory, clock, credentials and peers, and say what to do."),
    "bench": ("bench", "What memory, disk and bucket give here, and how long restoring a prompt takes from each."),
    "plan": ("plan", "How much memory, disk and bucket a load takes, how many requests, and what that costs."),
    "replay": ("replay", "Nodes, tiers and routers on a trace, simulated: hits, time to first token, balance, bytes, cost."),
    "sessions": ("sessions", "Look at sessions and change their lives: ls, create, show, restore, fork, rewind, ..."),
    "namespaces": ("namespaces", "What is stored for which model; rm after a weight update."),
    "tokens": ("tokens", "Access tokens of the HTTP API: create, ls, rm."),
    "tenants": ("tenants", "All that one tenant has: rm."),
    "keys": ("keys", "Keys of an encrypted bucket: new, ls, rotate, rm."),
    "warm": ("warm", "Publish a session's prefix, pinned, for everyone in the tenant."),
    "collect": ("collect", "Delete from the bucket what no session names any more."),
    "fsck": ("fsck", "Check the bucket itself, without a node, and repair what may be repaired."),
    "bootstrap": ("bootstrap", "Make the bucket, a user that may use nothing else, and its rules, as who runs the store."),
    "gateway": ("gateway", "An OpenAI-compatible proxy that sends requests where their first token is cheapest."),
    "route": ("route", "Where a gateway would send a prompt, and why."),
    "stats": ("stats", "Tiers, queues and requests of a node."),
    "cost": ("cost", "What each tenant and namespace cost on a node, and what it saved."),
    "config": ("config", "show: what `kvtier serve` would use here, and where each value came from."),
}
_EXTRAS: Final = {"gateway": "gateway", "bootstrap": "bootstrap"}  # of the commands that need more than `node`


class _Deferred(TyperCommand):
    """Stands in the help for a command whose module is not imported yet."""

    def __init__(self, name: str, module: str, about: str) -> None:
        super().__init__(name=name, help=about)
        self._module = f"kvstore.cli.{module}"

    def load(self) -> Any:
        """The real command. Raises `Unsupported` where a package it needs is not installed."""
        try:
            return typer.main.get_command(importlib.import_module(self._module).app)
        except ModuleNotFoundError as error:
            extra = _EXTRAS.get(str(self.name), "node")
            remedy = f"pip install 'kvtier[{extra}]'; in a checkout: pip install '.[{extra}]'"
            raise Unsupported(f"`kvtier {self.name}` needs the package {error.name}", remedy=remedy) from error


class _Commands(TyperGroup):
    """Imports a command's module when it is called, and turns kvtier's errors into exit statuses."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, (module, about) in COMMANDS.items():
            self.add_command(_Deferred(name, module, about))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class, with the real command."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command.load() if isinstance(command, _Deferred) else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of ours becomes a message and an exit status."""
        try:
            return super().invoke(ctx)
        except KVTierError as error:
            report(error)
            raise typer.Exit(KINDS[error.kind].exit) from None


def report(error: KVTierError) -> None:
    """One line that says what is wrong and one that says what to do, on stderr."""
    typer.secho(f"error: {error.message}", fg="red", err=True)
    typer.echo(f"  {error.remedy}", err=True)


app = typer.Typer(cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvtier {metadata.version('kvtier')}")
        raise typer.Exit


@app.callback()
def _kvtier(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """A persistent tier for the KV cache of LLM inference: DRAM and NVMe in front of an S3 bucket."""
