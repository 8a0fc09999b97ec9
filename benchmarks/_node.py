"""A node whose tiers can be emptied, in a process of its own: what is measured is read from where it is meant to come from.

It reads commands from stdin, one a line, and answers each with how many values it dropped: `dram` empties the memory, `disk` memory
and disk. What is leased, or not yet written, is waited for first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Self

from kvstore.config import load
from kvstore.node import DEFAULT_TENANT, Node
from kvstore.server import loop
from kvstore.server.local import LocalServer


class EmptiedNode:
    """The process, from outside.

    Attributes:
        url: Of its socket.
        pid: Its own.
    """

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url, self.pid = url, process.pid
        self._process = process

    @classmethod
    @contextmanager
    def start(cls, socket: str, flags: Mapping[str, str], env: Mapping[str, str] | None = None) -> Iterator[Self]:
        """Run one until the end of the block, with these settings (`section.field` to text)."""
        told = [f"{name}={value}" for name, value in flags.items()]
        command = [sys.executable, __file__, socket, *told]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env={**os.environ, **(env or {})}) as process:
            node = cls(f"kvtier+unix://{socket}", process)
            node._answer()
            yield node  # leaving the block closes its stdin, at which it ends

    def drop(self, what: str) -> int:
        """Empty `dram`, or `disk` and memory; how many values went."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the node ended"
        return line


async def run(socket: str, flags: Mapping[str, str]) -> None:
    """Serve, and obey."""
    settings = load(flags={"node.listen": "", "node.socket": socket, **flags}).settings
    async with Node.open(settings) as node, LocalServer.open(node.service, socket):
        stack = node.service.plane.tiers(DEFAULT_TENANT).stack
        print(0, flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            while any(stack.queued.values()) or stack.dram.leases:  # noqa: ASYNC110  tiers tell nobody when they are idle
                await asyncio.sleep(0.005)
            keys = list(stack.dram._values)  # noqa: SLF001  a tier has no business listing them to anybody else
            gone = stack.dram.discard_many(keys)
            if line.strip() == "disk" and stack.disk is not None:
                gone += stack.disk.discard_many(keys)
            print(gone, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("socket")
    parser.add_argument("flags", nargs="*", metavar="section.field=value")
    asked = parser.parse_args()
    loop.run(run(asked.socket, dict(text.split("=", 1) for text in asked.flags)))
