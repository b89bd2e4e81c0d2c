"""Transactions, retries and metrics, the same on both engines.

`Database.run` is the way to write: one transaction, repeated when the engine is busy or the connection broke. So ``work``
must decide by what it reads, never by what an earlier attempt of it did. If the connection breaks during COMMIT, the
outcome is unknown. Then the database is asked whether that transaction was committed (see `PostgreSQL`). If so, the result
of that attempt is returned and nothing is repeated.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Self, TypeVar

from headway._sql.driver import Driver, Transient, Unanswered
from headway._sql.tx import Row, Tx, Value, check_query
from headway.core.retry import STORE, RetryPolicy, pause
from headway.errors import StorageError
from headway.telemetry import Log, metrics

log = Log("sql")

T = TypeVar("T")

#: Rows read at a time by `Database.pages`.
PAGE = 1000


class Database(Driver):
    """One database, opened by `connect`."""

    #: Retries of a transaction or query, and the seconds after which no further attempt begins.
    retry: RetryPolicy = STORE
    patience: float = math.inf

    def __init__(self, name: str, *, stop: threading.Event | None = None) -> None:
        super().__init__(name)
        self.stop = stop

    # ---- writing ---------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[Tx], T], *, operation: str = "write") -> T:
        """Run ``work`` in one durable transaction, which is committed when this returns.

        It is committed once, even if the answer to COMMIT was lost. The result is that of the committed attempt.
        """
        return self._transact(work, operation)

    def write(
        self, sql: str, parameters: Sequence[Value] = (), *, operation: str = "write", idempotent: bool = False
    ) -> list[Row]:
        """Run one statement that writes, as a transaction. Return its rows (``RETURNING``).

        ``idempotent`` asserts that a second execution changes nothing, because the statement carries an id. Then it needs
        no explicit transaction, which saves PostgreSQL two of three round trips. A repetition may return other rows.
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
                find_out = partial(self._was_committed, lost.transaction)
                if not self._try_often(find_out, operation, "the query for its outcome"):
                    raise lost.trouble from lost.trouble.__cause__
                result = lost.result
            metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation=operation)
            return result

        return self._try_often(attempt, operation, "the transaction")

    # ---- reading ---------------------------------------------------------------------------------------------------

    @contextmanager
    def read(self) -> Iterator[Tx]:
        """Yield a `Tx` that reads one consistent snapshot. Only its beginning is retried."""
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
        """Run one query. Return its first row, or None."""
        check_query(sql)
        return self._ask(lambda tx: tx.one(sql, parameters))

    def all(self, sql: str, parameters: Sequence[Value] = ()) -> list[Row]:
        """Run one query. Return its rows."""
        check_query(sql)
        return self._ask(lambda tx: tx.all(sql, parameters))

    def pages(
        self, sql: str, parameters: Sequence[Value] = (), *, after: Sequence[Value], size: int = PAGE
    ) -> Iterator[list[Row]]:
        """Yield a query's rows in pages along a key, so that concurrent inserts and deletes shift no row.

        The key is the statement's first columns, as many as ``after`` has values. The statement orders by it:
        ``SELECT idx, … WHERE job = ? AND idx > ? ORDER BY idx LIMIT ?``. Its last parameters are the key and the limit.
        """
        key = tuple(after)
        while page := self.all(sql, (*parameters, *key, size)):
            yield page
            if len(page) < size:
                return
            key = page[-1][: len(key)]

    def now(self) -> float:
        """Return the database's time, seconds since 1970."""
        return self._ask(Tx.now)

    def schema_version(self) -> int:
        """Return the number of the last migration that was applied."""
        row = self.one(self.schema_version_query)
        return int(row[0]) if row else 0

    def _ask(self, question: Callable[[Tx], T]) -> T:
        """Run one query, with the retries of a write."""
        began = time.perf_counter()
        try:
            return self._try_often(partial(self._ask_once, question), "query", "the query")
        finally:
            metrics.observe("headway_sql_seconds", time.perf_counter() - began, operation="query")

    def _ask_once(self, question: Callable[[Tx], T]) -> T:
        connection = self._take()
        try:
            return question(self._tx(connection))
        except self._errors as error:
            raise self._translate(error) from error
        finally:
            self._give(connection)

    def _take_for_reading(self) -> Any:
        connection = self._take()
        try:
            self._begin_read(connection)
        except BaseException as error:
            self._give(connection)
            if isinstance(error, self._errors):
                raise self._translate(error) from error
            raise
        return connection

    # ---- a separate connection --------------------------------------------------------------------------------------

    def own_connection(self) -> Any:
        """Return a driver connection outside the pool, such as for LISTEN. The caller closes it."""
        with self.translated():
            return self._open()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the driver's errors, for work on `own_connection`."""
        known: tuple[type[Exception], ...] = (*self._errors, Transient)
        try:
            yield
        except known as error:
            found = error if isinstance(error, Transient) else self._translate(error)
            raise (found.final if isinstance(found, Transient) else found) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- attempts --------------------------------------------------------------------------------------------------

    def _once(self, work: Callable[[Tx], T], operation: str, *, slow: bool = False) -> T:
        connection = self._take()
        try:
            self._begin(connection, slow=slow)
            log.debug("transaction begun", operation=operation)
            try:
                result = work(self._tx(connection))
                try:
                    self._commit(connection)
                except self._errors as error:
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
        except self._errors as error:
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
                log.warning(f"{what} is retried", operation=operation, attempt=failures, error=str(trouble.final))
                pause(self.retry.delay(failures), self.stop)
            except StorageError:
                metrics.count("headway_sql_failures", operation=operation)
                raise
