"""The client: one typed core, async and sync, over whatever carries its calls. It never imports what serves it."""

from kvstore.client.aio import Client
from kvstore.client.choice import Choice, Loading, Step, Stored, steps
from kvstore.client.opening import connect, open, open_sync  # noqa: A004  `kvstore.open` is the name
from kvstore.client.sync import SyncClient
from kvstore.client.transport import Fill, Transport

__all__ = [
    "Choice",
    "Client",
    "Fill",
    "Loading",
    "Step",
    "Stored",
    "SyncClient",
    "Transport",
    "connect",
    "open",
    "open_sync",
    "steps",
]
