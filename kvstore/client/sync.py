"""The blocking client: the async one, on a loop of its own; block bytes of a node on this host take a shorter way."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvstore import api
from kvstore.blocks import Blocks
from kvstore.client.aio import WHOLE, Client
from kvstore.client.background import Background
from kvstore.client.direct import Asked, Direct
from kvstore.client.local import LocalTransport
from kvstore.client.transport import Fill
from kvstore.ids import Link, Namespace, PrefixId, Shard

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


def _as(method: Callable[..., object]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name, signature and text are the async method's."""

    def named(call: Callable[P, R]) -> Callable[P, R]:
        functools.update_wrapper(call, method)
        return call

    return named


class SyncClient:
    """As :class:`kvstore.client.aio.Client`, from any number of threads; close it, or use it in a `with` statement.

    A forked child gets `Closed` (kind `forked`) at once from every method: it opens its own.
    """

    def __init__(self, background: Background, client: Client) -> None:
        self._background, self._client = background, client
        transport = client.transport
        self._direct = (
            Direct(lambda: background.run(transport.meet()), background.later) if isinstance(transport, LocalTransport) else None
        )

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
    collect = _blocking(Client.collect)
    stats = _blocking(Client.stats)
    health = _blocking(Client.health)
    ready = _blocking(Client.ready)
    get_on_device = _blocking(Client.get_on_device)
    _lookup = _blocking(Client.lookup)
    _get = _blocking(Client.get)
    _put = _blocking(Client.put)

    @_as(Client.lookup)
    def lookup(
        self,
        *,
        namespace: Namespace | str,
        prefix_ids: Sequence[PrefixId],
        shards: Sequence[Shard | str] = (WHOLE,),
        reach: api.Tier = "bucket",
        deadline_ms: int = 250,
    ) -> api.Found:
        """See `Client.lookup`."""
        named = namespace if isinstance(namespace, str) else namespace.id
        if self._direct is not None and (named is namespace or named in self._client.told):
            found = self._direct.lookup(_question(named, prefix_ids, shards, reach, deadline_ms))
            if found is not None:
                return found
        return self._lookup(namespace=namespace, prefix_ids=prefix_ids, shards=shards, reach=reach, deadline_ms=deadline_ms)

    def begin_lookup(
        self,
        *,
        namespace: Namespace,
        prefix_ids: Sequence[PrefixId],
        shards: Sequence[Shard | str] = (WHOLE,),
        deadline_ms: int = 250,
    ) -> Asked | None:
        """As `lookup`, for callers that must not wait: what is polled for the answer; None where only `lookup` can tell."""
        if self._direct is None or namespace.id not in self._client.told:
            return None
        return self._direct.ask(_question(namespace.id, prefix_ids, shards, "bucket", deadline_ms))

    @_as(Client.get)
    def get(
        self,
        namespace: Namespace,
        shard: Shard,
        links: Sequence[Link],
        *,
        deadline_ms: int = 0,
        reach: api.Tier = "bucket",
    ) -> Blocks:
        """See `Client.get`."""
        if self._direct is not None and namespace.id in self._client.told:
            blocks = self._direct.get(namespace, shard, links, deadline_ms=deadline_ms, reach=reach)
            if blocks is not None:
                return blocks
        return self._get(namespace, shard, links, deadline_ms=deadline_ms, reach=reach)

    @_as(Client.put)
    def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """See `Client.put`."""
        if self._direct is not None and namespace.id in self._client.told:
            taken = self._direct.put(namespace, shard, links, fill)
            if taken is not None:
                return taken
        return self._put(namespace, shard, links, fill)

    def close(self) -> None:
        """Let go of the connection, and of every lease. A second call does nothing, and so does one in a forked child."""
        if self._direct is not None:
            self._direct.close()
        self._background.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _question(
    namespace: str, prefix_ids: Sequence[PrefixId], shards: Sequence[Shard | str], reach: api.Tier, deadline_ms: int
) -> api.Lookup:
    return api.Lookup(
        namespace=namespace, prefix_ids=list(prefix_ids), shards=tuple(map(str, shards)), reach=reach, deadline_ms=deadline_ms
    )
