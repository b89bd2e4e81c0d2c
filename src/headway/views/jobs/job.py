"""One job: its runs, its causes of failure, its speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from headway.telemetry import redact
from headway.views.jobs.durations import Durations, read_durations
from headway.views.jobs.listing import Job, job_view
from headway.views.jobs.series import Minutes, Series, series_between
from headway.views.jobs.speed import PAST_SECONDS, Speed, items_in_progress, speed
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Database, Row
    from headway.ledger.values import JobInfo


class Run(NamedTuple):
    """One execution of a job: a start or a resume."""

    no: Annotated[int, "1 is the first"]
    outcome: Annotated[str | None, "finished, interrupted, stopped, failed or lost; null while it runs"]
    host: Annotated[str, "the machine it ran on"]
    pid: Annotated[int, "its process id there"]
    kept: Annotated[int, "items of the job that were done before it"]
    started_at: Annotated[datetime, "when it began"]
    ended_at: Annotated[datetime | None, "when it ended; the last record of a run that died"]
    settings: Annotated[Mapping[str, Any], "the settings it ran with; secrets are masked"]
    why: Annotated[str | None, "why it ended before the work was done, and who stopped it"] = None


class Cause(NamedTuple):
    """A group of similar failures. A cause keeps its number."""

    no: Annotated[int, "what `--cause` takes"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message; what differs from item to item is replaced"]
    frame: Annotated[str, "the top frame in your code"]
    failures: Annotated[int, "failed attempts"]
    dead: Annotated[int, "dead letters of this cause"]
    first_seen: Annotated[datetime, "when it first occurred"]
    last_seen: Annotated[datetime, "when it last occurred"]
    example: Annotated[int | None, "index of one of its dead letters"]
    job: Annotated[str | Absent, "the job's id; only where several jobs are listed"] = ABSENT
    items: Annotated[tuple[DeadLetter, ...] | Absent, "its dead letters; only in `headway dead show`"] = ABSENT


class DeadLetter(NamedTuple):
    """An item that failed permanently."""

    idx: Annotated[int, "the item's index"]
    key: Annotated[str | None, "its key, if it has one"]
    error: Annotated[str, "the error of its last failure"]
    cause: Annotated[int | None, "the number of its cause"]
    failures: Annotated[int, "failed attempts that counted"]
    died_at: Annotated[datetime, "when it first failed permanently"]
    job: Annotated[str | Absent, "the job's id; only in `headway dead export`"] = ABSENT
    payload: Annotated[Any, "what the function is called with; only with `--payload`, and then unmasked"] = ABSENT
    printed: Annotated[
        str | Absent | None, "output of its last attempt; in `headway dead show`, of the first item of each cause"
    ] = ABSENT


class Records(NamedTuple):
    """The database that stores a job."""

    name: Annotated[str, "its address without the password, or its file"]
    bytes: Annotated[int, "its size"]


class Runs(NamedTuple):
    """`headway runs`: every start and resume of a job, oldest first."""

    job: Annotated[str, "the job's id"]
    runs: Annotated[tuple[Run, ...], "its runs"]

    def as_json(self) -> Json:
        return document(self)


class JobSheet(NamedTuple):
    """`headway show`: everything about one job."""

    job: Annotated[Job, "the job"]
    running: Annotated[int, "items in progress: noted as running, or the mean of the last minutes if that is larger"]
    rate: Annotated[float | None, "current items per second of the run in progress; null if paused or nothing finishes"]
    eta_seconds: Annotated[float | None, "remaining items divided by `rate`; null while unknown"]
    runs: Annotated[tuple[Run, ...], "its runs, oldest first"]
    causes: Annotated[tuple[Cause, ...], "causes of failure, those with the most dead letters first"]
    database: Annotated[Records, "where it is stored"]
    paused_by: Annotated[str | None, "who paused the run in progress; null if it is not paused"] = None
    eta_low_seconds: Annotated[float | None, "lower end of the range of `eta_seconds`"] = None
    eta_high_seconds: Annotated[float | None, "its upper end: the range holds four times out of five"] = None
    durations: Annotated[Durations | None, "how long items took; null while no time was recorded"] = None
    note: Annotated[str | None, "why a worker refused to join the job's fleet, if one did"] = None
    stalled: Annotated[str | None, "text of the open alert `stalled_job` of this job"] = None
    waits_until: Annotated[
        datetime | None, "until when nothing of the job starts (RetryLater); null if it does not wait"
    ] = None
    wait_reason: Annotated[str | None, "why it waits; null if it does not"] = None
    postponed: Annotated[int, "items that RetryLater postponed and that still wait"] = 0
    postponed_until: Annotated[datetime | None, "when the first of them runs again"] = None
    postponed_reason: Annotated[str | None, "why that one waits"] = None

    @property
    def kept(self) -> int:
        """Return how many done items the newest run kept from earlier runs."""
        return kept_items(self.job, self.runs[-1].kept) if self.runs else 0

    def as_json(self) -> Json:
        return document(self)


def kept_items(job: Job | ledger.JobInfo, kept: int) -> int:
    """Return how many done items a run kept.

    Runs of earlier versions recorded the number before ``--accept-changes`` removed items, so it can exceed the done items.
    """
    return min(job.done, kept)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_runs(job: ledger.Job) -> Runs:
    """Read the runs of a job."""
    return Runs(job.id, run_views(job, job.info(), job.runs()))


def read_sheet(job: ledger.Job) -> JobSheet:
    """Read counts, runs, causes and speed of one job."""
    return read_sheet_and_minutes(job, PAST_SECONDS)[0]


def read_sheet_and_minutes(job: ledger.Job, past: float | None = None) -> tuple[JobSheet, Minutes, Speed, float]:
    """Read the sheet of a job, its counts by the minute, its speed and the database's time.

    The counts cover the last ``past`` seconds, or the whole job. They are read once, for the speed and for pictures.
    """
    info, runs, now = job.info(), job.runs(), job.database.now()
    first = now - past if past is not None else (runs[0].started_at if runs else info.created_at).timestamp()
    minutes = [(minute, done, failed, seconds) for minute, done, failed, _, seconds in job.minutes(int(first // 60))]
    found = speed_of(info, runs[-1].started_at.timestamp(), runs[-1].kept, minutes, now) if runs else Speed()
    early, likely, late = found.forecast or (None, None, None)
    asked = job.asked(runs[-1].no) if info.status == "paused" and runs else None
    postponed = job.postponed() if info.failed else None
    sheet = JobSheet(
        job=job_view(info),
        running=items_in_progress(job.progress().running, info.remaining - info.failed, found.at_work),
        rate=_rounded(found.rate, 3),
        eta_seconds=_rounded(likely, 1),
        runs=run_views(job, info, runs),
        causes=tuple(cause_view(cause) for cause in job.causes()),
        database=Records(job.database.name, job.database.size()),
        paused_by=None if asked is None else asked.actor,
        eta_low_seconds=_rounded(early, 1),
        eta_high_seconds=_rounded(late, 1),
        durations=read_durations(job, info.total),
        note=job.fleet_note(),
        stalled=read_stalled(job.database).get(job.id) if info.holder is not None else None,
        waits_until=info.wait_until,
        wait_reason=info.wait_reason if info.wait_until is not None else None,
        postponed=0 if postponed is None else postponed.items,
        postponed_until=None if postponed is None else postponed.until,
        postponed_reason=None if postponed is None else postponed.reason,
    )
    return sheet, minutes, found, now


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def speed_of(info: JobInfo, began: float, kept: int, minutes: Minutes, now: float) -> Speed:
    """Return the speed of a job's newest run, which began at ``began``. A job that is paused or not running has none."""
    if not info.held or info.paused:
        return Speed()
    past = series_between(minutes, now - PAST_SECONDS, now)
    return speed(past, began, now, info.remaining, info.done - kept_items(info, kept))


def read_speeds(
    database: Database, jobs: Sequence[JobInfo], runs: Sequence[Row] | None = None
) -> dict[int, tuple[Series, Speed]]:
    """Read the last half hour and the speed of those jobs that run, by two queries for all of them.

    ``runs`` is the result of `statistics.newest_runs`, if the caller has it.
    """
    from headway.ledger.store.queries import statistics

    running = {info.no: info for info in jobs if info.held}
    if not running:
        return {}
    with database.read() as tx:
        now = tx.now()
        newest = statistics.newest_runs(tx, list(running)) if runs is None else runs
        minutes = statistics.minutes_of(tx, list(running), int((now - PAST_SECONDS) // 60))
    known = {row[0]: row for row in newest}
    found = {}
    for no, info in running.items():
        _, _, kept, began, *_ = known.get(no, (no, 0, 0, info.created_at.timestamp()))
        past = series_between(minutes[no], now - PAST_SECONDS, now)
        found[no] = past, speed_of(info, began, kept, minutes[no], now)
    return found


def read_stalled(database: Database) -> dict[str, str]:
    """Return the jobs that the alerts judge as stalled: id -> text of the alert."""
    from headway.alerts.store.alerts import open_alerts

    with database.read() as tx:
        return {alert.subject: alert.text for alert in open_alerts(tx) if alert.rule == "stalled_job"}


def run_views(job: ledger.Job, info: JobInfo, runs: Sequence[ledger.Run]) -> tuple[Run, ...]:
    """Return the runs of a job with the reason why each ended early."""
    stops: dict[int, tuple[str, str]] = {}
    if any(run.outcome == "interrupted" for run in runs):
        from headway.ledger.store.queries.search import stops_of

        with job.database.read() as tx:
            stops = stops_of(tx, job.id)
    return tuple(_run_view(run, info, stops.get(run.no)) for run in runs)


def _run_view(run: ledger.Run, info: JobInfo, stop: tuple[str, str] | None) -> Run:
    settings = {name: redact(value) if isinstance(value, str) else value for name, value in run.settings.items()}
    ended = run.ended_at
    if ended is None and run.outcome == "lost":  # no later run has recorded its end yet
        ended = max(run.started_at, info.updated_at)
    return Run(run.no, run.outcome, run.host, run.pid, run.kept, run.started_at, ended, settings, _why(run, stop))


def _why(run: ledger.Run, stop: tuple[str, str] | None) -> str | None:
    """Return in a sentence why a run ended before the work was done."""
    if run.outcome == "stopped":
        most = run.settings.get("max_failures")
        return "Too many items failed permanently" + (f" (--max-failures {most})." if most is not None else ".")
    if run.outcome == "interrupted":
        if stop is None:
            return "Interrupted by Ctrl-C or a signal to its process."
        actor, reason = stop
        return redact(f"Stopped by {actor}{f': {reason}' if reason else ''}.")
    return {"lost": "Its process died.", "failed": "The run itself failed; see its output."}.get(run.outcome or "")


def cause_view(cause: ledger.Cause) -> Cause:
    """Return the view of a cause."""
    return Cause(
        cause.no, cause.type, cause.message, cause.frame, cause.count, cause.dead, cause.first_seen, cause.last_seen,
        cause.example,
    )  # fmt: skip
