"""What a client shows to a node over TCP: an access token, and how the line is kept from others."""

from __future__ import annotations

import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.config import StorageUrl
from kvstore.errors import Denied, Invalid

ENV: Final = "KVTIER_TOKEN"
ENV_FILE: Final = "KVTIER_TOKEN_FILE"
_MOST: Final = 4096
_TOKEN: Final = re.compile(r"[\x21-\x7e]{1,512}")  # what a header can carry; the node knows what is one


class Credential:
    """An access token, or none. A file is read again when it changes, so that tokens are renewed without a restart.

    Its text is in no representation and in no error.

    Args:
        text: The token; "" for none.
        file: Where it is read from instead; "" for nowhere.

    Raises:
        Denied: The file cannot be read, or what is there can be no token.
    """

    def __init__(self, text: str = "", file: str = "") -> None:
        self._text, self._path = text, Path(file).expanduser() if file else None
        self._seen: tuple[int, int] | None = None
        if self._path is None:
            self._text = _checked(text, ENV) if text else ""
        else:
            self._read()

    @classmethod
    def find(cls, url: StorageUrl, environ: Mapping[str, str]) -> Credential:
        """The URL's `token_file`, else `KVTIER_TOKEN`, else the file that `KVTIER_TOKEN_FILE` names, else none."""
        if url.token_file:
            return cls(file=url.token_file)
        return cls(text=environ.get(ENV, ""), file="" if environ.get(ENV) else environ.get(ENV_FILE, ""))

    def __bool__(self) -> bool:
        return bool(self._text)

    def headers(self) -> dict[str, str]:
        """What goes with a request."""
        if self._path is not None and self._changed():
            self._read()
        return {"Authorization": f"Bearer {self._text}"} if self._text else {}

    def _changed(self) -> bool:
        try:
            return self._signature() != self._seen
        except OSError:  # it is being replaced, or gone: what was read before may still be good, and the node says if not
            return False

    def _signature(self) -> tuple[int, int]:
        assert self._path is not None
        found = self._path.stat()
        return found.st_ino, found.st_mtime_ns

    def _read(self) -> None:
        assert self._path is not None
        try:
            self._seen = self._signature()
            with self._path.open("rb") as file:
                data = file.read(_MOST)
        except OSError as error:
            raise Denied(f"the token file {self._path}: {error.strerror}", kind="unauthenticated") from None
        self._text = _checked(data.decode(errors="replace").strip(), str(self._path))


def _checked(text: str, where: str) -> str:
    if not _TOKEN.fullmatch(text.strip()):
        raise Denied(f"{where} holds no access token: one line of printable ASCII, like kvt_...", kind="unauthenticated")
    return text.strip()


def client_context(url: StorageUrl) -> ssl.SSLContext | None:
    """How to connect by TLS; None without. Raises `Invalid` for a file that is not what the URL says."""
    if not url.tls:
        return None
    try:
        context = ssl.create_default_context(cafile=url.ca_bundle or None)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"ca_bundle {url.ca_bundle!r} cannot be used: {error}") from None
    if url.client_cert:
        try:
            context.load_cert_chain(url.client_cert, url.client_key, password="")
        except (OSError, ssl.SSLError) as error:
            raise Invalid(f"client_cert {url.client_cert!r} and client_key {url.client_key!r} cannot be used: {error}") from None
    return context
