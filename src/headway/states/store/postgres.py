"""States in PostgreSQL.

A write is one statement and one round trip. A listener is woken by NOTIFY. The notification of a small state carries the
state with its change number: a listener that has the previous number takes it from there. It reads the log if a number
is missing, if a state was too large, and after every silence.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Final

from headway._sql import Database, Tx, connect
from headway.core.lifecycle import Flag
from headway.errors import StorageError, StoreReadOnly, Unavailable
from headway.states.state import State, encoded, moment
from headway.states.store import sql
from headway.states.store.contract import RECENT_LIMIT, JobRecord, job_gone
from headway.states.store.sql import LocalWaker, SqlStates, Waker

#: Timeout of a query on the listening connection, in seconds.
PING_SECONDS = 4.0
#: Maximum length of a notification. PostgreSQL allows 8,000 bytes; larger states are read from the log.
NOTIFICATION_LIMIT = 7_000

#: libpq's field code for the SQLSTATE of an error.
_SQLSTATE = ord("C")

# The WHERE of the conflict makes a repeated event id touch nothing. The event is matched as the second field of a whole
# entry of `recent` (compare `found_in_recent`), because an event id may look like a version. The outer regexp_replace
# drops the entry that the length limit truncated.
_WRITE: Final = f"""
WITH job AS (
    SELECT id, change + 1 AS change, history FROM state_jobs WHERE id = ? AND incarnation = ? AND deleted = 0
    FOR NO KEY UPDATE
),
stored AS (
    INSERT INTO states (job, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version, writer)
    SELECT id, ?, ?, ?, ?, extract(epoch FROM clock_timestamp())::double precision, 1, ?, ?, ?, ? FROM job
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
    RETURNING job, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
),
counted AS (UPDATE state_jobs SET change = change + 1 FROM stored WHERE id = stored.job),
logged AS (
    INSERT INTO state_log (
        job, seq, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
    )
    SELECT stored.job, job.change, stored.task_id, stored.tag, stored.status, stored.message, stored.timestamp,
        stored.version, stored.event_id, stored.payload, stored.schema_version
    FROM stored, job
),
kept AS (
    INSERT INTO state_history (
        job, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version
    )
    SELECT stored.job, stored.task_id, stored.tag, stored.status, stored.message, stored.timestamp,
        stored.version, stored.event_id, stored.payload, stored.schema_version
    FROM stored, job WHERE job.history = 1
)
SELECT stored.version, stored.timestamp, job.change,
    pg_notify(?, concat(job.change, ' ', stored.version, ' ', stored.timestamp, ' ', ?::text))
FROM stored, job
"""


class PostgresStates(SqlStates):
    """A `Backend` over one PostgreSQL database."""

    kind = "postgresql"

    def __init__(self, url: str, *, create: bool = True) -> None:
        stop = Flag()
        super().__init__(connect(url, create=create, stop=stop), stop)

    @contextmanager
    def _existing(self, job_id: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            if getattr(error.__cause__, "sqlstate", None) in ("42P01", "3F000"):  # no such table, no such schema
                raise job_gone(job_id) from error
            raise

    def _announce(self, tx: Tx, job_id: str) -> None:
        tx.execute("SELECT pg_notify(?, '')", (_channel(job_id),))

    def _wake(self) -> None:
        """Do nothing: the notification wakes this process's listener too."""

    def _waker(self, job: JobRecord) -> Waker:
        try:
            return NotificationWaker(self._database, job)
        except StoreReadOnly:
            return LocalWaker()  # a standby does not support LISTEN: the log is read after each heartbeat

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        with self._existing(job.job_id):
            return self._write(state, job, writer)

    def _write(self, state: State, job: JobRecord, writer: str) -> State:
        facts = _notification(state, job.incarnation)
        parameters = (job.job_id, job.incarnation, *sql.values(state), writer, _channel(state.job_id), facts)
        # The event id makes the statement idempotent.
        while not (rows := self._database.write(_WRITE, parameters, operation="set_state", idempotent=True)):
            with self._database.read() as tx:
                sql.writable(tx, job)
                previous = tx.one(sql.PREVIOUS, (state.job_id, *state.key))
                if previous is not None and (repeated := sql.repeated(tx, state, previous)) is not None:
                    return repeated
            # Another process has changed the obstacle since: try again.
        version, timestamp, change, _ = rows[0]
        if sql.prune_due(change):
            self._database.run(lambda tx: sql.prune_log(tx, state.job_id, change), operation="cut")
        return replace(state, version=version, timestamp=moment(timestamp))


def _channel(job_id: str) -> str:
    """Return the job's channel name: a hash, because PostgreSQL limits names to 63 characters."""
    return "headway_states_" + hashlib.blake2s(job_id.encode(), digest_size=16).hexdigest()


def _notification(state: State, incarnation: str) -> str:
    """Return the notification text of a state without version and time, or "" if it is too long."""
    payload = "null" if state.payload is None else encoded(state.payload)
    facts = json.dumps([incarnation, state.task_id, state.tag, state.status, state.message, state.event_id,
                        state.schema_version])  # fmt: skip
    text = f"{facts[:-1]}, {payload}]"
    return text if len(text) <= NOTIFICATION_LIMIT else ""


def _notified(job: JobRecord, text: str) -> tuple[int, State] | None:
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


class NotificationWaker:
    """LISTEN on a dedicated connection, polled together with a pipe that `wake` writes to.

    Queries use libpq directly, because psycopg's calls have no time limit. ``poll`` supports file descriptors above
    1,023, which ``select`` does not.
    """

    def __init__(self, database: Database, job: JobRecord) -> None:
        self._job = job
        self._connection: Any = database.own_connection()
        self._translating = database.translated
        self._libpq: Any = self._connection.pgconn
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing, self._closed = threading.Lock(), False
        try:
            with self._translating():
                self._query(f"LISTEN {_channel(job.job_id)}".encode())
        except BaseException:
            self.close()
            raise

    def wait(self, seconds: float) -> list[tuple[int, State]] | None:
        with self._translating():
            ready = self._poll(seconds, self._libpq.socket, self._reader)
            if self._reader in ready:
                os.read(self._reader, 4_096)
                return []  # the store is closing: nothing more to read
            if not ready:
                self._query(b"SELECT 1")  # the connection may be dead
            self._libpq.consume_input()
            texts = []
            while (notification := self._libpq.notifies()) is not None:
                texts.append(notification.extra.decode())
        changes = [change for text in texts if (change := _notified(self._job, text)) is not None]
        # After a silence the tables are read too: they also show whether the job still exists.
        return changes if texts and len(changes) == len(texts) else None

    def _query(self, statement: bytes) -> None:
        """Run a statement without parameters. Raises `Unavailable` after `PING_SECONDS`."""
        self._libpq.send_query(statement)
        deadline = time.monotonic() + PING_SECONDS
        while True:
            while self._libpq.is_busy():
                if not self._poll(max(0.0, deadline - time.monotonic()), self._libpq.socket):
                    raise Unavailable(f"PostgreSQL has not answered within {PING_SECONDS:g} s.")
                self._libpq.consume_input()
            if (result := self._libpq.get_result()) is None:  # would block if the result had not arrived
                return
            if result.error_field(_SQLSTATE) == b"25006":
                raise StoreReadOnly("PostgreSQL refused LISTEN: the server is a standby.")
            if result.error_message:
                message = result.error_message.decode("utf-8", "replace").strip()
                raise Unavailable(f"PostgreSQL refused LISTEN: {message}")

    @staticmethod
    def _poll(seconds: float, *descriptors: int) -> set[int]:
        poll = select.poll()
        for descriptor in descriptors:
            poll.register(descriptor, select.POLLIN)
        return {descriptor for descriptor, _ in poll.poll(seconds * 1_000)}

    def wake(self) -> None:
        # After close the descriptor number may belong to another file.
        with self._closing, suppress(BlockingIOError):  # the pipe is full, so a wakeup is pending
            if not self._closed:
                os.write(self._writer, b"!")

    def close(self) -> None:
        with self._closing:
            if not self._closed:
                self._closed = True
                os.close(self._reader)
                os.close(self._writer)
        self._connection.close()
