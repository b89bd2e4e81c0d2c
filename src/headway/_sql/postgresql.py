"""PostgreSQL, through psycopg 3, which is imported when it is used.

*Nothing waits for ever.* The server ends a statement after `STATEMENT_SECONDS`; and because a server that is stopped
ends nothing, this side waits `GRACE_SECONDS` longer and then gives the connection up. COMMIT is a statement like any other.

*Nothing is done twice.* Each connection that writes has a row in the table ``transactions``, and every transaction begins
by writing its number there, in the round trip of its BEGIN. When the answer to COMMIT is lost, that row says whether the
transaction was committed: it is locked by the transaction until that has ended, and it is content like any other, so it
is right after a crash and on the server that takes over. (A transaction id would not be: after a crash the server may
give the same one to somebody else.)
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

from headway._sql.database import UNACCEPTABLE, Database, Transient, unacceptable
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

#: Seconds to connect, and seconds a statement may take; a migration may take longer.
CONNECT_SECONDS = 5
STATEMENT_SECONDS = 20.0
SLOW_SECONDS = 3600.0
#: Seconds a statement of a migration waits for a lock, and writers behind it for the statement.
MIGRATION_LOCK_SECONDS = 2.0
#: So much longer we wait for the server to say that a statement took too long.
GRACE_SECONDS = 5.0
#: Rows of connections that have not written for so long are removed.
FORGET_SECONDS = 7 * 86400

#: What was acknowledged survives a crash, also where the database or the role is set to commit before it is on disk. The
#: other values are their owner's choice: all of them wait for the disk.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
_KNOW_SESSION = (
    f"INSERT INTO headway.transactions VALUES (%s, 0, {NOW['postgresql']}) "
    "ON CONFLICT (session) DO UPDATE SET at = excluded.at RETURNING no"
)
# By the server's clock, which wrote the times: ours may be wrong. Not what somebody is just using, and not so many that it
# takes long: whoever comes next forgets the others.
_FORGET = (
    "DELETE FROM headway.transactions WHERE session = ANY (ARRAY(SELECT session FROM headway.transactions "
    f"WHERE at < {NOW['postgresql']} - {FORGET_SECONDS} LIMIT 1000 FOR UPDATE SKIP LOCKED))"
)
_REMEMBER = f"UPDATE headway.transactions SET no = %d, at = {NOW['postgresql']} WHERE session = '%s'"


class PostgreSQL(Database):
    """Everything lives in the schema ``headway``, so that our short table names collide with nobody's."""

    engine: Engine = "postgresql"
    # A restart of the server takes seconds, not the milliseconds of a busy SQLite file.
    retry = RetryPolicy(retries=7, base=0.1, cap=4.0, jitter=0.2)
    patience = 15.0

    def __init__(self, url: str, *, stop: threading.Event | None) -> None:
        super().__init__(redact(url), stop=stop)
        self._url = url

    def check(self, *, writable: bool) -> None:
        """Nothing to look at before the schema is."""

    def verify(self) -> None:
        """The server checks its own pages."""

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

        # First without a transaction that writes: a reader of a standby, or one who may not write, needs none.
        if self._ask(self._found_version) != len(steps):
            self._transact(work, "migrate", slow=True)
        if missing := self._ask(self._missing_indexes):
            self._build_indexes(missing)

    def _missing_indexes(self, tx: Tx) -> list[str]:
        row = tx.one("SELECT value FROM headway.meta WHERE name = 'indexes'")
        return [str(statement) for statement in json.loads(row[0])] if row else []

    def _build_indexes(self, statements: Sequence[str]) -> None:
        """Build indexes while others write. What fails is tried again when the database is opened next."""
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
                if found is not None and not found[0]:  # an attempt that failed left it behind
                    connection.execute(f"DROP INDEX CONCURRENTLY {name}")
                if found is None or not found[0]:
                    connection.execute(statement.replace("CREATE INDEX", "CREATE INDEX CONCURRENTLY", 1))
            connection.execute("DELETE FROM headway.meta WHERE name = 'indexes'")
        except psycopg.Error as error:
            log.warning(
                "an index is not built yet; it is tried again when the database is opened next",
                operation="migrate", error=redact(str(error)).strip(),
            )  # fmt: skip
        finally:
            connection.close()

    def _found_version(self, tx: Tx) -> int:
        """The schema's version, 0 where there is none; refuses a newer one and tables that are not ours."""
        found = 0
        if tx.one("SELECT 1 FROM pg_tables WHERE schemaname = 'headway' AND tablename = 'meta'") is not None:
            row = tx.one("SELECT value FROM headway.meta WHERE name = 'schema'")
            found = int(row[0]) if row else 0
        elif tx.one("SELECT 1 FROM pg_tables WHERE schemaname = 'headway'") is not None:
            raise StoreForeign(
                f"The schema 'headway' in {self.name} holds tables that are not ours.",
                hint="Use another database: --database postgresql://.../headway",
            )
        refuse_newer(self.name, found, migrations("postgresql"))
        return found

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
            in_address = psycopg.conninfo.conninfo_to_dict(self._url).get("options")
            given = in_address or os.environ.get("PGOPTIONS", "")  # as libpq has it; ours would take their place
            connection: Connection[Row] = _bounded_connection().connect(
                self._url,
                autocommit=True,
                client_encoding="UTF8",  # of a database without an encoding (SQL_ASCII) texts would come as bytes
                connect_timeout=CONNECT_SECONDS,
                application_name="headway",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=2,
                tcp_user_timeout=15_000,  # keepalives do not run while something sent is unacknowledged
                # The last one of a name is in force. By a snapshot of its beginning, which the database or the role may be
                # set to, a transaction that waited for a lock would decide by what was before whoever had it.
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

    def _begin(self, connection: Any, *, slow: bool) -> None:
        if slow:  # a migration: it begins where the table `transactions` may not be yet, and reads what it has to do
            connection.seconds = SLOW_SECONDS
            connection.execute(f"BEGIN; SET LOCAL statement_timeout = {int(SLOW_SECONDS * 1000)}", prepare=False)
            return
        if not connection.begun:
            connection.execute(_KNOW_SESSION, (connection.session,), prepare=False)
            if connection.session.startswith("0"):  # one in sixteen, by chance: it reads the whole table
                connection.execute(_FORGET, prepare=False)
        connection.begun += 1
        remember = _REMEMBER % (connection.begun, connection.session)
        cursor = connection.execute(f"BEGIN; {remember}", prepare=False)
        cursor.nextset()
        if cursor.rowcount != 1:  # it wrote nothing for so long that its row was removed
            connection.execute(_KNOW_SESSION, (connection.session,), prepare=False)
            connection.execute(remember, prepare=False)

    def _unanswered(self, connection: Any) -> tuple[str, int, int] | None:
        if not connection.closed or connection.seconds == SLOW_SECONDS:
            return None
        return connection.session, connection.begun, connection.server_pid

    def _was_committed(self, transaction: tuple[str, int, int]) -> bool:
        session, no, pid = transaction
        psycopg = _psycopg()
        unknown = Unavailable(
            f"Whether PostgreSQL at {self.name} recorded the last transaction is not known: it is still under way there.",
            hint="Run the same command again when the server answers.",
        )
        connection = self._take()
        try:
            connection.execute("BEGIN; SET LOCAL lock_timeout = 1000")
            # This waits for a transaction that is under way: it has locked the row.
            row = connection.execute(_KNOW_SESSION, (session,)).fetchone()
            connection.execute("COMMIT")
            return bool(row[0] >= no)
        except (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled) as error:
            self._rollback(connection)
            # Its client is gone, which the server may not notice for a long time, and then not commit but roll back.
            with suppress(psycopg.Error):  # the server may not let us, or be gone: it is asked again in any case
                connection.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = %s "
                    "AND application_name = 'headway' AND usename = current_user AND backend_xid IS NOT NULL",
                    (pid,),
                )
            raise Transient(unknown) from error
        except self._errors() as error:
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
                connection.close()  # the error that brought us here is the one to report

    def _broken(self, connection: Connection[Row]) -> bool:
        psycopg = _psycopg()
        return connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE

    def _errors(self) -> tuple[type[Exception], ...]:
        error: type[Exception] = _psycopg().Error
        return (error, *UNACCEPTABLE)

    def _translate(self, error: Exception) -> HeadwayError | Transient:
        psycopg = _psycopg()
        errors = psycopg.errors
        # The server's own sentence, not its DETAIL and CONTEXT: they repeat whole rows, payloads included.
        said = redact(error.diag.message_primary or "" if isinstance(error, psycopg.Error) else "").strip()
        said = said or redact(str(error)).strip()
        match error:
            case errors.DiskFull() | errors.OutOfMemory():
                return StoreFull(f"PostgreSQL at {self.name} has no space left.")
            case errors.InsufficientPrivilege() | errors.ReadOnlySqlTransaction():
                return StoreReadOnly(
                    f"PostgreSQL at {self.name} does not let us write: {said}.",
                    hint="Name a server that takes writes (a standby does not) and a user that may write to the schema "
                    "headway: --database postgresql://user@host/name",
                )
            case errors.QueryCanceled():
                return Transient(StorageError(f"A statement took PostgreSQL at {self.name} too long: {said}"))
            case errors.SerializationFailure() | errors.DeadlockDetected() | errors.LockNotAvailable():
                return Transient(StorageError(f"PostgreSQL at {self.name} was too busy: {said}"))
            case OverflowError() | UnicodeEncodeError():
                return unacceptable(error)
            case (
                psycopg.DataError() | errors.ProgramLimitExceeded()
            ):  # too large for an index, which no waiting changes
                return InvalidInput(f"A value cannot be kept in {self.name}: {said}")
            case psycopg.IntegrityError():
                return StorageError(f"A constraint of {self.name} was violated: {said}")
            case psycopg.OperationalError() | psycopg.InterfaceError():
                return Transient(self._away(error))
            case _:
                return StorageError(f"PostgreSQL at {self.name} failed: {said}")


@lru_cache(maxsize=1)
def _psycopg() -> Any:
    """Imported by a thread of its own. An exception of a signal handler strikes the main thread: inside the import,
    psycopg would take it for a missing library, and the next import would find half of the modules."""
    found: list[Any] = []

    def load() -> None:
        try:
            import psycopg
        except BaseException as error:  # noqa: BLE001 - the caller's to raise
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
    """A connection of psycopg's that waits for an answer no longer than it is allowed."""
    psycopg = _psycopg()
    active = psycopg.pq.TransactionStatus.ACTIVE

    base: Any = psycopg.Connection

    class Bounded(base):  # type: ignore[misc]  # its type is known when psycopg is imported
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.seconds = STATEMENT_SECONDS
            self.session = uuid.uuid4().hex
            self.begun = 0  # transactions
            self.server_pid = self.pgconn.backend_pid

        def wait(self, gen: Generator[Any, Any, Any], *arguments: Any, **options: Any) -> Any:
            return super().wait(self._bounded(gen), *arguments, **options)

        def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
            """``gen`` asks to be called when the socket is ready, and psycopg calls at least ten times a second."""
            try:
                wanted = next(gen)
                deadline = time.monotonic() + self.seconds + GRACE_SECONDS
                while True:
                    ready = yield wanted
                    # One who waits for notifications has asked nothing, and may wait.
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
