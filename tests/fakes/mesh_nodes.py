"""Whole nodes of one mesh, each a process as a person starts it."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager

import numpy as np

import kvstore
from kvstore.codec import layout
from kvstore.ids import Namespace, Shard, chain
from kvstore.mesh.testing import end_with_parent

COMMAND = [sys.executable, "-c", "from kvstore.cli.main import main; main()"]
NAMESPACE = Namespace(model="m", revision="r", layers=2, kv_heads=2, head_dim=16, block_tokens=16)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class MeshNode:
    """One node. `kill` is a crash; `start` afterwards is another life on the same disk. Its command stands behind `within`."""

    def __init__(self, name, folder, *, directory="", static=(), store="", environ=None, nvme=True, sets=(), within=()):
        self.name, self.port, self.folder, self._within = name, free_port(), folder / name, within
        self.folder.mkdir()
        self._directory, self._static, self._store, self._environ = directory, static, store, environ or {}
        self._nvme, self._sets, self.process, self.url = nvme, sets, None, ""

    @property
    def address(self):
        return f"{self.name}=127.0.0.1:{self.port}"

    def start(self):
        """Begin and wait until it is ready."""
        self.begin()
        return self.wait()

    def begin(self):
        sets = {"node.id": self.name, "node.listen": "127.0.0.1:0", "dram.size": "48MiB", "peers.listen": f"127.0.0.1:{self.port}"}
        if self._nvme:
            sets |= {"nvme.path": str(self.folder / "nvme"), "nvme.size": "48MiB"}
        if self._store:
            sets["store.url"] = self._store
        if self._directory:
            sets["peers.directory"] = self._directory
        else:
            sets["peers.static"] = ",".join(node.address for node in self._static if node is not self)
        flags = [text for name, value in [*sets.items(), *self._sets] for text in ("--set", f"{name}={value}")]
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVTIER_", "AWS_"))}
        self.log = (self.folder / "log").open("ab")
        self.process = subprocess.Popen(
            [*self._within, *COMMAND, "serve", "--format", "json", *flags],
            stdout=subprocess.PIPE,
            stderr=self.log,
            env={**clean, **self._environ},
            preexec_fn=end_with_parent,  # noqa: PLW1509  it makes one system call
        )

    def wait(self):
        line = self.process.stdout.readline()
        assert line, (self.folder / "log").read_text()
        ready = json.loads(line)
        self.url = ready["http"] or ready["url"]
        return self

    def signal(self, number):
        self.process.send_signal(number)

    def kill(self):
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
            self.log.close()

    def pause(self):
        self.signal(signal.SIGSTOP)

    def resume(self):
        self.signal(signal.SIGCONT)

    @asynccontextmanager
    async def client(self):
        async with kvstore.open(self.url) as kv:
            yield kv


@contextmanager
def nodes(count, folder, **settings):
    """So many of them, running, each a member; killed at the end."""
    made = []
    for index in range(count):
        made.append(MeshNode("abcdefgh"[index], folder, static=made, **settings))
    try:
        for node in made:
            node.begin()
        for node in made:
            node.wait()
        yield made
    finally:
        for node in made:
            node.kill()


def prompt(seed, blocks=8):
    """Its blocks, in order."""
    return chain(NAMESPACE, np.random.default_rng(seed).integers(0, 1 << 16, 16 * blocks))


def payload(link):
    """What a block of that name holds, in every test: everything behind the header."""
    size = layout(NAMESPACE, Shard(), link.tokens).payload_bytes
    return np.random.default_rng(int(link.prefix_id[:8], 16)).integers(0, 256, size, dtype=np.uint8).tobytes()


async def store(kv, links):
    """Publish them; all of them are taken."""
    taken = await kv.put(NAMESPACE, Shard(), links, lambda index, into: into.__setitem__(slice(None), payload(links[index])))
    assert taken == [True] * len(links)


async def load(kv, links, **more):
    """How many of them a node gives, each byte for byte what was stored."""
    header = layout(NAMESPACE, Shard(), links[0].tokens).header_bytes
    with await kv.get(NAMESPACE, Shard(), links, **more) as blocks:
        for link, lease in zip(links, blocks.leases, strict=False):
            assert bytes(lease.view[header:]) == payload(link)
        return len(blocks.leases)
