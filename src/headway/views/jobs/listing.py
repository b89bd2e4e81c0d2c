"""The list of jobs. Commands that list jobs start quickly, so this module imports little; `job.py` has the details of a
job."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.errors import NotFound
from headway.telemetry import redact
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Database


#: Ids that are compared with a mistyped one, from each of three sources.
SUGGESTIONS = 100


class Holder(NamedTuple):
    """The process that runs a job."""

    host: Annotated[str, "its machine"]
    pid: Annotated[int, "its process id"]


class Job(NamedTuple):
    """A job with its counters."""

    id: Annotated[str, "the job's id"]
    status: Annotated[
        Literal["pending", "processing", "paused", "interrupted", "needs a run", "completed"], "state of the job"
    ]
    function: Annotated[str, "the function that is called with each item; empty for a program"]
    source: Annotated[str, "where the items come from; secrets are masked"]
    total: Annotated[int, "items known so far; all of them once `sealed`"]
    done: Annotated[int, "items that succeeded"]
    pending: Annotated[int, "items not tried yet, or in progress"]
    retrying: Annotated[int, "items that failed and wait for a retry"]
    dead: Annotated[int, "items that failed permanently"]
    failures: Annotated[int, "failed attempts of all items"]
    percent: Annotated[float, "share of `total` that is done, 0 to 100"]
    sealed: Annotated[bool, "whether all items are known"]
    archived: Annotated[bool, "whether a fresh start replaced the job"]
    max_retries: Annotated[int, "retries of an item"]
    created_at: Annotated[datetime, "when the job was created"]
    updated_at: Annotated[datetime, "when it last changed"]
    finished_at: Annotated[datetime | None, "when it completed"]
    holder: Annotated[Holder | None, "the process that runs it now"]
    command: Annotated[str, "command that continues it; secrets are masked"]


class Jobs(NamedTuple):
    """`headway jobs`: the jobs, most recently changed first. A page from a server has the newest job first."""

    jobs: Annotated[tuple[Job, ...], "the jobs"]
    next: Annotated[str | Absent | None, "`before` of the next page, null on the last; only from a server"] = ABSENT

    def as_json(self) -> Json:
        return document(self)


def read_jobs(
    database: Database, *, archived: bool = False, before: str | None = None, limit: int | None = None
) -> Jobs:
    """List all jobs, most recently changed first; with ``limit`` one page, newest job first.

    Pages follow the job's number, which never changes: a job that changes between two pages is neither skipped nor
    repeated. ``before`` is `next` of the previous page, or a job's id.
    """
    if limit is None:
        from headway.ledger.store.report import all_jobs

        return Jobs(tuple(job_view(info) for info in all_jobs(database, archived=archived)))
    from headway.ledger.store.queries.search import JobFilter, list_jobs

    below = None if before is None else number_at(database, before)
    page, last = list_jobs(database, JobFilter(archived=archived), by_creation=True, below=below, limit=limit)
    return Jobs(tuple(job_view(info) for info in page), None if last is None else cursor(last))


def cursor(info: ledger.JobInfo) -> str:
    """Return the cursor that continues a list after this job, even if the job is deleted or archived."""
    return f"~{info.no}"  # no job id begins with a tilde


def number_at(database: Database, cursor: str) -> int:
    """Return the job number that a cursor or a job's id stands for. Raises `NotFound`."""
    from headway.ledger.store.jobs import number_of

    digits = cursor.removeprefix("~")
    if cursor != digits and digits.isascii() and digits.isdecimal() and len(digits) <= 18:
        return int(digits)
    no = number_of(database, cursor)
    if no is None:
        raise NotFound(
            f"There is no job {cursor[:128]!r} to continue the list from.", hint="Start again with the first page."
        )
    return no


def find_job(ledger: ledger.Ledger, id: str) -> ledger.Job:
    """Return a job by its id. If there is none, the error suggests similar ids."""
    try:
        return ledger.job(id)
    except NotFound as error:
        from difflib import get_close_matches

        from headway.ledger.store.queries.search import similar_ids

        close = get_close_matches(id, similar_ids(ledger.database, id, SUGGESTIONS), 3)
        if close:
            error.hint = f"Did you mean {' or '.join(close)}? List them: headway jobs"
        raise


def job_view(info: ledger.JobInfo) -> Job:
    """Return the view of a job's row."""
    return Job(
        id=info.id,
        status=info.status,  # type: ignore[arg-type]  # `JobInfo.status` returns one of these words
        function=info.function,
        source=redact(info.source),
        total=info.total,
        done=info.done,
        pending=info.remaining - info.failed,
        retrying=info.failed,
        dead=info.dead,
        failures=info.failures,
        percent=round(info.percent, 2),
        sealed=info.sealed,
        archived=info.archived,
        max_retries=info.max_retries,
        created_at=info.created_at,
        updated_at=info.updated_at,
        finished_at=info.finished_at,
        holder=Holder(info.holder["host"], info.holder["pid"]) if info.holder and info.held else None,
        command=redact(info.command),
    )
