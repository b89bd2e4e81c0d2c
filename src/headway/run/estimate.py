"""How fast a run is and when it will be through, said no more precisely than it is known."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from headway.forecast import Forecast, forecast

#: No forecast before so many items have finished and so many seconds have passed.
FORECAST_ITEMS = 30
FORECAST_SECONDS = 15.0
#: The past fades over so many seconds or so many finished items, whichever fades slower: a fast run is judged by its
#: last half minute, a slow one by its last sixty items.
FADE_SECONDS = 30.0
FADE_ITEMS = 60.0
#: Silence is called a stall after so many seconds, and before anything has finished after so many.
STALL_SECONDS = 15.0
FIRST_STALL_SECONDS = 30.0
#: The whole run is remembered as so many pieces of about equally many runs of items, at most.
PIECES = 32


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment."""

    #: None while a stream of items is still open.
    total: int | None
    #: Done before this run, and by it.
    kept: int
    done: int
    running: int
    retrying: int
    #: Dead letters of the job now, whichever run they are from.
    dead: int
    #: Failed runs of items in this run.
    failures: int
    #: The type of this run's last error, and how often that came.
    last_error: str = ""
    last_error_count: int = 0
    #: Who asked it to pause, while it does.
    paused_by: str = ""
    #: The run itself stood still since the last look (Ctrl-Z, a container that was paused).
    stopped: bool = False

    @property
    def position(self) -> int:
        """Items done, in whichever run."""
        return self.kept + self.done

    @property
    def only_retries(self) -> bool:
        """Whether nothing runs and every item that is left waits for another try."""
        if self.running or not self.retrying:
            return False
        return self.total is None or self.position + self.dead + self.retrying >= self.total

    @property
    def percent(self) -> float | None:
        if self.total is None:
            return None
        return min(100.0, 100.0 * self.position / self.total) if self.total else 100.0


class Estimator:
    """Rate and forecast from what *this* run has finished; items that were kept from before say nothing about speed."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = self._seen = self._moved = clock()
        self._first: RunSnapshot | None = None
        self._last: RunSnapshot | None = None
        # Faded sums: finished items, runs of items and the seconds they took. Their quotients are the averages.
        self._items = self._runs = self._seconds = 0.0
        self._gap = 0.0
        #: (seconds, runs of items) of all of the run, the oldest first; the last one grows until it has as many as the others.
        self._past: list[tuple[float, float]] = [(0.0, 0.0)]
        self._piece = 1

    def update(self, snapshot: RunSnapshot) -> None:
        now = self._clock()
        if self._last is None:
            # The first look: what it shows was finished since the estimator was made.
            self._first = self._last = RunSnapshot(
                snapshot.total, snapshot.kept, 0, 0, snapshot.retrying, snapshot.dead, 0
            )
        if snapshot.paused_by or snapshot.stopped:
            # Neither a stall nor slow: the time of a pause says nothing about the pace.
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
        """For how many seconds nothing has finished, once that is unusual. A pause before retries is no stall."""
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
        # An item takes more than one run when runs fail; one that waits for its retry has failed and will be slower.
        runs_per_item = max(1.0, self._runs / self._items)
        waiting = min(last.retrying, left)
        runs_left = (left - waiting) * runs_per_item + waiting * (1.0 + runs_per_item)
        pace = self._seconds / max(self._runs, self._items)  # of a run; an item's is as many times that as it has runs
        return forecast(self._past[:-1], runs_left, pace, self._items)

    def _remember(self, seconds: float, runs: int) -> None:
        """Pieces get larger as the run gets longer: there are never more than `PIECES`, and never many fewer."""
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
        """Items this run brought to an end, good or bad. A dead letter that is rescued counts once."""
        assert self._first is not None
        return snapshot.done + snapshot.dead - self._first.dead
