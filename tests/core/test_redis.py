"""The door to Redis: separate clients, nothing repeated silently, unfit servers refused."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

import pytest
import redis

from headway import _redis
from headway._redis.connections import packed
from headway.errors import InvalidInput, Refused, StorageError, StoreFull, Unavailable
from tests.finishline.lines import at_line
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


NO_ADDRESSES: list[Any] = [
    "http://h/1", "1", "", "redis:/h/1", "REDIS", None, 7, b"redis://h/1",
    "redis://h/one", "redis://h/1?db=x", "redis://h/-1", "redis://h/1/2", "redis://h/1?db=",
    "redis://h:port/1", "redis://h:99999/1", "redis://h:0/1", "redis://[::1/1", "redis://h /1", "redis://h\n/1",
    "unix://", "unix://?db=1", "redis://h/9999999999",
]  # fmt: skip


@pytest.mark.parametrize("url", NO_ADDRESSES, ids=repr)
def test_an_invalid_redis_address_is_one_clear_error(url: Any):
    for connect in (_redis.connect, _redis.connect_async):
        with pytest.raises(InvalidInput) as refusal:
            connect(url, role="state")
        assert refusal.value.hint


OVERRIDES = [
    "decode_responses=False", "protocol=3", "retry_on_timeout=True", "retry_on_error=x", "socket_timeout=0.001",
    "socket_connect_timeout=9", "socket_keepalive=no", "health_check_interval=1", "max_connections=1", "encoding=latin-1",
    "client_name=x", "connection_class=x", "redis_connect_func=x", "timeout=1", "cache=x", "legacy_responses=1",
]  # fmt: skip


@pytest.mark.parametrize("option", OVERRIDES)
def test_an_option_in_the_address_that_would_override_ours_is_refused(option: str):
    with pytest.raises(InvalidInput, match=option.partition("=")[0]):
        _redis.connect(f"redis://h/1?{option}", role="state")
    with pytest.raises(InvalidInput, match="decides itself"):
        _redis.connect_async(f"redis://h/1?db=1&{option}", role="state")


def test_an_address_may_say_how_to_encrypt():
    client = _redis.connect("rediss://h/1?ssl_cert_reqs=none&ssl_check_hostname=false", role="state")
    options = client.connection_pool.connection_kwargs
    assert (options["ssl_cert_reqs"], options["ssl_check_hostname"], options["db"]) == ("none", False, 1)
    with pytest.raises(InvalidInput, match="invalid value"):
        _redis.connect("rediss://h/1?ssl_min_version=old", role="state")


PASSWORDS = ["hun#ter22", "hun/ter22", "hun?ter22", "hun@ter22", "hun%23ter22", "hun:ter22", "hun ter22", "hun\\ter22"]


@pytest.mark.parametrize("password", PASSWORDS)
def test_no_part_of_a_password_is_ever_shown(password: str, caplog: pytest.LogCaptureFixture):
    said = []
    for url in (
        f"redis://:{password}@127.0.0.1:1/1",
        f"redis://u:{password}@127.0.0.1:1/0",
        f"redis://{password}@h:x/1",
    ):
        said += [_redis.shown_address(url), str(_redis.translate(redis.exceptions.ConnectionError("refused"), url))]
        try:
            _redis.connect(url, role="state").ping()
        except InvalidInput as error:
            said += [str(error), error.hint, str(error.__cause__ and "")]
        except redis.exceptions.RedisError as error:
            said.append(str(_redis.translate(error, url)))
    for text in [*said, *(str(record.__dict__) for record in caplog.records)]:
        assert "hun" not in text
        assert "ter22" not in text


def test_a_password_with_odd_characters_works_when_it_is_quoted(redis_factory: Callable[..., RedisServer]):
    server = redis_factory()
    server.client().config_set("requirepass", "a#b/c@d?e:f")
    client = _redis.connect(f"redis://:{quote('a#b/c@d?e:f', safe='')}@127.0.0.1:{server.port}/1", role="state")
    assert client.ping()
    client.close()


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


def test_missing_persistence_is_logged_unless_the_data_is_in_sql(
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


def test_a_command_cut_short_between_its_request_and_its_reply_leaves_no_reply_behind(redis_server: RedisServer):
    client = _redis.connect(redis_server.url(1), role="state", max_connections=1)
    client.set("a", "first")
    client.set("b", "second")
    for _ in range(3):
        connection = _redis.borrow(client)
        connection.send_command("GET", "a")  # and whoever sent it is gone
        client.connection_pool.release(connection)
        assert client.get("b") == "second"
    abandoned = _redis.borrow(client)
    abandoned.send_command("GET", "a")
    with pytest.raises(redis.exceptions.ConnectionError, match="Too many"):
        client.get("b")
    del connection, abandoned  # nobody holds it any more: it is closed, and its place is free
    gc.collect()
    assert client.get("b") == "second"


def test_a_connection_interrupted_in_its_handshake_is_not_used(redis_server: RedisServer):
    """Else what is meant for database 1 would be written to database 0."""
    client = _redis.connect(redis_server.url(1), role="state", max_connections=1)
    for number in range(200):
        with suppress(KeyboardInterrupt), at_line(number, _interrupt, "_redis") as steps:
            client.set("k", number)
        client.set("k", number)
        client.connection_pool.disconnect()
        if not steps.reached:
            break
    assert number > 20
    assert redis_server.client(0).keys() == []
    assert redis_server.client(1).get("k") == str(number)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_invalid_utf_8_affects_its_own_value_only(redis_server: RedisServer):
    raw = redis.Redis(port=redis_server.port, db=1)
    raw.hset("h", mapping={"good": "1", "bad": b"\xff\xfe"})
    client = _redis.connect(redis_server.url(1), role="state")
    assert client.hgetall("h") == {"good": "1", "bad": "\\xff\\xfe"}


def test_unsendable_arguments_are_reported_and_subclasses_sent_by_value(redis_server: RedisServer):
    class Color(str, Enum):  # noqa: UP042  # as older programs write it
        RED = "red"

    client = _redis.connect(redis_server.url(1), role="state")
    echo = _redis.Script("echo", "return ARGV")
    assert echo(client, [], [Color.RED, HTTPStatus.OK, 1.5, b"b"]) == ["red", "200", "1.5", "b"]
    for bad in (None, True, object()):
        with pytest.raises(redis.exceptions.DataError, match="cannot be sent"):
            echo(client, [], [bad])  # type: ignore[list-item]  # on purpose
    assert echo(client, [], ["next"]) == ["next"]


def test_without_hiredis_commands_are_packed_the_same():
    code = """if True:
        import sys
        sys.modules["hiredis"] = None
        from headway._redis.connections import packed
        sys.stdout.buffer.write(packed("SET", "k", 5, b"\\x00\\r\\n", "\\u00e9", 1.25))
    """
    slow = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert slow == packed("SET", "k", 5, b"\x00\r\n", "é", 1.25)


def test_a_late_reply_is_never_read_by_the_next_call(redis_server: RedisServer):
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
