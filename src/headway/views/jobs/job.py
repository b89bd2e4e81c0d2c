"""One job: its runs, its causes of failure, its speed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from headway.telemetry import redact
from headway.views.jobs.durations import Durations, read_durations
from headway.views.jobs.listing import Job, job_view
from headway.views.jobs.series import read_job_series
from headway.views.jobs.speed import PAST_SECONDS, Forecast, pace
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger


class Run(NamedTuple):
    """One execution of a job: a start or a resume."""

    no: Annotated[int, "1 is the first"]
    outcome: Annotated[str | None, "finished, interrupted, stopped, failed or lost; null while it runs"]
    host: Annotated[str, "the machine it ran on"]
    pid: Annotated[int, "its process id there"]
    kept: Annotated[int, "items of the job that were done before it"]
    started_at: Annotated[datetime, "when it began"]
    ended_at: Annotated[datetime | None, "when it ended"]
    settings: Annotated[Mapping[str, Any], "the settings it ran with; secrets are masked"]


class Cause(NamedTuple):
    """Failures that are alike. Its number is given at its first appearance and never changes."""

    no: Annotated[int, "what `--cause` takes"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message without what differs from item to item"]
    frame: Annotated[str, "the place in your code"]
    failures: Annotated[int, "failed attempts of it"]
    dead: Annotated[int, "items that are dead of it now"]
    first_seen: Annotated[datetime, "when it first came"]
    last_seen: Annotated[datetime, "when it last came"]
    example: Annotated[int | None, "index of one item that is dead of it"]
    job: Annotated[str | Absent, "the job's id; only where several jobs are listed"] = ABSENT
    items: Annotated[tuple[DeadLetter, ...] | Absent, "items that are dead of it; only in `headway dead show`"] = ABSENT


class DeadLetter(NamedTuple):
    """An item that failed for good."""

    idx: Annotated[int, "the item's index"]
    key: Annotated[str | None, "its key, if it has one"]
    error: Annotated[str, "what its last failure said"]
    cause: Annotated[int | None, "the number of its cause"]
    failures: Annotated[int, "failed attempts that counted"]
    died_at: Annotated[datetime, "when it was given up for the first time"]
    job: Annotated[str | Absent, "the job's id; only in `headway dead export`"] = ABSENT
    payload: Annotated[Any, "what the function is called with; only with `--payload`, and then unmasked"] = ABSENT
    printed: Annotated[
        str | Absent | None, "what its last attempt printed; in `headway dead show` of the first item of each cause"
    ] = ABSENT


class Records(NamedTuple):
    """The database a job is kept in."""

    name: Annotated[str, "its address without the password, or its file"]
    bytes: Annotated[int, "its size"]


class Runs(NamedTuple):
    """`headway runs`: every start and resume of a job, the first one first."""

    job: Annotated[str, "the job's id"]
    runs: Annotated[tuple[Run, ...], "its runs"]

    def as_json(self) -> Json:
        return document(self)


class JobSheet(NamedTuple):
    """`headway show`: everything about one job."""

    job: Annotated[Job, "the job"]
    running: Annotated[int, "items that are claimed or being worked on"]
    rate: Annotated[float | None, "items per second of the run in progress, over its last minutes"]
    eta_seconds: Annotated[float | None, "seconds left, the likely figure; null while it cannot be said"]
    runs: Annotated[tuple[Run, ...], "its runs, the first one first"]
    causes: Annotated[tuple[Cause, ...], "causes of failure, those with most dead letters first"]
    database: Annotated[Records, "where it is kept"]
    paused_by: Annotated[str | None, "who asked the run in progress to pause; null if it is not paused"] = None
    eta_low_seconds: Annotated[float | None, "the lower end of the range of `eta_seconds`"] = None
    eta_high_seconds: Annotated[float | None, "its upper end: the range holds four times out of five"] = None
    durations: Annotated[Durations | None, "how long items took; null while no time was recorded"] = None
    note: Annotated[str | None, "why a worker would not take part in the job's fleet, if one would not"] = None

    @property
    def kept(self) -> int:
        """Done items that the newest run kept from before it."""
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
    return Runs(job.id, tuple(run_view(run) for run in job.runs()))


def read_sheet(job: ledger.Job) -> JobSheet:
    """Counts, runs, causes and speed of one job."""
    info, runs = job.info(), job.runs()
    rate, forecast = _speed(job, info, runs)
    asked = job.asked(runs[-1].no) if info.held and runs else None
    paused = asked is not None and asked.paused
    early, likely, late = forecast if forecast is not None and not paused else (None, None, None)
    return JobSheet(
        job=job_view(info),
        running=job.progress().running,
        rate=None if rate is None else round(rate, 3),
        eta_seconds=None if likely is None else round(likely, 1),
        runs=tuple(run_view(run) for run in runs),
        causes=tuple(cause_view(cause) for cause in job.causes()),
        database=Records(job.database.name, job.database.size()),
        paused_by=asked.actor if asked is not None and paused else None,
        eta_low_seconds=None if early is None else round(early, 1),
        eta_high_seconds=None if late is None else round(late, 1),
        durations=read_durations(job, info.total),
        note=job.fleet_note(),
    )


def _speed(job: ledger.Job, info: ledger.JobInfo, runs: list[ledger.Run]) -> tuple[float | None, Forecast | None]:
    """Items per second of the run in progress, over its last minutes, and when it will be through."""
    if not info.held or not runs:
        return None, None
    now = job.database.now()
    past = read_job_series(job, now - PAST_SECONDS, now)
    return pace(past, runs[-1].started_at.timestamp(), now, info.remaining, info.done - kept_items(info, runs[-1].kept))


def run_view(run: ledger.Run) -> Run:
    settings = {name: redact(value) if isinstance(value, str) else value for name, value in run.settings.items()}
    return Run(run.no, run.outcome, run.host, run.pid, run.kept, run.started_at, run.ended_at, settings)


def cause_view(cause: ledger.Cause) -> Cause:
    return Cause(
        cause.no, cause.type, cause.message, cause.frame, cause.count, cause.dead, cause.first_seen, cause.last_seen,
        cause.example,
    )  # fmt: skip
