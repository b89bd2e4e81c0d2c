"""The door to Redis: separate clients, nothing repeated silently, unfit servers refused."""

from __future__ import annotations

import logging
import threading

import pytest
import redis

from headway import _redis
from headway.errors import InvalidInput, Refused, StorageError, StoreFull, Unavailable
from tests.services.redis import RedisServer


def named(server: RedisServer, name: str) -> list[dict[str, str]]:
    return [client for client in server.client().client_list() if client["name"] == name]


@pytest.mark.req("S0-01", "S0-02", "S0-03")
def test_state_and_cache_have_clients_pools_and_databases_of_their_own(redis_server: RedisServer):
    address = f"redis://127.0.0.1:{redis_server.port}"
    state = _redis.connect(address, role="state")
    cache = _redis.connect(address, role="cache")
    assert state.connection_pool is not cache.connection_pool
    state.set("a", 1)
    cache.set("b", 1)
    assert {client["db"] for client in named(redis_server, "headway-state")} == {"1"}
    assert {client["db"] for client in named(redis_server, "headway-cache")} == {"0"}
    assert redis_server.client(1).keys() == ["a"]
    assert redis_server.client(0).keys() == ["b"]
    state.close()
    cache.close()


@pytest.mark.req("S0-01")
@pytest.mark.parametrize("url", ["redis://h/0", "redis://h:1/?db=0", "unix:///s?db=0"])
def test_state_is_refused_a_database_that_is_the_caches(url: str):
    with pytest.raises(InvalidInput, match="database 0"):
        _redis.connect(url, role="state")


@pytest.mark.parametrize("url", ["http://h/1", "redis://h/one", "redis://h/1?db=x", "1"])
def test_what_is_no_redis_address_is_said_to_be_none(url: str):
    with pytest.raises(InvalidInput):
        _redis.connect(url, role="state")


def test_the_address_decides_the_database_and_the_role_when_it_says_nothing():
    assert _redis.database_of("redis://h", "state") == 1
    assert _redis.database_of("redis://h", "queue") == 0
    assert _redis.database_of("redis://h/5", "state") == 5
    assert _redis.database_of("unix:///path/socket", "state") == 1
    assert _redis.database_of("redis://h/1?db=7", "queue") == 7


def test_every_timeout_is_set_and_the_client_repeats_nothing():
    options = _redis.connect("redis://h", role="state").connection_pool.connection_kwargs
    assert options["socket_timeout"] == options["socket_connect_timeout"] == _redis.TIMEOUT
    retry = options["retry"]
    assert retry._retries == 0
    assert isinstance(retry._backoff, redis.backoff.NoBackoff)
    assert options["retry_on_timeout"] is False


@pytest.mark.req("S0-04")
@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru"])
def test_a_server_that_evicts_is_refused_for_state(redis_server: RedisServer, policy: str):
    admin = redis_server.client()
    client = _redis.connect(redis_server.url(1), role="state")
    admin.config_set("maxmemory-policy", policy)
    try:
        assert not _redis.preflight(client, role="state", where="here").evicts  # no maxmemory: nothing is evicted
        admin.config_set("maxmemory", "100mb")
        with pytest.raises(Refused, match=policy) as refusal:
            _redis.preflight(client, role="state", where="here")
        assert "noeviction" in refusal.value.hint
        assert _redis.preflight(client, role="cache", where="here").evicts  # a cache may
    finally:
        admin.config_set("maxmemory", "0")
        admin.config_set("maxmemory-policy", "noeviction")


@pytest.mark.req("S0-04")
def test_eviction_can_be_allowed_and_is_then_called_critical(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    admin = redis_server.client()
    admin.config_set("maxmemory-policy", "allkeys-lru")
    admin.config_set("maxmemory", "100mb")
    try:
        client = _redis.connect(redis_server.url(1), role="state")
        _redis.preflight(client, role="state", where="here", allow_eviction=True)
    finally:
        admin.config_set("maxmemory", "0")
        admin.config_set("maxmemory-policy", "noeviction")
    assert [r.levelno for r in caplog.records if "evicting" in r.message] == [logging.CRITICAL]


def test_missing_persistence_is_said_unless_the_truth_is_elsewhere(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    client = _redis.connect(redis_server.url(1), role="state")
    _redis.preflight(client, role="state", where="here", durable=True)
    assert "appendonly" not in caplog.text
    _redis.preflight(client, role="state", where="redis://:s3cret@here")
    assert "appendonly is off" in caplog.text
    assert "s3cret" not in "".join(str(record.__dict__) for record in caplog.records)


def test_errors_are_translated_without_the_password():
    where = "redis://:hunter22@h/1"
    away = _redis.translate(redis.exceptions.ConnectionError("refused"), where)
    assert isinstance(away, Unavailable)
    assert "hunter22" not in str(away)
    assert isinstance(_redis.translate(redis.exceptions.TimeoutError(), where), Unavailable)
    wrong = redis.exceptions.AuthenticationError("WRONGPASS")
    assert isinstance(_redis.translate(wrong, where), Unavailable)
    assert not _redis.is_transient(wrong)
    assert isinstance(_redis.translate(redis.exceptions.OutOfMemoryError("OOM"), where), StoreFull)
    assert type(_redis.translate(redis.exceptions.ResponseError("WRONGTYPE"), where)) is StorageError
    inside = "Error running script (call to f_1): @user_script:12: -%s command not allowed"
    assert isinstance(_redis.translate(redis.exceptions.ResponseError(inside % "OOM"), where), StoreFull)
    assert _redis.is_transient(redis.exceptions.ResponseError(inside % "READONLY"))


def test_a_script_is_taught_again_to_a_server_that_forgot_it(redis_server: RedisServer):
    client = _redis.connect(redis_server.url(1), role="state")
    script = _redis.Script("probe", "return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert script(client, ["n"], [2]) == 2
    client.script_flush()
    assert script(client, ["n"], [2]) == 4
    assert client.script_exists(script.sha) == [True]


def test_a_script_error_leaves_the_connection_in_step(redis_server: RedisServer):
    client = _redis.connect(redis_server.url(1), role="state", max_connections=1)
    broken = _redis.Script("broken", "return redis.call('INCR', KEYS[1])")
    client.set("text", "x")
    with pytest.raises(redis.exceptions.ResponseError):
        broken(client, ["text"], [])
    assert client.get("text") == "x"


def test_a_reply_that_came_too_late_is_never_read_by_the_next_call(redis_server: RedisServer):
    client = _redis.connect(redis_server.url(1), role="state", timeout=0.2, max_connections=1)
    echo = _redis.Script("echo", "return ARGV[1]")
    assert echo(client, [], ["warm"]) == "warm"
    redis_server.sigstop()
    with pytest.raises(redis.exceptions.TimeoutError):
        echo(client, [], ["late"])
    redis_server.sigcont()
    assert echo(client, [], ["next"]) == "next"


def test_scripts_run_from_many_threads_each_get_their_own_answer(redis_server: RedisServer):
    client = _redis.connect(redis_server.url(1), role="state")
    echo = _redis.Script("echo", "return ARGV[1]")
    wrong: list[str] = []

    def ask(name: str) -> None:
        for number in range(100):
            wrong.extend(answer for answer in [echo(client, [], [f"{name}.{number}"])] if answer != f"{name}.{number}")

    threads = [threading.Thread(target=ask, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
