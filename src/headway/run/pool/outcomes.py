"""Outcomes on their way from the workers to the ledger."""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import getrandbits
from typing import Any

from headway.ledger import Done, Failed, Failure, Item, Later, Outcome
from headway.ledger.values import FailedOutcome
from headway.run.output.results import Keep
from headway.run.pool.backlog import Backlog
from headway.run.pool.counts import RunCounts
from headway.run.pool.gate import BatchSizer, StartGate
from headway.run.pool.runner import NOTE_SECONDS, HeldJob, Settings
from headway.run.program import TIMED_OUT

#: Outcomes are committed at once when this many have accumulated.
COMMIT_MOST = 4000


class Outcomes:
    """Collects what runners report about items, and commits it in groups."""

    def __init__(
        self,
        held: HeldJob,
        settings: Settings,
        keep: Keep,
        backlog: Backlog,
        gate: StartGate,
        counts: RunCounts,
        batches: BatchSizer,
    ) -> None:
        self._held, self._policy, self._keeps_results = held, settings.policy, keep.results
        self._later_limit = settings.later_limit
        self._backlog, self._gate, self._counts, self._batches = backlog, gate, counts, batches
        self._inbox: list[Outcome] = []
        #: Items recorded as running. If this process is killed, each of them is charged an attempt.
        self.noted: set[int] = set()

    def __len__(self) -> int:
        return len(self._inbox)

    def add_report(self, out: dict[int, Item], frame: Any, name: str, printed: dict[int, str]) -> None:
        """Add the outcomes that worker ``name`` reports (`headway.run.worker.protocol`).

        Items not in ``out`` are ignored: they no longer belong to this worker.
        """
        seconds = 0.0
        for idx, took, result in frame["done"]:
            if out.pop(idx, None) is not None:
                unkept = result is False or not self._keeps_results
                self._counts.unkept += result is False
                self._inbox.append(Done(idx, None, result or None, took, name, None, unkept, printed.pop(idx, None)))
                seconds += took
        for idx, attempts, took, kind, message, where, detail, retryable, text in frame["failed"]:
            if out.pop(idx, None) is not None:
                how: FailedOutcome = "timeout" if kind == TIMED_OUT else "failed"
                failure = Failure(kind, message, where, detail)
                self._fail(
                    Failed(idx, failure, how, None, took, name, seen=attempts, retryable=retryable, printed=text)
                )
                seconds += took
        for idx, took, delay, reason, whole_job in frame["later"]:
            if out.pop(idx, None) is not None:
                if whole_job:
                    self._gate.wait(delay, reason)
                self._inbox.append(
                    Later(idx, delay, reason, getrandbits(62), whole_job, took, name, limit=self._later_limit)
                )
                seconds += took
        if count := len(frame["done"]) + len(frame["failed"]) + len(frame["later"]):
            self._batches.observe(seconds, count)

    def fail(
        self, item: Item, failure: Failure, name: str, seconds: float | None, *, outcome: FailedOutcome = "failed"
    ) -> None:
        """Charge an item whose worker ``name`` cannot report, because it died or was killed."""
        self._fail(Failed(item.idx, failure, outcome, None, seconds, name, seen=item.attempts))

    def _fail(self, outcome: Failed) -> None:
        self._counts.add_failure(outcome.failure.type)
        self._inbox.append(outcome)

    @property
    def are_urgent(self) -> bool:
        """Whether the outcomes must be committed at once.

        - There are many, or no other item is held here.
        - No further failure is allowed until these are recorded.
        - An outcome belongs to an item noted as running, which would be charged if this process were killed.
        """
        return (
            len(self._inbox) >= COMMIT_MOST
            or len(self._inbox) >= len(self._backlog.held)
            or self._gate.failures_left() == 0
            or (bool(self.noted) and any(outcome.idx in self.noted for outcome in self._inbox))
        )

    def commit(self) -> None:
        """Record all outcomes in one transaction."""
        if not self._inbox:
            return
        outcomes, self._inbox, self._counts.unrecorded_failures = self._inbox, [], 0
        job = self._held.job
        recorded = job.record(outcomes, hold=self._held.hold, policy=self._policy, settle=False)
        indices = [outcome.idx for outcome in outcomes]
        self._backlog.held.difference_update(indices)
        self.noted.difference_update(indices)
        self._counts.add(recorded)
        if recorded.due:
            left = min(recorded.due.values()) - job.database.now()
            self._backlog.due_at(time.monotonic() + left)

    def note_long(self, running: Iterable[tuple[int, str, float]], now: float) -> None:
        """Record the items as running that do so for `NOTE_SECONDS`; ``running`` has (idx, worker, start)."""
        long = [(idx, worker) for idx, worker, began in running if now - began > NOTE_SECONDS and idx not in self.noted]
        if long:
            self.note(long)

    def note(self, items: list[tuple[int, str]]) -> None:
        """Record (idx, worker) pairs as running."""
        self.noted.update(idx for idx, _ in items)
        self._held.job.note_running(self._held.hold, items)

    def end(self) -> None:
        """Commit everything and remove the notes on running items, so that no innocent item is charged."""
        self.commit()
        self._held.job.give_back(sorted(self.noted), self._held.hold)
        self.noted.clear()
