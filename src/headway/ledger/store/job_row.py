"""A job's row: its counters, and the sums of the current minute."""

from __future__ import annotations

from dataclasses import dataclass

from headway._sql import Tx
from headway.core.retry import RetryPolicy
from headway.errors import NotFound

_COLUMNS = (
    "id, origin, version, generation, sealed, finished_at, max_retries, total, done, failed, dead, failures, frontier, "
    "token, holder, minute, minute_done, minute_failed, minute_dead, minute_seconds, archived, retry_base, retry_factor, "
    "retry_cap, retry_jitter"
)


@dataclass(slots=True)
class JobRow:
    """A job's row, locked by the transaction ``tx``. `save` writes the counters back."""

    tx: Tx
    no: int
    id: str
    origin: str
    version: int
    generation: int
    sealed: int
    finished_at: float | None
    max_retries: int
    total: int
    done: int
    failed: int
    dead: int
    failures: int
    frontier: int
    token: int
    holder: str | None
    minute: int
    minute_done: int
    minute_failed: int
    minute_dead: int
    minute_seconds: float
    archived: int
    retry_base: float
    retry_factor: float
    retry_cap: float
    retry_jitter: float
    now: float

    @classmethod
    def lock(cls, tx: Tx, no: int) -> JobRow:
        """Read the row and lock it until the transaction ends. Raises `NotFound`."""
        row = tx.one(f"SELECT {_COLUMNS}, {tx.clock} FROM jobs WHERE no = ?{tx.for_update}", (no,))
        if row is None:
            raise NotFound("The job was deleted while it was in use.")
        return cls(tx, no, *row)

    @property
    def is_recorded(self) -> bool:
        """Whether every item is done or dead, and the item list is complete."""
        return bool(self.sealed) and self.done + self.dead >= self.total

    @property
    def policy(self) -> RetryPolicy:
        """The retry policy that the job's last run has set."""
        return RetryPolicy(self.max_retries, self.retry_base, self.retry_factor, self.retry_cap, self.retry_jitter)

    def set_policy(self, policy: RetryPolicy) -> None:
        """Store the retry policy for later failures, which another process may record."""
        self.retry_base, self.retry_factor = policy.base, policy.factor
        self.retry_cap, self.retry_jitter = policy.cap, policy.jitter
        self.tx.execute(
            "UPDATE jobs SET retry_base = ?, retry_factor = ?, retry_cap = ?, retry_jitter = ? WHERE no = ?",
            (policy.base, policy.factor, policy.cap, policy.jitter, self.no),
        )

    def leave(self, status: str | None, dead: bool) -> None:
        """Remove an item from the counter of its old state. Pending has none: it is the rest of the total."""
        if dead:
            self.dead -= 1
        elif status == "failed":
            self.failed -= 1

    def count_done(self, count: int, seconds: float) -> None:
        """Count ``count`` items as done, which took ``seconds`` in total. `save` must follow."""
        self._turn_minute()
        self.done += count
        self.minute_done += count
        self.minute_seconds += seconds

    def count_failure(self, seconds: float, *, is_dead: bool, was_dead: bool) -> None:
        """Count a failed run, and the item's new state: dead, or waiting for a retry. `save` must follow."""
        self._turn_minute()
        self.failures += 1
        self.minute_failed += 1
        self.minute_seconds += seconds
        if is_dead:
            self.dead += 1
            self.minute_dead += not was_dead
        else:
            self.failed += 1

    def recount(self) -> bool:
        """Recompute the counters from the items' rows. Return whether they were wrong."""
        before = (self.total, self.done, self.failed, self.dead)
        counted = self.tx.one(
            "SELECT (SELECT count(*) FROM input_products WHERE job = ?), "
            "(SELECT count(*) FROM progress WHERE job = ? AND status = 'done'), "
            "(SELECT count(*) FROM progress p WHERE p.job = ? AND p.status = 'failed' AND NOT EXISTS "
            "(SELECT 1 FROM dead_letters d WHERE d.job = p.job AND d.idx = p.idx)), "
            "(SELECT count(*) FROM dead_letters WHERE job = ?)",
            (self.no, self.no, self.no, self.no),
        )
        assert counted is not None
        self.total, self.done, self.failed, self.dead = counted
        return before != counted

    def save(self) -> None:
        """Write the counters back."""
        self._turn_minute()
        self.tx.execute(
            "UPDATE jobs SET version = version + 1, sealed = ?, generation = ?, total = ?, done = ?, failed = ?, dead = ?, "
            "failures = ?, frontier = ?, finished_at = ?, updated_at = ?, minute = ?, minute_done = ?, minute_failed = ?, "
            "minute_dead = ?, minute_seconds = ? WHERE no = ?",
            (self.sealed, self.generation, self.total, self.done, self.failed, self.dead, self.failures,
             self.frontier, self.finished_at, self.now, self.minute, self.minute_done, self.minute_failed,
             self.minute_dead, self.minute_seconds, self.no),
        )  # fmt: skip

    def _turn_minute(self) -> None:
        """Store the sums of a past minute in their own row.

        `save` must follow, because it writes the sums of the new minute. Otherwise the next transaction would store the
        old ones again.
        """
        if self.minute == int(self.now // 60):
            return
        if self.minute_done or self.minute_failed:
            self.tx.execute(
                "INSERT INTO minutes (job, minute, done, failed, dead, seconds) VALUES (?, ?, ?, ?, ?, ?) "
                # The clock may have been set back into a minute that already has a row.
                "ON CONFLICT (job, minute) DO UPDATE SET done = minutes.done + excluded.done, "
                "failed = minutes.failed + excluded.failed, dead = minutes.dead + excluded.dead, "
                "seconds = minutes.seconds + excluded.seconds",
                (self.no, self.minute, self.minute_done, self.minute_failed, self.minute_dead, self.minute_seconds),
            )
        self.minute = int(self.now // 60)
        self.minute_done = self.minute_failed = self.minute_dead = 0
        self.minute_seconds = 0.0
