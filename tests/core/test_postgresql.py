"""Whatever a server's owner set up for the database or the role: what headway promises stays so."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import psycopg
import pytest

import headway
from headway._sql import Tx, connect, migrations
from headway._sql.driver import Transient
from headway._sql.postgresql import PostgreSQL
from headway.errors import InvalidInput, Unavailable
from headway.ledger import Ledger, NewItem
from headway.states import FINISHED, State, open_store
from tests.services.lost_answers import through
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.waiting import eventually

numbers = itertools.count(1)


@pytest.fixture
def made(postgres_server: PostgresServer) -> Callable[..., str]:
    """Makes a database with these options and settings, and gives its address."""

    def make(options: str = "", **settings: str) -> str:
        name = f"set_up_{next(numbers)}"
        postgres_server._execute(f"CREATE DATABASE {name} {options}")
        for setting, value in settings.items():
            postgres_server._execute(f"ALTER DATABASE {name} SET {setting} = '{value}'")
        return postgres_server.url(name)

    return make


def test_a_database_that_knows_no_encoding_keeps_texts_as_they_are(made: Callable[..., str]):
    url = made("ENCODING 'SQL_ASCII' TEMPLATE template0")  # what initdb makes where no locale is set
    store, _ = open_store(url, "job", 1)
    try:
        store.set_state(State("job", 0, "a", 1, "grün \U0001f7e2", payload={"wörter": "ß"}))
        seen = store.get_state(0, "a")
        assert (seen.job_id, seen.message, seen.payload) == ("job", "grün \U0001f7e2", {"wörter": "ß"})
    finally:
        store.close()
    assert headway.map(len, ["ä", "bb"], job="letters", database=url).done == 2


def test_acknowledged_writes_survive_a_crash_despite_asynchronous_commit(
    made: Callable[..., str], postgres_server: PostgresServer
):
    url = made(synchronous_commit="off")
    store, _ = open_store(url, "job", 1)
    with connect(url) as database:
        database.run(lambda tx: tx.execute("CREATE TABLE kept (n integer)"))
    postgres_server._execute("CHECKPOINT")
    store.set_state(State("job", 0, "a", FINISHED))
    with connect(url) as database:
        database.run(lambda tx: tx.execute("INSERT INTO kept VALUES (1)"))
    postgres_server.restart(immediate=True)
    try:
        assert store.get_state(0, "a").status == FINISHED
        with connect(url) as database:
            assert database.all("SELECT n FROM kept") == [(1,)]
    finally:
        store.close()


@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_a_transaction_reads_after_its_lock_under_every_isolation_level(made: Callable[..., str], isolation: str):
    url = made(default_transaction_isolation=isolation)
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = %s"
    with psycopg.connect(url, autocommit=True) as somebody, ThreadPoolExecutor(2) as threads:
        number = somebody.execute("SELECT oid FROM pg_database WHERE datname = current_database()").fetchone()
        somebody.execute("SELECT pg_advisory_lock(hashtext('headway.migrate'))")
        opening = [threads.submit(connect, url) for _ in range(2)]
        eventually(lambda: somebody.execute(waiting, number).fetchone() == (2,), 30)
        somebody.execute("SELECT pg_advisory_unlock(hashtext('headway.migrate'))")
        first, second = (one.result(60) for one in opening)  # one of them made the tables, the other has to see them

    def work(tx: Tx) -> object:
        tx.one("SELECT value FROM meta WHERE name = 'later'")
        second.write("INSERT INTO meta VALUES ('later', 'seen')")
        return tx.one("SELECT value FROM meta WHERE name = 'later'")

    with first, second:
        assert first.run(work) == ("seen",)


def test_options_in_the_address_are_given_to_the_server_beside_ours(postgres_url: str):
    with connect(f"{postgres_url}?options={quote('-c work_mem=5MB -c search_path=elsewhere')}") as database:
        assert database.one("SHOW work_mem") == ("5MB",)
        assert database.one("SHOW search_path") == ("headway,public",)


def test_options_in_the_environment_are_given_to_the_server_unless_the_address_has_some(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("PGOPTIONS", "-c work_mem=6MB")
    with connect(postgres_url) as database:
        assert database.one("SHOW work_mem") == ("6MB",)
        assert database.one("SHOW search_path") == ("headway,public",)
    with connect(f"{postgres_url}?options={quote('-c temp_buffers=9MB')}") as database:
        assert database.one("SHOW temp_buffers") == ("9MB",)
        assert database.one("SHOW work_mem") != ("6MB",)


def test_a_value_that_no_index_holds_is_refused_as_such_and_not_taken_for_a_server_that_is_away(postgres_url: str):
    letters = random.Random(4)  # not one after another: PostgreSQL would make that small enough
    name = "".join(chr(letters.randrange(0x10000, 0x20000)) for _ in range(3_000))
    with connect(postgres_url) as database, pytest.raises(InvalidInput, match="cannot be stored"):
        database.write("INSERT INTO meta VALUES (?, '')", (name,))


def test_rows_of_connections_that_are_long_gone_are_removed_by_others_that_write(postgres_url: str, monkeypatch):
    """There is one for each connection that ever wrote. By the server's clock: what another process committed must still be
    known when the answer to its COMMIT was lost."""
    with connect(postgres_url) as other, psycopg.connect(postgres_url) as somebody:
        other.run(lambda tx: tx.execute("INSERT INTO transactions VALUES ('old', 1, 1), ('in use', 1, 1)"))
        somebody.execute("SELECT FROM headway.transactions WHERE session = 'in use' FOR UPDATE")
        known = left = {session for (session,) in other.all("SELECT session FROM transactions")}
        wrong = time.time() + 30 * 86400
        monkeypatch.setattr("time.time", lambda: wrong)
        for _ in range(400):  # one in sixteen does it
            with connect(postgres_url) as database:
                database.run(lambda tx: tx.execute("UPDATE meta SET value = value"))
            left = {session for (session,) in other.all("SELECT session FROM transactions")}
            if "old" not in left:
                break
    assert known - left == {"old"}


def test_items_without_a_payload_or_a_key_are_registered_also_where_arrays_have_no_nulls(made: Callable[..., str]):
    with Ledger.open(made(array_nulls="off")) as ledger:
        assert ledger.create("ads").register([NewItem(0), NewItem(1, '"x"', "k")]) == 2
        assert [(item.payload, item.key) for item in ledger.job("ads").claim("worker", limit=2)] == [
            (None, None),
            ('"x"', "k"),
        ]


def test_without_the_right_to_terminate_an_unknown_outcome_is_reported(
    postgres_url: str, postgres_server: PostgresServer, tcp_proxy: Callable[[int], TcpProxy], monkeypatch
):
    connect(postgres_url).close()
    role = f"ordinary_{next(numbers)}"
    with psycopg.connect(postgres_url, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {role} LOGIN".encode())
        owner.execute(f"GRANT ALL ON SCHEMA headway TO {role}".encode())
        owner.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA headway TO {role}".encode())
        owner.execute("REVOKE EXECUTE ON FUNCTION pg_terminate_backend FROM PUBLIC")
    proxy = tcp_proxy(postgres_server.port)
    monkeypatch.setattr(PostgreSQL, "patience", 0.2)
    far_url = through(proxy, postgres_url.replace("headway@", f"{role}@"))
    with psycopg.connect(postgres_url) as somebody, connect(far_url) as database:
        # Somebody who has the row from the moment on in which our transaction ends: for us it is under way still.
        locking = threading.Thread(target=lambda: somebody.execute("SELECT FROM headway.transactions FOR UPDATE"))

        def work(tx: Tx) -> None:
            tx.execute("INSERT INTO meta VALUES ('a', '')")
            locking.start()
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted AND pid = ?"
            eventually(lambda: tx.one(waiting, (somebody.info.backend_pid,)), 30)
            proxy.lose_commits("request")

        with pytest.raises(Unavailable, match="outcome is unknown"):
            database.run(work)
        locking.join(30)
        somebody.rollback()


@pytest.mark.parametrize(
    ("application", "writes", "ends"), [("headway", True, True), ("headway", False, False), ("psql", True, False)]
)
def test_only_a_writing_backend_of_headway_is_ended_to_learn_whether_a_transaction_was_committed(
    application: str, writes: bool, ends: bool, postgres_with_tables: str
):
    """The process id of a backend that is gone may belong to another one by now."""
    with (
        connect(postgres_with_tables) as database,
        psycopg.connect(postgres_with_tables, application_name="holder") as holder,
        psycopg.connect(postgres_with_tables, application_name=application) as suspect,
    ):
        holder.execute("INSERT INTO headway.transactions VALUES ('lost', 0, 0)")
        holder.commit()
        holder.execute("SELECT 1 FROM headway.transactions WHERE session = 'lost' FOR UPDATE")
        suspect.execute("INSERT INTO headway.meta VALUES ('suspect', '1')" if writes else "SELECT 1")
        with pytest.raises(Transient):
            database._was_committed(("lost", 1, suspect.info.backend_pid))

        def ended() -> bool:
            try:
                suspect.execute("SELECT 1")
            except psycopg.OperationalError:
                return True
            return False

        if ends:
            eventually(ended)
        else:
            assert not ended()
            suspect.rollback()
        holder.rollback()


def at_schema(url: str, version: int) -> None:
    """Make the tables of an older version."""
    with psycopg.connect(url, options="-c search_path=headway,public") as connection:
        connection.execute("CREATE SCHEMA headway")
        for number, statements in migrations("postgresql")[:version]:
            for statement in statements:
                connection.execute(statement.encode())
            connection.execute("UPDATE meta SET value = %s WHERE name = 'schema'", (str(number),))


def indexes(url: str) -> dict[str, str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT c.relname, pg_get_indexdef(c.oid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid "
            "WHERE i.indisvalid AND c.relnamespace = 'headway'::regnamespace"
        )
        return {str(name): str(definition) for name, definition in rows}


@pytest.mark.parametrize("version", [9, 13, 17, 18])
def test_an_upgraded_database_has_the_same_indexes_as_a_new_one(
    version: int, postgres_url: str, postgres_with_tables: str
):
    at_schema(postgres_url, version)
    connect(postgres_url).close()
    assert indexes(postgres_url) == indexes(postgres_with_tables)


def test_a_migration_that_waits_for_a_long_transaction_does_not_block_writers(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    """A waiting ALTER TABLE makes every writer wait behind it."""
    monkeypatch.setattr("headway._sql.postgresql.MIGRATION_LOCK_SECONDS", 0.2)
    at_schema(postgres_url, 18)
    options = "-c search_path=headway,public -c lock_timeout=20s"
    with (
        psycopg.connect(postgres_url, options=options) as reader,
        psycopg.connect(postgres_url, options=options, autocommit=True) as writer,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.execute("SELECT count(*) FROM progress")
        migrating = pool.submit(lambda: connect(postgres_url).close())
        eventually(
            lambda: writer.execute(
                "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'progress'::regclass"
            ).fetchone()
        )
        writer.execute("DELETE FROM progress")  # within lock_timeout, although the transaction that is read in goes on
        reader.rollback()
        migrating.result(60)
    with connect(postgres_url) as database:
        assert database.one("SELECT value FROM meta WHERE name = 'schema'") == (str(len(migrations("postgresql"))),)


def test_an_index_that_cannot_be_built_now_is_built_later_without_a_wait(
    postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("headway._sql.postgresql.MIGRATION_LOCK_SECONDS", 0.2)
    connect(postgres_url).close()
    options = "-c search_path=headway,public -c lock_timeout=20s"
    with psycopg.connect(postgres_url, options=options, autocommit=True) as writer:
        writer.execute("INSERT INTO meta VALUES ('indexes', '[\"CREATE INDEX idx_late ON progress (idx)\"]')")
        with psycopg.connect(postgres_url, options=options) as other:
            other.execute("DELETE FROM progress")  # a transaction that writes, and goes on
            connect(postgres_url).close()
            writer.execute("DELETE FROM progress")
            assert "idx_late" not in indexes(postgres_url)
            assert any("could not be built" in record.getMessage() for record in caplog.records)
        connect(postgres_url).close()
        assert "idx_late" in indexes(postgres_url)
        assert writer.execute("SELECT 1 FROM meta WHERE name = 'indexes'").fetchone() is None
