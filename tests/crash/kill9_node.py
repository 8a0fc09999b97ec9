"""A real node in a process of its own that kills itself, by SIGKILL, at a named moment of its traffic with the store.

python kill9_node.py STORE_URL FOLDER MOMENT SKIP

A moment is `before`, `during` or `after`, and what is written: `block`, `manifest`, `head`, `name`, `epoch`, `namespace`; SKIP is
how many such writes pass first. `never-any` kills nothing.
"""

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

from kvstore import node
from kvstore.cli.output import print_json
from kvstore.cli.running import run_node
from kvstore.config import load
from kvstore.server import loop

KINDS = {"blocks": "block", "manifests": "manifest", "heads": "head", "names": "name", "epoch": "epoch", "namespaces": "namespace"}


class Killing:
    """A store whose writes are watched; everything else is the store's own."""

    def __init__(self, store, root, moment, skip):
        self._store, self._root, self._skip = store, root, skip
        self._when, self._what = moment.split("-")

    def __getattr__(self, name):
        return getattr(self._store, name)

    async def put(self, key, body, mode):
        struck = self._strikes(key)
        if struck and self._when == "before":
            die()
        if struck and self._when == "during":
            asyncio.get_running_loop().call_later(0.002, die)
        answer = await self._store.put(key, body, mode)
        if struck and self._when == "after":
            die()
        return answer

    def _strikes(self, key):
        kind = KINDS.get(key.removeprefix(self._root).split("/")[0])
        if kind != self._what:
            return False
        self._skip -= 1
        return self._skip == -1


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def main(url, folder, moment, skip):
    settings = load(
        flags={
            "store.url": url,
            "dram.size": "32MiB",
            "dram.window": "2MiB",
            "nvme.path": f"{folder}/nvme",
            "nvme.size": "64MiB",
            "node.socket": f"{folder}/node.sock",
            "node.listen": "",
            "lifecycle.history": "64",
        }
    ).settings
    real = node.open_store

    @asynccontextmanager
    async def open_store(where, *rest):
        async with real(where, *rest) as store:
            yield Killing(store, f"{where.path}/", moment, skip)

    node.open_store = open_store
    loop.run(run_node(settings, print_json))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
