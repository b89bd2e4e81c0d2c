"""How many items may start now, and how many travel together."""

from __future__ import annotations

import time

from headway.run.pool.counts import RunCounts

#: Target duration of a batch, seconds. Short items share a round trip, long ones travel alone.
BATCH_SECONDS = 0.05
BATCH_MOST = 1000


class StartGate:
    """Decides whether items may start, by the pause, the limit of failures and the rate."""

    def __init__(self, counts: RunCounts, *, rate: float | None, max_failures: int | None) -> None:
        self._counts, self._rate, self._max_failures = counts, rate, max_failures
        self.paused = False
        #: The user or program that paused the run.
        self.paused_by = ""
        #: Until when the job waits, on the monotonic clock, and why.
        self.waits_until = 0.0
        self.wait_reason = ""
        #: Whether a wait has begun or grown, so that workers must return what they have not begun.
        self.must_recall = False
        self._allowance = 0.0
        self._allowance_at = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether any item may start. Unrecorded failures that could reach the limit must be committed first."""
        return not self.paused and not self.wait_left and self.failures_left() != 0

    @property
    def wait_left(self) -> float:
        """Seconds that the job still waits; 0 if it does not."""
        return max(0.0, self.waits_until - time.monotonic()) if self.waits_until else 0.0

    def wait(self, seconds: float, reason: str) -> None:
        """Start nothing for ``seconds``, unless a longer wait has begun."""
        until = time.monotonic() + seconds
        if until > self.waits_until + 0.5 or not self.wait_left:
            self.waits_until, self.wait_reason, self.must_recall = until, reason, True

    def failures_left(self) -> int | None:
        """Return how many items may still die before ``max_failures`` ends the run.

        Unrecorded failures count as deaths. None means no limit.
        """
        if self._max_failures is None or self._counts.in_last_pass:
            return None
        return max(0, self._max_failures - self._counts.died - self._counts.unrecorded_failures)

    @property
    def failed_too_often(self) -> bool:
        """Whether ``max_failures`` items have died in this run."""
        return self._max_failures is not None and self._counts.died >= self._max_failures

    def share_of_failures(self, given: int, takers: int) -> int | None:
        """Return a worker's share of the failures that are left, at least one. None means no limit.

        ``given`` failures were given to other workers, and ``takers`` workers share the rest. After its share, a worker
        returns what it has not begun. So the shares never exceed the total, except that every worker may run one item.
        """
        left = self.failures_left()
        return None if left is None else max(1, (left - given) // max(1, takers))

    def allow(self, count: int, now: float) -> int:
        """Return how many of ``count`` items the rate limit allows now."""
        rate = self._rate
        if rate is None:
            return count
        # Save up at most a tenth of a second's worth, so that a pause does not allow a burst.
        self._allowance = min(max(1.0, rate / 10), self._allowance + (now - self._allowance_at) * rate)
        self._allowance_at = now
        count = min(count, int(self._allowance))
        self._allowance -= count
        return count

    @property
    def interval(self) -> float | None:
        """Seconds between two starts at the rate limit; None without one."""
        return 1 / self._rate if self._rate else None


class BatchSizer:
    """Chooses the size of a batch from the duration of recent items."""

    def __init__(self) -> None:
        #: Moving average of an item's duration, seconds; None before the first outcome.
        self.item_seconds: float | None = None

    def observe(self, seconds: float, count: int) -> None:
        """Add ``count`` items that took ``seconds`` together."""
        average, known = seconds / count, self.item_seconds
        self.item_seconds = average if known is None else 0.7 * known + 0.3 * average

    @property
    def size(self) -> int:
        """Number of items in a batch. An item longer than half of `BATCH_SECONDS` travels alone."""
        if self.item_seconds is None or self.item_seconds > BATCH_SECONDS / 2:
            return 1
        return max(1, min(BATCH_MOST, int(BATCH_SECONDS / max(self.item_seconds, 1e-5))))
