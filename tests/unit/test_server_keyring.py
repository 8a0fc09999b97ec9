"""A node's or gateway's file of tokens: read again when it changes, never taken for less than it was by mistake."""

import asyncio
import errno
import os
import threading
from unittest.mock import Mock

import pytest
from fakes.clock import HandClock
from fakes.node import until

from kvstore.access import NOBODY, Tokens, everything, new_token
from kvstore.clock import SeededIds, VirtualClock
from kvstore.errors import Denied, Invalid
from kvstore.server.keyring import Keyring, Open

IDS = SeededIds(5)
FIRST, SECOND = (new_token(IDS, "acme", ("read",)) for _ in range(2))


def text_of(*made):
    return Tokens({token_id: token for _, token_id, token in made}).text()


async def admitted(ring, made):
    return (await ring.admit(f"Bearer {made[0]}")).token == made[1]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(text_of(FIRST))
    return path


async def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(path, caplog):
    ring = Keyring(str(path), VirtualClock())
    assert await ring.admit("") is NOBODY
    assert await admitted(ring, FIRST)
    path.write_text(text_of(FIRST, SECOND))
    assert await admitted(ring, SECOND)  # at once: it was not known
    path.write_text(text_of(SECOND))
    await ring.look()
    with pytest.raises(Denied):
        await admitted(ring, FIRST)
    for broken in ("[tokens", "\udcff", ""):
        path.write_bytes(broken.encode(errors="surrogateescape"))
        for _ in range(3):
            await ring.look()
            assert await admitted(ring, SECOND)
    path.unlink()
    for _ in range(3):
        await ring.look()
        assert await admitted(ring, SECOND)
    assert len(caplog.records) == 4  # one for each thing that was wrong with it
    assert "stay valid" in ring.wrong
    assert "put the file back" in caplog.records[-1].getMessage()
    assert "kvtier tokens create" not in caplog.records[-1].getMessage()  # which would revoke all others
    path.write_text(Tokens({}).text())  # none, and it says so: the last one was revoked
    await ring.look()
    with pytest.raises(Denied):
        await admitted(ring, SECOND)
    assert not ring.wrong


async def test_a_file_that_was_away_is_taken_up_when_it_is_back(path, tmp_path):
    ring = Keyring(str(path), VirtualClock())
    path.rename(tmp_path / "aside")
    await ring.look()
    assert await admitted(ring, FIRST)
    assert ring.wrong
    (tmp_path / "aside").rename(path)  # the same file: nothing else says that it is back
    await ring.look()
    assert not ring.wrong


async def test_what_could_not_be_read_is_read_when_it_can_be_though_the_file_is_the_same(path, monkeypatch):
    ring = Keyring(str(path), VirtualClock())
    for text, error, says in (
        (text_of(SECOND), OSError(errno.EMFILE, "Too many open files"), "Too many open files"),
        (text_of(FIRST, SECOND), MemoryError(), "MemoryError"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr("kvstore.server.keyring._unblocked", Mock(side_effect=error))
            path.write_text(text)
            await ring.look()
        assert says in ring.wrong
        await ring.look()
        assert (ring.tokens.known, ring.wrong) == (Tokens.parse(text).known, "")
    path.write_text(text_of(SECOND))
    path.chmod(0o666)
    await ring.look()
    assert "anybody" in ring.wrong
    path.chmod(0o644)  # as it was told to
    await ring.look()
    assert (ring.tokens.known.keys(), ring.wrong) == ({SECOND[1]}, "")


async def test_a_mode_that_is_changed_and_a_time_that_is_put_back_are_noticed(path):
    ring, before = Keyring(str(path), VirtualClock()), path.stat()
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a file system's clock has ticks
        path.chmod(0o666)
    await ring.look()
    assert "anybody" in ring.wrong
    path.chmod(0o644)
    await ring.look()
    assert not ring.wrong
    seen = path.stat()
    path.write_text(text_of(SECOND))
    while path.stat().st_ctime_ns == seen.st_ctime_ns:
        os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (seen.st_size, seen.st_mtime_ns)
    await ring.look()
    assert ring.tokens.known.keys() == {SECOND[1]}


async def test_a_file_system_that_hangs_keeps_nobody_waiting_for_ever(path, monkeypatch):
    ring, go_on = Keyring(str(path), VirtualClock()), threading.Event()
    monkeypatch.setattr(ring, "_signature", lambda: go_on.wait(300))
    monkeypatch.setattr("kvstore.server.keyring._PATIENCE_S", 0.01)
    try:
        for _ in range(2):  # the second finds the look of the first under way
            with pytest.raises(Denied, match="not known"):
                await asyncio.wait_for(ring.admit(f"Bearer {SECOND[0]}"), 20)
        assert await admitted(ring, FIRST)
    finally:
        go_on.set()


async def test_a_token_that_was_revoked_is_noticed_without_anybody_asking(path):
    clock = HandClock()
    ring = Keyring(str(path), clock)
    keeping = asyncio.create_task(ring.keep())
    await until(lambda: clock.sleepers)
    path.write_text(text_of(SECOND))
    await clock.advance(1)
    await until(lambda: ring.tokens.known.keys() == {SECOND[1]})  # a thread that is late is not waited for by the next look
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_while_a_file_is_read_those_that_are_known_are_not_kept_waiting(path, monkeypatch):
    ring, parse, go_on, waited = Keyring(str(path), VirtualClock()), Tokens.parse, threading.Event(), []

    def slowly(text, name):
        waited.append(None)
        waited[-1] = go_on.wait(10)  # set by the loop, which would have no turn to
        return parse(text, name)

    monkeypatch.setattr(Tokens, "parse", slowly)
    path.write_text(text_of(SECOND))
    waiting = asyncio.create_task(ring.admit(f"Bearer {SECOND[0]}"))
    await until(lambda: waited)
    assert await admitted(ring, FIRST)
    path.write_text(text_of(FIRST, SECOND))
    both = asyncio.create_task(ring.look())
    await asyncio.sleep(0)
    go_on.set()
    assert (await waiting).token == SECOND[1]
    await both
    assert ring.tokens.known.keys() == {FIRST[1], SECOND[1]}
    assert waited == [True, True]


async def test_a_file_that_cannot_be_trusted_is_refused_at_the_start(path):
    for empty in ("", "# written by a script that was stopped\n"):
        path.write_text(empty)
        with pytest.raises(Invalid, match="empty") as caught:
            Keyring(str(path), VirtualClock())
        assert "kvtier tokens create" in caught.value.remedy
    path.chmod(0o666)
    with pytest.raises(Invalid, match="anybody"):
        Keyring(str(path), VirtualClock())
    path.unlink()
    with pytest.raises(Invalid) as caught:
        Keyring(str(path), VirtualClock())
    assert "kvtier tokens create" in caught.value.remedy
    assert "put the file back" in caught.value.remedy  # whether there was one is not known here


@pytest.mark.timeout(60)
async def test_a_pipe_in_the_files_place_is_not_waited_for(path):
    ring = Keyring(str(path), VirtualClock())
    path.unlink()
    os.mkfifo(path, 0o600)
    await ring.look()
    assert await admitted(ring, FIRST)
    with pytest.raises(Invalid, match="is no file"):
        Keyring(str(path), VirtualClock())


async def test_without_tokens_everybody_is_the_default_tenant():
    assert await Open().admit("Bearer whatever-there-is") == everything("default")
