"""A client without a node: dictionaries, and faults to inject. It keeps the contract of `kvstore.client.SyncClient`."""

from __future__ import annotations

from itertools import count

from kvstore import api, codec
from kvstore.blocks import BlockLease, Blocks
from kvstore.errors import Conflict, Gone, NotFound, Unavailable
from kvstore.ids import BlockName

SHARD = "t0of1.p0of1.g0"


def ident(namespace):
    return getattr(namespace, "id", namespace)


def place(namespace, shard, prefix_id):
    """Where a block is: of another attention group than the first one, the shard says which."""
    return (ident(namespace), prefix_id, *([str(shard)] if str(shard) != SHARD else []))


class FakeClient:
    def __init__(self):
        self.blocks = {}  # `place` -> raw object
        self.sessions = {}  # (session, namespace id) -> list of versions, each a list of links
        self.branches = {}  # (session, namespace id) -> which of the sessions of that id it is now
        self.puts = []  # links offered, in order
        self.leased = 0
        self.restores = []  # (tier, priority) of each
        self.staged = []  # shards that the last one asked for
        self.near = None  # so many leading blocks of every look-up are in memory; all where None
        self.refuse_puts = 0  # so many offers are not taken
        self.receipts = {}  # by write id
        self.lost_answers = 0  # so many commits land, and nobody hears of it
        self.lost_how = "outcome_unknown"
        self.down = None  # an error that every call raises
        self.dies_while_read = False
        self._numbers = count()

    def _up(self):
        if self.down is not None:
            raise self.down

    def _versions(self, session, namespace):
        found = self.sessions.get((session, ident(namespace)))
        if found is None:
            raise NotFound(f"session {session!r}")
        return found

    def _branch(self, session, namespace):
        return self.branches.setdefault((session, ident(namespace)), f"b{next(self._numbers)}")

    def replace(self, session, namespace, versions):
        """Another session has the id now."""
        self.sessions[session, namespace.id] = versions
        del self.branches[session, namespace.id]

    def restore(
        self, session, *, namespace, version=None, tokens=(), deadline_ms=0, tier="dram", priority="interactive", shards=()
    ):
        self._up()
        self.restores.append((tier, priority))
        self.staged = [str(shard) for shard in shards]
        return api.RestoreStatus(restore_id="r1", id=session, state="resolving", node="fake", tier="dram")

    def get_restore(self, restore_id, *, wait_ms=0):
        self._up()
        return api.RestoreStatus(
            restore_id=restore_id, id="s", state="ready", node="fake", tier="dram", elapsed_ms=5000.0, by_tier={"bucket": 1 << 20}
        )

    def manifest(self, session, *, namespace, version=0):
        self._up()
        versions = self._versions(session, namespace)
        links = versions[version - 1 if version else -1]
        return api.SessionManifest(
            id=session,
            namespace=ident(namespace),
            lane="main",
            version=version or len(versions),
            tokens=sum(link.tokens for link in links),
            block_tokens=0,
            shards=[SHARD],
            blocks=list(links),
            branch=self._branch(session, namespace),
        )

    def lookup(self, *, namespace, prefix_ids, shards, reach="bucket"):
        self._up()
        run = 0
        while run < len(prefix_ids) and all(place(namespace, shard, prefix_ids[run]) in self.blocks for shard in shards):
            run += 1
        near = run if self.near is None else min(run, self.near)
        return api.Found(
            run=near if reach != "bucket" else run, tiers=["dram"] * near + ["bucket"] * (run - near) * (reach == "bucket")
        )

    def get(self, namespace, shard, links, *, deadline_ms=0):
        self._up()
        leases, miss = [], ""
        for link in links:
            raw = self.blocks.get(place(namespace, shard, link.prefix_id))
            if raw is None:
                miss = "absent"
                break
            leases.append(BlockLease(memoryview(raw), self._let_go))
        self.leased += len(leases)
        return Blocks(leases, miss, lambda: not self.dies_while_read)

    def _let_go(self):
        self.leased -= 1

    def put(self, namespace, shard, links, fill):
        self._up()
        taken = []
        for index, link in enumerate(links):
            self.puts.append(link)
            if self.refuse_puts:
                self.refuse_puts -= 1
                taken.append(False)
                continue
            found = codec.layout(namespace, shard, link.tokens)
            raw = bytearray(found.raw_bytes)
            fill(index, memoryview(raw)[found.header_bytes :])
            codec.seal(memoryview(raw), BlockName(namespace.id, shard, link.prefix_id, link.tokens), namespace)
            self.blocks[place(namespace, shard, link.prefix_id)] = raw
            taken.append(True)
        return taken

    def commit(self, session, *, namespace, base_version, branch, blocks, shards, ttl_s, labels, durability, write_id):
        self._up()
        if write_id in self.receipts:
            return self._answer(self.receipts[write_id])
        versions = self.sessions.setdefault((session, namespace.id), [])
        if len(versions) != base_version:
            raise Conflict(f"session {session!r} is at version {len(versions)}", current=len(versions))
        if branch and branch != self._branch(session, namespace):
            raise Gone(f"session {session!r} is another one now")
        versions.append(list(blocks))
        receipt = self.receipts[write_id] = api.Receipt(
            id=session,
            namespace=namespace.id,
            lane="main",
            version=len(versions),
            tokens=sum(link.tokens for link in blocks),
            blocks=len(blocks),
            durability=durability or "dram",
            branch=self._branch(session, namespace),
        )
        return self._answer(receipt)

    def _answer(self, receipt):
        if self.lost_answers:
            self.lost_answers -= 1
            raise Unavailable("commit: the node did not answer", kind=self.lost_how)
        return receipt

    def _state(self, session, namespace):
        versions = self._versions(session, namespace)
        links = versions[-1]
        tokens = sum(link.tokens for link in links)
        return api.Session(
            id=session,
            namespace=ident(namespace),
            lane="main",
            version=len(versions),
            tokens=tokens,
            blocks=len(links),
            branch=self._branch(session, namespace),
        )

    def fork(self, session, *, namespace, as_, version=0):
        versions = self._versions(session, namespace)
        self.sessions[as_, ident(namespace)] = [versions[version - 1 if version else -1]]
        return self._state(as_, namespace)

    def rewind(self, session, *, namespace, version=None, tokens=None):
        versions = self._versions(session, namespace)
        links = versions[-1] if version is None else versions[version - 1]
        if tokens is not None:
            links = links[: tokens // links[0].tokens]
        versions.append(links)
        return self._state(session, namespace)
