"""The tables of jobs, their runs, and the requests to a run. `JobRow` has the counters of a job.

A function with a ``tx`` runs in the caller's transaction.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from headway._lease import Owner
from headway._sql import Database, Row, Tx
from headway.core.retry import RetryPolicy
from headway.errors import NotFound
from headway.ledger.store.contract import item_store
from headway.ledger.values import Control

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
    end_lost_runs(tx, job, now)
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


# ---- runs ----------------------------------------------------------------------------------------------------------


def insert_run(tx: Tx, job: int, *, token: int, owner: Owner, settings: dict[str, Any], kept: int, now: float) -> int:
    """Insert a run, and return its number."""
    row = tx.one("SELECT coalesce(max(no), 0) + 1 FROM runs WHERE job = ?", (job,))
    assert row is not None
    tx.execute(
        "INSERT INTO runs (job, no, token, host, pid, settings, kept, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (job, row[0], token, owner.host, owner.pid, json.dumps(settings), kept, now),
    )
    return int(row[0])


def last_run(tx: Tx, job: int) -> Row | None:
    """Return (number, host, pid, settings, outcome) of a job's last run."""
    return tx.one("SELECT no, host, pid, settings, outcome FROM runs WHERE job = ? ORDER BY no DESC LIMIT 1", (job,))


def run_settings(source: Database | Tx, job: int, run: int) -> dict[str, Any]:
    """Return the settings of a run, empty if there is no such run."""
    row = source.one("SELECT settings FROM runs WHERE job = ? AND no = ?", (job, run))
    found: dict[str, Any] = {} if row is None else json.loads(row[0])
    return found


def set_run_settings(tx: Tx, job: int, run: int, known: dict[str, Any]) -> None:
    """Replace the settings of a run."""
    tx.execute("UPDATE runs SET settings = ? WHERE job = ? AND no = ?", (json.dumps(known), job, run))


def end_run(tx: Tx, job: int, run: int, outcome: str, now: float) -> None:
    """Set the outcome of a run. It never ends before its start, even if the clock was set back."""
    tx.execute(
        "UPDATE runs SET outcome = ?, ended_at = CASE WHEN started_at > ? THEN started_at ELSE ? END "
        "WHERE job = ? AND no = ?",
        (outcome, now, now, job, run),
    )


def end_lost_runs(tx: Tx, job: int, now: float) -> None:
    """Set the outcome of runs that did not end to lost, at the time of their last record."""
    tx.execute(
        "UPDATE runs SET outcome = 'lost', ended_at = "
        "(SELECT CASE WHEN updated_at < started_at THEN started_at WHEN updated_at > ? THEN ? ELSE updated_at END "
        "FROM jobs WHERE no = ?) WHERE job = ? AND outcome IS NULL",
        (now, now, job, job),
    )


def reopen_run(tx: Tx, job: int, run: int, token: int) -> None:
    """Continue an ended run under a new token, without the requests to it."""
    tx.execute("UPDATE runs SET token = ?, outcome = NULL, ended_at = NULL WHERE job = ? AND no = ?", (token, job, run))
    tx.execute("DELETE FROM controls WHERE job = ? AND run = ?", (job, run))


def lower_kept(tx: Tx, job: int, done: int) -> None:
    """Lower the open run's count of items done before it, after items were removed or replaced."""
    tx.execute("UPDATE runs SET kept = ? WHERE job = ? AND outcome IS NULL AND kept > ?", (done, job, done))


# ---- requests to a run ---------------------------------------------------------------------------------------------


def control(source: Database | Tx, job: int, run: int) -> Control:
    """Return the current requests to a run, and the wait of its job."""
    row = source.one(
        "SELECT c.version, c.paused, c.stopping, c.workers, c.actor, j.wait_since, j.wait_until, j.wait_reason "
        "FROM jobs j LEFT JOIN controls c ON c.job = j.no AND c.run = ? WHERE j.no = ?",
        (run, job),
    )
    if row is None:
        return Control()
    version, paused, stopping, workers, actor, since, until, reason = row
    found = Control() if version is None else Control(version, bool(paused), stopping, workers, actor)
    if until is None:
        return found
    now = source.now()
    return found._replace(wait=until - now, wait_reason=reason or "") if waits(since, until, now) else found


def waits(since: float, until: float, now: float) -> bool:
    """Return whether a job's wait still holds. It does not if it began in the future: the clock was set back."""
    return since <= now < until


def wait(tx: Tx, job: int, now: float, until: float, reason: str) -> None:
    """Let nothing of the job start before ``until``. A longer wait that still holds stays as it is."""
    tx.execute(
        "UPDATE jobs SET wait_since = ?, wait_until = ?, wait_reason = ? "
        "WHERE no = ? AND (wait_until IS NULL OR wait_until < ? OR wait_since > ?)",
        (now, until, reason, job, until, now),
    )


def put_control(tx: Tx, job: int, run: int, wanted: Control, now: float) -> None:
    """Replace the requests to a run. Requests to an earlier run are deleted."""
    tx.execute(
        "INSERT INTO controls (job, run, version, paused, stopping, workers, actor, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (job) DO UPDATE SET run = excluded.run, version = excluded.version, paused = excluded.paused, "
        "stopping = excluded.stopping, workers = excluded.workers, actor = excluded.actor, at = excluded.at",
        (job, run, wanted.version, int(wanted.paused), wanted.stopping, wanted.workers, wanted.actor, now),
    )
