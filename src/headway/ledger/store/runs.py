"""The tables ``runs`` and ``controls``: executions of a job, and the requests to the current one.

Every function runs in the caller's transaction.
"""

from __future__ import annotations

import json
from typing import Any

from headway._lease import Owner
from headway._sql import Database, Row, Tx
from headway.ledger.values import Control


def insert(tx: Tx, job: int, *, token: int, owner: Owner, settings: dict[str, Any], kept: int, now: float) -> int:
    """Insert a run, and return its number."""
    row = tx.one("SELECT coalesce(max(no), 0) + 1 FROM runs WHERE job = ?", (job,))
    assert row is not None
    tx.execute(
        "INSERT INTO runs (job, no, token, host, pid, settings, kept, started_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        (job, row[0], token, owner.host, owner.pid, json.dumps(settings), kept, now),
    )
    return int(row[0])


def last(tx: Tx, job: int) -> Row | None:
    """Return (number, host, pid, settings, outcome) of a job's last run."""
    return tx.one("SELECT no, host, pid, settings, outcome FROM runs WHERE job = ? ORDER BY no DESC LIMIT 1", (job,))


def settings(source: Database | Tx, job: int, run: int) -> dict[str, Any]:
    """Return the settings of a run, empty if there is no such run."""
    row = source.one("SELECT settings FROM runs WHERE job = ? AND no = ?", (job, run))
    found: dict[str, Any] = {} if row is None else json.loads(row[0])
    return found


def set_settings(tx: Tx, job: int, run: int, known: dict[str, Any]) -> None:
    """Replace the settings of a run."""
    tx.execute("UPDATE runs SET settings = ? WHERE job = ? AND no = ?", (json.dumps(known), job, run))


def end(tx: Tx, job: int, run: int, outcome: str, now: float) -> None:
    """Set the outcome of a run. It never ends before its start, even if the clock was set back."""
    tx.execute(
        "UPDATE runs SET outcome = ?, ended_at = CASE WHEN started_at > ? THEN started_at ELSE ? END "
        "WHERE job = ? AND no = ?",
        (outcome, now, now, job, run),
    )


def end_lost(tx: Tx, job: int, now: float) -> None:
    """Set the outcome of runs that did not end to lost, at the time of their last record."""
    tx.execute(
        "UPDATE runs SET outcome = 'lost', ended_at = "
        "(SELECT CASE WHEN updated_at < started_at THEN started_at WHEN updated_at > ? THEN ? ELSE updated_at END "
        "FROM jobs WHERE no = ?) WHERE job = ? AND outcome IS NULL",
        (now, now, job, job),
    )


def reopen(tx: Tx, job: int, run: int, token: int) -> None:
    """Continue an ended run under a new token, without the requests to it."""
    tx.execute("UPDATE runs SET token = ?, outcome = NULL, ended_at = NULL WHERE job = ? AND no = ?", (token, job, run))
    tx.execute("DELETE FROM controls WHERE job = ? AND run = ?", (job, run))


def lower_kept(tx: Tx, job: int, done: int) -> None:
    """Lower the open run's count of items done before it, after items were removed or replaced."""
    tx.execute("UPDATE runs SET kept = ? WHERE job = ? AND outcome IS NULL AND kept > ?", (done, job, done))


def control(source: Database | Tx, job: int, run: int) -> Control:
    """Return the current requests to a run."""
    row = source.one(
        "SELECT version, paused, stopping, workers, actor FROM controls WHERE job = ? AND run = ?", (job, run)
    )
    if row is None:
        return Control()
    version, paused, stopping, workers, actor = row
    return Control(version, bool(paused), stopping, workers, actor)


def put_control(tx: Tx, job: int, run: int, wanted: Control, now: float) -> None:
    """Replace the requests to a run. Requests to an earlier run are deleted."""
    tx.execute(
        "INSERT INTO controls (job, run, version, paused, stopping, workers, actor, at) VALUES (?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (job) DO UPDATE SET run = excluded.run, version = excluded.version, paused = excluded.paused, "
        "stopping = excluded.stopping, workers = excluded.workers, actor = excluded.actor, at = excluded.at",
        (job, run, wanted.version, int(wanted.paused), wanted.stopping, wanted.workers, wanted.actor, now),
    )
