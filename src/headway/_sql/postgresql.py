"""PostgreSQL, through psycopg 3, which is imported when it is used."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headway._sql.database import (
    UNACCEPTABLE,
    Cursor,
    Database,
    Engine,
    Row,
    Transient,
    Tx,
    Value,
    migrations,
    refuse_newer,
    unacceptable,
)
from headway.errors import (
    HeadwayError,
    InvalidInput,
    MissingExtra,
    StorageError,
    StoreForeign,
    StoreFull,
    StoreReadOnly,
    Unavailable,
)
from headway.retry import RetryPolicy
from headway.telemetry import metrics, redact

if TYPE_CHECKING:
    from psycopg import Connection


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
            refuse_newer(self.name, found, steps)
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
            raise Transient(self._away(error)) from error
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
        return (error, *UNACCEPTABLE)

    def _translate(self, error: Exception) -> HeadwayError | Transient:
        psycopg = _psycopg()
        errors = psycopg.errors
        said = redact(str(error)).strip()
        match error:
            case errors.DiskFull() | errors.OutOfMemory():
                return StoreFull(f"PostgreSQL at {self.name} has no space left.")
            case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
                return StoreReadOnly(f"PostgreSQL at {self.name} does not let us write: {said}.")
            case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
                return Transient(StorageError(f"PostgreSQL at {self.name} was too busy: {said}"))
            case OverflowError() | UnicodeEncodeError():
                return unacceptable(error)
            case psycopg.DataError():
                return InvalidInput(f"A value cannot be kept in {self.name}: {said}")
            case psycopg.IntegrityError():
                return StorageError(f"A constraint of {self.name} was violated: {said}")
            case psycopg.OperationalError() | psycopg.InterfaceError():
                return Transient(self._away(error))
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
