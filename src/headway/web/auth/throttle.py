"""How many wrong tokens are tried for one address."""

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

#: Wrong tokens a minute from one address, before it has to wait.
GUESSES: Final = 10
#: Addresses whose guesses are remembered; with more of them the oldest go.
REMEMBERED: Final = 10_000


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
        found = self._guesses.get(network_of(peer))
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
        name = network_of(peer)
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
