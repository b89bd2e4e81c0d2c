"""Tasks straight from their rows: the mode without Redis, on SQLite and PostgreSQL.

On PostgreSQL a worker listens for a notification, which only says *look*; on SQLite it asks the file ten times a second
whether anything was written, which reads one page. Both look at least every few seconds all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from headway.errors import HeadwayError
from headway.queue.store import claim as claims
from headway.queue.store import complete as settling
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import Claim, Priority, Task
from headway.queue.task_queue import TaskQueue
from headway.telemetry import Log

log = Log("queue")

_POLL = 0.1


class DatabaseSource:
    """See the module."""

    def __init__(self, queue: TaskQueue) -> None:
        self._queue = queue
        self._listening: Any = None  # a driver connection, as `Database.own_connection` gives it
        self._seen: int | None = None

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        return claims.claim_next(self._queue.database, who, queues=queues, limit=limit)

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> tuple[set[str], list[Claim]] | None:
        return settling.complete_and_claim(self._queue.database, successes, who, queues=queues, limit=limit)

    def wait(self, seconds: float, stop: threading.Event) -> None:
        if self._queue.database.engine == "postgresql":
            self._listen(seconds, stop)
        else:
            self._watch_file(seconds, stop)

    def show(self) -> None:
        """The rows say it."""

    def settled(self, tasks: Sequence[Task]) -> None:
        """Nobody else needs to know."""

    def close(self) -> None:
        if self._listening is not None:
            with suppress(Exception):  # it is of no use any more, whatever state it is in
                self._listening.close()
            self._listening = None

    def _listen(self, seconds: float, stop: threading.Event) -> None:
        deadline = time.monotonic() + seconds
        database = self._queue.database
        try:
            if self._listening is None:
                self._listening = database.own_connection()
                with database.translated():
                    self._listening.execute("LISTEN headway_tasks")
                return  # what came before we listened is found by the next look
            while not stop.is_set() and (left := deadline - time.monotonic()) > 0:
                with database.translated():
                    if list(self._listening.notifies(timeout=min(left, 0.25), stop_after=1)):
                        return
        except HeadwayError as error:
            log.warning("the worker cannot listen; it looks again and again instead", error=str(error))
            self.close()
            stop.wait(max(0.0, deadline - time.monotonic()))

    def _watch_file(self, seconds: float, stop: threading.Event) -> None:
        """Until another connection wrote to the file. The pool may give any of ours, so only a difference counts."""
        deadline = time.monotonic() + seconds
        while not stop.is_set() and time.monotonic() < deadline:
            row = self._queue.database.one("PRAGMA data_version")
            if row is not None and row[0] != self._seen:
                self._seen = row[0]
                return
            stop.wait(min(_POLL, max(0.0, deadline - time.monotonic())))
