"""The servers the tests stand on do what their fixtures say."""

import psycopg
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from tests.services import postgres, redis
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.mark.parametrize("program", redis.installations(), ids=str)
def test_every_redis_found_starts_and_answers(program, service_directory):
    server = RedisServer(service_directory("redis"), program)
    server.start()
    assert server.client().ping()
    server.discard()


@pytest.mark.parametrize("programs", postgres.installations(), ids=str)
def test_every_postgres_found_starts_and_answers(programs, service_directory):
    server = PostgresServer(service_directory("postgres"), programs)
    server.start()
    with psycopg.connect(server.url()) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    server.discard()


def test_redis_forgets_when_killed_and_returns_on_the_same_port(redis_server):
    client = redis_server.client()
    client.set("a", "1")
    assert client.get("a") == "1"
    redis_server.kill9()
    with pytest.raises(RedisConnectionError):
        client.get("a")
    redis_server.start()
    assert client.get("a") is None


@pytest.mark.parametrize("value", ["first", "second"])
def test_redis_is_empty_for_every_test(redis_server, value):
    assert redis_server.client(db=1).set("a", value, nx=True)


def test_a_frozen_redis_accepts_but_does_not_answer_until_it_continues(redis_server):
    redis_server.sigstop()
    client = redis_server.client()
    client.connection_pool.connection_kwargs["socket_timeout"] = 0.05
    with pytest.raises(RedisTimeoutError):
        client.ping()
    redis_server.sigcont()
    assert eventually(redis_server.ready)


def test_a_redis_with_an_append_only_file_survives_a_kill(redis_factory):
    server = redis_factory(appendonly="yes", appendfsync="always", notify_keyspace_events="Kz")
    server.client().set("a", "1")
    server.kill9()
    server.start()
    assert server.client().get("a") == "1"
    assert set(server.client().config_get("notify-keyspace-events")["notify-keyspace-events"]) == set("Kz")


@pytest.mark.parametrize("value", [1, 2])
def test_postgres_gives_every_test_an_empty_database(postgres_url, value):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE only_mine (value int)")
        connection.execute("INSERT INTO only_mine VALUES (%s)", (value,))


@pytest.mark.parametrize("immediate", [False, True])
def test_postgres_keeps_what_was_committed_over_a_restart(postgres_server, postgres_url, immediate):
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS value")
    postgres_server.restart(immediate=immediate)
    with psycopg.connect(postgres_url) as connection:
        assert connection.execute("SELECT value FROM kept").fetchone() == (1,)


def test_a_postgres_of_ones_own_takes_settings(postgres_factory):
    with psycopg.connect(postgres_factory(fsync="on").url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
