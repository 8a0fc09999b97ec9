"""The S3 server that `kvtier up` runs in its data folder: started, or found running by the commands beside it."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec
import typer

from kvstore.cli.config import in_force
from kvstore.config import Loaded, Settings
from kvstore.objects.seaweed import SeaweedFS

_STATE: Final = "store.json"
DISK: Final = "2GiB"  # of the disk tier on a machine that was not sized for it

DataOption: TypeAlias = Annotated[
    Path | None,
    typer.Option("--data", metavar="FOLDER", help="Data folder of `kvtier up`; by default ~/.local/share/kvtier."),
]


class _Access(msgspec.Struct, frozen=True):
    """How to reach the server, as long as it runs."""

    url: str
    access_key: str
    secret_key: str


def data_folder(named: Path | None) -> Path:
    """The data folder that was asked for, or the user's own."""
    if named is not None:
        return named.absolute()
    home = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share"
    return Path(home) / "kvtier"


def folder_of_up(named: Path | None, config: Path | None) -> Path | None:
    """The data folder of `kvtier up` that a command beside it means, where no store is configured.

    None where a configuration file speaks and no folder was named: it is about another node than the user's own `kvtier up`.
    """
    return data_folder(named) if named is not None or in_force(config) is None else None


@asynccontextmanager
async def start(folder: Path) -> AsyncIterator[str]:
    """A server on this folder while the block runs: the storage URL of its bucket. Its credentials go into our environment.

    Raises:
        Unsupported: The extra `local` is not installed.
        Unavailable: It did not come up, or another one uses the folder.
    """
    async with SeaweedFS.open(folder / "store") as server:
        access = _Access(
            f"s3://{server.bucket}/kv?endpoint={server.endpoint}&region=us-east-1&addressing=path",
            server.credentials.access_key,
            server.credentials.secret_key,
        )
        _become(access)
        state = folder / _STATE
        state.unlink(missing_ok=True)
        with os.fdopen(os.open(state, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(access))
        try:
            yield access.url
        finally:
            state.unlink(missing_ok=True)


def used_by_up(folder: Path) -> bool:
    """Whether it is a data folder of `kvtier up` with a server of its own."""
    return (folder / "store").is_dir()


def in_folder(loaded: Loaded, folder: Path) -> dict[str, str]:
    """Flags that put into the data folder what nobody configured to be elsewhere."""
    ours = {"nvme.path": str(folder / "nvme"), "nvme.size": DISK, "node.socket": str(folder / "node.sock")}
    return {name: value for name, value in ours.items() if loaded.origin[name] == "default"}


@asynccontextmanager
async def beside(settings: Settings, folder: Path | None) -> AsyncIterator[Settings]:
    """Settings of a command that opens the bucket itself.

    Where no store is configured and the folder is one of `kvtier up`, its server is meant: the running one, or one started now.
    """
    if settings.store.url or folder is None or not used_by_up(folder):
        yield settings
        return
    access = _running(folder)
    if access is not None:
        _become(access)
        yield _with_store(settings, access.url)
        return
    async with start(folder) as url:
        yield _with_store(settings, url)


def _running(folder: Path) -> _Access | None:
    """How to reach the server that `kvtier up` runs on this folder now, if it does: a server holds the lock of its folder."""
    try:
        lock = os.open(folder / "store" / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((folder / _STATE).read_bytes(), type=_Access)
    finally:
        os.close(lock)
    return None


def _become(access: _Access) -> None:
    """Later look-ups of the credential chain in this process find these keys first."""
    os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"] = access.access_key, access.secret_key
    os.environ.pop("AWS_SESSION_TOKEN", None)


def _with_store(settings: Settings, url: str) -> Settings:
    return msgspec.structs.replace(settings, store=msgspec.structs.replace(settings.store, url=url))
