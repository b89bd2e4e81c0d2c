"""States in a SQLite file or in memory.

Only one transaction writes at a time, so a write first reads the key's row and then replaces it. A listener is woken by
this process's own writes and by SQLite's ``data_version``, which changes with every commit of another connection.
Polling it takes a few microseconds every few milliseconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from headway._sql import Tx, connect
from headway._sql.sqlite import SQLite
from headway.core.lifecycle import Flag
from headway.states.state import State, moment
from headway.states.store import sql
from headway.states.store.contract import JobGone, JobRecord, recent_with
from headway.states.store.sql import LocalWaker, SqlStates

#: Seconds between two polls of a file: while it changes, and after one second without a change.
BUSY_SECONDS, IDLE_SECONDS = 0.004, 0.03

_REPLACE: Final = """
INSERT OR REPLACE INTO states (
    job, task_id, tag, status, message, event_id, payload, schema_version, version, writer, recent, timestamp
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, (julianday('now') - 2440587.5) * 86400.0)
RETURNING timestamp
"""
_APPEND: Final = """
INSERT INTO state_log (
    job, seq, task_id, tag, status, message, event_id, payload, schema_version, timestamp, version
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_KEEP: Final = """
INSERT INTO state_history (
    job, task_id, tag, status, message, event_id, payload, schema_version, timestamp, version
)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""


class SqliteStates(SqlStates):
    """A `Backend` over one SQLite file, or over a database in memory."""

    kind = "sqlite"

    def __init__(self, url: str, *, create: bool = True) -> None:
        stop = Flag()
        database = connect(url, create=create, stop=stop)
        assert isinstance(database, SQLite), "the caller chose this class by the URL's scheme"
        super().__init__(database, stop)
        self._sqlite = database
        self._file = self._identity()
        self._local_waker: LocalWaker | None = None

    def _identity(self) -> tuple[int, int] | None:
        """Return the device and inode of the file, or None if there is no file."""
        if self._sqlite.path is None:
            return None
        try:
            found = os.stat(self._sqlite.path)
        except OSError:
            return None
        return (found.st_dev, found.st_ino)

    def _check_file(self) -> None:
        """Raise `JobGone` if the file was removed or replaced. An open connection would go on with the old one."""
        path = self._sqlite.path
        if path is not None and (found := self._identity()) != self._file:
            raise JobGone(f"The database {path} was {'replaced' if found else 'removed'} while it was in use.")

    @contextmanager
    def _existing(self, job_id: str) -> Iterator[None]:
        del job_id
        self._check_file()
        yield

    def _announce(self, tx: Tx, job_id: str) -> None:
        """Do nothing: every commit changes the ``data_version`` of the other connections."""

    def _wake(self) -> None:
        if self._local_waker is not None:
            self._local_waker.wake()

    def _waker(self, job: JobRecord) -> LocalWaker:
        del job
        self._check_file()
        self._local_waker = LocalWaker() if self._sqlite.path is None else FileWaker(self._sqlite)
        return self._local_waker

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        self._check_file()
        stored = self._database.run(_write(state, job, writer), operation="set_state")
        self._wake()
        return stored


def _write(state: State, job: JobRecord, writer: str) -> Callable[[Tx], State]:
    def work(tx: Tx) -> State:
        change, history = sql.writable(tx, job)
        previous = tx.one(sql.PREVIOUS, (state.job_id, *state.key))
        version, recent = 1, ""
        if previous is not None:
            if (repeated := sql.repeated(tx, state, previous)) is not None:
                return repeated
            version, recent = previous[0] + 1, previous[4]
            if previous[3] != writer:
                recent = recent_with(recent, previous[3], previous[2], previous[0], previous[1], now=writer)
        values = sql.values(state)
        (timestamp,) = tx.one(_REPLACE, (state.job_id, *values, version, writer, recent)) or (0.0,)
        change += 1
        tx.execute("UPDATE state_jobs SET change = ? WHERE id = ?", (change, state.job_id))
        tx.execute(_APPEND, (state.job_id, change, *values, timestamp, version))
        if history:
            tx.execute(_KEEP, (state.job_id, *values, timestamp, version))
        if sql.prune_due(change):
            sql.prune_log(tx, state.job_id, change)
        return replace(state, version=version, timestamp=moment(timestamp))

    return work


class FileWaker(LocalWaker):
    """Polls a SQLite file's ``data_version``."""

    def __init__(self, database: SQLite) -> None:
        super().__init__()
        self._watch = database.watch()
        self._changed_at = time.monotonic()

    def wait(self, seconds: float) -> list[tuple[int, State]] | None:
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            if self.woken(BUSY_SECONDS if now - self._changed_at < 1.0 else IDLE_SECONDS) or self._watch.changed():
                self._changed_at = now
                break
        return None

    def close(self) -> None:
        super().close()
        self._watch.close()
