"""States in SQLite or PostgreSQL.

A write is one transaction: the key's row with its next version, the job's change number, an entry in the log. The
change number is taken from the job's row, whose lock is held until the commit, so that numbers become visible in order
and a reader may follow them with a cursor. The log keeps the newest entries (all of them with ``history``); a reader
that fell further behind notices the gap and lists again.

What wakes a reader: PostgreSQL notifies; SQLite's ``data_version`` is looked at, a few microseconds every few
milliseconds. Either only says *look*; the data is read from the tables.
"""

from __future__ import annotations

import hashlib
import os
import select
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Protocol
from uuid import uuid4

from headway._sql import Database, Row, Tx, Value, connect
from headway._sql.sqlite import SQLite
from headway.errors import Unavailable
from headway.retry import RetryPolicy
from headway.states.state import State, decoded, encoded, moment
from headway.states.store import Change, JobRecord, Relist, Snapshot, marked_deleted, no_such_job

#: Entries of the log kept for readers that are a little behind.
LOG_KEPT = 1_024
#: The log is cut once in so many writes.
CUT_EVERY = 64
#: Entries read at once.
BATCH = 512
#: A listener answers at least this often, also when there is nothing to tell; PostgreSQL is then asked for a sign
#: of life, and has this long to give it.
HEARTBEAT, PING_SECONDS = 3.0, 4.0

#: Between two looks at a SQLite file: while it changes, and after a second without a change.
BUSY_SECONDS, IDLE_SECONDS = 0.004, 0.03

_NOW = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
}
_STATE = "task_id, tag, status, message, timestamp, version, event_id, payload, schema_version"
# The WHERE of the conflict makes a repeated event id touch nothing; the FROM, a job that is not there.
_UPSERT = """
INSERT INTO states (job, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version)
SELECT id, ?, ?, ?, ?, {now}, 1, ?, ?, ? FROM state_jobs WHERE id = ? AND deleted = 0
ON CONFLICT (job, task_id, tag) DO UPDATE SET
    status = excluded.status, message = excluded.message, timestamp = excluded.timestamp, version = states.version + 1,
    event_id = excluded.event_id, payload = excluded.payload, schema_version = excluded.schema_version
WHERE states.event_id <> excluded.event_id
RETURNING version, timestamp
"""
# The same, the log and the notification in one round trip. The job's row is locked after the key's.
_POSTGRES_WRITE = f"""
WITH stored AS ({_UPSERT.format(now=_NOW["postgresql"])}),
job AS (
    UPDATE state_jobs SET change = change + 1 WHERE id = ? AND EXISTS (SELECT 1 FROM stored) RETURNING change, history
),
logged AS (
    INSERT INTO state_log
        (job, seq, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version)
    SELECT ?, job.change, ?, ?, ?, ?, stored.timestamp, stored.version, ?, ?, ? FROM stored, job
    RETURNING version, timestamp
)
SELECT logged.version, logged.timestamp, job.change, job.history, pg_notify(?, '') FROM logged, job
"""


class SqlStates:
    """A `Backend` over one database."""

    listens_at_once = False

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._stop = threading.Event()
        self._database = connect(url, create=create, stop=self._stop)
        self.kind: str = self._database.engine
        # SQLite's own transactions are tried again below; a restart of PostgreSQL takes seconds.
        postgresql = RetryPolicy(retries=7, base=0.1, cap=4.0, jitter=0.2)
        self.write_policy = postgresql if self.kind == "postgresql" else RetryPolicy(retries=0)
        self._now = _NOW[self._database.engine]
        self._local_wakers: list[_Waker] = []  # woken by our own writes; PostgreSQL's notification wakes by itself

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        def work(tx: Tx) -> JobRecord:
            tx.execute(
                "INSERT INTO state_jobs (id, num_tasks, incarnation, history, created_at) "
                f"VALUES (?, ?, ?, ?, {self._now}) ON CONFLICT (id) DO NOTHING",
                (job_id, num_tasks, uuid4().hex, int(history)),
            )
            row = tx.one(f"{_JOBS} WHERE id = ?", (job_id,))
            assert row is not None, "it was there or was made above"
            return _record(row)

        return self._database.run(work, operation="register")

    def find(self, job_id: str) -> JobRecord | None:
        row = self._database.one(f"{_JOBS} WHERE id = ?", (job_id,))
        return None if row is None else _record(row)

    def jobs(self) -> Iterator[JobRecord]:
        return map(_record, self._database.all(f"{_JOBS} ORDER BY created_at, id"))

    def write(self, state: State) -> State:
        if self.kind == "postgresql":
            return self._write_in_postgresql(state)
        stored = self._database.run(self._write_in_sqlite(state), operation="set_state")
        for waker in self._local_wakers:
            waker.wake()
        return stored

    def _write_in_sqlite(self, state: State) -> Callable[[Tx], State]:
        values = _values(state)
        upsert = _UPSERT.format(now=self._now)

        def work(tx: Tx) -> State:
            row = tx.one(upsert, (*values, state.job_id))
            if row is None:
                return _stored_or_refused(tx, state)
            version, timestamp = row
            change, history = tx.one(
                "UPDATE state_jobs SET change = change + 1 WHERE id = ? RETURNING change, history",
                (state.job_id,),
            ) or (0, 0)
            tx.execute(
                "INSERT INTO state_log (job, seq, task_id, tag, status, message, event_id, payload, schema_version, "
                "timestamp, version) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (state.job_id, change, *values, timestamp, version),
            )
            _cut(tx, state.job_id, change, history)
            return replace(state, version=version, timestamp=moment(timestamp))

        return work

    def _write_in_postgresql(self, state: State) -> State:
        """One statement is one transaction, committed when its answer comes: a third of the round trips."""
        values = _values(state)
        parameters = (*values, state.job_id, state.job_id, state.job_id, *values, _channel(state.job_id))
        row = self._database.one(_POSTGRES_WRITE, parameters)
        if row is None:
            with self._database.read() as tx:
                return _stored_or_refused(tx, state)
        version, timestamp, change, history, _ = row
        if change % CUT_EVERY == 0:
            self._database.run(lambda tx: _cut(tx, state.job_id, change, history), operation="cut")
        return replace(state, version=version, timestamp=moment(timestamp))

    def read_all(self, job_id: str) -> Snapshot:
        return self.read_at(job_id)[0]

    def read_at(self, job_id: str) -> tuple[Snapshot, int]:
        """Everything of one moment, and that moment's change number."""
        with self._database.read() as tx:
            job = tx.one("SELECT incarnation, change FROM state_jobs WHERE id = ?", (job_id,))
            if job is None:
                return Snapshot("", ()), 0
            rows = tx.all(f"SELECT {_STATE} FROM states WHERE job = ?", (job_id,))
        return Snapshot(job[0], tuple(_state(job_id, row) for row in rows)), int(job[1])

    def read_log(self, job_id: str, after: int) -> list[Row]:
        """The job's incarnation with each entry of its log after ``after``; one row without an entry if there is none,
        no row without the job."""
        return self._database.all(
            f"SELECT j.incarnation, l.seq, {_of('l')} FROM state_jobs j "
            "LEFT JOIN state_log l ON l.job = j.id AND l.seq > ? WHERE j.id = ? ORDER BY l.seq LIMIT ?",
            (after, job_id, BATCH),
        )

    def read_history(self, job_id: str, task_id: int, tag: str) -> list[State]:
        rows = self._database.all(
            f"SELECT {_STATE} FROM state_log WHERE job = ? AND task_id = ? AND tag = ? ORDER BY version",
            (job_id, task_id, tag),
        )
        return [_state(job_id, row) for row in rows]

    def mark_deleted(self, job_id: str) -> None:
        touched = self._database.run(
            lambda tx: tx.execute("UPDATE state_jobs SET deleted = 1 WHERE id = ?", (job_id,)),
            operation="mark_deleted",
        )
        if not touched:
            raise no_such_job(job_id)

    def delete(self, job_id: str) -> bool:
        def work(tx: Tx) -> bool:
            # States first: the order in which a writer locks.
            tx.execute("DELETE FROM states WHERE job = ?", (job_id,))
            gone = tx.execute("DELETE FROM state_jobs WHERE id = ?", (job_id,)) > 0
            if tx.engine == "postgresql":
                tx.execute("SELECT pg_notify(?, '')", (_channel(job_id),))
            return gone

        return self._database.run(work, operation="delete")

    def listen(self, job_id: str) -> SqlListener:
        if isinstance(self._database, SQLite):
            waker: _Waker = _LocalWaker() if self._database.path is None else _DataVersionWaker(self._database)
            self._local_wakers = [waker]
        else:
            waker = _NotificationWaker(self._database, job_id)
        return SqlListener(self, job_id, waker)

    def close(self) -> None:
        self._stop.set()
        self._database.close()


class SqlListener:
    """Follows one job's log by its change number."""

    def __init__(self, states: SqlStates, job_id: str, waker: _Waker) -> None:
        self._states = states
        self._job_id = job_id
        self._waker = waker
        self._incarnation = ""
        self._cursor = 0
        self._more = False

    def snapshot(self) -> Snapshot:
        snapshot, self._cursor = self._states.read_at(self._job_id)
        self._incarnation = snapshot.incarnation
        return snapshot

    def changes(self) -> list[Change]:
        if not self._more:
            self._waker.wait(HEARTBEAT)
        rows = self._states.read_log(self._job_id, self._cursor)
        if (rows[0][0] if rows else "") != self._incarnation:
            raise Relist
        entries = [row for row in rows if row[1] is not None]
        if entries and entries[0][1] != self._cursor + 1:
            raise Relist  # the log was cut between where we are and where it begins
        if entries:
            self._cursor = entries[-1][1]
        self._more = len(entries) == BATCH
        states = [_state(self._job_id, row[2:]) for row in entries]
        return [Change(state.key, state) for state in states]

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()


# ------------------------------------------------------------------------------------------------------------
# What wakes a reader


class _Waker(Protocol):
    def wait(self, seconds: float) -> None:
        """Return when something may have changed, or after ``seconds``."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class _LocalWaker:
    """For a database in memory: nobody else can write to it."""

    def __init__(self) -> None:
        self._awake = threading.Event()

    def wait(self, seconds: float) -> None:
        if self._awake.wait(seconds):
            self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def close(self) -> None:
        self._awake.set()


class _DataVersionWaker(_LocalWaker):
    """Looks at ``PRAGMA data_version``, which another connection's commit changes, wherever that connection is."""

    def __init__(self, database: SQLite) -> None:
        super().__init__()
        self._connection: sqlite3.Connection = database.own_connection()
        self._version = self._look()
        self._changed_at = time.monotonic()

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            if self._awake.wait(BUSY_SECONDS if now - self._changed_at < 1.0 else IDLE_SECONDS):
                self._awake.clear()
                break
            if (version := self._look()) != self._version:
                self._version = version
                break
        else:
            return
        self._changed_at = now

    def _look(self) -> int:
        try:
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.OperationalError:
            return -1  # locked for a moment (recovery): counts as a change, so the tables are read

    def close(self) -> None:
        super().close()
        self._connection.close()


class _NotificationWaker:
    """LISTEN on a connection of its own, watched together with a pipe by which `wake` ends the wait."""

    def __init__(self, database: Database, job_id: str) -> None:
        self._connection: Any = database.own_connection()
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            with database.translated():
                self._connection.execute(f"LISTEN {_channel(job_id)}")
        except BaseException:
            self.close()
            raise
        self._translated = database.translated

    def wait(self, seconds: float) -> None:
        ready, _, _ = select.select([self._connection.fileno(), self._reader], [], [], seconds)
        if self._reader in ready:
            os.read(self._reader, 4_096)
        with self._translated():
            if not ready:
                self._ping()
            self._connection.pgconn.consume_input()
            while self._connection.pgconn.notifies() is not None:
                pass

    def _ping(self) -> None:
        """Silence may also be a dead connection. Asked below psycopg, whose own calls wait without an end."""
        libpq = self._connection.pgconn
        libpq.send_query(b"SELECT 1")
        deadline = time.monotonic() + PING_SECONDS
        while libpq.is_busy():
            left = max(0.0, deadline - time.monotonic())
            if not select.select([libpq.socket], [], [], left)[0]:
                raise Unavailable(f"PostgreSQL has not answered for {HEARTBEAT + PING_SECONDS:g} s.")
            libpq.consume_input()
        while libpq.get_result() is not None:
            pass

    def wake(self) -> None:
        with suppress(OSError):  # full: it wakes already; closed: nobody waits any more
            os.write(self._writer, b"!")

    def close(self) -> None:
        for descriptor in (self._reader, self._writer):
            with suppress(OSError):
                os.close(descriptor)
        self._connection.close()


# ------------------------------------------------------------------------------------------------------------
# Rows

_JOBS = "SELECT id, num_tasks, created_at, incarnation, deleted, history FROM state_jobs"


def _channel(job_id: str) -> str:
    """One per job, so that a process is woken by its own job only. A channel's name has 63 characters at most."""
    return "headway_states_" + hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()


def _of(alias: str) -> str:
    return ", ".join(f"{alias}.{column}" for column in _STATE.split(", "))


def _values(state: State) -> tuple[Value, ...]:
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


def _stored_or_refused(tx: Tx, state: State) -> State:
    """Nothing was written: because this event is stored already, or because of the job."""
    job = tx.one("SELECT deleted FROM state_jobs WHERE id = ?", (state.job_id,))
    if job is None:
        raise no_such_job(state.job_id)
    if job[0]:
        raise marked_deleted(state.job_id)
    row = tx.one(f"SELECT {_STATE} FROM states WHERE job = ? AND task_id = ? AND tag = ?", (state.job_id, *state.key))
    assert row is not None, "a row of this key stood in the way of the insert"
    return _state(state.job_id, row)


def _cut(tx: Tx, job_id: str, change: int, history: int) -> None:
    if not history and change % CUT_EVERY == 0:
        tx.execute("DELETE FROM state_log WHERE job = ? AND seq <= ?", (job_id, change - LOG_KEPT))


def _state(job_id: str, row: Row) -> State:
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


def _record(row: Row) -> JobRecord:
    job_id, num_tasks, created_at, incarnation, deleted, history = row
    return JobRecord(job_id, num_tasks, moment(created_at), incarnation, bool(deleted), bool(history))
