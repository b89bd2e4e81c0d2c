"""Rate limit for wrong tokens, per client address."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from headway.web.api.problems import Throttled
from headway.web.auth.addresses import network_of

#: Wrong tokens allowed per minute and address.
GUESSES: Final = 10
#: Maximum addresses in memory; the oldest are evicted.
REMEMBERED: Final = 10_000


@dataclass(slots=True)
class _Guesses:
    wrong: deque[float] = field(default_factory=lambda: deque(maxlen=GUESSES))
    trying: int = 0
    waiting: deque[asyncio.Future[None]] = field(default_factory=deque)


class Throttle:
    """Counts the wrong tokens of each address in the last minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._guesses: dict[str, _Guesses] = {}

    def check(self, peer: str) -> None:
        """Raise `Throttled` if the address has used up its guesses."""
        found = self._guesses.get(network_of(peer))
        if found is not None:
            self._check(found)

    def failed(self, peer: str) -> None:
        """Count a wrong token."""
        self._of(peer).wrong.append(self._clock())

    @asynccontextmanager
    async def trying(self, peer: str) -> AsyncIterator[None]:
        """Hold a permit to look up one token; the caller calls `failed` inside if it is wrong.

        Lookups in progress count as wrong until they end, and a request beyond the limit waits for them. So concurrent
        requests cannot exceed the limit, and a valid token waits only for a moment.
        """
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
                _wake(found)  # pass the permit on if it was granted to this one
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
        name = network_of(peer)
        if name not in self._guesses and len(self._guesses) >= REMEMBERED:
            self._guesses.pop(next(iter(self._guesses)))
        return self._guesses.setdefault(name, _Guesses())


def _wake(found: _Guesses) -> None:
    """Wake as many waiting requests as there are permits, or all of them when the limit is reached: they are refused."""
    free = GUESSES - len(found.wrong) - found.trying
    some = free if len(found.wrong) < GUESSES else len(found.waiting)
    while found.waiting and some > 0:
        turn = found.waiting.popleft()
        if not turn.done():
            # The application may run on several event loops.
            turn.get_loop().call_soon_threadsafe(_let, turn)
            some -= 1


def _let(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
