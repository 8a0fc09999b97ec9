"""A world whose bucket is sealed: the judges read in it what a node with the key file would."""

from kvstore.clock import SeededIds
from kvstore.keys import Keys
from kvstore.repo.testing import inline, opened
from kvstore.sealing import MasterKey, MasterKeys, Sealing, unlocked
from kvstore.sealing.frames import Opening, content_bytes
from kvstore.sealing.tenants import TenantKeyring

MASTERS = MasterKeys([MasterKey("k", b"k" * 32)])


class Clear:
    """Every object of a bucket, opened.

    Attributes:
        keys: Of the root: the names in it are keyed.
        sealing: What nodes need.
    """

    def __init__(self, memory, clock, keys, tenants):
        self.keys, self.sealing = keys, Sealing(MASTERS, inline)
        self._rings = TenantKeyring(memory, keys, MASTERS, clock, SeededIds(0))
        self._tenants = tenants

    @classmethod
    async def made(cls, memory, clock, tenants):
        """The root, begun before anything fails."""
        async with opened(memory, clock, SeededIds(0), masters=MASTERS):
            pass
        _, keys = await unlocked(memory, Keys("r"), Sealing(MASTERS, inline), clock, SeededIds(0))
        return cls(memory, clock, keys, tenants)

    async def body(self, key, stored):
        """What is in an object."""
        if not self.keys.seals(key):
            return stored
        parts = key.split("/")
        tenant = self._tenants[parts[2]] if key.startswith(self.keys.blocks) else parts[2]
        ring = await self._rings.opening(tenant, anew=True)
        into = memoryview(bytearray(content_bytes(len(stored))))
        opening = Opening(memoryview(stored), ring.keys, self.keys.bound(key).encode(), into)
        return bytes(into[: opening.finish(len(stored))])
