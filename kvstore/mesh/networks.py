"""Whose addresses are trusted: those of networks that are configured by name, and without any this host's alone."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from kvstore.errors import Invalid


def trusting(networks: Sequence[str]) -> Callable[[str], bool]:
    """Whether an address, as a socket tells it, is of these networks.

    Raises:
        Invalid: One of them is none.
    """
    try:
        known = [ipaddress.ip_network(each) for each in networks]
    except ValueError as error:
        raise Invalid(f"peers.networks: {error}", remedy="write it like 10.0.0.0/8") from None

    def trusted(host: str) -> bool:
        address = ipaddress.ip_address(host.partition("%")[0])
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in each for each in known) if known else address.is_loopback

    return trusted
