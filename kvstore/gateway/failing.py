"""What went wrong between the gateway and an engine, in a few words: for logs, and for clients who never saw a traceback."""

from __future__ import annotations

import os

import aiohttp
import msgspec

from kvstore.errors import KVTierError


def told(error: BaseException) -> str:
    """A failure of a request, in a few words."""
    match error:
        case KVTierError():
            return error.message
        case msgspec.MsgspecError():
            return str(error)
        case TimeoutError():  # aiohttp's own, too
            return "no answer in time"
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            return "TLS failed"
        case aiohttp.ClientConnectorDNSError():
            return "no such host"
        case aiohttp.ServerDisconnectedError():
            return "closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "closed the connection in the middle of an answer"
        case aiohttp.ClientResponseError():
            return "what it answers is not HTTP"
        case OSError(errno=int(number)) if number > 0:
            return os.strerror(number).lower()
        case aiohttp.ClientConnectorError():  # each of a host's addresses was refused in another way
            return "cannot be reached"
        case aiohttp.ClientError() | OSError():  # their own texts name the address, which is not for clients
            return type(error).__name__
    return f"{type(error).__name__}: {error}"


def has_died(error: BaseException) -> bool:
    """Whether an engine went away with a request that it had: it may be of that request that it died."""
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return False
    return isinstance(error, aiohttp.ServerDisconnectedError | aiohttp.ClientOSError | aiohttp.ClientPayloadError)
