"""The records: one small door to SQLite (stdlib) and PostgreSQL (psycopg 3).

Statements are written once, with ``?`` for parameters and in the dialect both engines share. `Database.run` is the
way to write: one transaction, repeated when the engine says *busy* or the connection broke, so ``work`` must decide by
what it reads and never by what an earlier try of its own did. A connection that breaks while COMMIT is under way
leaves the outcome unknown; repeating is right only because everything we write carries an identity.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

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

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        return self._execute(sql, parameters).fetchone()

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        return self._execute(sql, parameters).fetchall()

    def now(self) -> float:
        """The database's own time, seconds since 1970. Leases are measured by it, never by a client's clock."""
        row = self.one(f"SELECT {NOW[self.engine]}")
        assert row is not None
        return float(row[0])


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
        self._closed = False

    # ---- the verbs -------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Tx], T], *, operation: str = "write") -> T:
        """``work`` in one durable transaction; when this returns, it is committed."""
        failures = 0
        while True:
            try:
                began = time.perf_counter()
                result = self._once(work)
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
        with self._reading() as connection:
            self._begin_read(connection)
            try:
                yield self._tx(connection)
            finally:
                self._rollback(connection)

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """One row by one statement."""
        with self._reading() as connection:
            return self._tx(connection).one(sql, parameters)

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        with self._reading() as connection:
            return self._tx(connection).all(sql, parameters)

    def now(self) -> float:
        with self._reading() as connection:
            return self._tx(connection).now()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        if not self._guard.crossed:
            for connection in idle:
                connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what an engine answers ------------------------------------------------------------------------------------

    def migrate(self) -> None:
        """Bring the schema to this version, or refuse a newer one."""
        raise AssertionError("each engine has its own")

    def verify(self) -> None:
        """Raise `StoreCorrupt` if the engine finds damage (SQLite: quick_check)."""

    def size(self) -> int:
        """Bytes on disk, with the log of pending writes."""
        raise AssertionError("each engine has its own")

    def _open(self) -> Any:
        raise AssertionError("each engine has its own")

    def _tx(self, connection: Any) -> Tx:
        raise AssertionError("each engine has its own")

    def _once(self, work: Callable[[Tx], T]) -> T:
        connection = self._take()
        try:
            self._begin(connection)
            try:
                result = work(self._tx(connection))
                self._commit(connection)
                return result
            except BaseException:
                self._rollback(connection)
                raise
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

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        connection = None
        try:
            connection = self._take()
            yield connection
        except self._errors() as error:
            explained = self._explained(error)
            raise (explained.final if isinstance(explained, _Transient) else explained) from error
        except _Transient as trouble:  # the connection could not even be opened
            raise trouble.final from trouble.__cause__
        finally:
            if connection is not None:
                self._give(connection)

    def _give(self, connection: Any) -> None:
        if self._closed or self._broken(connection):
            connection.close()
        else:
            self._idle.append(connection)  # atomic; the last one used is the next one taken

    def _take(self) -> Any:
        if self._closed:
            raise HeadwayError(f"{self.name} was closed.")
        if self._guard.crossed:
            with self._lock:
                self._inherited, self._idle = self._idle, []
                self._guard = ForkGuard(f"The connection to {self.name}")
        try:
            return self._idle.pop()
        except IndexError:
            return self._open()


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
        if path is None:
            self._one_at_a_time = threading.Lock()

    def migrate(self) -> None:
        if self.one("PRAGMA user_version") == (len(migrations("sqlite")),):
            return  # looked at first: a reader need not wait for a writer, nor have the right to write

        def work(tx: Tx) -> None:
            row = tx.one("PRAGMA user_version")
            found = int(row[0]) if row else 0
            steps = migrations("sqlite")
            _refuse_newer(self.name, found, steps)
            for version, statements in steps[found:]:
                for statement in statements:
                    tx.execute(statement)
                tx.execute(f"PRAGMA user_version = {version}")

        self.run(work, operation="migrate")

    def verify(self) -> None:
        rows = self.all("PRAGMA quick_check(3)")
        if rows != [("ok",)]:
            raise StoreCorrupt(f"The database {self.path} is damaged: {rows[0][0]}.")
        if self.path is not None:
            _sqlite_file.check_identity(self.path, self.all)

    def size(self) -> int:
        if self.path is None:
            row = self.one("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
            return int(row[0]) if row else 0
        return _sqlite_file.size(self.path)

    def _open(self) -> sqlite3.Connection:
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
        except sqlite3.DatabaseError as error:
            raise self._meaning(error) from error

    def _take(self) -> Any:
        if self.path is None:
            self._one_at_a_time.acquire()  # an in-memory database *is* its one connection
        try:
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
        connection = self._take()
        try:
            row: Row | None = connection.execute(sql, parameters).fetchone()
            return row
        except sqlite3.Error as error:
            raise self._meaning(error) from error
        finally:
            self._give(connection)

    def _tx(self, connection: sqlite3.Connection) -> Tx:
        return Tx("sqlite", connection.execute, connection.executemany)

    def _once(self, work: Callable[[Tx], T]) -> T:
        with self._writing:
            return super()._once(work)

    def _begin(self, connection: sqlite3.Connection) -> None:
        deadline = time.monotonic() + LOCK_SECONDS
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
        return (sqlite3.Error,)

    def _explained(self, error: Exception) -> HeadwayError | _Transient:
        assert isinstance(error, sqlite3.Error)
        return _Transient(self._meaning(error)) if _is_busy(error) else self._meaning(error)

    def _meaning(self, error: sqlite3.Error) -> HeadwayError:
        return _sqlite_file.meaning(error, self.path)


def _is_busy(error: sqlite3.Error) -> bool:
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

    def size(self) -> int:
        row = self.one(
            "SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = 'headway' AND c.relkind = 'r'"
        )
        return int(row[0]) if row else 0

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

    def _away(self, error: Exception) -> Unavailable:
        return Unavailable(
            f"PostgreSQL at {self.name} cannot be reached: {redact(str(error)).strip().splitlines()[0]}",
            hint="Check that it runs and that the address is right; then run the same command again.",
        )

    def _tx(self, connection: Connection[Row]) -> Tx:
        cursor = connection.cursor()

        def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
            return cursor.execute(_percent(sql), parameters or None)

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
        return (error,)

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
            case psycopg.IntegrityError():
                return StorageError(f"A constraint of {self.name} was violated: {said}")
            case psycopg.OperationalError() | psycopg.InterfaceError():
                return _Transient(self._away(error))
            case _:
                return StorageError(f"PostgreSQL at {self.name} failed: {said}")


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
    parts = urlsplit(url)
    if parts.scheme in ("postgresql", "postgres"):
        database: Database = PostgreSQL(url, stop=stop)
        if not create and database.one("SELECT 1 WHERE to_regclass('headway.meta') IS NOT NULL") is None:
            raise NotFound(
                f"There are no records of headway in {database.name}.",
                hint="Start a job first (headway run ...), or name the right one: --database URL",
            )
        database.migrate()
        return database
    options = parse_qs(parts.query)
    synchronous = options.get("synchronous", ["full"])[-1].upper()
    if synchronous not in ("FULL", "NORMAL"):
        raise InvalidInput(f"synchronous={synchronous.lower()} is not known.", hint="Use full (default) or normal.")
    path = sqlite_path(url)
    if path is None:
        memory = SQLite(None, synchronous=synchronous, stop=stop)
        memory.migrate()
        return memory
    sqlite = SQLite(path, synchronous=synchronous, stop=stop)
    if not path.exists():
        if not create:
            raise NotFound(
                f"There is no database at {path}.",
                hint="Start a job first (headway run ...), or name the right one: --database sqlite:///FILE",
            )
        _create_when_possible(path, stop)
    _sqlite_file.check_header(path, writable=create)
    _sqlite_file.check_identity(path, sqlite.all)
    sqlite.migrate()
    return sqlite


def sqlite_path(url: str) -> Path | None:
    """The file an address names; None for a database in memory or on a server."""
    parts = urlsplit(url)
    if parts.scheme in ("postgresql", "postgres"):
        return None
    if parts.scheme != "sqlite" or parts.netloc:
        raise InvalidInput(
            f"{redact(url)!r} is not a database address.",
            hint="Use sqlite:///file.db, sqlite:////absolute/file.db or postgresql://user@host/name",
        )
    location = unquote(parts.path[1:])
    return None if location in ("", ":memory:") else Path(location)


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

    A line that ends in ``-- sqlite`` or ``-- postgresql`` is for that engine alone; that is all the difference there is.
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
