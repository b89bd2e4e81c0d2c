"""One door to two engines: transactions, locks, pools, forks, restarts, migrations."""

import gc
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace
from enum import IntEnum
from functools import partial
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from headway import _sql
from headway._sql import Database, Tx, array, connect, migrations, postgresql, sqlite
from headway._sql.postgresql import PostgreSQL
from headway._sql.sqlite import SQLite
from headway.core.failure import Failure
from headway.core.retry import STORE, RetryPolicy
from headway.errors import (
    HeadwayError,
    InvalidInput,
    NotFound,
    Stopping,
    StorageError,
    StoreForeign,
    StoreNewer,
    Unavailable,
)
from headway.ledger import Failed, Ledger, NewItem
from headway.telemetry import metrics
from tests.core.databases import digest, everywhere, exit_code, forked, python, shared, sqlite_url
from tests.finishline.lines import at_line
from tests.services.postgres import PostgresServer
from tests.services.waiting import eventually

META = "INSERT INTO meta (name, value) VALUES (?, ?)"


def put(database: Database, name: str, value: str = "x") -> None:
    database.run(lambda tx: tx.execute(META, (name, value)))


def names(database: Database) -> set[str]:
    return {name for (name,) in database.all("SELECT name FROM meta WHERE name NOT IN ('database', 'schema')")}


# ---- transactions ---------------------------------------------------------------------------------------------------


@everywhere
def test_a_returned_transaction_is_stored_and_a_raised_one_is_not(url: str):
    with connect(url) as database:
        assert database.run(lambda tx: tx.execute(META, ("kept", "x"))) == 1

        def fails(tx: Tx) -> None:
            tx.execute(META, ("lost", "x"))
            raise KeyError("no")

        with pytest.raises(KeyError):
            database.run(fails)
        assert names(database) == {"kept"}
        put(database, "after")
        assert names(database) == {"kept", "after"}


@everywhere
def test_the_verbs_answer_alike(url: str):
    with connect(url) as database:

        def work(tx: Tx) -> list[object]:
            rows = [("a", "1"), ("b", "100 % sure?"), ("c", "3")]
            return [
                tx.executemany(META, rows),
                tx.executemany(META, []),
                tx.execute("UPDATE meta SET value = ? WHERE name IN ('a', 'c')", ("9",)),
                tx.execute("DELETE FROM meta WHERE name = ?", ("nobody",)),
                tx.one("SELECT value FROM meta WHERE name = ?", ("b",)),
                tx.one("SELECT value FROM meta WHERE name = ?", ("nobody",)),
                tx.one("SELECT 7 % 4, 'a' LIKE '%'")[0],  # type: ignore[index]
                tx.one("SELECT 7 % 4 WHERE 1 = ?", (1,)),
                tx.all("SELECT name FROM meta WHERE value = ? ORDER BY name", ("9",)),
                abs(tx.now() - time.time()) < 60,
            ]

        assert database.run(work) == [3, 0, 2, 0, ("100 % sure?",), None, 3, (3,), [("a",), ("c",)], True]
        assert abs(database.now() - time.time()) < 60
        assert database.size() > 10_000


@everywhere
def test_several_reads_see_one_moment(url: str):
    with connect(url) as database:
        with database.read() as tx:
            before = tx.all("SELECT name FROM meta")
            if url != "sqlite:///:memory:":  # there the reader has the one connection
                put(database, "meanwhile")
            assert tx.all("SELECT name FROM meta") == before
        put(database, "afterwards")
        assert "afterwards" in names(database)


@pytest.mark.req("S3-34")
@everywhere
def test_a_violated_constraint_is_reported_as_ours_and_says_which(url: str):
    with connect(url) as database:
        for statement, parameters, says in [
            (META, ("database", "x"), "meta"),
            ("INSERT INTO minutes (job, minute) VALUES (?, ?)", (99, 1), "foreign key|FOREIGN KEY"),
            ("INSERT INTO meta (name, value) VALUES (?, ?)", ("n", None), "value"),
        ]:
            with pytest.raises(StorageError, match=r"constraint .*violated") as caught:
                database.run(partial(lambda tx, s, p: tx.execute(s, p), s=statement, p=parameters))
            assert any(word in str(caught.value) for word in says.split("|"))
            assert caught.value.exit_code == 1
        with pytest.raises(StorageError) as caught:
            database.run(lambda tx: tx.execute(META, ("a canary", None)))
        assert "canary" not in str(caught.value)  # PostgreSQL would repeat the whole row
        assert names(database) == set()


@pytest.mark.req("S3-41")
@everywhere
@pytest.mark.parametrize("value", ["\ud800", 2**70], ids=["half a character", "beyond 64 bits"])
def test_a_value_no_database_can_hold_is_refused_alike(url: str, value: object):
    with connect(url) as database:
        with pytest.raises(InvalidInput):
            database.run(lambda tx: tx.execute("SELECT CAST(? AS BIGINT)", (value,)))  # type: ignore[arg-type]
        with pytest.raises(InvalidInput):
            database.one("SELECT CAST(? AS BIGINT)", (value,))  # type: ignore[arg-type]
        put(database, "still works")


# ---- locks ----------------------------------------------------------------------------------------------------------

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
connection.execute("INSERT INTO meta VALUES ('theirs', 'x')")
print("locked", flush=True)
sys.stdin.readline()
connection.execute("COMMIT")
"""


@pytest.mark.req("S3-28", "S3-52")
def test_a_write_waits_while_another_process_holds_the_lock_and_tells_its_tries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sqlite, "LOCK_SECONDS", 120.0 / 20)  # a try gives up after 1 s
    path = tmp_path / "a.db"
    with connect(sqlite_url(path)) as database:
        other = python(LOCK, path)
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        retries = metrics.value("headway_sql_retries", operation="write")
        writer = threading.Thread(target=put, args=(database, "ours"))
        writer.start()
        eventually(lambda: metrics.value("headway_sql_retries", operation="write") > retries, 30)
        assert names(database) == set()  # readers are not held up
        other.communicate("\n", 30)
        writer.join(30)
        assert names(database) == {"ours", "theirs"}
    assert "the transaction is retried" in caplog.text


@pytest.mark.req("S3-28")
def test_a_lock_that_is_never_released_is_an_error_with_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sqlite, "LOCK_SECONDS", 1.0)
    path = tmp_path / "a.db"
    with connect(sqlite_url(path)) as database:
        other = python(LOCK, path)
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(StorageError, match="locked by another process") as caught:
            put(database, "ours")
        assert str(path) in str(caught.value)
        other.kill()
        other.communicate()
        assert names(database) == set()
        put(database, "later")


def test_a_shutdown_ends_the_wait_for_a_lock(tmp_path: Path):
    path, stop, outcome = tmp_path / "a.db", threading.Event(), []
    with connect(sqlite_url(path), stop=stop) as database:
        other = python(LOCK, path)
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"

        def write() -> None:
            try:
                put(database, "ours")
            except Stopping as error:
                outcome.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        stop.set()
        writer.join(20)
        assert len(outcome) == 1
        other.kill()
        other.communicate()


# ---- the pool -------------------------------------------------------------------------------------------------------


def descriptors(path: Path) -> int:
    """How many descriptors of this process are open on a database or its companions."""
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(entry).startswith(str(path))
        except FileNotFoundError:
            continue
    return found


class Interrupted(Exception):
    pass


def interrupt() -> None:
    raise Interrupted


@pytest.mark.parametrize("call", ["write", "read"])
def test_a_call_that_a_signal_handler_interrupts_at_any_line_leaves_no_lock_and_no_lost_connection(
    call: str, tmp_path: Path
):
    """A connection that went back to the pool inside its transaction would lock out every process, for good; one that
    is counted and not there would be waited for by every fork, and its child would refuse the database."""
    path = tmp_path / "a.db"
    database = connect(sqlite_url(path))

    def read() -> None:
        with database.read() as tx:
            tx.all("SELECT name FROM meta")

    for number in range(300):
        with (
            suppress(Interrupted),
            at_line(number, interrupt, "_sql/database.py", "_sql/pool.py") as steps,
        ):
            put(database, f"{number}") if call == "write" else read()
        with closing(sqlite3.connect(path, timeout=0, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
        put(database, f"after {number}")
        assert f"after {number}" in names(database)
        gc.collect()
        assert database._connections == len(database._idle)
        if not steps.reached:
            break
    assert 20 < number < 299
    database.close()
    assert descriptors(path) == 0


@pytest.mark.req("S3-26", "S3-53")
def test_threads_share_few_connections_and_closing_closes_them_all(tmp_path: Path):
    path = tmp_path / "a.db"
    database = connect(sqlite_url(path))
    gate = threading.Barrier(8)

    def work(number: int) -> None:
        gate.wait(30)
        for turn in range(10):
            put(database, f"{number}-{turn}")
            database.one("SELECT count(*) FROM meta")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(database)) == 80
    connections = metrics.value("headway_sql_connections", engine="sqlite")
    assert 1 <= connections <= 8
    assert descriptors(path) <= 3 * connections + 1  # the one that holds the file itself
    for turn in range(200):
        database.all("SELECT name FROM meta WHERE name = ?", (str(turn),))
    assert metrics.value("headway_sql_connections", engine="sqlite") == connections
    database.close()
    assert descriptors(path) == 0
    assert metrics.value("headway_sql_connections", engine="sqlite") == 0
    with pytest.raises(HeadwayError, match="was closed"):
        put(database, "too late")


@pytest.mark.req("S3-26")
def test_threads_share_postgresql_and_closing_ends_the_sessions(postgres_url: str):
    database = connect(postgres_url)
    threads = [threading.Thread(target=put, args=(database, str(number))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(database)) == 8
    database.close()
    with psycopg.connect(postgres_url, autocommit=True) as other:  # within a transaction the answer would not change
        sessions = (
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'headway' AND datname = current_database()"
        )
        eventually(lambda: other.execute(sessions).fetchone() == (0,), 20)


@pytest.mark.req("S3-26")
@shared
def test_a_forked_child_has_its_own_connections(url: str):
    with connect(url) as database:
        put(database, "before")

        def child() -> None:
            for turn in range(20):
                put(database, f"child {os.getpid()} {turn}")
            assert "before" in names(database)
            database.close()

        children = [forked(child) for _ in range(3)]
        for turn in range(20):
            put(database, f"parent {turn}")
            assert f"parent {turn}" in names(database)
        assert [exit_code(pid) for pid in children] == [0, 0, 0]
        assert len(names(database)) == 1 + 20 + 60
        assert not isinstance(database, PostgreSQL) or database.one("SELECT 1") == (1,)


@pytest.mark.req("S3-26")
@shared
def test_children_forked_while_threads_work_can_work_too(url: str):
    stop = threading.Event()
    with connect(url) as database:

        def busy(number: int) -> None:
            put(database, f"parent {number}")
            while not stop.is_set():
                database.run(
                    lambda tx: tx.execute("UPDATE meta SET value = value WHERE name = ?", (f"parent {number}",))
                )
                assert database.all("SELECT 1") == [(1,)]

        threads = [threading.Thread(target=busy, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            for turn in range(5):
                assert exit_code(forked(partial(put, database, f"child {turn}"))) == 0
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
        assert {f"child {turn}" for turn in range(5)} <= names(database)
        database.verify()


@pytest.mark.req("S3-26")
@shared
def test_threads_that_come_first_at_once_in_a_forked_child_share_one_lock_and_one_pool(url: str):
    """As in a server that forks its workers and starts threads there. Each of them used to make a lock of its own, and to
    close the connection by which another was writing: the interpreter crashed."""
    with connect(url) as database:
        put(database, "parent")

        def child() -> None:
            pid, turns = os.getpid, iter([0, 5, 10, 15, 20, 25, 30, 35] + [0] * 10_000)

            def slow() -> int:  # every thread has looked who it is, and then one after the other goes on
                found = pid()
                time.sleep(0.001 * next(turns))
                return found

            os.getpid = slow
            began, errors = threading.Barrier(8), []

            def write(number: int, tx: Tx) -> None:
                tx.execute(META, (f"{number}", "x"))
                time.sleep(0.01)
                tx.execute("UPDATE meta SET value = 'y' WHERE name = ?", (f"{number}",))

            def work(number: int) -> None:
                began.wait()
                try:
                    database.run(partial(write, number))
                except HeadwayError as error:
                    errors.append(error)

            threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert errors == []
            assert len(names(database)) == 9

        assert exit_code(forked(child)) == 0
        assert len(names(database)) == 9


def test_a_child_forked_in_the_middle_of_a_long_transaction_refuses_instead_of_trusting_locks_it_has_not(
    tmp_path: Path,
):
    begun, finish = threading.Event(), threading.Event()
    with connect(sqlite_url(tmp_path / "a.db")) as database:

        def slow(tx: Tx) -> None:
            tx.execute(META, ("slow", "x"))
            begun.set()
            assert finish.wait(60)

        thread = threading.Thread(target=lambda: database.run(slow))
        thread.start()
        assert begun.wait(30)

        def child() -> None:
            with pytest.raises(HeadwayError, match="forked"):
                put(database, "child")
            with pytest.raises(HeadwayError, match="forked"):
                names(database)
            with pytest.raises(HeadwayError, match="forked"):
                connect(database.name)  # SQLite's book of locks is one for all connections of a process

        pid = forked(child)
        finish.set()
        thread.join(60)
        assert exit_code(pid) == 0
        assert names(database) == {"slow"}


@pytest.mark.req("S3-26")
def test_writes_of_a_child_survive_the_close_of_its_parent(tmp_path: Path):
    """With inherited connections the parent would take itself for the last user and delete the child's -wal."""
    url = sqlite_url(tmp_path / "a.db")
    database = connect(url)
    put(database, "before")
    go, told = os.pipe(), os.pipe()

    def child() -> None:
        put(database, "first")
        os.write(told[1], b"x")
        os.read(go[0], 1)
        put(database, "second")
        os._exit(0)  # as a kill would: nothing is closed in good order

    pid = forked(child)
    os.read(told[0], 1)
    database.close()
    os.write(go[1], b"x")
    assert exit_code(pid) == 0
    for descriptor in (*go, *told):
        os.close(descriptor)
    with connect(url) as again:
        assert names(again) == {"before", "first", "second"}
        again.verify()


def test_a_database_in_memory_does_not_cross_a_fork_in_silence():
    with connect("sqlite:///:memory:") as database:

        def child() -> None:
            with pytest.raises(HeadwayError, match="forked"):
                put(database, "x")

        assert exit_code(forked(child)) == 0
        put(database, "parent")
        assert names(database) == {"parent"}


# ---- addresses ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    ["", "ledger.db", "mysql://h/x", "sqlite://ledger.db", "sqlite:///", "sqlite://", "sqlite:///a%00b.db",
     "sqlite:///a.db?synchronous=off", "sqlite:///a.db?synchronus=full", "postgresql://[::1/x",
     "postgresql://h:port/x", "postgresql://h/x?nonsense=1", "file:///etc/passwd"],
)  # fmt: skip
def test_a_wrong_address_is_refused_and_nothing_is_made(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInput) as caught:
        connect(url)
    assert caught.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a b.db", "a#b.db", "a?b.db", "ä%41.db", "'; DROP TABLE jobs;--.db", ":memory:.db"])
def test_a_file_of_any_name_can_be_a_database(name: str, tmp_path: Path):
    from urllib.parse import quote

    with connect(f"sqlite:///{tmp_path}/{quote(name)}") as database:
        put(database, "x")
    assert (tmp_path / name).exists()
    if "?" not in name and "%" not in name:
        with connect(f"sqlite:///{tmp_path}/{name}", create=False) as database:
            assert names(database) == {"x"}


@pytest.mark.req("S3-27", "S3-52")
def test_a_directory_that_appears_later_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "mount" / "a.db"

    def appear() -> None:
        eventually(lambda: "does not exist yet" in caplog.text, 20)
        path.parent.mkdir()

    thread = threading.Thread(target=appear)
    thread.start()
    with connect(sqlite_url(path)) as database:
        put(database, "x")
    thread.join()
    assert path.exists()


@pytest.mark.req("S3-27")
def test_a_directory_that_never_appears_is_an_error_after_growing_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(StorageError, match="does not exist") as caught:
        connect(sqlite_url(tmp_path / "nowhere" / "a.db"))
    assert str(tmp_path / "nowhere") in str(caught.value)
    moments = [record.created for record in caplog.records if "does not exist yet" in record.message]
    pauses = [after - before for before, after in pairwise(moments)]
    assert len(pauses) == 4
    for number, pause in enumerate(pauses):
        assert pause >= STORE.base * STORE.factor**number * (1 - STORE.jitter)


@shared
def test_without_create_a_missing_database_is_not_found_and_not_made(url: str, tmp_path: Path):
    with pytest.raises(NotFound) as caught:
        connect(url, create=False)
    assert caught.value.exit_code == 2
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFound):
        connect(url, create=False)
    connect(url).close()
    connect(url, create=False).close()


@pytest.mark.req("S3-27", "S3-52")
def test_a_server_that_is_away_is_tried_again_and_then_unavailable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(PostgreSQL, "retry", RetryPolicy(retries=2, base=0.01))
    with pytest.raises(Unavailable, match="cannot be reached") as caught:
        connect("postgresql://ann:hunter2@127.0.0.1:9/x")
    assert caught.value.exit_code == 6
    assert "hunter2" not in str(caught.value) + caplog.text
    assert caplog.text.count("the query is retried") == 2


def test_a_wrong_password_or_database_is_reported_at_once_without_retry(postgres_factory, caplog):
    server: PostgresServer = postgres_factory()
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("CREATE USER ann PASSWORD 'right'")
        hba = server.directory / "data" / "pg_hba.conf"
        hba.write_text("host all headway 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n")
        admin.execute("SELECT pg_reload_conf()")
        address = f"postgresql://ann:hunter2@127.0.0.1:{server.port}/postgres"

        def refused() -> bool:
            with pytest.raises(Unavailable, match="refused") as caught:
                connect(address)
            assert "hunter2" not in str(caught.value)
            assert "password" in caught.value.hint
            return True

        eventually(refused, 20)
    with pytest.raises(Unavailable, match="does not exist"):
        connect(server.url("nowhere"))
    assert "retried" not in caplog.text


# ---- a server that restarts -----------------------------------------------------------------------------------------

WRITER = """
import os, sys, threading
from headway._sql import connect
database = connect(sys.argv[1])
def work(tx, number):
    # Two rows that only make sense together; repeating is harmless because they carry an identity.
    for half in ("left", "right"):
        tx.execute("INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING", (f"{half} {number}", "x"))
print("ready", flush=True)
for number in range(10_000):
    database.run(lambda tx: work(tx, number))
    print(number, flush=True)
    if os.path.exists(sys.argv[2]):
        break
"""


def test_a_restart_in_the_middle_loses_nothing_acknowledged_and_leaves_no_half_transaction(
    postgres_server: PostgresServer, postgres_url: str, tmp_path: Path
):
    log = tmp_path / "acknowledged"
    with log.open("w") as output:
        writer = subprocess.Popen([sys.executable, "-c", WRITER, postgres_url, str(tmp_path / "enough")], stdout=output)
    try:
        for _ in range(3):
            seen = len(log.read_text().split())
            eventually(partial(lambda seen: len(log.read_text().split()) > seen + 30, seen), 60)
            postgres_server.restart(immediate=True)
        seen = len(log.read_text().split())
        eventually(lambda: len(log.read_text().split()) > seen + 10, 60)
        (tmp_path / "enough").touch()
        assert writer.wait(60) == 0
    finally:
        writer.kill()
        writer.wait()
    acknowledged = {int(word) for word in log.read_text().split()[1:]}
    with connect(postgres_url) as database:
        found = names(database)
    left = {int(name.split()[1]) for name in found if name.startswith("left")}
    right = {int(name.split()[1]) for name in found if name.startswith("right")}
    assert acknowledged <= left
    assert left == right
    assert acknowledged == set(range(max(acknowledged) + 1))


def test_after_a_restart_a_pool_full_of_broken_connections_costs_one_more_try(
    postgres_server: PostgresServer, postgres_url: str, caplog: pytest.LogCaptureFixture
):
    with connect(postgres_url) as database:

        def fill() -> None:
            held = [database._take() for _ in range(12)]
            for connection in held:
                database._give(connection)

        fill()
        postgres_server.restart()
        put(database, "x")
        assert caplog.text.count("the transaction is retried") == 1
        for read in (
            lambda: names(database),
            lambda: database.one("SELECT 1"),
            database.now,
            lambda: read_all(database),
        ):
            fill()
            postgres_server.restart()
            assert read()


def read_all(database: Database) -> list[tuple[str]]:
    with database.read() as tx:
        return tx.all("SELECT name FROM meta")


# ---- migrations -----------------------------------------------------------------------------------------------------


def sqlite_schema(path: Path) -> list[tuple[str, ...]]:
    with sqlite3.connect(path) as connection:
        found = connection.execute("SELECT type, name, sql FROM sqlite_schema ORDER BY type, name").fetchall()
        version = connection.execute("PRAGMA user_version").fetchone()
    connection.close()
    return [*found, version]


def postgres_schema(url: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        columns = connection.execute(
            "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns "
            "WHERE table_schema = 'headway' ORDER BY 1, 2"
        ).fetchall()
        indexes = connection.execute(
            "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = 'headway' ORDER BY 1"
        )
        constraints = connection.execute(
            "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE connamespace = 'headway'::regnamespace ORDER BY 1, 2"
        )
        version = connection.execute("SELECT value FROM headway.meta WHERE name = 'schema'").fetchall()
        return [*columns, *indexes.fetchall(), *constraints.fetchall(), *version]


def know(monkeypatch: pytest.MonkeyPatch, steps: list[tuple[int, list[str]]]) -> None:
    """Be a headway of another age, that knows these steps and no others."""
    for module in (_sql, sqlite, postgresql):
        monkeypatch.setattr(module, "migrations", lambda engine: steps)


@pytest.mark.parametrize("version", range(1, len(migrations("sqlite"))))
def test_a_file_of_every_earlier_version_migrates_to_todays_schema(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    connect(sqlite_url(tmp_path / "made.db")).close()
    with monkeypatch.context() as earlier:
        know(earlier, migrations("sqlite")[:version])
        connect(sqlite_url(tmp_path / "migrated.db")).close()
        assert sqlite_schema(tmp_path / "migrated.db") != sqlite_schema(tmp_path / "made.db")
    connect(sqlite_url(tmp_path / "migrated.db")).close()
    assert sqlite_schema(tmp_path / "migrated.db") == sqlite_schema(tmp_path / "made.db")


def test_a_postgresql_of_every_earlier_version_migrates_to_todays_schema(
    postgres_server: PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
):
    """One goes through every version by itself, one is of the first and becomes today's at once."""
    steps = migrations("postgresql")
    connect(postgres_url).close()
    for known in (range(1, len(steps)), [1]):
        name = postgres_server.create_database()
        for version in known:
            with monkeypatch.context() as earlier:
                know(earlier, steps[:version])
                connect(postgres_server.url(name)).close()
        connect(postgres_server.url(name)).close()
        assert postgres_schema(postgres_server.url(name)) == postgres_schema(postgres_url)
        postgres_server.drop_database(name)


@shared
def test_tracebacks_of_attempts_from_before_migration_28_are_still_shown(url: str, monkeypatch: pytest.MonkeyPatch):
    failure = Failure("RuntimeError", "refused", "prices.py:step")
    with monkeypatch.context() as earlier:
        know(earlier, migrations("sqlite" if url.startswith("sqlite") else "postgresql")[:27])
        with Ledger.open(url) as ledger:
            job = ledger.create("ads")
            job.register(NewItem(idx) for idx in (1, 2))
            job.record([Failed(idx, failure) for idx in (1, 2)])
            old = "UPDATE attempts SET error = ?, detail = ? WHERE idx = ?"
            job.database.run(lambda tx: tx.execute(old, ("e" * 300, "Traceback of version 27", 1)))
            job.database.run(lambda tx: tx.execute(old, ("e" * 300, "", 2)))
    with Ledger.open(url) as ledger:
        job = ledger.job("ads")
        job.record([Failed(idx, replace(failure, detail="Traceback of today")) for idx in (1, 2)])
        assert [(a.error, a.detail) for a in job.history(1)] == [
            ("e" * 300, "Traceback of version 27"),
            (failure.text, "Traceback of today"),
        ]
        assert [attempt.detail for attempt in job.history(2)] == [None, "Traceback of today"]
        assert [cause.no for cause in job.causes()] == [1]


@shared
def test_the_documentation_names_every_table(url: str):
    text = (Path(__file__).parents[2] / "docs" / "internals" / "storage.md").read_text()
    named = {
        name
        for line in text.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    with connect(url) as database:
        rows = database.all(
            "SELECT name FROM sqlite_schema WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
            if database.engine == "sqlite"
            else "SELECT tablename FROM pg_tables WHERE schemaname = 'headway'"
        )
    found = {name for (name,) in rows}
    assert found <= named, "tables that are not documented"
    assert named - found <= {"transactions"}, "tables that are documented and are not there"


def test_a_migration_that_fails_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps = migrations("sqlite")
    path = tmp_path / "a.db"
    connect(sqlite_url(path)).close()
    before = sqlite_schema(path)
    bad = [*steps, (len(steps) + 1, ["CREATE TABLE fine (a)", "CREATE TABLE jobs (again)"])]
    know(monkeypatch, bad)
    with pytest.raises(StorageError, match="already exists"):
        connect(sqlite_url(path))
    assert sqlite_schema(path) == before


def test_a_newer_file_is_refused_and_left_as_it_is(tmp_path: Path):
    path = tmp_path / "a.db"
    connect(sqlite_url(path)).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    before = digest(path)
    for create in (True, False):
        with pytest.raises(StoreNewer, match="schema 99") as caught:
            connect(sqlite_url(path), create=create)
        assert str(path) in str(caught.value)
        assert "pgrade" in caught.value.hint
    assert digest(path) == before


def test_a_newer_or_foreign_schema_in_postgresql_is_refused_and_left_as_it_is(postgres_url: str):
    with psycopg.connect(postgres_url, autocommit=True) as admin:
        admin.execute("CREATE SCHEMA headway")
        admin.execute("CREATE TABLE headway.theirs (a int)")
        with pytest.raises(StoreForeign):
            connect(postgres_url)
        admin.execute("DROP TABLE headway.theirs")
        connect(postgres_url).close()
        admin.execute("UPDATE headway.meta SET value = '99' WHERE name = 'schema'")
        before = postgres_schema(postgres_url)
        with pytest.raises(StoreNewer, match="schema 99"):
            connect(postgres_url)
        assert postgres_schema(postgres_url) == before


@shared
def test_eight_processes_that_connect_first_make_one_database(url: str, tmp_path: Path):
    start = tmp_path / "start"

    def work() -> None:
        eventually(start.exists, 60)
        with connect(url) as database:
            put(database, str(os.getpid()))

    children = [forked(work) for _ in range(8)]
    start.touch()
    assert [exit_code(pid) for pid in children] == [0] * 8
    with connect(url, create=False) as database:
        assert names(database) == {str(pid) for pid in children}
        assert database.one("SELECT count(*) FROM meta WHERE name = 'database'") == (1,)


def test_threads_that_connect_first_make_one_database(tmp_path: Path):
    url, outcomes = sqlite_url(tmp_path / "a.db"), []
    gate = threading.Barrier(6)

    def work() -> None:
        gate.wait(30)
        with connect(url) as database:
            outcomes.append(database.one("SELECT value FROM meta WHERE name = 'database'"))

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 6
    assert len(set(outcomes)) == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


@pytest.mark.req("S3-22")
def test_a_kill_while_the_file_is_made_leaves_nothing_or_a_whole_database(tmp_path: Path):
    chance = random.Random(1)
    connect(sqlite_url(tmp_path / "expected.db")).close()
    expected = sqlite_schema(tmp_path / "expected.db")
    for turn in range(15):
        path = tmp_path / f"{turn}.db"
        pid = forked(partial(connect, sqlite_url(path)))
        threading.Event().wait(chance.uniform(0.0, 0.03))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if path.exists():  # before anybody opens it and makes it whole
            assert sqlite_schema(path) == expected
        with connect(sqlite_url(path)) as database:
            put(database, "x")
            database.verify()


@pytest.mark.req("S3-22")
def test_a_kill_while_the_schema_is_made_in_postgresql_leaves_nothing_or_all(postgres_server: PostgresServer):
    for turn in range(4):
        url = postgres_server.url(postgres_server.create_database())
        pid = forked(partial(connect, url))
        threading.Event().wait(0.02 * turn)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with connect(url) as database:
            put(database, "x")
        postgres_server.drop_database(url.rpartition("/")[2])


# ---- what is said about it ------------------------------------------------------------------------------------------


@pytest.mark.req("S3-52")
@everywhere
def test_the_log_tells_when_transactions_begin_and_how_they_end(url: str, caplog: pytest.LogCaptureFixture):
    with connect(url) as database:
        caplog.set_level("DEBUG", "headway")
        caplog.clear()
        put(database, "a")
        with pytest.raises(StorageError):
            put(database, "a")
    told = [(record.message, record.fields["operation"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert told == [
        ("transaction begun", "write"), ("transaction committed", "write"),
        ("transaction begun", "write"), ("transaction rolled back", "write"),
    ]  # fmt: skip


@pytest.mark.req("S3-53")
@everywhere
def test_metrics_give_the_time_of_queries_the_size_the_failures_and_the_connections(url: str):
    with connect(url) as database:
        engine = database.engine
        writes = metrics.histogram("headway_sql_seconds", operation="write").count
        queries = metrics.histogram("headway_sql_seconds", operation="query").count
        failures = metrics.value("headway_sql_failures", operation="write")
        put(database, "a")
        database.all("SELECT name FROM meta")
        with pytest.raises(StorageError):
            put(database, "a")
        assert metrics.histogram("headway_sql_seconds", operation="write").count == writes + 1
        assert metrics.histogram("headway_sql_seconds", operation="query").count == queries + 1
        assert metrics.value("headway_sql_failures", operation="write") == failures + 1
        assert metrics.value("headway_sql_connections", engine=engine) == 1
        assert database.size() == metrics.value("headway_sql_bytes", engine=engine) > 0


def test_durability_is_full_unless_the_address_says_otherwise(tmp_path: Path):
    for options, level in [("", 2), ("?synchronous=full", 2), ("?synchronous=NORMAL", 1)]:
        with connect(sqlite_url(tmp_path / "a.db", options)) as database:
            assert isinstance(database, SQLite)
            assert database.one("PRAGMA synchronous") == (level,)
            assert database.one("PRAGMA journal_mode") == ("wal",)
            assert database.one("PRAGMA foreign_keys") == (1,)


#: A signal handler raises while psycopg looks for its library, and again nobody is told to install anything.
INTERRUPTED_IMPORT = """
import os, signal, sys
from headway import _sql

class Late(Exception):
    pass

def ring(*_):
    raise Late

class Bell:
    def find_spec(self, name, *_):
        if name.startswith("psycopg_"):
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGALRM)

signal.signal(signal.SIGALRM, ring)
sys.meta_path.insert(0, Bell())
for _ in range(2):
    try:
        _sql.connect(sys.argv[1]).close()
        print("connected")
    except BaseException as error:
        print(type(error).__name__)
"""


def test_an_interrupt_while_psycopg_is_loaded_reaches_the_caller_and_the_next_call_connects(postgres_url: str):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, postgres_url], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Late", "connected"]


# ---- arrays of PostgreSQL --------------------------------------------------------------------------------------------


class Number(IntEnum):
    TWO = 2


class Share(float):
    def __repr__(self) -> str:
        return "much"


class Name(str):
    __slots__ = ()

    def replace(self, *_: object) -> str:
        return "another"


def test_subclasses_of_numbers_and_texts_are_written_by_value() -> None:
    assert array([Number.TWO, True, Share(0.5), Name('a"b'), None]) == '{2,1,0.5,"a\\"b",NULL}'
    assert [array([value, value]) for value in (Number.TWO, True, Share(0.5))] == ["{2,2}", "{1,1}", "{0.5,0.5}"]


def test_a_column_of_one_kind_is_written_as_one_of_several_is() -> None:
    for value in (7, -(2**63), 1e-6, float("inf"), None, "a"):
        assert array([value, value]) == array([value, value, "x"]).replace(',"x"}', "}")
    assert array([]) == "{}"
