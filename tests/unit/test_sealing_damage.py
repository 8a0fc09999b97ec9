"""Sealed objects that are not what their names say: each is a miss, or an error that says so, and never other bytes."""

import random  # noqa: TID251  seeded

import pytest
from fakes.sealed import MASTERS

from kvstore.clock import SeededIds
from kvstore.errors import Corrupt, Denied
from kvstore.ids import BlockName, Shard
from kvstore.objects import OVERWRITE, Fault, Faults, MemoryStore
from kvstore.repo import want
from kvstore.repo.testing import bodies, commit, opened, tiny
from kvstore.sealing import MasterKey, MasterKeys
from kvstore.sealing.frames import FRAME, HEADER, TAG
from tiering import Miss

ANN, BOB = tiny("ann"), tiny("bob")
OTHERS = MasterKeys([MasterKey("theirs", b"t" * 32)])


async def written(memory, clock, shelf, masters):
    """Two tenants with the same two sessions each, of the same tokens: a name, a manifest and three blocks for each session."""
    async with opened(memory, clock, masters=masters) as repo:
        for namespace in (ANN, BOB):
            await commit(repo, shelf, "s", range(12), 0, namespace)
            await commit(repo, shelf, "t", range(100, 112), 0, namespace)


def objects(memory, kind, namespace):
    """Bodies of one kind of a tenant's objects, by key."""
    owner = namespace.id if kind == "blocks" else namespace.tenant
    return {key: body for key, body in sorted(bodies(memory).items()) if key.startswith(f"r/{kind}/{owner}/")}


def damaged(body):
    """The same, flipped in each byte of its header and in some behind it; cut; and longer."""
    for at in (*range(HEADER), *range(HEADER, len(body), 97), len(body) - 1):
        flipped = bytearray(body)
        flipped[at] ^= 1 << at % 8
        yield f"flipped at {at}", bytes(flipped)
    for cut in (0, 1, HEADER - 1, HEADER, HEADER + TAG, len(body) - TAG, len(body) - 1):
        yield f"cut at {cut}", body[:cut]
    yield "longer", body + b"\0"


async def read(memory, clock, kind, shelf):
    """By a node that knows nothing yet: all blocks of the first session, or a miss; or the session's manifest."""
    async with opened(memory, clock, SeededIds(3), masters=MASTERS) as repo:
        if kind != "blocks":
            return (await repo.sessions.resolve("ann", "s", ANN.id, "main"))[1].tokens
        found = []
        for link in shelf.fill(ANN, range(12)):
            name = BlockName(ANN.id, Shard(), link.prefix_id, link.tokens)
            into = memoryview(bytearray(want(ANN, name).size))
            found.append(await repo.origin.fetch(want(ANN, name), into) or bytes(into) == shelf.held[name])
        return found


@pytest.mark.parametrize("kind", ["names", "manifests", "blocks"])
async def test_what_is_not_what_was_sealed_under_its_name_is_never_believed(memory, clock, shelf, kind):
    await written(memory, clock, shelf, MASTERS)
    elsewhere = MemoryStore(clock)
    await written(elsewhere, clock, shelf, OTHERS)
    whole = [True] * 3 if kind == "blocks" else 12
    assert await read(memory, clock, kind, shelf) == whole
    mine, start = objects(memory, kind, ANN), bodies(memory)
    read_from = []
    for key, body in mine.items():
        await memory.delete([key])  # which of them the session rests on
        try:
            missed = await read(memory, clock, kind, shelf) != whole
        except Exception:  # noqa: BLE001  whatever it is called
            missed = True
        read_from += [key] if missed else []
        await memory.put(key, body, OVERWRITE)
    assert len(read_from) == (3 if kind == "blocks" else 1)
    key = read_from[0]
    wrong = [
        *damaged(mine[key]),
        *(("of the same tenant", body) for other, body in mine.items() if other != key),
        *(("of another tenant", body) for body in objects(memory, kind, BOB).values()),
        *(("of another key", body) for body in objects(elsewhere, kind, ANN).values()),
    ]
    for how, body in wrong:
        await memory.put(key, body, OVERWRITE)
        if kind == "blocks":
            found = await read(memory, clock, kind, shelf)
            assert sum(isinstance(each, Miss) for each in found) == 1, how
            assert [each for each in found if not isinstance(each, Miss)] == [True] * 2, how
        else:
            with pytest.raises((Corrupt, Denied)) as refused:
                await read(memory, clock, kind, shelf)
            assert key in refused.value.message or "sealed object" in refused.value.message, how
            assert isinstance(refused.value, Corrupt) or refused.value.kind == "no_key", how
        assert bodies(memory)[key] == body  # nobody wrote over it
    await memory.put(key, start[key], OVERWRITE)
    assert await read(memory, clock, kind, shelf) == whole


@pytest.mark.parametrize("kind", ["names", "manifests"])
async def test_a_flip_on_the_way_is_read_again_wherever_it_is(memory, clock, shelf, kind):
    """In what it begins with, in the id of its key, its salt, its size, its body and its tag. No key is said to be missing."""
    await written(memory, clock, shelf, MASTERS)
    for at in (3, 8, 16, 23, 40, HEADER - 1, HEADER, HEADER + 40, -1):
        flip = Fault(action="corrupt", verb="get", key=f"*/{kind}/*", at=at)
        async with opened(Faults(memory, [flip], clock), clock, SeededIds(3), masters=MASTERS) as repo:
            assert (await repo.sessions.resolve("ann", "s", ANN.id, "main"))[1].tokens == 12
            assert (flip.times, repo.root.corrupt_reads) == (0, {kind: 1}), at


SPANS = [(0, FRAME), (FRAME - 9, FRAME + 9), (FRAME, 2 * FRAME), (2 * FRAME, 3 * FRAME), (0, 4 * FRAME)]


async def test_of_several_frames_none_is_given_that_was_not_sealed_there(memory, clock):
    """However it is read: whole, into a buffer as it comes, or by ranges. What another frame holds may still be given."""
    async with opened(memory, clock, masters=MASTERS) as repo:
        await repo.put_namespace(ANN)
        store, size = repo.root.store, 2 * FRAME + 1000
        key, other = (f"r/blocks/{ANN.id}/t0of1.p0of1.g0/{n:064x}/0000000001" for n in range(2))
        content = random.Random(1).randbytes(size)
        await store.put(key, content, OVERWRITE)
        await store.put(other, bytes(size), OVERWRITE)
        sound, frame = bodies(memory)[key], FRAME + TAG
        frames = [sound[HEADER + n * frame :][:frame] for n in range(3)]
        cases = {
            "flipped": sound[: HEADER + frame + 5] + bytes([sound[HEADER + frame + 5] ^ 1]) + sound[HEADER + frame + 6 :],
            "frames swapped": sound[:HEADER] + frames[1] + frames[0] + frames[2],
            "a frame less": sound[: HEADER + 2 * frame],
            "a frame of another": sound[: HEADER + frame] + bodies(memory)[other][HEADER + frame :],
            "another": bodies(memory)[other],
            "another's header": bodies(memory)[other][:HEADER] + sound[HEADER:],
        }
        given = 0
        for how, body in {"sound": sound, **cases}.items():
            await memory.put(key, body, OVERWRITE)
            into, told = memoryview(bytearray(size)), []

            def arrived(start, end, into=into, told=told):
                told.append(bytes(into[start:end]) == content[start:end])

            for reading in (store.get(key), store.get(key, into=into, arrived=arrived)):
                try:
                    assert bytes((await reading).data) == content, how
                    assert how == "sound"
                except Corrupt:
                    assert how != "sound"
            assert all(told), how
            for first, last in SPANS:
                try:
                    assert bytes((await store.get(key, range=(first, last))).data) == content[first:last], how
                    given += how != "sound"
                except Corrupt:
                    assert how != "sound"
        assert given == 4  # those beside the flipped one, the last behind swapped ones, the first before another's
