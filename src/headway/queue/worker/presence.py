"""A worker's row in the list of workers: its heartbeat, and the requests of operators that come back with it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from headway._lease import Owner
from headway.errors import HeadwayError
from headway.queue.store import workers
from headway.queue.store.workers import Sign
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import rss
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.outcomes import Outcomes
from headway.telemetry import Log

log = Log("queue")

#: Seconds between heartbeats of an idle worker. Each heartbeat also returns operator requests.
HEARTBEAT_SECONDS = 3.0


class Presence:
    """Reports one worker as alive."""

    def __init__(
        self,
        queue: TaskQueue,
        name: str,
        owner: Owner,
        outcomes: Outcomes,
        settings: Callable[[], Settings],
        kinds: Callable[[], Sequence[str]],
    ) -> None:
        self._kinds = kinds
        self._queue, self._name, self._owner, self._outcomes, self._settings = queue, name, owner, outcomes, settings
        self._sent: tuple[str, str | None] | None = None
        self._sent_at = 0.0
        self.request: str | None = None  # of an operator: "drain" or "stop"

    @property
    def is_due(self) -> bool:
        """Whether the next heartbeat is due."""
        return time.monotonic() - self._sent_at > HEARTBEAT_SECONDS

    def send(self, state: str, task: str | None = None) -> None:
        """Send a heartbeat if the state changed or one is due, so that an idle worker writes little."""
        if (state, task) == self._sent and not self.is_due:
            return
        self._sent, self._sent_at = (state, task), time.monotonic()
        sign = Sign(
            self._name, self._owner, self._settings().queues, state, task, self._outcomes.completed,
            self._outcomes.failed, rss(os.getpid()), self._kinds(),
        )  # fmt: skip
        try:
            request = self._queue.database.run(lambda tx: workers.heartbeat(tx, sign), operation="queue.alive")
            self.request = request or self.request
        except HeadwayError as error:
            log.warning("the heartbeat could not be sent", worker=self._name, error=str(error))

    def leave(self, *, lost: bool = False) -> None:
        """Record that the worker has ended; with ``lost`` because its supervisor died."""
        completed, failed = self._outcomes.completed, self._outcomes.failed
        self._queue.database.run(
            lambda tx: workers.leave(tx, self._name, completed=completed, failed=failed, lost=lost),
            operation="queue.leave",
        )
