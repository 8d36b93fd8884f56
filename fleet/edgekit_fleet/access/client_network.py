"""The network of a client's address: limits count all addresses of one network as one client."""

import ipaddress
from typing import Final

PEER: Final = "edgekit.peer"
"""Key of a request's scope: the address that has connected, a proxy's perhaps."""
_PREFIX_BITS: Final = 64


def find_network(address: str) -> str:
    """Return the IPv4 address, or the /64 network of an IPv6 address; any other text as it is.

    A single host of IPv6 has a whole /64 to choose its addresses from, so a limit for each address would have
    no effect.

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
