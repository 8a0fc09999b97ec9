"""Intents that must outlive the process: written before an answer, removed when their work is done."""

from __future__ import annotations

from tiering.index import JOURNAL, Change, Index
from tiering.tier import JournalFull


class Journal:
    """A small durable table of opaque records, all of them kept in memory too.

    Attributes:
        MAX_BODY: Bytes of one record.
        MAX_TOTAL: Bytes of all records.
    """

    MAX_ID = 64
    MAX_BODY = 4 << 20
    MAX_TOTAL = 64 << 20

    def __init__(self, index: Index, records: dict[bytes, bytes]) -> None:
        self._index = index
        self._records = records

    def items(self) -> list[tuple[bytes, bytes]]:
        """Every record, in the order of their ids."""
        return sorted(self._records.items())

    async def put(self, record: bytes, body: bytes) -> None:
        """Write one record, or replace it. It is durable when this returns; after a cancellation it may be there.

        Args:
            record: Its id, 1 to 64 bytes.
            body: At most `MAX_BODY` bytes.

        Raises:
            JournalFull: It is too large, or all are.
            OSError: The disk refused it.
            ValueError: The id's length is wrong.
        """
        if not 1 <= len(record) <= self.MAX_ID:
            raise ValueError(f"an id has 1 to {self.MAX_ID} bytes, not {len(record)}")
        total = sum(map(len, self._records.values())) - len(self._records.get(record, b""))
        if len(body) > self.MAX_BODY or total + len(body) > self.MAX_TOTAL:
            raise JournalFull(f"a record of {len(body)} bytes does not fit: {self.MAX_BODY} each, {self.MAX_TOTAL} together")
        before = self._records.get(record)
        self._records[record] = body  # now, so that two at once cannot both take the last room
        try:
            await self._index.commit([Change(JOURNAL, record, body)])
        except OSError:
            if before is None:
                self._records.pop(record, None)
            else:
                self._records[record] = before
            raise

    async def remove(self, record: bytes) -> None:
        """Forget a record; it stays forgotten once this returns. An unknown id does nothing.

        Raises:
            OSError: The disk refused; the record may come back at the next start.
        """
        if self._records.pop(record, None) is not None:
            await self._index.commit([Change(JOURNAL, record, None)])
