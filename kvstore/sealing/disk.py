"""What a disk tier holds, sealed: each folder has a key, wrapped under the key file and kept in its index (`tiering.sealer`)."""

from __future__ import annotations

import os
from typing import Any, Final

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from kvstore.errors import Corrupt
from kvstore.sealing.keyfile import SECRET, MasterKeys, Wrapped
from tiering.sealer import SALT, Sealer

_PLACE: Final = "nvme"


class DiskSeals:
    """Makes the sealer of a folder. See :data:`tiering.sealer.Seals`.

    Args:
        masters: Wrap and unwrap the folder's key; one that is wrapped under an older master key is wrapped anew.
    """

    def __init__(self, masters: MasterKeys) -> None:
        self._masters = masters

    def __call__(self, kept: bytes | None) -> tuple[bytes, Sealer]:
        """Raises `Denied` (`no_key`), `Corrupt`."""
        if kept is None:
            secret = os.urandom(SECRET)
        else:
            try:
                wrapped = msgspec.json.decode(kept, type=Wrapped)
            except msgspec.MsgspecError:
                raise Corrupt("the disk tier's key is damaged", remedy="empty the folder nvme.path: it is a cache") from None
            secret = self._masters.unwrap(wrapped, _PLACE)
            if wrapped.master == self._masters.current.id:
                return kept, DiskSealer(secret)
        return msgspec.json.encode(self._masters.wrap(secret, _PLACE)), DiskSealer(secret)


class DiskSealer:
    """See :class:`tiering.sealer.Sealer`."""

    def __init__(self, secret: bytes) -> None:
        self._values = blake3(b"kvtier.disk.values.1", key=secret).digest()
        self._records = AESSIV(blake3(b"kvtier.disk.records.1", key=secret).digest(length=64))
        self._names = AESSIV(blake3(b"kvtier.disk.names.1", key=secret).digest(length=64))

    def salt(self) -> bytes:
        """See :class:`tiering.sealer.Sealer`."""
        return os.urandom(SALT)

    def sealing(self, salt: bytes, bound: bytes) -> _Stream:
        """See :class:`tiering.sealer.Sealer`."""
        return _Stream(self._cipher(salt).encryptor(), bound)

    def opening(self, salt: bytes, bound: bytes) -> _Stream:
        """See :class:`tiering.sealer.Sealer`."""
        return _Stream(self._cipher(salt).decryptor(), bound)

    def name(self, key: bytes) -> bytes:
        """See :class:`tiering.sealer.Sealer`."""
        return self._names.encrypt(key, None)

    def key(self, name: bytes) -> bytes | None:
        """See :class:`tiering.sealer.Sealer`."""
        return _opened(self._names, name, b"")

    def wrap(self, record: bytes, body: bytes) -> bytes:
        """See :class:`tiering.sealer.Sealer`."""
        return self._records.encrypt(body, [record])  # deterministic by design, so that it needs no nonce either

    def unwrap(self, record: bytes, body: bytes) -> bytes | None:
        """See :class:`tiering.sealer.Sealer`."""
        return _opened(self._records, body, record)

    def _cipher(self, salt: bytes) -> Cipher[modes.GCM]:
        key = blake3(salt, key=self._values).digest()
        return Cipher(
            algorithms.AES(key), modes.GCM(bytes(12))
        )  # the key is this slot's alone, so that there is no nonce to repeat


class _Stream:
    def __init__(self, context: Any, bound: bytes) -> None:
        context.authenticate_additional_data(bound)
        self._context = context
        self.update_into = context.update_into

    def tag(self) -> bytes:
        self._context.finalize()
        return bytes(self._context.tag)

    def holds(self, tag: bytes) -> bool:
        try:
            self._context.finalize_with_tag(tag)
        except InvalidTag:
            return False
        return True


def _opened(cipher: AESSIV, sealed: bytes, record: bytes) -> bytes | None:
    try:
        return cipher.decrypt(sealed, [record] if record else None)
    except (InvalidTag, ValueError):
        return None
