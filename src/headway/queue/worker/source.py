"""The interface to a worker's source of tasks: `rq_source` with Redis, `database_source` without it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import Claim, Priority, Task


class Source(Protocol):
    """A worker's source of tasks."""

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]: ...

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

    def settled(self, tasks: Sequence[Task]) -> None:
        """Handle tasks of the worker that ended or were returned to their queue."""
        ...

    def close(self) -> None: ...
