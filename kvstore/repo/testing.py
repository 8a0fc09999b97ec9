"""For tests and simulations: small namespaces and blocks, a node's bytes in a dict, and the invariants read off the bare store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, ParamSpec, TypeVar

import numpy as np

from kvstore import codec
from kvstore.api import Receipt
from kvstore.clock import Clock, Ids, SeededIds, VirtualClock
from kvstore.ids import BlockName, Link, Namespace, Shard, chain
from kvstore.keys import Keys
from kvstore.model import Head, parse
from kvstore.objects.base import ObjectStore
from kvstore.repo.commit import Proposal
from kvstore.repo.heads import versions_of
from kvstore.repo.manifests import unpack
from kvstore.repo.repository import Repo, RepoSettings
from kvstore.sealing import MasterKeys, Sealing
from tiering import Lease

P = ParamSpec("P")
R = TypeVar("R")
ONE_SHARD = ("t0of1.p0of1.g0",)


async def inline(fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Run where we are: tests need no threads."""
    return fn(*args, **kwargs)


def tiny(tenant: str = "default", **fields: Any) -> Namespace:
    """A namespace whose blocks are 4 tokens and about 4 KiB, header included."""
    shape: dict[str, Any] = {"layers": 1, "kv_heads": 2, "head_dim": 2, "dtype": "F32", "block_tokens": 4}
    return Namespace(model="test/tiny", revision="1", tenant=tenant, **(shape | fields))


class Shelf:
    """The blocks that a node holds, as a commit's source."""

    def __init__(self) -> None:
        self.held: dict[BlockName, bytes] = {}
        self.leases = 0

    def fill(self, namespace: Namespace, tokens: Sequence[int], shards: Sequence[str] = ONE_SHARD) -> list[Link]:
        """Compute, as an engine would, all blocks of these tokens (the last one may be partial). Returns their chain."""
        links = chain(namespace, tokens, partial=True)
        for index, link in enumerate(links):
            start = index * namespace.block_tokens
            for shard in shards:
                name = BlockName(namespace.id, Shard.parse(shard), link.prefix_id, link.tokens)
                if name not in self.held:
                    self.held[name] = raw_block(namespace, name, tokens[start : start + link.tokens])
        return links

    async def __call__(self, name: BlockName) -> Lease | None:
        """See `kvstore.repo.Source`."""
        body = self.held.get(name)
        return None if body is None else self.lease(name, body)

    def lease(self, name: BlockName, body: bytes) -> Lease:
        """A lease that is counted until it is released."""
        self.leases += 1
        return Lease(name.tier_key, memoryview(body), -1, self._released)

    def _released(self) -> None:
        self.leases -= 1


def raw_block(namespace: Namespace, name: BlockName, tokens: Sequence[int]) -> bytes:
    """A sealed raw object whose values follow from its tokens and shard."""
    body = bytearray(codec.layout(namespace, name.shard, name.tokens).raw_bytes)
    for tensor_name, tensor in codec.tensors(memoryview(body), name, namespace).items():
        if tensor_name == "token_ids":
            tensor[:] = np.asarray(tokens, dtype=np.uint32)
        else:
            tensor[:] = (np.arange(tensor.size) + sum(tokens) + name.shard.rank).reshape(tensor.shape)
    codec.seal(memoryview(body), name, namespace)
    return bytes(body)


@asynccontextmanager
async def opened(
    store: ObjectStore,
    clock: Clock | None = None,
    ids: Ids | None = None,
    run: Callable[..., Awaitable[Any]] = inline,
    root: str = "r",
    masters: MasterKeys | None = None,
    **settings: Any,
) -> AsyncIterator[Repo]:
    """A node's repository; sealed where there are master keys."""
    sealing = Sealing(masters, run) if masters is not None else None
    how = RepoSettings(**settings)
    async with Repo.open(store, Keys(root), clock or VirtualClock(), ids or SeededIds(1), run, how, sealing=sealing) as repo:
        yield repo


async def commit(
    repo: Repo, shelf: Shelf, session: str, tokens: Sequence[int], base: int, namespace: Namespace, lane: str = "", **fields: Any
) -> Receipt:
    """Compute these tokens' blocks and commit them."""
    shards = fields.pop("shards", ONE_SHARD)
    links = shelf.fill(namespace, tokens, shards)
    proposal = Proposal(namespace=namespace, base=base, links=tuple(links), shards=tuple(shards), **fields)
    return await repo.commit(namespace.tenant, session, lane, proposal, shelf)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until something holds."""
    while not condition():  # noqa: ASYNC110  stepping the event loop is the point
        await asyncio.sleep(0)


def broken(objects: Mapping[str, bytes], keys: Keys) -> list[str]:
    """I1, read off the bare store: every manifest any head names, and its first n blocks, exist with the stated size."""
    wrong: list[str] = []
    for key in [key for key in objects if keys.parse_head(key)]:
        tenant, family = keys.parse_head(key) or ("", "")
        for branch in parse(objects[key], Head, key).branches.values():
            for version in versions_of(branch):
                name = keys.manifest_of(tenant, family, version.manifest)
                if not version.manifest:
                    continue
                if name not in objects:
                    wrong.append(f"{key} names {name}, which is absent")
                    continue
                manifest = unpack(objects[name], name)
                if len(manifest.blocks) < version.n:
                    wrong.append(f"{key} names {version.n} blocks of {name}, which has {len(manifest.blocks)}")
                for block in manifest.blocks[: version.n]:
                    for copy in block.copies:
                        at = keys.block(manifest.namespace, manifest.shards[copy.shard], block.prefix_id, copy.gen)
                        if len(objects.get(at, b"")) != copy.bytes:
                            wrong.append(f"{name} names {at} with {copy.bytes} bytes, and there are {len(objects.get(at, b''))}")
    return wrong


def bodies(store: Any) -> dict[str, bytes]:
    """Every object of a `MemoryStore`."""
    return {key: body for key, (body, _) in store._objects.items()}  # noqa: SLF001  read off the bare store
