"""A time limit for a whole delivery, however slowly the receiver answers.

A socket timeout limits one read, and a receiver that sends one byte now and then never exceeds it. A watchdog aborts the
whole delivery (closes its connection, kills its process) at its deadline, or when the relay stops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """Aborts deliveries at their deadline, or when another thread calls `abort`."""

    def __init__(self) -> None:
        # Changed by atomic operations only: a forked child could inherit a lock in the locked state.
        self._running: dict[int, Callable[[], None]] = {}

    @contextmanager
    def over(self, end: Callable[[], None], seconds: float) -> Iterator[Callable[[], bool]]:
        """Abort the block with ``end`` after ``seconds``. Yields a function that tells whether that happened."""
        late = threading.Event()

        def expire() -> None:
            late.set()
            end()

        timer = threading.Timer(seconds, expire)
        timer.daemon = True
        self._running[id(timer)] = end
        timer.start()
        try:
            yield late.is_set
        finally:
            timer.cancel()
            del self._running[id(timer)]

    def abort(self) -> None:
        """Abort every running delivery."""
        for end in list(self._running.values()):
            end()
