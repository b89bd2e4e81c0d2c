"""The files that jobs write results to: which job a file belongs to, and up to where it is written."""

from __future__ import annotations

from headway._lease import has_ended
from headway._sql import Database, Tx
from headway.ledger.job import Job


def owners(database: Database, path: str) -> list[tuple[str, bool]]:
    """Return (job id, whether archived) of every job that writes the file."""
    rows = database.all("SELECT j.id, j.archived FROM outputs o JOIN jobs j ON j.no = o.job WHERE o.path = ?", (path,))
    return [(id, bool(archived)) for id, archived in rows]


def live_writers(database: Database, path: str) -> list[int]:
    """Return the numbers of the jobs that write the file and are being run."""
    rows = database.all(
        "SELECT o.job, j.holder, j.lease_until FROM outputs o JOIN jobs j ON j.no = o.job WHERE o.path = ?", (path,)
    )
    now = database.now()
    return [job for job, holder, until in rows if holder is not None and not has_ended(holder, until, now)]


def has_any(job: Job) -> bool:
    """Return whether the job has ever written a file."""
    return job.database.one("SELECT 1 FROM outputs WHERE job = ? LIMIT 1", (job.no,)) is not None


def add(job: Job, path: str) -> None:
    """Record that the file belongs to the job."""
    job.database.run(
        lambda tx: tx.execute(
            "INSERT INTO outputs (job, path, seq, size) VALUES (?, ?, 0, 0) ON CONFLICT (job, path) DO NOTHING",
            (job.no, path),
        ),
        operation="output",
    )


def position(job: Job, path: str) -> tuple[int, int] | None:
    """Return (sequence number of the last result written, size of the file), or None for another job's file."""
    row = job.database.one("SELECT seq, size FROM outputs WHERE job = ? AND path = ?", (job.no, path))
    return None if row is None else (row[0], row[1])


def put_position(job: Job, path: str, seq: int, size: int) -> None:
    """Record how far the file is written. Raises `StaleClaim` if another process has taken over the job."""

    def work(tx: Tx) -> None:
        job.open(tx)
        tx.execute(
            "INSERT INTO outputs (job, path, seq, size) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (job, path) DO UPDATE SET seq = excluded.seq, size = excluded.size",
            (job.no, path, seq, size),
        )

    job.database.run(work, operation="output")


def check_hold(job: Job) -> None:
    """Raise `StaleClaim` if another process has taken over the job."""
    job.database.run(job.open, operation="output")
