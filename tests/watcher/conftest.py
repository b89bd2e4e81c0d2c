from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from headway.watcher import watcher
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.watcher.scene import Scene


@pytest.fixture
def scene(redis_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    """A Redis that announces changes of sorted sets, nobody watching yet."""
    assert watcher.WAIT_S <= 0.5, "a watcher that is told to stop does so within half a second"
    monkeypatch.setattr(watcher, "WAIT_S", 0.02)  # every test stops one
    client = redis_server.client()
    client.config_set("notify-keyspace-events", "Kz")
    client.config_resetstat()
    scene = Scene(redis_server, tmp_path)
    yield scene
    scene.close()
    if redis_server.running:
        redis_server.sigcont()
        client.acl_deluser("operator")


@pytest.fixture(scope="session")
def _database_of_watchers() -> list[str]:
    """The name of the PostgreSQL database that the tests of this process use one after another."""
    return []


@pytest.fixture
def postgres_url(postgres_server: PostgresServer, _database_of_watchers: list[str]) -> str:
    """A database that remembers nothing. Making one, and our tables in it, takes much longer than emptying them."""
    if _database_of_watchers:
        with psycopg.connect(postgres_server.url(_database_of_watchers[0]), autocommit=True) as connection:
            connection.execute("DELETE FROM headway.watched")
            connection.execute("DELETE FROM headway.followed")
            connection.execute("DELETE FROM headway.watchers")
    else:
        _database_of_watchers.append(postgres_server.create_database())
    return postgres_server.url(_database_of_watchers[0])
