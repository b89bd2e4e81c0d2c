"""Redis is away: what is tried again, what fails at once, what is said, and what goes on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from redis.exceptions import RedisError

from headway._sql import postgresql
from headway.core.retry import CircuitBreaker, RetryPolicy
from headway.errors import NotFound, Refused, Unavailable
from headway.finishline import FinishLine, Progress, Status
from headway.finishline.server import StateServer
from tests.finishline.conftest import OpenLine, events
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.services.waiting import eventually

AT_ONCE = RetryPolicy(retries=3, base=0.001, cap=0.001)


def logged(caplog: pytest.LogCaptureFixture, level: int) -> list[dict[str, Any]]:
    return [getattr(record, "fields", {}) for record in caplog.records if record.levelno == level]


@pytest.mark.req("S0-26", "S0-27", "S0-28")
def test_a_count_is_tried_again_after_1_2_and_4_seconds_and_then_its_caller_gets_the_error(
    open_line: OpenLine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    line = open_line()
    line.create("p", total=5)
    redis_server.stop()
    began = time.monotonic()
    with pytest.raises(Unavailable, match="cannot be reached"):
        line.item_done("p", 1)
    assert 7.0 <= time.monotonic() - began < 15.0
    tries = [record for record in caplog.records if "tried again" in record.message]
    assert [record.__dict__["fields"]["seconds"] for record in tries] == [1.0, 2.0, 4.0]
    gaps = [after.created - before.created for before, after in pairwise(tries)]
    assert [1.0 <= gaps[0] < 2.0, 2.0 <= gaps[1] < 4.0] == [True, True]
    for facts in [record.__dict__["fields"] for record in tries] + logged(caplog, logging.ERROR):
        assert facts["operation"] == "item_done"
        assert facts["project_id"] == "p"
    assert len(logged(caplog, logging.ERROR)) == 1


@pytest.mark.req("S0-28")
def test_no_call_succeeds_silently_while_redis_is_away(open_line: OpenLine, redis_server: RedisServer):
    line = open_line(retry=AT_ONCE)
    line.create("p", total=5)
    redis_server.stop()
    calls: list[Callable[[], object]] = [
        lambda: line.create("q"),
        lambda: line.item_done("p", 1),
        lambda: line.item_failed("p"),
        lambda: line.items_done("p", [1, 2]),
        lambda: line.set_total("p", 1),
        lambda: line.set_status("p", "CRAWLING"),
        lambda: line.finish_crawl("p"),
        lambda: line.progress("p"),
        lambda: line.touch("p"),
        lambda: line.delete("p"),
    ]
    for call in calls:
        with pytest.raises(Unavailable):
            call()


def test_a_frozen_server_is_given_up_within_fifteen_seconds_and_counts_once_when_it_thaws(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(timeout=0.3, retry=RetryPolicy(retries=3, base=0.05))
    line.create("p", total=5)
    line.item_done("p", 0)
    redis_server.sigstop()
    with pytest.raises(Unavailable):
        line.item_done("p", 1)
    redis_server.sigcont()
    # The frozen server finds all four tries in its sockets; whichever it applies, the item counts once.
    assert eventually(lambda: line.item_done("p", 1)).done == 2
    assert line.progress("p").done == 2


def test_the_default_timeouts_and_waits_add_up_to_less_than_fifteen_seconds():
    server = StateServer("redis://127.0.0.1:1/1")
    timeout = server.client.connection_pool.connection_kwargs["socket_timeout"]
    assert 4 * timeout + sum(server._policy.delays()) <= 15.0
    server.close()


@pytest.mark.req("S0-29", "S0-32")
def test_during_an_outage_reads_fail_at_once_and_other_calls_of_the_process_go_on(
    open_line: OpenLine, redis_server: RedisServer, redis_factory: Callable[..., RedisServer]
):
    line = open_line(timeout=0.4, retry=RetryPolicy(retries=3, base=0.4))
    line.create("p", total=5)
    elsewhere = open_line(url=redis_factory().url(1))
    elsewhere.create("q", total=100)
    redis_server.sigstop()  # connections open and nothing answers: each try costs its timeout
    failed = threading.Event()

    def count() -> None:
        with pytest.raises(Unavailable):
            line.item_done("p", 1)
        failed.set()

    waiting = threading.Thread(target=count)
    waiting.start()
    eventually(lambda: line._server.away)
    answered = 0
    while not failed.is_set():
        with pytest.raises(Unavailable):
            line.progress("p")
        elsewhere.item_done("q")
        answered += 1
    waiting.join()
    redis_server.sigcont()
    assert answered > 40  # tried each time, it would be a dozen


@pytest.mark.req("S0-30")
def test_an_outage_of_five_seconds_is_one_critical_alert_and_the_next_outage_another(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    alerts: list[str] = []
    now = 0.0

    def alert(message: str) -> None:
        alerts.append(message)
        raise RuntimeError("the pager is broken")

    server = StateServer(redis_server.url(1), alert=alert, clock=lambda: now)
    assert server.probe()
    for outage in (1, 2):
        redis_server.stop()
        for lasted, expected in [(0.0, 0), (4.9, 0), (5.0, 1), (60.0, 1)]:
            began = 1000.0 * outage
            now = began + lasted
            assert not server.probe()
            assert len(alerts) == len(logged(caplog, logging.CRITICAL)) == outage - 1 + expected
        redis_server.start()
        assert server.probe()
    assert "has been unreachable for 5 s" in alerts[0]
    server.close()


def test_an_alert_that_forks_while_the_checkpointer_gives_it_is_heard(
    redis_factory: Callable[..., RedisServer], tmp_path: Path
):
    """Whoever sends mail by a forked process must not wait for the round that waits for him."""
    server = redis_factory()
    children: list[int] = []

    def alert(message: str) -> None:
        child = os.fork()
        if child == 0:
            os._exit(7)
        children.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    line = FinishLine(server.url(1), f"sqlite:///{tmp_path}/p.db", alert=alert, interval=0.05, retry=AT_ONCE)
    line.create("p")
    line._server._breaker = CircuitBreaker(clock=lambda: 10.0 * time.monotonic())  # so that 5 s pass in half of one
    server.stop()
    eventually(lambda: children == [7], timeout=30)
    line.close()


def test_a_connection_that_was_closed_while_it_rested_costs_no_try(
    open_line: OpenLine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    line = open_line()
    line.create("p", total=5)
    line.item_done("p", 1)
    redis_server.client().client_kill_filter(_type="normal", skipme=True)
    time.sleep(0.3)  # it rests: after a quarter of a second it is looked at before it is used
    assert line.item_done("p", 2).done == 2
    assert "tried again" not in caplog.text


def test_a_server_busy_with_a_script_is_retried(open_line: OpenLine, redis_server: RedisServer):
    line = open_line(retry=RetryPolicy(retries=400, base=0.02, cap=0.05))
    line.create("p", total=5)
    admin = redis_server.client()
    admin.config_set("lua-time-limit", 5)
    hog = redis_server.client()
    busy = threading.Thread(target=_run_for_ever, args=(hog,))
    busy.start()
    try:
        eventually(lambda: _is_busy(redis_server))
        threading.Timer(0.3, redis_server.client().script_kill).start()
        assert line.item_done("p", 1).done == 1
    finally:
        busy.join(10)
        admin.config_set("lua-time-limit", 5000)


def _run_for_ever(client: Any) -> None:
    with suppress(RedisError):
        client.eval("while true do end", 0)


def _is_busy(server: RedisServer) -> bool:
    try:
        server.client().get("x")
    except RedisError as error:
        return "BUSY" in str(error)
    return False


@pytest.mark.req("S0-31", "S0-32", "S0-33")
@pytest.mark.parametrize("kind", ["postgres", "postgres-journal", "sqlite"])
def test_a_project_created_during_an_outage_is_in_sql_and_appears_in_redis_when_it_is_back(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind, checkpointer=True, interval=0.2)
    redis_server.stop()
    created = line.create("p", total=3)
    assert created == Progress(Status.INITIALIZING, 3, live=False)
    assert line._records is not None
    row = line._records.find("p")
    assert row is not None
    assert (row.status, row.total) == (Status.INITIALIZING, 3)
    with pytest.raises(Unavailable):  # not NOT_FOUND, and not 0 %
        line.progress("p")
    redis_server.start()
    state = redis_server.client(1)
    # Nobody calls anything: the checkpointer notices.
    eventually(lambda: state.exists("smap:proj:p"), 20)
    assert state.hgetall("smap:proj:p") == {"status": "INITIALIZING", "total": "3", "done": "0", "errors": "0"}
    eventually(lambda: not line._server.away)
    assert line.items_done("p", [1, 2, 3]).completed


@pytest.mark.req("S0-31")
def test_while_sql_is_away_too_nothing_is_acknowledged_that_needs_it(
    redis_server: RedisServer, postgres_factory: Callable[..., PostgresServer], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(postgresql.PostgreSQL, "retry", AT_ONCE)
    server = postgres_factory()
    plain = FinishLine(redis_server.url(1), server.url(), checkpointer=False, retry=AT_ONCE)
    exact = FinishLine(redis_server.url(1), server.url(), journal=True, checkpointer=False, retry=AT_ONCE)
    plain.create("plain", total=2)
    exact.create("exact", total=2)
    server.stop()
    assert plain.item_done("plain", 1).done == 1
    assert plain.item_done("plain", 2).completed  # SQL learns it later
    with pytest.raises(Unavailable):
        plain.set_total("plain", 5)
    with pytest.raises(Unavailable):
        exact.item_done("exact", 1)
    assert exact.progress("exact").done == 0
    redis_server.stop()
    with pytest.raises(Unavailable, match="PostgreSQL"):
        plain.create("neither")
    redis_server.start()
    redis_server.client(1).flushall()
    server.start()
    assert plain.checkpointer is not None
    assert plain._records is not None
    eventually(lambda: plain.checkpointer is not None and plain.checkpointer.tick() > 1.0)
    assert plain._records.find("neither") is None
    assert exact.item_done("exact", 1).done == 1
    plain.close()
    exact.close()


@pytest.mark.req("S0-33")
def test_sql_learns_of_a_completion_it_missed(open_line: OpenLine, tmp_path: Path):
    line, bare = open_line("sqlite"), open_line("redis")
    assert line.checkpointer is not None
    assert line._records is not None
    line.create("p", total=1)
    assert bare.item_failed("p", 1).completed  # by a process that has no database
    row = line._records.find("p")
    assert row is not None
    assert row.completed_at is None
    line.checkpointer.tick()
    row = line._records.find("p")
    assert row is not None
    assert (row.status, row.done, row.errors, row.completed_at is not None) == (Status.DONE, 1, 1, True)


@pytest.mark.req("S0-04")
def test_filling_the_cache_database_loses_no_state(
    redis_factory: Callable[..., RedisServer], open_line: OpenLine, caplog: pytest.LogCaptureFixture
):
    server = redis_factory(maxmemory="4mb", maxmemory_policy="noeviction")
    line = open_line(url=server.url(1))
    for number in range(50):
        line.create(f"p{number}", total=2)
    from redis.exceptions import OutOfMemoryError

    cache = server.client(0)

    def fill() -> None:
        for number in range(100_000):
            cache.set(f"page{number}", "x" * 1000)

    with pytest.raises(OutOfMemoryError):
        fill()
    # The cache is refused; the finish line goes on, and to the end.
    for number in range(50):
        line.item_done(f"p{number}", 1)
        assert line.item_done(f"p{number}", "two").completed
    assert len(events(server)) == 50
    for policy in ("allkeys-lru", "volatile-lru"):
        server.client().config_set("maxmemory-policy", policy)
        with pytest.raises(Refused, match=policy):
            open_line(url=server.url(1)).progress("p0")
    open_line(url=server.url(1), allow_eviction=True).progress("p0")
    assert len(logged(caplog, logging.CRITICAL)) == 1


def test_a_server_that_begins_to_evict_is_noticed_after_the_next_outage(open_line: OpenLine, redis_server: RedisServer):
    line = open_line(retry=AT_ONCE)
    line.create("p")
    admin = redis_server.client()
    admin.config_set("maxmemory", "100mb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    try:
        line._server._failed(ConnectionError("cut"))
        with pytest.raises(Refused):
            line.item_done("p", 1)
    finally:
        admin.config_set("maxmemory-policy", "noeviction")
        admin.config_set("maxmemory", "0")
    assert line.item_done("p", 1).done == 1


def test_a_wrong_password_is_an_error_at_once_and_is_not_shown(redis_factory: Callable[..., RedisServer]):
    server = redis_factory()
    server.client().config_set("requirepass", "right-one")
    with FinishLine(f"redis://:wrong-one@127.0.0.1:{server.port}/1") as line:
        began = time.monotonic()
        with pytest.raises(Unavailable) as refusal:
            line.item_done("p", 1)
    assert time.monotonic() - began < 5.0  # not 7: it is not tried again
    assert "wrong-one" not in str(refusal.value)


def test_a_flapping_network_costs_time_and_nothing_else(
    open_line: OpenLine, redis_server: RedisServer, tcp_proxy: Callable[[int], TcpProxy]
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1", retry=RetryPolicy(retries=500, base=0.01, cap=0.05))
    line.create("p", total=200)
    stop = threading.Event()

    def flap() -> None:
        while not stop.wait(0.03):
            proxy.refuse()
            proxy.cut()
            stop.wait(0.01)
            proxy.pass_through()

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        completed = sum(line.item_done("p", number if number % 3 else None).completed for number in range(200))
    finally:
        stop.set()
        flapping.join()
    assert (line._server.client.hget("smap:proj:p", "done"), completed) == ("200", 1)


def test_a_slow_network_makes_calls_slow_and_nothing_else(
    open_line: OpenLine,
    redis_server: RedisServer,
    tcp_proxy: Callable[[int], TcpProxy],
    caplog: pytest.LogCaptureFixture,
):
    proxy = tcp_proxy(redis_server.port)
    line = open_line(url=f"redis://127.0.0.1:{proxy.port}/1")
    line.create("p", total=3)
    proxy.delay(0.2)
    line.item_done("p", 1)
    proxy.throttle(7_000)  # 56 kbit/s
    assert line.items_done("p", [2, 3]).completed
    assert line.progress("p").done == 3
    assert "tried again" not in caplog.text


def test_counting_where_nothing_was_created_is_not_an_outage(open_line: OpenLine):
    line = open_line(retry=AT_ONCE)
    with pytest.raises(NotFound):
        line.item_done("p", 1)
    assert not line._server.away


def test_a_server_that_is_a_replica_for_a_moment_is_tried_again(
    open_line: OpenLine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    line = open_line(retry=RetryPolicy(retries=100, base=0.02, cap=0.05))
    line.create("p", total=5)
    line.item_done("p", 0)
    admin = redis_server.client()
    admin.replicaof("127.0.0.1", free_port())  # a master that never answers: it keeps its data and refuses writes
    promotion = threading.Timer(0.3, admin.replicaof, ("NO", "ONE"))
    promotion.start()
    try:
        assert line.item_done("p", 1).done == 2
    finally:
        promotion.join()
    assert "read only replica" in str([record.__dict__["fields"] for record in caplog.records])


@pytest.mark.faults
def test_with_the_defaults_a_frozen_server_is_given_up_within_fifteen_seconds(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line()
    line.create("p", total=5)
    line.item_done("p", 0)
    longest = 0.0
    for item in range(1, 4):
        redis_server.sigstop()
        began = time.monotonic()
        with pytest.raises(Unavailable):
            line.item_done("p", item)
        longest = max(longest, time.monotonic() - began)
        redis_server.sigcont()
        assert line.item_done("p", item).done == item + 1
    assert longest <= 15.5
