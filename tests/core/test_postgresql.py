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
from headway._sql import Tx, connect
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


def test_what_was_acknowledged_survives_a_crash_although_the_database_commits_asynchronously(
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
def test_a_transaction_decides_by_what_is_there_when_it_has_its_lock_however_the_database_isolates(
    made: Callable[..., str], isolation: str
):
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
    with connect(postgres_url) as database, pytest.raises(InvalidInput, match="cannot be kept"):
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


def test_a_server_that_lets_nobody_end_a_transaction_leaves_the_outcome_unknown_and_that_is_said(
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

        with pytest.raises(Unavailable, match="is not known"):
            database.run(work)
        locking.join(30)
        somebody.rollback()
