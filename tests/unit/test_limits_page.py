"""docs/operations.md tells the bounds that the code has."""

from pathlib import Path

from kvstore.api import MAX_BLOCKS
from kvstore.server.limits import MAX_DEADLINE_MS, STANDARD
from kvstore.service.plane import _MOST_LOOKED_UP
from kvstore.service.wants import MAX_SHARDS

PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text().split("## What one request may ask for")[1].split("## ")[0]


def test_the_page_of_limits_has_the_numbers_of_the_code():
    rows = {cells[1].strip(): cells[2] for line in PAGE.splitlines() if len(cells := line.split("|")) == 4}
    assert rows["JSON body of a request"].startswith(f" {STANDARD.body >> 20} MiB, arrived within {STANDARD.upload} s")
    assert f"{MAX_DEADLINE_MS:,};" in rows["`deadline_ms` of a read of blocks"]
    assert f"{MAX_SHARDS:,}," in rows["`shards` of one request"]
    assert f"{_MOST_LOOKED_UP:,}" in rows["ids times shards of one look-up"]
    assert f"{MAX_BLOCKS:,}" in rows["blocks of one session"]
    assert f"{STANDARD.requests:,};" in rows["HTTP requests under way"]
    assert f"{2 * STANDARD.requests:,};" in rows["HTTP connections"]
    assert f"closed after {STANDARD.hello} s" in rows["an HTTP connection that asks for nothing"]
    assert f"({STANDARD.connections})" in rows["engine connections on the Unix socket"]
