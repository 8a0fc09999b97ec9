"""Heads and blocks of sessions, for tests of commits."""

from kvstore.ids import BlockName, Shard
from kvstore.model import Head, parse
from kvstore.repo import Proposal
from kvstore.repo.testing import ONE_SHARD, bodies, tiny

NS = tiny()


def head_of(memory) -> Head:
    (key,) = [key for key in bodies(memory) if key.startswith("r/heads/")]
    return parse(bodies(memory)[key], Head, key)


async def blocks_of(repo, session="s", version=0, lane="main"):
    return (await repo.sessions.manifest("default", session, NS.id, lane, version)).blocks


async def epochs_pass(repo, count):
    for _ in range(count):
        await repo.epochs.advance(await repo.epochs.read())


async def commit_links(repo, shelf, links, base, session="s"):
    return await repo.commit("default", session, "", Proposal(namespace=NS, base=base, links=tuple(links), shards=ONE_SHARD), shelf)


def name_of(link) -> BlockName:
    return BlockName(NS.id, Shard(), link.prefix_id, link.tokens)
