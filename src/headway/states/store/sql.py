"""States in SQL: the statements, the rows and the listener that SQLite and PostgreSQL share.

A write is one transaction: the key's row with its next version, the job's change number and one log entry. The change
number comes from the job's row, which stays locked until the commit. So numbers become visible in order, and a listener
can follow them with a cursor. The log keeps the newest entries; a listener that is further behind detects the gap and
lists again.

Every write and deletion locks the job's row first and compares the incarnation under that lock. So a write reaches the
incarnation it was meant for, or raises `JobGone`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Final, Protocol
from uuid import uuid4

from headway._sql import Database, Row, Tx, Value
from headway.core.lifecycle import Flag
from headway.core.retry import RetryPolicy
from headway.states.state import State, decoded, encoded, moment
from headway.states.store.contract import (
    Change,
    JobRecord,
    Mark,
    Relist,
    Snapshot,
    found_in_recent,
    job_gone,
    marked_deleted,
    no_such_job,
    readable,
)

#: Entries of the log that are kept for listeners that are behind or lost their connection.
LOG_LENGTH = 16_384
#: The log is pruned once per this many writes.
PRUNE_EVERY = 64
#: Log entries per read.
BATCH = 512
#: A listener answers at least this often, in seconds, even without changes.
HEARTBEAT = 3.0

_JOB: Final = "SELECT id, num_tasks, created_at, incarnation, deleted, history FROM state_jobs WHERE id = ?"
_JOBS: Final = "SELECT id, num_tasks, created_at, incarnation, deleted, history FROM state_jobs ORDER BY created_at, id"
_WRITABLE: Final = "SELECT incarnation, deleted, change, history FROM state_jobs WHERE id = ?"
# A writer holds the job's row until it commits. So a deletion that waited for it compares that writer's change number.
_DELETE: Final = """
DELETE FROM state_jobs
WHERE id = ? AND incarnation = coalesce(?, incarnation) AND change = coalesce(?, change)
"""
_STATE: Final = """
SELECT task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
FROM states WHERE job = ? AND task_id = ? AND tag = ?
"""
_STATES: Final = """
SELECT task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
FROM states WHERE job = ?
"""
#: The row that a write replaces, in the columns of `repeated`.
PREVIOUS: Final = (
    "SELECT version, timestamp, event_id, writer, recent FROM states WHERE job = ? AND task_id = ? AND tag = ?"
)
_HISTORY: Final = """
SELECT task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
FROM state_history WHERE job = ? AND task_id = ? AND tag = ? AND version > ?
ORDER BY version LIMIT ?
"""
# One statement, so that the job and its log are of the same moment. A job without new entries is one row of NULLs.
_LOG: Final = """
SELECT j.incarnation, j.deleted, j.change, l.seq,
    l.task_id, l.tag, l.status, l.message, l.timestamp, l.version, l.event_id, l.payload, l.schema_version
FROM state_jobs j
LEFT JOIN (SELECT * FROM state_log WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?) l ON l.job = j.id
WHERE j.id = ? ORDER BY l.seq
"""


class Waker(Protocol):
    """Blocks a listener until something may have changed."""

    def wait(self, seconds: float) -> list[tuple[int, State]] | None:
        """Wait until something may have changed, for at most ``seconds``.

        Return the changes with their numbers if the wake-up carried all of them, or None if the log must be read.
        """
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class LocalWaker:
    """Wakes the listener by this process's own writes, or after the heartbeat.

    A C queue instead of an Event: a signal handler that raises inside `Event.set` would leave its lock held and block
    the next writer and the listener.
    """

    def __init__(self) -> None:
        self._wakes: SimpleQueue[None] = SimpleQueue()

    def wait(self, seconds: float) -> list[tuple[int, State]] | None:
        self.woken(seconds)
        return None

    def woken(self, seconds: float) -> bool:
        """Wait for `wake`. Return whether it was called within ``seconds``."""
        try:
            self._wakes.get(timeout=seconds)
        except Empty:
            return False
        return True

    def wake(self) -> None:
        if self._wakes.empty():
            self._wakes.put(None)

    def close(self) -> None:
        self.wake()


class SqlStates(ABC):
    """A `Backend` over one SQL database. The subclasses write, detect a lost schema or file, and wake listeners."""

    kind: str
    listens_at_once = False

    def __init__(self, database: Database, stop: Flag) -> None:
        self._database = database
        self._stop = stop
        # The database retries by itself, for as long as a server restart takes. Retries here would multiply the waits:
        # a writer would learn only after 90 seconds that the server is away.
        self.write_policy = RetryPolicy(retries=0)

    @abstractmethod
    def _existing(self, job_id: str) -> AbstractContextManager[None]:
        """Raise `JobGone` for work whose tables or file no longer exist."""

    @abstractmethod
    def _announce(self, tx: Tx, job_id: str) -> None:
        """Make the listeners of other processes read the job after the commit."""

    @abstractmethod
    def _wake(self) -> None:
        """Wake this process's own listener after a commit."""

    @abstractmethod
    def _waker(self, job: JobRecord) -> Waker:
        """Open the waker of a new listener."""

    @abstractmethod
    def write(self, state: State, job: JobRecord, writer: str) -> State: ...

    # ---- the job ---------------------------------------------------------------------------------------------------

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        def work(tx: Tx) -> JobRecord:
            # Another process may create the job first, and delete it before it is read here.
            while (row := tx.one(_JOB, (job_id,))) is None:
                tx.execute(
                    "INSERT INTO state_jobs (id, num_tasks, incarnation, history, created_at) "
                    f"VALUES (?, ?, ?, ?, {tx.clock}) ON CONFLICT (id) DO NOTHING",
                    (job_id, num_tasks, uuid4().hex, int(history)),
                )
            return _record(row)

        return self._database.run(work, operation="register")

    def find(self, job_id: str) -> JobRecord | None:
        row = self._database.one(_JOB, (job_id,))
        return None if row is None else _record(row)

    def jobs(self) -> Iterator[JobRecord]:
        return map(_record, self._database.all(_JOBS))

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        def work(tx: Tx) -> None:
            row = tx.one(f"SELECT incarnation FROM state_jobs WHERE id = ?{tx.for_update}", (job_id,))
            if row is None:
                raise no_such_job(job_id) if incarnation is None else job_gone(job_id)
            if incarnation not in (None, row[0]):
                raise job_gone(job_id, remade=True)
            tx.execute("UPDATE state_jobs SET deleted = 1 WHERE id = ?", (job_id,))
            self._announce(tx, job_id)

        self._database.run(work, operation="mark_deleted")
        self._wake()

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        change = None if unless_after is None else unless_after[0]

        def work(tx: Tx) -> bool:
            deleted = tx.execute(_DELETE, (job_id, incarnation, change))  # cascades to states, log and history
            self._announce(tx, job_id)
            return deleted == 1

        deleted = self._database.run(work, operation="delete")
        self._wake()
        return deleted

    # ---- states ----------------------------------------------------------------------------------------------------

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """Return all states of one moment. The mark is the change number and the event id of that change."""
        with self._existing(job.job_id), self._database.read() as tx:
            found = tx.one("SELECT incarnation, deleted, change FROM state_jobs WHERE id = ?", (job.job_id,))
            if found is None:
                return Snapshot("")
            incarnation, deleted, change = found
            rows = tx.all(_STATES, (job.job_id,))
            mark = (change, _event_at(tx, job.job_id, change) or "")
            continuous = since is None or _continues(tx, job.job_id, change, int(since[0]), str(since[1]))
            resumes = since is not None and continuous and _resumes(tx, job.job_id, change, int(since[0]))
        states = readable(rows, lambda row: state_of(job.job_id, row), job.job_id)
        return Snapshot(incarnation, tuple(states), mark, bool(deleted), continuous, resumes)

    def read_log(self, job_id: str, after: int) -> list[Row]:
        """Return the log entries above ``after``, each with the job's incarnation, deletion mark and change number.

        Without new entries there is one row with NULLs as its entry. Without the job there is no row.
        """
        with self._existing(job_id):
            return self._database.all(_LOG, (job_id, after, BATCH, job_id))

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        rows = self._database.all(_HISTORY, (job_id, task_id, tag, after, limit))
        return readable(rows, lambda row: state_of(job_id, row), job_id)

    def listen(self, job: JobRecord) -> SqlListener:
        return SqlListener(self, job, self._waker(job))

    def close(self) -> None:
        self._stop.set()
        self._database.close()


class SqlListener:
    """Follows one job's log by its change number."""

    def __init__(self, states: SqlStates, job: JobRecord, waker: Waker) -> None:
        self._states = states
        self._job = job
        self._waker = waker
        self._deleted = job.deleted
        self._cursor, self._event = 0, ""
        self._more = False  # whether the log may hold entries after the batch read last

    @property
    def mark(self) -> Mark:
        return (self._cursor, self._event)

    def snapshot(self, since: Mark) -> Snapshot:
        snapshot = self._states.read_all(self._job, since)
        mark = since if snapshot.resumes else snapshot.mark
        if mark is not None:
            self._cursor, self._event = int(mark[0]), str(mark[1])
        self._deleted = snapshot.deleted
        self._more = snapshot.resumes
        return snapshot

    def changes(self) -> list[Change]:
        received = None if self._more else self._waker.wait(HEARTBEAT)
        if received is not None and (changes := self._following(received)) is not None:
            return changes
        return self._read_log()

    def _following(self, received: list[tuple[int, State]]) -> list[Change] | None:
        """Return the received changes if they follow the cursor without a gap. Otherwise None: the log must be read."""
        changes = []
        cursor, event = self._cursor, self._event
        for change, state in received:
            if change <= cursor:
                continue  # already read from the log
            if change != cursor + 1:
                return None
            cursor, event = change, state.event_id
            changes.append(Change(state.key, state))
        self._cursor, self._event = cursor, event
        return changes

    def _read_log(self) -> list[Change]:
        rows = self._states.read_log(self._job.job_id, self._cursor)
        if not rows or rows[0][0] != self._job.incarnation or bool(rows[0][1]) != self._deleted:
            raise Relist
        if rows[0][2] < self._cursor:
            raise Relist  # the store was restored to an earlier moment
        entries = [row[3:] for row in rows if row[3] is not None]
        if entries and entries[0][0] != self._cursor + 1:
            raise Relist  # the log was pruned past the cursor
        if entries:
            self._cursor, self._event = entries[-1][0], entries[-1][7]
        self._more = len(entries) == BATCH
        states = readable(entries, lambda row: state_of(self._job.job_id, row[1:]), self._job.job_id)
        return [Change(state.key, state) for state in states]

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()


# ------------------------------------------------------------------------------------------------------------
# Within a transaction


def writable(tx: Tx, job: JobRecord) -> tuple[int, int]:
    """Return the change number and history flag of a job. Raises if it was deleted, marked or re-created."""
    row = tx.one(_WRITABLE, (job.job_id,))
    if row is None or row[0] != job.incarnation:
        raise job_gone(job.job_id, remade=row is not None)
    if row[1]:
        raise marked_deleted(job.job_id)
    return row[2], row[3]


def repeated(tx: Tx, state: State, previous: Row) -> State | None:
    """Return the result of the first write with the same event id, or None if it is new.

    If another writer has written since, the result has the first write's version and time.
    """
    if previous[2] == state.event_id:
        row = tx.one(_STATE, (state.job_id, *state.key))
        return None if row is None else state_of(state.job_id, row)
    if (found := found_in_recent(previous[4], state.event_id)) is not None:
        return replace(state, version=found[0], timestamp=moment(found[1]))
    return None


def prune_due(change: int) -> bool:
    """Return whether the write with this change number prunes the log."""
    return change % PRUNE_EVERY == 0


def prune_log(tx: Tx, job_id: str, change: int) -> None:
    """Delete the log entries that are older than the newest `LOG_LENGTH`."""
    tx.execute("DELETE FROM state_log WHERE job = ? AND seq <= ?", (job_id, change - LOG_LENGTH))


def _event_at(tx: Tx, job_id: str, change: int) -> str | None:
    row = tx.one("SELECT event_id FROM state_log WHERE job = ? AND seq = ?", (job_id, change))
    return None if row is None else str(row[0])


def _continues(tx: Tx, job_id: str, now: int, heard: int, event: str) -> bool:
    """Return whether the store's log agrees that ``event`` was change ``heard``."""
    if heard == 0:
        return True
    if now < heard:
        return False
    if (found := _event_at(tx, job_id, heard)) is not None:
        return found == event
    oldest = tx.one("SELECT min(seq) FROM state_log WHERE job = ?", (job_id,))
    return oldest is not None and oldest[0] is not None and oldest[0] > heard  # pruned since


def _resumes(tx: Tx, job_id: str, now: int, heard: int) -> bool:
    """Return whether the log holds every change after ``heard``."""
    return now == heard or _event_at(tx, job_id, heard + 1) is not None


# ------------------------------------------------------------------------------------------------------------
# Rows


def values(state: State) -> tuple[Value, ...]:
    """Return task, tag, status, message, event id, payload and schema version as column values."""
    payload = None if state.payload is None else encoded(state.payload)
    return (state.task_id, state.tag, state.status, state.message, state.event_id, payload, state.schema_version)


def state_of(job_id: str, row: Row) -> State:
    """Build a state from a row, in the column order of the queries above."""
    task_id, tag, status, message, timestamp, version, event_id, payload, schema_version = row
    return State(
        job_id, task_id, tag, status, message, moment(timestamp), version, event_id, decoded(payload), schema_version
    )


def _record(row: Row) -> JobRecord:
    job_id, num_tasks, created_at, incarnation, deleted, history = row
    return JobRecord(job_id, num_tasks, moment(created_at), incarnation, bool(deleted), bool(history))
