"""Commands to a Valkey or Redis, many in one round trip. Nothing here waits for less than the caller does, or tries again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from valkey.asyncio import Connection, ConnectionPool, SSLConnection, Valkey, ValkeyCluster
from valkey.exceptions import NoScriptError, ResponseError

from kvstore.directory_url import PASSWORD, PASSWORD_FILE, USER, DirectoryUrl
from kvstore.errors import Invalid
from kvstore.mesh.entries import SCRIPTS, Command


class Server:
    """A server or a cluster. Connections are made when they are needed, and one that failed or was given up is not used again."""

    def __init__(self, url: DirectoryUrl, environ: Mapping[str, str]) -> None:
        self._client = _client(url, environ)

    async def aclose(self) -> None:
        """End all connections."""
        await self._client.aclose()

    async def ask(self, commands: Sequence[Command]) -> list[Any]:
        """The answers, in the order asked. It takes as long as the server does: bound it.

        Raises:
            Exception: The server is out of reach, refuses one of them, or is none: what the library raises then is not bounded.
        """
        answers = await self._pipelined(commands)
        if any(isinstance(answer, NoScriptError) for answer in answers):
            for script in SCRIPTS:
                await self._client.script_load(script.text)
            answers = await self._pipelined(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    async def look(self, commands: Sequence[Command]) -> list[Any]:
        """As `ask`, for commands that read. What is of another type than ours is None: it must not hide what stands beside it."""
        answers = await self._pipelined(commands)
        for answer in answers:
            if isinstance(answer, Exception) and not _foreign(answer):
                raise answer
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    async def _pipelined(self, commands: Sequence[Command]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers


def _foreign(error: Exception) -> bool:
    return isinstance(error, ResponseError) and str(error).startswith("WRONGTYPE")


def _in_file(path: str) -> str:
    """The password where a file has it, as secrets of containers come. Raises `Invalid`."""
    try:
        return Path(path).read_text().strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"{PASSWORD_FILE} {path}: {type(error).__name__}", remedy="name a file that holds the password") from None


def _client(url: DirectoryUrl, environ: Mapping[str, str]) -> Any:
    """Nothing is connected yet. Timeouts are ours, around whole round trips: one for each reply costs more than the reply."""
    options: dict[str, Any] = {"socket_timeout": None, "socket_keepalive": True, "client_name": "kvtier"}
    user, password = environ.get(USER, ""), environ.get(PASSWORD, "") or _in_file(environ.get(PASSWORD_FILE, ""))
    if password:
        options |= {"username": user or None, "password": password}
    tls: dict[str, Any] = {"ssl_check_hostname": True, "ssl_ca_certs": url.ca_bundle or None} if url.tls else {}
    if url.cluster:
        return ValkeyCluster(
            url.host,
            url.port,
            ssl=url.tls,
            cluster_error_retry_attempts=1,
            connection_error_retry_attempts=0,
            **options,
            **tls,
        )
    kind = SSLConnection if url.tls else Connection
    return Valkey.from_pool(ConnectionPool(kind, host=url.host, port=url.port, db=url.db, **options, **tls))
