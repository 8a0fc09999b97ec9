"""The typed client. Its methods are the calls of :data:`kvstore.api.CALLS` under the same names, and the data plane's get and put.

Wherever a namespace is wanted its struct will do: it is made known to the node once. An id (64 hex digits) will do where the node
knows it already.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Self, TypeVar

import msgspec

from kvstore import api
from kvstore.blocks import Blocks, DeviceBlocks
from kvstore.client.sightings import Sightings
from kvstore.client.transport import DeviceTransport, Fill, Transport
from kvstore.errors import Denied, Unavailable, Unsupported
from kvstore.ids import Link, Namespace, Shard, is_hex_id

R = TypeVar("R", bound=api.OfSession)
A = TypeVar("A", bound=api.Answer)
WHOLE: Final = Shard()  # a model that is not split
_WAIT_MS: Final = 10_000  # of a long wait, so that a node that went away is noticed
_PAUSE_S: Final = 0.02  # should a node not wait although it was asked to


class Client:
    """A client of one node. Make one with :func:`kvstore.open`; it belongs to the event loop that it was opened on.

    Every method raises `Unavailable` when the node is out of reach, `Denied` for another's tenant, `Invalid` for a value that
    cannot be right, and what its own text says.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._known: set[str] = set()
        self._seen = Sightings()

    @property
    def transport(self) -> Transport:
        """What carries its calls."""
        return self._transport

    @property
    def told(self) -> AbstractSet[str]:
        """Ids of the namespaces whose fields it has told the node."""
        return self._known

    # --- restores ---

    async def restore(
        self,
        session_id: str,
        *,
        model: Namespace | str = "",
        namespace: Namespace | str = "",
        lane: str = "",
        version: int | None = None,
        tokens: Sequence[int] = (),
        tier: api.Target = "dram",
        deadline_ms: int = 0,
        max_bytes: int = 0,
        priority: api.Priority = "interactive",
        hold_ms: int | None = None,
        shards: Sequence[Shard | str] = (),
    ) -> api.RestoreStatus:
        """Begin to bring a session's blocks into a tier; answered at once, with what is known by then (see `wait`).

        Args:
            session_id: The session.
            model: A model id, where the session has one namespace of it; or a namespace, as in `namespace`.
            namespace: Which namespace of the session; by default the only one.
            lane: Which lane; by default the only one.
            version: Which version; the current one by default.
            tokens: Only the blocks that these begin with.
            tier: Where to.
            deadline_ms: What is not there by then is left out.
            max_bytes: No more than that is staged, in prefix order; 0: no limit.
            priority: `speculative` waits while anybody wants bytes now, evicts nothing that was used lately, and may be dropped.
            hold_ms: How long it is spared from eviction there, unless it is used before; the node's default where None.
            shards: Which shards; all of the version's by default.

        Raises:
            Overloaded: Too many restores run.
        """
        by_name = isinstance(model, str) and not is_hex_id(model)
        request = await self._of(
            api.Restore,
            session_id,
            namespace if by_name else model,
            lane,
            model=model if by_name else "",
            version=version,
            tokens=list(tokens),
            tier=tier,
            deadline_ms=deadline_ms,
            max_bytes=max_bytes,
            priority=priority,
            hold_ms=hold_ms,
            shards=tuple(map(str, shards)),
        )
        return await self._call("restore", request, api.RestoreStatus)

    async def get_restore(self, restore_id: str, *, wait_ms: int = 0) -> api.RestoreStatus:
        """How far it has come; with `wait_ms`, how it ended, if it ends within that time. Raises `NotFound`."""
        return await self._call("get_restore", api.GetRestore(restore_id=restore_id, wait_ms=wait_ms), api.RestoreStatus)

    async def wait(self, restore: api.RestoreStatus | str, *, timeout_ms: int = 600_000) -> api.RestoreStatus:
        """Wait for a restore's end: `ready`, `partial`, `failed`, `cancelled` or `dropped`.

        Raises:
            Unavailable: It has not ended in time (kind `timeout`); it goes on.
            NotFound: The node has forgotten it.
        """
        restore_id = restore if isinstance(restore, str) else restore.restore_id
        clock = asyncio.get_running_loop().time
        ends = clock() + timeout_ms / 1000
        while (left := ends - clock()) > 0:
            status = await self.get_restore(restore_id, wait_ms=min(_WAIT_MS, max(1, int(left * 1000))))
            if status.state not in {"resolving", "staging"}:
                return status
            await asyncio.sleep(_PAUSE_S)
        raise Unavailable(f"restore {restore_id} has not ended within {timeout_ms} ms", kind="timeout")

    async def cancel_restore(self, restore_id: str) -> api.RestoreStatus:
        """Stop it; what is staged stays. Raises `NotFound`."""
        return await self._call("cancel_restore", api.OfRestore(restore_id=restore_id), api.RestoreStatus)

    async def hint(
        self,
        session_id: str,
        *,
        event: api.Event,
        at: float | None = None,
        in_s: float | None = None,
        namespace: Namespace | str = "",
        lane: str = "",
    ) -> api.Hinted:
        """Say what is about to happen to a session (:class:`kvstore.api.Hint`). Advice: it may be dropped, which is no error."""
        return await self._call(
            "hint", await self._of(api.Hint, session_id, namespace, lane, event=event, at=at, in_s=in_s), api.Hinted
        )

    # --- sessions ---

    async def list_sessions(self, *, prefix: str = "", cursor: str = "", limit: int = 100) -> api.SessionPage:
        """A page of the sessions whose id starts with `prefix`."""
        return await self._call("list_sessions", api.ListSessions(prefix=prefix, cursor=cursor, limit=limit), api.SessionPage)

    async def sessions(self, *, prefix: str = "") -> AsyncIterator[api.Session]:
        """All of them, page by page."""
        page = await self.list_sessions(prefix=prefix)
        while True:
            for session in page.sessions:
                yield session
            if not page.cursor:
                return
            page = await self.list_sessions(prefix=prefix, cursor=page.cursor)

    async def get_session(self, session_id: str, *, namespace: Namespace | str = "", lane: str = "") -> api.Session:
        """One session. Raises `NotFound`, `Gone`."""
        return await self._call("get_session", await self._of(api.OfSession, session_id, namespace, lane), api.Session)

    async def versions(self, session_id: str, *, namespace: Namespace | str = "", lane: str = "") -> api.Versions:
        """The versions that can still be restored, newest first. Raises `NotFound`, `Gone`."""
        return await self._call("versions", await self._of(api.OfSession, session_id, namespace, lane), api.Versions)

    async def manifest(
        self, session_id: str, *, namespace: Namespace | str = "", lane: str = "", version: int = 0
    ) -> api.SessionManifest:
        """The blocks of a version (0: the current one). Raises `NotFound`, `Gone`."""
        request = await self._of(api.GetManifest, session_id, namespace, lane, version=version)
        return await self._call("manifest", request, api.SessionManifest)

    async def create_session(
        self,
        session_id: str,
        *,
        namespace: Namespace | str,
        lane: str = "",
        ttl_s: int | None = None,
        sliding: bool | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> api.Session:
        """A new, empty session (:class:`kvstore.api.CreateSession`). Raises `AlreadyExists`."""
        request = await self._of(
            api.CreateSession, session_id, namespace, lane, ttl_s=ttl_s, sliding=sliding, labels=dict(labels or {})
        )
        return await self._call("create_session", request, api.Session)

    async def commit(
        self,
        session_id: str,
        *,
        namespace: Namespace | str,
        base_version: int,
        branch: str | None = None,
        base_prefix_id: str | None = None,
        blocks: Sequence[Link],
        lane: str = "",
        shards: Sequence[Shard | str] = (WHOLE,),
        ttl_s: int | None = None,
        labels: Mapping[str, str] | None = None,
        durability: api.Durability | None = None,
        write_id: str = "",
    ) -> api.Receipt:
        """Make published blocks the session's next version (:class:`kvstore.api.Commit`).

        Where `branch` is None it is the session of which this client last saw version `base_version`; where `base_prefix_id` is
        None it is the last block of what it saw of that session.

        Raises:
            Gone: The session that it was built on is no more, whatever its id means now.
            Conflict: The session has moved on; `facts["current"]` is its version now.
            Unavailable: Kind `outcome_unknown`: it may have landed. Retry with the same `write_id`. Kind `promise_pending`: it was
                built on what another node has promised and, it seems, not yet made. Retry, or ask that node.
        """
        request = await self._of(
            api.Commit,
            session_id,
            namespace,
            lane,
            base_version=base_version,
            branch=branch or "",
            base_prefix_id=base_prefix_id or "",
            blocks=list(blocks),
            shards=tuple(map(str, shards)),
            ttl_s=ttl_s,
            labels=dict(labels or {}),
            durability=durability,
            write_id=write_id,
        )
        seen = self._seen.base_of(request)
        if branch is None:
            request = msgspec.structs.replace(request, branch=seen.branch)
        if base_prefix_id is None and request.branch == seen.branch:
            request = msgspec.structs.replace(request, base_prefix_id=seen.last)
        return await self._call("commit", request, api.Receipt)

    async def fork(
        self,
        session_id: str,
        *,
        as_: str,
        version: int = 0,
        ttl_s: int | None = None,
        namespace: Namespace | str = "",
        lane: str = "",
    ) -> api.Session:
        """A second session that begins as this one's version (0: the current one); no blocks move. Raises `AlreadyExists`."""
        request = await self._of(api.Fork, session_id, namespace, lane, as_=as_, version=version, ttl_s=ttl_s)
        return await self._call("fork", request, api.Session)

    async def warm(
        self,
        session_id: str,
        *,
        as_: str = "",
        version: int = 0,
        tokens: int | None = None,
        namespace: Namespace | str = "",
        lane: str = "",
    ) -> api.Warmed:
        """Publish it as a pinned prefix for everyone in the tenant (:class:`kvstore.api.Warm`). Raises `AlreadyExists`."""
        request = await self._of(api.Warm, session_id, namespace, lane, as_=as_, version=version, tokens=tokens)
        return await self._call("warm", request, api.Warmed)

    async def rewind(
        self,
        session_id: str,
        *,
        version: int | None = None,
        tokens: int | None = None,
        namespace: Namespace | str = "",
        lane: str = "",
    ) -> api.Session:
        """Back to an earlier version, or to fewer tokens (floored to a block boundary): exactly one of the two."""
        request = await self._of(api.Rewind, session_id, namespace, lane, version=version, tokens=tokens)
        return await self._call("rewind", request, api.Session)

    async def touch(
        self, session_id: str, *, ttl_s: int | None = None, namespace: Namespace | str = "", lane: str = ""
    ) -> api.Session:
        """Renew its time to live. Raises `NotFound`, `Gone`."""
        return await self._call("touch", await self._of(api.Touch, session_id, namespace, lane, ttl_s=ttl_s), api.Session)

    async def pin(self, session_id: str, *, namespace: Namespace | str = "", lane: str = "") -> api.Session:
        """Never expire it. Raises `NotFound`, `Gone`."""
        return await self._call("pin", await self._of(api.OfSession, session_id, namespace, lane), api.Session)

    async def unpin(self, session_id: str, *, namespace: Namespace | str = "", lane: str = "") -> api.Session:
        """Let it expire again. Raises `NotFound`, `Gone`."""
        return await self._call("unpin", await self._of(api.OfSession, session_id, namespace, lane), api.Session)

    async def delete_session(self, session_id: str, *, namespace: Namespace | str = "", lane: str = "") -> api.Done:
        """Delete it; its blocks go with the next collections. Raises `NotFound`."""
        return await self._call("delete_session", await self._of(api.OfSession, session_id, namespace, lane), api.Done)

    # --- namespaces, look-up, operation ---

    async def list_namespaces(self) -> api.Namespaces:
        """What is stored for which model."""
        return await self._call("list_namespaces", api.Nothing(), api.Namespaces)

    async def put_namespace(self, namespace: str, *, fields: Namespace) -> api.Done:
        """Make a namespace's fields known under its id; passing the struct to any method does the same."""
        done = await self._call("put_namespace", api.PutNamespace(namespace=namespace, fields=fields), api.Done)
        self._known.add(namespace)
        return done

    async def delete_namespace(self, namespace: Namespace | str) -> api.Dropped:
        """Drop every session of a namespace, pinned ones too: after a weight update. Repeated, it goes on where it stopped."""
        wanted = namespace if isinstance(namespace, str) else namespace.id
        return await self._call("delete_namespace", api.OfNamespace(namespace=wanted), api.Dropped)

    async def delete_tenant(self, tenant: str) -> api.Dropped:
        """Drop every session of a tenant, which must be the caller's own. Repeated, it goes on where it stopped."""
        return await self._call("delete_tenant", api.OfTenant(tenant=tenant), api.Dropped)

    async def lookup(
        self,
        *,
        namespace: Namespace | str,
        prefix_ids: Sequence[str],
        shards: Sequence[Shard | str] = (WHOLE,),
        reach: api.Tier = "bucket",
        deadline_ms: int = 250,
    ) -> api.Found:
        """Length of the leading run of blocks that are somewhere, without moving a byte. Never waits past its deadline."""
        request = api.Lookup(
            namespace=await self._id(namespace),
            prefix_ids=list(prefix_ids),
            shards=tuple(map(str, shards)),
            reach=reach,
            deadline_ms=deadline_ms,
        )
        try:
            return await self._call("lookup", request, api.Found)
        except Unavailable as error:
            if error.kind != "timeout":
                raise
            return api.Found(run=0, tiers=[])

    async def collect(
        self, *, dry_run: bool = False, now: bool = False, reap: bool = False, purge_versions: bool = False
    ) -> api.Collected:
        """Collect garbage once (:class:`kvstore.api.Collect`)."""
        request = api.Collect(dry_run=dry_run, now=now, reap=reap, purge_versions=purge_versions)
        return await self._call("collect", request, api.Collected)

    async def stats(self) -> api.Stats:
        """Tiers, queues, requests."""
        return await self._call("stats", api.Nothing(), api.Stats)

    async def health(self) -> api.Health:
        """Whether the node lives."""
        return await self._call("health", api.Nothing(), api.Health)

    async def ready(self) -> api.Health:
        """Whether it may be sent work, and what is degraded."""
        return await self._call("ready", api.Nothing(), api.Health)

    # --- blocks ---

    async def get(
        self,
        namespace: Namespace,
        shard: Shard,
        links: Sequence[Link],
        *,
        deadline_ms: int = 0,
        reach: api.Tier = "bucket",
    ) -> Blocks:
        """Lease the longest leading run of these blocks that arrives in time. Use the answer in a `with` statement.

        Args:
            namespace: Theirs.
            shard: Whose part of each.
            links: The blocks, in prefix order (:func:`kvstore.chain`).
            deadline_ms: What has not arrived by then is a miss; 0: as long as it takes.
            reach: The farthest tier to ask.
        """
        await self._id(namespace)
        return await self._transport.get(namespace, shard, links, deadline_ms=deadline_ms, reach=reach)

    async def get_on_device(
        self, namespace: Namespace, shard: Shard, links: Sequence[Link], *, deadline_ms: int = 0, early: bool = False
    ) -> DeviceBlocks:
        """As `get`, in memory of the device that an embedded store was opened with (`s3://...?device=cuda:0&device_bytes=2GiB`).

        Their copies may still run: `DeviceBlocks.wait` first. Release them once the work that uses them is queued.

        Args:
            namespace: As in `get`.
            shard: As in `get`.
            links: As in `get`.
            deadline_ms: As in `get`.
            early: Answer at once, with as many blocks as the device has room for, and bring them up behind the answer. Ask layer by
                layer how many have come: `DeviceBlocks.wait_layer`, or `arrived` on this loop.

        Raises:
            Unsupported: The store was opened without a device, or is a node of its own, which cannot reach this process's memory.
        """
        await self._id(namespace)
        if not isinstance(self._transport, DeviceTransport):
            raise Unsupported(
                "a node cannot reach a device's memory in this process", remedy="embed the store: s3://bucket?device=cuda:0"
            )
        return await self._transport.get_on_device(namespace, shard, links, deadline_ms=deadline_ms, early=early)

    async def put(self, namespace: Namespace, shard: Shard, links: Sequence[Link], fill: Fill) -> list[bool]:
        """Publish blocks; whether each was taken. One that was not was dropped under load: never an error.

        Args:
            namespace: Theirs.
            shard: Whose part of each.
            links: The blocks.
            fill: Called with (i, payload), in order, on some thread, to copy the tensors of `links[i]` into `payload`: the layers',
                then the token ids, each where :func:`kvstore.codec.layout` says (examples/blocks.py does it). When this call is
                over, cancelled or not, it is not called any more.
        """
        await self._id(namespace)
        return await self._transport.put(namespace, shard, links, fill)

    # --- life ---

    async def aclose(self) -> None:
        """Let go of the connection, and of every lease."""
        await self._transport.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _id(self, namespace: Namespace | str) -> str:
        if isinstance(namespace, str):
            return namespace
        known = namespace.id
        if known not in self._known:
            try:
                await self.put_namespace(known, fields=namespace)
            except Denied as error:
                if error.kind != "denied":
                    raise
                self._known.add(known)  # a token that may read only: what there is to read was made known by who wrote it
        return known

    async def _of(self, kind: type[R], session_id: str, namespace: Namespace | str, lane: str, **fields: Any) -> R:
        return kind(id=session_id, namespace=await self._id(namespace), lane=lane, **fields)

    async def _call(self, name: str, request: api.Request, kind: type[A]) -> A:
        answer = await self._transport.call(name, request)
        if not isinstance(answer, kind):
            raise Unavailable(f"{name}: the node answered with a {type(answer).__name__}")
        self._seen.note(request, answer)
        return answer
