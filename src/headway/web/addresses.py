"""Addresses: whose a request is, and who guesses together."""

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
    """The setting ``web_proxies``: addresses, or networks as in 10.0.0.0/8."""
    try:
        return tuple(ipaddress.ip_network(text, strict=False) for text in texts)
    except ValueError as error:
        raise ConfigError(f"web_proxies: {error}.", hint="Name addresses or networks: 10.0.0.5, fd00::/8") from None


def peer_of(scope: Scope, proxies: Sequence[Network] = ()) -> str:
    """The address a request came from. What a proxy of ours says is taken for true, and from nobody else: going back from
    the socket, the first address that is none of our proxies. Left of it stands what the sender wrote."""
    client = scope.get("client")
    if not client:
        return "local"
    peer = str(client[0])
    if not proxies or not _is_of(_address(peer), proxies):
        return peer
    # Late: a run asks for addresses before it is known whether the web extra is there.
    from starlette.datastructures import Headers

    said = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")
    for text in reversed(said):
        address = _address(text.strip())
        if address is None:
            break  # nobody's: then it is the last proxy's that is known
        peer = str(address)
        if not _is_of(address, proxies):
            break
    return peer


def _is_of(address: Address | None, proxies: Sequence[Network]) -> bool:
    return address is not None and any(address in network for network in proxies)


def _address(text: str) -> Address | None:
    """Also with a port, as some proxies write it, or a zone."""
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
    """Whose guesses are counted together: of IPv6 the network, for everybody has 2**64 addresses of one."""
    address = _address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return peer if address is None else str(address)
