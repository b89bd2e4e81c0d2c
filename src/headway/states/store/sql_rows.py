"""Convert states to and from SQL rows and notifications, and the queries of their transactions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from headway._sql import Row, Tx, Value
from headway.states.state import State, decoded, encoded, moment
from headway.states.store.contract import JobRecord, found_in_recent, job_gone, marked_deleted

#: Maximum length of a notification. PostgreSQL allows 8,000 bytes; larger states are read from the log.
NOTIFIED_LIMIT = 7_000

STATE = "task_id, tag, status, message, timestamp, version, event_id, payload, schema_version"

# ------------------------------------------------------------------------------------------------------------
# Queries within a transaction


def locked(tx: Tx, job_id: str) -> str | None:
    """Lock a job's row until the transaction ends. Return the job's incarnation, or None."""
    lock = " FOR UPDATE" if tx.engine == "postgresql" else ""  # SQLite has only one writer
    row = tx.one(f"SELECT incarnation FROM state_jobs WHERE id = ?{lock}", (job_id,))
    return None if row is None else str(row[0])


def writable(tx: Tx, job: JobRecord) -> tuple[int, int]:
    """Return the change number and history flag of a job. Raises if it was deleted, marked or re-created."""
    row = tx.one("SELECT incarnation, deleted, change, history FROM state_jobs WHERE id = ?", (job.job_id,))
    if row is None or row[0] != job.incarnation:
        raise job_gone(job.job_id, remade=row is not None)
    if row[1]:
        raise marked_deleted(job.job_id)
    return row[2], row[3]


def repeated(tx: Tx, state: State, before: Row) -> State | None:
    """Return the result of the first write with the same event id, or None if it is new.

    If another writer has written since, the result has the first write's version and time.
    """
    if before[2] == state.event_id:
        row = tx.one(
            f"SELECT {STATE} FROM states WHERE job = ? AND task_id = ? AND tag = ?", (state.job_id, *state.key)
        )
        return None if row is None else state_of(state.job_id, row)
    if (found := found_in_recent(before[4], state.event_id)) is not None:
        return replace(state, version=found[0], timestamp=moment(found[1]))
    return None


def event_at(tx: Tx, job_id: str, change: int) -> str | None:
    """Return the event id of a change in the log, or None."""
    row = tx.one("SELECT event_id FROM state_log WHERE job = ? AND seq = ?", (job_id, change))
    return None if row is None else str(row[0])


def continues(tx: Tx, job_id: str, now: int, heard: int, event: str) -> bool:
    """Return whether the store's log agrees that ``event`` was change ``heard``."""
    if heard == 0:
        return True
    if now < heard:
        return False
    if (found := event_at(tx, job_id, heard)) is not None:
        return found == event
    oldest = tx.one("SELECT min(seq) FROM state_log WHERE job = ?", (job_id,))
    return oldest is not None and oldest[0] is not None and oldest[0] > heard  # pruned since


def resumes(tx: Tx, job_id: str, now: int, heard: int) -> bool:
    """Return whether the log holds every change after ``heard``."""
    return now == heard or event_at(tx, job_id, heard + 1) is not None


def notify(tx: Tx, job_id: str) -> None:
    """Wake PostgreSQL listeners without a state, so that they read the tables."""
    if tx.engine == "postgresql":
        tx.execute("SELECT pg_notify(?, '')", (channel(job_id),))


def notification(state: State, incarnation: str) -> str:
    """Return the notification text of a state without version and time, or "" if it is too long."""
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([incarnation, state.task_id, state.tag, state.status, state.message, state.event_id,
                        state.schema_version])  # fmt: skip
    text = f"{facts[:-1]}, {payload}]"
    return text if len(text) <= NOTIFIED_LIMIT else ""


def notified(job: JobRecord, text: str) -> tuple[int, State] | None:
    """Parse a notification into change number and state. None if it has no state or another incarnation."""
    try:
        change, version, timestamp, facts = text.split(" ", 3)
        incarnation, task_id, tag, status, message, event_id, schema_version, payload, *_ = json.loads(facts)
        if incarnation != job.incarnation:
            return None
        return int(change), State(
            job.job_id, task_id, tag, status, message, moment(float(timestamp)), int(version), event_id, payload,
            schema_version,
        )  # fmt: skip
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------------------------
# Rows

JOBS = "SELECT id, num_tasks, created_at, incarnation, deleted, history FROM state_jobs"


def channel(job_id: str) -> str:
    """Return the job's channel name: a hash, because PostgreSQL limits names to 63 characters."""
    return "headway_states_" + hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()


def values(state: State) -> tuple[Value, ...]:
    """Return the column values of a state, without time and version."""
    payload = None if state.payload is None else encoded(state.payload)
    return (
        state.task_id,
        state.tag,
        state.status,
        state.message,
        state.event_id,
        payload,
        state.schema_version,
    )


def state_of(job_id: str, row: Row) -> State:
    """Build a state from a row of the `STATE` columns."""
    task_id, tag, status, message, timestamp, version, event_id, payload, schema_version = row
    return State(
        job_id,
        task_id,
        tag,
        status,
        message,
        moment(timestamp),
        version,
        event_id,
        decoded(payload),
        schema_version,
    )


def record_of(row: Row) -> JobRecord:
    """Build a job record from a row of the `JOBS` query."""
    job_id, num_tasks, created_at, incarnation, deleted, history = row
    return JobRecord(job_id, num_tasks, moment(created_at), incarnation, bool(deleted), bool(history))
