"""A disk tier whose process is killed at any instant, and what a fresh process imports."""

import asyncio
import signal
import subprocess
import sys

from tiering import DiskTier, Lease, Movers
from tiering.extents import Extents
from tiering.testing import key_of, value_of, want_of

ROUNDS = 8
LIMIT = 60 * 20_000

# Puts, evicts, discards and journals for ever, saying on its output what was acknowledged.
WRITER = r"""
import asyncio, sys
from pathlib import Path
from tiering import DiskTier, Movers
from tiering.testing import key_of, value_of, want_of
def size_of(n):
    return 1000 + n * 977 % 19_000
async def worker(tier, first):
    n = first
    while True:
        size = size_of(n)
        if (await tier.put_many([(want_of(n, size), memoryview(value_of(n, size)))]))[0]:
            print("put", n, flush=True)
        if n % 7 == 3:
            tier.discard_many([key_of(n - 3)])
        if n % 5 == first % 5:
            await tier.journal.put(b"%d" % (n % 40), b"record %d" % n)
            print("journal", n % 40, n, flush=True)
        n += 4
async def main():
    async with Movers.open() as movers, DiskTier.open(Path(sys.argv[1]), int(sys.argv[2]), movers) as tier:
        print("open", flush=True)
        await asyncio.gather(*(worker(tier, int(sys.argv[3]) + i) for i in range(4)))
asyncio.run(main())
"""


def size_of(n):
    return 1000 + n * 977 % 19_000


async def _check(folder, known, records):
    """Everything that is there is right; accounting is exact; the last acknowledged puts are there."""
    async with Movers.open() as movers, DiskTier.open(folder, LIMIT, movers) as tier:
        present = [n for n in known if tier.contains_many([key_of(n)])[0]]
        got = await tier.get_many([want_of(n, size_of(n)) for n in present])
        assert [bytes(lease.view) == value_of(n, size_of(n)) for n, lease in zip(present, got, strict=True)] == [True] * len(got)
        for lease in got:
            assert isinstance(lease, Lease)
            lease.release()
        assert tier.count == len(present)  # nothing that nobody ever put
        assert tier.used == sum(size_of(n) for n in present) <= LIMIT
        slots = [entry.placed for entry in tier._catalog._entries.values()]
        Extents(tier._slab.size, [(slot.offset, slot.length) for slot in slots])  # none overlaps another
        journal = dict(tier.journal.items())
        for name, n in records.items():
            stored = int(journal[b"%d" % name].split()[1])
            assert stored >= n  # a later one may have landed unacknowledged
        assert (tier.stats.corruptions, tier.stats.errors) == (0, 0)
        return set(present)


def test_kill_9_at_any_instant_loses_nothing_acknowledged_and_counts_exactly(tmp_path):
    folder = tmp_path / "tier"
    known, records, next_n = set(), {}, 0
    for turn in range(ROUNDS):
        with subprocess.Popen([sys.executable, "-c", WRITER, folder, str(LIMIT), str(next_n)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"open\n"
            acknowledged = [writer.stdout.readline().split() for _ in range(30 + turn * 37)]
            writer.send_signal(signal.SIGKILL)
            acknowledged += [line.split() for line in writer.stdout if line.endswith(b"\n")]
        puts = [int(words[1]) for words in acknowledged if words[0] == b"put"]
        for words in acknowledged:
            if words[0] == b"journal":
                records[int(words[1])] = int(words[2])
        next_n = max(puts) + 5
        known |= set(range(next_n))
        present = asyncio.run(_check(folder, sorted(known), records))
        recent = [n for n in puts[-20:] if (n + 3) % 7 != 3]  # those that nobody discarded; 20 always fit
        assert set(recent) <= present, f"round {turn}"
        known = set(range(next_n + 8))


def test_importing_the_package_loads_no_engine_and_no_store():
    code = (
        "import sys, tiering\n"
        "heavy = {'torch', 'lmdb', 'xxhash', 'aiohttp', 'obstore', 'kvstore', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert all(getattr(tiering, name) is not None for name in tiering.__all__)\n"
        "assert sorted(tiering.__all__, key=str.swapcase) and len(set(tiering.__all__)) == len(tiering.__all__)\n"
        "try:\n    tiering.nothing\nexcept AttributeError as error:\n    print(error)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (0, "module 'tiering' has no attribute 'nothing'\n"), result.stderr
