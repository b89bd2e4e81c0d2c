"""The overview: jobs with their rate and forecast, the outlook of the queues, the causes of failure.

Counts come from the rows of the jobs and from the counts by the minute; nothing here reads items.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.views.jobs.job import Cause, JobSheet, kept_items, read_sheet_and_minutes, read_speeds, read_stalled
from headway.views.jobs.listing import Job, cursor, job_view, number_at
from headway.views.jobs.series import Series, series_between
from headway.views.jobs.speed import PAST_SECONDS, Forecast, Speed

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Database, Row
    from headway.ledger.control import Control
    from headway.ledger.store.queries.statistics import JobCause
    from headway.views.queue import QueueView
    from headway.views.reading import Reader

#: Page size.
PAGE = 50
#: Minutes behind the forecast of a queue.
FORECAST_MINUTES = 10


class LastRun(NamedTuple):
    """The newest run of a job."""

    no: Annotated[int, "1 is the first"]
    kept: Annotated[int, "items of the job that were done before it"]
    started_at: Annotated[datetime, "when it began"]
    outcome: Annotated[str | None, "how it ended; null while it runs"]
    host: Annotated[str, "the machine it ran on"]


class JobLine(NamedTuple):
    """A job as a row of a list."""

    job: Annotated[Job, "the job"]
    run: Annotated[LastRun | None, "its newest run"]
    rate: Annotated[float | None, "current items per second of the run in progress"]
    forecast: Annotated[Forecast | None, "when it will finish; null while unknown"]
    past: Annotated[Series | None, "its last half hour, while it runs"]
    stalled: Annotated[str | None, "text of the open alert `stalled_job` of this job"] = None

    @property
    def kept(self) -> int:
        return kept_items(self.job, self.run.kept) if self.run else 0


class JobPage(NamedTuple):
    """A page of jobs."""

    lines: Annotated[tuple[JobLine, ...], "the jobs"]
    more: Annotated[bool, "whether there are more jobs"]
    next: Annotated[str | None, "cursor of the next page; null on the last, and where the order can change"]


def read_job_page(
    database: Database,
    *,
    status: str | None = None,
    text: str = "",
    running: bool = False,
    by_creation: bool = False,
    after: str | None = None,
    limit: int = PAGE,
) -> JobPage:
    """Read the most recently changed jobs, or with ``by_creation`` a page of all jobs, newest first.

    ``running`` selects jobs that a process holds, paused ones included. ``text`` is part of an id or a function. Only the
    order of creation has pages: it never changes, so no job is skipped or repeated. ``after`` is `next` of the previous page.
    """
    from headway.ledger.store.queries import search, statistics

    below = None if after is None else number_at(database, after)
    chosen = search.JobFilter(status, text, running=running)
    page, last = search.list_jobs(database, chosen, by_creation=by_creation, below=below, limit=limit)
    with database.read() as tx:
        runs = statistics.newest_runs(tx, [info.no for info in page])
    speeds = read_speeds(database, page, runs)
    stalled = read_stalled(database) if any(info.holder is not None for info in page) else {}
    newest = {row[0]: row for row in runs}
    lines = [
        JobLine(job_view(info), _last_run(newest.get(info.no), held=info.held), *_shown(speeds.get(info.no)),
                stalled.get(info.id))
        for info in page
    ]  # fmt: skip
    return JobPage(tuple(lines), last is not None, cursor(last) if last is not None and by_creation else None)


def count_jobs(database: Database) -> dict[str, int]:
    """Count the jobs that are not archived by status."""
    from headway.ledger.store.queries import search

    return search.count_jobs(database)


def read_controls(database: Database, jobs: Sequence[str]) -> dict[str, Control]:
    """Read the current requests to those of the jobs that run and can be controlled."""
    from headway.ledger.store.queries import statistics

    if not jobs:
        return {}
    with database.read() as tx:
        return statistics.requests(tx, jobs)


class JobDetail(NamedTuple):
    """A job with its whole history by the minute, as its page shows it."""

    now: Annotated[datetime, "the database's time"]
    sheet: Annotated[JobSheet, "everything about the job"]
    line: Annotated[JobLine, "the job as a row of a list"]
    series: Annotated[Series, "its history, from the first run on"]


def read_job_detail(job: ledger.Job) -> JobDetail:
    """Read a job for its page. The counts by the minute are read once, for rate, forecast and history."""
    from headway.ledger.values import utc

    sheet, minutes, found, now = read_sheet_and_minutes(job)
    runs, view = sheet.runs, sheet.job
    start = (runs[0].started_at if runs else view.created_at).timestamp()
    end = now if view.holder else max(start, view.updated_at.timestamp())
    run = LastRun(runs[-1].no, runs[-1].kept, runs[-1].started_at, runs[-1].outcome, runs[-1].host) if runs else None
    past = series_between(minutes, now - PAST_SECONDS, now) if view.holder else None
    line = JobLine(view, run, found.rate, found.forecast, past, sheet.stalled)
    return JobDetail(utc(now), sheet, line, series_between(minutes, start, end))


def _last_run(row: Row | None, *, held: bool) -> LastRun | None:
    from headway.ledger.values import utc

    if row is None:
        return None
    _, no, kept, began, outcome, host = row
    return LastRun(no, kept, utc(began), "lost" if outcome is None and not held else outcome, host)


def _shown(found: tuple[Series, Speed] | None) -> tuple[float | None, Forecast | None, Series | None]:
    if found is None:
        return None, None, None
    past, speed = found
    return speed.rate, speed.forecast, past


class Outlook(NamedTuple):
    """The forecast of a queue."""

    kind: Annotated[str, "paused, empty, unserved, stalled, growing, clears or unknown"]
    seconds: Annotated[float | None, "until it is empty, if it clears"]
    into: Annotated[float, "tasks submitted per second"]
    out: Annotated[float, "tasks that ended per second"]


def outlook(queue: QueueView, past: Series, came: Sequence[int]) -> Outlook:
    """Forecast a queue from the last minutes. The current minute counts as a whole minute although it is not over."""
    minutes = min(FORECAST_MINUTES, len(past.points))
    span = max(1, minutes) * 60.0
    went = sum(point.done + point.failed for point in past.points[-minutes:]) / span
    into = sum(came[-minutes:]) / span
    if queue.paused:
        return Outlook("paused", None, into, went)
    if queue.waiting == 0:
        return Outlook("empty", None, into, went)
    if queue.workers == 0:
        return Outlook("unserved", None, into, went)
    if went == 0:
        return Outlook("unknown" if queue.running else "stalled", None, into, went)
    if into >= went and queue.waiting > span * went / 10:
        return Outlook("growing", None, into, went)
    return Outlook("clears", queue.waiting / max(went - into, went / 10), into, went)


def read_rate(database: Database) -> float | None:
    """Read how many items and tasks succeed per second now; None if nothing does.

    It is the sum of the rates of the jobs in progress and of the tasks that succeeded in the last one to two minutes.
    """
    from headway.ledger.store.queries import search
    from headway.queue.store import statistics as tasks

    running, _ = search.list_jobs(database, search.JobFilter(running=True), limit=1000)
    rates = [speed.rate or 0.0 for _, speed in read_speeds(database, running).values()]
    with database.read() as tx:
        now = tx.now()
        minute = int(now // 60) - 1
        done = sum(int(row[2] or 0) for row in tasks.work_by_slot(tx, minute, 1))
    return sum(rates) + done / (now - 60 * minute) or None


# ---------------------------------------------------------------------------------------------------------------------
# Causes


class TaskCause(NamedTuple):
    """Failed runs of tasks that are alike."""

    no: Annotated[int, "its number"]
    kind: Annotated[str, "the tasks' kind"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message; what differs from task to task is replaced"]
    frame: Annotated[str, "the top frame in your code"]
    failures: Annotated[int, "failed attempts"]
    dead: Annotated[int, "tasks that failed permanently"]
    first_seen: Annotated[datetime, "when it first occurred"]
    last_seen: Annotated[datetime, "when it last occurred"]
    example: Annotated[str | None, "one of the tasks"]


def read_causes(database: Database, *, limit: int | None = 200) -> tuple[Cause, ...]:
    """Read the causes with dead letters of all jobs, each with its job, those with the most dead letters first."""
    from headway.ledger.store.queries import statistics

    with database.read() as tx:
        return tuple(map(_cause, statistics.causes_with_dead_letters(tx)[:limit]))


def _cause(found: JobCause) -> Cause:
    from headway.ledger.values import utc

    return Cause(
        found.no, found.type, found.message, found.frame, found.failures, found.dead, utc(found.first_seen),
        utc(found.last_seen), found.example, found.job,
    )  # fmt: skip


def read_task_causes(database: Database, *, limit: int = 50) -> tuple[TaskCause, ...]:
    """Read why tasks of the queue failed permanently, by the cause of each task's last attempt."""
    from headway.queue.store import statistics
    from headway.queue.task import moment

    with database.read() as tx:
        found = statistics.failed_by_cause(tx, limit)
    return tuple(
        TaskCause(
            one.no, one.kind, one.type, one.message, one.frame, one.failures, one.dead, moment(one.first_seen),
            moment(one.last_seen), one.example,
        )
        for one in found
    )  # fmt: skip


def count_dead(reader: Reader) -> int:
    """Count the dead letters of jobs and the failed tasks."""
    from headway.ledger.store.queries import statistics as jobs
    from headway.queue.store import statistics as tasks

    with reader.database.read() as tx:
        return jobs.dead_letters_in_all(tx) + tasks.failed_in_all(tx)


def count_failed_tasks(database: Database) -> int:
    """Count the tasks that failed permanently."""
    from headway.queue.store import statistics

    with database.read() as tx:
        return statistics.failed_in_all(tx)


def read_failed_ids(
    database: Database, *, cause: int | None = None, after: int = 0, limit: int = 200
) -> list[tuple[int, str]]:
    """Read (number, id) of tasks that failed permanently, by number: those of one cause, or all."""
    from headway.queue.store import statistics

    with database.read() as tx:
        return statistics.failed_ids(tx, cause=cause, after=after, limit=limit)


def find_item(database: Database, key: str) -> tuple[str, str, int] | None:
    """Return (job, key, index) of the item with that key, in the job that changed last."""
    from headway.ledger.store.queries import search

    with database.read() as tx:
        found = search.items_by_key(tx, key, 1)
    return (found[0].job, found[0].key, found[0].idx) if found and found[0].key == key else None


#: Times of death are read of causes with at most this many dead letters.
DATED = 5000
BINS = 24


class Times(NamedTuple):
    """When dead letters died, in equal parts of one period for all causes."""

    start: Annotated[datetime, "when the first cause occurred"]
    counts: Annotated[dict[tuple[str, int], tuple[int, ...]], "(job, number of the cause) -> deaths per part"]


def read_death_times(database: Database, causes: Sequence[Cause]) -> Times | None:
    """Read when items died of these causes, from the first occurrence to now; None if none is small enough."""
    from headway.ledger.store.queries import statistics
    from headway.ledger.values import utc
    from headway.views.shape import Absent

    dated = [cause for cause in causes if cause.dead <= DATED and not isinstance(cause.job, Absent)]
    if not dated:
        return None
    counts = {}
    with database.read() as tx:
        now = tx.now()
        start = min(cause.first_seen.timestamp() for cause in dated)
        width = max(1.0, (now - start) / BINS)
        for cause in dated:
            bins = [0] * BINS
            for at in statistics.times_of_death(tx, str(cause.job), cause.no, DATED):
                bins[min(BINS - 1, max(0, int((at - start) / width)))] += 1
            counts[str(cause.job), cause.no] = tuple(bins)
    return Times(utc(start), counts)
