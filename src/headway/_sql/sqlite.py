"""SQLite, through the standard library."""

from __future__ import annotations

import gc
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

from headway._sql import sqlite_file
from headway._sql.database import UNACCEPTABLE, Database, Transient, unacceptable
from headway._sql.schema import migrations, refuse_newer
from headway._sql.tx import Engine, Row, Tx, Value, check_query
from headway.core.lifecycle import refuse_within
from headway.core.retry import STORE, pause
from headway.errors import HeadwayError, StorageError, StoreCorrupt
from headway.telemetry import metrics

T = TypeVar("T")

#: How long a writer waits for another process's transaction before it gives up.
LOCK_SECONDS = 30.0

#: So often is looked whether the file and its -wal are still those that were opened; for the file also at every commit.
LOOK_SECONDS = 0.1


class SQLite(Database):
    """WAL, synchronous=FULL, BEGIN IMMEDIATE. Writers of this process queue on a lock, so that they do not starve
    each other in SQLite's own busy wait; other processes are waited for up to `LOCK_SECONDS`, interruptibly."""

    engine: Engine = "sqlite"

    def __init__(self, path: Path | None, *, synchronous: str, stop: threading.Event | None) -> None:
        super().__init__(f"sqlite:///{path}" if path else "sqlite:///:memory:", stop=stop)
        self.path = Path(os.path.abspath(path)) if path else None  # a program may change its directory
        self._target = str(self.path or ":memory:")
        self._synchronous = synchronous
        self._writing = threading.RLock()
        self._writer: sqlite3.Connection | None = None  # whose transaction is under way
        self.forking = False
        self._file: sqlite_file.OpenFile | None = None
        self._looked_at = 0.0
        #: Which content of the file is read as it lies there (`OpenFile.version_at_rest`); None: as usual, through its log.
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

        # First without the lock of a writer: a reader of a database in use, or of one it may not write, needs none.
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
            with self._counted():
                sqlite_file.check_identity(self._file)

    def exists(self) -> bool:
        return True  # a file that is not there is not opened, and one that is there was checked

    def check(self, *, writable: bool) -> None:
        """Refuse a file that is not a headway database, or beside which lies the -wal of another one."""
        if self.path is not None:
            self._file = sqlite_file.OpenFile(self.path)
            sqlite_file.check_header(self._file, writable=writable)
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
        """A way to see that somebody wrote, by a connection of its own; whoever asks for it closes it."""
        watch = Watch(self)
        self._watches.add(watch)  # before it opens anything: a fork in between must not overlook it
        watch.changed()
        return watch

    def check_place(self) -> None:
        """Raise if the file was deleted, moved or replaced."""
        if self._file is not None:
            self._file.check_place()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Around a connection that is not the pool's: a fork waits for its end."""
        self._wait_for_fork()
        ticket = self._issue_ticket()
        try:
            yield
        finally:
            self._tickets.discard(ticket)

    def _wait_for_fork(self) -> None:
        while self.forking:
            time.sleep(0.001)  # for 2 s at the most: see close_before_fork

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
                # Set on every connection: the journal mode is kept in the file, the others are not.
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
            self._one_at_a_time.acquire()  # an in-memory database *is* its one connection
        try:
            self._leave_inheritance()
            self._wait_for_fork()
            if self._file is not None and (now := time.monotonic()) - self._looked_at > LOOK_SECONDS:
                self._file.check_place()
                if self._at_rest is not None:
                    self._see_whether_it_rests(self._file)
                elif self._connections:  # else the -wal is none of ours, and whoever uses it may remove it
                    self._file.check_wal()
                self._looked_at = now  # not before: a look that failed would vouch for whoever asks next
            connection = self._idle_or_new()
            if self._file is not None and self._at_rest is None and not self._file.knows_wal:
                self._file.check_wal()
            return connection
        except BaseException:
            if self.path is None:
                self._one_at_a_time.release()
            raise

    def _idle_or_new(self) -> Any:
        """Where no more files can be opened, one that another thread has is waited for as a lock is: see `_begin`."""
        deadline = time.monotonic() + LOCK_SECONDS / (STORE.retries + 1)
        while True:
            try:
                return super()._idle_or_new()
            except Transient as trouble:
                if time.monotonic() > deadline or not sqlite_file.lacks_descriptors(trouble.__cause__):
                    raise
            pause(0.01, self.stop)

    def _see_whether_it_rests(self, file: sqlite_file.OpenFile) -> None:
        """Somebody may write to the file by another way to it: then what is open does not know the new content."""
        found = file.version_at_rest()
        if found != self._at_rest:
            self._at_rest = found
            idle, self._idle = self._idle, []
            for connection in idle:
                self._drop(connection)

    def _give(self, connection: Any) -> None:
        super()._give(connection)
        if self.path is None:
            self._one_at_a_time.release()

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        # Written out: asking whether an item is done takes 10 microseconds, and two context managers as much again.
        check_query(sql)
        try:
            connection = self._take()
            try:
                row: Row | None = connection.execute(sql, parameters).fetchone()
                return row
            except self._errors() as error:
                raise self._translate(error) from error
            finally:
                self._give(connection)
        except Transient:
            return super().one(sql, parameters)  # with its pauses

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
        """Close a writer that an exception of a signal handler kept from ending its transaction. Nobody may hold it any
        more, and still it would live, and lock everybody out: a connection and its statements refer to each other."""
        connection, self._writer = self._writer, None
        with suppress(sqlite3.ProgrammingError):  # it was closed when it was given back
            if connection is not None and connection.in_transaction:
                self._drop(connection)

    def _leave_inheritance(self) -> None:
        if self._guard.crossed:
            if self.path is None or self._connections or any(watch.is_open for watch in _all(self._watches)):
                if self._file is not None:
                    self._file.mark_inherited()
                self._guard.check()  # its one connection, or one that was in use, belongs to the parent: see below
            self._writing = threading.RLock()  # a thread of the parent may hold the other one
            self.forking = False
        super()._leave_inheritance()

    def close_before_fork(self) -> None:
        """Close what lies idle, giving other threads a moment to finish.

        SQLite keeps one book of locks per process and file. A child would inherit the book and not the locks: its new
        connections would think themselves protected while the parent, on closing, deletes the ``-wal`` they write to.
        So nothing open may cross a fork; where something does, the child refuses to use the database.
        """
        deadline = time.monotonic() + 2.0
        self.forking = True
        collected = False
        for watch in _all(self._watches):
            watch.close_before_fork()
        while self.path is not None and self._connections and time.monotonic() < deadline:
            while self._idle:
                with suppress(IndexError):  # another thread was quicker to take it
                    self._drop(self._idle.pop())
            if self._connections:
                if not collected:
                    gc.collect()  # one that an interrupted call lost is closed by this
                    collected = True
                time.sleep(0.001)

    def _begin(self, connection: sqlite3.Connection, *, slow: bool) -> None:
        self._end_interrupted()  # should the exception have struck where that is done
        self._writer = connection
        # This try's share of the whole wait; `run` says in the log that it tries again.
        deadline = time.monotonic() + LOCK_SECONDS / (STORE.retries + 1)
        while True:
            try:
                connection.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not _is_busy(error) or time.monotonic() > deadline:
                    raise
            pause(0.001, self.stop)

    def _begin_read(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN")

    def _commit(self, connection: sqlite3.Connection) -> None:
        connection.execute("COMMIT")
        # Afterwards: a file that is in its place now was in its place when the commit reached it.
        self.check_place()

    def _unanswered(self, connection: sqlite3.Connection) -> None:
        return None  # COMMIT is a call of a library: it answers, or the process is gone

    def _was_committed(self, transaction: object) -> bool:
        raise AssertionError("no transaction of SQLite is left unanswered")

    def _broken(self, connection: _Connection) -> bool:
        # A signal handler raised between BEGIN and the end of the call: in the pool it would lock everybody out.
        return connection.in_transaction or connection.at_rest != self._at_rest

    def _drop(self, connection: sqlite3.Connection) -> None:
        super()._drop(connection)
        if self._file is not None and not self._connections:
            self._file.forget_wal()  # whoever closes last removes it

    def _rollback(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # SQLITE_FULL and the like have already rolled back by themselves
            connection.execute("ROLLBACK")

    def _errors(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error, UnicodeDecodeError, *UNACCEPTABLE)

    def _translate(self, error: Exception) -> HeadwayError | Transient:
        if not isinstance(error, sqlite3.Error | UnicodeDecodeError):
            return unacceptable(error)
        if sqlite_file.lacks_descriptors(error):
            # Another thread gives its connection back, or whatever took the descriptors ends.
            return Transient(StorageError(f"{self.path} cannot be opened: this process has too many open files."))
        found = sqlite_file.translate(error, self.path)
        return Transient(found) if _is_busy(error) else found


class Watch:
    """Says whether somebody wrote, by ``PRAGMA data_version`` on a connection of its own: a commit of any other one changes
    it, wherever that is.

    This connection must not cross a fork either (see `SQLite.close_before_fork`). So it is closed before each, and opened
    again at the next look; what happened in between is not known, and counts as a change.
    """

    def __init__(self, database: SQLite) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._closed = False
        self._version: int | None = None

    def changed(self) -> bool:
        """Whether somebody may have written since the last look."""
        with self._lock:
            if self._closed or self._database.forking:
                return False
            if self._connection is None:
                self._database.check_place()  # SQLite would make a file that is not there
                self._connection, self._version = self._database.own_connection(), None
            try:
                version = int(self._connection.execute("PRAGMA data_version").fetchone()[0])
            except sqlite3.OperationalError:
                version = None  # locked for a moment (recovery)
            before, self._version = self._version, version
            return version is None or version != before

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def close(self) -> None:
        self._closed = True
        self.close_before_fork()

    def close_before_fork(self) -> None:
        with self._lock:  # for one look at the most: whoever has it must not find its connection closed
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()


class _Connection(sqlite3.Connection):
    ticket: object  # the pool's
    at_rest: tuple[int, int] | None  # which content it reads


_open_files: WeakSet[SQLite] = WeakSet()


def _all(those: WeakSet[T]) -> list[T]:
    while True:
        with suppress(RuntimeError):  # another thread has added one meanwhile
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
