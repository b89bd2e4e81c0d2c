"""PostgreSQL, by psycopg 3, which is imported at its first use.

Every wait has a limit. The server cancels a statement after `STATEMENT_SECONDS`. A stopped server cancels nothing, so this
side waits `GRACE_SECONDS` longer and then closes the connection. COMMIT is a statement like any other.

No transaction is repeated after its commit. Each connection that writes has a row in the table ``transactions``. Every
transaction first writes its number there, in the round trip of its BEGIN. If the answer to COMMIT is lost, that row shows
whether the transaction was committed. The transaction locks the row until it ends. The row is ordinary content, so it is
right after a crash and after a failover. (A transaction id is not: after a crash the server may assign it again.)
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Generator, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from headway._sql.database import Database
from headway._sql.driver import UNACCEPTABLE, Transient, unacceptable
from headway._sql.schema import index_name, migrations, refuse_newer, without_index_builds
from headway._sql.tx import NOW, Cursor, Engine, Row, Tx, Value
from headway.core.retry import RetryPolicy
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
from headway.telemetry import Log, metrics, redact

log = Log("sql")

if TYPE_CHECKING:
    from psycopg import Connection

#: Time limits in seconds: to connect, for a statement, for a statement of a migration.
CONNECT_SECONDS = 5
STATEMENT_SECONDS = 20.0
SLOW_SECONDS = 3600.0
#: Seconds that a statement of a migration waits for a lock. Other writers queue behind it meanwhile.
MIGRATION_LOCK_SECONDS = 2.0
#: Seconds to wait beyond a time limit for the server to report it.
GRACE_SECONDS = 5.0
#: Rows in ``transactions`` of connections that have not written for this many seconds are deleted.
FORGET_SECONDS = 7 * 86400

#: Commits wait for the disk, even if the database or the role turns that off. Other values of the setting wait too.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
_REGISTER_SESSION = (
    f"INSERT INTO headway.transactions VALUES (%s, 0, {NOW['postgresql']}) "
    "ON CONFLICT (session) DO UPDATE SET at = excluded.at RETURNING no"
)
# Uses the server's clock, which wrote the times. Skips rows in use. Later calls delete the rows beyond the limit.
_FORGET = (
    "DELETE FROM headway.transactions WHERE session = ANY (ARRAY(SELECT session FROM headway.transactions "
    f"WHERE at < {NOW['postgresql']} - {FORGET_SECONDS} LIMIT 1000 FOR UPDATE SKIP LOCKED))"
)
_REMEMBER = f"UPDATE headway.transactions SET no = %d, at = {NOW['postgresql']} WHERE session = '%s'"


class PostgreSQL(Database):
    """A PostgreSQL database. All tables are in the schema ``headway``, so that their short names collide with no others."""

    engine: Engine = "postgresql"
    schema_version_query = "SELECT value FROM meta WHERE name = 'schema'"
    # A restart of the server takes seconds, not the milliseconds of a busy SQLite file.
    retry = RetryPolicy(retries=7, base=0.1, cap=4.0, jitter=0.2)
    patience = 15.0

    def __init__(self, url: str, *, stop: threading.Event | None) -> None:
        super().__init__(redact(url), stop=stop)
        self._url = url

    def migrate(self) -> None:
        """Bring the schema to this version.

        A statement that waits for a lock makes writers queue behind it. So it gives up after `MIGRATION_LOCK_SECONDS`, and
        the whole transaction is tried again. Indexes on existing tables are built afterwards, CONCURRENTLY.

        Locks that the transaction has acquired are held until it commits. Writers of these tables wait that long, which
        includes the build of a unique index.
        """
        steps = migrations("postgresql")

        def work(tx: Tx) -> None:
            tx.execute("SELECT pg_advisory_xact_lock(hashtext('headway.migrate'))")
            tx.execute(f"SET LOCAL lock_timeout = {int(MIGRATION_LOCK_SECONDS * 1000)}")
            found = self._found_version(tx)
            if found == 0:
                tx.execute("CREATE SCHEMA IF NOT EXISTS headway")
            now, later = (steps[found:], []) if found == 0 else without_index_builds(steps[found:])
            for version, statements in now:
                for statement in statements:
                    tx.execute(statement)
                tx.execute("UPDATE meta SET value = ? WHERE name = 'schema'", (str(version),))
            if later:
                tx.execute(
                    "INSERT INTO meta (name, value) VALUES ('indexes', ?) "
                    "ON CONFLICT (name) DO UPDATE SET value = excluded.value",
                    (json.dumps([*self._missing_indexes(tx), *later]),),
                )

        # First without a transaction that writes: a reader of a standby, or a user without the right to write, needs none.
        if self._ask(self._found_version) != len(steps):
            self._transact(work, "migrate", slow=True)
        if missing := self._ask(self._missing_indexes):
            self._build_indexes(missing)

    def _missing_indexes(self, tx: Tx) -> list[str]:
        row = tx.one("SELECT value FROM headway.meta WHERE name = 'indexes'")
        return [str(statement) for statement in json.loads(row[0])] if row else []

    def _build_indexes(self, statements: Sequence[str]) -> None:
        """Build indexes without blocking writers. A failed build is repeated when the database is opened next."""
        psycopg = _psycopg()
        connection = self.own_connection()  # its settings end with it
        connection.seconds = SLOW_SECONDS
        try:
            connection.execute(f"SET statement_timeout = {int(SLOW_SECONDS * 1000)}")
            connection.execute(f"SET lock_timeout = {int(MIGRATION_LOCK_SECONDS * 1000)}")
            alone = connection.execute("SELECT pg_try_advisory_lock(hashtext('headway.indexes'))").fetchone()
            if not alone[0]:
                return  # another process builds them
            for statement in statements:
                name = index_name(statement)
                found = connection.execute(
                    "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass(%s)", (f"headway.{name}",)
                ).fetchone()
                if found is not None and not found[0]:  # left by a failed attempt
                    connection.execute(f"DROP INDEX CONCURRENTLY {name}")
                if found is None or not found[0]:
                    connection.execute(statement.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1))
            connection.execute("DELETE FROM headway.meta WHERE name = 'indexes'")
        except psycopg.Error as error:
            log.warning(
                "an index could not be built; the next opening of the database retries",
                operation="migrate", error=redact(str(error)).strip(),
            )  # fmt: skip
        finally:
            connection.close()

    def _found_version(self, tx: Tx) -> int:
        """Return the schema's version, 0 if there is none. Refuses newer schemas and foreign tables."""
        found = 0
        if tx.one("SELECT 1 FROM pg_tables WHERE schemaname = 'headway' AND tablename = 'meta'") is not None:
            row = tx.one("SELECT value FROM headway.meta WHERE name = 'schema'")
            found = int(row[0]) if row else 0
        elif tx.one("SELECT 1 FROM pg_tables WHERE schemaname = 'headway'") is not None:
            raise StoreForeign(
                f"The schema 'headway' in {self.name} contains tables of another program.",
                hint="Use another database: --database postgresql://.../headway",
            )
        refuse_newer(self.name, found, migrations("postgresql"))
        return found

    def exists(self) -> bool:
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
            in_address = psycopg.conninfo.conninfo_to_dict(self._url).get("options")
            given = in_address or os.environ.get("PGOPTIONS", "")  # like libpq; our options would replace them
            connection: Connection[Row] = _bounded_connection().connect(
                self._url,
                autocommit=True,
                client_encoding="UTF8",  # a database without an encoding (SQL_ASCII) would return bytes
                connect_timeout=CONNECT_SECONDS,
                application_name="headway",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=2,
                tcp_user_timeout=15_000,  # keepalives do not run while something sent is unacknowledged
                # The last value of a setting wins. With a stricter isolation level, which the database or the role may set,
                # a transaction that waited for a lock would decide by a snapshot from before that lock.
                options=f"{given} -c search_path=headway,public -c default_transaction_isolation=read\\ committed "
                "-c array_nulls=on -c idle_in_transaction_session_timeout=60000 "
                f"-c statement_timeout={int(STATEMENT_SECONDS * 1000)}",
            )
            try:
                connection.execute(_DURABLE)
            except BaseException:
                connection.close()
                raise
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
            hint="Check that it runs and that the address is right. Then run the same command again.",
        )

    def _tx(self, connection: Connection[Row]) -> Tx:
        cursor = connection.cursor()

        def execute(sql: str, parameters: Sequence[Value]) -> Cursor:
            # Without parameters psycopg does not replace %%.
            return cursor.execute(_percent(sql), parameters) if parameters else cursor.execute(sql)

        def executemany(sql: str, rows: Iterable[Sequence[Value]]) -> Cursor:
            cursor.executemany(_percent(sql), rows)
            return cursor

        return Tx("postgresql", execute, executemany)

    def _begin(self, connection: Any, *, slow: bool) -> None:
        if slow:  # a migration: the table `transactions` may not exist yet, and a repetition finds nothing to do
            connection.seconds = SLOW_SECONDS
            connection.execute(f"BEGIN; SET LOCAL statement_timeout = {int(SLOW_SECONDS * 1000)}", prepare=False)
            return
        if not connection.begun:
            connection.execute(_REGISTER_SESSION, (connection.session,), prepare=False)
            if connection.session.startswith("0"):  # one connection in sixteen: it reads the whole table
                connection.execute(_FORGET, prepare=False)
        connection.begun += 1
        remember = _REMEMBER % (connection.begun, connection.session)
        cursor = connection.execute(f"BEGIN; {remember}", prepare=False)
        cursor.nextset()
        if cursor.rowcount != 1:  # its row was deleted, because it had not written for long
            connection.execute(_REGISTER_SESSION, (connection.session,), prepare=False)
            connection.execute(remember, prepare=False)

    def _unanswered(self, connection: Any) -> tuple[str, int, int] | None:
        if not connection.closed or connection.seconds == SLOW_SECONDS:
            return None
        return connection.session, connection.begun, connection.server_pid

    def _was_committed(self, transaction: tuple[str, int, int]) -> bool:
        session, no, pid = transaction
        psycopg = _psycopg()
        unknown = Unavailable(
            f"PostgreSQL at {self.name} has not ended the last transaction yet, so its outcome is unknown.",
            hint="Run the same command again when the server answers.",
        )
        connection = self._take()
        try:
            connection.execute("BEGIN; SET LOCAL lock_timeout = 1000")
            # Waits for an open transaction, which has locked the row.
            row = connection.execute(_REGISTER_SESSION, (session,)).fetchone()
            connection.execute("COMMIT")
            return bool(row[0] >= no)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
            self._rollback(connection)
            # Its connection is lost, which the server may notice late. It then rolls back.
            with suppress(psycopg.Error):  # without the right to terminate it, the next attempt asks again
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s "
                    "AND application_name = 'headway' AND usename = current_user AND backend_xid IS NOT NULL",
                    (pid,),
                )
            raise Transient(unknown) from error
        except self._errors as error:
            self._rollback(connection)
            raise self._translate(error) from error
        finally:
            self._give(connection)

    def _write_alone(self, sql: str, parameters: Sequence[Value]) -> list[Row]:
        return self._ask_once(lambda tx: tx.returned(sql, parameters))

    def _give(self, connection: Any) -> None:
        connection.seconds = STATEMENT_SECONDS
        super()._give(connection)

    def _begin_read(self, connection: Connection[Row]) -> None:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    def _commit(self, connection: Connection[Row]) -> None:
        connection.execute("COMMIT", prepare=False)

    def _rollback(self, connection: Connection[Row]) -> None:
        psycopg = _psycopg()
        if not connection.closed and connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            try:
                connection.execute("ROLLBACK")
            except psycopg.Error:
                connection.close()  # the original error is raised

    def _broken(self, connection: Connection[Row]) -> bool:
        psycopg = _psycopg()
        return connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    @property
    def _errors(self) -> tuple[type[Exception], ...]:
        error: type[Exception] = _psycopg().Error
        return (error, *UNACCEPTABLE)

    def _translate(self, error: Exception) -> HeadwayError | Transient:
        psycopg = _psycopg()
        errors = psycopg.errors
        # Only the primary message: DETAIL and CONTEXT repeat whole rows, with payloads.
        text = redact(error.diag.message_primary or "" if isinstance(error, psycopg.Error) else "").strip()
        text = text or redact(str(error)).strip()
        match error:
            case errors.DiskFull() | errors.OutOfMemory():
                return StoreFull(f"PostgreSQL at {self.name} has no space left.")
            case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
                return StoreReadOnly(
                    f"PostgreSQL at {self.name} refused a write: {text}.",
                    hint="Use a primary server (a standby is read-only) and a user that may write to the schema headway: "
                    "--database postgresql://user@host/name",
                )
            case errors.QueryCanceled():
                return Transient(StorageError(f"A statement took PostgreSQL at {self.name} too long: {text}"))
            case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
                return Transient(StorageError(f"PostgreSQL at {self.name} was too busy: {text}"))
            case OverflowError() | UnicodeEncodeError():
                return unacceptable(error)
            case psycopg.DataError() | errors.ProgramLimitExceeded():  # the latter: too large for an index
                return InvalidInput(f"A value cannot be stored in {self.name}: {text}")
            case psycopg.IntegrityError():
                return StorageError(f"A constraint of {self.name} was violated: {text}")
            case psycopg.OperationalError() | psycopg.InterfaceError():
                return Transient(self._away(error))
            case _:
                return StorageError(f"PostgreSQL at {self.name} failed: {text}")


@lru_cache(maxsize=1)
def _psycopg() -> Any:
    """Import psycopg in a separate thread, where no signal handler can raise.

    psycopg would report an exception inside its import as a missing library, and leave half-imported modules.
    """
    found: list[Any] = []

    def load() -> None:
        try:
            import psycopg
        except BaseException as error:  # noqa: BLE001 - raised below
            found.append(error)
        else:
            found.append(psycopg)

    thread = threading.Thread(target=load, name="headway-import", daemon=True)
    thread.start()
    thread.join()
    if isinstance(found[0], ImportError):
        raise MissingExtra("postgres", "A postgresql:// database") from found[0]
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@lru_cache(maxsize=1)
def _bounded_connection() -> Any:
    """Return a subclass of psycopg's connection that bounds every wait for an answer."""
    psycopg = _psycopg()
    active = psycopg.pq.TransactionStatus.ACTIVE

    base: Any = psycopg.Connection

    class Bounded(base):  # type: ignore[misc]  # known only after the import
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.seconds = STATEMENT_SECONDS
            self.session = uuid.uuid4().hex
            self.begun = 0  # transactions
            self.server_pid = self.pgconn.backend_pid

        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
            return super().wait(self._bounded(gen), *arguments, **options)

        def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            """Drive ``gen`` until its deadline. psycopg calls it at least ten times a second."""
            try:
                wanted = next(gen)
                deadline = time.monotonic() + self.seconds + GRACE_SECONDS
                while True:
                    ready = yield wanted
                    # A connection that waits for notifications is not active and may wait.
                    if not ready and time.monotonic() > deadline and self.pgconn.transaction_status == active:
                        self.close()
                        raise psycopg.OperationalError(
                            f"the server did not answer within {self.seconds + GRACE_SECONDS:.0f} s"
                        )
                    wanted = gen.send(ready)
            except StopIteration as end:
                return end.value

    return Bounded


@lru_cache(maxsize=512)
def _percent(sql: str) -> str:
    return sql.replace("%", "%%").replace("?", "%s")
