"""Our statements inside a transaction of the caller, on the caller's connection.

Our rows exist exactly if the caller commits. A savepoint keeps our failures from the caller's transaction, and our search
path and row format are restored at the end.

Accepted are a psycopg 3 connection, a SQLAlchemy Session or Connection over psycopg, and a ``sqlite3`` connection (or
SQLAlchemy's over it) to the same file. The database's uuid, which is written at its creation, shows that it is the same.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headway._sql.database import Database
from headway._sql.postgresql import _percent
from headway._sql.tx import Cursor, Tx, Value
from headway.errors import InvalidInput

_KINDS = "a psycopg 3 connection, a SQLAlchemy Session or Connection over psycopg, or sqlite3's to the same file"
_SAVEPOINT = "joined_by_headway"


@contextmanager
def join(database: Database, connection: object) -> Iterator[Tx]:
    """Yield a `Tx` in the caller's transaction.

    Raises `InvalidInput` if the connection is of another kind, leads to another database, is in autocommit mode, or is in
    a state that allows no writes.
    """
    with database.translated():
        driver = _driver_connection(connection)
        psycopg: Any = sys.modules.get("psycopg")
        if psycopg is not None and isinstance(driver, psycopg.Connection):
            with _in_postgresql(database, driver, psycopg) as tx:
                yield tx
        elif isinstance(driver, sqlite3.Connection):
            with _in_sqlite(database, driver) as tx:
                yield tx
        else:
            raise _refused(f"A {type(driver).__module__}.{type(driver).__qualname__} cannot be used.")


def is_two_phase(connection: object) -> bool:
    """Return whether the caller's transaction is in two phases. PostgreSQL cannot prepare one that notifies.

    psycopg keeps this in a private attribute. Without it, the transaction counts as an ordinary one.
    """
    return getattr(_driver_connection(connection), "_tpc", None) is not None


def _refused(what: str, hint: str = f"Give {_KINDS}.") -> InvalidInput:
    return InvalidInput(f"The task cannot be put into the transaction of this connection. {what}", hint=hint)


def _driver_connection(given: Any) -> Any:
    """Return the driver connection below SQLAlchemy, after SQLAlchemy has begun a transaction: else it commits nothing."""
    modules = [kind.__module__ for kind in type(given).__mro__]
    if not any(module.startswith("sqlalchemy.") for module in modules):
        return given
    if any(module.startswith("sqlalchemy.ext.asyncio") for module in modules):
        raise _refused(
            "It belongs to asyncio.", "Inside: await session.run_sync(lambda s: queue.submit(..., connection=s))"
        )
    connection = given.connection() if callable(getattr(given, "connection", None)) else given
    if not hasattr(connection, "exec_driver_sql"):
        raise _refused(f"A {type(given).__qualname__} is not a connection.")
    connection.exec_driver_sql("SELECT 1")
    return connection.connection.driver_connection


def _same_database(database: Database, found: object) -> None:
    own = database.one("SELECT value FROM meta WHERE name = 'database'")
    if own is None or found != own[0]:
        raise _refused(
            "It leads to another database than the queue's.",
            f"The queue is in {database.name}: connect to that, or use this database for the queue.",
        )


# ---------------------------------------------------------------------------------------------------------------------
# PostgreSQL


@contextmanager
def _in_postgresql(database: Database, connection: Any, psycopg: Any) -> Iterator[Tx]:
    if connection.closed:
        raise _refused("It is closed.")
    status, states = connection.info.transaction_status, psycopg.pq.TransactionStatus
    if status == states.INERROR:
        raise _refused("Its transaction has already failed.", "Roll it back, and begin again.")
    if connection.pgconn.pipeline_status != psycopg.pq.PipelineStatus.OFF:
        raise _refused("It is in pipeline mode.", "Submit before or after the block: with connection.pipeline(): ...")
    if status == states.ACTIVE:
        raise _refused("Another thread is using it now.", "Use a connection in one thread at a time.")
    if connection.autocommit and status == states.IDLE:
        raise _refused(
            "It commits each statement by itself.",
            "Begin a transaction: with connection.transaction(): ... or leave connection= out.",
        )
    if database.engine != "postgresql":
        raise _refused("It leads to another database than the queue's.", f"The queue is in {database.name}.")
    # The plain class with tuple rows: the caller's connection may have other defaults.
    cursor = psycopg.Cursor(connection, row_factory=psycopg.rows.tuple_row)
    cursor.execute(f"SAVEPOINT {_SAVEPOINT}")
    try:
        path = cursor.execute("SHOW search_path").fetchone()[0]
        # The caller's temporary tables come last. If pg_temp were not named, they would come first.
        cursor.execute("SELECT set_config('search_path', 'headway,public,pg_temp', true)")
        found = cursor.execute("SELECT to_regclass('headway.meta')").fetchone()[0]
        row = cursor.execute("SELECT value FROM headway.meta WHERE name = 'database'").fetchone() if found else None
        _same_database(database, row and row[0])

        def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
            return cursor.execute(_percent(sql), parameters) if parameters else cursor.execute(sql)  # type: ignore[no-any-return]  # psycopg is Any here

        def executemany(sql: str, rows: Iterable[Sequence[Value]]) -> Cursor:
            cursor.executemany(_percent(sql), rows)
            return cursor  # type: ignore[no-any-return]  # the same

        yield Tx("postgresql", execute, executemany)
        cursor.execute("SELECT set_config('search_path', %s, true)", (path,))
        cursor.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
    except BaseException:
        with suppress(psycopg.Error):  # the connection is lost, and the transaction with it
            cursor.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")  # also restores the search path
            cursor.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
        raise
    finally:
        cursor.close()


# ---------------------------------------------------------------------------------------------------------------------
# SQLite


@contextmanager
def _in_sqlite(database: Database, connection: sqlite3.Connection) -> Iterator[Tx]:
    text, connection.text_factory = connection.text_factory, str

    def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
        cursor = connection.cursor()
        cursor.row_factory = None  # tuples: the caller's connection may have another default
        return cursor.execute(sql, parameters)

    def executemany(sql: str, rows: Iterable[Sequence[Value]]) -> Cursor:
        return connection.executemany(sql, rows)

    tx = Tx("sqlite", execute, executemany)
    began = saved = False
    try:
        _same_file(database, tx)
        if not connection.in_transaction:
            if connection.isolation_level is None or getattr(connection, "autocommit", -1) is True:
                raise _refused(
                    "It commits each statement by itself.", "Begin a transaction: connection.execute('BEGIN IMMEDIATE')"
                )
            # IMMEDIATE: our decisions by reading must still hold when we write, so no other writer may come between.
            connection.execute("BEGIN IMMEDIATE")
            began = True
        connection.execute(f"SAVEPOINT {_SAVEPOINT}")
        saved = True
        row = tx.one("SELECT value FROM meta WHERE name = 'database'")
        _same_database(database, row and row[0])
        yield tx
        connection.execute(f"RELEASE {_SAVEPOINT}")
    except BaseException:
        with suppress(sqlite3.Error):  # errors like SQLITE_FULL have already rolled back everything
            if began:
                connection.rollback()
            elif saved:
                connection.execute(f"ROLLBACK TO {_SAVEPOINT}")
                connection.execute(f"RELEASE {_SAVEPOINT}")
        raise
    finally:
        connection.text_factory = text


def _same_file(database: Database, tx: Tx) -> None:
    own = getattr(database, "path", None)
    [theirs] = [file for _, name, file in tx.all("PRAGMA database_list") if name == "main"]
    if own is None or not theirs or not os.path.samefile(own, theirs):
        raise _refused("It leads to another database than the queue's.", f"The queue is in {database.name}.")
