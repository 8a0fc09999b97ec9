"""TLS of a face, with certificates that may be renewed while it serves."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Final

from kvstore.config import TlsSettings
from kvstore.errors import Invalid

log = logging.getLogger(__name__)
_LOOK_S: Final = 10.0


def server_context(tls: TlsSettings) -> ssl.SSLContext | None:
    """What a listener takes; None where no certificate is set. Raises `Invalid`, naming the setting."""
    if not tls.cert:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _load(context, tls)
    if tls.client_ca:
        try:
            context.load_verify_locations(cafile=Path(tls.client_ca).expanduser())
        except (OSError, ssl.SSLError) as error:
            raise Invalid(f"tls.client_ca {tls.client_ca}: {_why(error)}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


async def renew(context: ssl.SSLContext, tls: TlsSettings) -> None:
    """Take renewed certificates up for connections to come; those that cannot be read change nothing. Runs until cancelled."""
    seen = _signature(tls)
    while True:
        await asyncio.sleep(_LOOK_S)
        now = _signature(tls)
        if now == seen:
            continue
        seen = now
        try:
            server_context(tls)  # a pair that does not fit would be refused half-way, and leave the old certificate without its key
            _load(context, tls)
            log.info("%s was read again", tls.cert)
        except Invalid as error:
            log.warning("%s; the certificate read before stays", error.message)


def _load(context: ssl.SSLContext, tls: TlsSettings) -> None:
    try:
        context.load_cert_chain(Path(tls.cert).expanduser(), Path(tls.key).expanduser(), password=_no_password)
    except (OSError, ssl.SSLError) as error:
        raise Invalid(f"tls.cert {tls.cert} and tls.key {tls.key}: {_why(error)}") from None


def _no_password() -> str:
    """Instead of a question at the terminal."""
    raise Invalid("tls.key is encrypted: give a key without a password, readable by the node's user alone")


def _signature(tls: TlsSettings) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for name in (tls.cert, tls.key):
        try:
            status = Path(name).expanduser().stat()
            found.append((status.st_ino, status.st_mtime_ns))
        except OSError:
            found.append(None)
    return found


def _why(error: OSError) -> str:
    return error.reason if isinstance(error, ssl.SSLError) and error.reason else error.strerror or str(error)
