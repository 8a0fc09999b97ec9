"""Pictures of whatever rows there are."""

import importlib
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import msgspec

PLOT = Path(__file__).parents[2] / "benchmarks" / "plot.py"
SVG = "{http://www.w3.org/2000/svg}"
OURS = {"name": "nvme_get", "mib": 2.0, "value": 1.2, "unit": "GB/s", "ratio": 0.5, "target": 0.9}
PEER = {"name": "nvme_get:other<1>", "mib": 2.0, "value": 0.6, "unit": "GB/s", "vs_baseline": 0.25}


def drawn(folder, *lines):
    (folder / "run.jsonl").write_bytes(b"\n".join(line if isinstance(line, bytes) else msgspec.json.encode(line) for line in lines))
    subprocess.run([sys.executable, PLOT, folder / "run.jsonl", "--out", folder / "out"], check=True, capture_output=True)
    return {file.name: ET.parse(file).getroot() for file in (folder / "out").iterdir()}


def bars(picture):
    return [(bar.get("class"), float(bar.get("width"))) for bar in picture.iter(f"{SVG}rect")]


def test_others_stand_under_the_row_and_size_they_answer(tmp_path):
    elsewhere = PEER | {"mib": 8.0}
    stale = OURS | {"ratio": 9.0}
    pictures = drawn(tmp_path, b"round 1 of 5", stale, PEER, elsewhere, OURS, {"name": "restore", "value": 1})
    assert list(pictures) == ["data-plane.svg"]
    (ours, long), (peer, short) = bars(pictures["data-plane.svg"])
    assert (ours, peer) == ("ours", "peer")
    assert abs(long - 2 * short) <= 0.1  # 0.5 and 0.25 of the medium
    words = [text.text for text in pictures["data-plane.svg"].iter(f"{SVG}text")]
    assert "other<1>" in words
    assert "0.50  (1.20 GB/s)" in words


def test_latencies_have_a_picture_of_their_own_and_nothing_has_none(tmp_path):
    pictures = drawn(tmp_path, {"name": "lookup", "mib": 2.0, "value": 500.0, "unit": "us", "p99_us": 700.0, "target": 1000})
    assert list(pictures) == ["latency.svg"]
    assert len(bars(pictures["latency.svg"])) == 1
    (tmp_path / "empty").mkdir()
    assert drawn(tmp_path / "empty") == {}


def test_a_scatter_has_a_point_for_each_pair(monkeypatch):
    monkeypatch.syspath_prepend(PLOT.parent)
    draw = importlib.import_module("_scatter").draw
    picture = ET.fromstring(draw("a<b", "u", {"x": [(1.0, 2.0), (30.0, 10.0)], "y&z": [(5.0, 5.0)]}, unit="ms"))
    circles = [each for each in picture.iter(f"{SVG}circle") if each.get("cx")]
    assert len(circles) == 3 + 2  # and one for each name
    assert {"a<b", "y&z"} <= {text.text for text in picture.iter(f"{SVG}text")}
    same = [each for each in circles if each.get("fill-opacity")][2]
    first, second = [each for each in circles if each.get("fill-opacity")][:2]
    assert float(first.get("cx")) < float(same.get("cx")) < float(second.get("cx"))
    assert float(first.get("cy")) > float(same.get("cy")) > float(second.get("cy"))
