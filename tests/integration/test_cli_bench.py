"""`kvtier bench --quick` on a real disk, a real node and SeaweedFS: every result is there, and nothing is left."""

import asyncio
import json
import signal
import subprocess
import sys

import msgspec
import pytest
from typer.testing import CliRunner

from kvstore.cli.bench import bucket
from kvstore.cli.bench.results import MIB, Ask
from kvstore.cli.commands import app
from kvstore.config import Settings
from kvstore.objects import OVERWRITE, MemoryStore

COMMAND = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
MEASURED = {
    "memory_copy", "dram_get", "dram_lease", "lookup_512", "disk_write_raw", "disk_read_raw", "nvme_put", "nvme_get",
    "bucket_conditional_writes", "bucket_swap", "bucket_put_1", "bucket_put_8", "bucket_get_1", "bucket_get_8", "codec_ratio",
    "codec_encode", "codec_decode", "restore_dram", "restore_nvme", "restore_bucket",
}  # fmt: skip


@pytest.fixture
def store(seaweed, root, monkeypatch):
    """URL of an empty root, with its credentials in the environment."""
    for variable, value in seaweed.environment.items():
        monkeypatch.setenv(variable, value)
    return seaweed.url(root)


async def keys_under(s3_store, root):
    async with s3_store() as store:
        return [meta.key async for page in store.list(f"{root}/") for meta in page]


@pytest.mark.seaweed
async def test_everything_is_measured_and_nothing_is_left(store, s3_store, root, tmp_path):
    asked = ["bench", "--quick", "--size", "32MiB", "--store", store, "--path", str(tmp_path), "--json"]
    more = ["--tokens-per-second", "1000", "--model", "smollm2-135m", "--tokens", "1000"]
    done = await asyncio.to_thread(subprocess.run, [*COMMAND, *asked, *more], capture_output=True, text=True, check=False)
    if "took too long" in done.stdout:
        pytest.skip("the machine is too busy for --quick")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {line["name"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert set(found) == MEASURED
    assert all(line["value"] > 0 and not line["error"] for line in found.values()), found
    assert found["nvme_get"]["baseline"] == found["disk_read_raw"]["value"]
    assert found["restore_dram"]["baseline"] == 1.0
    assert found["restore_dram"]["value"] < 1.0
    assert list(tmp_path.iterdir()) == []
    assert await keys_under(s3_store, root) == []


@pytest.mark.seaweed
async def test_nothing_is_left_after_ctrl_c(store, s3_store, root, tmp_path):
    asked = [*COMMAND, "bench", "--quick", "--size", "32MiB", "--store", store, "--path", str(tmp_path), "--json"]
    process = await asyncio.create_subprocess_exec(*asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        async for line in process.stdout:
            if b"bucket_put_1" in line:
                break
        process.send_signal(signal.SIGINT)
        _, said = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 130, said
    assert b"nothing was left behind" in said
    assert list(tmp_path.iterdir()) == []
    assert await keys_under(s3_store, root) == []


def test_a_bucket_out_of_reach_keeps_nobody_from_the_rest(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    for part in ("memory", "disk"):
        monkeypatch.setattr(f"kvstore.cli.bench.command.{part}.measure", lambda *_: iter(()))
    store = "s3://bucket/x?endpoint=http://127.0.0.1:9"
    result = CliRunner().invoke(app, ["bench", "--quick", "--path", str(tmp_path), "--store", store])
    assert result.exit_code == 1
    assert "codec_ratio" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith("bucket "))
    assert "127.0.0.1" in line or "unavailable" in line or "doctor" in line, line


async def test_a_store_that_ignores_conditions_is_told_apart():
    class Careless(MemoryStore):
        async def put(self, key, body, mode):
            return await super().put(key, body, OVERWRITE)

    line = await bucket._conditional(Careless(), "probe/x")
    assert line.value == 0
    assert "condition is ignored" in line.error


async def test_a_store_in_memory_is_measured_and_empty_afterwards(monkeypatch):
    monkeypatch.setattr(bucket, "_LATE", 300.0)  # no request hangs here; the machine may have other things to do
    settings = Settings()
    settings = msgspec.structs.replace(settings, store=msgspec.structs.replace(settings.store, url="memory://bench"))
    ask = Ask(size=4 * MIB, block=MIB, object=MIB, seconds=1.0)
    names = [line.name async for line in bucket.measure(settings, ask, 0.2)]
    assert names[0] == "bucket_conditional_writes"
    assert names[-1] == "bucket_get_8"
    left = [meta.key async for page in MemoryStore.named("bench", None).list("") for meta in page]
    assert left == []
