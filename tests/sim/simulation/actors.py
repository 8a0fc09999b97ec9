"""What users and collectors do: each of them decides by the world's randomness, and speaks to a node that may die under them."""

import asyncio
import contextlib
from typing import NamedTuple

from kvstore import api, codec
from kvstore.errors import KVTierError, Unavailable
from kvstore.ids import BlockName, Shard
from kvstore.lifecycle import collector
from kvstore.repo import want
from kvstore.repo.fsck import fsck
from simulation.history import NO, UNKNOWN
from simulation.library import TENANTS
from simulation.node import request_of
from tiering import Miss

SESSIONS = ("s1", "s2", "s3")
WORDS = 6  # tokens come from a small vocabulary, so that users often write the same
LOOKS = {Miss.UNAVAILABLE, Miss.TIMEOUT}


class Known(NamedTuple):
    """What a user builds on: a version, its tokens, and the session that it is one of. Who made it says how it ends.

    Who was promised a version may know no more of its session than how its id begins: `follows` is the operation.
    """

    version: int = 0
    tokens: tuple = ()
    branch: str = ""
    follows: int = -1
    mine: bool = False


NOTHING = Known()


class User:
    """Writes and reads sessions that others write and read as well. What it believes of them may be old."""

    def __init__(self, world, number):
        self.world, self.name, self.random = world, f"u{number}", world.random
        self.node = world.nodes[number % len(world.nodes)]
        self.known = {}  # (tenant, session) -> Known

    async def run(self):
        world = self.world
        while not world.over:
            await asyncio.sleep(self.random.expovariate(1 / world.setup.think))
            if world.over:
                return
            if self.random.random() < 0.2:
                self.node = self.random.choice(world.nodes)
            tenant, session = self.random.choice(TENANTS), self.random.choice(SESSIONS)
            verbs, weights = zip(*MIX, strict=True)
            await self.random.choices(verbs, weights)[0](self, tenant, session)

    # --- writing ---

    async def commit(self, tenant, session):
        known = self.known.get((tenant, session), NOTHING)
        if not known.version and self.random.random() < 0.7:
            await self.get(tenant, session)
            known = self.known.get((tenant, session), NOTHING)
        base, tokens, branch = known[:3]
        lot = self.random.random()
        if lot < 0.15 and tokens:  # an edit
            tokens = tokens[: self.random.randrange(len(tokens))]
        if lot < 0.92 or not tokens:
            tokens += tuple(self.random.randrange(WORDS) for _ in range(self.random.randint(1, 9)))
        durability = self.random.choices(("bucket", "nvme", "dram"), (8, 2, 1))[0]
        told = {"base": base, "branch": branch, "built_on": known.tokens, "says_how": known.mine, "follows": known.follows}
        op = self.world.history.begin("commit", tenant, session, durability=durability, tokens=tokens, **told)
        links = self.world.library.links(tenant, tokens)
        ttl = self.random.choice((None, None, 0, 40))
        request = request_of(op, self.world, links, ttl=ttl, write_id=f"{self.random.getrandbits(128):032x}")
        bytes_here = self.random.random() < 0.95
        answer = None
        for _ in range(3):  # a retry is the same operation, perhaps on another node

            async def work(node):
                if bytes_here:
                    self.world.library.fill(node.shelf, tenant, tokens)
                return await node.commit(op, tenant, request, durability)

            op.tries += 1
            answer = await self._asked(work)
            unknown = answer is None or isinstance(answer, Unavailable)
            if not unknown or self.random.random() < 0.4:
                break
            if self.random.random() < 0.5:
                self.node = self.random.choice(self.world.nodes)
        self.world.history.end(op, answer)
        self._learn(op, answer)

    def _learn(self, op, answer):
        place = (op.tenant, op.session)
        if op.outcome in {NO, UNKNOWN}:
            self.known.pop(place, None)
        elif op.durability == "bucket" and not answer.cut:
            found, _ = self.world.truth.meant(op.key, op.start, op.end)
            branches = [branch.id for branch in found if answer.version in branch.versions]
            if answer.version == op.base:  # a longer version holds it, which this user has not seen
                self.known.pop(place, None)
            elif branches:
                self.known[place] = Known(answer.version, op.tokens, branches[-1], mine=True)
        elif op.durability != "bucket" and self.random.random() < 0.8:
            self.known[place] = Known(answer.version, op.tokens, answer.branch, op.id, mine=True)
        else:
            self.known.pop(place, None)

    async def create(self, tenant, session):
        fields = self.world.library.namespaces[tenant]
        ttl = self.random.choice((0, 30, 90))
        await self._do("create", tenant, session, lambda node: node.repo.sessions.create(tenant, session, fields, "main", ttl=ttl))

    async def fork(self, tenant, session):
        await self._fork("fork", tenant, session, detach=False)

    async def detach(self, tenant, session):
        await self._fork("detach", tenant, session, detach=True)

    async def _fork(self, kind, tenant, session, *, detach):
        namespace = self.world.library.namespaces[tenant].id
        as_ = self.random.choice(SESSIONS)
        if as_ != session:
            await self._do(
                kind,
                tenant,
                as_,
                lambda node: node.repo.sessions.fork(tenant, session, namespace, "main", as_, detach=detach),
                source=self.world.keys.name(tenant, session, namespace, "main"),
            )

    async def rewind(self, tenant, session):
        tokens = self.known.get((tenant, session), NOTHING).tokens
        version = self.random.choice((None, 0, 1, 2, 3))
        to = self.random.randint(0, len(tokens)) if version is None else None
        await self._do(
            "rewind",
            tenant,
            session,
            lambda node: self._of(node, "rewind", tenant, session, version=version, tokens=to),
            versioned=version is not None,
        )

    async def touch(self, tenant, session):
        ttl = self.random.choice((None, 20, 60, 0))
        await self._do("touch", tenant, session, lambda node: self._of(node, "touch", tenant, session, ttl=ttl))

    async def pin(self, tenant, session):
        pinned = self.random.random() < 0.3
        await self._do("pin", tenant, session, lambda node: self._of(node, "pin", tenant, session, pinned=pinned))

    async def delete(self, tenant, session):
        await self._do("delete", tenant, session, lambda node: self._of(node, "delete", tenant, session))

    # --- reading ---

    async def get(self, tenant, session):
        answer = await self._do("get", tenant, session, lambda node: self._of(node, "get", tenant, session))
        if not isinstance(answer, KVTierError) and answer is not None:
            branch = self.world.truth.branches[answer.branch]
            content = branch.versions.get(answer.version)
            if answer.version and content is not None:
                self.known[tenant, session] = Known(answer.version, content.tokens, answer.branch)

    async def restore(self, tenant, session):
        """Resolve, then read every block. What is read is right; what is missing is not named any more."""

        async def work(node):
            fields = self.world.library.namespaces[tenant]
            resolved, manifest = await self._of(node, "resolve", tenant, session)
            content, missing = [], 0
            for block in manifest.blocks:
                for copy in block.copies:
                    name = BlockName(fields.id, Shard.parse(manifest.shards[copy.shard]), block.prefix_id, block.tokens)
                    asked = want(fields, name, copy)
                    raw = memoryview(bytearray(asked.size))
                    miss = await node.repo.origin.fetch(asked, raw)
                    if miss is Miss.CORRUPT:
                        self.world.violation("I7", f"{tenant}/{session}: a block was corrupt")
                    missing += miss is Miss.ABSENT
                    content += [-1] * block.tokens if miss else codec.tensors(raw, name, fields)["token_ids"].tolist()
            self._compare(resolved, content, missing)
            return resolved

        await self._do("restore", tenant, session, work)

    def _compare(self, session, content, missing):
        branch = self.world.truth.branches[session.branch]
        tokens = branch.versions[session.version].tokens if session.version else ()
        if len(tokens) != len(content) or any(is_ not in {-1, was} for is_, was in zip(content, tokens, strict=True)):
            self.world.violation("I7", f"version {session.version} of {session.branch[:8]} is {tokens}, and {content} was read")
        if (
            missing
            and branch.gone == float("inf")
            and session.version in {branch.last.seq, *(old.seq for old in branch.last.history)}
        ):
            self.world.violation(
                "I1", f"{missing} blocks of version {session.version} of {session.branch[:8]} were not found, and are named"
            )

    async def offer(self, tenant, session):
        """Blocks of no session."""
        tokens = tuple(self.random.randrange(WORDS) for _ in range(self.random.randint(4, 12)))
        fields = self.world.library.namespaces[tenant]

        async def work(node):
            links = self.world.library.fill(node.shelf, tenant, tokens)
            for name in [name for name in node.shelf.held if name.prefix_id in {link.prefix_id for link in links}]:
                lease = node.shelf.lease(name, node.shelf.held[name])
                with contextlib.closing(_Released(lease)):
                    await node.repo.origin.offer(want(fields, name), lease)

        await self._asked(work)

    # --- inside ---

    def _of(self, node, call, tenant, session, **arguments):
        return getattr(node.repo.sessions, call)(tenant, session, self.world.library.namespaces[tenant].id, "main", **arguments)

    async def _do(self, kind, tenant, session, call, **fields):
        op = self.world.history.begin(kind, tenant, session, **fields)

        async def work(node):
            op.lives.append(node.life)
            return await call(node) or DONE

        answer = await self._asked(work)
        self.world.history.end(op, answer)
        return answer

    async def _asked(self, work):
        """Some users do not wait for their answer: to them it is as good as lost."""
        if self.random.random() < 0.97:
            return await self.node.ask(work)
        patience = self.random.uniform(0.01, 2.0)
        try:
            async with asyncio.timeout(patience):
                return await self.node.ask(work)
        except TimeoutError:
            return None


class _Released:
    def __init__(self, lease):
        self.close = lease.release


DONE = object()
MIX = (
    (User.commit, 40),
    (User.restore, 12),
    (User.get, 8),
    (User.create, 4),
    (User.fork, 5),
    (User.detach, 2),
    (User.rewind, 5),
    (User.touch, 5),
    (User.pin, 3),
    (User.delete, 4),
    (User.offer, 4),
)


class Collector:
    """Collects, over and over, on a node; sometimes two at once."""

    def __init__(self, world, node):
        self.world, self.node, self.random = world, node, world.random
        self._life = self._collector = None

    async def run(self):
        world = self.world
        while not world.over:
            await asyncio.sleep(self.random.expovariate(1 / world.setup.rest))
            if world.over:
                return
            lot = self.random.random()
            dry = lot > 0.95
            if lot > 0.9 and not dry:
                await self._check()
                continue
            request = api.Collect(now=lot < 0.4, dry_run=dry, reap=world.setup.reap > 0)
            answer = await self.node.ask(lambda node, request=request: self._collect(node, request))
            if isinstance(answer, KVTierError):
                world.note(f"collection ended: {answer.kind}: {answer.message}")
                if not isinstance(answer, Unavailable):
                    world.violation("I1", f"a collection ended with {answer!r}")
            elif answer is not None:
                world.count("collections")
                world.count("deleted", answer.blocks_deleted + answer.manifests_deleted)
                world.count("expired", answer.expired)
                world.count("evicted", answer.evicted)
                world.count("reaped", answer.reaped)

    async def _collect(self, node, request):
        """One collector for each life of the node: what it remembers of idle heads is put to use. The skew guard is off."""
        if self._life is not node.life:
            self._life = node.life
            settings = collector.CollectSettings(max_skew_s=None, max_bytes=self.world.setup.max_bytes)
            self._collector = collector.Collector(node.repo, settings)
        if not request.dry_run:
            self.world.truth.collecting(node.life)
        return await self._collector.run(request)

    async def _check(self):
        """While others work, too, a check finds nothing wrong."""
        answer = await self.node.ask(lambda node: fsck(node.repo))
        if isinstance(answer, KVTierError | None):
            return
        if not answer.clean:
            wrong = [finding for finding in answer.findings if finding.severity == "error"]
            self.world.violation("I1", f"fsck found {wrong}")
