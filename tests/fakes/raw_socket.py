"""A client of the Unix socket that sends what it likes."""

import array
import asyncio
import os
import socket

from fakes.node import SHARD, VERSION, namespace

from kvstore import wire
from kvstore.server.limits import Limits

NS = namespace()


LIMITS = Limits(window=4 << 20, drain=5)


def url(path, **query):
    return f"kvtier+unix://{path}" + ("?" + "&".join(f"{k}={v}" for k, v in query.items()) if query else "")


def leased(service, tenant="default"):
    return service.plane.tiers[tenant].leases


def framed(body):
    return len(body).to_bytes(4, "little") + body


def get_of(number, link):
    return wire.Get(number, NS.id, str(SHARD), bytes.fromhex(link.prefix_id), [link.tokens], 0, "dram")


class Raw:
    """A client that sends what it likes."""

    def __init__(self, path):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(path)
        self.fds = []

    def send(self, message):
        self.socket.sendall(message if isinstance(message, bytes) else wire.frame(message))

    def receive(self):
        """The next message, or None at the end."""
        head = self._exactly(4)
        return wire.parse_to_client(self._exactly(wire.body_length(head))) if head else None

    def _exactly(self, nbytes):
        data = b""
        while len(data) < nbytes:
            try:
                part, ancillary, _, _ = self.socket.recvmsg(nbytes - len(data), 64)
            except ConnectionResetError:
                return b""
            for _, _, content in ancillary:
                self.fds += array.array("i", content)
            if not part:
                return b""
            data += part
        return data

    def hello(self, *, version=VERSION, tenant="default", protocol=wire.PROTOCOL):
        self.send(wire.Hello(protocol, version, tenant))
        return self.receive()

    def close(self):
        self.socket.close()
        for fd in self.fds:
            os.close(fd)
        self.fds = []


async def answer(client, message=None):
    if message is not None:
        await asyncio.to_thread(client.send, message)
    return await asyncio.to_thread(client.receive)
