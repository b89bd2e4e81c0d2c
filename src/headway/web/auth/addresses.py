"""Client addresses: which client sent a request, and which clients are throttled together."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import Scope

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def networks(texts: Sequence[str]) -> tuple[Network, ...]:
    """Parse the setting ``web_proxies``: addresses, or networks such as 10.0.0.0/8."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise ConfigError(f"web_proxies: {error}.", hint="Name addresses or networks: 10.0.0.5, fd00::/8") from None


def peer_of(scope: Scope, proxies: Sequence[Network] = ()) -> str:
    """Return the address of the client that sent a request.

    X-Forwarded-For counts only if the connection comes from one of ``proxies``. It is read from the right up to the
    first address that is not a proxy. Everything left of that address was written by the client.
    """
    client = scope.get("client")
    if not client:
        return "local"
    peer = str(client[0])
    if not proxies or not _is_of(_address(peer), proxies):
        return peer
    # Imported here because a run imports this module before it checks for the web extra.
    from starlette.datastructures import Headers

    said = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    for text in reversed(said):
        address = _address(text.strip())
        if address is None:
            break  # not an address: use the last proxy that is known
        peer = str(address)
        if not _is_of(address, proxies):
            break
    return peer


def _is_of(address: Address | None, proxies: Sequence[Network]) -> bool:
    return address is not None and any(address in network for network in proxies)


def _address(text: str) -> Address | None:
    """Parse an address. Some proxies append a port or a zone."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def network_of(peer: str) -> str:
    """Return the key by which wrong tokens are counted.

    For IPv6 this is the /64 network, because a single client has 2**64 addresses.
    """
    address = _address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return peer if address is None else str(address)
