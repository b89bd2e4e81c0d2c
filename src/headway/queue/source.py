"""Where a worker's tasks come from: `headway.queue.database` without a Redis, `headway.queue.rqsource` with one."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from headway.queue.claims import Claimant
from headway.queue.settling import Success
from headway.queue.values import Claim, Priority, Task


class Source(Protocol):
    """Where tasks come from."""

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]: ...

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]] | None:
        """Record these and claim the next in one transaction: (the ids of those that are recorded, the next). None where that
        is not cheaper than one after the other; then nothing was done."""
        ...

    def wait(self, seconds: float, stop: threading.Event) -> None:
        """Until something may be there to claim, ``stop`` is set, or the time is over."""
        ...

    def show(self) -> None:
        """What was claimed last runs on: whoever looks at the source with tools of its own sees it. By any thread."""
        ...

    def settled(self, tasks: Sequence[Task]) -> None:
        """These tasks of the worker have ended, or wait again."""
        ...

    def close(self) -> None: ...
