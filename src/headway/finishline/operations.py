"""Operations that are running in this process, so that a shutdown can wait for them."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

from headway.core.lifecycle import Budget


class Operations:
    """One lock per thread, held while the thread is in an operation.

    Acquiring and releasing a lock are single steps, which no exception of a signal handler can split. A counter of running
    operations could stay too high for ever.
    """

    def __init__(self) -> None:
        self._mine = threading.local()
        self._all: WeakSet[Any] = WeakSet()
        self._adding = threading.Lock()

    @property
    def lock(self) -> Any:
        """The lock of this thread. It is reentrant: an alert may ask for progress within an operation."""
        try:
            return self._mine.lock
        except AttributeError:
            lock = self._mine.lock = threading.RLock()
            with self._adding:
                self._all.add(lock)
            return lock

    def wait(self, seconds: float) -> int:
        """Wait until running operations have ended. Return how many still run."""
        budget = Budget(seconds)
        with self._adding:
            locks = list(self._all)
        late = 0
        for lock in locks:
            if lock.acquire(timeout=budget.left):
                lock.release()
            else:
                late += 1
        return late
