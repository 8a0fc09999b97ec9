"""Addresses in settings."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from kvstore.errors import Invalid


def static_peers(texts: Sequence[str]) -> dict[str, tuple[str, int]]:
    """`name=host:port` as name to address. Raises `Invalid`."""
    found: dict[str, tuple[str, int]] = {}
    for text in texts:
        name, equals, address = text.partition("=")
        if not name or not equals or name in found:
            raise Invalid(f"peers.static has {text!r}; write each node once, like b=10.0.0.2:7979")
        found[name] = parse_address(address, f"peers.static {name}")
        if not found[name][1] or not address.isascii():
            raise Invalid(f"peers.static {name} is {address!r}, where nobody can listen; write it like 10.0.0.2:7979")
    if len(set(found.values())) < len(found):
        raise Invalid("peers.static has one address under two names", remedy="give each node an address of its own")
    return found


def parse_address(text: str, field: str = "node.listen") -> tuple[str, int]:
    """`host:port` or `[v6]:port`. Raises `Invalid`."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and len(port) <= 5) or int(port) > 65535:
        raise Invalid(f"{field} is {text!r}; write it like 127.0.0.1:7878")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
