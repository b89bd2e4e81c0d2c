"""What was finished and what failed over time, from the counts that are kept by the minute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway._sql import marks

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Database

#: Ranges that can be asked for: name -> (minutes of it, minutes to a point).
RANGES = {"1h": (60, 1), "24h": (1440, 20), "7d": (10_080, 120)}
#: Points of a job's own history, at most.
POINTS = 160


class Point(NamedTuple):
    """One stretch of time."""

    minute: Annotated[int, "its first minute, Unix time / 60"]
    done: Annotated[int, "items and tasks that succeeded"]
    failed: Annotated[int, "attempts that did not"]
    seconds: Annotated[float, "time spent in attempts"]


class Series(NamedTuple):
    """Stretches of equal length, without a gap; the last one is not over yet."""

    step: Annotated[int, "minutes of each"]
    points: Annotated[tuple[Point, ...], "the oldest first"]

    @property
    def done(self) -> int:
        return sum(point.done for point in self.points)

    @property
    def failed(self) -> int:
        return sum(point.failed for point in self.points)


def read_series(database: Database, range: str = "1h") -> Series:
    """All jobs and the queue together. Only jobs that changed since then are asked: the others have nothing to add."""
    length, step = RANGES[range]
    with database.read() as tx:
        now = tx.now()
        first = _first(now, length, step)
        recent = tx.all("SELECT no FROM jobs WHERE updated_at >= ? ORDER BY updated_at DESC LIMIT 500", (first * 60.0,))
        numbers = [no for (no,) in recent]
        rows = tx.all(
            "SELECT slot, sum(done), sum(failed), sum(seconds) FROM ("
            f"SELECT minute / ? AS slot, done, failed, seconds FROM minutes WHERE job IN ({marks(len(numbers))}) "
            "AND minute >= ? UNION ALL "
            "SELECT minute / ?, minute_done, minute_failed, minute_seconds FROM jobs WHERE updated_at >= ? AND minute >= ? "
            "UNION ALL SELECT minute / ?, completed, failures, run_seconds FROM task_minutes WHERE minute >= ?"
            ") all_of_it GROUP BY slot",
            (step, *numbers, first, step, first * 60.0, first, step, first),
        )
    return _series(rows, first, int(now // 60), step)


def read_queue_series(database: Database, range: str = "1h") -> dict[str, tuple[Series, tuple[int, ...]]]:
    """Each queue: what was finished and failed, and what was submitted, over time."""
    length, step = RANGES[range]
    with database.read() as tx:
        now = tx.now()
        first = _first(now, length, step)
        rows = tx.all(
            "SELECT queue, minute / ?, sum(completed), sum(failures), sum(run_seconds), sum(submitted) FROM task_minutes "
            "WHERE minute >= ? GROUP BY 1, 2",
            (step, first),
        )
    found = {}
    for queue in ("urgent", "high", "normal", "low"):
        own = [row[1:] for row in rows if row[0] == queue]
        series = _series([row[:4] for row in own], first, int(now // 60), step)
        came = {int(slot) * step: int(submitted) for slot, _, _, _, submitted in own}
        found[queue] = (series, tuple(came.get(point.minute, 0) for point in series.points))
    return found


def read_job_series(job: ledger.Job, start: float, end: float) -> Series:
    """One job from its beginning on, in as many stretches as a picture can show."""
    first, last = int(start // 60), int(end // 60)
    step = max(1, -(-(last - first + 1) // POINTS))
    first -= first % step
    rows = [(minute // step, done, failed, seconds) for minute, done, failed, _, seconds in job.minutes(first)]
    return _series(rows, first, last, step)


def _first(now: float, length: int, step: int) -> int:
    minute = int(now // 60) - length + 1
    return minute - minute % step


def _series(rows: Sequence[tuple[int, int, int, float]], first: int, last: int, step: int) -> Series:
    sums: dict[int, list[float]] = {}
    for slot, *values in rows:
        held = sums.setdefault(int(slot) * step, [0, 0, 0])
        for place, value in enumerate(values):
            held[place] += value or 0
    points = []
    for minute in range(first, last + 1, step):
        done, failed, seconds = sums.get(minute, (0, 0, 0.0))
        points.append(Point(minute, int(done), int(failed), float(seconds)))
    return Series(step, tuple(points))
