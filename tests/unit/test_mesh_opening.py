"""A mesh says at its start what keeps it from working."""

import asyncio
import logging
from contextlib import suppress

import pytest

from kvstore.clock import RandomIds, SystemClock
from kvstore.config import PeersSettings
from kvstore.mesh.opening import Mesh


def opened(node, **settings):
    chosen = PeersSettings(listen="127.0.0.1:7979", **settings)
    return Mesh.open(chosen, node, bucket=False, clock=SystemClock(), ids=RandomIds(), environ={})


@pytest.mark.parametrize(("node", "warned"), [("a", False), ("c", True)])
async def test_a_static_list_that_does_not_name_this_node(node, warned, caplog):
    async with opened(node, static=("a=127.0.0.1:7970", "b=127.0.0.1:7971")):
        said = "".join(record.getMessage() for record in caplog.records)
    assert ("peers.static does not name this node, c" in said) is warned


async def test_a_directory_that_is_not_there_is_said_once(caplog):
    pytest.importorskip("valkey")
    caplog.set_level(logging.WARNING)
    async with opened("a", directory="valkey://127.0.0.1:1") as mesh:
        with suppress(TimeoutError):
            await asyncio.wait_for(mesh.background["directory"](), 3)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("the directory does not answer: ")
