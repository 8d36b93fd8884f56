"""Maps a client address to its network. Limits count all addresses of a network as one client."""

import ipaddress
from typing import Final

PEER: Final = "edgekit.peer"
"""The key in a request's scope for the address of the peer, which may be a proxy."""
_PREFIX_BITS: Final = 64


def find_network(address: str) -> str:
    """Return the /64 network of an IPv6 address. An IPv4 address or any other text is returned unchanged.

    A host with IPv6 can use any address of a /64 network, so limits for single addresses would have no
    effect.

    Source: RFC 4291, section 2.5.4; RFC 7421.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(parsed), _PREFIX_BITS), strict=False))
