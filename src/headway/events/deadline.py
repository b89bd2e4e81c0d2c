"""A limit on the whole of a delivery, however slowly the other side answers.

A time limit on a socket bounds one read, and a receiver that sends a byte now and then never exceeds it. So a watchdog
ends the delivery (closes its connection, kills its process) when the whole of it has taken too long, or when the relay
is to stop.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Watchdog:
    """Ends the work under way when its time is up, or when `bite` is called from another thread."""

    def __init__(self) -> None:
        # Changed by single steps of the interpreter, so there is no lock that a forked child could inherit held.
        self._work: dict[int, Callable[[], None]] = {}

    @contextmanager
    def over(self, end: Callable[[], None], seconds: float) -> Iterator[Callable[[], bool]]:
        """Guard a block; what it gives says whether the time was up."""
        late = threading.Event()

        def bark() -> None:
            late.set()
            end()

        timer = threading.Timer(seconds, bark)
        timer.daemon = True
        self._work[id(timer)] = end
        timer.start()
        try:
            yield late.is_set
        finally:
            timer.cancel()
            del self._work[id(timer)]

    def bite(self) -> None:
        for end in list(self._work.values()):
            end()
