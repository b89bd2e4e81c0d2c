"""Rate and remaining time of a run, no more precise than known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from headway.core.forecast import Forecast, forecast

#: Minimum finished items and seconds before the first forecast.
FORECAST_ITEMS = 30
FORECAST_SECONDS = 15.0
#: Time constants of the moving averages, in seconds and in finished items. The slower one applies: a fast run is
#: judged by its last half minute, a slow one by its last sixty items.
FADE_SECONDS = 30.0
FADE_ITEMS = 60.0
#: Seconds without a finished item that count as a stall, later and before the first item.
STALL_SECONDS = 15.0
FIRST_STALL_SECONDS = 30.0
#: Maximum number of pieces that summarise the run, each with about equally many attempts.
PIECES = 32


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """The counts of a run at one moment."""

    #: None while the input stream is still open.
    total: int | None
    #: Items done before this run, and by it.
    kept: int
    done: int
    running: int
    retrying: int
    #: Current dead letters of the job, from any run.
    dead: int
    #: Failed attempts in this run.
    failures: int
    #: Type of the last error in this run, and how often that type occurred.
    last_error: str = ""
    last_error_count: int = 0
    #: The user who paused the run; empty if it is not paused.
    paused_by: str = ""
    #: Seconds that the whole job waits (RetryLater), and why.
    wait_seconds: float = 0.0
    wait_reason: str = ""
    #: How often items were postponed in this run.
    postponed: int = 0
    #: Whether this process was suspended since the last snapshot (Ctrl-Z, a paused container).
    stopped: bool = False

    @property
    def position(self) -> int:
        """Items done in any run."""
        return self.kept + self.done

    @property
    def only_retries(self) -> bool:
        """Whether nothing runs and every remaining item waits for a retry."""
        if self.running or not self.retrying:
            return False
        return self.total is None or self.position + self.dead + self.retrying >= self.total

    @property
    def percent(self) -> float | None:
        if self.total is None:
            return None
        return min(100.0, 100.0 * self.position / self.total) if self.total else 100.0


class Estimator:
    """Rate and forecast from the items finished in *this* run. Items done earlier say nothing about its speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._seen = self._moved = clock()
        self._first: RunSnapshot | None = None
        self._last: RunSnapshot | None = None
        # Decaying sums of finished items, attempts and seconds. Their quotients are the averages.
        self._items = self._runs = self._seconds = 0.0
        self._gap = 0.0
        #: (seconds, attempts) of the whole run, oldest first. The last piece grows until it is as large as the
        #: others.
        self._past: list[tuple[float, float]] = [(0.0, 0.0)]
        self._piece = 1

    def update(self, snapshot: RunSnapshot) -> None:
        """Take in the current counts."""
        now = self._clock()
        if self._last is None:
            # The first snapshot: its items were finished since the estimator was created.
            self._first = self._last = RunSnapshot(
                snapshot.total, snapshot.kept, 0, 0, snapshot.retrying, snapshot.dead, 0
            )
        if snapshot.paused_by or snapshot.wait_seconds or snapshot.stopped:
            # A pause is neither a stall nor slowness: ignore its time.
            self._seen = self._moved = now
            self._last = snapshot
            return
        finished = self._finished(snapshot) - self._finished(self._last)
        runs = snapshot.done + snapshot.failures - self._last.done - self._last.failures
        passed = now - self._seen
        fade = exp(-min(passed / FADE_SECONDS, max(finished, 0) / FADE_ITEMS))
        self._items = self._items * fade + max(finished, 0)
        self._runs = self._runs * fade + max(runs, 0)
        self._seconds = self._seconds * fade + passed
        self._remember(passed, max(runs, finished, 0))
        if finished > 0:
            silence = now - self._moved
            self._gap = silence if self._gap == 0.0 else 0.8 * self._gap + 0.2 * silence
            self._moved = now
        self._seen, self._last = now, snapshot

    @property
    def rate(self) -> float | None:
        """Finished items per second; None before the first one."""
        return self._items / self._seconds if self._items and self._seconds > 0 else None

    @property
    def stalled(self) -> float | None:
        """Seconds since the last item finished, if unusually long; else None. Waiting for retries is not a stall."""
        if self._last is None or (self._last.running == 0 and self._last.retrying > 0) or self._left() == 0:
            return None
        silence = self._clock() - self._moved
        limit = max(STALL_SECONDS, 3.0 * self._gap) if self._gap else FIRST_STALL_SECONDS
        return silence if silence >= limit else None

    @property
    def forecast(self) -> Forecast | None:
        last, left = self._last, self._left()
        if last is None or left is None or self._finished(last) < FORECAST_ITEMS:
            return None
        if self._clock() - self._began < FORECAST_SECONDS or not self._items or self.stalled is not None:
            return None
        # Items need more than one attempt if attempts fail. An item waiting for its retry has already failed once.
        runs_per_item = max(1.0, self._runs / self._items)
        waiting = min(last.retrying, left)
        runs_left = (left - waiting) * runs_per_item + waiting * (1.0 + runs_per_item)
        pace = self._seconds / max(self._runs, self._items)  # seconds per attempt
        return forecast(self._past[:-1], runs_left, pace, self._items)

    def _remember(self, seconds: float, runs: int) -> None:
        """Add to the pieces. They are merged in pairs as the run gets longer, so there are at most `PIECES`."""
        self._past[-1] = (self._past[-1][0] + seconds, self._past[-1][1] + runs)
        if self._past[-1][1] < self._piece:
            return
        self._past.append((0.0, 0.0))
        if len(self._past) > PIECES:
            self._piece *= 2
            pairs = zip(self._past[:-1:2], self._past[1:-1:2], strict=True)
            self._past = [(one[0] + two[0], one[1] + two[1]) for one, two in pairs] + [(0.0, 0.0)]

    def _left(self) -> int | None:
        if self._last is None or self._last.total is None:
            return None
        return max(0, self._last.total - self._last.position - self._last.dead)

    def _finished(self, snapshot: RunSnapshot) -> int:
        """Return how many items this run finished, done or dead. A rescued dead letter counts once."""
        assert self._first is not None
        return snapshot.done + snapshot.dead - self._first.dead
