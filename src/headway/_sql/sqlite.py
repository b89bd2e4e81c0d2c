"""SQLite, by the standard library's driver."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from headway._sql import sqlite_file
from headway._sql.database import Database
from headway._sql.driver import UNACCEPTABLE, Transient, unacceptable
from headway._sql.schema import migrations, refuse_newer
from headway._sql.tx import Engine, Row, Tx, Value, check_query
from headway.core.lifecycle import refuse_within
from headway.core.retry import STORE, pause
from headway.errors import HeadwayError, StorageError, StoreCorrupt
from headway.telemetry import metrics

T = TypeVar("T")

#: Seconds that a writer waits for another process's transaction.
LOCK_SECONDS = 30.0

#: Seconds between checks that the file and its -wal are still those that were opened. The file is also checked after
#: every commit.
LOOK_SECONDS = 0.1


class SQLite(Database):
    """A SQLite file, in WAL mode with synchronous=FULL, or a database in memory.

    Writers of this process queue on a lock, so that they do not starve each other in SQLite's busy wait. They wait for other
    processes up to `LOCK_SECONDS`, interruptibly.
    """

    engine: Engine = "sqlite"
    schema_version_query = "PRAGMA user_version"
    _errors: tuple[type[Exception], ...] = (sqlite3.Error, UnicodeDecodeError, *UNACCEPTABLE)

    def __init__(self, path: Path | None, *, synchronous: str, stop: threading.Event | None) -> None:
        super().__init__(f"sqlite:///{path}" if path else "sqlite:///:memory:", stop=stop)
        self.path = Path(os.path.abspath(path)) if path else None  # independent of the working directory
        self._target = str(self.path or ":memory:")
        self._synchronous = synchronous
        self._writing = threading.RLock()
        self._writer: sqlite3.Connection | None = None  # the connection whose transaction is open
        self.forking = False
        self._file: sqlite_file.OpenFile | None = None
        self._looked_at = 0.0
        #: The version of a file without a log that is read in place (`OpenFile.version_at_rest`). None: opened normally.
        self._at_rest: tuple[int, int] | None = None
        self._watches: WeakSet[Watch] = WeakSet()
        _open_files.add(self)
        if path is None:
            self._one_at_a_time = threading.Lock()

    def migrate(self) -> None:
        steps = migrations("sqlite")

        def found_version(tx: Tx) -> int:
            row = tx.one("PRAGMA user_version")
            assert row is not None
            refuse_newer(self.name, row[0], steps)
            return int(row[0])

        # First without the write lock: readers of a busy or read-only database need none.
        if self._ask(found_version) == len(steps):
            return

        def work(tx: Tx) -> None:
            found = found_version(tx)
            for version, statements in steps[found:]:
                for statement in statements:
                    tx.execute(statement)
                tx.execute(f"PRAGMA user_version = {version}")

        self._transact(work, "migrate", slow=True)

    def verify(self) -> None:
        rows = self.all("PRAGMA integrity_check(3)")
        if rows != [("ok",)]:
            raise StoreCorrupt(f"The database {self.path} is damaged: {rows[0][0]}.")
        if self._file is not None:
            self._wait_for_fork()
            with self._counted():
                sqlite_file.check_identity(self._file)

    def check(self, *, writable: bool) -> None:
        """Raise unless the file is a Headway database and its -wal belongs to it."""
        if self.path is not None:
            self._file = sqlite_file.OpenFile(self.path)
            sqlite_file.check_header(self._file, writable=writable)
            self._wait_for_fork()
            with self._counted():
                sqlite_file.check_identity(self._file)
            self._at_rest = self._file.version_at_rest()

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.release()

    def size(self) -> int:
        if self.path is None:
            row = self.one("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
            size = int(row[0]) if row else 0
        else:
            size = sqlite_file.size(self.path)
        metrics.gauge("headway_sql_bytes", size, engine=self.engine)
        return size

    def watch(self) -> Watch:
        """Return a watch for commits of other connections. The caller closes it."""
        watch = Watch(self)
        self._watches.add(watch)  # before it opens: a fork in between must see it
        watch.changed()
        return watch

    def check_place(self) -> None:
        """Raise if the file was deleted, moved or replaced."""
        if self._file is not None:
            self._file.check_place()

    def _wait_for_fork(self) -> None:
        while self.forking:
            time.sleep(0.001)  # up to 2 s: see close_before_fork

    def _open(self) -> sqlite3.Connection:
        connection = None
        at_rest = self._at_rest
        try:
            connection = sqlite3.connect(
                self._target if at_rest is None or self._file is None else self._file.address(at_rest=True),
                uri=at_rest is not None,
                isolation_level=None,
                timeout=0.25,
                check_same_thread=False,
                cached_statements=256,
                factory=_Connection,
            )
            connection.at_rest = at_rest
            if self.path is not None and at_rest is None:
                # The file stores the journal mode. The other settings belong to the connection.
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(f"PRAGMA synchronous = {self._synchronous}")
                connection.execute("PRAGMA journal_size_limit = 8388608")
            connection.execute("PRAGMA foreign_keys = ON")
            connection.execute("PRAGMA cache_size = -2048")
            return connection
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if connection is not None:
                connection.close()
            raise self._translate(error) from error

    def _take(self) -> Any:
        if self.path is None:
            self._one_at_a_time.acquire()  # an in-memory database is its one connection
        try:
            self._leave_inheritance()
            self._wait_for_fork()
            if self._file is not None and (now := time.monotonic()) - self._looked_at > LOOK_SECONDS:
                self._file.check_place()
                if self._at_rest is not None:
                    if (found := self._file.version_at_rest()) != self._at_rest:
                        self._at_rest = found  # another process wrote by another path to the file
                        self._drop_idle()
                elif self._connections:  # without a connection of ours, others may remove the -wal
                    self._file.check_wal()
                self._looked_at = now  # only after success, so that the next caller repeats a failed check
            connection = self._idle_or_new()
            if self._file is not None and self._at_rest is None and not self._file.knows_wal:
                self._file.check_wal()
            return connection
        except BaseException:
            if self.path is None:
                self._one_at_a_time.release()
            raise

    def _idle_or_new(self) -> Any:
        """Open a connection. Without free descriptors, wait for another thread's connection like for a lock."""
        deadline = time.monotonic() + LOCK_SECONDS / (STORE.retries + 1)
        while True:
            try:
                return super()._idle_or_new()
            except Transient as trouble:
                if time.monotonic() > deadline or not sqlite_file.lacks_descriptors(trouble.__cause__):
                    raise
            pause(0.01, self.stop)

    def _give(self, connection: Any) -> None:
        super()._give(connection)
        if self.path is None:
            self._one_at_a_time.release()

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        # Inlined: a query by key takes 10 microseconds, and the general path as much again.
        check_query(sql)
        try:
            connection = self._take()
            try:
                row: Row | None = connection.execute(sql, parameters).fetchone()
                return row
            except self._errors as error:
                raise self._translate(error) from error
            finally:
                self._give(connection)
        except Transient:
            return super().one(sql, parameters)  # with retries

    def _tx(self, connection: sqlite3.Connection) -> Tx:
        return Tx("sqlite", connection.execute, connection.executemany)

    def _once(self, work: Callable[[Tx], T], operation: str, *, slow: bool = False) -> T:
        self._leave_inheritance()
        refuse_within(self._writing, self.name)
        with self._writing:
            try:
                return super()._once(work, operation, slow=slow)
            finally:
                self._end_interrupted()

    def _end_interrupted(self) -> None:
        """Close a writer whose transaction a signal handler's exception has left open.

        It would stay alive and lock the database: a connection and its statements refer to each other.
        """
        connection, self._writer = self._writer, None
        with suppress(sqlite3.ProgrammingError):  # already closed when it was given back
            if connection is not None and connection.in_transaction:
                self._drop(connection)

    def _leave_inheritance(self) -> None:
        if self._guard.crossed:
            if self.path is None or self._connections or any(watch.is_open for watch in _all(self._watches)):
                if self._file is not None:
                    self._file.mark_inherited()
                self._guard.check()  # a connection in use belongs to the parent: see below
            self._writing = threading.RLock()  # a thread of the parent may hold the old one
            self.forking = False
        super()._leave_inheritance()

    def close_before_fork(self) -> None:
        """Close idle connections, and wait up to 2 s for other threads to finish.

        SQLite tracks the locks of each file per process. A child would inherit that record but not the locks: the parent,
        on closing, would delete the ``-wal`` that the child writes to. So no open connection may cross a fork. If one does,
        the child refuses to use the database.
        """
        deadline = time.monotonic() + 2.0
        self.forking = True
        collected = False
        for watch in _all(self._watches):
            watch.close_before_fork()
        while self.path is not None and self._connections and time.monotonic() < deadline:
            while self._idle:
                with suppress(IndexError):  # another thread has taken it
                    self._drop(self._idle.pop())
            if self._connections:
                if not collected:
                    gc.collect()  # closes connections that an interrupted call has lost
                    collected = True
                time.sleep(0.001)

    def _begin(self, connection: sqlite3.Connection, *, slow: bool) -> None:
        self._end_interrupted()  # an exception may have interrupted the earlier call of it
        self._writer = connection
        # This attempt's share of the whole wait. `run` logs and retries.
        deadline = time.monotonic() + LOCK_SECONDS / (STORE.retries + 1)
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            pause(0.001, self.stop)

    def _commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")
        # Checked afterwards: a file that is in its place now was there when the commit reached it.
        self.check_place()

    def _broken(self, connection: _Connection) -> bool:
        # A signal handler may raise between BEGIN and the end of the call. An open transaction would lock the database.
        return connection.in_transaction or connection.at_rest != self._at_rest

    def _drop(self, connection: sqlite3.Connection) -> None:
        super()._drop(connection)
        if self._file is not None and not self._connections:
            self._file.forget_wal()  # the last process to close the database removes it

    def _rollback(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # errors like SQLITE_FULL have already rolled back
            connection.execute("ROLLBACK")

    def _translate(self, error: Exception) -> HeadwayError | Transient:
        if not isinstance(error, sqlite3.Error | UnicodeDecodeError):
            return unacceptable(error)
        if sqlite_file.lacks_descriptors(error):
            return Transient(StorageError(f"{self.path} cannot be opened: this process has too many open files."))
        found = sqlite_file.translate(error, self.path)
        return Transient(found) if _is_busy(error) else found


class Watch:
    """Detects commits of other connections, in any process, by ``PRAGMA data_version``.

    Its own connection must not cross a fork either (see `SQLite.close_before_fork`). It is closed before each fork and
    opened again by the next check, which counts the unknown time between as a change.
    """

    def __init__(self, database: SQLite) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._version: int | None = None

    def changed(self) -> bool:
        """Return whether another connection may have committed since the last call."""
        with self._lock:
            if self._closed or self._database.forking:
                return False
            if self._connection is None:
                self._database.check_place()  # SQLite would create a missing file
                self._connection, self._version = self._database.own_connection(), None
            try:
                version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.OperationalError:
                version = None  # locked for a moment, such as in recovery
            before, self._version = self._version, version
            return version is None or version != before

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        self._closed = True
        self.close_before_fork()

    def close_before_fork(self) -> None:
        with self._lock:  # waits for at most one check
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


class _Connection(sqlite3.Connection):
    ticket: object
    at_rest: tuple[int, int] | None  # the version that it reads


_open_files: WeakSet[SQLite] = WeakSet()


def _all(those: WeakSet[T]) -> list[T]:
    while True:
        with suppress(RuntimeError):  # another thread has added one
            return list(those)


def _before_fork() -> None:
    for database in _all(_open_files):
        database.close_before_fork()


def _after_fork() -> None:
    for database in _all(_open_files):
        database.forking = False


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=sqlite_file.OpenFile.renew_lock)


def _is_busy(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
