"""Two collections in a process of its own that kills itself, by SIGKILL, at a named moment of them.

python kill9_collect.py ENDPOINT BUCKET ROOT MOMENT SKIP

A moment is `before`, `during` or `after`, and a request: `put-epoch`, `put-head` (a seal, an expiry, or the end of an empty head),
`delete-manifest`, `delete-block`, `put-hint`; SKIP is how many such requests pass first. `never-any-thing` kills nothing.
"""

import asyncio
import os
import sys

from kill9_node import die

from kvstore.clock import RandomIds, SystemClock
from kvstore.keys import Keys
from kvstore.lifecycle.collector import collect
from kvstore.objects import S3Settings, S3Store
from kvstore.objects.credentials import Credentials
from kvstore.repo import Repo
from kvstore.repo.testing import inline

KINDS = {"epoch": "epoch", "heads": "head", "manifests": "manifest", "blocks": "block", "hints": "hint"}


class Killing:
    """A store whose changes are watched; everything else is the store's own."""

    def __init__(self, store, root, moment, skip):
        self._store, self._root, self._skip = store, root, skip
        self._when, self._verb, self._what = moment.split("-")

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def put(self, key, body, mode):
        return await self._watched("put", key, self._store.put(key, body, mode))

    async def delete(self, keys):
        return await self._watched("delete", keys[0], self._store.delete(keys))

    async def _watched(self, verb, key, request):
        struck = (verb, KINDS.get(key.removeprefix(self._root).split("/")[0])) == (self._verb, self._what)
        self._skip -= struck
        struck = struck and self._skip == -1
        if struck and self._when == "before":
            die()
        if struck and self._when == "during":
            asyncio.get_running_loop().call_later(0.001, die)
        answer = await request
        if struck and self._when == "after":
            die()
        return answer


async def main(endpoint, bucket, root, moment, skip):
    keys = Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    settings = S3Settings(bucket=bucket, endpoint=endpoint)
    async with S3Store.open(settings, credentials=lambda: keys) as store:
        killing = Killing(store, f"{root}/", moment, skip)
        async with Repo.open(killing, Keys(root), SystemClock(), RandomIds(), inline) as repo:
            for _ in range(2):
                await collect(repo, now=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], int(sys.argv[5])))
