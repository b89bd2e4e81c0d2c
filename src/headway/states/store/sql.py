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

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from uuid import uuid4

from headway._sql import NOW, Row, Tx, connect
from headway._sql.sqlite import SQLite
from headway.core.lifecycle import Flag
from headway.core.retry import RetryPolicy
from headway.errors import StorageError, StoreReadOnly
from headway.states.state import State, moment
from headway.states.store import sql_rows
from headway.states.store.contract import (
    RECENT_LIMIT,
    Change,
    JobGone,
    JobRecord,
    Mark,
    Relist,
    Snapshot,
    job_gone,
    no_such_job,
    readable,
    recent_with,
)
from headway.states.store.sql_wakers import FileWaker, LocalWaker, NotificationWaker, Waker

#: Entries of the log kept for listeners that are behind or lost their connection.
LOG_KEPT = 16_384
#: The log is cut once in so many writes.
CUT_EVERY = 64
#: Entries read at once.
BATCH = 512
#: A listener answers at least this often, also when there is nothing to tell.
HEARTBEAT = 3.0

# In SQLite nobody writes between the look and the write. The WHERE of the conflict is for PostgreSQL: it makes a
# repeated event id touch nothing. An event is looked for in its own place of a whole entry (see `found_in_recent`, which has
# to find it too): a version may be the same number. What is too much is cut with the entry it belongs to.
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
        recent = CASE WHEN states.writer = excluded.writer THEN states.recent ELSE regexp_replace(left(
            concat(coalesce(nullif(states.writer, ''), '-'), ':', states.event_id, ':', states.version, ':',
                states.timestamp, ' ', regexp_replace(states.recent, excluded.writer || ':[^ ]* ', '')),
            {RECENT_LIMIT}), '[^ ]+$', '') END
    WHERE states.event_id <> excluded.event_id AND (states.recent = ''
        OR states.recent !~ ('(^| )[^ :]+:' || replace(excluded.event_id, '.', '[.]') || ':[^ :]+:[^ :]+ '))
    RETURNING job, {sql_rows.STATE}
),
counted AS (UPDATE state_jobs SET change = change + 1 FROM stored WHERE id = stored.job),
logged AS (
    INSERT INTO state_log (job, seq, {sql_rows.STATE})
    SELECT stored.job, job.change, {{columns}} FROM stored, job
),
kept AS (
    INSERT INTO state_history (job, {sql_rows.STATE}) SELECT stored.job, {{columns}} FROM stored, job WHERE job.history = 1
)
SELECT stored.version, stored.timestamp, job.change,
    pg_notify(?, concat(job.change, ' ', stored.version, ' ', stored.timestamp, ' ', ?::text))
FROM stored, job
""".format(columns=", ".join(f"stored.{column}" for column in sql_rows.STATE.split(", ")))


class SqlStates:
    """A `Backend` over one database."""

    listens_at_once = False

    def __init__(self, url: str, *, create: bool = True) -> None:
        self._stop = Flag()
        self._database = connect(url, create=create, stop=self._stop)
        self.kind: str = self._database.engine
        self._path = self._database.path if isinstance(self._database, SQLite) else None
        self._file = self._file_now()
        # The database itself tries again, for as long as a restart of the server takes. Tried again here as well, the
        # waits would be multiplied: a minute and a half until a writer hears that PostgreSQL is away.
        self.write_policy = RetryPolicy(retries=0)
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

    def _check_file(self) -> None:
        """A SQLite file that was removed or replaced lives on for those who have it open, and for nobody else."""
        if self._path is not None and (found := self._file_now()) != self._file:
            raise JobGone(f"The database {self._path} was {'replaced' if found else 'removed'} while it was in use.")

    @contextmanager
    def _there(self, job_id: str) -> Iterator[None]:
        """Our tables are a part of the job: without them (the schema was dropped) it is gone."""
        self._check_file()
        try:
            yield
        except StorageError as error:
            if getattr(error.__cause__, "sqlstate", None) in ("42P01", "3F000"):  # no such table, no such schema
                raise job_gone(job_id) from error
            raise

    # ---- the job -----------------------------------------------------------------------------------------------------

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        def work(tx: Tx) -> JobRecord:
            # Somebody else may make it before we do, and delete it before we look.
            while (row := tx.one(f"{sql_rows.JOBS} WHERE id = ?", (job_id,))) is None:
                tx.execute(
                    "INSERT INTO state_jobs (id, num_tasks, incarnation, history, created_at) "
                    f"VALUES (?, ?, ?, ?, {self._now}) ON CONFLICT (id) DO NOTHING",
                    (job_id, num_tasks, uuid4().hex, int(history)),
                )
            return sql_rows.record_of(row)

        return self._database.run(work, operation="register")

    def find(self, job_id: str) -> JobRecord | None:
        row = self._database.one(f"{sql_rows.JOBS} WHERE id = ?", (job_id,))
        return None if row is None else sql_rows.record_of(row)

    def jobs(self) -> Iterator[JobRecord]:
        return map(sql_rows.record_of, self._database.all(f"{sql_rows.JOBS} ORDER BY created_at, id"))

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        def work(tx: Tx) -> None:
            found = sql_rows.locked(tx, job_id)
            if found is None:
                raise no_such_job(job_id) if incarnation is None else job_gone(job_id)
            if incarnation not in (None, found):
                raise job_gone(job_id, remade=True)
            tx.execute("UPDATE state_jobs SET deleted = 1 WHERE id = ?", (job_id,))
            sql_rows.notify(tx, job_id)

        self._database.run(work, operation="mark_deleted")
        self._wake()

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        change = None if unless_after is None else unless_after[0]

        def work(tx: Tx) -> bool:  # the job's row first, as a writer does; its states, log and history go with it
            # A writer has that row until it commits; whoever waited for it here compares the number that writer left.
            deleted = tx.execute(
                "DELETE FROM state_jobs WHERE id = ? AND incarnation = coalesce(?, incarnation) "
                "AND change = coalesce(?, change)",
                (job_id, incarnation, change),
            )
            sql_rows.notify(tx, job_id)
            return deleted == 1

        deleted = self._database.run(work, operation="delete")
        self._wake()
        return deleted

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
            change, history = sql_rows.writable(tx, job)
            before = tx.one(
                "SELECT version, timestamp, event_id, writer, recent FROM states WHERE job = ? AND task_id = ? AND tag = ?",
                (state.job_id, *state.key),
            )
            version, recent = 1, ""
            if before is not None:
                if (repeated := sql_rows.repeated(tx, state, before)) is not None:
                    return repeated
                version, recent = before[0] + 1, before[4]
                if before[3] != writer:
                    recent = recent_with(recent, before[3], before[2], before[0], before[1], now=writer)
            values = sql_rows.values(state)
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
        text = sql_rows.notification(state, job.incarnation)
        parameters = (
            job.job_id,
            job.incarnation,
            *sql_rows.values(state),
            writer,
            sql_rows.channel(state.job_id),
            text,
        )
        while not (rows := self._database.write(_POSTGRES_WRITE, parameters, operation="set_state", idempotent=True)):
            with self._database.read() as tx:
                sql_rows.writable(tx, job)
                before = tx.one(
                    "SELECT version, timestamp, event_id, writer, recent FROM states "
                    "WHERE job = ? AND task_id = ? AND tag = ?",
                    (state.job_id, *state.key),
                )
                if before is not None and (repeated := sql_rows.repeated(tx, state, before)) is not None:
                    return repeated
            # Between the two somebody else changed what stood in the way.
        version, timestamp, change, _ = rows[0]
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
            rows = tx.all(f"SELECT {sql_rows.STATE} FROM states WHERE job = ?", (job.job_id,))
            mark = (change, sql_rows.event_at(tx, job.job_id, change) or "")
            continuous = since is None or sql_rows.continues(tx, job.job_id, change, int(since[0]), str(since[1]))
            resumes = since is not None and continuous and sql_rows.resumes(tx, job.job_id, change, int(since[0]))
        states = readable(rows, lambda row: sql_rows.state_of(job.job_id, row), job.job_id)
        return Snapshot(incarnation, tuple(states), mark, bool(deleted), continuous, resumes)

    def read_log(self, job_id: str, after: int) -> list[Row]:
        """The job's incarnation, tombstone and change number with each entry of its log after ``after``; one row
        without an entry if there is none, no row without the job."""
        columns = ", ".join(f"l.{column}" for column in sql_rows.STATE.split(", "))
        with self._there(job_id):
            return self._database.all(
                f"SELECT j.incarnation, j.deleted, j.change, l.seq, {columns} FROM state_jobs j LEFT JOIN "
                "(SELECT * FROM state_log WHERE job = ? AND seq > ? ORDER BY seq LIMIT ?) l ON l.job = j.id "
                "WHERE j.id = ? ORDER BY l.seq",
                (job_id, after, BATCH, job_id),
            )

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        rows = self._database.all(
            f"SELECT {sql_rows.STATE} FROM state_history WHERE job = ? AND task_id = ? AND tag = ? AND version > ? "
            "ORDER BY version LIMIT ?",
            (job_id, task_id, tag, after, limit),
        )
        return readable(rows, lambda row: sql_rows.state_of(job_id, row), job_id)

    def listen(self, job: JobRecord) -> SqlListener:
        if isinstance(self._database, SQLite):
            self._check_file()
            waker: Waker = LocalWaker() if self._path is None else FileWaker(self._database)
            self._local_wakers = [waker]
        else:
            try:
                waker = NotificationWaker(self._database, sql_rows.channel(job.job_id))
            except StoreReadOnly:
                waker = LocalWaker()  # the log is read after each heartbeat
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
        mark = since if snapshot.resumes else snapshot.mark
        if mark is not None:
            self._cursor, self._event = int(mark[0]), str(mark[1])
        self._deleted = snapshot.deleted
        self._more = snapshot.resumes
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
            notified = sql_rows.notified(self._job, text)
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
        states = readable(entries, lambda row: sql_rows.state_of(self._job.job_id, row[1:]), self._job.job_id)
        return [Change(state.key, state) for state in states]

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._waker.close()


def _cut(tx: Tx, job_id: str, change: int) -> None:
    if change % CUT_EVERY == 0:
        tx.execute("DELETE FROM state_log WHERE job = ? AND seq <= ?", (job_id, change - LOG_KEPT))
