"""A repository on the memory store under a clock that is moved by hand. Files that need another variant define their own."""

import pytest

from kvstore.clock import SeededIds, VirtualClock
from kvstore.objects import Faults, MemoryStore
from kvstore.repo.testing import Shelf, opened


@pytest.fixture
def clock():
    return VirtualClock()


@pytest.fixture
def memory(clock):
    return MemoryStore(clock)


@pytest.fixture
def store(memory, clock):
    """The same objects through faults and a log of requests."""
    return Faults(memory, clock=clock)


@pytest.fixture
def masters():
    """Master keys of a sealed root; None: it is plain. `fakes.sealed.either` gives both."""


@pytest.fixture
async def repo(store, clock, masters):
    async with opened(store, clock, masters=masters) as repo:
        yield repo


@pytest.fixture
async def other(memory, clock, masters):
    """Another node on the same bucket."""
    async with opened(memory, clock, SeededIds(2), masters=masters) as other:
        yield other


@pytest.fixture
def shelf():
    """What a node's local tiers hold."""
    return Shelf()
