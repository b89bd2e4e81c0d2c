"""The table ``jobs``: finding, creating, archiving and deleting jobs. `JobRow` has the counters.

A function with a ``tx`` runs in the caller's transaction.
"""

from __future__ import annotations

from datetime import UTC, datetime

from headway._sql import Database, Row, Tx
from headway.core.retry import RetryPolicy
from headway.errors import NotFound
from headway.ledger.store import runs
from headway.ledger.store.contract import item_store

#: The jobs that `Ledger.purge` deletes. Checked again in the deleting transaction, because jobs change meanwhile.
_OLD = "(finished_at IS NOT NULL OR archived = 1) AND updated_at < ?"


def number_of(source: Database | Tx, id: str) -> int | None:
    """Return the number of a job, or None if there is no such job."""
    row = source.one("SELECT no FROM jobs WHERE id = ?", (id,))
    return None if row is None else int(row[0])


def create(
    tx: Tx, id: str, *, function: str, source: str, keyed_by: str | None, max_retries: int, policy: RetryPolicy
) -> int:
    """Insert a job, unless its id exists. Return its number."""
    now = tx.now()
    item_store(tx.engine).insert_job(
        tx,
        (id, function, source, keyed_by, max_retries, now, now, policy.base, policy.factor, policy.cap, policy.jitter),
    )
    no = number_of(tx, id)
    assert no is not None
    return no


def describe(
    tx: Tx, job: int, *, function: str, source: str, command: str, keyed_by: str | None, max_retries: int
) -> None:
    """Store how a job is run."""
    tx.execute(
        "UPDATE jobs SET function = ?, source = ?, command = ?, keyed_by = ?, max_retries = ? WHERE no = ?",
        (function, source, command, keyed_by, max_retries, job),
    )


def set_digest(tx: Tx, job: int, digest: str | None) -> None:
    """Store the digest of a job's whole input."""
    tx.execute("UPDATE jobs SET digest = ? WHERE no = ?", (digest, job))


def rewrite_outputs(tx: Tx, job: int) -> None:
    """Rewrite the result files at the next run."""
    tx.execute("UPDATE outputs SET seq = 0, size = 0 WHERE job = ?", (job,))


def lock_holder(tx: Tx, job: int) -> Row:
    """Return (id, holder, lease_until, command) of a job, and lock it until the transaction ends. Raises `NotFound`."""
    row = tx.one(f"SELECT id, holder, lease_until, command FROM jobs WHERE no = ?{tx.for_update}", (job,))
    if row is None:
        raise NotFound("The job was deleted.")
    return row


def set_holder(tx: Tx, job: int, token: int, holder: str, lease_until: float) -> None:
    """Set the holder of a job, with a new token or its current one."""
    tx.execute("UPDATE jobs SET token = ?, holder = ?, lease_until = ? WHERE no = ?", (token, holder, lease_until, job))


def free(tx: Tx, job: int, token: int) -> None:
    """Remove the holder of a job, unless the job has another token by now."""
    tx.execute("UPDATE jobs SET holder = NULL, lease_until = NULL WHERE no = ? AND token = ?", (job, token))


def archive(tx: Tx, job: int, id: str, now: float) -> str:
    """Archive the job under a new id, and return it. A new token fences the former holder."""
    aside = f"{id[:100]}.{datetime.fromtimestamp(now, UTC):%Y%m%dT%H%M%S}.{job}"
    runs.end_lost(tx, job, now)
    tx.execute(
        "UPDATE jobs SET id = ?, archived = 1, updated_at = ?, token = token + 1, holder = NULL, lease_until = NULL "
        "WHERE no = ?",
        (aside, now, job),
    )
    return aside


def old(database: Database, before: float) -> list[Row]:
    """Return (number, id) of the finished and archived jobs unchanged since ``before``."""
    return database.all(f"SELECT no, id FROM jobs WHERE {_OLD} ORDER BY no", (before,))


def is_old(tx: Tx, job: int, before: float) -> bool:
    """Return whether a job is finished or archived, and unchanged since ``before``."""
    return tx.one(f"SELECT 1 FROM jobs WHERE no = ? AND {_OLD}", (job, before)) is not None


def delete(tx: Tx, job: int) -> None:
    """Delete a job's row. Its items must be deleted already."""
    tx.execute("DELETE FROM jobs WHERE no = ?", (job,))
