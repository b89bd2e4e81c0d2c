"""What a worker's runs came to: kept until it is written down, in as few transactions as possible.

What is not written down when the worker dies is charged by the sweeper, as if it had not ended.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

from headway._sql import Tx
from headway.errors import StaleClaim
from headway.failure import Failure
from headway.queue import settling
from headway.queue.claims import Claimant
from headway.queue.execution import Ended
from headway.queue.settling import Success
from headway.queue.source import Source
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Claim, Priority, Status, Task
from headway.telemetry import Log, metrics

log = Log("queue")


class Outcomes:
    """See the module. One thread adds; that one or the one beside handlers records."""

    def __init__(self, queue: TaskQueue, worker: str) -> None:
        self._queue, self._worker = queue, worker
        self._ended: list[tuple[Claim, Ended, float]] = []  # run and not recorded
        self._recording = threading.Lock()
        self.completed = self.failed = 0

    def __len__(self) -> int:
        return len(self._ended)

    @property
    def claims(self) -> list[Claim]:
        """Of what is not written down yet."""
        return [claim for claim, _, _ in list(self._ended)]

    def add(self, claim: Claim, ended: Ended, seconds: float = 0.0) -> None:
        self._ended.append((claim, self._sealed(claim, ended), seconds))

    def _sealed(self, claim: Claim, ended: Ended) -> Ended:
        """With the result as it is stored. A codec that cannot write it costs this task alone."""
        if ended.result is None:
            return ended
        try:
            return replace(ended, result=self._queue.sealed_result(claim.id, ended.result))
        except Exception as error:  # noqa: BLE001 - the application's own codec may raise anything
            why = f"the codec could not write the result: {type(error).__name__}"
            return Ended(failure=Failure("ResultRefused", why), retryable=False)

    def record(self, source: Source) -> None:
        """Write down what ended, in one transaction; what is somebody else's by now is dropped."""
        with self._recording:  # by the main thread or beside a handler: never both
            batch = list(self._ended)
            if not batch:
                return

            returned = _successes(batch)

            def settle(tx: Tx) -> list[Task | None]:
                completed = settling.complete_all(tx, returned) if returned else {}
                return [
                    completed.get(claim.id)
                    if ended.failure is None
                    else _fail(tx, claim, ended, ended.failure, seconds)
                    for claim, ended, seconds in batch
                ]

            settled: list[Task | None]
            if len(returned) == len(batch):
                completed = settling.complete_alone(self._queue.database, returned)
                settled = [completed.get(claim.id) for claim, *_ in batch]
            else:
                settled = self._queue.database.run(settle, operation="queue.settle")
            self._note_recorded(batch, [None if task is None else task.status for task in settled])
            ended_tasks = [task for task in settled if task is not None]
            source.settled(ended_tasks)
            self._queue.settled(ended_tasks)

    @property
    def all_returned(self) -> bool:
        """Whether something ended, and nothing of it failed."""
        return bool(self._ended) and all(ended.failure is None for _, ended, _ in self._ended)

    def record_and_claim(
        self, source: Source, who: Claimant, queues: Sequence[Priority], limit: int
    ) -> list[Claim] | None:
        """Where `all_returned`: record it and claim the next in one round trip. None where that is not cheaper; then nothing
        was done. Should the answer be lost, the record that is tried next finds what was recorded, and the next claim what was
        claimed."""
        with self._recording:
            batch = list(self._ended)
            if not batch:
                return None
            found = source.settle_and_claim(_successes(batch), who, queues, limit)
            if found is None:
                return None
            recorded, claimed = found
            self._note_recorded(batch, [Status.COMPLETED if claim.id in recorded else None for claim, *_ in batch])
            self._queue.leave_places(claim.user_id for claim, *_ in batch if claim.id in recorded)
            return claimed

    def _note_recorded(self, batch: Sequence[tuple[Claim, Ended, float]], found: Sequence[Status | None]) -> None:
        """These are written down, or somebody else's by now."""
        del self._ended[: len(batch)]
        for status, (claim, _, seconds) in zip(found, batch, strict=True):
            if status is None:
                log.warning("a result came too late and is dropped", taskID=claim.id, worker=self._worker)
            else:
                self.completed += status is Status.COMPLETED
                self.failed += status not in (Status.COMPLETED, Status.CANCELLED)
                metrics.observe("headway_task_seconds", seconds, kind=claim.kind, status=status.value)


def _fail(tx: Tx, claim: Claim, ended: Ended, failure: Failure, seconds: float) -> Task | None:
    try:
        return settling.fail(tx, claim, failure, outcome=ended.outcome, retryable=ended.retryable, seconds=seconds)
    except StaleClaim:
        return None


def _successes(batch: Sequence[tuple[Claim, Ended, float]]) -> list[Success]:
    return [
        Success(claim, ended.result, seconds, ended.message) for claim, ended, seconds in batch if ended.failure is None
    ]
