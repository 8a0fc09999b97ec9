"""Master keys: a file that an operator keeps, and that never leaves the node."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvstore.errors import Denied, Invalid
from kvstore.toml_text import parse_toml

log = logging.getLogger(__name__)
SECRET: Final = 32
_SALT: Final = 32
_DOMAIN: Final = b"kvtier.wrap.1"
_ID: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MOST_BYTES: Final = 1 << 20


class MasterKey(msgspec.Struct, frozen=True):
    """One master key. `id` is in the clear wherever something is wrapped under it."""

    id: str
    secret: bytes

    def __repr__(self) -> str:
        return f"MasterKey({self.id})"


class Wrapped(msgspec.Struct, frozen=True):
    """Secret bytes as they are stored.

    Attributes:
        master: Id of the master key.
        sealed: 32 random bytes, then the secret under AES-256-GCM.
    """

    master: str
    sealed: bytes


class MasterKeys:
    """What is in a key file, which is read again where that matters: before something is wrapped, and where a key is missing.

    A node that went on with the keys of its start would wrap new tenants' keys under a master key that is about to be thrown away.

    Args:
        keys: The first one wraps; all of them unwrap.
        source: The file's name, for messages.
        renewed: Whether it is read again.

    Attributes:
        current: Wraps.
        by_id: All of them, the current one first as long as nothing was renewed.
    """

    def __init__(self, keys: Sequence[MasterKey], source: str = "", *, renewed: bool = False) -> None:
        if not keys:
            raise Invalid(f"key file {source} holds no key", remedy="make one with `kvtier keys new`")
        if len({key.id for key in keys}) < len(keys):
            raise Invalid(f"key file {source} names a key id twice")
        self.current, self.by_id, self.source = keys[0], {key.id: key for key in keys}, source
        self._renewed, self._wrong = renewed, ""

    @classmethod
    def read(cls, path: str) -> MasterKeys:
        """Read a key file: TOML, `[[keys]]` with `id` and `secret` (32 bytes as base64), the current one first.

        Raises:
            Invalid: It cannot be read, is no such file, or others than its owner may read it.
        """
        try:
            with Path(path).open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise Invalid(f"[encryption] key_file {path} cannot be read: {error.strerror}") from None
        if stat.S_IMODE(mode) & 0o077:
            raise Invalid(f"[encryption] key_file {path} may be read by others than its owner", remedy=f"chmod 600 {path}")
        if len(text) > _MOST_BYTES:
            raise Invalid(f"[encryption] key_file {path} is larger than {_MOST_BYTES} bytes: it is no key file")
        return cls.parse(text, path, renewed=True)

    @classmethod
    def parse(cls, text: bytes, path: str, *, renewed: bool = False) -> MasterKeys:
        """What a key file holds. Raises `Invalid`, and repeats nothing of it."""
        try:
            found = msgspec.convert(parse_toml(text.decode(), path), _File).keys
        except (Invalid, UnicodeDecodeError, msgspec.ValidationError):  # whose words may hold what stands there
            raise Invalid(f"[encryption] key_file {path} is no TOML with [[keys]], each with `id` and `secret`") from None
        return cls([_master(entry, path) for entry in found], path, renewed=renewed)

    @property
    def ids(self) -> list[str]:
        """All of them, the current one first."""
        return list(self.by_id)

    def wrap(self, secret: bytes, place: str) -> Wrapped:
        """Wrap under the current key. `place` is bound: what was wrapped for one place is worth nothing at another.

        Raises:
            Denied: `no_key`: the file holds other keys than this process began with. What it wrapped might never be opened again.
        """
        found = self._renew()
        if found is not None and self.current.id not in found.by_id:
            raise Denied(
                f"{place} is not wrapped under master key {self.current.id!r}, which {self.source} does not hold any more",
                kind="no_key",
                remedy="restart the node, so that it begins with the key file as it is now",
            )
        salt = os.urandom(_SALT)
        return Wrapped(self.current.id, salt + _cipher(self.current, salt).encrypt(bytes(12), secret, place.encode()))

    def unwrap(self, wrapped: Wrapped, place: str) -> bytes:
        """The inverse of `wrap`.

        Raises:
            Denied: `no_key`: this file has not that key, or another one under its id.
        """
        if wrapped.master not in self.by_id:
            self._renew()
        key = self.by_id.get(wrapped.master)
        if key is None:
            raise Denied(
                f"{place} is wrapped under master key {wrapped.master!r}, which is not in {self.source or 'the key file'}",
                kind="no_key",
            )
        salt = wrapped.sealed[:_SALT]
        try:
            return _cipher(key, salt).decrypt(bytes(12), wrapped.sealed[_SALT:], place.encode())
        except (InvalidTag, ValueError):
            raise Denied(
                f"{place} does not open with master key {wrapped.master!r} of {self.source or 'the key file'}: it is another key",
                kind="no_key",
            ) from None

    def _renew(self) -> MasterKeys | None:
        """What the file holds now, taken up. None where it is no good, or names another key by a known id: that changes nothing."""
        if not self._renewed:
            return None
        try:
            found = MasterKeys.read(self.source)
            if any(self.by_id.get(key.id, key) != key for key in found.by_id.values()):
                raise Invalid(f"[encryption] key_file {self.source} has another key by a known id")  # noqa: TRY301  told below, as a bad file is
        except Invalid as error:
            if error.message != self._wrong:  # said once, not for every read
                log.warning("%s; the master keys read before stay", error.message)
            self._wrong = error.message
            return None
        self.by_id, self._wrong = {**self.by_id, **found.by_id}, ""
        if self.current.id in found.by_id:
            self.current = found.current
        return found


def spelled(key: MasterKey) -> str:
    """A key as it stands in a key file."""
    return f'[[keys]]\nid = "{key.id}"\nsecret = "{base64.b64encode(key.secret).decode()}"\n'


def made(key_id: str) -> MasterKey:
    """A fresh key. Raises `Invalid` for an id that is none."""
    return MasterKey(_checked(key_id), os.urandom(SECRET))


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    secret: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: list[_Entry]


def _master(entry: _Entry, path: str) -> MasterKey:
    try:
        secret = base64.b64decode(entry.secret, validate=True)
    except (binascii.Error, ValueError):
        secret = b""
    if len(secret) != SECRET:
        raise Invalid(f"[encryption] key_file {path}: the secret of key {entry.id!r} is not 32 bytes in base64")
    return MasterKey(_checked(entry.id), secret)


def _checked(key_id: str) -> str:
    if not _ID.fullmatch(key_id):
        raise Invalid("a master key's id must be 1 to 64 letters, digits, '.', '_' or '-'")
    return key_id


def _cipher(key: MasterKey, salt: bytes) -> AESGCM:
    """Of one wrapping: a key of its own, so that there is no nonce to repeat."""
    return AESGCM(blake3(_DOMAIN + salt, key=key.secret).digest())
