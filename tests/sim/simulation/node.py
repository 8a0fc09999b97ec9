"""A node: the real repository and the real queue of commits, opened again and again on one store and one disk."""

import asyncio

from kvstore import api
from kvstore.clock import SeededIds
from kvstore.errors import KVTierError, Unavailable
from kvstore.keys import Keys
from kvstore.objects.retry import RetryingStore, RetrySettings
from kvstore.repo import Proposal, Repo, RepoSettings
from kvstore.repo.testing import Shelf, inline
from kvstore.service.commits import Commits
from simulation.wire import HostClock, Life, Wire

PERIOD = 60
TTL = 120
SKEW = 3600.0  # host clocks are off by up to an hour
DRIFT = 0.01


class Disk:
    """What a node's crash leaves: intents, and the blocks they need."""

    def __init__(self):
        self.intents, self.blocks = {}, {}

    async def put(self, key, body):
        self.intents[key] = body

    def items(self):
        return list(self.intents.items())

    async def remove(self, key):
        self.intents.pop(key, None)


class Local:
    """See :class:`kvstore.service.commits.Local`: blocks in a dict instead of tiers."""

    def __init__(self, node, repo, shelf):
        self._node, self._repo, self._shelf, self._world = node, repo, shelf, node.world

    async def fields(self, tenant, namespace):
        return self._world.library.namespaces[tenant]

    def learn(self, fields):
        pass

    async def apply(self, tenant, request):
        proposal = Proposal(
            namespace=self._world.library.namespaces[tenant],
            base=request.base_version,
            branch=request.branch,
            base_prefix=request.base_prefix_id,
            links=tuple(request.blocks),
            shards=request.shards,
            labels=request.labels or None,
            ttl=request.ttl_s,
            write_id=request.write_id,
        )
        op = self._world.history.ops[int(request.labels["op"])]
        op.lives.append(self._node.life)
        began = self._world.now
        try:
            receipt = await self._repo.commit(tenant, request.id, request.lane, proposal, self._source)
        except KVTierError as error:
            self._world.history.dropped(op, error, began)
            raise
        self._world.history.committed(op, receipt, self._node.life)
        return receipt

    async def _source(self, name):
        body = self._shelf.held.get(name) or self._node.disk.blocks.get(name)
        return None if body is None else self._shelf.lease(name, body)

    async def secure(self, tenant, request, *, promised=False):
        wanted = {link.prefix_id for link in request.blocks}
        found = {name: body for name, body in self._shelf.held.items() if name.prefix_id in wanted}
        self._node.disk.blocks.update(found)
        return {name.prefix_id for name in self._node.disk.blocks if name.prefix_id in wanted} == wanted

    async def release(self, tenant, request):
        pass


class Node:
    """Lives until it dies, and is started again after a while."""

    def __init__(self, world, name):
        self.world, self.name = world, name
        self.disk = Disk()
        self.life = self.repo = self.commits = self.shelf = None
        self.up = asyncio.Event()
        random = world.random
        self._skew, self._rate = random.uniform(-SKEW, SKEW), 1 + random.uniform(-DRIFT, DRIFT)

    async def run(self):
        number = 0
        while not self.world.closed:
            number += 1
            self.life = Life(self.world, self, number)
            living = self.life.start(self._live(self.life))
            await asyncio.wait({living, self.life.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not self.life.dead:
                self.world.violation("defect", f"{self.life} ended: {living.exception()!r}")
                return
            await self.life.buried()
            self.up.clear()
            self.repo = self.commits = self.shelf = None
            await asyncio.sleep(self.world.random.uniform(0.1, 5))

    async def _live(self, life):
        world, clock = self.world, HostClock(life, self._skew, self._rate)
        ids = SeededIds(world.random.getrandbits(64))
        store = RetryingStore(Wire(world, life), clock, ids, RetrySettings(deadline_s=20.0))
        settings = RepoSettings(history=world.setup.history, session_ttl=TTL, period=PERIOD)
        while not life.dead:
            try:
                async with Repo.open(store, Keys("r"), clock, ids, inline, settings, sealing=world.sealing) as repo:
                    shelf = Shelf()
                    commits = Commits(Local(self, repo, shelf), self.disk, clock, ids, pending_bytes=1 << 20)
                    await commits.replay()
                    self.repo, self.commits, self.shelf = repo, commits, shelf
                    self.up.set()
                    await asyncio.Event().wait()
            except Unavailable:
                await clock.sleep(1.0)

    async def ask(self, work):
        """Run `work(node)` in this life of the node. Its answer or error; None where the node died under it."""
        await self.up.wait()
        life = self.life
        task = life.start(work(self))
        try:
            await asyncio.wait({task, life.ended}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:  # whoever asked has left
            task.cancel()
            raise
        if life.dead:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return None
        try:
            return task.result()
        except KVTierError as error:
            return error

    async def commit(self, op, tenant, request, durability):
        op.lives.append(self.life)
        return await self.commits.commit(tenant, request, durability)


def request_of(op, world, links, *, ttl, write_id):
    """As a client would send it. Its label tells which operation a manifest comes from."""
    built_on = world.library.links(op.tenant, op.built_on) if op.says_how else ()
    return api.Commit(
        id=op.session,
        namespace=world.library.namespaces[op.tenant].id,
        lane="main",
        base_version=op.base,
        branch=op.branch,
        base_prefix_id=built_on[-1].prefix_id if built_on else "",
        blocks=links,
        ttl_s=ttl,
        labels={"op": str(op.id)},
        write_id=write_id,
    )
