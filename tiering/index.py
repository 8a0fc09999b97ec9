"""The durable side of a disk tier: small tables in LMDB, committed in groups by one thread."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import lmdb
from lmdb.verify import VerifyError, verify

from tiering.movers import be_nice
from tiering.sealer import Sealer, Seals
from tiering.tier import SealedOtherwise, TierError

_log = logging.getLogger("tiering.index")

SLOTS, JOURNAL, META = "slots", "journal", "meta"
TABLES = (SLOTS, JOURNAL, META)
_LAYOUT, _SEALED = b"1", b"2"
_KEY = b"key"
_GROUP = 4096  # changes in one transaction, at most about


class Change(NamedTuple):
    """Put `value` under `key`; where it is None, delete the key."""

    table: str
    key: bytes
    value: bytes | None


class _Ask(NamedTuple):
    changes: Sequence[Change]
    done: Future[None]
    then: Callable[[], None] | None


class Index:
    """Tables of a single owner. Reads happen once, at `open`; from then on it is only written.

    Every commit is synchronous, and preceded by `barrier` where it names new slots: an entry never reaches the disk before the
    bytes it points at. LMDB without sync would be faster and just as safe against kill -9; but it reuses pages that the last
    *durable* tree still needs, so that a power cut can leave a tree that crashes whoever maps it. Changes that arrive
    during a commit share the next one, which keeps the price of the two flushes small.

    Args:
        env: An LMDB environment without LMDB's own locking.
        barrier: Makes slot bytes durable; called on the index's thread.

    Attributes:
        bytes_written: What the file system was made to write for it since it was opened; 0 where the kernel does not say.
        sealer: Seals keys of slots and bodies of journal records; None: nothing does.
    """

    def __init__(self, env: Any, barrier: Callable[[], None]) -> None:
        self.sealer: Sealer | None = None
        self._env = env
        self._barrier = barrier
        self.bytes_written = 0
        self._tables = {name: env.open_db(name.encode()) for name in TABLES}
        self._queue: SimpleQueue[_Ask | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tiering-index", daemon=True)

    @classmethod
    def open(cls, path: Path, *, reserve: int, barrier: Callable[[], None], seals: Seals | None = None) -> Index:
        """Open or create the tables. Blocking.

        A file that is not an index any more (zero-filled, cut, foreign) is replaced by an empty one: its values are misses.

        Args:
            path: LMDB's data file.
            reserve: Bytes to claim from the file system at once, so that slots that fill the disk leave room to say so. It may grow
                eightfold.
            barrier: See the class.
            seals: Makes its sealer.

        Raises:
            TierError: Another version of this software wrote it.
            SealedOtherwise: It is sealed and `seals` is None, or the other way round.
            OSError: It cannot be created.
        """
        problem = _damage(path)
        if problem:
            _log.warning("%s is damaged and starts empty: %s", path, problem)
            path.unlink()
        map_size = max(reserve * 8, 64 << 20)
        try:
            env = lmdb.open(str(path), map_size=map_size, subdir=False, lock=False, max_dbs=len(TABLES), metasync=True, sync=True)
            _claim(path, reserve)
            index = cls(env, barrier)
        except lmdb.Error as error:
            raise OSError(f"cannot open {path}: {error}") from error
        try:
            change = index._unlock(path, seals)
        except BaseException:
            index._env.close()
            raise
        index._thread.start()
        try:
            index.submit(change).result()
        except BaseException:
            index.close()
            raise
        return index

    def load(self, table: str) -> list[tuple[bytes, bytes]]:
        """A whole table. Only before the first change is submitted."""
        with self._env.begin(db=self._tables[table]) as txn:
            found = list(txn.cursor())
        if self.sealer is None or table == META:
            return found
        if table == SLOTS:
            return [(key, value) for name, value in found if (key := self.sealer.key(name)) is not None]
        return [(record, value) for record, body in found if (value := self.sealer.unwrap(record, body)) is not None]

    def _unlock(self, path: Path, seals: Seals | None) -> list[Change]:
        """Find out whether it is sealed; what is to be written about that."""
        meta = dict(self.load(META))
        layout, kept = meta.get(b"layout"), meta.get(_KEY)
        if layout not in {None, _LAYOUT, _SEALED}:
            raise TierError(f"{path} has layout {layout!r}, this version knows {_SEALED!r}: remove the folder, or use another")
        if layout is not None and (layout == _SEALED) != (seals is not None):
            raise SealedOtherwise(f"{path} is {'' if layout == _SEALED else 'not '}sealed")
        if seals is None:
            return [Change(META, b"layout", _LAYOUT)] if layout is None else []
        keep, self.sealer = seals(kept)
        return [Change(META, b"layout", _SEALED), Change(META, _KEY, keep)] if keep != kept else []

    def submit(self, changes: Sequence[Change], then: Callable[[], None] | None = None) -> Future[None]:
        """Queue changes; all of one call land together, and calls land in order. From any thread.

        Args:
            changes: What to write.
            then: Called once on the index's thread after they landed. Changes with a `then` are never given up: when a commit
                fails, they are tried again with the next.

        Returns:
            Done when the changes, and all before them, are durable; with an OSError when a commit failed. A call without
            changes waits for all before it.
        """
        done: Future[None] = Future()
        self._queue.put(_Ask(changes, done, then))
        return done

    async def commit(self, changes: Sequence[Change]) -> None:
        """Make changes durable. After a cancellation they may land, or not.

        Raises:
            OSError: They did not.
        """
        await asyncio.wrap_future(self.submit(changes))

    def close(self) -> None:
        """Commit what is queued, and let go of the file. Blocking."""
        self._queue.put(None)
        self._thread.join()
        self._env.close()

    def _run(self) -> None:
        be_nice()
        before = _written_by_this_thread()
        again: list[_Ask] = []
        running = True
        while running:
            group, running = self._next_group()
            group = again + group
            again = []
            try:
                self._write(group)
            except Exception as error:  # noqa: BLE001  whatever it is, who waits must hear of it and the thread must go on
                failure = OSError(f"the index cannot be written: {error}")
                for ask in group:
                    if not ask.done.done():
                        ask.done.set_exception(failure)
                again = [ask for ask in group if ask.then is not None]
            else:
                self.bytes_written = _written_by_this_thread() - before
                for ask in group:
                    if ask.then is not None:
                        self._tell(ask.then)
                    if not ask.done.done():
                        ask.done.set_result(None)

    @staticmethod
    def _tell(then: Callable[[], None]) -> None:
        try:
            then()
        except Exception:  # noqa: BLE001  a defect of the owner's must not end the thread that everybody waits for
            _log.exception("after a commit")

    def _next_group(self) -> tuple[list[_Ask], bool]:
        """Whatever is queued, waiting for the first; and whether there is more to come."""
        group: list[_Ask] = []
        size = 0
        ask = self._queue.get()
        while ask is not None:
            ask.done.set_running_or_notify_cancel()  # from here on nobody can cancel it
            group.append(ask)
            size += len(ask.changes)
            if size >= _GROUP:
                return group, True
            try:
                ask = self._queue.get_nowait()
            except Empty:
                return group, True
        return group, False

    def _write(self, group: list[_Ask]) -> None:
        changes = [change for ask in group for change in ask.changes]
        if not changes:
            return
        if any(change.table == SLOTS and change.value is not None for change in changes):
            self._barrier()
        with self._env.begin(write=True) as txn:
            for change in changes:
                table, key, value = change if self.sealer is None else _sealed(self.sealer, change)
                if value is None:
                    txn.delete(key, db=self._tables[table])
                else:
                    txn.put(key, value, db=self._tables[table])


def _sealed(sealer: Sealer, change: Change) -> Change:
    if change.table == SLOTS:
        return Change(SLOTS, sealer.name(change.key), change.value)
    if change.table == JOURNAL and change.value is not None:
        return Change(JOURNAL, change.key, sealer.wrap(change.key, change.value))
    return change


def _written_by_this_thread() -> int:
    """Bytes that the kernel has to write on this thread's behalf. LMDB does not tell what a commit takes."""
    try:
        lines = Path("/proc/thread-self/io").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
    except OSError:  # a kernel without task accounting
        return 0


def _damage(path: Path) -> str:
    """What is wrong with the file, read without LMDB: on a bad page LMDB itself would abort the process."""
    if not path.exists() or not path.stat().st_size:
        return ""
    try:
        return "; ".join(verify(str(path))[:3])  # type: ignore[no-untyped-call]  # lmdb annotates all but this module
    except VerifyError as error:
        return str(error)


def _claim(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        except OSError as error:
            _log.warning("%s: no room could be set aside: %s", path, error)
