"""LMCache's real remote backend on our plugin: bytes, reference counts, and what a store that is down does to it."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from itertools import count
from pathlib import Path

import pytest

try:
    import lmcache_parts
    import torch
    from conftest import UNPACKED
    from lmcache_parts import LAYERS, backends, running_loop

    from kvstore.connectors import lmcache as module
except ImportError as error:
    pytest.skip(f"LMCache is not unpacked here: {error}", allow_module_level=True)

PARTS, NUMBERS = Path(lmcache_parts.__file__), count()


@pytest.fixture(scope="module")
def loop():
    with running_loop() as loop:
        yield loop


@pytest.fixture
def url(request):
    return f"memory://{request.node.originalname}-{next(NUMBERS)}?dram=256MiB"


@pytest.fixture
def make(loop, url):
    """`make(**options)`: connected backends; LMCache has all of its memory back at the end."""
    made = []

    def build(where=url, **options):
        one = backends(where, loop, **options)
        made.append((one, one.__enter__()))
        assert made[-1][1].ours._bridge.wait_connected(30)
        return made[-1][1]

    yield build
    for one, parts in made:
        one.__exit__(None, None, None)
        assert parts.used == 0


def until(true, seconds=60):
    ends = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.05)


def drop(*chunks):
    for each in chunks:
        each.ref_count_down()


@pytest.mark.parametrize("mode", ["plain", "mla", "layerwise"])
def test_chunks_come_back_bit_by_bit_and_every_reference_too(make, mode):
    backend = make(mla=mode == "mla", layerwise=mode == "layerwise")
    each = LAYERS if mode == "layerwise" else 1
    keys = backend.keys(1, 2, 3)
    chunks = [backend.chunk(seed, tokens=100 if seed >= 2 * each else 256) for seed in range(3 * each)]  # the last one is not full
    want = [chunk.tensor.clone() for chunk in chunks]
    assert backend.remote.batched_contains(keys) == 0
    backend.stored(keys, chunks)
    assert [chunk.get_ref_count() for chunk in chunks] == [1] * len(chunks)
    drop(*chunks)
    assert backend.used == 0

    missing = backend.keys(4)
    assert backend.remote.batched_contains([*keys, *missing]) == len(keys)
    assert (backend.remote.contains(keys[0]), backend.remote.contains(missing[0])) == (True, False)
    got = backend.remote.batched_get_blocking([*keys, *missing])
    assert got[len(keys) :] == [None] * each
    for chunk, tensor in zip(got, want, strict=False):
        assert torch.equal(chunk.tensor, tensor)
        assert (chunk.get_memory_format(), chunk.get_ref_count()) == (backend.fmt, 1)
    drop(*got[: len(keys)])
    one = backend.remote.get_blocking(keys[-1])
    assert torch.equal(one.tensor, want[-1])
    drop(one)
    assert backend.remote.get_blocking(missing[0]) is None


def test_what_one_process_stored_another_has_from_the_node_and_then_from_the_bucket(make, node):
    subprocess.run([sys.executable, str(PARTS), node.url], check=True, env=os.environ | UNPACKED)
    node.settled()
    for lose in (lambda: None, node.wipe):
        lose()
        backend = make(node.url)
        want = [backend.chunk(1), backend.chunk(2), backend.chunk(3, tokens=70)]
        got = backend.remote.batched_get_blocking(backend.keys(1, 2, 3))
        assert [torch.equal(a.tensor, b.tensor) for a, b in zip(got, want, strict=True)] == [True] * 3
        drop(*want, *got)


@pytest.mark.parametrize("other", [{"revision": "2"}, {"model": "other"}, {"tenant": "other"}, {"mla": True}, {"worker": 1}])
def test_another_model_tenant_format_or_worker_finds_nothing(make, other):
    backend, stranger = make(), make(**other)
    chunk = backend.chunk(1)
    backend.stored(backend.keys(1), [chunk])
    drop(chunk)
    assert stranger.remote.batched_contains(stranger.keys(1)) == 0
    assert backend.remote.batched_contains(backend.keys(1)) == 1


def test_a_put_that_is_cancelled_gives_the_chunks_back_and_reads_no_byte_of_them_afterwards(make, loop, monkeypatch):
    backend = make()
    keys, chunks = backend.keys(1, 2, 3), [backend.chunk(seed) for seed in (1, 2, 3)]
    want = [chunk.tensor.clone() for chunk in chunks]
    copying, go_on, fill, copied = threading.Event(), threading.Event(), module._fill, []

    def slow(*arguments):
        copied.append(arguments)
        copying.set()
        fill(*arguments)
        go_on.wait(30)

    monkeypatch.setattr(module, "_fill", slow)
    for chunk in chunks:
        chunk.ref_count_up()  # as the backend does for its put
    putting = asyncio.run_coroutine_threadsafe(backend.remote.connection.batched_put(keys, chunks), loop)
    assert copying.wait(30)
    putting.cancel()
    threading.Timer(0.1, go_on.set).start()  # the copy that is under way is waited for
    with pytest.raises(CancelledError):
        putting.result(30)
    backend.ours._bridge._saves.submit(lambda: None).result(30)  # the saving thread is free again
    assert len(copied) == 1
    assert [chunk.get_ref_count() for chunk in chunks] == [1, 1, 1]
    for chunk in chunks:
        chunk.tensor.fill_(-1)  # LMCache uses the memory for something else
    drop(*chunks)
    for got, tensor in zip(backend.remote.batched_get_blocking(keys), want, strict=True):
        assert got is None or torch.equal(got.tensor, tensor)
        if got is not None:
            drop(got)


def test_a_put_that_waits_and_is_cancelled_is_never_begun(make, loop):
    backend = make()
    keys, chunk, go_on = backend.keys(1), backend.chunk(1), threading.Event()
    blocked = backend.ours._bridge._saves.submit(lambda: go_on.wait(30))
    chunk.ref_count_up()
    putting = asyncio.run_coroutine_threadsafe(backend.remote.connection.batched_put(keys, [chunk]), loop)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()
    putting.cancel()
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), loop).result()
    assert chunk.get_ref_count() == 1  # while the tier is still busy with something else
    go_on.set()
    blocked.result(30)
    backend.ours._bridge._saves.submit(lambda: None).result(30)
    drop(chunk)
    assert backend.remote.batched_contains(keys) == 0


def test_a_get_that_lmcache_no_longer_waits_for_leaks_no_chunk(make, monkeypatch):
    backend = make(timeout_s=1)
    keys, chunks = backend.keys(1, 2, 3), [backend.chunk(seed) for seed in (1, 2, 3)]
    backend.stored(keys, chunks)
    drop(*chunks)
    take, go_on, taken = backend.ours._chunk, threading.Event(), []

    def slow(page):
        taken.append(take(page))
        if len(taken) == 2:
            go_on.wait(30)
        return taken[-1]

    monkeypatch.setattr(backend.ours, "_chunk", slow)
    threading.Timer(1.5, go_on.set).start()
    assert backend.remote.batched_get_blocking(keys) == [None] * 3
    backend.ours._bridge._loads.submit(lambda: None).result(30)
    go_on.wait(30)
    until(lambda: backend.used == 0)
    assert len(taken) == 2


def test_a_memory_that_is_full_shortens_what_comes_and_keeps_nobody_waiting(make):
    backend = make(memory_gb=0.005)  # 6 chunks
    keys, chunks = backend.keys(1, 2, 3), [backend.chunk(seed) for seed in (1, 2, 3)]
    backend.stored(keys, chunks)
    fillers = []
    while (
        filler := backend.memory.allocate(backend.metadata.get_shapes(), lmcache_parts.DTYPE, backend.fmt, busy_loop=False)
    ) is not None:
        fillers.append(filler)
    drop(fillers.pop())
    got = backend.remote.batched_get_blocking(keys)
    assert [chunk is not None for chunk in got] == [True, False, False]
    assert torch.equal(got[0].tensor, chunks[0].tensor)
    drop(got[0], *chunks, *fillers)


def test_without_a_node_everything_is_a_miss_and_with_it_again_everything_is_there(make, node, loop, tmp_path):
    async def ping(backend):
        return await backend.remote.connection.ping()

    with backends(f"kvtier+unix://{tmp_path}/nobody.sock", loop) as alone:
        chunk = alone.chunk(1)
        alone.stored(alone.keys(1), [chunk])
        assert chunk.get_ref_count() == 1
        drop(chunk)
        assert (alone.remote.contains(alone.keys(1)[0]), alone.remote.batched_contains(alone.keys(1))) == (False, 0)
        assert alone.remote.batched_get_blocking(alone.keys(1)) == [None]
        assert asyncio.run_coroutine_threadsafe(ping(alone), loop).result(30) != 0

    backend = make(node.url)
    keys, chunk = backend.keys(1), backend.chunk(1)
    backend.stored(keys, [chunk])
    assert asyncio.run_coroutine_threadsafe(ping(backend), loop).result(30) == 0
    node.settled()
    node.kill()
    assert backend.remote.batched_contains(keys) == 0
    assert backend.remote.batched_get_blocking(keys) == [None]
    backend.stored(backend.keys(2), [chunk])
    assert asyncio.run_coroutine_threadsafe(ping(backend), loop).result(30) != 0
    node.start()
    until(lambda: asyncio.run_coroutine_threadsafe(ping(backend), loop).result(30) == 0)
    until(lambda: backend.remote.batched_contains(keys) == 1)
    (got,) = backend.remote.batched_get_blocking(keys)
    assert torch.equal(got.tensor, chunk.tensor)
    drop(got, chunk)


@pytest.mark.parametrize("mode", ["test_storage_manager"])
def test_lmcaches_own_check(mode, tmp_path, url):
    """Its contract test for a storage manager with a remote backend, as its users run it."""
    settings = tmp_path / "lmcache.yaml"
    plugin = "remote_storage_plugin.kvtier."
    settings.write_text(
        "chunk_size: 16\nlocal_cpu: false\nmax_local_cpu_size: 0.1\nremote_storage_plugins: [kvtier]\nextra_config:\n"
        + "".join(
            f"  {plugin}{key}: {value}\n"
            for key, value in {
                "module_path": "kvstore.connectors.lmcache",
                "class_name": "KVTierAdapter",
                "url": url,
                "revision": "'1'",
            }.items()
        )
    )
    said = check(mode, {"LMCACHE_CONFIG_FILE": str(settings)}, "--settle-time", "1")
    assert "Failed" not in said
    assert "Passed" in said


def check(mode, environment, *arguments):
    run = subprocess.run(
        [sys.executable, "-m", "lmcache.v1.basic_check", "--mode", mode, "--model", "m", *arguments],
        env=os.environ | UNPACKED | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    return run.stdout
