"""Submitting inside the caller's own transaction: the task exists exactly if they commit."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy
import sqlalchemy.orm
from psycopg.rows import dict_row
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.events import SqlOutbox
from headway.queue.recovery import Sweeper
from headway.queue.task import Status, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.source import DatabaseSource
from headway.queue.worker.supervisor import CurrentHints
from headway.queue.worker.worker import Worker
from headway.testing import eager
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

Open = Callable[[], AbstractContextManager[Any]]


def _sqlalchemy_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


@pytest.fixture(
    params=["psycopg", "psycopg dicts", "session", "sqlalchemy", "sqlite3", "sqlite3 rows", "sqlite session"]
)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if "sqlite" in kind:
        return f"sqlite:///{tmp_path}/queue.db"
    return str(request.getfixturevalue("postgres_url"))


@pytest.fixture
def queue(url: str) -> Iterator[TaskQueue]:
    with TaskQueue(url) as made:
        made.handler("caption", isolation="none")(lambda task, payload: payload)
        assert made.database.one("SELECT count(*) FROM tasks") == (0,)
        yield made


@pytest.fixture
def begin(kind: str, url: str) -> Open:
    """Opens a connection of the caller's, of this kind."""

    @contextmanager
    def opened() -> Iterator[Any]:
        match kind:
            case "psycopg" | "psycopg dicts":
                with psycopg.connect(url) as connection:
                    if kind == "psycopg dicts":
                        connection.row_factory = dict_row  # type: ignore[assignment]
                    yield connection
                    connection.rollback()
            case "sqlite3" | "sqlite3 rows":
                file = sqlite3.connect(url.removeprefix("sqlite:///"))
                if kind == "sqlite3 rows":
                    file.row_factory, file.text_factory = sqlite3.Row, bytes
                yield file
                file.close()
            case "session" | "sqlite session" | "sqlalchemy":
                engine = sqlalchemy.create_engine(_sqlalchemy_url(url))
                made = engine.connect() if kind == "sqlalchemy" else sqlalchemy.orm.Session(engine)
                with made:
                    yield made
                engine.dispose()

    return opened


@pytest.mark.req("S2-52")
def test_a_task_exists_exactly_if_the_caller_commits(queue: TaskQueue, begin: Open):
    with begin() as connection:
        task = queue.submit("caption", {"n": 1}, user_id="anna", connection=connection)
        with pytest.raises(NotFound):
            queue.get(task.id)
        connection.commit()
        assert queue.get(task.id).status is Status.QUEUED
        again = queue.submit("caption", {"n": 2}, user_id="bert", connection=connection)
        connection.rollback()
    with pytest.raises(NotFound):
        queue.get(again.id)
    Worker(queue).run(burst=True)
    assert queue.get(task.id).status is Status.COMPLETED
    events = queue.database.all("SELECT type FROM outbox ORDER BY seq")
    assert events == [("task.queued",), ("task.running",), ("task.completed",)], "no event of what never was"
    assert queue.database.one("SELECT sum(submitted) FROM task_minutes") == (1,)


def test_the_rules_hold_and_a_refusal_leaves_the_callers_transaction_usable(queue: TaskQueue, begin: Open):
    queue.submit("caption", {"n": 1}, user_id="anna", id="first")
    with begin() as connection:
        assert queue.submit("caption", {"n": 1}, user_id="anna", id="first", connection=connection).id == "first"
        for content, user in (({"n": 2}, "anna"), ({"n": 1}, "zed"), ({"n": 1}, None)):
            with pytest.raises(TaskConflict):
                queue.submit("caption", content, user_id=user, id="first", connection=connection)
        with pytest.raises(UserBusy):
            queue.submit("caption", user_id="anna", connection=connection)
        both = queue.submit_many([{"kind": "caption"}, {"kind": "caption", "user_id": "cora"}], connection=connection)
        with pytest.raises(UserBusy):
            queue.submit("caption", user_id="cora", connection=connection)
        connection.commit()
    assert {task.id for task in queue.list()} == {"first", *(task.id for task in both)}


def test_the_callers_connection_is_as_it_was(queue: TaskQueue, begin: Open, kind: str):
    def ask(connection: Any, sql: str) -> Any:
        return (connection.exec_driver_sql if kind == "sqlalchemy" else connection.execute)(
            sqlalchemy.text(sql) if "session" in kind else sql
        ).fetchone()

    sql = "PRAGMA database_list" if "sqlite" in kind else "SHOW search_path"
    with begin() as connection:
        before = ask(connection, sql)
        queue.submit("caption", connection=connection)
        assert ask(connection, sql) == before
        with pytest.raises(UserBusy):
            queue.submit_many([{"kind": "caption", "user_id": "anna"}] * 2, connection=connection)
        assert ask(connection, sql) == before
        assert type(ask(connection, sql)) is type(before)


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
def test_workers_hear_of_it_when_it_is_committed_and_others_do_not_wait_for_it(queue: TaskQueue, begin: Open):
    source, never = DatabaseSource(queue), threading.Event()
    source.wait(0.1, never)  # it listens from now on
    with begin() as connection:
        task = queue.submit("caption", {"n": 1}, user_id="anna", connection=connection)
        other = queue.submit("caption", {"n": 2}, user_id="bert")  # while the other transaction is open
        Worker(queue).run(burst=True)
        assert queue.get(other.id).status is Status.COMPLETED
        source.wait(60, never)  # that one's
        began = time.monotonic()
        committing = threading.Thread(target=connection.commit)
        committing.start()
        source.wait(60, never)
        assert time.monotonic() - began < 50
        committing.join()
    source.close()
    Worker(queue).run(burst=True)
    assert queue.get(task.id).status is Status.COMPLETED


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
def test_rq_is_told_by_the_sweeper_once_it_is_committed(url: str, begin: Open, redis_server: RedisServer):
    with TaskQueue(url, redis=redis_server.url(0)) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        sweeper = Sweeper(queue, hints=CurrentHints(queue))
        with begin() as connection:
            task = queue.submit("caption", {"n": 1}, connection=connection)
            sweeper.tick()
            assert redis_server.client().lrange("rq:queue:headway:normal", 0, -1) == []
            connection.commit()
        sweeper.tick()
        [found] = redis_server.client().lrange("rq:queue:headway:normal", 0, -1)
        assert (found.decode() if isinstance(found, bytes) else found) == task.id


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
def test_of_two_transactions_of_one_user_the_second_waits_and_is_refused(queue: TaskQueue, begin: Open):
    outcome: list[str] = []

    def second() -> None:
        with begin() as other:
            try:
                queue.submit("caption", {"n": 2}, user_id="anna", connection=other)
                outcome.append("accepted")
            except UserBusy:
                outcome.append("busy")

    with begin() as connection:
        queue.submit("caption", {"n": 1}, user_id="anna", connection=connection)
        waiting = threading.Thread(target=second)
        waiting.start()
        waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        eventually(lambda: (queue.database.one(waits) or (0,))[0])
        connection.commit()
        waiting.join()
    assert outcome == ["busy"]


# ---- connections that will not do ------------------------------------------------------------------------------------


def test_a_connection_to_another_database_is_refused(queue: TaskQueue, kind: str, tmp_path: Path, postgres_url: str):
    other = f"sqlite:///{tmp_path}/other.db"
    with TaskQueue(other) as another:
        assert another.database.name
        with (
            sqlite3.connect(f"{tmp_path}/other.db") as connection,
            pytest.raises(InvalidInput, match="another database"),
        ):
            queue.submit("caption", connection=connection)
    with sqlite3.connect(":memory:") as memory, pytest.raises(InvalidInput, match="another database"):
        queue.submit("caption", connection=memory)
    elsewhere = psycopg.conninfo.make_conninfo(postgres_url, dbname="postgres")
    with psycopg.connect(elsewhere) as connection, pytest.raises(InvalidInput, match="another database"):
        queue.submit("caption", connection=connection)
    assert queue.list() == []


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
def test_a_postgresql_connection_that_commits_by_itself_or_has_failed_is_refused(queue: TaskQueue, url: str):
    with psycopg.connect(url, autocommit=True) as connection:
        with pytest.raises(InvalidInput, match="commits each statement by itself"):
            queue.submit("caption", connection=connection)
        with connection.transaction():
            task = queue.submit("caption", connection=connection)
        assert queue.get(task.id).status is Status.QUEUED
        with connection.transaction() as inner:
            undone = queue.submit("caption", connection=connection)
            raise psycopg.Rollback(inner)
    with pytest.raises(NotFound):
        queue.get(undone.id)
    with psycopg.connect(url) as connection:
        with pytest.raises(psycopg.Error):
            connection.execute("SELECT nonsense")
        with pytest.raises(InvalidInput, match="already failed"):
            queue.submit("caption", connection=connection)
    with pytest.raises(InvalidInput, match="closed"):
        queue.submit("caption", connection=connection)
    engine = sqlalchemy.create_engine(_sqlalchemy_url(url), isolation_level="AUTOCOMMIT")
    with engine.connect() as alone, pytest.raises(InvalidInput, match="commits each statement by itself"):
        queue.submit("caption", connection=alone)
    engine.dispose()


@pytest.mark.parametrize("kind", ["sqlite3"], indirect=True)
def test_a_sqlite_connection_that_commits_by_itself_is_refused_unless_it_has_begun(queue: TaskQueue, url: str):
    connection = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    with pytest.raises(InvalidInput, match="commits each statement by itself"):
        queue.submit("caption", connection=connection)
    connection.execute("BEGIN")
    task = queue.submit("caption", connection=connection)
    connection.execute("COMMIT")
    assert queue.get(task.id).status is Status.QUEUED
    connection.close()


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
@pytest.mark.parametrize("given", [object(), "postgresql://x", 5, sqlalchemy.create_engine("sqlite://")])
def test_what_is_no_connection_is_refused(queue: TaskQueue, given: object):
    with pytest.raises(InvalidInput, match="cannot be put into the transaction"):
        queue.submit("caption", connection=given)


@pytest.mark.parametrize("kind", ["psycopg"], indirect=True)
def test_an_eager_queue_runs_it_at_once(queue: TaskQueue, begin: Open):
    with begin() as connection, eager(queue):
        task = queue.submit("caption", 1, connection=connection)
        assert queue.get(task.id).status is Status.COMPLETED


def test_nobody_waits_for_a_new_sink_that_waits_for_a_callers_transaction(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit("caption")
        with psycopg.connect(postgres_with_tables) as connection, ThreadPoolExecutor(1) as threads:
            queue.submit("caption", connection=connection)
            subscribed = threads.submit(SqlOutbox(queue.database).subscribe, "audit")
            eventually(lambda: queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            queue.database.retry = RetryPolicy(retries=0, base=0.1, cap=0.1, jitter=0.0)
            began = time.monotonic()
            queue.submit("caption")
            assert time.monotonic() - began < 10, "a statement that waited for the caller would take 20 s and fail"
            connection.rollback()
            with suppress(HeadwayError):
                subscribed.result(60)


def test_a_connection_in_pipeline_mode_is_refused_with_what_to_do(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, psycopg.connect(postgres_with_tables) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        with connection.pipeline():
            connection.execute("CREATE TABLE mine (n integer)")
            with pytest.raises(InvalidInput, match="pipeline"):
                queue.submit("caption", connection=connection)
        assert queue.submit("caption", connection=connection).status is Status.QUEUED


def test_a_callers_temporary_table_of_the_same_name_is_not_taken_for_ours(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, psycopg.connect(postgres_with_tables) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        connection.execute("CREATE TEMPORARY TABLE tasks (id text)")
        connection.execute("CREATE TEMPORARY TABLE outbox (id text)")
        task = queue.submit("caption", connection=connection)
        connection.commit()
        assert queue.get(task.id).status is Status.QUEUED


def test_a_task_may_be_part_of_a_transaction_in_two_phases(postgres_factory: Callable[..., PostgresServer]):
    server = postgres_factory(max_prepared_transactions="5")
    url = server.url(server.create_database(with_tables=True))
    with TaskQueue(url) as queue, psycopg.connect(url) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        connection.tpc_begin(connection.xid(1, "order", "tasks"))
        first = queue.submit("caption", connection=connection)
        connection.tpc_prepare()
        connection.tpc_commit()
        assert queue.get(first.id).status is Status.QUEUED
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with Session(engine, twophase=True) as session:
            session.execute(text("SELECT 1"))
            second = queue.submit("caption", connection=session)
            session.commit()
        engine.dispose()
        assert queue.get(second.id).status is Status.QUEUED
