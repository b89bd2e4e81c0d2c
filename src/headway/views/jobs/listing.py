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


#: Ids that are compared with a mistyped one, from each of three places.
SUGGESTIONS = 100


class Holder(NamedTuple):
    """The process that runs a job."""

    host: Annotated[str, "its machine"]
    pid: Annotated[int, "its process id there"]


class Job(NamedTuple):
    """A job with its counts."""

    id: Annotated[str, "the job's id"]
    status: Annotated[Literal["pending", "processing", "interrupted", "needs a run", "completed"], "where the job is"]
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
    """`headway jobs`: the jobs, the one that changed last first. A page from a server: the newest job first."""

    jobs: Annotated[tuple[Job, ...], "the jobs"]
    next: Annotated[str | Absent | None, "`before` of the next page, null on the last; only from a server"] = ABSENT

    def as_json(self) -> Json:
        return document(self)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_jobs(
    database: Database, *, archived: bool = False, before: str | None = None, limit: int | None = None
) -> Jobs:
    """List the jobs, the one that changed last first; with ``archived`` also archived ones.

    With ``limit`` the answer is one page, newest job first. Pages follow the job's number, which never changes: a job
    that changes between two pages is neither skipped nor repeated. ``before`` is `next` of the page before, or a job's id.
    """
    from headway.ledger.store.report import all_jobs, find_jobs  # not the whole ledger: a list is to be there at once

    if limit is None:
        return Jobs(tuple(job_view(info) for info in all_jobs(database, archived=archived)))
    where, values = ["true" if archived else "archived = 0"], list[str | int]()
    if before is not None:
        where.append("no < ?")
        values.append(number_at(database, before))
    clause = f"WHERE {' AND '.join(where)} ORDER BY no DESC LIMIT ?"
    found = find_jobs(database, clause, (*values, limit + 1))
    page = found[:limit]
    return Jobs(tuple(job_view(info) for info in page), cursor(page[-1]) if len(found) > limit else None)


def cursor(info: ledger.JobInfo) -> str:
    """Return the cursor that continues a list after this job, also when the job is deleted or archived meanwhile."""
    return f"~{info.no}"  # no job id begins with a tilde


def number_at(database: Database, cursor: str) -> int:
    """Return the job number that a cursor, or a job's id, stands for."""
    digits = cursor.removeprefix("~")
    if cursor != digits and digits.isascii() and digits.isdecimal() and len(digits) <= 18:
        return int(digits)
    row = database.one("SELECT no FROM jobs WHERE id = ?", (cursor,))
    if row is None:
        raise NotFound(
            f"There is no job {cursor[:128]!r} to continue the list from.", hint="Start again with the first page."
        )
    return int(row[0])


def find_job(ledger: ledger.Ledger, id: str) -> ledger.Job:
    """Return the job of that id; if there is none, the error suggests similar ids."""
    try:
        return ledger.job(id)
    except NotFound as error:
        from difflib import get_close_matches

        close = get_close_matches(id, _candidates(ledger.database, id), 3)
        if close:
            error.hint = f"Did you mean {' or '.join(close)}? List them: headway jobs"
        raise


def _candidates(database: Database, id: str) -> list[str]:
    """Return ids that a mistyped id may stand for: its neighbours in the index of ids, and the newest jobs.

    At most `SUGGESTIONS` of each are read, so that a wrong id costs the same among ten jobs and a million.
    """
    found: dict[str, None] = {}
    for rest, values in (
        ("WHERE id > ? ORDER BY id", (id,)),
        ("WHERE id < ? ORDER BY id DESC", (id,)),
        ("ORDER BY no DESC", ()),
    ):
        rows = database.all(f"SELECT id FROM jobs {rest} LIMIT {SUGGESTIONS}", values)
        found |= dict.fromkeys(str(row[0]) for row in rows)
    return list(found)


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
