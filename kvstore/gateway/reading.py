"""What an engine answers, up to a length: nothing that comes from outside is held whole unasked."""

from __future__ import annotations

import aiohttp

_PIECE = 64 << 10


async def read(answer: aiohttp.ClientResponse, most: int) -> bytes | None:
    """The rest of a body; None where it is longer than `most` bytes. Raises what reading raises."""
    pieces, size = list[bytes](), 0
    while piece := await answer.content.read(_PIECE):
        size += len(piece)
        if size > most:
            return None
        pieces.append(piece)
    return b"".join(pieces)
