"""Database connections that an application opened before its tasks are forked."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
import sqlalchemy.orm
from sqlalchemy.ext.asyncio import create_async_engine

from headway.core.lifecycle import Shutdown
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker

Query = Callable[[str], Any]


def application_url(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1)


@contextmanager
def pooled(url: str, isolation: Any) -> Iterator[tuple[Query, Callable[[], None]]]:
    """An engine whose pool holds one open connection."""
    engine = sqlalchemy.create_engine(application_url(url), isolation_level=isolation, pool_size=1, max_overflow=0)

    def query(text: str) -> Any:
        with engine.connect() as connection:
            return connection.execute(sqlalchemy.text(text)).scalar()

    yield query, engine.dispose


@contextmanager
def scoped(url: str, isolation: Any) -> Iterator[tuple[Query, Callable[[], None]]]:
    """A session that keeps its connection checked out, in a transaction, as after a query at import."""
    engine = sqlalchemy.create_engine(application_url(url), isolation_level=isolation)
    session = sqlalchemy.orm.scoped_session(sqlalchemy.orm.sessionmaker(engine))

    def query(text: str) -> Any:
        return session.execute(sqlalchemy.text(text)).scalar()

    def close() -> None:
        session.remove()
        engine.dispose()

    yield query, close


@contextmanager
def asynchronous(url: str, isolation: Any) -> Iterator[tuple[Query, Callable[[], None]]]:
    """An asyncio engine, used by one event loop for each call."""
    import asyncio

    engine = create_async_engine(application_url(url), isolation_level=isolation, pool_size=1, max_overflow=0)

    async def ask(text: str) -> Any:
        async with engine.connect() as connection:
            return (await connection.execute(sqlalchemy.text(text))).scalar()

    yield lambda text: asyncio.run(ask(text)), lambda: asyncio.run(engine.dispose())


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
@pytest.mark.parametrize("isolation", ["AUTOCOMMIT", "READ COMMITTED"])
@pytest.mark.parametrize("opened", [pooled, scoped, asynchronous])
def test_a_task_never_reads_the_reply_to_another_users_task(
    postgres_with_tables: str, opened: Callable[..., Any], isolation: str, frozen: bool
):
    with (
        TaskQueue(postgres_with_tables) as queue,
        opened(postgres_with_tables, isolation) as (query, close),
    ):
        queue.handler("slow", timeout=0.5, retries=0)(lambda task, name: query(f"SELECT '{name}' FROM pg_sleep(1.5)"))
        queue.handler("quick", retries=0)(lambda task, name: query(f"SELECT '{name}'"))
        backend = query("SELECT pg_backend_pid()")  # the application uses its database at import
        if frozen:
            gc.freeze()
        worker = Worker(queue, shutdown=Shutdown())
        anna = queue.submit("slow", "anna", user_id="anna")
        worker.tick()
        assert queue.get(anna.id).status is Status.FAILED
        for n in range(3):
            bert = queue.submit("quick", f"bert {n}", user_id="bert")
            worker.tick()
            assert (queue.get(bert.id).status, queue.result(bert.id)) == (Status.COMPLETED, f"bert {n}")
        # The worker's own connection was neither used nor closed by its children.
        assert query("SELECT pg_backend_pid()") == backend
        gc.unfreeze()
        close()


def test_a_database_in_memory_is_kept(tmp_path: Path):
    engine = sqlalchemy.create_engine("sqlite://")
    with engine.begin() as connection:
        connection.execute(sqlalchemy.text("CREATE TABLE prices AS SELECT 7 AS price"))
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("price")
        def price(task: object, payload: object) -> Any:
            with engine.connect() as connection:
                return connection.execute(sqlalchemy.text("SELECT price FROM prices")).scalar()

        task = queue.submit("price")
        Worker(queue, shutdown=Shutdown()).tick()
        assert queue.result(task.id) == 7


def test_after_fork_runs_in_the_task_process_before_context_and_handler(tmp_path: Path):
    order: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        order.append("context")
        yield

    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.after_fork(lambda: order.append("first"))
        queue.after_fork(lambda: order.append("second"))
        queue.handler("forked")(lambda task, payload: order)
        queue.handler("here", isolation="none")(lambda task, payload: order)
        worker = Worker(queue, shutdown=Shutdown(), context=context)
        forked = queue.submit("forked")
        worker.tick()
        assert queue.result(forked.id) == ["first", "second", "context"]
        assert order == [], "the worker itself did not fork"
        here = queue.submit("here")
        worker.tick()
        assert queue.result(here.id) == ["context"]


def test_an_error_in_after_fork_fails_the_run_and_names_itself(tmp_path: Path):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.after_fork
        def reconnect() -> None:
            raise ConnectionError("the model server is away")

        queue.handler("forked", retries=0)(lambda task, payload: payload)
        task = queue.submit("forked")
        Worker(queue, shutdown=Shutdown()).tick()
        found = queue.get(task.id)
        assert found.status is Status.FAILED
        assert "the model server is away" in str(found.error)


DJANGO = """
import sys
from urllib.parse import urlsplit
from django.conf import settings

url = sys.argv[1]
parts = urlsplit(url)
settings.configure(DATABASES={"default": {
    "ENGINE": "django.db.backends.postgresql", "NAME": parts.path[1:], "USER": parts.username, "HOST": parts.hostname,
    "PORT": parts.port, "OPTIONS": {"pool": True} if sys.argv[2] == "pool" else {},
}})
import django
django.setup()
from django.db import connection

from headway.core.lifecycle import Shutdown
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker

def query(text):
    with connection.cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchone()[0]

queue = TaskQueue(url)
queue.handler("slow", timeout=0.5, retries=0)(lambda task, name: query(f"SELECT '{name}' FROM pg_sleep(1.5)"))
queue.handler("quick", retries=0)(lambda task, name: query(f"SELECT '{name}'"))
backend = query("SELECT pg_backend_pid()")
worker = Worker(queue, shutdown=Shutdown())
queue.submit("slow", "anna", user_id="anna")
worker.tick()
for n in range(3):
    task = queue.submit("quick", f"bert {n}", user_id="bert")
    worker.tick()
    assert queue.result(task.id) == f"bert {n}"
assert query("SELECT pg_backend_pid()") == backend
print("ok")
"""


@pytest.mark.parametrize("mode", ["connection", "pool"])
def test_a_django_connection_is_not_shared_with_tasks(postgres_with_tables: str, tmp_path: Path, mode: str):
    """In a process of its own: Django has one set of settings for each process."""
    pytest.importorskip("django")
    script = tmp_path / "shop.py"
    script.write_text(textwrap.dedent(DJANGO))
    done = subprocess.run(
        [sys.executable, str(script), postgres_with_tables, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == "ok", done.stderr[-3000:]
