"""The records: one small door to SQLite (stdlib) and PostgreSQL (psycopg 3).

Statements are written once, with ``?`` for parameters and in the dialect both engines share. `Database.run` is the
way to write: one transaction, repeated when the engine says *busy* or the connection broke, so ``work`` must decide by
what it reads and never by what an earlier try of its own did. A connection that breaks while COMMIT is under way
leaves the outcome unknown; repeating is right only because everything we write carries an identity.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit
from weakref import WeakSet

from headway import _sqlite_file
from headway.errors import (
    HeadwayError,
    InvalidInput,
    MissingExtra,
    NotFound,
    StorageError,
    StoreCorrupt,
    StoreForeign,
    StoreFull,
    StoreNewer,
    StoreReadOnly,
    Unavailable,
)
from headway.lifecycle import ForkGuard
from headway.retry import STORE, RetryPolicy, pause
from headway.telemetry import Log, metrics, redact

if TYPE_CHECKING:
    from psycopg import Connection

log = Log("sql")

Engine = Literal["sqlite", "postgresql"]
Value = str | int | float | bytes | None
Row = tuple[Any, ...]  # a column's type is said where it is read
T = TypeVar("T")

#: How long a writer waits for another process's transaction before it gives up.
LOCK_SECONDS = 30.0

#: Rows that `Tx.insert` puts into one statement; more bring nothing.
ROWS_TOGETHER = 50

#: The database's own clock, seconds since 1970, as an expression of each engine.
NOW: dict[Engine, str] = {
    "sqlite": "(julianday('now') - 2440587.5) * 86400.0",
    "postgresql": "extract(epoch FROM clock_timestamp())::double precision",
}


class Cursor(Protocol):
    """What we use of a DB-API cursor; both drivers have it."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...
    def __iter__(self) -> Iterator[Row]: ...


class Tx:
    """An open transaction."""

    __slots__ = ("_execute", "_executemany", "engine")

    def __init__(
        self,
        engine: Engine,
        execute: Callable[[str, Sequence[Value]], Cursor],
        executemany: Callable[[str, Iterable[Sequence[Value]]], Cursor],
    ) -> None:
        self.engine = engine
        self._execute = execute
        self._executemany = executemany

    def execute(self, sql: str, parameters: Sequence[Value] = ()) -> int:
        """Run one statement; how many rows it touched."""
        return self._execute(sql, parameters).rowcount

    def executemany(self, sql: str, rows: Iterable[Sequence[Value]]) -> int:
        """Run one statement for every row; how many rows were touched in all."""
        return self._executemany(sql, rows).rowcount

    def insert(self, sql: str, rows: Sequence[Sequence[Value]]) -> int:
        """Run an INSERT, written for one row, for all of them; how many rows were touched in all.

        Many rows share a statement: on SQLite every statement that a constraint may abort first saves the pages it is
        going to change, which costs more than the row itself.
        """
        many, count, together = _for_many(sql), 0, len(rows) - len(rows) % ROWS_TOGETHER
        for start in range(0, together, ROWS_TOGETHER):
            values = list(chain.from_iterable(rows[start : start + ROWS_TOGETHER]))
            count += self._execute(many, values).rowcount
        if together < len(rows):
            count += self._executemany(sql, rows[together:]).rowcount
        return count

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        return self._execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        return self._execute(sql, parameters).fetchall()

    def now(self) -> float:
        """The database's own time, seconds since 1970. Leases are measured by it, never by a client's clock."""
        row = self.one(f"SELECT {NOW[self.engine]}")
        assert row is not None
        return float(row[0])


@lru_cache(maxsize=64)
def _for_many(sql: str) -> str:
    """``INSERT … VALUES (?, ?) …`` with its row repeated."""
    head, row, tail = re.split(r"(?<=VALUES )(\([^)]*\))", sql, maxsplit=1)
    return head + ", ".join([row] * ROWS_TOGETHER) + tail


def marks(count: int) -> str:
    """``?,?,?`` for an IN list."""
    return ",".join("?" * count)


class Database:
    """A pool of connections to one database, made by `connect`.

    Threads each get a connection of their own while they use one. After a fork the child starts an empty pool: the
    inherited connections are kept aside unclosed, because closing them would disturb the parent.
    """

    engine: Engine
    #: The address as it may be shown: without a password.
    name: str

    def __init__(self, name: str, *, stop: threading.Event | None = None) -> None:
        self.name = name
        self.stop = stop
        self._lock = threading.Lock()
        self._idle: list[Any] = []  # driver connections; each engine's subclass knows which
        self._guard = ForkGuard(f"The connection to {name}")
        self._inherited: list[Any] = []
        self._connections = 0  # open ones, idle or in use
        self._closed = False

    # ---- the verbs -------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Tx], T], *, operation: str = "write") -> T:
        """``work`` in one durable transaction; when this returns, it is committed."""
        failures = 0
        while True:
            try:
                began = time.perf_counter()
                result = self._once(work, operation)
                metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation=operation)
                return result
            except _Transient as trouble:
                failures += 1
                metrics.count("headway_sql_retries", operation=operation)
                policy = self._policy()
                if policy.exhausted(failures):
                    metrics.count("headway_sql_failures", operation=operation)
                    raise trouble.final from trouble.__cause__
                wait = policy.delay(failures)
                log.warning(
                    "the transaction is tried again", operation=operation, attempt=failures, error=str(trouble.final)
                )
                pause(wait, self.stop)
            except StorageError:
                metrics.count("headway_sql_failures", operation=operation)
                raise

    @contextmanager
    def read(self) -> Iterator[Tx]:
        """Several reads of one consistent moment."""
        with self._reading(self._begin_read) as connection:
            try:
                yield self._tx(connection)
            finally:
                self._rollback(connection)

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """One row by one statement."""
        return self._ask(lambda tx: tx.one(sql, parameters))

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        return self._ask(lambda tx: tx.all(sql, parameters))

    def now(self) -> float:
        return self._ask(Tx.now)

    def own_connection(self) -> Any:
        """A driver connection outside the pool, for one who listens on it; the caller closes it."""
        with self.translated():
            return self._open()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """The driver's errors become headway's, for work on `own_connection`."""
        known: tuple[type[Exception], ...] = (*self._errors(), _Transient)
        try:
            yield
        except known as error:
            raise self._final(error) from error

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if not self._guard.crossed:
            for connection in idle:
                self._drop(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what an engine answers ------------------------------------------------------------------------------------

    def migrate(self) -> None:
        """Bring the schema to this version, or refuse a newer one."""
        raise AssertionError("each engine has its own")

    def verify(self) -> None:
        """Raise `StoreCorrupt` if the engine finds damage (SQLite: integrity_check)."""

    def size(self) -> int:
        """Bytes on disk, with the log of pending writes."""
        raise AssertionError("each engine has its own")

    def _open(self) -> Any:
        raise AssertionError("each engine has its own")

    def _tx(self, connection: Any) -> Tx:
        raise AssertionError("each engine has its own")

    def _once(self, work: Callable[[Tx], T], operation: str) -> T:
        connection = self._take()
        try:
            self._begin(connection)
            log.debug("transaction begun", operation=operation)
            try:
                result = work(self._tx(connection))
                self._commit(connection)
            except BaseException:
                self._rollback(connection)
                log.debug("transaction rolled back", operation=operation)
                raise
            log.debug("transaction committed", operation=operation)
            return result
        except self._errors() as error:
            raise self._explained(error) from error
        finally:
            self._give(connection)

    def _errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises."""
        raise AssertionError("each engine has its own")

    def _explained(self, error: Exception) -> HeadwayError | _Transient:
        """A driver's error in our words; wrapped in `_Transient` when another try may help."""
        raise AssertionError("each engine has its own")

    def _begin(self, connection: Any) -> None:
        raise AssertionError("each engine has its own")

    def _begin_read(self, connection: Any) -> None:
        raise AssertionError("each engine has its own")

    def _commit(self, connection: Any) -> None:
        raise AssertionError("each engine has its own")

    def _rollback(self, connection: Any) -> None:
        raise AssertionError("each engine has its own")

    def _broken(self, connection: Any) -> bool:
        return False

    def _policy(self) -> RetryPolicy:
        return STORE

    # ---- the pool --------------------------------------------------------------------------------------------------

    def _ask(self, question: Callable[[Tx], T]) -> T:
        """A read by one statement. Reading changes nothing, so one over a connection that broke while it lay idle
        (the server was restarted) is asked again over a new one."""
        began = time.perf_counter()
        try:
            try:
                return self._ask_once(question)
            except _Transient as trouble:
                log.warning("the query is tried again", operation="query", error=str(trouble.final))
            return self._ask_once(question)
        except _Transient as trouble:
            raise trouble.final from trouble.__cause__
        finally:
            metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation="query")

    def _ask_once(self, question: Callable[[Tx], T]) -> T:
        connection = self._take()
        try:
            return question(self._tx(connection))
        except self._errors() as error:
            raise self._explained(error) from error
        finally:
            self._give(connection)

    @contextmanager
    def _reading(self, begin: Callable[[Any], None]) -> Iterator[Any]:
        connection = None
        known: tuple[type[Exception], ...] = (*self._errors(), _Transient)
        try:
            connection = self._take()
            try:
                begin(connection)
            except self._errors() as error:
                if not isinstance(self._explained(error), _Transient):
                    raise
                self._give(connection)  # as in _ask: nothing was read yet
                connection = None
                connection = self._take()
                begin(connection)
            yield connection
        except known as error:  # `_Transient` when the connection could not even be opened
            raise self._final(error) from error
        finally:
            if connection is not None:
                self._give(connection)

    def _final(self, error: Exception) -> HeadwayError:
        """What to raise for a driver's error that is not tried again."""
        explained = error if isinstance(error, _Transient) else self._explained(error)
        return explained.final if isinstance(explained, _Transient) else explained

    def _give(self, connection: Any) -> None:
        if self._broken(connection):
            # What broke this one (the server went away) broke the idle ones too: each would cost a try of its own.
            idle, self._idle = self._idle, []
            for one in (connection, *idle):
                self._drop(one)
        elif self._closed:
            self._drop(connection)
        else:
            self._idle.append(connection)  # atomic; the last one used is the next one taken

    def _drop(self, connection: Any) -> None:
        connection.close()
        self._count_connections(-1)

    def _count_connections(self, change: int) -> None:
        with self._lock:
            self._connections += change
            metrics.gauge("headway_sql_connections", self._connections, engine=self.engine)

    def _take(self) -> Any:
        if self._closed:
            raise HeadwayError(f"{self.name} was closed.")
        self._leave_inheritance()
        try:
            return self._idle.pop()
        except IndexError:
            self._count_connections(+1)  # before it is open: a fork in between must not overlook it
            try:
                return self._open()
            except BaseException:
                self._count_connections(-1)
                raise

    def _leave_inheritance(self) -> None:
        """In a forked child: begin with nothing. Locks too: a thread of the parent may have held them."""
        if self._guard.crossed:
            self._lock = threading.Lock()
            self._inherited, self._idle, self._connections = self._idle, [], 0
            self._guard = ForkGuard(f"The connection to {self.name}")


class _Transient(Exception):
    """Worth another try; ``final`` is what to raise when tries are used up."""

    def __init__(self, final: HeadwayError) -> None:
        super().__init__(str(final))
        self.final = final


# ---------------------------------------------------------------------------------------------------------------------
# SQLite


class SQLite(Database):
    """WAL, synchronous=FULL, BEGIN IMMEDIATE. Writers of this process queue on a lock, so that they do not starve
    each other in SQLite's own busy wait; other processes are waited for up to `LOCK_SECONDS`, interruptibly."""

    engine: Engine = "sqlite"

    def __init__(self, path: Path | None, *, synchronous: str, stop: threading.Event | None) -> None:
        super().__init__(f"sqlite:///{path}" if path else "sqlite:///:memory:", stop=stop)
        self.path = path
        self._synchronous = synchronous
        self._writing = threading.Lock()
        self.forking = False
        self._hold: _sqlite_file.Hold | None = None
        _open_files.add(self)
        if path is None:
            self._one_at_a_time = threading.Lock()

    def migrate(self) -> None:
        steps = migrations("sqlite")

        def found_version(tx: Tx) -> int:
            row = tx.one("PRAGMA user_version")
            assert row is not None
            _refuse_newer(self.name, row[0], steps)
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

        self.run(work, operation="migrate")

    def verify(self) -> None:
        rows = self.all("PRAGMA integrity_check(3)")
        if rows != [("ok",)]:
            raise StoreCorrupt(f"The database {self.path} is damaged: {rows[0][0]}.")
        if self._hold is not None:
            _sqlite_file.check_identity(self._hold)

    def check(self, *, writable: bool) -> None:
        """Refuse a file that is not a headway database, or beside which lies the -wal of another one."""
        if self.path is not None:
            self._hold = _sqlite_file.Hold(self.path)
            _sqlite_file.check_header(self._hold, writable=writable)
            _sqlite_file.check_identity(self._hold)

    def close(self) -> None:
        super().close()
        if self._hold is not None:
            self._hold.release()

    def size(self) -> int:
        if self.path is None:
            row = self.one("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
            size = int(row[0]) if row else 0
        else:
            size = _sqlite_file.size(self.path)
        metrics.gauge("headway_sql_bytes", size, engine=self.engine)
        return size

    def _open(self) -> sqlite3.Connection:
        connection = None
        try:
            connection = sqlite3.connect(
                self.path or ":memory:",
                isolation_level=None,
                timeout=0.25,
                check_same_thread=False,
                cached_statements=256,
            )
            if self.path is not None:
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
            raise self._explained(error) from error

    def _take(self) -> Any:
        if self.path is None:
            self._one_at_a_time.acquire()  # an in-memory database *is* its one connection
        try:
            self._leave_inheritance()
            while self.forking:
                time.sleep(0.001)  # for 2 s at the most: see close_before_fork
            return super()._take()
        except BaseException:
            if self.path is None:
                self._one_at_a_time.release()
            raise

    def _give(self, connection: Any) -> None:
        super()._give(connection)
        if self.path is None:
            self._one_at_a_time.release()

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        # Written out: asking whether an item is done takes 10 microseconds, and two context managers as much again.
        try:
            connection = self._take()
        except _Transient as trouble:
            raise trouble.final from trouble.__cause__
        try:
            row: Row | None = connection.execute(sql, parameters).fetchone()
            return row
        except self._errors() as error:
            raise self._meaning(error) from error
        finally:
            self._give(connection)

    def _tx(self, connection: sqlite3.Connection) -> Tx:
        return Tx("sqlite", connection.execute, connection.executemany)

    def _once(self, work: Callable[[Tx], T], operation: str) -> T:
        self._leave_inheritance()
        with self._writing:
            return super()._once(work, operation)

    def _leave_inheritance(self) -> None:
        if self._guard.crossed:
            if self.path is None or self._connections:
                self._guard.check()  # its one connection, or one that was in use, belongs to the parent: see below
            self._writing = threading.Lock()  # a thread of the parent may hold the other one
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
        while self.path is not None and self._connections and time.monotonic() < deadline:
            while self._idle:
                with suppress(IndexError):  # another thread was quicker to take it
                    self._drop(self._idle.pop())
            if self._connections:
                time.sleep(0.001)

    def _begin(self, connection: sqlite3.Connection) -> None:
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

    def _rollback(self, connection: sqlite3.Connection) -> None:
        if connection.in_transaction:  # SQLITE_FULL and the like have already rolled back by themselves
            connection.execute("ROLLBACK")

    def _errors(self) -> tuple[type[Exception], ...]:
        return (sqlite3.Error, UnicodeDecodeError, *_UNACCEPTABLE)

    def _explained(self, error: Exception) -> HeadwayError | _Transient:
        return _Transient(self._meaning(error)) if _is_busy(error) else self._meaning(error)

    def _meaning(self, error: Exception) -> HeadwayError:
        if isinstance(error, sqlite3.Error | UnicodeDecodeError):
            return _sqlite_file.meaning(error, self.path)
        return _unacceptable(error)


_open_files: WeakSet[SQLite] = WeakSet()


def _before_fork() -> None:
    for database in list(_open_files):
        database.close_before_fork()


def _after_fork() -> None:
    for database in list(_open_files):
        database.forking = False


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


def _is_busy(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


# ---------------------------------------------------------------------------------------------------------------------
# PostgreSQL


class PostgreSQL(Database):
    """Everything lives in the schema ``headway``, so that our short table names collide with nobody's."""

    engine: Engine = "postgresql"

    def __init__(self, url: str, *, stop: threading.Event | None) -> None:
        super().__init__(redact(url), stop=stop)
        self._url = url

    def migrate(self) -> None:
        def work(tx: Tx) -> None:
            tx.execute("SELECT pg_advisory_xact_lock(hashtext('headway.migrate'))")
            exists = tx.one("SELECT to_regclass('headway.meta')")
            found = 0
            if exists is not None and exists[0] is not None:
                row = tx.one("SELECT value FROM headway.meta WHERE name = 'schema'")
                found = int(row[0]) if row else 0
            elif tx.one("SELECT 1 FROM pg_namespace WHERE nspname = 'headway'") is not None and tx.one(
                "SELECT 1 FROM pg_tables WHERE schemaname = 'headway'"
            ):
                raise StoreForeign(
                    f"The schema 'headway' in {self.name} holds tables that are not ours.",
                    hint="Use another database: --database postgresql://.../headway",
                )
            steps = migrations("postgresql")
            _refuse_newer(self.name, found, steps)
            if found == 0:
                tx.execute("CREATE SCHEMA IF NOT EXISTS headway")
            for version, statements in steps[found:]:
                for statement in statements:
                    tx.execute(statement)
                tx.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(version),))

        self.run(work, operation="migrate")

    def exists(self) -> bool:
        """Whether a headway was here before."""
        return self.one("SELECT 1 FROM pg_tables WHERE schemaname = 'headway' AND tablename = 'meta'") is not None

    def size(self) -> int:
        row = self.one(
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'headway' AND c.relkind = 'r'"
        )
        size = int(row[0]) if row else 0
        metrics.gauge("headway_sql_bytes", size, engine=self.engine)
        return size

    def _open(self) -> Connection[Row]:
        psycopg = _psycopg()
        try:
            connection: Connection[Row] = psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=5,
                application_name="headway",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=2,
                tcp_user_timeout=15_000,  # keepalives do not run while something sent is unacknowledged
                options="-c search_path=headway,public -c idle_in_transaction_session_timeout=60000",
            )
            return connection
        except psycopg.OperationalError as error:
            if "authentication failed" in str(error) or "does not exist" in str(error):
                raise Unavailable(
                    f"PostgreSQL at {self.name} refused the connection: {redact(str(error)).strip()}",
                    hint="Check user, password and database name in --database.",
                ) from error
            raise _Transient(self._away(error)) from error
        except psycopg.Error as error:
            raise InvalidInput(
                f"{self.name!r} is not a database address: {redact(str(error)).strip()}.",
                hint="Use postgresql://user@host:5432/name",
            ) from error

    def _away(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"PostgreSQL at {self.name} cannot be reached: {redact(str(error)).strip().splitlines()[0]}",
            hint="Check that it runs and that the address is right; then run the same command again.",
        )

    def _tx(self, connection: Connection[Row]) -> Tx:
        cursor = connection.cursor()

        def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
            # Without parameters psycopg takes the text as it is: nothing in it may be doubled then.
            return cursor.execute(_percent(sql), parameters) if parameters else cursor.execute(sql)

        def executemany(sql: str, rows: Iterable[Sequence[Value]]) -> Cursor:
            cursor.executemany(_percent(sql), rows)
            return cursor

        return Tx("postgresql", execute, executemany)

    def _begin(self, connection: Connection[Row]) -> None:
        connection.execute("BEGIN")

    def _begin_read(self, connection: Connection[Row]) -> None:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _commit(self, connection: Connection[Row]) -> None:
        connection.execute("COMMIT")

    def _rollback(self, connection: Connection[Row]) -> None:
        psycopg = _psycopg()
        if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            try:
                connection.execute("ROLLBACK")
            except psycopg.Error:
                connection.close()  # the error that brought us here is the one to report

    def _broken(self, connection: Connection[Row]) -> bool:
        psycopg = _psycopg()
        return connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def _policy(self) -> RetryPolicy:
        # A restart of the server takes seconds, not the milliseconds of a busy SQLite file.
        return RetryPolicy(retries=7, base=0.1, cap=4.0, jitter=0.2)

    def _errors(self) -> tuple[type[Exception], ...]:
        error: type[Exception] = _psycopg().Error
        return (error, *_UNACCEPTABLE)

    def _explained(self, error: Exception) -> HeadwayError | _Transient:
        psycopg = _psycopg()
        errors = psycopg.errors
        said = redact(str(error)).strip()
        match error:
            case errors.DiskFull() | errors.OutOfMemory():
                return StoreFull(f"PostgreSQL at {self.name} has no space left.")
            case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
                return StoreReadOnly(f"PostgreSQL at {self.name} does not let us write: {said}.")
            case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
                return _Transient(StorageError(f"PostgreSQL at {self.name} was too busy: {said}"))
            case OverflowError() | UnicodeEncodeError():
                return _unacceptable(error)
            case psycopg.DataError():
                return InvalidInput(f"A value cannot be kept in {self.name}: {said}")
            case psycopg.IntegrityError():
                return StorageError(f"A constraint of {self.name} was violated: {said}")
            case psycopg.OperationalError() | psycopg.InterfaceError():
                return _Transient(self._away(error))
            case _:
                return StorageError(f"PostgreSQL at {self.name} failed: {said}")


#: What a driver raises for a value no database can hold: a number beyond 64 bits, half a character.
_UNACCEPTABLE = (OverflowError, UnicodeEncodeError)


def _unacceptable(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"A value cannot be kept in a database: {error}.", hint="Use 64-bit numbers and whole characters."
    )


def _psycopg() -> Any:
    try:
        import psycopg
    except ImportError as error:
        raise MissingExtra("postgres", "A postgresql:// database") from error
    return psycopg


@lru_cache(maxsize=512)
def _percent(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")


# ---------------------------------------------------------------------------------------------------------------------
# Opening


def connect(url: str, *, create: bool = True, stop: threading.Event | None = None) -> Database:
    """Open ``sqlite:///file.db`` (three slashes: relative, four: absolute), ``sqlite:///:memory:`` or ``postgresql://...``.

    With ``create`` the database is made or brought to this schema version; without it a missing one is `NotFound`.
    """
    database: Database = (
        PostgreSQL(url, stop=stop) if _split(url).scheme != "sqlite" else _sqlite(url, create=create, stop=stop)
    )
    try:
        if isinstance(database, SQLite):
            database.check(writable=create)
        elif isinstance(database, PostgreSQL) and not create and not database.exists():
            raise _missing(f"There are no records of headway in {database.name}.")
        database.migrate()
    except BaseException:
        database.close()
        raise
    return database


def _sqlite(url: str, *, create: bool, stop: threading.Event | None) -> SQLite:
    options = parse_qs(_split(url).query, keep_blank_values=True)
    synchronous = options.pop("synchronous", ["full"])[-1].upper()
    if synchronous not in ("FULL", "NORMAL"):
        raise InvalidInput(f"synchronous={synchronous.lower()} is not known.", hint="Use full (default) or normal.")
    if options:
        raise InvalidInput(f"{next(iter(options))!r} is no option of a SQLite database.", hint="There is: synchronous.")
    path = sqlite_path(url)
    if path is None:
        return SQLite(None, synchronous=synchronous, stop=stop)
    if not _sqlite_file.exists(path):
        if not create:
            raise _missing(f"There is no database at {path}.")
        _create_when_possible(path, stop)
    return SQLite(path, synchronous=synchronous, stop=stop)


def _no_address(url: str) -> InvalidInput:
    return InvalidInput(
        f"{redact(url)!r} is not a database address.",
        hint="Use sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user@host/name",
    )


def _missing(what: str) -> NotFound:
    return NotFound(
        what,
        hint="Start a job first (headway run ...), or name the right one: --database sqlite:///FILE",
    )


def sqlite_path(url: str) -> Path | None:
    """The file an address names; None for a database in memory or on a server."""
    parts = _split(url)
    location = unquote(parts.path[1:])
    if parts.scheme != "sqlite" or location == ":memory:":
        return None
    if not location or "\0" in location:  # an empty name would be a database that is gone with the process
        raise _no_address(url)
    return Path(location)


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url, allow_fragments=False)  # a file's name may have a #
        if "," not in parts.netloc:  # PostgreSQL takes several hosts
            _ = parts.port
    except ValueError as error:
        raise _no_address(url) from error
    if parts.scheme not in ("postgresql", "postgres") and (parts.scheme != "sqlite" or parts.netloc):
        raise _no_address(url)
    return parts


def _create_when_possible(path: Path, stop: threading.Event | None) -> None:
    """The directory may be on a mount that is just coming up: ask again for a moment before giving up."""
    failures = 0
    while True:
        try:
            _sqlite_file.create(path, migrations("sqlite"))
            return
        except FileNotFoundError as error:
            failures += 1
            if STORE.exhausted(failures):
                raise StorageError(
                    f"The directory {path.parent} does not exist.", hint="Make it, or name another file: --database"
                ) from error
            log.warning("the directory is not there yet", path=str(path.parent), attempt=failures)
            pause(STORE.delay(failures), stop)
        except FileExistsError:
            return  # another process made it first: use theirs


@lru_cache(maxsize=2)
def migrations(engine: Engine) -> list[tuple[int, list[str]]]:
    """(version, statements) of every ``sql/NNNN_name.sql``, in order, for one engine.

    A line that ends in ``-- sqlite`` or ``-- postgresql`` is for that engine alone; no other difference exists.
    """
    other = "postgresql" if engine == "sqlite" else "sqlite"
    steps = []
    folder = Path(__file__).with_name("sql")
    files = sorted(entry.name for entry in folder.iterdir())
    for version, name in enumerate((name for name in files if name.endswith(".sql")), start=1):
        assert int(name[:4]) == version, f"{name}: migrations are numbered without gaps"
        text = folder.joinpath(name).read_text("utf-8")
        lines = (line for line in text.splitlines() if not line.rstrip().endswith(f"-- {other}"))
        statement, statements = "", []
        for line in lines:
            code = line.split("--")[0].rstrip()
            if code:
                statement += code + "\n"
            if sqlite3.complete_statement(statement):
                statements.append(statement)
                statement = ""
        steps.append((version, statements))
    return steps


def _refuse_newer(name: str, found: int, steps: list[tuple[int, list[str]]]) -> None:
    if found > len(steps):
        raise StoreNewer(f"{name} has schema {found}; this headway knows up to {len(steps)}.")
