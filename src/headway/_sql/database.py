"""What both engines have in common: transactions, the pool of connections, the schema's migrations.

Statements are written once, with ``?`` for parameters and in the dialect both engines share. `Database.run` is the
way to write: one transaction, repeated when the engine says *busy* or the connection broke, so ``work`` must decide by
what it reads and never by what an earlier try of its own did. A connection that breaks while COMMIT is under way
leaves the outcome unknown; repeating is right only because everything we write carries an identity.
"""

from __future__ import annotations

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeVar

from headway.errors import HeadwayError, InvalidInput, StorageError, StoreNewer
from headway.lifecycle import ForkGuard
from headway.retry import STORE, RetryPolicy, pause
from headway.telemetry import Log, metrics

log = Log("sql")

Engine = Literal["sqlite", "postgresql"]
Value = str | int | float | bytes | None
Row = tuple[Any, ...]  # a column's type is said where it is read
T = TypeVar("T")

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
            except Transient as trouble:
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

    def write(
        self, sql: str, parameters: Sequence[Value] = (), *, operation: str = "write", idempotent: bool = False
    ) -> list[Row]:
        """One statement that writes, as a transaction of its own; the rows it returns (``RETURNING``).

        ``idempotent`` says that the statement changes nothing when it is executed a second time, because it carries an
        identity of its own. Then it is sent alone, which on PostgreSQL takes one round trip, not three.
        """
        if not idempotent:
            return self.run(lambda tx: tx.all(sql, parameters), operation=operation)
        try:
            return self._ask_once(lambda tx: tx.all(sql, parameters))
        except Transient as trouble:
            raise trouble.final from trouble.__cause__

    def now(self) -> float:
        return self._ask(Tx.now)

    def own_connection(self) -> Any:
        """A driver connection outside the pool, for one who listens on it; the caller closes it."""
        with self.translated():
            return self._open()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """The driver's errors become headway's, for work on `own_connection`."""
        known: tuple[type[Exception], ...] = (*self._errors(), Transient)
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

    def check(self, *, writable: bool) -> None:
        """Refuse what is not a database of ours before anything is done with it."""

    def exists(self) -> bool:
        """Whether a headway was here before."""
        return True

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

    def _explained(self, error: Exception) -> HeadwayError | Transient:
        """A driver's error in our words; wrapped in `Transient` when another try may help."""
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
            except Transient as trouble:
                log.warning("the query is tried again", operation="query", error=str(trouble.final))
            return self._ask_once(question)
        except Transient as trouble:
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
        known: tuple[type[Exception], ...] = (*self._errors(), Transient)
        try:
            connection = self._take()
            try:
                begin(connection)
            except self._errors() as error:
                if not isinstance(self._explained(error), Transient):
                    raise
                self._give(connection)  # as in _ask: nothing was read yet
                connection = None
                connection = self._take()
                begin(connection)
            yield connection
        except known as error:  # `Transient` when the connection could not even be opened
            raise self._final(error) from error
        finally:
            if connection is not None:
                self._give(connection)

    def _final(self, error: Exception) -> HeadwayError:
        """What to raise for a driver's error that is not tried again."""
        explained = error if isinstance(error, Transient) else self._explained(error)
        return explained.final if isinstance(explained, Transient) else explained

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


class Transient(Exception):
    """Worth another try; ``final`` is what to raise when tries are used up."""

    def __init__(self, final: HeadwayError) -> None:
        super().__init__(str(final))
        self.final = final


#: What a driver raises for a value no database can hold: a number beyond 64 bits, half a character.
UNACCEPTABLE = (OverflowError, UnicodeEncodeError)


def unacceptable(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"A value cannot be kept in a database: {error}.", hint="Use 64-bit numbers and whole characters."
    )


@lru_cache(maxsize=2)
def migrations(engine: Engine) -> list[tuple[int, list[str]]]:
    """(version, statements) of every ``migrations/NNNN_name.sql``, in order, for one engine.

    A line that ends in ``-- sqlite`` or ``-- postgresql`` is for that engine alone; no other difference exists.
    """
    other = "postgresql" if engine == "sqlite" else "sqlite"
    steps = []
    folder = Path(__file__).with_name("migrations")
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


def refuse_newer(name: str, found: int, steps: list[tuple[int, list[str]]]) -> None:
    if found > len(steps):
        raise StoreNewer(f"{name} has schema {found}; this headway knows up to {len(steps)}.")
