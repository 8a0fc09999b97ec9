"""`kvtier bench` without a disk or a bucket: what it computes, what it refuses, and how it is stopped."""

import asyncio
import os
import signal

import pytest
from typer.testing import CliRunner

from kvstore.cli.bench import coding, disk, memory
from kvstore.cli.bench.geometry import KNOWN, Geometry, estimates, geometry
from kvstore.cli.bench.results import MIB, Ask, Line, timed
from kvstore.cli.bench.stopping import Stopping
from kvstore.cli.commands import app
from kvstore.errors import Invalid

SMALL = Ask(size=16 * MIB, block=8 * MIB, object=2 * MIB, seconds=1.0)


def test_models_are_known_by_name_or_by_their_dimensions():
    assert geometry("Llama-3.1-8B").token_bytes == 131_072
    assert geometry("30x3x64") == KNOWN["smollm2-135m"] == Geometry(30, 3, 64)
    assert geometry("smollm2-135m").token_bytes == 23_040
    for wrong in ("gpt", "32x8", "0x8x128", "32x8x128x2", "99999x1x1"):
        with pytest.raises(Invalid, match="is not known"):
            geometry(wrong)


def test_restoring_is_compared_with_computing():
    found = {
        "dram_get": Line(name="dram_get", value=8.0, unit="GB/s"),
        "dram_lease": Line(name="dram_lease", value=20.0, unit="us", p50_ms=0.02),
        "bucket_get_1": Line(name="bucket_get_1", value=0.1, unit="GB/s", p50_ms=20.0),
        "bucket_get_8": Line(name="bucket_get_8", value=0.4, unit="GB/s"),
        "nvme_get": Line(name="nvme_get", error="no"),
    }
    dram, bucket = estimates(found, KNOWN["llama-3.1-8b"], 4096, 5000.0)
    nbytes = 4096 * 131_072
    assert dram.value == pytest.approx(nbytes / 8e9 + 20e-6)
    assert bucket.value == pytest.approx(nbytes / 0.4e9 + 0.020)
    assert dram.baseline == bucket.baseline == pytest.approx(0.8192)
    assert dram.ratio < 1 < bucket.ratio
    assert dram.note.startswith("load")
    assert bucket.note.startswith("compute")
    assert f"{4096 / bucket.value:,.0f} tokens/s" in bucket.note
    alone = next(estimates(found, KNOWN["llama-3.1-8b"], 4096, 0.0))
    assert (alone.baseline, alone.ratio) == (None, None)
    del found["bucket_get_8"], found["dram_get"]  # there was no time for them: one at a time has to do, and a lease has no speed
    [cautious] = estimates(found, KNOWN["llama-3.1-8b"], 4096, 0.0)
    assert cautious.name == "restore_bucket"
    assert cautious.value == pytest.approx(nbytes / (found["bucket_get_1"].value * 1e9) + 0.020)


def test_a_part_ends_with_its_time_and_measures_once_in_any_case():
    calls = []
    done = timed(lambda index: calls.append(index) or 100, 1000, 0.0)
    assert calls == [0]
    assert (done.rate > 0, len(done.took)) == (True, 1)
    calls.clear()
    assert len(timed(lambda index: calls.append(index) or 100, 5, 60.0).took) == 4  # the first was a warm-up
    assert calls == [0, 1, 2, 3, 4]
    line = timed(lambda _: 1000, 5, 60.0).line("x", "about", done)
    assert line.ratio == pytest.approx(line.value / line.baseline)


def test_made_up_kv_is_coded_as_real_kv_is():
    found = {line.name: line for line in coding.measure(KNOWN["smollm2-135m"], 0.0)}
    assert 1.3 < found["codec_ratio"].value < 1.5
    assert found["codec_encode"].value > 0 < found["codec_decode"].value


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--size", "900TiB"], "at least 8.0 MiB"),
        (["--size", "900GiB"], "a smaller --size"),
        (["--size", "1MiB"], "at least 8.0 MiB"),
        (["--path", "/proc/nowhere"], "a folder on the disk to be measured"),
        (["--model", "gpt"], "llama-3.1-8b"),
        (["--store", "ftp://x"], "scheme 'ftp' is unknown"),
        (["--tokens", "0"], "--tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_written(more, says, tmp_path):
    asked = ["bench", "--quick", *(() if "--path" in more else ("--path", str(tmp_path))), *more]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.replace("│", " ").split())
    assert list(tmp_path.iterdir()) == []


def test_memory_and_disk_that_are_not_there_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_limit", lambda: (100 * MIB, "the machine"))
    with pytest.raises(Invalid, match="the machine leaves"):
        memory.refuse_more_than_there_is(SMALL)
    disk.refuse_more_than_there_is(tmp_path, SMALL)
    monkeypatch.setattr(disk, "disk_usage", lambda _: type("Usage", (), {"free": MIB}))
    with pytest.raises(Invalid, match="free"):
        disk.refuse_more_than_there_is(tmp_path, SMALL)
    assert list(tmp_path.iterdir()) == []


def test_a_signal_ends_work_once_and_cleaning_up_is_not_disturbed():
    steps = []

    async def work():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(0.01)
            steps.append("cleaned")

    before = signal.getsignal(signal.SIGINT)
    with Stopping.watch() as stopping:
        with pytest.raises(KeyboardInterrupt):
            stopping.run(work())
        os.kill(os.getpid(), signal.SIGINT)  # the third
    assert steps == ["cleaned"]
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt), Stopping.watch():
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("ratio", "busy"), [(1.1, False), (1.4, True)])
def test_the_table_is_in_units_that_people_read(ratio, busy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    measured = {
        "memory": [Line(name="lookup_512", value=2480.0, unit="us", p50_ms=2.48), Line(name="dram_lease", value=17.3, unit="us")],
        "disk": [Line(name="nvme_get", value=0.0345, unit="GB/s", p50_ms=9.0, ratio=ratio)],
        "coding": [Line(name="coded", value=1.25, unit="GB/s")],
    }
    for part, found in measured.items():
        monkeypatch.setattr(f"kvstore.cli.bench.command.{part}.measure", lambda *_, found=found: iter(found))
    done = CliRunner().invoke(app, ["bench", "--quick"], catch_exceptions=False)
    shown = " ".join(done.stdout.split())
    assert "lookup_512 2.48 ms" in shown
    assert "dram_lease 17.3 us" in shown
    assert "nvme_get 34.5 MB/s, 9.0 ms" in shown
    assert "coded 1.25 GB/s" in shown
    assert ("a tier cannot beat its medium: this machine was busy, run it again" in done.stderr) is busy
