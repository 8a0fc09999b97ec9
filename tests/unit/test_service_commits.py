"""Commits promised before they are in the bucket: what was acknowledged is kept, in order, until the protocol has decided."""

import asyncio

import msgspec
import pytest
from fakes.kv import publish
from fakes.service import ME, NS, links, node

from kvstore import api
from kvstore.clock import RandomIds, SystemClock
from kvstore.errors import Closed, Conflict, Corrupt, Denied, Gone, Invalid, Overloaded, Unavailable, Unsupported
from kvstore.ids import Shard
from kvstore.objects import Fault, Faults, MemoryStore
from kvstore.repo.branches import promised
from kvstore.repo.testing import until
from kvstore.service import commits as lines
from kvstore.service import tries
from kvstore.service.commits import Commits
from kvstore.service.promises import Intent
from tiering import JournalFull


class Disk:
    """A journal. `refuses`: what `put` raises; `keeps`: what `remove` raises."""

    def __init__(self):
        self.records, self.refuses, self.keeps = {}, None, None

    async def put(self, key, body):
        await asyncio.sleep(0)
        if self.refuses:
            raise self.refuses
        self.records[key] = body

    def items(self):
        return sorted(self.records.items())

    async def remove(self, key):
        if self.keeps:
            raise self.keeps
        self.records.pop(key, None)


class Bucket:
    """What commits end in. `errors`: raised by the first so many; `held`: commits whose blocks are protected."""

    def __init__(self, *errors):
        self.errors, self.landed, self.held = list(errors), [], 0
        self.branches, self.gate, self.then = [], None, []
        self.branch = "b"

    async def fields(self, tenant, namespace):
        await asyncio.sleep(0)
        return NS

    def learn(self, fields):
        pass

    async def secure(self, tenant, request, *, promised=False):
        self.held += 1
        await asyncio.sleep(0)
        return True

    async def release(self, tenant, request):
        self.held -= 1

    async def apply(self, tenant, request):
        if self.errors:
            raise self.errors.pop(0)
        if self.then and (error := self.then.pop(0)):
            raise error
        if self.gate is not None:
            await self.gate.wait()
        self.branches.append(request.branch)
        self.landed.append(request.base_version)
        version = request.base_version + 1
        return api.Receipt(
            id="s", namespace=NS.id, lane="main", version=version, tokens=16, blocks=1, durability="bucket", branch=self.branch
        )


def made(bucket, disk=None, pending_bytes=1 << 20):
    return Commits(bucket, disk, SystemClock(), RandomIds(), pending_bytes=pending_bytes)


def commit_of(base=0, blocks=1, **fields):
    return api.Commit(id="s", namespace=NS.id, base_version=base, blocks=links(blocks), **fields)


async def landed(commits):
    return await commits.settle(ME, "s", SystemClock().monotonic() + 20)


@pytest.mark.parametrize(
    "error",
    [
        Denied("rotating", kind="expired_credentials"),
        Denied("no", kind="access_denied"),
        Invalid("moved", kind="wrong_region"),
        Overloaded("no room in flight"),
        Corrupt("a proxy's error page"),
        Closed("the store was closed"),
        Unsupported("newer", kind="unknown_format"),
        Unavailable("away"),
        OSError(5, "input/output error"),
        RuntimeError("a defect"),
    ],
)
async def test_what_was_promised_waits_for_everything_but_a_decision(error):
    bucket, disk = Bucket(error), Disk()
    commits = made(bucket, disk)
    await commits.commit(ME, commit_of(), "nvme")
    assert len(disk.records) == 1
    assert await landed(commits)
    assert (bucket.landed, bucket.held, disk.records, commits.pending) == ([0], 0, {}, 0)


@pytest.mark.parametrize("error", [Conflict("moved"), Gone("deleted"), Invalid("too long")])
async def test_what_the_protocol_has_decided_is_given_up_and_counted(error):
    bucket, disk = Bucket(error), Disk()
    commits = made(bucket, disk)
    await commits.commit(ME, commit_of(), "nvme")
    assert await landed(commits)
    assert (bucket.landed, bucket.held, disk.records) == ([], 0, {})
    assert commits.outcomes[error.kind] == 1


async def test_a_journal_that_cannot_be_cleared_stops_no_session():
    bucket, disk = Bucket(), Disk()
    disk.keeps = OSError(28, "No space left on device")
    commits = made(bucket, disk)
    for base in range(3):
        await commits.commit(ME, commit_of(base), "nvme")
        assert await landed(commits)
    assert (bucket.landed, bucket.held, commits.pending) == ([0, 1, 2], 0, 0)


@pytest.mark.parametrize(
    ("refusal", "error"), [(OSError(28, "No space left on device"), Unavailable), (JournalFull("64 MiB"), Overloaded)]
)
async def test_a_promise_that_the_disk_does_not_take_is_refused_and_protects_nothing(refusal, error):
    bucket, disk = Bucket(), Disk()
    disk.refuses = refusal
    commits = made(bucket, disk)
    with pytest.raises(error):
        await commits.commit(ME, commit_of(), "nvme")
    assert (bucket.held, commits.pending) == (0, 0)
    disk.refuses = None
    assert (await commits.commit(ME, commit_of(), "nvme")).version == 1


async def test_of_two_promises_on_one_version_at_once_one_is_refused():
    bucket = Bucket(*[Unavailable("away")] * 2)
    commits = made(bucket, Disk())
    outcomes = await asyncio.gather(*(commits.commit(ME, commit_of(0, n + 1), "nvme") for n in range(5)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [api.Receipt, *[Conflict] * 4]
    assert await landed(commits)
    assert bucket.landed == [0]


async def test_promises_made_without_waiting_for_each_other_land_in_order():
    bucket = Bucket(*[Unavailable("away")] * 2)
    commits = made(bucket, Disk())
    await asyncio.gather(*(commits.commit(ME, commit_of(base, base + 1), "nvme") for base in range(8)))
    assert await landed(commits)
    assert bucket.landed == list(range(8))


async def test_a_promise_that_is_asked_for_again_is_the_same_one():
    bucket, disk = Bucket(*[Unavailable("away")] * 2), Disk()
    commits = made(bucket, disk)
    first = await commits.commit(ME, commit_of(write_id="a" * 32), "nvme")
    assert await commits.commit(ME, commit_of(write_id="a" * 32), "nvme") == first
    assert (commits.pending, commits.pending_bytes) == (1, 1024 + 256)
    assert await landed(commits)
    assert (bucket.landed, commits.pending_bytes) == ([0], 0)


async def test_what_is_committed_during_a_replay_comes_behind_it():
    bucket, disk = Bucket(), Disk()
    for base in range(2):
        request = commit_of(base, base + 1, write_id=f"{base}" * 32, durability="nvme")
        intent = Intent(tenant=ME, request=request, fields=NS, at=float(base))
        disk.records[request.write_id.encode()] = msgspec.msgpack.encode(intent)
    commits = made(bucket, disk)
    replaying = asyncio.create_task(commits.replay())
    await asyncio.sleep(0)
    await commits.commit(ME, commit_of(2, 3), "nvme")
    with pytest.raises(Conflict):
        await commits.commit(ME, commit_of(0), "nvme")
    assert await replaying == 2
    assert await landed(commits)
    assert (bucket.landed, bucket.held) == ([0, 1, 2], 0)


async def test_a_promise_is_not_cut_because_memory_is_full(tmp_path):
    store, mine = Faults(MemoryStore()), links(8)
    async with node(store, tmp_path, dram__size="1MiB") as service:
        assert all(await publish(service, ME, NS, mine))
        store.script += [Fault(action="before", verb="put", times=100_000)]
        await service.call(ME, "commit", commit_of(blocks=8, durability="nvme"))
        leases = await _everything(service)
        store.script.clear()
        await asyncio.sleep(1)
        stats = await service.call(ME, "stats", api.Nothing())
        assert (stats.commits["pending"], stats.commits["pending_bytes"], stats.commits.get("cut", 0)) == (1, 1024 + 8 * 256, 0)
        for lease in leases:
            lease.release()
        session = await service.call(ME, "get_session", api.OfSession(id="s"))
        assert (session.version, session.tokens) == (1, 128)


async def _everything(service):
    """Leases on all memory there is."""
    leases = []
    for first in range(10, 1000):
        [link] = links(1, first=first)
        if not (await publish(service, ME, NS, [link]))[0]:
            return leases
        found, _ = await service.plane.get(ME, NS.id, Shard(), [link], deadline_ms=0, reach="dram")
        leases += found
    raise AssertionError("there is no end to it")


# --- which session (I4) ---


async def test_a_promise_on_a_promise_is_of_the_session_that_the_first_one_made():
    bucket, disk = Bucket(*[Unavailable("away")] * 2), Disk()
    commits = made(bucket, disk)
    first, second, third = [
        await commits.commit(ME, commit_of(base, base + 1, write_id=f"{base}" * 32), "nvme") for base in range(3)
    ]
    assert {first.branch, second.branch, third.branch} == {promised(ME, "s", NS.id, "0" * 32)}
    assert await landed(commits)
    assert bucket.branches == ["", "b", "b"]
    assert (await commits.commit(ME, commit_of(3, 4), "dram")).branch == "b"
    await commits.commit(ME, commit_of(4, 5), "bucket")
    assert bucket.branches == ["", "b", "b", "b", "b"]


async def test_i4_a_promise_says_its_session_also_after_a_crash():
    """The first one lands; before the second one does, the node dies."""
    bucket, disk = Bucket(), Disk()
    commits = made(bucket, disk)
    bucket.then = [None, Unavailable("away")]
    for base in range(3):
        await commits.commit(ME, commit_of(base, base + 1, write_id=f"{base}" * 32), "nvme")
    await until(lambda: len(disk.records) == 2)
    assert await commits.drain(0) == 2
    assert next(msgspec.msgpack.decode(body, type=Intent) for _, body in disk.items()).request.branch == "b"
    again = made(bucket, disk)
    assert await again.replay() == 2
    assert await landed(again)
    assert bucket.branches == ["", "b", "b"]


async def test_what_was_built_on_another_session_of_that_id_does_not_line_up_behind_it():
    """It would fall with what it was not built on."""
    bucket = Bucket(*[Unavailable("away")] * 3)
    commits = made(bucket, Disk())
    await commits.commit(ME, commit_of(1, 2, branch="a" * 32), "nvme")
    for other in ("b" * 32, "b" * 16):
        with pytest.raises(Unavailable, match="another session"):
            await commits.commit(ME, commit_of(2, 3, branch=other), "nvme")
    for same in ("a" * 32, "a" * 16, ""):
        assert (await commits.commit(ME, commit_of(2, 3, branch=same, write_id="2" * 32), "nvme")).version == 3
    assert await landed(commits)


async def test_what_was_promised_on_a_promise_that_could_not_be_kept_is_dropped_with_it():
    """Somebody else's version has the number of the one that was never made."""
    bucket, disk = Bucket(Conflict("moved")), Disk()
    commits = made(bucket, disk)
    for base in range(3):
        await commits.commit(ME, commit_of(base, base + 1), "nvme")
    assert await landed(commits)
    assert (bucket.landed, bucket.held, disk.records, commits.pending) == ([], 0, {}, 0)
    assert (commits.outcomes["conflict"], commits.outcomes["gone"]) == (1, 2)
    for durability in ("nvme", "dram", "bucket"):
        with pytest.raises(Gone, match="could not be made"):
            await commits.commit(ME, commit_of(3, 4), durability)
    assert (await commits.commit(ME, commit_of(3, 4, branch="b"), "nvme")).version == 4  # who has restored it says so
    assert await landed(commits)
    assert bucket.landed == [3]


async def test_a_promise_on_a_promise_that_nobody_keeps_is_waited_for_but_not_for_ever(monkeypatch):
    """It may be another node's, which has yet to make it, or is no more."""
    monkeypatch.setattr(lines, "_LONGEST_WAIT", 0.01)
    pending = Unavailable("nothing tells of it", kind="promise_pending")
    bucket, disk = Bucket(*[pending] * 11), Disk()
    commits = made(bucket, disk)
    await commits.commit(ME, commit_of(1, 2, branch="7" * 16), "nvme")
    assert await landed(commits)
    assert (bucket.landed, disk.records) == ([1], {})
    bucket.errors = [pending] * 12
    await commits.commit(ME, commit_of(2, 3, branch="8" * 16), "nvme")
    assert await landed(commits)
    assert (bucket.landed, bucket.held, disk.records, commits.pending) == ([1], 0, {}, 0)


async def test_what_became_of_a_promise_is_remembered_by_version():
    """A later promise of that id does not take its place; of one that was made twice nobody knows which session is meant."""
    bucket = Bucket()
    commits = made(bucket)
    for base in range(2):
        await commits.commit(ME, commit_of(base, base + 1), "dram")
        assert await landed(commits)
    bucket.branch = "c"  # the session was deleted and made again, by way of this node
    first = await commits.commit(ME, commit_of(0), "dram")
    assert await landed(commits)
    await commits.commit(ME, commit_of(2, 3), "bucket")
    assert bucket.branches == ["", "b", "", "b"]
    with pytest.raises(Gone, match="made twice"):
        await commits.commit(ME, commit_of(1, 2), "bucket")
    await commits.commit(ME, commit_of(1, 2, branch=first.branch), "bucket")  # who says which is not told so
    assert bucket.branches[4:] == ["c"]


async def test_a_promise_that_landed_in_a_session_of_another_maker_leads_there_also_after_a_crash():
    """There was an empty one of that name: what was promised on top of it says so in the journal."""
    bucket, disk = Bucket(), Disk()
    commits = made(bucket, disk)
    bucket.then = [None, Unavailable("away")]
    for base in range(2):
        told = await commits.commit(ME, commit_of(base, base + 1, write_id=f"{base}" * 32), "nvme")
    await until(lambda: len(disk.records) == 1)
    await commits.drain(0)
    again = made(bucket, disk)
    await again.replay()
    assert await landed(again)
    await again.commit(ME, commit_of(2, 3, branch=told.branch), "bucket")
    assert bucket.branches == ["", "b", "b"]


async def test_i4_a_promise_names_its_session_to_every_node_and_after_a_restart():
    store, mine = MemoryStore(), links(3)
    async with node(store) as service:
        assert all(await publish(service, ME, NS, mine))
        receipt = await service.call(ME, "commit", commit_of(blocks=1, durability="dram"))
        session = await service.call(ME, "get_session", api.OfSession(id="s"))
        assert session.branch.startswith(receipt.branch)
        assert receipt.branch not in {"", session.branch}
        await service.call(ME, "commit", commit_of(1, 2, branch=receipt.branch, durability="bucket"))
    async with node(store) as again:
        assert all(await publish(again, ME, NS, mine))
        follower = commit_of(2, 3, branch=receipt.branch, durability="bucket")
        assert (await again.call(ME, "commit", follower)).branch == session.branch
        await again.call(ME, "delete_session", api.OfSession(id="s"))
        for base in range(3):
            await again.call(ME, "commit", commit_of(base, base + 1, durability="bucket"))
        with pytest.raises(Unavailable) as unknown:
            await again.call(ME, "commit", commit_of(3, 2, branch=receipt.branch, durability="bucket"))
        assert unknown.value.kind == "promise_pending"


# --- once, and bounded ---


async def test_a_retry_joins_the_try_that_its_caller_left():
    bucket = Bucket()
    bucket.gate = asyncio.Event()
    commits = made(bucket)
    first = asyncio.create_task(commits.commit(ME, commit_of(write_id="a" * 32), "bucket"))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    again = [asyncio.create_task(commits.commit(ME, commit_of(write_id="a" * 32), "bucket")) for _ in range(3)]
    with pytest.raises(Invalid, match="another commit"):
        await commits.commit(ME, commit_of(blocks=2, write_id="a" * 32), "bucket")
    bucket.gate.set()
    assert {receipt.version for receipt in await asyncio.gather(*again)} == {1}
    assert bucket.landed == [0]
    await commits.commit(ME, commit_of(write_id="a" * 32), "bucket")  # over: the protocol finds it by its id
    assert bucket.landed == [0, 0]


async def test_commits_under_way_are_bounded_also_those_that_nobody_waits_for(monkeypatch):
    monkeypatch.setattr(tries, "MAX_TRIES", 8)
    bucket = Bucket()
    bucket.gate = asyncio.Event()
    commits = made(bucket)
    left = [asyncio.create_task(commits.commit(ME, commit_of(), "bucket")) for _ in range(8)]
    await asyncio.sleep(0)
    for task in left:
        task.cancel()
    with pytest.raises(Overloaded):
        await commits.commit(ME, commit_of(), "bucket")
    bucket.gate.set()
    await commits.drain(5)
    assert len(bucket.landed) == 8


async def test_pending_commits_are_bounded_in_bytes():
    bucket = Bucket(*[Unavailable("away")] * 3)
    commits = made(bucket, pending_bytes=100_000)
    await commits.commit(ME, commit_of(0, 1000), "dram")  # one is always taken
    with pytest.raises(Overloaded, match="pending_commits"):
        await commits.commit(ME, commit_of(1, 1), "dram")
    assert (commits.pending, commits.outcomes["overloaded"]) == (1, 1)
    assert await landed(commits)
    for base in range(1, 11):
        await commits.commit(ME, commit_of(base, 20), "dram")
    assert await landed(commits)
    assert (len(bucket.landed), commits.pending_bytes) == (11, 0)
