"""The same tests on plain stores and on sealed ones."""

import pytest

from kvstore.objects import Got
from kvstore.repo.testing import bodies
from kvstore.sealing import DiskSeals, MasterKey, MasterKeys

MASTERS = MasterKeys([MasterKey("one", b"1" * 32)])
either = pytest.mark.parametrize("masters", [None, MASTERS], ids=["plain", "sealed"])
"""Runs a test on a plain root, then on a sealed one: `masters`, and the fixtures that are made with them."""

either_disk = pytest.mark.parametrize("seals", [None, DiskSeals(MASTERS)], ids=["plain", "sealed"])
"""As `either`, for the folder of a disk tier."""


async def contents(repo, memory):
    """What a node that has the keys sees of every object: what is stored, where nothing is sealed."""
    found = {key: await repo.root.store.get(key) for key in bodies(memory)}
    return {key: bytes(got.data) for key, got in found.items() if isinstance(got, Got)}
