"""A worker's source of tasks: `headway.queue.rq.source` with Redis, `DatabaseSource` without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headway.queue.store import Wakeups, complete, task_store
from headway.queue.store import claim as claims
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import Claim, Priority, Task
from headway.queue.task_queue import TaskQueue


class Source(Protocol):
    """A worker's source of tasks."""

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        """Claim up to ``limit`` tasks that the worker does not hold yet."""
        ...

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]] | None:
        """Record successes and claim the next tasks in one transaction; return (recorded ids, claims).

        Returns None, without doing anything, if two separate steps are not slower.
        """
        ...

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Wait until tasks may be claimable, ``stop`` is set, or ``seconds`` have passed."""
        ...

    def show(self) -> None:
        """Show the last claimed task as still running in the source's own tools. Any thread may call this."""
        ...

    def settled(self, tasks: Iterable[Task]) -> None:
        """Handle tasks of the worker that ended or were returned to their queue."""
        ...

    def close(self) -> None:
        """Close the connections of the source."""
        ...


class DatabaseSource:
    """A source without Redis: it claims rows, and waits for submissions with the store's `Wakeups`."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self._wakeups: Wakeups | None = None

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        return claims.claim_next(self._queue.database, who, queues=queues, limit=limit)

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]] | None:
        return complete.complete_and_claim(self._queue.database, successes, who, queues=queues, limit=limit)

    def wait(self, seconds: float, stop: threading.Event) -> None:
        if self._wakeups is None:
            self._wakeups = task_store(self._queue.database).wakeups(self._queue.database)
        self._wakeups.wait(seconds, stop)

    def show(self) -> None:
        """Nothing: the rows show what runs."""

    def settled(self, tasks: Iterable[Task]) -> None:
        """Nothing: the rows show what ended."""

    def close(self) -> None:
        if self._wakeups is not None:
            self._wakeups.close()
            self._wakeups = None


class CurrentSource:
    """The source for the queue's current Redis; `refresh` creates it again after the URL changed."""

    def __init__(self, queue: TaskQueue, source: Source, make: Callable[[], Source] | None) -> None:
        """Without ``make``, the source never changes."""
        self._queue, self._make, self._url = queue, make, queue.backend.redis_url
        self.now = source

    def refresh(self) -> None:
        """Reconnect if the queue's Redis URL changed."""
        self._queue.backend.refresh()
        url = self._queue.backend.redis_url
        if self._make is not None and url != self._url:
            self._url = url
            self.now.close()  # the sweeper finds tasks whose hint was popped but not claimed
            self.now = self._make()
