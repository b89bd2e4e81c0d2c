"""How many wrong tokens are tried for one address, and whose address that is."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from starlette.datastructures import Headers

from headway.errors import ConfigError
from headway.web.problems import Throttled

if TYPE_CHECKING:
    from starlette.types import Scope

#: Wrong tokens a minute from one address, before it has to wait.
GUESSES: Final = 10
#: Addresses whose guesses are remembered; with more of them the oldest go.
REMEMBERED: Final = 10_000

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(slots=True)
class _Guesses:
    wrong: deque[float] = field(default_factory=lambda: deque(maxlen=GUESSES))
    trying: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Throttle:
    """Counts wrong tokens by the address they came from, in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guesses: dict[str, _Guesses] = {}

    def check(self, peer: str) -> None:
        found = self._guesses.get(_network_of(peer))
        if found is not None:
            self._check(found)

    def failed(self, peer: str) -> None:
        self._of(peer).wrong.append(self._clock())

    @asynccontextmanager
    async def trying(self, peer: str) -> AsyncIterator[None]:
        """Look one token up; call `failed` inside if it is wrong. While it is not known what the others are that are being
        looked up, they count as wrong: whoever might be one too many waits for them. So no more are tried however many
        come at once, and who is right waits for a moment only."""
        found = self._of(peer)
        while True:
            self._check(found)
            if found.trying + len(found.wrong) < GUESSES:
                break
            turn = asyncio.get_running_loop().create_future()
            found.waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                _wake(found)  # it may have been this one's turn
                raise
        found.trying += 1
        try:
            yield
        finally:
            found.trying -= 1
            _wake(found)

    def _check(self, found: _Guesses) -> None:
        now = self._clock()
        while found.wrong and found.wrong[0] < now - 60:
            found.wrong.popleft()
        if len(found.wrong) >= GUESSES:
            raise Throttled("Too many wrong tokens came from your address.", hint="Try again in a minute.")

    def _of(self, peer: str) -> _Guesses:
        name = _network_of(peer)
        if name not in self._guesses and len(self._guesses) >= REMEMBERED:
            self._guesses.pop(next(iter(self._guesses)))
        return self._guesses.setdefault(name, _Guesses())


def _wake(found: _Guesses) -> None:
    """As many as have a place now; all of them once there is none for anybody, so that they are told."""
    free = GUESSES - len(found.wrong) - found.trying
    some = free if len(found.wrong) < GUESSES else len(found.waiting)
    while found.waiting and some > 0:
        turn = found.waiting.popleft()
        if not turn.done():
            # An application may be served by several loops.
            turn.get_loop().call_soon_threadsafe(_let, turn)
            some -= 1


def _let(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)


# ---------------------------------------------------------------------------------------------------------------------
# Addresses


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


def _network_of(peer: str) -> str:
    """Whose guesses are counted together: of IPv6 the network, for everybody has 2**64 addresses of one."""
    address = _address(peer)
    if isinstance(address, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))
    return peer if address is None else str(address)
