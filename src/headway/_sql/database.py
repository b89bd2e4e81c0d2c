"""What both engines have in common: transactions, tries and repetitions.

`Database.run` is the way to write: one transaction, repeated when the engine says *busy* or the connection broke, so
``work`` must decide by what it reads and never by what an earlier try of its own did. A connection that breaks while
COMMIT is under way leaves the outcome unknown; then the database is asked what became of that transaction (see
`PostgreSQL`), and if it was committed the first try's result is returned and nothing is done again.
"""

from __future__ import annotations

import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from headway._sql.pool import Pool
from headway._sql.tx import Row, Tx, Value, check_query
from headway.core.retry import STORE, RetryPolicy, pause
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.telemetry import Log, metrics

log = Log("sql")

T = TypeVar("T")

#: Rows read at a time by `Database.pages`.
PAGE = 1000


class Database(Pool):
    """One database, made by `connect`."""

    #: How often a transaction or a query is tried again, and after how many seconds no further try begins.
    retry: RetryPolicy = STORE
    patience: float = math.inf

    def __init__(self, name: str, *, stop: threading.Event | None = None) -> None:
        super().__init__(name)
        self.stop = stop

    # ---- writing ---------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Tx], T], *, operation: str = "write") -> T:
        """``work`` in one durable transaction; when this returns, it is committed. Once: also when the answer to COMMIT
        was lost, in which case this is the answer of the try that was committed."""
        return self._transact(work, operation)

    def write(
        self, sql: str, parameters: Sequence[Value] = (), *, operation: str = "write", idempotent: bool = False
    ) -> list[Row]:
        """One statement that writes, as a transaction of its own; the rows it returns (``RETURNING``).

        ``idempotent`` says that the statement changes nothing when it is executed a second time, because it carries an
        identity of its own. Then it may be sent alone and sent again, which on PostgreSQL takes one round trip, not
        three; the answer of a repetition is the statement's own business.
        """
        if idempotent:
            return self._try_often(partial(self._write_alone, sql, parameters), operation, "the statement")
        return self._transact(lambda tx: tx.returned(sql, parameters), operation)

    def _write_alone(self, sql: str, parameters: Sequence[Value]) -> list[Row]:
        return self._once(lambda tx: tx.returned(sql, parameters), "write")

    def _transact(self, work: Callable[[Tx], T], operation: str, *, slow: bool = False) -> T:
        def attempt() -> T:
            began = time.perf_counter()
            try:
                result = self._once(work, operation, slow=slow)
            except Unanswered as lost:
                log.warning("the answer to COMMIT was lost", operation=operation, error=str(lost.trouble.final))
                asked = partial(self._was_committed, lost.transaction)
                if not self._try_often(asked, operation, "the question what became of it"):
                    raise lost.trouble from lost.trouble.__cause__
                result = lost.result
            metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation=operation)
            return result

        return self._try_often(attempt, operation, "the transaction")

    # ---- reading ---------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[Tx]:
        """Several reads of one consistent moment. Tried again until it has begun; what then fails is raised."""
        connection = self._try_often(self._take_for_reading, "query", "the query")
        try:
            with self.translated():
                try:
                    yield self._tx(connection)
                finally:
                    self._rollback(connection)
        finally:
            self._give(connection)

    def one(self, sql: str, parameters: Sequence[Value] = ()) -> Row | None:
        """One row by one statement that reads."""
        check_query(sql)
        return self._ask(lambda tx: tx.one(sql, parameters))

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Every row of one statement that reads."""
        check_query(sql)
        return self._ask(lambda tx: tx.all(sql, parameters))

    def pages(
        self, sql: str, parameters: Sequence[Value] = (), *, after: Sequence[Value], size: int = PAGE
    ) -> Iterator[list[Row]]:
        """Rows page by page along a key, so that what comes and goes meanwhile moves no row into or out of sight.

        The key is the statement's first columns, as many as ``after`` has values, and the statement orders by it:
        ``SELECT idx, … WHERE job = ? AND idx > ? ORDER BY idx LIMIT ?``. Its last parameters are the key and the limit.
        """
        key = tuple(after)
        while page := self.all(sql, (*parameters, *key, size)):
            yield page
            if len(page) < size:
                return
            key = page[-1][: len(key)]

    def now(self) -> float:
        return self._ask(Tx.now)

    def _ask(self, question: Callable[[Tx], T]) -> T:
        """A read by one statement. Reading changes nothing, so it is asked again as often as a write is tried."""
        began = time.perf_counter()
        try:
            return self._try_often(partial(self._ask_once, question), "query", "the query")
        finally:
            metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation="query")

    def _ask_once(self, question: Callable[[Tx], T]) -> T:
        connection = self._take()
        try:
            return question(self._tx(connection))
        except self._errors() as error:
            raise self._translate(error) from error
        finally:
            self._give(connection)

    def _take_for_reading(self) -> Any:
        connection = self._take()
        try:
            self._begin_read(connection)
        except BaseException as error:
            self._give(connection)
            if isinstance(error, self._errors()):
                raise self._translate(error) from error
            raise
        return connection

    # ---- a connection of one's own ---------------------------------------------------------------------------------

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
            found = error if isinstance(error, Transient) else self._translate(error)
            raise (found.final if isinstance(found, Transient) else found) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- what an engine answers ------------------------------------------------------------------------------------

    @abstractmethod
    def migrate(self) -> None:
        """Bring the schema to this version, or refuse a newer one."""

    @abstractmethod
    def check(self, *, writable: bool) -> None:
        """Refuse what is not a database of ours before anything is done with it."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether a headway was here before."""

    @abstractmethod
    def verify(self) -> None:
        """Raise `StoreCorrupt` if the engine finds damage."""

    @abstractmethod
    def size(self) -> int:
        """Bytes on disk, with the log of pending writes."""

    @abstractmethod
    def _tx(self, connection: Any) -> Tx: ...

    @abstractmethod
    def _errors(self) -> tuple[type[Exception], ...]:
        """What the driver raises."""

    @abstractmethod
    def _translate(self, error: Exception) -> HeadwayError | Transient:
        """A driver's error in our words; wrapped in `Transient` when another try may help."""

    @abstractmethod
    def _begin(self, connection: Any, *, slow: bool) -> None:
        """Begin to write. ``slow``: its statements may take as long as they need."""

    @abstractmethod
    def _begin_read(self, connection: Any) -> None: ...

    @abstractmethod
    def _commit(self, connection: Any) -> None: ...

    @abstractmethod
    def _rollback(self, connection: Any) -> None: ...

    @abstractmethod
    def _unanswered(self, connection: Any) -> Any:
        """After COMMIT failed: what names the transaction whose outcome is unknown; None if it is known to have failed."""

    @abstractmethod
    def _was_committed(self, transaction: Any) -> bool:
        """What became of a transaction that `_unanswered` named. Raises `Transient` while that cannot be said."""

    # ---- tries -----------------------------------------------------------------------------------------------------

    def _once(self, work: Callable[[Tx], T], operation: str, *, slow: bool = False) -> T:
        connection = self._take()
        try:
            self._begin(connection, slow=slow)
            log.debug("transaction begun", operation=operation)
            try:
                result = work(self._tx(connection))
                try:
                    self._commit(connection)
                except self._errors() as error:
                    trouble = self._translate(error)
                    transaction = self._unanswered(connection)
                    if transaction is not None and isinstance(trouble, Transient):
                        trouble.__cause__ = error
                        raise Unanswered(transaction, result, trouble) from error
                    raise
            except BaseException:
                self._rollback(connection)
                log.debug("transaction rolled back", operation=operation)
                raise
            log.debug("transaction committed", operation=operation)
            return result
        except self._errors() as error:
            raise self._translate(error) from error
        finally:
            self._give(connection)

    def _try_often(self, attempt: Callable[[], T], operation: str, what: str) -> T:
        failures, began = 0, time.monotonic()
        while True:
            try:
                return attempt()
            except Transient as trouble:
                failures += 1
                metrics.count("headway_sql_retries", operation=operation)
                if self.retry.exhausted(failures) or time.monotonic() - began > self.patience:
                    metrics.count("headway_sql_failures", operation=operation)
                    raise trouble.final from trouble.__cause__
                log.warning(f"{what} is tried again", operation=operation, attempt=failures, error=str(trouble.final))
                pause(self.retry.delay(failures), self.stop)
            except StorageError:
                metrics.count("headway_sql_failures", operation=operation)
                raise


class Transient(Exception):
    """Worth another try; ``final`` is what to raise when tries are used up."""

    def __init__(self, final: HeadwayError) -> None:
        super().__init__(str(final))
        self.final = final


class Unanswered(Exception):
    """COMMIT was sent and the connection broke before its answer came."""

    def __init__(self, transaction: Any, result: Any, trouble: Transient) -> None:
        super().__init__(str(trouble))
        self.transaction, self.result, self.trouble = transaction, result, trouble


#: What a driver raises for a value no database can hold: a number beyond 64 bits, half a character.
UNACCEPTABLE = (OverflowError, UnicodeEncodeError)


def unacceptable(error: Exception) -> InvalidInput:
    return InvalidInput(
        f"A value cannot be kept in a database: {error}.", hint="Use 64-bit numbers and whole characters."
    )
