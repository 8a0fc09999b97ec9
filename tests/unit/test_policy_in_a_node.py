"""What a node tells its policy is what a replay tells it: as many blocks are found as by the policy alone."""

import random  # noqa: TID251  seeded

import pytest
from fakes.kv import links_of, namespace, publish

from kvstore import api
from kvstore.config import load
from kvstore.ids import Shard
from kvstore.node import Node
from kvstore.objects import MemoryStore
from tiering import DramTier, Lease, Movers, Stack, Want
from tiering.policy_reuse import Reuse

SIZE, ROOM = 4096, 400


def key(number):
    return number.to_bytes(32, "little")


def conversations(seed, requests=1500):
    """Two in three are one question with a long text, that nobody comes back to; the third goes on for turns."""
    rng, fresh, open_ = random.Random(seed), iter(range(1, 1 << 30)), []
    for _ in range(requests):
        if open_ and rng.random() < 0.4:
            chain = rng.choice(open_)
            chain += [key(next(fresh)) for _ in range(3)]
            if len(chain) > 30:
                open_.remove(chain)
        elif rng.random() < 0.4:
            chain = [key(next(fresh)) for _ in range(8)]
            open_ = [*open_[-39:], chain]
        else:
            chain = [key(next(fresh)) for _ in range(24)]
        yield list(chain)


def alone(requests):
    policy, held, hits = Reuse(), set(), 0
    for request in requests:
        policy.asked(request)
        new = [one for one in request if one not in held]
        hits += len(request) - len(new)
        held.difference_update(policy.victims(max(0, len(held) + len(new) - ROOM)))
        held.update(new)
        policy.add_many(new)
    return hits


async def in_a_stack(requests, *, commits):
    """`commits`: only what is known is asked for, and what is published is told of by the commit behind it."""
    hits, known = 0, set()
    async with (
        Movers.open() as movers,
        DramTier.open("dram", ROOM * SIZE, movers, policy=Reuse()) as dram,
        Stack.open(dram) as stack,
    ):
        for request in requests:
            wants = [Want(one, SIZE) for one in request]
            asked = [want for want in wants if want.key in known] if commits else wants
            got = await stack.get_many(asked, stop_at_miss=False)
            leases = [one for one in got if isinstance(one, Lease)]
            hits += len(leases)
            for lease in leases:
                lease.release()
            for want in wants:
                if not dram.contains_many([want.key])[0]:
                    stack.publish(stack.reserve(want)).release()
            if commits:
                known.update(request)
                stack.asked(request, len(request))
    return hits


@pytest.mark.parametrize("commits", [False, True])
async def test_a_stack_finds_what_the_policy_alone_finds(commits):
    requests = list(conversations(1))
    total = sum(map(len, requests))
    bare, found = alone(requests), await in_a_stack(requests, commits=commits)
    assert bare > 0.15 * total
    assert found == pytest.approx(bare, abs=0.01 * total)


async def test_a_commit_tells_of_one_chain():
    fields = namespace()
    links = links_of(fields, 40)  # two full blocks and one of eight tokens
    settings = load(flags={"dram.size": "8MiB", "node.listen": "", "limits.drain": "5s"}).settings
    async with Node.open(settings, store=MemoryStore()) as node:
        service = node.service
        await service.call("default", "put_namespace", api.PutNamespace(namespace=fields.id, fields=fields))
        assert await publish(service, "default", fields, links) == [True] * 3
        policy = service.plane.tiers("default").dram._ranking._policy
        await service.call("default", "commit", api.Commit(id="s", namespace=fields.id, base_version=0, blocks=list(links)))
        runs = {id(run): run for run in policy._home.values()}.values()
        assert sorted(len(run.keys) for run in runs) == [1, 2]
        assert all(run.uses == 1 for run in runs)
        leases, _ = await service.plane.get("default", fields.id, Shard.parse("t0of1.p0of1.g0"), links, deadline_ms=0, reach="dram")
        assert len(leases) == 3
        for lease in leases:
            lease.release()
