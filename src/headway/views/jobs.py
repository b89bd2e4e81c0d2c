"""Jobs: all of them.

What is known of one job alone is in ``job.py``: a list of jobs is to be there at once, and loads no more than it shows.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

from headway.errors import NotFound
from headway.telemetry import redact
from headway.views.shape import ABSENT, Absent, Json, document

if TYPE_CHECKING:
    from headway import ledger
    from headway._sql import Database


class Holder(NamedTuple):
    """The process that runs a job."""

    host: Annotated[str, "its machine"]
    pid: Annotated[int, "its process id there"]


class Job(NamedTuple):
    """A job with its counts."""

    id: Annotated[str, "the job's id"]
    status: Annotated[Literal["pending", "processing", "interrupted", "completed"], "where the job is"]
    function: Annotated[str, "what is called with each item; empty for a program of its own"]
    source: Annotated[str, "where the items came from; secrets are masked"]
    total: Annotated[int, "items known so far; all of them once `sealed`"]
    done: Annotated[int, "items that succeeded"]
    pending: Annotated[int, "items that wait for their first try, or run"]
    retrying: Annotated[int, "items that failed and wait for another try"]
    dead: Annotated[int, "items that failed for good"]
    failures: Annotated[int, "failed attempts, over all items"]
    percent: Annotated[float, "share of `total` that is done, 0 to 100"]
    sealed: Annotated[bool, "whether all items are known"]
    archived: Annotated[bool, "whether a fresh start has put it aside"]
    max_retries: Annotated[int, "further tries of an item that failed"]
    created_at: Annotated[datetime, "when it was made"]
    updated_at: Annotated[datetime, "when it last changed"]
    finished_at: Annotated[datetime | None, "when it completed"]
    holder: Annotated[Holder | None, "the process that runs it now"]
    command: Annotated[str, "what to type to continue it; secrets are masked"]


class Jobs(NamedTuple):
    """`headway jobs`: the jobs, the one that changed last first."""

    jobs: Annotated[tuple[Job, ...], "the jobs"]
    next: Annotated[str | Absent | None, "`before` of the next page, null on the last; only from a server"] = ABSENT

    def as_json(self) -> Json:
        return document(self)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_jobs(
    database: Database, *, archived: bool = False, before: str | None = None, limit: int | None = None
) -> Jobs:
    """The jobs; with ``archived`` also those a fresh start has put aside.

    With ``limit`` a page of them, after the job ``before``. One that changes meanwhile is listed again, further up.
    """
    from headway.ledger.report import all_jobs, find_jobs  # not the whole ledger: a list is to be there at once

    if limit is None:
        return Jobs(tuple(job_view(info) for info in all_jobs(database, archived=archived)))
    where, values = ["true" if archived else "archived = 0"], list[str | int]()
    if before is not None:
        if database.one("SELECT 1 FROM jobs WHERE id = ?", (before,)) is None:
            raise NotFound(f"There is no job {before!r} to go on from.", hint="Begin again: list from the first page.")
        where.append("(updated_at, no) < (SELECT updated_at, no FROM jobs WHERE id = ?)")
        values.append(before)
    clause = f"WHERE {' AND '.join(where)} ORDER BY updated_at DESC, no DESC LIMIT ?"
    found = find_jobs(database, clause, (*values, limit + 1))
    page = tuple(job_view(info) for info in found[:limit])
    return Jobs(page, page[-1].id if len(found) > limit else None)


def find_job(ledger: ledger.Ledger, id: str) -> ledger.Job:
    """The job of that id; if there is none, the error names those that look alike."""
    try:
        return ledger.job(id)
    except NotFound as error:
        from difflib import get_close_matches

        close = get_close_matches(id, [info.id for info in ledger.jobs(archived=True)], 3)
        if close:
            error.hint = f"Did you mean {' or '.join(close)}? List them: headway jobs"
        raise


def job_view(info: ledger.JobInfo) -> Job:
    return Job(
        id=info.id,
        status=info.status,  # type: ignore[arg-type]  # one of the four words
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
