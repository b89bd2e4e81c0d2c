"""Answers that do not come, come late, or are lost; and doors that are for reading or for writing only."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import psycopg
import pytest

from headway._sql import Database, Tx, connect, marks, postgresql, sqlite
from headway._sql.postgresql import PostgreSQL
from headway.core.retry import RetryPolicy
from headway.errors import StorageError, StoreReadOnly, Unavailable
from tests.core.databases import everywhere, sqlite_url
from tests.services.lost_answers import through
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.waiting import eventually

COUNT = "UPDATE meta SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) WHERE name = 'count'"


def count(tx: Tx) -> int:
    """Not idempotent on purpose: repeated, it counts twice."""
    tx.execute("INSERT INTO meta VALUES ('count', '0') ON CONFLICT (name) DO NOTHING")
    tx.execute(COUNT)
    row = tx.one("SELECT value FROM meta WHERE name = 'count'")
    assert row is not None
    return int(row[0])


@pytest.fixture
def proxy(postgres_server: PostgresServer, tcp_proxy: Callable[[int], TcpProxy]) -> TcpProxy:
    return tcp_proxy(postgres_server.port)


@pytest.fixture
def far_url(postgres_url: str, proxy: TcpProxy) -> str:
    """The database through the proxy."""
    return through(proxy, postgres_url)


# ---- a lost answer to COMMIT ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("earlier", [0, 3], ids=["the connection's first transaction", "a later one"])
@pytest.mark.parametrize("what", ["reply", "request"])
def test_a_transaction_whose_commit_was_cut_off_is_done_once_and_gives_its_own_answer(
    far_url: str, proxy: TcpProxy, what: str, earlier: int
):
    with connect(far_url) as database:
        for _ in range(earlier):
            database.run(count)
        database.close()
    with connect(far_url) as database:
        for _ in range(earlier):
            database.run(count)
        proxy.lose_commits(what)
        assert database.run(count) == 2 * earlier + 1
        assert proxy.commits_to_lose == 0, "the fault did not happen"
        assert database.run(count) == 2 * earlier + 2


def test_a_connection_whose_row_was_removed_is_known_again(far_url: str, postgres_url: str, proxy: TcpProxy):
    with connect(far_url) as database:
        database.run(count)
        with connect(postgres_url) as near:
            near.write("DELETE FROM transactions")
        proxy.lose_commits("reply")
        assert database.run(count) == 2


def test_rolled_back_transactions_block_no_other(far_url: str, proxy: TcpProxy):
    def give_up(tx: Tx) -> None:
        count(tx)
        raise KeyError("no")

    with connect(far_url) as database:
        for turn in range(8):
            with pytest.raises(KeyError):
                database.run(give_up)
            proxy.lose_commits("reply")
            assert database.run(count) == turn + 1


def test_commits_that_are_lost_again_and_again_count_once_each(far_url: str, proxy: TcpProxy):
    with connect(far_url) as database:
        answers = []
        for turn in range(6):
            proxy.lose_commits("reply" if turn % 2 else "request", times=1)
            answers.append(database.run(count))
    assert answers == [1, 2, 3, 4, 5, 6]


def test_a_single_statement_that_writes_is_a_transaction_like_any_other(far_url: str, proxy: TcpProxy):
    with connect(far_url) as database:
        database.run(count)
        proxy.lose_commits("reply")
        assert database.write(f"{COUNT} RETURNING value") == [("2",)]
        assert proxy.commits_to_lose == 0


def test_a_transaction_that_hangs_in_the_server_is_ended_there_before_it_is_repeated(
    postgres_url: str, far_url: str, proxy: TcpProxy
):
    """The line goes silent before COMMIT arrives: the server keeps the transaction open and knows nothing."""
    with connect(far_url) as database, connect(postgres_url) as near:
        database.run(count)

        def silent(tx: Tx) -> int:
            result = count(tx)
            if proxy.connections == 1:
                proxy.black_hole()
                threading.Timer(1.0, proxy.pass_through).start()  # resets our end; the server's end stays as it was
            return result

        assert database.run(silent) == 2
        assert near.one("SELECT value FROM meta WHERE name = 'count'") == ("2",)


# ---- a server that does not answer ----------------------------------------------------------------------------------


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same limits, shorter."""
    monkeypatch.setattr(postgresql, "STATEMENT_SECONDS", 0.5)
    monkeypatch.setattr(postgresql, "GRACE_SECONDS", 0.5)
    monkeypatch.setattr(postgresql, "CONNECT_SECONDS", 2)
    monkeypatch.setattr(PostgreSQL, "patience", 0.2)


VERBS: dict[str, Callable[[Database], object]] = {
    "one": lambda database: database.one("SELECT 1"),
    "all": lambda database: database.all("SELECT 1"),
    "now": lambda database: database.now(),
    "run": lambda database: database.run(count),
    "write": lambda database: database.write(COUNT),
    "write alone": lambda database: database.write(COUNT, idempotent=True),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_backend_that_is_stopped_ends_in_unavailable_and_not_in_waiting(postgres_url: str, verb: str, hasty: None):
    with connect(postgres_url) as database:
        (row,) = database.all("SELECT pg_backend_pid()")
        began = time.monotonic()
        with stopped(row[0]), pytest.raises(Unavailable, match="did not answer within"):
            VERBS[verb](database)
        assert time.monotonic() - began < 30, "the limit is a second here"
        assert database.one("SELECT 1") == (1,)


def test_a_commit_that_is_never_answered_ends_in_unavailable(postgres_url: str, hasty: None):
    with connect(postgres_url) as database:
        pids: list[int] = []

        def work(tx: Tx) -> None:
            count(tx)
            row = tx.one("SELECT pg_backend_pid()")
            assert row is not None
            pids.append(row[0])
            os.kill(row[0], signal.SIGSTOP)

        try:
            with pytest.raises(Unavailable, match="has not ended the last transaction"):
                database.run(work)
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert len(pids) == 1, "a transaction whose outcome is unknown is not repeated"


def test_a_server_that_is_stopped_altogether_ends_in_unavailable(postgres_factory, hasty: None):
    server: PostgresServer = postgres_factory()
    with connect(server.url()) as database:
        pid = int((server.directory / "data" / "postmaster.pid").read_text().split()[0])
        (row,) = database.all("SELECT pg_backend_pid()")
        with stopped(pid), stopped(row[0]), pytest.raises(Unavailable):
            database.run(count)
        with stopped(pid), pytest.raises(Unavailable):
            connect(server.url())
    server.kill9()  # asked to end in good order, it waits a minute for the connection it was asked for while it was stopped


def test_a_line_that_takes_everything_and_answers_nothing_ends_in_unavailable(
    far_url: str, proxy: TcpProxy, hasty: None
):
    with connect(far_url) as database:
        proxy.black_hole()
        with pytest.raises(Unavailable):
            database.one("SELECT 1")
        with pytest.raises(Unavailable):
            connect(far_url)


def test_the_server_cancels_a_slow_statement_and_it_is_reported(postgres_url: str, hasty: None):
    with connect(postgres_url) as database:
        with pytest.raises(StorageError, match="too long"):
            database.all("SELECT pg_sleep(60)")
        assert database.one("SELECT 1") == (1,)


def test_one_who_listens_may_wait_as_long_as_it_likes(postgres_url: str, hasty: None):
    with connect(postgres_url) as database:
        listener = database.own_connection()
        listener.execute("LISTEN here")
        assert list(listener.notifies(timeout=2.0)) == []  # longer than a statement may take
        database.run(lambda tx: tx.execute("SELECT pg_notify('here', 'x')"))
        assert [note.payload for note in listener.notifies(timeout=20, stop_after=1)] == ["x"]
        listener.close()


# ---- a server that is away for a while ------------------------------------------------------------------------------


@pytest.mark.req("S3-27")
@pytest.mark.parametrize("verb", ["one", "all", "now", "read", "run"])
def test_reads_wait_for_a_server_that_comes_back_as_long_as_writes_do(
    far_url: str, proxy: TcpProxy, verb: str, caplog: pytest.LogCaptureFixture
):
    def read(database: Database) -> object:
        with database.read() as tx:
            return tx.one("SELECT 1")

    with connect(far_url) as database:
        database.one("SELECT 1")
        proxy.refuse()
        proxy.cut()

        def come_back() -> None:
            eventually(lambda: caplog.text.count("retried") >= 3, 60)
            proxy.pass_through()

        thread = threading.Thread(target=come_back)
        thread.start()
        assert (VERBS | {"read": read})[verb](database)
        thread.join()


@pytest.mark.req("S3-27")
def test_the_pauses_between_tries_grow(far_url: str, proxy: TcpProxy, caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(PostgreSQL, "retry", RetryPolicy(retries=4, base=0.05, factor=3.0, cap=10.0))
    with connect(far_url) as database:
        proxy.refuse()
        proxy.cut()
        caplog.clear()
        with pytest.raises(Unavailable):
            database.one("SELECT 1")
    moments = [record.created for record in caplog.records if "retried" in record.message]
    pauses = [after - before for before, after in pairwise(moments)]
    assert len(pauses) == 3
    for pause, least in zip(pauses, [0.05, 0.15, 0.45], strict=True):
        assert pause >= least * 0.99


def test_a_postgresql_that_may_only_be_read_is_read_and_its_refusal_speaks_of_servers(
    postgres_server: PostgresServer, postgres_url: str
):
    connect(postgres_url).close()
    name = postgres_url.rpartition("/")[2]
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        admin.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on".encode())
    with connect(postgres_url, create=False) as database:
        assert database.one("SELECT count(*) FROM jobs") == (0,)
        with pytest.raises(StoreReadOnly) as caught:
            database.run(count)
        assert "file" not in caught.value.hint
        assert "postgresql://" in caught.value.hint


# ---- doors ----------------------------------------------------------------------------------------------------------


@everywhere
@pytest.mark.parametrize(
    "sql",
    [
        "INSERT INTO meta VALUES ('a', 'b')",
        "insert into meta values ('a', 'b') returning name",
        "WITH gone AS (DELETE FROM meta RETURNING name) SELECT name FROM gone",
        "UPDATE meta SET value = 'x' RETURNING value",
        "DELETE FROM meta",
    ],
)
def test_the_methods_for_reading_refuse_statements_that_write(url: str, sql: str):
    with connect(url) as database:
        before = database.all("SELECT name, value FROM meta ORDER BY name")
        for door in (database.one, database.all):
            with pytest.raises(ValueError, match=r"Database\.write"):
                door(sql)
        assert database.all("SELECT name, value FROM meta ORDER BY name") == before
        assert database.one("SELECT 'INSERT', count(*) FROM jobs WHERE updated_at > 0 -- DELETE") == ("INSERT", 0)


@everywhere
@pytest.mark.parametrize("idempotent", [True, False])
def test_one_statement_that_writes_gives_the_rows_it_returns(url: str, idempotent: bool):
    with connect(url) as database:
        sql = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO NOTHING RETURNING name, value"
        assert database.write(sql, ("a", "b"), idempotent=idempotent) == [("a", "b")]
        assert database.write(sql, ("a", "c"), idempotent=idempotent) == []
        assert database.one("SELECT value FROM meta WHERE name = 'a'") == ("b",)


@everywhere
def test_an_empty_list_matches_nothing(url: str):
    with connect(url) as database:
        assert database.all(f"SELECT name FROM meta WHERE name IN ({marks(0)})") == []
        assert database.all(f"SELECT no FROM jobs WHERE no IN ({marks(0)}) OR total IN ({marks(0)})") == []
        assert database.write(f"DELETE FROM meta WHERE name IN ({marks(0)}) RETURNING name") == []
        assert database.one(f"SELECT name FROM meta WHERE name IN ({marks(2)})", ("x", "database")) == ("database",)


@everywhere
def test_pages_by_key_miss_nothing_and_repeat_nothing_while_rows_come_and_go(url: str):
    with connect(url) as database:
        names = [f"n{number:03}" for number in range(25)]
        database.run(lambda tx: tx.insert("INSERT INTO meta VALUES (?, ?)", [(name, "x") for name in names]))
        sql = "SELECT name, value FROM meta WHERE value = ? AND name > ? ORDER BY name LIMIT ?"
        seen: list[str] = []
        for page in database.pages(sql, ("x",), after=("",), size=10):
            seen += [name for name, _ in page]
            database.write("DELETE FROM meta WHERE name IN ('n000', 'n001', 'n002')")
            database.write("INSERT INTO meta VALUES ('n000a', 'x') ON CONFLICT (name) DO NOTHING")
        assert seen == names
        by_two = (
            "SELECT value, name FROM meta WHERE (value, name) > (?, ?) AND value = 'x' ORDER BY value, name LIMIT ?"
        )
        found = [name for page in database.pages(by_two, after=("x", ""), size=7) for _, name in page]
        assert found == ["n000a", *names[3:]]
        assert list(database.pages(sql, ("nobody",), after=("",))) == []


# ---- a file that is not there any more ------------------------------------------------------------------------------


def remove(path: Path) -> None:
    path.unlink()


def replace_by_another(path: Path) -> None:
    connect(sqlite_url(path.with_name("other.db"))).close()
    path.with_name("other.db").replace(path)


def replace_by_a_copy(path: Path) -> None:
    shutil.copy(path, path.with_name("copy.db"))
    path.with_name("copy.db").replace(path)


def move_away(path: Path) -> None:
    path.rename(path.with_name("elsewhere.db"))


def remove_everything(path: Path) -> None:
    for name in path.parent.glob(f"{path.name}*"):
        name.unlink()


def remove_the_log(path: Path) -> None:
    Path(f"{path}-wal").unlink()


@pytest.mark.parametrize("accident", [remove, replace_by_another, replace_by_a_copy, move_away, remove_everything])
def test_a_commit_into_a_file_that_lost_its_name_is_an_error(tmp_path: Path, accident: Callable[[Path], None]):
    path = tmp_path / "a.db"
    with connect(sqlite_url(path)) as database:
        database.run(count)
        accident(path)
        with pytest.raises(StorageError, match="while it was in use") as caught:
            database.run(count)
        assert caught.value.exit_code == 1
        with pytest.raises(StorageError, match="while it was in use"):
            database.run(count)


@pytest.mark.parametrize("accident", [remove, replace_by_another, move_away, remove_everything, remove_the_log])
@pytest.mark.parametrize("verb", ["one", "all", "now", "run"])
def test_a_reader_of_an_unlinked_file_gets_an_error(
    tmp_path: Path, accident: Callable[[Path], None], verb: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sqlite, "LOOK_SECONDS", 0.001)
    path = tmp_path / "a.db"
    with connect(sqlite_url(path)) as database:
        for _ in range(3):
            database.run(count)
        accident(path)

        def told() -> bool:
            try:
                VERBS[verb](database)
            except StorageError as error:
                return "while it was in use" in str(error)
            return False

        eventually(told, 10)


def test_a_log_recreated_after_every_process_closed_is_accepted(tmp_path: Path):
    first, second = (connect(sqlite_url(tmp_path / "a.db")) for _ in range(2))
    first.run(count)
    second.run(count)
    first.close()
    second.close()
    with connect(sqlite_url(tmp_path / "a.db")) as again:
        assert again.run(count) == 3
        if (pid := os.fork()) == 0:
            os._exit(0 if again.run(count) == 4 else 1)  # a fork closes what is open; so does the parent after it
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert again.run(count) == 5


def test_a_program_that_changes_its_directory_keeps_its_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with connect("sqlite:///here.db") as database:
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert database.run(count) == 1
    assert sorted(path.name for path in tmp_path.rglob("*.db")) == ["here.db"]
