"""Outcomes of a worker's runs, buffered and recorded in as few transactions as possible.

If the worker dies before recording an outcome, the sweeper counts the run as a lost attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from headway._sql import Tx
from headway.core.failure import Failure
from headway.core.retry import LaterLimit
from headway.errors import StaleClaim
from headway.queue.store import complete
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import Claim, Priority, Status, Task
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import Ended
from headway.queue.worker.source import CurrentSource
from headway.telemetry import Log, metrics

log = Log("queue")


class Outcomes:
    """A buffer of outcomes. Main thread: `add`. Main or heartbeat thread: `record`."""

    def __init__(
        self, queue: TaskQueue, source: CurrentSource, worker: str, *, later_limit: Callable[[], LaterLimit]
    ) -> None:
        self._queue, self._source, self._worker, self._later_limit = queue, source, worker, later_limit
        self._ended: list[tuple[Claim, Ended, float]] = []  # not recorded yet
        self._recording = threading.Lock()
        self.completed = self.failed = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def claims(self) -> list[Claim]:
        """The claims whose outcomes are not recorded yet."""
        return [claim for claim, _, _ in list(self._ended)]

    def add(self, claim: Claim, ended: Ended, seconds: float = 0.0) -> None:
        """Buffer an outcome. ``seconds``: duration of the run."""
        self._ended.append((claim, self._encoded(claim, ended), seconds))

    def _encoded(self, claim: Claim, ended: Ended) -> Ended:
        """Encode the result for storage. If the codec fails, only this task fails."""
        if ended.result is None:
            return ended
        try:
            return replace(ended, result=self._queue.backend.encode_result(claim.id, ended.result))
        except Exception as error:  # noqa: BLE001 - the application's own codec may raise anything
            why = f"the codec could not write the result: {type(error).__name__}"
            return Ended(failure=Failure("ResultRefused", why), retryable=False)

    def record(self) -> None:
        """Record the buffered outcomes in one transaction. Outcomes of tasks that the worker no longer owns are dropped."""
        with self._recording:  # the main thread and the heartbeat thread must not record the same batch
            batch = list(self._ended)
            if not batch:
                return
            successes = _successes(batch)
            if len(successes) == len(batch):
                tasks = complete.complete_alone(self._queue.database, successes)
            else:
                limit = self._later_limit()
                tasks = self._queue.database.run(lambda tx: _record_all(tx, batch, limit), operation="queue.settle")
            recorded = [tasks.get(claim.id) for claim, *_ in batch]
            self._note_recorded(batch, [None if task is None else task.status for task in recorded])
            self._source.now.settled(tasks.values())
            self._queue.backend.note_ended(tasks.values())

    @property
    def all_succeeded(self) -> bool:
        """Whether there are outcomes and all of them are successes."""
        return bool(self._ended) and all(ended.failure is None for _, ended, _ in self._ended)

    def record_and_claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim] | None:
        """Record the outcomes and claim the next tasks in one round trip. Requires `all_succeeded`.

        Returns None, without doing anything, if that is not cheaper. If the reply is lost, the next record and the next
        claim find what this call has recorded and claimed.
        """
        with self._recording:
            batch = list(self._ended)
            if not batch:
                return None
            found = self._source.now.settle_and_claim(_successes(batch), who, queues, limit)
            if found is None:
                return None
            recorded, claimed = found
            self._note_recorded(batch, [Status.COMPLETED if claim.id in recorded else None for claim, *_ in batch])
            self._queue.backend.delete_user_keys(claim.user_id for claim, *_ in batch if claim.id in recorded)
            return claimed

    def _note_recorded(self, batch: Sequence[tuple[Claim, Ended, float]], found: Sequence[Status | None]) -> None:
        """Remove recorded and dropped outcomes from the buffer and count them."""
        del self._ended[: len(batch)]
        for status, (claim, ended, seconds) in zip(found, batch, strict=True):
            if status is None:
                log.warning("a result came too late and is dropped", taskID=claim.id, worker=self._worker)
            else:
                self.completed += status is Status.COMPLETED
                was_postponed = ended.later is not None and status is Status.QUEUED
                self.failed += status not in (Status.COMPLETED, Status.CANCELLED) and not was_postponed
                metrics.observe("headway_task_seconds", seconds, kind=claim.kind, status=status.value)


def _record_all(tx: Tx, batch: Sequence[tuple[Claim, Ended, float]], limit: LaterLimit) -> dict[str, Task]:
    """Record successes and failures; return the tasks by id. Tasks that the worker no longer owns are left out."""
    tasks = complete.complete_all(tx, _successes(batch))
    for claim, ended, seconds in batch:
        if ended.failure is not None:
            try:
                tasks[claim.id] = record_failure(tx, claim, ended, seconds, limit)
            except StaleClaim:
                continue
    return tasks


def record_failure(tx: Tx, claim: Claim, ended: Ended, seconds: float, later_limit: LaterLimit) -> Task:
    """Record a run without a result: a postponed one, or a failed one. Raises `StaleClaim`."""
    assert ended.failure is not None
    if ended.later is not None:
        return complete.postpone(tx, claim, ended.later, limit=later_limit, seconds=seconds)
    return complete.fail(tx, claim, ended.failure, outcome=ended.outcome, retryable=ended.retryable, seconds=seconds)


def _successes(batch: Sequence[tuple[Claim, Ended, float]]) -> list[Success]:
    return [
        Success(claim, ended.result, seconds, ended.message) for claim, ended, seconds in batch if ended.failure is None
    ]
