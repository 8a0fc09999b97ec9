"""Who may use a node's HTTP API by its configuration, and whether tokens and certificates are fit for it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from cryptography import x509

from kvstore.cli.machine import Finding
from kvstore.clock import Clock
from kvstore.config import Settings, TlsSettings, is_loopback, parse_address
from kvstore.errors import Invalid
from kvstore.node import DEFAULT_TENANT
from kvstore.server.auth import check_exposed
from kvstore.server.keyring import Keyring
from kvstore.server.tls import server_context

_SOON: Final = timedelta(days=14)


def examine(settings: Settings, clock: Clock) -> Iterator[Finding]:
    """Everything that can be known of it without the node; nothing where it has no HTTP."""
    if not settings.node.listen:
        return
    host, port = parse_address(settings.node.listen)
    now = datetime.fromtimestamp(clock.now(), UTC)
    try:
        check_exposed(host, port, settings.auth, settings.tls, field="node.listen")
        yield from _tokens(settings, host, clock, now)
    except Invalid as error:
        yield Finding(name="access", status="fail", detail=error.message, remedy=error.remedy)
    if settings.tls.cert:
        yield _certificate(settings.tls, now)


def _tokens(settings: Settings, host: str, clock: Clock, now: datetime) -> Iterator[Finding]:
    if not settings.auth.tokens_file:
        whoever = "every user of this host" if is_loopback(host) else "whoever reaches it"
        yield Finding(name="access", status="ok", detail=f"no tokens: {whoever} may everything, for tenant {DEFAULT_TENANT!r}")
        return
    known = Keyring(settings.auth.tokens_file, clock).tokens.known
    valid = {token_id: token for token_id, token in known.items() if token.expires is None or token.expires > now}
    if not valid:
        remedy = "kvtier tokens create"
        yield Finding(
            name="access", status="warn", detail=f"no valid token ({len(known)} expired): nobody may anything", remedy=remedy
        )
        return
    served = settings.tenants.keys() or {DEFAULT_TENANT}
    if strangers := sorted({token.tenant for token in valid.values()} - served):
        detail, remedy = f"tokens for tenants that are not served: {', '.join(strangers)}", f"add [tenants.{strangers[0]}]"
        yield Finding(name="access", status="warn", detail=detail, remedy=remedy)
        return
    yield Finding(name="access", status="ok", detail=f"{len(valid)} valid tokens, {len(known) - len(valid)} expired")


def _certificate(tls: TlsSettings, now: datetime) -> Finding:
    try:
        server_context(tls)
    except Invalid as error:
        return Finding(name="tls", status="fail", detail=error.message, remedy=error.remedy)
    end = x509.load_pem_x509_certificate(Path(tls.cert).expanduser().read_bytes()).not_valid_after_utc
    detail = f"the certificate is valid until {end:%Y-%m-%d}"
    if end - now > _SOON:
        return Finding(name="tls", status="ok", detail=detail)
    remedy = f"renew {tls.cert}; a running node takes it up by itself"
    return Finding(name="tls", status="fail" if end <= now else "warn", detail=detail, remedy=remedy)
