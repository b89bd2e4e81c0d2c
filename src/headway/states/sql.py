"""States in SQLite or PostgreSQL.

A write is one transaction: the key's row with its next version, the job's change number, an entry in the log. The
change number is taken from the job's row, whose lock is held until the commit, so that numbers become visible in order
and a reader may follow them with a cursor. The log keeps the newest entries; a reader that fell further behind notices
the gap and lists again. The job's row is locked first and its incarnation compared under that lock, so that a write meets
the job it was meant for or none: deleting begins with the same row.

What wakes a reader: PostgreSQL notifies; SQLite's ``data_version`` is looked at, a few microseconds every few
milliseconds. A notification carries a small state with its change number: a reader that has the number before takes it
from there, and reads the log wherever one is missing, too large, or nothing came for a while.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

from headway._sql import NOW, Row, Tx, Value, connect
from headway._sql.sqlite import SQLite
from headway.errors import StorageError
from headway.retry import RetryPolicy
from headway.states.sql_wakers import DataVersionWaker, LocalWaker, NotificationWaker, Waker
from headway.states.state import State, decoded, encoded, moment
from headway.states.store import (
    RECENT_LIMIT,
    Change,
    JobGone,
    JobRecord,
    Mark,
    Relist,
    Snapshot,
    found_in_recent,
    job_gone,
    marked_deleted,
    no_such_job,
    readable,
    recent_with,
)

#: Entries of the log kept for readers that are a little behind.
LOG_KEPT = 1_024
#: The log is cut once in so many writes.
CUT_EVERY = 64
#: Entries read at once.
BATCH = 512
#: A listener answers at least this often, also when there is nothing to tell.
HEARTBEAT = 3.0
#: PostgreSQL takes 8,000 bytes with a notification; what is larger is read from the log.
NOTIFIED_LIMIT = 7_000

_STATE = "task_id, tag, status, message, timestamp, version, event_id, payload, schema_version"
# In SQLite nobody writes between the look and the write. The WHERE of the conflict is for PostgreSQL: it makes a
# repeated event id touch nothing.
_POSTGRES_WRITE = f"""
WITH job AS (
    SELECT id, change + 1 AS change, history FROM state_jobs WHERE id = ? AND incarnation = ? AND deleted = 0
    FOR NO KEY UPDATE
),
stored AS (
    INSERT INTO states (job, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version, writer)
    SELECT id, ?, ?, ?, ?, {NOW["postgresql"]}, 1, ?, ?, ?, ? FROM job
    ON CONFLICT (job, task_id, tag) DO UPDATE SET
        status = excluded.status, message = excluded.message, timestamp = excluded.timestamp,
        version = states.version + 1, event_id = excluded.event_id, payload = excluded.payload,
        schema_version = excluded.schema_version, writer = excluded.writer,
        recent = CASE WHEN states.writer = excluded.writer THEN states.recent ELSE left(
            concat(coalesce(nullif(states.writer, ''), '-'), ':', states.event_id, ':', states.version, ':',
                states.timestamp, ' ', regexp_replace(states.recent, excluded.writer || ':[^ ]* ', '')),
            {RECENT_LIMIT}) END
    WHERE states.event_id <> excluded.event_id AND strpos(states.recent, ':' || excluded.event_id || ':') = 0
    RETURNING job, {_STATE}
),
counted AS (UPDATE state_jobs SET change = change + 1 FROM stored WHERE id = stored.job),
logged AS (
    INSERT INTO state_log (job, seq, {_STATE})
    SELECT stored.job, job.change, {{columns}} FROM stored, job
),
kept AS (
    INSERT INTO state_history (job, {_STATE}) SELECT stored.job, {{columns}} FROM stored, job WHERE job.history = 1
)
SELECT stored.version, stored.timestamp, job.change,
    pg_notify(?, concat(job.change, ' ', stored.version, ' ', stored.timestamp, ' ', ?::text))
FROM stored, job
""".format(columns=", ".join(f"stored.{column}" for column in _STATE.split(", ")))


class SqlStates:
    """A `Backend` over one database."""

    listens_at_once = False

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._stop = threading.Event()
        self._database = connect(url, create=create, stop=self._stop)
        self.kind: str = self._database.engine
        self._path = self._database.path if isinstance(self._database, SQLite) else None
        self._file = self._file_now()
        # SQLite's own transactions are tried again below; a restart of PostgreSQL takes seconds.
        postgresql = RetryPolicy(retries=7, base=0.1, cap=4.0, jitter=0.2)
        self.write_policy = postgresql if self.kind == "postgresql" else RetryPolicy(retries=0)
        self._now = NOW[self._database.engine]
        self._local_wakers: list[Waker] = []  # woken by our own writes; PostgreSQL's notification wakes by itself

    # ---- whether it is still there -----------------------------------------------------------------------------------

    def _file_now(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return (found.st_dev, found.st_ino)

    def check_file(self) -> None:
        """A SQLite file that was removed or replaced lives on for those who have it open, and for nobody else."""
        if self._path is not None and (found := self._file_now()) != self._file:
            raise JobGone(f"The database {self._path} was {'replaced' if found else 'removed'} while it was in use.")

    @contextmanager
    def _there(self, job_id: str) -> Iterator[None]:
        """Our tables are a part of the job: without them (the schema was dropped) it is gone."""
        self.check_file()
        try:
            yield
        except StorageError as error:
            if getattr(error.__cause__, "sqlstate", None) in ("42P01", "3F000"):  # no such table, no such schema
                raise job_gone(job_id) from error
            raise

    # ---- the job -----------------------------------------------------------------------------------------------------

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

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        def work(tx: Tx) -> None:
            found = _locked(tx, job_id)
            if found is None:
                raise no_such_job(job_id) if incarnation is None else job_gone(job_id)
            if incarnation not in (None, found):
                raise job_gone(job_id, remade=True)
            tx.execute("UPDATE state_jobs SET deleted = 1 WHERE id = ?", (job_id,))
            _notify(tx, job_id)

        self._database.run(work, operation="mark_deleted")
        self._wake()

    def delete(self, job_id: str, incarnation: str | None = None) -> bool:
        def work(tx: Tx) -> bool:
            found = _locked(tx, job_id)  # the order in which a writer locks
            if found is None or incarnation not in (None, found):
                return False
            tx.execute("DELETE FROM state_jobs WHERE id = ?", (job_id,))  # its states, log and history go with it
            _notify(tx, job_id)
            return True

        gone = self._database.run(work, operation="delete")
        self._wake()
        return gone

    # ---- states ------------------------------------------------------------------------------------------------------

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        with self._there(job.job_id):
            if self.kind == "postgresql":
                return self._write_in_postgresql(state, job, writer)
            stored = self._database.run(self._write_in_sqlite(state, job, writer), operation="set_state")
        self._wake()
        return stored

    def _wake(self) -> None:
        for waker in self._local_wakers:
            waker.wake()

    def _write_in_sqlite(self, state: State, job: JobRecord, writer: str) -> Callable[[Tx], State]:
        def work(tx: Tx) -> State:
            change, history = _writable(tx, job)
            before = tx.one(
                "SELECT version, timestamp, event_id, writer, recent FROM states WHERE job = ? AND task_id = ? AND tag = ?",
                (state.job_id, *state.key),
            )
            version, recent = 1, ""
            if before is not None:
                if (repeated := _repeated(tx, state, before)) is not None:
                    return repeated
                version, recent = before[0] + 1, before[4]
                if before[3] != writer:
                    recent = recent_with(recent, before[3], before[2], before[0], before[1], now=writer)
            values = _values(state)
            (timestamp,) = tx.one(
                "INSERT OR REPLACE INTO states (job, task_id, tag, status, message, event_id, payload, schema_version, "
                f"version, writer, recent, timestamp) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, {self._now}) "
                "RETURNING timestamp",
                (state.job_id, *values, version, writer, recent),
            ) or (0.0,)
            tx.execute("UPDATE state_jobs SET change = ? WHERE id = ?", (change + 1, state.job_id))
            columns = "task_id, tag, status, message, event_id, payload, schema_version, timestamp, version"
            row = (*values, timestamp, version)
            tx.execute(
                f"INSERT INTO state_log (job, seq, {columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (state.job_id, change + 1, *row),
            )
            if history:
                tx.execute(
                    f"INSERT INTO state_history (job, {columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    (state.job_id, *row),
                )
            _cut(tx, state.job_id, change + 1)
            return replace(state, version=version, timestamp=moment(timestamp))

        return work

    def _write_in_postgresql(self, state: State, job: JobRecord, writer: str) -> State:
        """One statement is one transaction, committed when its answer comes: one round trip. It is not repeated here;
        whoever asked repeats it under the same event id."""
        text = _notification(state, job.incarnation)
        parameters = (job.job_id, job.incarnation, *_values(state), writer, _channel(state.job_id), text)
        while (row := self._database.write(_POSTGRES_WRITE, parameters)) is None:
            with self._database.read() as tx:
                _writable(tx, job)
                before = tx.one(
                    "SELECT version, timestamp, event_id, writer, recent FROM states "
                    "WHERE job = ? AND task_id = ? AND tag = ?",
                    (state.job_id, *state.key),
                )
                if before is not None and (repeated := _repeated(tx, state, before)) is not None:
                    return repeated
            # Between the two somebody else changed what stood in the way.
        version, timestamp, change, _ = row
        if change % CUT_EVERY == 0:
            self._database.run(lambda tx: _cut(tx, state.job_id, change), operation="cut")
        return replace(state, version=version, timestamp=moment(timestamp))

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """Everything of one moment. Its mark: the change number, and the event that made it."""
        with self._there(job.job_id), self._database.read() as tx:
            found = tx.one("SELECT incarnation, deleted, change FROM state_jobs WHERE id = ?", (job.job_id,))
            if found is None:
                return Snapshot("")
            incarnation, deleted, change = found
            rows = tx.all(f"SELECT {_STATE} FROM states WHERE job = ?", (job.job_id,))
            mark = (change, _event_at(tx, job.job_id, change) or "")
            continuous = since is None or _continues(tx, job.job_id, change, int(since[0]), str(since[1]))
        states = readable(rows, lambda row: _state(job.job_id, row), job.job_id)
        return Snapshot(incarnation, tuple(states), mark, bool(deleted), continuous)

    def read_log(self, job_id: str, after: int) -> list[Row]:
        """The job's incarnation, tombstone and change number with each entry of its log after ``after``; one row
        without an entry if there is none, no row without the job."""
        columns = ", ".join(f"l.{column}" for column in _STATE.split(", "))
        with self._there(job_id):
            return self._database.all(
                f"SELECT j.incarnation, j.deleted, j.change, l.seq, {columns} FROM state_jobs j LEFT JOIN "
                "(SELECT * FROM state_log WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?) l ON l.job = j.id "
                "WHERE j.id = ? ORDER BY l.seq",
                (job_id, after, BATCH, job_id),
            )

    def read_history(self, job_id: str, task_id: int, tag: str) -> list[State]:
        rows = self._database.all(
            f"SELECT {_STATE} FROM state_history WHERE job = ? AND task_id = ? AND tag = ? ORDER BY version",
            (job_id, task_id, tag),
        )
        return readable(rows, lambda row: _state(job_id, row), job_id)

    def listen(self, job: JobRecord) -> SqlListener:
        if isinstance(self._database, SQLite):
            self.check_file()
            waker: Waker = LocalWaker() if self._path is None else DataVersionWaker(self._database, self.check_file)
            self._local_wakers = [waker]
        else:
            waker = NotificationWaker(self._database, _channel(job.job_id))
        return SqlListener(self, job, waker)

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
        self._more = False

    @property
    def mark(self) -> Mark:
        return (self._cursor, self._event)

    def snapshot(self, since: Mark) -> Snapshot:
        snapshot = self._states.read_all(self._job, since)
        if snapshot.mark is not None:
            self._cursor, self._event = int(snapshot.mark[0]), str(snapshot.mark[1])
        self._deleted = snapshot.deleted
        self._more = False
        return snapshot

    def changes(self) -> list[Change]:
        texts = None if self._more else self._waker.wait(HEARTBEAT)
        if texts is not None and (heard := self._take(texts)) is not None:
            return heard
        return self._look()

    def _take(self, texts: list[str]) -> list[Change] | None:
        """The changes that came with notifications, or None if something must be read: one is missing, or came without
        its state. What was taken up to there is found again by the look, and is no news then."""
        changes = []
        cursor, event = self._cursor, self._event
        for text in texts:
            notified = _notified(self._job, text)
            if notified is None:
                return None
            change, state = notified
            if change <= cursor:
                continue  # a look was quicker
            if change != cursor + 1:
                return None
            cursor, event = change, state.event_id
            changes.append(Change(state.key, state))
        self._cursor, self._event = cursor, event
        return changes

    def _look(self) -> list[Change]:
        rows = self._states.read_log(self._job.job_id, self._cursor)
        if not rows or rows[0][0] != self._job.incarnation or bool(rows[0][1]) != self._deleted:
            raise Relist
        if rows[0][2] < self._cursor:
            raise Relist  # the store was put back
        entries = [row[3:] for row in rows if row[3] is not None]
        if entries and entries[0][0] != self._cursor + 1:
            raise Relist  # the log was cut between where we are and where it begins
        if entries:
            self._cursor, self._event = entries[-1][0], entries[-1][7]
        self._more = len(entries) == BATCH
        states = readable(entries, lambda row: _state(self._job.job_id, row[1:]), self._job.job_id)
        return [Change(state.key, state) for state in states]

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()


# ------------------------------------------------------------------------------------------------------------
# What a transaction finds


def _locked(tx: Tx, job_id: str) -> str | None:
    """The incarnation of a job, whose row stays ours until the transaction ends."""
    lock = " FOR UPDATE" if tx.engine == "postgresql" else ""  # in SQLite there is no other writer
    row = tx.one(f"SELECT incarnation FROM state_jobs WHERE id = ?{lock}", (job_id,))
    return None if row is None else str(row[0])


def _writable(tx: Tx, job: JobRecord) -> tuple[int, int]:
    """The change number of the job and whether it keeps history, if it is the one that was opened."""
    row = tx.one("SELECT incarnation, deleted, change, history FROM state_jobs WHERE id = ?", (job.job_id,))
    if row is None or row[0] != job.incarnation:
        raise job_gone(job.job_id, remade=row is not None)
    if row[1]:
        raise marked_deleted(job.job_id)
    return row[2], row[3]


def _repeated(tx: Tx, state: State, before: Row) -> State | None:
    """What a write of the same event gave the first time, if it was stored: as it is stored, or as it was sent if
    somebody else wrote since."""
    if before[2] == state.event_id:
        row = tx.one(
            f"SELECT {_STATE} FROM states WHERE job = ? AND task_id = ? AND tag = ?", (state.job_id, *state.key)
        )
        return None if row is None else _state(state.job_id, row)
    if (found := found_in_recent(before[4], state.event_id)) is not None:
        return replace(state, version=found[0], timestamp=moment(found[1]))
    return None


def _event_at(tx: Tx, job_id: str, change: int) -> str | None:
    row = tx.one("SELECT event_id FROM state_log WHERE job = ? AND seq = ?", (job_id, change))
    return None if row is None else str(row[0])


def _continues(tx: Tx, job_id: str, now: int, heard: int, event: str) -> bool:
    """Whether the store's past is the one in which ``event`` was change number ``heard``."""
    if heard == 0:
        return True
    if now < heard:
        return False
    if (found := _event_at(tx, job_id, heard)) is not None:
        return found == event
    oldest = tx.one("SELECT min(seq) FROM state_log WHERE job = ?", (job_id,))
    return oldest is not None and oldest[0] is not None and oldest[0] > heard  # it was cut off since


def _notify(tx: Tx, job_id: str) -> None:
    if tx.engine == "postgresql":
        tx.execute("SELECT pg_notify(?, '')", (_channel(job_id),))


def _notification(state: State, incarnation: str) -> str:
    """What a notification carries besides the numbers; empty if it is too much."""
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([incarnation, state.task_id, state.tag, state.status, state.message, state.event_id,
                        state.schema_version])  # fmt: skip
    text = f"{facts[:-1]}, {payload}]"
    return text if len(text) <= NOTIFIED_LIMIT else ""


def _notified(job: JobRecord, text: str) -> tuple[int, State] | None:
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

_JOBS = "SELECT id, num_tasks, created_at, incarnation, deleted, history FROM state_jobs"


def _channel(job_id: str) -> str:
    """One per job, so that a process is woken by its own job only. A channel's name has 63 characters at most."""
    return "headway_states_" + hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()


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


def _cut(tx: Tx, job_id: str, change: int) -> None:
    if change % CUT_EVERY == 0:
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
