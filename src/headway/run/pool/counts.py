"""The counts of a run, as the display and its ending show them."""

from __future__ import annotations

from collections import Counter

from headway.ledger import JobInfo, Recorded
from headway.ledger.fleet.claims import DAMAGED
from headway.run.display.display import RunSnapshot
from headway.run.pool.runner import Ending


class RunCounts:
    """Counts kept in memory, from what the ledger answered to each commit."""

    def __init__(self, info: JobInfo) -> None:
        self.total = info.total
        self._kept, self._dead, self._retrying = info.done, info.dead, info.failed
        self._done = self._rescued = 0
        #: Failed attempts, and items that died, in this run.
        self.failures = self.died = 0
        #: Postponements in this run.
        self.postponed = 0
        #: Results that were not kept.
        self.unkept = 0
        #: Failures that workers reported and no commit has recorded.
        self.unrecorded_failures = 0
        #: Whether the final pass over dead letters is running. Its items were dead before, so they do not die again.
        self.in_last_pass = False
        self._errors: Counter[str] = Counter()
        self._last_error = ""

    def add_failure(self, kind: str) -> None:
        """Count a failure that a worker reported."""
        self._errors[kind] += 1
        self._last_error = kind
        self.unrecorded_failures += 1

    def add(self, recorded: Recorded) -> None:
        """Count what the ledger recorded."""
        self._done += recorded.done
        self.failures += recorded.failed + recorded.dead
        self.postponed += recorded.postponed
        self._retrying, self._dead = recorded.waiting, recorded.given_up
        if self.in_last_pass:
            self._rescued += recorded.done
        else:
            self.died += recorded.dead

    def add_damaged(self, recorded: Recorded) -> None:
        """Count damaged items, which the ledger gave up itself. No worker reports them."""
        self._errors[DAMAGED.type] += recorded.dead
        self._last_error = DAMAGED.type
        self.add(recorded)

    def reconcile(self, info: JobInfo) -> int:
        """Replace the counts by those of the ledger; return how many records the ledger has lost.

        They differ if the database went back in time during the run: it was restored, or failed over to a lagging
        replica.
        """
        lost = max(0, self._kept + self._done - info.done)
        self._kept = min(self._kept, info.done)
        self._done, self._retrying, self._dead = info.done - self._kept, info.failed, info.dead
        return lost

    def snapshot(
        self,
        *,
        running: int,
        has_total: bool,
        paused_by: str,
        wait: tuple[float, str] = (0.0, ""),
        stopped: bool = False,
    ) -> RunSnapshot:
        """Return the counts for the display."""
        return RunSnapshot(
            total=self.total if has_total else None, kept=self._kept, done=self._done, running=running,
            retrying=self._retrying, dead=self._dead, failures=self.failures, last_error=self._last_error,
            last_error_count=self._errors[self._last_error], paused_by=paused_by, stopped=stopped,
            wait_seconds=wait[0], wait_reason=wait[1], postponed=self.postponed,
        )  # fmt: skip

    def ending(self, outcome: str, *, completed: bool, seconds: float) -> Ending:
        """Return how the run ended."""
        return Ending(
            outcome=outcome, done=self._done, kept=self._kept, dead=self._dead, died=self.died, failures=self.failures,
            rescued=self._rescued, completed=completed, seconds=seconds, postponed=self.postponed,
        )  # fmt: skip
