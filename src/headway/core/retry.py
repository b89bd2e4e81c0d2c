"""Retry policies, limits of postponements, waits that a shutdown interrupts, and a circuit breaker.

`RetryPolicy` has five instances for the packages of Headway. A wait ends at once with `Stopping` when its stop event is
set. `CircuitBreaker` lets reads fail fast while a server is known to be unreachable.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from headway.errors import InvalidInput, Stopping

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LaterLimit:
    """How often and for how long one item or task may be postponed by `headway.errors.RetryLater`.

    ``seconds`` counts from the first postponement. An item beyond either limit fails.
    """

    times: int = 100
    seconds: float = 86_400.0

    @classmethod
    def parse(cls, text: str) -> LaterLimit:
        """Parse ``100``, or ``100/24h`` with a duration in s, min, h or d; raise `InvalidInput`."""
        found = re.fullmatch(r"\s*(\d{1,9})\s*(?:/\s*(\d{1,9}(?:\.\d{1,3})?)\s*(s|min|m|h|d)\s*)?", text, re.ASCII)
        seconds = float(found[2]) * _UNITS[found[3]] if found and found[2] else cls().seconds
        if found is None or seconds > 365 * 86_400:
            raise InvalidInput(
                f"A limit of postponements must be a count, or a count and a duration of at most 365 days, "
                f"such as 100/24h (got {text!r:.60})."
            )
        return cls(int(found[1]), seconds)

    def exceeded(self, times: int, seconds: float) -> bool:
        """Return whether the ``times``-th postponement, ``seconds`` after the first, is one too many."""
        return times > self.times or seconds > self.seconds

    def __str__(self) -> str:
        for unit in ("h", "min"):
            if self.seconds and self.seconds % _UNITS[unit] == 0:
                return f"{self.times}/{self.seconds / _UNITS[unit]:g}{unit}"
        return f"{self.times}/{self.seconds:g}s"


#: Seconds of each unit of a duration.
_UNITS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential backoff: the n-th of ``retries`` retries waits ``base * factor**(n-1)`` seconds, at most ``cap``.

    ``jitter`` is the share of each wait that is random (0.5: the wait is between 50 % and 100 %). It prevents workers that
    failed together from retrying together.
    """

    retries: int
    base: float = 1.0
    factor: float = 2.0
    cap: float = 60.0
    jitter: float = 0.0

    def delay(self, failures: int, *, draw: Callable[[], float] = random.random) -> float:
        """Return the seconds to wait after the ``failures``-th failure (1, 2, ...)."""
        # The exponent is limited, because 2.0**2000 overflows.
        wait = min(self.cap, self.base * self.factor ** min(failures - 1, 64))
        return wait * (1.0 - self.jitter * draw())

    def exhausted(self, failures: int) -> bool:
        """Return whether no retry is left after the ``failures``-th failure."""
        return failures > self.retries

    def delays(self) -> Iterator[float]:
        """Yield the wait before each retry."""
        for failures in range(1, self.retries + 1):
            yield self.delay(failures)


#: A Redis operation (specification 000): three retries after 1, 2 and 4 s.
REDIS_OPERATION = RetryPolicy(retries=3, base=1.0, cap=4.0)
#: Reconnecting a listener (specification 001): five retries, at most 60 s apart.
LISTENER = RetryPolicy(retries=5, base=1.0, cap=60.0)
#: A task (specification 002): three retries.
TASK = RetryPolicy(retries=3, base=2.0, cap=300.0, jitter=0.2)
#: An item (specification 003): two retries.
ITEM = RetryPolicy(retries=2, base=1.0, cap=300.0, jitter=0.5)
#: Opening or locking a store that is busy or does not exist yet (specification 003).
STORE = RetryPolicy(retries=5, base=0.05, cap=2.0, jitter=0.5)


def call(
    work: Callable[[], T],
    policy: RetryPolicy,
    *,
    retry_on: type[BaseException] | tuple[type[BaseException], ...],
    stop: threading.Event | None = None,
    on_retry: Callable[[int, float, BaseException], None] | None = None,
) -> T:
    """Call ``work`` until it succeeds, and retry it on ``retry_on`` errors.

    Raises the last error when the policy is exhausted, and any other error at once. ``on_retry`` receives the number of
    failures, the wait in seconds and the error. Setting ``stop`` ends a wait with `Stopping`.
    """
    failures = 0
    while True:
        try:
            return work()
        except retry_on as error:
            failures += 1
            if policy.exhausted(failures):
                raise
            wait = policy.delay(failures)
            if on_retry is not None:
                on_retry(failures, wait, error)
            pause(wait, stop)


def pause(seconds: float, stop: threading.Event | None) -> None:
    """Wait, or raise `Stopping` as soon as ``stop`` is set."""
    if stop is None:
        time.sleep(seconds)
    elif stop.wait(seconds):
        raise Stopping("Interrupted while waiting to try again: the process is shutting down.")


class CircuitBreaker:
    """A circuit breaker: opens after ``threshold`` consecutive failures, then allows a probe every ``cooldown`` seconds.

    While it is open, `allow` returns False at once. Callers then fail fast and do not wait for the timeouts of an
    unreachable server.
    """

    def __init__(
        self, *, threshold: int = 1, cooldown: float = 1.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._threshold = threshold
        self._cooldown = cooldown
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._opened_at: float | None = None
        self._probe_at = 0.0

    @property
    def open_for(self) -> float | None:
        """Seconds since the breaker opened, or None while it is closed."""
        with self._lock:
            return None if self._opened_at is None else self._clock() - self._opened_at

    def allow(self) -> bool:
        """Return whether the caller may try now."""
        with self._lock:
            if self._opened_at is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + self._cooldown  # this caller is the probe, others still fail fast
            return True

    def succeeded(self) -> bool:
        """Close the breaker. Return True if it was open, so that the caller can rebuild its state."""
        with self._lock:
            was_open = self._opened_at is not None
            self._failures, self._opened_at = 0, None
            return was_open

    def failed(self) -> bool:
        """Count a failure. Return True if it opened the breaker, so that the caller alerts once per outage."""
        with self._lock:
            self._failures += 1
            now = self._clock()
            self._probe_at = now + self._cooldown
            if self._opened_at is None and self._failures >= self._threshold:
                self._opened_at = now
                return True
            return False
