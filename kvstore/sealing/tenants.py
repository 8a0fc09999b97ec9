"""Data keys of tenants: made on first use, agreed on through a register, rotated, re-wrapped, destroyed (R12)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

import msgspec
from cachetools import LRUCache

from kvstore.clock import Clock, Ids
from kvstore.errors import Corrupt, Denied, Gone, Unavailable
from kvstore.keys import Keys
from kvstore.model import dump, parse
from kvstore.objects.base import CREATE, Absent, ObjectStore, Unchanged, Update
from kvstore.sealing.frames import KEY_ID, DataKey
from kvstore.sealing.keyfile import SECRET, MasterKeys
from kvstore.sealing.registers import StoredKey, TenantKeys

_FRESH_S: Final = 60.0
_CACHED: Final = 4096
_TRIES: Final = 16
_MOST_BYTES: Final = 256 << 10
_MOST_KEYS: Final = 256


class Ring(msgspec.Struct, frozen=True):
    """A tenant's keys as they were read.

    Attributes:
        current: What new objects are sealed under.
        keys: All, by id.
        value: The register.
        etag: Of that.
    """

    current: DataKey
    keys: Mapping[bytes, DataKey]
    value: TenantKeys
    etag: str


class TenantKeyring:
    """Every tenant's keys, by the tenant's key segment.

    What was read is good for a minute: so long a node may still use a key that was destroyed elsewhere.

    Args:
        store: The objects, below the sealing.
        keys: Of the root.
        masters: Wrap and unwrap.

    Attributes:
        masters: As given.
    """

    def __init__(self, store: ObjectStore, keys: Keys, masters: MasterKeys, clock: Clock, ids: Ids) -> None:
        self._store, self._keys, self.masters, self._clock, self._ids = store, keys, masters, clock, ids
        self._known: LRUCache[str, tuple[Ring, float]] = LRUCache(_CACHED)
        self._making: dict[str, asyncio.Lock] = {}

    async def opening(self, tenant: str, *, anew: bool = False) -> Ring | None:
        """Keys to open a tenant's objects with; None where it never had one. `anew`: as they are now.

        Raises:
            Gone: `key_destroyed`.
            Denied: `no_key`: they are wrapped under a master key that is not at hand.
        """
        known = self._known.get(tenant)
        if known is not None and not anew and self._clock.monotonic() - known[1] <= _FRESH_S:
            return known[0]
        try:
            return await self._read(tenant)
        except Unavailable:
            if known is None or anew:
                raise
            return known[0]  # the store is away: what the key opens is not worth more than that

    async def sealing(self, tenant: str) -> Ring:
        """Keys to seal with; made now where there are none. Raises as `opening`."""
        ring = await self.opening(tenant)
        if ring is not None:
            return ring
        async with self._making.setdefault(tenant, asyncio.Lock()):
            fresh = self._fresh_key(tenant)
            first = TenantKeys(write=self._ids.new(), keys=(fresh,))
            return self._remember(tenant, *await self._swap(tenant, lambda old: old or first))

    async def rotate(self, tenant: str) -> bool:
        """New objects get a new key; what is there stays readable. False where the tenant has none yet."""
        fresh = self._fresh_key(tenant)

        def turned(old: TenantKeys | None) -> TenantKeys | None:
            if old is None or old.destroyed or any(key.id == fresh.id for key in old.keys):  # the last: an earlier try landed late
                return old
            if len(old.keys) >= _MOST_KEYS:
                raise Denied(f"{self._keys.tenant_keys(tenant)} holds {_MOST_KEYS} keys, as many as it may")
            return TenantKeys(write=self._ids.new(), keys=(fresh, *old.keys))

        if await self.opening(tenant, anew=True) is None:
            return False
        self._remember(tenant, *await self._swap(tenant, turned))
        return True

    async def rewrap(self, tenant: str) -> bool:
        """Wrap what is wrapped under older master keys under the current one. False where nothing was."""
        done = False

        def again(old: TenantKeys | None) -> TenantKeys | None:
            nonlocal done
            if old is None or old.destroyed or all(key.wrapped.master == self.masters.current.id for key in old.keys):
                return old
            done = True
            keys = tuple(
                StoredKey(key.id, self.masters.wrap(self._secret(tenant, key), self._place(tenant, key.id))) for key in old.keys
            )
            return TenantKeys(write=self._ids.new(), keys=keys)

        found = await self._register(tenant)
        if found is not None and not found[0].destroyed:
            await self._swap(tenant, again)
        return done

    async def destroy(self, tenant: str) -> None:
        """Delete a tenant's keys, for good: nothing that was sealed under them is ever read again, and none is made anew (R12)."""
        gone = TenantKeys(write=self._ids.new(), destroyed=True)
        await self._swap(tenant, lambda old: old if old is not None and old.destroyed else gone)
        self._known.pop(tenant, None)

    async def all(self) -> list[tuple[str, TenantKeys]]:
        """Every tenant's register, by the tenant's segment, as it is now; nothing is unwrapped."""
        found, prefix = [], self._keys.all_tenant_keys()
        async for page in self._store.list(prefix):
            for tenant in [meta.key.removeprefix(prefix) for meta in page]:
                register = await self._register(tenant)
                if register is not None:
                    found.append((tenant, register[0]))
        return found

    # --- inside ---

    async def _swap(self, tenant: str, change: Callable[[TenantKeys | None], TenantKeys | None]) -> tuple[TenantKeys, str]:
        """Change the register until it is as `change` wants it; what is there then, read back."""
        key = self._keys.tenant_keys(tenant)
        for attempt in range(_TRIES):
            found = await self._register(tenant)
            old = found[0] if found is not None else None
            wanted = change(old)
            if found is not None and wanted is old:
                return found
            assert wanted is not None
            try:
                await self._store.put(key, dump(wanted, key), CREATE if found is None else Update(found[1]))
            except Unavailable as error:
                if error.kind == "circuit_open":
                    raise
            now = await self._register(tenant)  # whatever the answer was: what is there now decides
            if now is not None and now[0].write == wanted.write:
                return now
            await self._clock.sleep(min(1.0, 0.01 * 2**attempt) * self._ids.jitter())
        raise Unavailable(f"changing {key} may or may not have landed", kind="outcome_unknown")

    async def _read(self, tenant: str) -> Ring | None:
        found = await self._register(tenant)
        return None if found is None else self._remember(tenant, *found)

    async def _register(self, tenant: str) -> tuple[TenantKeys, str] | None:
        key = self._keys.tenant_keys(tenant)
        for again in (True, False):
            got = await self._store.get(key, into=memoryview(bytearray(_MOST_BYTES)))
            if isinstance(got, Absent | Unchanged):
                return None
            try:
                return parse(got.data, TenantKeys, key), got.etag
            except Corrupt:
                if not again:
                    raise
        raise AssertionError

    def _remember(self, tenant: str, value: TenantKeys, etag: str) -> Ring:
        known = self._known.get(tenant)
        if known is None or known[0].etag != etag:
            known = (self._unwrapped(tenant, value, etag), 0.0)
        self._known[tenant] = (known[0], self._clock.monotonic())
        return known[0]

    def _unwrapped(self, tenant: str, value: TenantKeys, etag: str) -> Ring:
        if value.destroyed or not value.keys:
            self._known.pop(tenant, None)
            raise Gone(f"the keys of tenant {tenant} were deleted: what they sealed cannot be read again", kind="key_destroyed")
        keys = [DataKey(bytes.fromhex(key.id), self._secret(tenant, key)) for key in value.keys]
        return Ring(keys[0], {key.id: key for key in keys}, value, etag)

    def _fresh_key(self, tenant: str) -> StoredKey:
        key_id = os.urandom(KEY_ID).hex()
        return StoredKey(key_id, self.masters.wrap(os.urandom(SECRET), self._place(tenant, key_id)))

    def _secret(self, tenant: str, key: StoredKey) -> bytes:
        return self.masters.unwrap(key.wrapped, self._place(tenant, key.id))

    def _place(self, tenant: str, key_id: str) -> str:
        return f"keys/{tenant}/{key_id}"
