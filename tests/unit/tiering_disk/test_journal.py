"""The journal keeps what is not yet in the index; bounded."""

import asyncio
import errno

import pytest
from fakes.disk import disk, raising

from tiering import JournalFull
from tiering.journal import Journal


async def test_the_journal_keeps_records_until_they_are_removed(folder):
    async with disk(folder) as tier:
        await tier.journal.put(b"b", b"second")
        await tier.journal.put(b"a", b"first")
        await tier.journal.put(b"c", b"third")
        await tier.journal.put(b"b", b"replaced")
        await tier.journal.remove(b"c")
        await tier.journal.remove(b"unknown")
        assert tier.journal.items() == [(b"a", b"first"), (b"b", b"replaced")]
    async with disk(folder) as tier:
        assert tier.journal.items() == [(b"a", b"first"), (b"b", b"replaced")]


async def test_the_journal_is_bounded_and_promises_nothing_it_cannot_keep(folder, monkeypatch):
    monkeypatch.setattr(Journal, "MAX_BODY", 100)
    monkeypatch.setattr(Journal, "MAX_TOTAL", 250)
    async with disk(folder) as tier:
        with pytest.raises(JournalFull):
            await tier.journal.put(b"a", bytes(101))
        results = await asyncio.gather(*(tier.journal.put(b"%d" % n, bytes(100)) for n in range(4)), return_exceptions=True)
        assert [type(result) for result in results] == [type(None), type(None), JournalFull, JournalFull]
        await tier.journal.put(b"1", bytes(50))  # a replacement counts once
        for bad in (b"", b"x" * 65):
            with pytest.raises(ValueError, match="bytes"):
                await tier.journal.put(bad, b"")
        monkeypatch.setattr(tier._index, "_write", raising(errno.ENOSPC))
        with pytest.raises(OSError, match="cannot be written"):
            await tier.journal.put(b"new", b"x")
        with pytest.raises(OSError, match="cannot be written"):
            await tier.journal.put(b"1", b"x")
        assert tier.journal.items() == [(b"0", bytes(100)), (b"1", bytes(50))]
        monkeypatch.undo()
