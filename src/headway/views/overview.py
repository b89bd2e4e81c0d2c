"""What an operator looks at first: the jobs with their pace, the causes, the queue's forecast.

Counts come from the rows of the jobs and from the counts by the minute; nothing here reads items.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway._sql import marks
from headway.views.jobs.job import Cause, cause_view, kept_items
from headway.views.jobs.listing import Job, cursor, job_view, number_at
from headway.views.jobs.series import Series, read_job_series
from headway.views.jobs.speed import PAST_SECONDS, Forecast, pace

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.ledger.control import Control
    from headway.views.queue import QueueView
    from headway.views.reading import Reader

#: Page size.
PAGE = 50
#: Minutes that a forecast of a queue looks back.
FORECAST_MINUTES = 10


class LastRun(NamedTuple):
    """The newest run of a job."""

    no: Annotated[int, "1 is the first"]
    kept: Annotated[int, "items of the job that were done before it"]
    started_at: Annotated[datetime, "when it began"]
    outcome: Annotated[str | None, "how it ended; null while it runs"]
    host: Annotated[str, "where"]


class JobLine(NamedTuple):
    """A job as a line of a list."""

    job: Annotated[Job, "the job"]
    run: Annotated[LastRun | None, "its newest run"]
    rate: Annotated[float | None, "items per second of the run in progress"]
    forecast: Annotated[Forecast | None, "when it will be ready, once that can be said"]
    past: Annotated[Series | None, "its last half hour, while it runs"]

    @property
    def kept(self) -> int:
        return kept_items(self.job, self.run.kept) if self.run else 0


class JobPage(NamedTuple):
    """Some of the jobs."""

    lines: Annotated[tuple[JobLine, ...], "the jobs"]
    more: Annotated[bool, "whether there are jobs beyond these"]
    next: Annotated[str | None, "cursor of the next page; null on the last, and where the order can change"]


def read_job_page(
    database: Database,
    *,
    status: str | None = None,
    text: str = "",
    by_creation: bool = False,
    after: str | None = None,
    limit: int = PAGE,
) -> JobPage:
    """Read the jobs that changed last, or with ``by_creation`` a page of all jobs, the newest first.

    Only the order of creation has pages: it never changes, so that a job is neither skipped nor repeated between two of
    them. ``after`` is `next` of the page before. ``text`` is part of an id or a function.
    """
    from headway.ledger.store.report import find_jobs

    where, values = ["archived = 0"], list[str | int | float | None]()
    if text:
        where.append("(lower(id) LIKE ? ESCAPE '!' OR lower(function) LIKE ? ESCAPE '!')")
        values += [_like(text)] * 2
    if status == "completed":
        where.append("finished_at IS NOT NULL AND holder IS NULL")
    elif status is not None:
        where.append("finished_at IS NULL" if status != "processing" else "holder IS NOT NULL")
    if after is not None:
        where.append("no < ?")
        values.append(number_at(database, after))
    order = "no DESC" if by_creation else "updated_at DESC, no DESC"
    found = find_jobs(database, f"WHERE {' AND '.join(where)} ORDER BY {order} LIMIT ?", (*values, limit + 1))
    page = [info for info in found[:limit] if status is None or info.status == status]
    runs = _last_runs(database, [info.no for info in page])
    lines = tuple(_line(database, info.no, job_view(info), runs.get(info.no)) for info in page)
    more = len(found) > limit
    return JobPage(lines, more, cursor(found[limit - 1]) if more and by_creation else None)


def read_controls(database: Database, jobs: Sequence[str]) -> dict[str, Control]:
    """What is asked of the runs that go on of these jobs; one that listens to nobody is not in it."""
    from headway.ledger.control import Control

    if not jobs:
        return {}
    rows = database.all(
        "SELECT j.id, r.settings, c.version, c.paused, c.stopping, c.workers, c.actor FROM jobs j "
        "JOIN runs r ON r.job = j.no AND r.no = (SELECT max(l.no) FROM runs l WHERE l.job = j.no) "
        f"LEFT JOIN controls c ON c.job = j.no AND c.run = r.no WHERE j.holder IS NOT NULL AND j.id IN ({marks(len(jobs))})",
        list(jobs),
    )
    return {
        str(id): Control() if version is None else Control(version, bool(paused), stopping, workers, actor)
        for id, settings, version, paused, stopping, workers, actor in rows
        if json.loads(settings).get("mode") != "loop"
    }


def _like(text: str) -> str:
    for special in "!%_":
        text = text.replace(special, f"!{special}")
    return f"%{text.lower()}%"


def read_line(database: Database, no: int, job: Job) -> JobLine:
    return _line(database, no, job, _last_runs(database, [no]).get(no))


def _last_runs(database: Database, numbers: Sequence[int]) -> dict[int, LastRun]:
    from headway.ledger.values import utc

    rows = database.all(
        "SELECT r.job, r.no, r.kept, r.started_at, r.ended_at, r.outcome, r.host, j.holder FROM runs r "
        f"JOIN jobs j ON j.no = r.job WHERE r.job IN ({marks(len(numbers))}) "
        "AND r.no = (SELECT max(l.no) FROM runs l WHERE l.job = r.job)",
        list(numbers),
    )
    return {job: LastRun(no, kept, utc(began), outcome, host) for job, no, kept, began, _, outcome, host, _ in rows}


def _line(database: Database, no: int, job: Job, run: LastRun | None) -> JobLine:
    from headway.ledger.job import Job as LedgerJob

    if job.holder is None:
        ended = run is not None and run.outcome is None  # it did not say how it ended
        return JobLine(job, run._replace(outcome="lost") if run and ended else run, None, None, None)
    now = database.now()
    past = read_job_series(LedgerJob(database, no, job.id), now - PAST_SECONDS, now)
    began = run.started_at.timestamp() if run else job.created_at.timestamp()
    kept = kept_items(job, run.kept) if run else 0
    rate, forecast = pace(past, began, now, job.total - job.done - job.dead, job.done - kept)
    return JobLine(job, run, rate, forecast, past)


class Outlook(NamedTuple):
    """Where a queue is going."""

    kind: Annotated[str, "paused, empty, stalled, growing, clears or unknown"]
    seconds: Annotated[float | None, "until it is empty, if it clears"]
    into: Annotated[float, "tasks submitted per second"]
    out: Annotated[float, "tasks that ended per second"]


def outlook(queue: QueueView, past: Series, came: Sequence[int]) -> Outlook:
    """From what came and what went in the last minutes. The current minute is not over, so it is counted by its part."""
    minutes = min(FORECAST_MINUTES, len(past.points))
    span = max(1, minutes) * 60.0
    went = sum(point.done + point.failed for point in past.points[-minutes:]) / span
    into = sum(came[-minutes:]) / span
    if queue.paused:
        return Outlook("paused", None, into, went)
    if queue.waiting == 0:
        return Outlook("empty", None, into, went)
    if went == 0:
        return Outlook("unknown" if queue.running else "stalled", None, into, went)
    if into >= went and queue.waiting > span * went / 10:
        return Outlook("growing", None, into, went)
    return Outlook("clears", queue.waiting / max(went - into, went / 10), into, went)


# ---------------------------------------------------------------------------------------------------------------------
# Causes


class TaskCause(NamedTuple):
    """Failed runs of tasks that are alike."""

    no: Annotated[int, "its number"]
    kind: Annotated[str, "the tasks' kind"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message without what differs from task to task"]
    frame: Annotated[str, "the place in your code"]
    failures: Annotated[int, "failed runs of it"]
    dead: Annotated[int, "tasks that failed for good by it"]
    first_seen: Annotated[datetime, "when it first came"]
    last_seen: Annotated[datetime, "when it last came"]
    example: Annotated[str | None, "a task that failed by it"]


def read_causes(database: Database, *, limit: int = 200) -> tuple[Cause, ...]:
    """The causes of all jobs that have dead letters, each with its job, those with most of them first."""
    from headway.ledger.job import Job as LedgerJob

    rows = database.all("SELECT no, id FROM jobs WHERE dead > 0 AND archived = 0 ORDER BY updated_at DESC LIMIT 50")
    found = [
        cause_view(cause)._replace(job=id)
        for no, id in rows
        for cause in LedgerJob(database, no, id).causes()
        if cause.dead
    ]
    return tuple(sorted(found, key=lambda cause: -cause.dead)[:limit])


def read_task_causes(database: Database, *, limit: int = 50) -> tuple[TaskCause, ...]:
    """Why tasks of the queue failed for good: by the cause of each one's last run."""
    from headway.queue.task import moment

    rows = database.all(
        "SELECT c.no, c.kind, c.type, c.message, c.frame, c.count, f.dead, c.first_seen, c.last_seen, f.example "
        "FROM task_causes c JOIN (SELECT a.cause AS cause, count(*) AS dead, max(t.id) AS example FROM tasks t "
        "JOIN task_attempts a ON a.task = t.no WHERE t.status = 'FAILED' "
        "AND a.no = (SELECT max(l.no) FROM task_attempts l WHERE l.task = t.no) GROUP BY a.cause) f ON f.cause = c.no "
        "ORDER BY f.dead DESC, c.no LIMIT ?",
        (limit,),
    )
    return tuple(
        TaskCause(no, kind, type, message, frame, count, dead, moment(first), moment(last), example)
        for no, kind, type, message, frame, count, dead, first, last, example in rows
    )


def count_dead(reader: Reader) -> int:
    """Dead letters of jobs and failed tasks together."""
    row = reader.database.one(
        "SELECT (SELECT coalesce(sum(dead), 0) FROM jobs WHERE archived = 0) + "
        "(SELECT count(*) FROM tasks WHERE status = 'FAILED')"
    )
    return int(row[0]) if row else 0


def read_failed_ids(
    database: Database, *, cause: int | None = None, after: int = 0, limit: int = 200
) -> list[tuple[int, str]]:
    """(number, id) of tasks that failed for good, by number: of one cause (that of the last run), or all."""
    of_it = (
        "AND EXISTS (SELECT 1 FROM task_attempts a WHERE a.task = t.no AND a.cause = ? "
        "AND a.no = (SELECT max(l.no) FROM task_attempts l WHERE l.task = t.no)) "
    )
    rows = database.all(
        f"SELECT t.no, t.id FROM tasks t WHERE t.status = 'FAILED' AND t.no > ? {of_it if cause is not None else ''}"
        "ORDER BY t.no LIMIT ?",
        (after, limit) if cause is None else (after, cause, limit),
    )
    return [(int(no), str(id)) for no, id in rows]


def find_item(database: Database, key: str) -> tuple[str, str, int] | None:
    """(job, key, index) of the item with that key, in the job that changed last. Each job is asked by its index."""
    recent = [no for (no,) in database.all("SELECT no FROM jobs WHERE archived = 0 ORDER BY updated_at DESC LIMIT 100")]
    row = database.one(
        "SELECT j.id, i.key, i.idx FROM input_products i JOIN jobs j ON j.no = i.job "
        f"WHERE i.job IN ({marks(len(recent))}) AND i.key = ? ORDER BY j.updated_at DESC LIMIT 1",
        (*recent, key),
    )
    return (str(row[0]), str(row[1]), int(row[2])) if row else None


#: Of a cause with more dead letters than this it is not said when they died: reading them all would take too long.
DATED = 5000
BINS = 24


class Times(NamedTuple):
    """When the dead letters of causes died, over one stretch of time."""

    start: Annotated[datetime, "when the first of them came"]
    counts: Annotated[
        dict[tuple[str, int], tuple[int, ...]], "(job, number of the cause) -> how many in each part of it"
    ]


def read_death_times(database: Database, causes: Sequence[Cause]) -> Times | None:
    """Over the same stretch for all of them, from the first to now; None when there is nothing to show."""
    from headway.ledger.values import utc
    from headway.views.shape import Absent

    dated = [cause for cause in causes if cause.dead <= DATED and not isinstance(cause.job, Absent)]
    if not dated:
        return None
    now = database.now()
    start = min(cause.first_seen.timestamp() for cause in dated)
    width = max(1.0, (now - start) / BINS)
    counts = {}
    for cause in dated:
        rows = database.all(
            "SELECT d.created_at FROM dead_letters d JOIN jobs j ON j.no = d.job WHERE j.id = ? AND d.cause = ? LIMIT ?",
            (str(cause.job), cause.no, DATED),
        )
        bins = [0] * BINS
        for (at,) in rows:
            bins[min(BINS - 1, max(0, int((at - start) / width)))] += 1
        counts[str(cause.job), cause.no] = tuple(bins)
    return Times(utc(start), counts)
