"""A peer that misbehaves: it answers by a script, and a proxy before a real one that changes, slows or cuts what it says."""

import asyncio
from contextlib import asynccontextmanager, suppress

from kvstore.mesh.members import Member


@asynccontextmanager
async def scripted(answer, name="bad"):
    """A listener; `answer(reader, writer)` is called for every connection. Gives the member it pretends to be."""
    tasks = set()

    async def serve(reader, writer):
        tasks.add(asyncio.current_task())
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Member(name, 1, *server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request_of(reader):
    """One request's body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return await reader.readexactly(length)


def through(member, change, name=None):
    """A scripted peer that passes everything on to a real one; `change(total, data)` gives what arrives instead of `data`.

    It may be a coroutine function; None ends the connection.
    """

    async def answer(reader, writer):
        there, back = await asyncio.open_connection(member.host, member.port)

        async def ask():
            while data := await reader.read(1 << 16):
                back.write(data)
                await back.drain()
            back.close()

        asking = asyncio.create_task(ask())
        total = 0
        try:
            while data := await there.read(1 << 16):
                changed = change(total, data)
                changed = await changed if asyncio.iscoroutine(changed) else changed
                if changed is None:
                    return
                total += len(data)
                writer.write(changed)
                await writer.drain()
        finally:
            asking.cancel()
            back.close()

    return scripted(answer, name or member.node)
