"""A disk tier, and damage to its files behind its back."""

import asyncio
import os
from contextlib import asynccontextmanager

from tiering import DiskTier, Miss, Movers
from tiering.testing import key_of, value_of, want_of

MIB = 1 << 20


@asynccontextmanager
async def disk(folder, limit=16 * MIB, **options):
    async with Movers.open() as movers, DiskTier.open(folder, limit, movers, **options) as tier:
        yield tier


async def put(tier, *numbers, size=10_000):
    return await tier.put_many([(want_of(n, size), memoryview(value_of(n, size))) for n in numbers])


async def get(tier, n, size=10_000):
    """The value's number if it is right, the miss otherwise."""
    (got,) = await tier.get_many([want_of(n, size)])
    if isinstance(got, Miss):
        return got
    with got:
        assert bytes(got.view) == value_of(n, size)
    return n


def place_of(tier, n):
    return tier._catalog._entries[key_of(n)].placed


def damage(folder, offset, how):
    """Change one byte of the slab, behind the tier's back and past its O_DIRECT."""
    with (folder / "slab").open("r+b") as slab:
        slab.seek(offset)
        old = slab.read(1)
        slab.seek(offset)
        slab.write(how(old))
        slab.flush()
        os.fsync(slab.fileno())


def flip(old):
    return bytes([old[0] ^ 1])


def raising(code):
    def fail(*_):
        raise OSError(code, os.strerror(code))

    return fail


async def prewritten(tier):
    """Wait until every page of the slab was written."""

    def done():
        space = tier._catalog._space
        slots = sum(entry.placed.length for entry in tier._catalog._entries.values())
        return not space._holes.free_bytes and space.free_bytes + slots == tier._slab.size

    while not done():  # noqa: ASYNC110  no event tells; only tests care
        await asyncio.sleep(0.005)
