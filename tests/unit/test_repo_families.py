"""The changes of one family that wait together."""

import asyncio
import gc

import pytest

from kvstore.errors import Unavailable
from kvstore.repo.testing import until


class Endless:
    """A change that never decides. See `kvstore.repo.families.Change`."""

    write_id, begun = "", 0

    def __init__(self, number):
        self.branches = frozenset({str(number)})

    async def decide(self, head):
        Endless.begun += 1
        await asyncio.Event().wait()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
async def test_a_group_that_is_cancelled_leaves_no_work_that_was_begun_by_nobody(repo):
    """More wait than decide at once. What has not had its turn yet is a callable, not a coroutine that nobody awaits."""
    family, _ = await repo.heads.create("default")
    key = repo.root.keys.head("default", family)
    waiting = [asyncio.create_task(repo.families.run(key, Endless(n))) for n in range(40)]
    await until(lambda: Endless.begun == 32)
    repo.families._busy[key].task.cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {Unavailable}
    gc.collect()
    assert Endless.begun == 32
