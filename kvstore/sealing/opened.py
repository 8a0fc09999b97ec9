"""A root that is sealed: made once, unlocked by whoever has the key file."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Final, ParamSpec, Protocol, TypeVar

import msgspec

from kvstore.clock import Clock, Ids
from kvstore.config import EncryptionSettings
from kvstore.errors import Unavailable
from kvstore.keys import Keys
from kvstore.model import dump, parse
from kvstore.objects.base import CREATE, Absent, ObjectStore, Unchanged, Update
from kvstore.sealing.keyfile import MasterKeys
from kvstore.sealing.registers import Keyring
from kvstore.sealing.store import SealedStore
from kvstore.sealing.tenants import TenantKeyring
from kvstore.sealing.veil import SECRET, NameVeil

P = ParamSpec("P")
R = TypeVar("R")

_PLACE: Final = "keyring"
_MOST_BYTES: Final = 16 << 10


class Run(Protocol):
    """Runs a function on a thread and awaits its real end, also when the caller is cancelled."""

    def __call__(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]:
        """The function's result."""
        ...


class Sealing(msgspec.Struct, frozen=True):
    """What it takes to work on a sealed root.

    Attributes:
        masters: Of the key file.
        run: Seals and opens on threads.
        inflight: Most bytes of sealed objects in memory beside their content.
    """

    masters: MasterKeys
    run: Run
    inflight: int = 256 << 20


def sealing_of(encryption: EncryptionSettings, run: Run, inflight: int) -> Sealing | None:
    """What a configuration asks for. Raises `Invalid` where its key file cannot be used."""
    return Sealing(MasterKeys.read(encryption.key_file), run, inflight) if encryption.key_file else None


async def make_keyring(store: ObjectStore, keys: Keys, masters: MasterKeys, ids: Ids) -> None:
    """Make the root's name key, if there is none: of several that try, one wins."""
    body = dump(Keyring(write=ids.new(), names=masters.wrap(os.urandom(SECRET), _PLACE)), keys.keyring)
    await store.put(keys.keyring, body, CREATE)


async def unlocked(store: ObjectStore, keys: Keys, sealing: Sealing, clock: Clock, ids: Ids) -> tuple[SealedStore, Keys]:
    """The same root, with bodies in the clear and names as they have to be.

    Raises:
        Denied: `no_key`: the key file is another one.
        Unavailable: `store_not_initialised`: there is no keyring.
    """
    value, _ = await _keyring(store, keys)
    veiled = keys.veiled(NameVeil(sealing.masters.unwrap(value.names, _PLACE)))
    tenants = TenantKeyring(store, veiled, sealing.masters, clock, ids)
    return SealedStore(store, veiled, tenants, sealing.run, sealing.inflight), veiled


async def rewrap_keyring(store: ObjectStore, keys: Keys, masters: MasterKeys, ids: Ids) -> bool:
    """Wrap the name key under the current master key. False where it was.

    Raises:
        Denied: `no_key`.
        Unavailable: `outcome_unknown`: somebody else did something to it; try again.
    """
    value, etag = await _keyring(store, keys)
    if value.names.master == masters.current.id:
        return False
    again = Keyring(write=ids.new(), names=masters.wrap(masters.unwrap(value.names, _PLACE), _PLACE))
    await store.put(keys.keyring, dump(again, keys.keyring), Update(etag))
    if (await _keyring(store, keys))[0].names.master != masters.current.id:
        raise Unavailable(f"changing {keys.keyring} may or may not have landed", kind="outcome_unknown")
    return True


async def _keyring(store: ObjectStore, keys: Keys) -> tuple[Keyring, str]:
    got = await store.get(keys.keyring, into=memoryview(bytearray(_MOST_BYTES)))
    if isinstance(got, Absent | Unchanged):
        raise Unavailable(
            f"{keys.keyring} is missing: without it no name in this root can be found",
            kind="store_not_initialised",
            remedy="restore it from a backup of the bucket: sealed objects stay as they are meanwhile",
        )
    return parse(got.data, Keyring, keys.keyring), got.etag
