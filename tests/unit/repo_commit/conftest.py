"""Another node on the same root, and what a node's tiers hold; nothing of it stays leased."""

import pytest

from kvstore.clock import SeededIds
from kvstore.repo.testing import Shelf, opened


@pytest.fixture
async def other(store, clock, masters):
    async with opened(store, clock, SeededIds(2), masters=masters) as other:
        yield other


@pytest.fixture
def shelf():
    shelf = Shelf()
    yield shelf
    assert shelf.leases == 0
