"""Finished and failed work over time, from the counts by the minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

if TYPE_CHECKING:
    from headway._sql import Database

#: Name of a range -> (its minutes, minutes per point).
RANGES = {"1h": (60, 1), "24h": (1440, 20), "7d": (10_080, 120)}
#: Maximum number of points in the history of a job.
POINTS = 160

#: (minute, done, failed, seconds); a minute may appear several times.
Minutes = Sequence[tuple[int, int, int, float]]


class Point(NamedTuple):
    """One step of a series."""

    minute: Annotated[int, "its first minute, Unix time / 60"]
    done: Annotated[int, "items and tasks that succeeded"]
    failed: Annotated[int, "failed attempts"]
    seconds: Annotated[float, "time spent in attempts"]


class Series(NamedTuple):
    """Steps of equal length without a gap; the last step is not over."""

    step: Annotated[int, "minutes per point"]
    points: Annotated[tuple[Point, ...], "oldest first"]

    @property
    def done(self) -> int:
        return sum(point.done for point in self.points)

    @property
    def failed(self) -> int:
        return sum(point.failed for point in self.points)


def read_series(database: Database, range: str = "1h") -> Series:
    """Read the work of all jobs and of the queue."""
    from headway.ledger.store.queries import statistics as jobs
    from headway.queue.store import statistics as tasks

    length, step = RANGES[range]
    with database.read() as tx:
        now = tx.now()
        first = _first(now, length, step)
        rows = jobs.work_by_slot(tx, first, step)
        rows += [row[1:5] for row in tasks.work_by_slot(tx, first, step)]
    return _series(rows, first, int(now // 60), step)


def read_queue_series(database: Database, range: str = "1h") -> dict[str, tuple[Series, tuple[int, ...]]]:
    """Read what each queue finished, and how many tasks were submitted to it per point."""
    from headway.queue.store import statistics as tasks
    from headway.queue.task import PRIORITIES

    length, step = RANGES[range]
    with database.read() as tx:
        now = tx.now()
        first = _first(now, length, step)
        rows = tasks.work_by_slot(tx, first, step)
    found = {}
    for queue in (priority.value for priority in PRIORITIES):
        own = [row[1:] for row in rows if row[0] == queue]
        series = _series([row[:4] for row in own], first, int(now // 60), step)
        submitted = {int(slot) * step: int(count) for slot, _, _, _, count in own}
        found[queue] = (series, tuple(submitted.get(point.minute, 0) for point in series.points))
    return found


def series_between(minutes: Minutes, start: float, end: float) -> Series:
    """Return the series of a job between two Unix times, in at most `POINTS` steps."""
    first, last = int(start // 60), int(end // 60)
    step = max(1, -(-(last - first + 1) // POINTS))
    first -= first % step
    rows = [(minute // step, done, failed, seconds) for minute, done, failed, seconds in minutes if minute >= first]
    return _series(rows, first, last, step)


def _first(now: float, length: int, step: int) -> int:
    minute = int(now // 60) - length + 1
    return minute - minute % step


def _series(rows: Minutes, first: int, last: int, step: int) -> Series:
    """Add up rows of (slot, done, failed, seconds), where a slot has ``step`` minutes."""
    sums: dict[int, list[float]] = {}
    for slot, *values in rows:
        total = sums.setdefault(int(slot) * step, [0, 0, 0])
        for position, value in enumerate(values):
            total[position] += float(value or 0)
    points = []
    for minute in range(first, last + 1, step):
        done, failed, seconds = sums.get(minute, (0, 0, 0.0))
        points.append(Point(minute, int(done), int(failed), float(seconds)))
    return Series(step, tuple(points))
