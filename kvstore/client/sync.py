"""The blocking client: the async one, on a loop of its own."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvstore.client.aio import Client
from kvstore.client.background import Background

P = ParamSpec("P")
R = TypeVar("R")


def _blocking(method: Callable[Concatenate[Client, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[SyncClient, P], R]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._background.run(method(self._client, *args, **kwargs))

    functools.update_wrapper(call, method)
    return call


def _iterating(method: Callable[Concatenate[Client, P], AsyncIterator[R]]) -> Callable[Concatenate[SyncClient, P], Iterator[R]]:
    def call(self: SyncClient, /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        items = method(self._client, *args, **kwargs)
        end = object()
        while (item := self._background.run(_next(items, end))) is not end:
            yield item  # type: ignore[misc]  # `end` is no R, and never gets here

    functools.update_wrapper(call, method)
    return call


async def _next(items: AsyncIterator[R], end: object) -> R | object:
    return await anext(items, end)


class SyncClient:
    """As :class:`kvstore.client.aio.Client`, from any number of threads; close it, or use it in a `with` statement.

    A forked child gets `Closed` (kind `forked`) at once from every method: it opens its own.
    """

    def __init__(self, background: Background, client: Client) -> None:
        self._background, self._client = background, client

    @classmethod
    def open(cls, connect: Callable[[], Coroutine[Any, Any, Client]]) -> Self:
        """Start a loop and connect on it; :func:`kvstore.open_sync` does this for a URL."""
        background = Background()
        try:
            client = background.run(connect())
        except BaseException:
            background.close()
            raise
        background.at_end(client.aclose)
        return cls(background, client)

    restore = _blocking(Client.restore)
    get_restore = _blocking(Client.get_restore)
    wait = _blocking(Client.wait)
    cancel_restore = _blocking(Client.cancel_restore)
    hint = _blocking(Client.hint)
    list_sessions = _blocking(Client.list_sessions)
    sessions = _iterating(Client.sessions)
    get_session = _blocking(Client.get_session)
    versions = _blocking(Client.versions)
    manifest = _blocking(Client.manifest)
    create_session = _blocking(Client.create_session)
    commit = _blocking(Client.commit)
    fork = _blocking(Client.fork)
    warm = _blocking(Client.warm)
    rewind = _blocking(Client.rewind)
    touch = _blocking(Client.touch)
    pin = _blocking(Client.pin)
    unpin = _blocking(Client.unpin)
    delete_session = _blocking(Client.delete_session)
    list_namespaces = _blocking(Client.list_namespaces)
    put_namespace = _blocking(Client.put_namespace)
    delete_namespace = _blocking(Client.delete_namespace)
    delete_tenant = _blocking(Client.delete_tenant)
    lookup = _blocking(Client.lookup)
    collect = _blocking(Client.collect)
    stats = _blocking(Client.stats)
    health = _blocking(Client.health)
    ready = _blocking(Client.ready)
    get = _blocking(Client.get)
    put = _blocking(Client.put)

    def close(self) -> None:
        """Let go of the connection, and of every lease. A second call does nothing, and so does one in a forked child."""
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
