"""When to try again, how long to wait, and when to stop asking.

One type, `RetryPolicy`, with the five instances the parts use. Waiting is always on a stop event, so
a shutdown ends it at once (`Stopping`). `CircuitBreaker` lets reads fail immediately while a server is
known to be away.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from headway.errors import Stopping

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """``retries`` tries after the first; before the n-th of them wait ``base * factor**(n-1)``, at most ``cap``.

    ``jitter`` spreads each wait uniformly over that share of it (0.5: between 50 % and 100 %), so that many
    workers that failed together do not come back together.
    """

    retries: int
    base: float = 1.0
    factor: float = 2.0
    cap: float = 60.0
    jitter: float = 0.0

    def delay(self, failures: int, *, draw: Callable[[], float] = random.random) -> float:
        """Seconds to wait after the ``failures``-th failure (1, 2, ...)."""
        # The exponent is bounded: 2.0**2000 would overflow long after the cap decided anyway.
        wait = min(self.cap, self.base * self.factor ** min(failures - 1, 64))
        return wait * (1.0 - self.jitter * draw())

    def exhausted(self, failures: int) -> bool:
        """Whether the ``failures``-th failure was the last try."""
        return failures > self.retries

    def delays(self) -> Iterator[float]:
        for failures in range(1, self.retries + 1):
            yield self.delay(failures)


#: 000: three retries of a Redis operation, 1 s, 2 s, 4 s.
REDIS_OPERATION = RetryPolicy(retries=3, base=1.0, cap=4.0)
#: 001: five attempts to bring a listener back, from 1 s, at most 60 s apart.
LISTENER = RetryPolicy(retries=5, base=1.0, cap=60.0)
#: 002: three retries of a task.
TASK = RetryPolicy(retries=3, base=2.0, cap=300.0, jitter=0.2)
#: 003: two retries of an item, so three runs.
ITEM = RetryPolicy(retries=2, base=1.0, cap=300.0, jitter=0.5)
#: 003: opening or locking a store that is busy or not there yet.
STORE = RetryPolicy(retries=5, base=0.05, cap=2.0, jitter=0.5)


def call(
    work: Callable[[], T],
    policy: RetryPolicy,
    *,
    retry_on: type[BaseException] | tuple[type[BaseException], ...],
    stop: threading.Event | None = None,
    on_retry: Callable[[int, float, BaseException], None] | None = None,
) -> T:
    """Call ``work`` until it returns, its error is not ``retry_on``, or the policy is exhausted.

    The last error is raised as it is: a caller never takes a failure for a success.
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
    """Open after ``threshold`` failures in a row; then one probe every ``cooldown`` seconds.

    While it is open `allow` answers False at once, so that a caller fails fast and does not queue up
    behind the time-outs of a server that is away.
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
        """Seconds since it opened, or None while it is closed."""
        with self._lock:
            return None if self._opened_at is None else self._clock() - self._opened_at

    def allow(self) -> bool:
        with self._lock:
            if self._opened_at is None:
                return True
            now = self._clock()
            if now < self._probe_at:
                return False
            self._probe_at = now + self._cooldown  # this caller is the probe; the others still fail fast
            return True

    def succeeded(self) -> bool:
        """Close it; True if it was open (the moment to rebuild)."""
        with self._lock:
            was_open = self._opened_at is not None
            self._failures, self._opened_at = 0, None
            return was_open

    def failed(self) -> bool:
        """Count a failure; True if this one opened it (the moment to alert, once per outage)."""
        with self._lock:
            self._failures += 1
            now = self._clock()
            self._probe_at = now + self._cooldown
            if self._opened_at is None and self._failures >= self._threshold:
                self._opened_at = now
                return True
            return False
