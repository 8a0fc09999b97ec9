"""A commit that is asked for again while it is under way is one commit: whoever asks again waits for the first try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Final, NamedTuple

from kvstore import api
from kvstore.errors import Invalid, Overloaded

MAX_TRIES: Final = 4096  # those whose caller has left are among them


class _Try(NamedTuple):
    request: api.Commit
    task: asyncio.Task[api.Receipt]


class Tries:
    """Commits under way, by write id. A caller who leaves does not stop one: half of it is worth less than all of it."""

    def __init__(self) -> None:
        self._under_way: dict[Hashable, _Try] = {}

    async def run(self, key: Hashable, request: api.Commit, work: Callable[[], Coroutine[Any, Any, api.Receipt]]) -> api.Receipt:
        """The outcome of `work`, or of the try under way.

        Args:
            key: The session and the write id.
            request: What is asked for.
            work: Begins it.

        Raises:
            Invalid: The write id stands for another commit.
            Overloaded: Too many commits are under way.
        """
        found = self._under_way.get(key)
        if found is None:
            if len(self._under_way) >= MAX_TRIES:
                raise Overloaded(f"{MAX_TRIES} commits are under way")
            found = self._under_way[key] = _Try(request, asyncio.create_task(work()))
            found.task.add_done_callback(lambda task: self._over(key, task))
        elif (found.request.base_version, found.request.blocks) != (request.base_version, request.blocks):
            raise Invalid(f"write_id {request.write_id!r} stands for another commit of this session, which is under way")
        return await asyncio.shield(found.task)

    @property
    def tasks(self) -> list[asyncio.Task[api.Receipt]]:
        """What is under way."""
        return [each.task for each in self._under_way.values()]

    def _over(self, key: Hashable, task: asyncio.Task[api.Receipt]) -> None:
        del self._under_way[key]
        if not task.cancelled():
            task.exception()  # looked at: whoever asked may have left
