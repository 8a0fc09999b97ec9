"""`kvtier tokens`: access tokens of a node's or a gateway's HTTP API, in the file that it reads."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import typer

from kvstore.access import SCOPES, Scope, Token, Tokens, new_token
from kvstore.cli import output
from kvstore.cli.config import ConfigOption, read
from kvstore.cli.output import Format, FormatOption
from kvstore.clock import RandomIds, SystemClock
from kvstore.config import parse_seconds
from kvstore.errors import Invalid, NotFound

_NEW_MODE: Final = 0o600

FileOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--file", metavar="FILE", help="The file of tokens; by default the configuration's auth.tokens_file."),
]

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Access tokens of the HTTP API.")


class Shown(msgspec.Struct, frozen=True, kw_only=True):
    """A token, without what would let anybody in; `token` is its text where it was just made."""

    id: str
    tenant: str
    scopes: list[Scope]
    expires: str = ""
    expired: bool = False
    token: str = ""


@app.callback()
def _tokens() -> None:
    """Access tokens of the HTTP API."""


@app.command("create")
def create(
    *,
    tenant: Annotated[str, typer.Option("--tenant", metavar="TENANT", help="Whom it acts for.")] = "default",
    scope: Annotated[
        list[str] | None,
        typer.Option("--scope", metavar="SCOPE", help=f"{', '.join(SCOPES)}; may be repeated. By default read and write."),
    ] = None,
    expires: Annotated[str, typer.Option("--expires", metavar="TIME", help="From now: 12h, 90d; 0 is never.")] = "90d",
    file: FileOption = None,
    config: ConfigOption = None,
    form: FormatOption = Format.table,
) -> None:
    """Make a token and print it, this once: the file keeps its digest only. Nodes that read the file know it within a second."""
    scopes = [_scope(text) for text in scope or ["read", "write"]]
    seconds = int(parse_seconds(expires, "--expires"))
    now = datetime.fromtimestamp(SystemClock().now(), UTC).replace(microsecond=0)
    end = now + timedelta(seconds=seconds) if seconds else None
    path = _path(file, config)
    with _changing(path) as tokens:
        text, token_id, made = new_token(RandomIds(), tenant, dict.fromkeys(scopes), end)
        tokens.known[token_id] = made
    if form is Format.json:
        output.print_json(_shown(token_id, made, token=text))
        return
    until = f" until {end:%Y-%m-%d %H:%M} UTC" if end else ""
    typer.echo(f"{token_id}: {', '.join(made.scopes)} for tenant {tenant}{until}; shown once:", err=True)
    typer.echo(text)


@app.command("ls")
def ls(file: FileOption = None, config: ConfigOption = None, form: FormatOption = Format.table) -> None:
    """Which tokens there are. Their texts are nowhere."""
    found = [_shown(token_id, token) for token_id, token in sorted(_read(_path(file, config)).known.items())]
    if form is Format.json:
        for each in found:
            output.print_json(each)
        return
    output.print_table(
        ["id", "tenant", "scopes", "expires"],
        [
            [each.id, each.tenant, ", ".join(each.scopes), f"{each.expires or 'never'}{' (expired)' if each.expired else ''}"]
            for each in found
        ],
        empty="no tokens",
    )


@app.command("rm")
def rm(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="As `kvtier tokens ls` shows it; never the token itself.")],
    file: FileOption = None,
    config: ConfigOption = None,
) -> None:
    """Revoke a token. Nodes that read the file refuse it within a second; its reads and streams end, changes are finished."""
    with _changing(_path(file, config), there=True) as tokens:
        if tokens.known.pop(token_id, None) is None:
            shown = f"{token_id!r}" if not token_id.startswith("kvt_") else "of that text"
            raise NotFound(f"there is no token {shown}", remedy="give its id: `kvtier tokens ls` shows them")
    typer.echo(f"{token_id} is revoked", err=True)


def _path(file: Path | None, config: Path | None) -> Path:
    named = str(file) if file is not None else read(config, None).settings.auth.tokens_file
    if not named:
        raise Invalid("no file of tokens is named", remedy="give --file, or set auth.tokens_file in the configuration")
    return Path(named).expanduser()


def _scope(text: str) -> Scope:
    for scope in SCOPES:
        if scope == text:
            return scope
    raise Invalid(f"--scope is {text!r}; it must be one of {', '.join(SCOPES)}")


def _read(path: Path, *, blank: bool = False) -> Tokens:
    try:
        return Tokens.parse(path.read_text(), str(path), blank=blank)
    except FileNotFoundError:
        raise NotFound(f"{path} does not exist", remedy="`kvtier tokens create` makes it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} cannot be read: {error}") from None


@contextlib.contextmanager
def _changing(path: Path, *, there: bool = False) -> Iterator[Tokens]:
    """What the file has; at the end of the block it has that. One at a time, and whoever reads sees the one or the other.

    A file that is there keeps its mode and owner, so that a node of another user can go on reading it.
    """
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise Invalid(f"{path.parent}: {error.strerror}", remedy="make the folder first") from None
    fresh = path.with_name(f".{path.name}.new")
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        before = path.stat() if path.exists() else None
        tokens = _read(path, blank=not there) if there or before else Tokens({})
        yield tokens
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _NEW_MODE), "w") as file:  # noqa: PTH123  its mode from the start
            if before is not None:
                os.fchmod(file.fileno(), before.st_mode & 0o7777)
                with contextlib.suppress(PermissionError):  # only root gives files away
                    os.fchown(file.fileno(), before.st_uid, before.st_gid)
            file.write(tokens.text())
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except OSError as error:
        raise Invalid(f"{path} cannot be written: {error.strerror}") from None
    finally:
        os.close(folder)


def _shown(token_id: str, found: Token, *, token: str = "") -> Shown:
    end = found.expires
    return Shown(
        id=token_id,
        tenant=found.tenant,
        scopes=list(found.scopes),
        expires=end.astimezone(UTC).isoformat().replace("+00:00", "Z") if end else "",
        expired=end is not None and end.timestamp() <= SystemClock().now(),
        token=token,
    )
