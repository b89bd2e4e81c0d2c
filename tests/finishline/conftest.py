"""A finish line of each kind on this worker's Redis, closed when the test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest

from headway.finishline import FinishLine
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer

#: The ways a finish line keeps its counts. `KINDS` name (database, journal).
KINDS = {
    "redis": (None, False),
    "sqlite": ("sqlite", False),
    "sqlite-journal": ("sqlite", True),
    "postgres": ("postgres", False),
    "postgres-journal": ("postgres", True),
}


@pytest.fixture(scope="session")
def _database_of_projects() -> list[str]:
    """The name of the PostgreSQL database that the tests of this process use one after another."""
    return []


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, _database_of_projects: list[str]) -> str:
    """A database without projects. Making one, and our tables in it, takes much longer than emptying them."""
    if _database_of_projects:
        with psycopg.connect(postgres_server.url(_database_of_projects[0]), autocommit=True) as connection:
            connection.execute("SET lock_timeout = '20s'")
            for table in (
                "project_deliveries",
                "project_counts",
                "projects",
                "deliveries",
                "outbox",
                "sinks",
                "leases",
            ):
                connection.execute(f"DELETE FROM headway.{table}".encode())
    else:
        _database_of_projects.append(postgres_server.create_database())
    return postgres_server.url(_database_of_projects[0])


class OpenLine(Protocol):
    def __call__(self, kind: str = ..., url: str | None = ..., **options: Any) -> FinishLine: ...


@pytest.fixture
def open_line(redis_server: RedisServer, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenLine]:
    """`open_line("sqlite-journal", checkpointer=True)`: lines of one kind share their database. The checkpointer is off."""
    lines: list[FinishLine] = []

    def start(kind: str = "redis", url: str | None = None, **options: Any) -> FinishLine:
        engine, journal = KINDS[kind]
        database = {None: None, "sqlite": f"sqlite:///{tmp_path}/projects.db"}.get(engine)
        if engine == "postgres":
            database = request.getfixturevalue("postgres_with_tables")
        options.setdefault("checkpointer", False)
        lines.append(FinishLine(url or redis_server.url(1), database, journal, **options))
        return lines[-1]

    yield start
    for line in lines:
        line.close(1.0)


def events(server: RedisServer) -> list[dict[str, str]]:
    """What waits in the outbox stream."""
    entries: Any = server.client(1).xrange("smap:events")
    return [fields for _, fields in entries]


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/projects.db"


@pytest.fixture
def each_thread() -> Callable[[Callable[[int], object], int], list[Any]]:
    """`each_thread(work, 8)`: what `work(0)`, `work(1)`, … returned, all started together."""
    import threading

    def run(work: Callable[[int], object], count: int) -> list[Any]:
        results: list[Any] = [None] * count
        gate = threading.Barrier(count)

        def body(number: int) -> None:
            gate.wait()
            results[number] = work(number)

        threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    return run
