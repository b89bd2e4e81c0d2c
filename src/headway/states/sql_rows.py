"""Rows of states and what they mean: what a transaction finds in them, and what a notification carries."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

from headway._sql import Row, Tx, Value
from headway.states.state import State, decoded, encoded, moment
from headway.states.store import JobRecord, found_in_recent, job_gone, marked_deleted

#: PostgreSQL takes 8,000 bytes with a notification; what is larger is read from the log.
NOTIFIED_LIMIT = 7_000

STATE = "task_id, tag, status, message, timestamp, version, event_id, payload, schema_version"

# ------------------------------------------------------------------------------------------------------------
# What a transaction finds


def locked(tx: Tx, job_id: str) -> str | None:
    """The incarnation of a job, whose row stays ours until the transaction ends."""
    lock = " FOR UPDATE" if tx.engine == "postgresql" else ""  # in SQLite there is no other writer
    row = tx.one(f"SELECT incarnation FROM state_jobs WHERE id = ?{lock}", (job_id,))
    return None if row is None else str(row[0])


def writable(tx: Tx, job: JobRecord) -> tuple[int, int]:
    """The change number of the job and whether it keeps history, if it is the one that was opened."""
    row = tx.one("SELECT incarnation, deleted, change, history FROM state_jobs WHERE id = ?", (job.job_id,))
    if row is None or row[0] != job.incarnation:
        raise job_gone(job.job_id, remade=row is not None)
    if row[1]:
        raise marked_deleted(job.job_id)
    return row[2], row[3]


def repeated(tx: Tx, state: State, before: Row) -> State | None:
    """What a write of the same event gave the first time, if it was stored: as it is stored, or as it was sent if
    somebody else wrote since."""
    if before[2] == state.event_id:
        row = tx.one(
            f"SELECT {STATE} FROM states WHERE job = ? AND task_id = ? AND tag = ?", (state.job_id, *state.key)
        )
        return None if row is None else state_of(state.job_id, row)
    if (found := found_in_recent(before[4], state.event_id)) is not None:
        return replace(state, version=found[0], timestamp=moment(found[1]))
    return None


def event_at(tx: Tx, job_id: str, change: int) -> str | None:
    row = tx.one("SELECT event_id FROM state_log WHERE job = ? AND seq = ?", (job_id, change))
    return None if row is None else str(row[0])


def continues(tx: Tx, job_id: str, now: int, heard: int, event: str) -> bool:
    """Whether the store's past is the one in which ``event`` was change number ``heard``."""
    if heard == 0:
        return True
    if now < heard:
        return False
    if (found := event_at(tx, job_id, heard)) is not None:
        return found == event
    oldest = tx.one("SELECT min(seq) FROM state_log WHERE job = ?", (job_id,))
    return oldest is not None and oldest[0] is not None and oldest[0] > heard  # it was cut off since


def resumes(tx: Tx, job_id: str, now: int, heard: int) -> bool:
    """Return whether the log holds every change after ``heard``."""
    return now == heard or event_at(tx, job_id, heard + 1) is not None


def notify(tx: Tx, job_id: str) -> None:
    if tx.engine == "postgresql":
        tx.execute("SELECT pg_notify(?, '')", (channel(job_id),))


def notification(state: State, incarnation: str) -> str:
    """What a notification carries besides the numbers; empty if it is too much."""
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([incarnation, state.task_id, state.tag, state.status, state.message, state.event_id,
                        state.schema_version])  # fmt: skip
    text = f"{facts[:-1]}, {payload}]"
    return text if len(text) <= NOTIFIED_LIMIT else ""


def notified(job: JobRecord, text: str) -> tuple[int, State] | None:
    """The change number and the state in a notification; None if it has none, or another incarnation's."""
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
    """One per job, so that a process is woken by its own job only. A channel's name has 63 characters at most."""
    return "headway_states_" + hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()


def values(state: State) -> tuple[Value, ...]:
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
    job_id, num_tasks, created_at, incarnation, deleted, history = row
    return JobRecord(job_id, num_tasks, moment(created_at), incarnation, bool(deleted), bool(history))
