"""Stores that go away: what a reader sees, what a writer is told, and that nothing is heard twice or missed."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from headway import states
from headway.core.retry import LISTENER, RetryPolicy
from headway.errors import Unavailable
from headway.states import JobGone, LiveStore, Manager, State, Subscription
from headway.telemetry import metrics
from tests.services.postgres import PostgresServer
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.tracing import untraced_environment
from tests.services.waiting import eventually
from tests.states.conftest import NETWORKED, QUICK, Place, live, replayed, sees

PERSISTENT = RetryPolicy(retries=10_000, base=0.005, cap=0.05)


class Line:
    """A store behind a proxy, and the same one reached directly."""

    def __init__(self, place: Place, proxy: TcpProxy, address: Callable[[int], str], monkeypatch: Any) -> None:
        self.place, self.proxy = place, proxy
        self._address, self._monkeypatch = address, monkeypatch

    def open(self, **options: Any) -> LiveStore:
        """Through the proxy."""
        if self.place.kind == "firestore":
            self._monkeypatch.setenv("FIRESTORE_EMULATOR_HOST", f"127.0.0.1:{self.proxy.port}")
            url = self.place.url
        else:
            url = self._address(self.proxy.port)
        store, _ = states.open_store(url, "job", 3, **({"retry": QUICK} | options))
        self.place.opened.append(store)
        return store

    def direct(self) -> LiveStore:
        if self.place.kind == "firestore":
            self._monkeypatch.setenv("FIRESTORE_EMULATOR_HOST", self._address(0))
        return self.place.open()


@pytest.fixture
def line(place: Place, tcp_proxy: Callable[[int], TcpProxy], monkeypatch: pytest.MonkeyPatch) -> Line:
    if place.kind == "firestore":
        import os

        host = os.environ["FIRESTORE_EMULATOR_HOST"]
        return Line(place, tcp_proxy(int(host.split(":")[1])), lambda _: host, monkeypatch)
    parts = urlsplit(place.url)
    assert parts.port

    def address(port: int) -> str:
        return urlunsplit(parts._replace(netloc=parts.netloc.replace(str(parts.port), str(port))))

    return Line(place, tcp_proxy(parts.port), address, monkeypatch)


def cut_off(line: Line) -> None:
    line.proxy.refuse()
    line.proxy.cut()


def drain(subscription: Subscription, key: tuple[int, str], version: int) -> list[int]:
    """The versions of ``key`` a reader hears, up to ``version``."""
    heard: list[int] = []
    while not heard or heard[-1] < version:
        event = subscription.get(60)
        if event.state is not None and event.state.key == key:
            heard.append(event.state.version)
    return heard


@pytest.mark.req("S1-46", "S1-51", "S1-69")
@pytest.mark.stores(NETWORKED)
def test_changes_during_a_disconnection_arrive_once_after_the_reconnect(line: Line):
    far, near = line.open(retry=PERSISTENT), line.direct()
    near.set_state(State("job", 1, "a"))
    subscription = far.subscribe()
    sees(far, 1, "a", 1)
    cut_off(line)
    eventually(lambda: not far.fresh, 60)
    for _ in range(3):
        near.set_state(State("job", 1, "a"))
    line.proxy.pass_through()
    near.set_state(State("job", 1, "b"))
    heard = drain(subscription, (1, "a"), 4)
    assert heard[0] == 1
    assert heard == sorted(set(heard))
    if line.place.kind != "firestore":  # which keeps no log of changes
        assert heard == [1, 2, 3, 4]
    assert sees(far, 1, "b", 1).version == 1
    eventually(lambda: far.fresh, 60)


def disconnect_often(line: Line, times: int) -> None:
    far, near = line.open(retry=PERSISTENT), line.direct()
    watched = far.subscribe()
    others = [Manager("job", 0, 3, far).subscribe(task_id=1), far.subscribe(depth=4)]
    before = metrics.value("headway_states_listener_reconnects", store=line.place.kind)
    heard = [0]
    for number in range(times):
        near.set_state(State("job", 1, "a", number))
        line.proxy.cut()
        last = near.set_state(State("job", 1, "a", number)).version
        heard += drain(watched, (1, "a"), last)  # it is connected again
    assert last == 2 * times
    assert heard == sorted(set(heard)), "no version twice"
    for subscription in others:
        versions = drain(subscription, (1, "a"), last)
        assert versions == sorted(set(versions))
        assert subscription.waiting == 0
    assert far.get_state(1, "a").version == last
    assert metrics.value("headway_states_listener_reconnects", store=line.place.kind) - before >= times / 2


@pytest.mark.req("S1-46", "S1-51", "S1-68")
@pytest.mark.stores(NETWORKED)
def test_disconnects_one_after_another_leave_every_subscriber_at_the_last_version_with_no_duplicate(line: Line):
    disconnect_often(line, {"redis": 40, "postgresql": 10, "firestore": 4}[line.place.kind])


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.stores(NETWORKED)
def test_a_thousand_disconnects_leave_every_subscriber_at_the_last_version_with_no_duplicate(line: Line):
    disconnect_often(line, 1_000)


@pytest.mark.req("S1-45", "S1-47", "S1-48")
@pytest.mark.stores(NETWORKED)
def test_a_permanent_disconnection_backs_off_and_then_ends_every_subscription(
    line: Line, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "headway.states")
    store = line.open(retry=RetryPolicy(retries=5, base=0.05, cap=0.3))
    subscriptions = [store.subscribe(), Manager("job", 0, 3, store).subscribe(tag="a")]
    cut_off(line)
    for subscription in subscriptions:
        with pytest.raises(Unavailable, match=r"gave up") as caught:
            list(subscription)
        assert str(caught.value).startswith("\U0001f534 ")
        assert subscription.closed
    said: list[Any] = [record for record in caplog.records if record.name == "headway.states"]
    waits = [record.fields["seconds"] for record in said if record.levelno == logging.WARNING]
    assert waits == [0.05, 0.1, 0.2, 0.3, 0.3]
    assert all(record.getMessage().startswith("\U0001f7e1 ") for record in said[:-1])
    assert said[-1].levelno == logging.CRITICAL
    assert said[-1].getMessage().startswith("\U0001f534 ")
    assert said[-1].fields["jobID"] == "job"


@pytest.mark.req("S1-45")
def test_the_listeners_own_policy_is_1_s_doubled_at_most_60_s_five_times():
    assert list(LISTENER.delays()) == [1, 2, 4, 8, 16]
    assert (LISTENER.cap, LISTENER.retries) == (60, 5)
    assert [LISTENER.delay(failures) for failures in (6, 7, 8, 100)] == [32, 60, 60, 60]
    import inspect

    assert inspect.signature(states.open_store).parameters["retry"].default is LISTENER


@pytest.mark.req("S1-47", "S1-57")
@pytest.mark.stores(NETWORKED)
def test_after_giving_up_it_never_answers_from_the_stale_cache_and_a_new_subscription_brings_it_back(
    line: Line, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway._sql.postgresql.PostgreSQL.retry", RetryPolicy(retries=1, base=0.01))
    far, near = line.open(retry=RetryPolicy(retries=1, base=0.01)), line.direct()
    near.set_state(State("job", 1, "a", 1))
    sees(far, 1, "a", 1)
    subscription = far.subscribe()
    cut_off(line)
    with pytest.raises(Unavailable):
        list(subscription)
    with pytest.raises(Unavailable):
        far.get_state(1, "a")
    with pytest.raises(Unavailable):
        far.subscribe()
    near.set_state(State("job", 1, "a", 2))
    line.proxy.pass_through()

    def read_through() -> State | None:
        with suppress(Unavailable):  # gRPC rests a moment between two connections
            return far.get_state(1, "a")
        return None

    misses = metrics.value("headway_states_reads", result="miss")
    assert eventually(read_through, 60).status == 2
    assert metrics.value("headway_states_reads", result="miss") > misses, "the store answered, not the cache"
    assert not far.fresh
    with far.subscribe() as again:
        assert [state.status for state in replayed(again)] == [2]
        assert far.fresh
        near.set_state(State("job", 1, "a", 3))
        assert live(again)[0].status == 3


@pytest.mark.req("S1-53", "S1-68")
@pytest.mark.stores(NETWORKED)
def test_a_write_is_tried_again_and_a_lasting_failure_is_an_error_with_the_red_sign(
    line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway._sql.postgresql.PostgreSQL.retry", RetryPolicy(retries=0))
    caplog.set_level(logging.WARNING, "headway.states")
    store = line.open(retry=PERSISTENT)
    store._backend.write_policy = RetryPolicy(retries=2, base=0.05)
    cut_off(line)
    with pytest.raises(Unavailable) as caught:
        store.set_state(State("job", 0, "a", event_id="e-1"))
    assert str(caught.value).startswith("\U0001f534 ")
    retried = [record for record in caplog.records if "is retried" in record.getMessage()]
    assert len(retried) == 2
    errors: list[Any] = [
        record for record in caplog.records if (record.name, record.levelno) == ("headway.states", logging.ERROR)
    ]
    assert errors[0].getMessage() == "\U0001f534 failed to write state"
    assert {name: errors[0].fields[name] for name in ("jobID", "taskID", "tag", "eventID")} == {
        "jobID": "job",
        "taskID": 0,
        "tag": "a",
        "eventID": "e-1",
    }
    assert errors[0].fields["error"]
    store._backend.write_policy = RetryPolicy(retries=50, base=0.05, cap=0.1)
    threading.Timer(0.3, line.proxy.pass_through).start()
    assert store.set_state(State("job", 0, "a", event_id="e-1")).version == 1


@pytest.mark.req("S1-53")
@pytest.mark.stores(("postgresql",))
def test_the_tries_of_the_store_and_those_of_its_database_are_not_multiplied(
    line: Line, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway._sql.postgresql.PostgreSQL.retry", RetryPolicy(retries=3, base=0.001))
    store = line.open()
    cut_off(line)
    with pytest.raises(Unavailable):
        store.set_state(State("job", 0, "a"))
    messages = [record.getMessage() for record in caplog.records]
    assert not any("the write of a state is retried" in message for message in messages)
    assert sum("is retried" in message for message in messages) == 3


@pytest.mark.req("S1-53", "S1-54", "S1-50")
@pytest.mark.stores(("postgresql", "redis"))
def test_a_write_whose_answer_was_lost_is_stored_once(line: Line):
    store = line.open(retry=PERSISTENT)
    store._backend.write_policy = RetryPolicy(retries=20, base=0.001, cap=0.01)
    written = {"redis": b"EVALSHA", "postgresql": b"headway_states_"}[line.place.kind]
    line.proxy.drop_replies(every=4, to=written)
    versions = [store.set_state(State("job", 0, "a", number)).version for number in range(30)]
    assert versions == list(range(1, 31))


@pytest.mark.req("S1-53", "S1-54", "S1-50")
@pytest.mark.stores(("postgresql", "redis"))
def test_a_write_with_a_lost_answer_is_stored_once_despite_another_writer(line: Line):
    far, near = line.open(retry=PERSISTENT), line.direct()
    far._backend.write_policy = RetryPolicy(retries=200, base=0.05, cap=0.05)
    far.set_state(State("job", 0, "a", 1))
    line.proxy.drop_replies(to={"redis": b"EVALSHA", "postgresql": b"headway_states_"}[line.place.kind])
    written: list[State] = []
    writing = threading.Thread(target=lambda: written.append(far.set_state(State("job", 0, "a", 2))))
    writing.start()
    sees(near, 0, "a", 2)  # it is stored, and its writer does not know
    versions = [near.set_state(State("job", 0, "a", number)).version for number in range(3, 40)]
    line.proxy.pass_through()
    writing.join(60)
    assert versions == list(range(3, 40))
    assert (written[0].version, written[0].status) == (2, 2)
    assert near.set_state(State("job", 0, "a", 40)).version == 40


@pytest.mark.stores(NETWORKED)
def test_an_error_or_a_warning_is_tried_again_in_an_outage_like_any_other_state(line: Line):
    store = line.open(retry=PERSISTENT)
    store._backend.write_policy = RetryPolicy(retries=2_000, base=0.01, cap=0.05)
    manager = Manager("job", 0, 3, store)
    manager.set_state("a", status=40)
    other = Manager("job", 1, 3, line.direct())
    other.set_state("a", status=70)
    cut_off(line)
    eventually(lambda: not store.fresh, 60)
    reports: list[State] = []
    late = Manager("job", 1, 3, store)  # of a process that has written nothing yet: it must ask
    threads = [
        threading.Thread(target=lambda: reports.append(manager.set_error(ValueError("broken"), "a"))),
        threading.Thread(target=lambda: reports.append(late.set_warning("slow", "a"))),
    ]
    for thread in threads:
        thread.start()
    line.proxy.pass_through()
    for thread in threads:
        thread.join(60)
    assert {(report.task_id, report.status): (report.payload or {})["last_status"] for report in reports} == {
        (0, -1): 40,
        (1, -2): 70,
    }


@pytest.mark.stores(("redis", "firestore"))
def test_a_store_is_opened_although_its_server_is_away_for_a_moment(line: Line):
    cut_off(line)
    back = threading.Timer(0.3, line.proxy.pass_through)
    back.start()
    assert line.open(retry=PERSISTENT).num_tasks == 3
    back.join()


@pytest.mark.stores(("redis",))
def test_a_wrong_password_is_not_tried_again(redis_factory: Any):
    server = redis_factory()
    with server.client() as client:
        client.config_set("requirepass", "right")
        with pytest.raises(Unavailable, match="refused us"):
            states.open_store(f"redis://:wrong@127.0.0.1:{server.port}/1", "job", 1)
        refused: Any = client.execute_command("ACL", "LOG")
    assert [(entry["reason"], entry["count"]) for entry in refused] == [("auth", 1)]


@pytest.mark.stores(("postgresql",))
def test_a_listener_of_a_hanging_backend_reconnects(place: Place, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("headway.states.store.sql.HEARTBEAT", 0.2)
    monkeypatch.setattr("headway.states.store.postgres.PING_SECONDS", 0.5)
    store = place.open(retry=PERSISTENT)
    subscription = store.subscribe()
    replayed(subscription)
    with psycopg.connect(place.url, autocommit=True) as connection:
        (pid,) = connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE query LIKE 'LISTEN%' OR query = 'SELECT 1' LIMIT 1"
        ).fetchone()  # type: ignore[misc]  # there is one
        before = metrics.value("headway_states_listener_reconnects", store="postgresql")
        os.kill(pid, signal.SIGSTOP)
        try:
            eventually(lambda: metrics.value("headway_states_listener_reconnects", store="postgresql") > before, 30)
            place.open().set_state(State("job", 1, "a", 5))
            assert [state.status for state in live(subscription)] == [5]
        finally:
            os.kill(pid, signal.SIGCONT)


@pytest.mark.stores(("postgresql",))
def test_a_subscriber_is_woken_by_the_notification_and_not_by_the_heartbeat(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.states.store.sql.HEARTBEAT", 600.0)
    store, writer = place.open(), place.open()
    with store.subscribe() as subscription:
        replayed(subscription)
        for payload in (None, {"text": "x" * 100_000}, {"text": "small"}):  # the second is too large to be carried
            written = writer.set_state(State("job", 1, "a", 5, payload=payload))
            assert live(subscription) == [written]
        states.delete_job(place.url, "job")
        with pytest.raises(JobGone):
            subscription.get(60)


@pytest.mark.stores(("postgresql",))
def test_a_change_that_came_without_a_notification_is_found_with_the_next(
    place: Place, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.states.store.sql.HEARTBEAT", 600.0)
    store, writer = place.open(), place.open()
    writer.set_state(State("job", 1, "a", 1))
    with store.subscribe() as subscription:
        replayed(subscription)
        with psycopg.connect(
            place.url, options="-c search_path=headway"
        ) as connection:  # as a program that only copies
            connection.execute("UPDATE state_jobs SET change = 2")
            connection.execute("UPDATE states SET version = 2, status = 2, event_id = 'e2'")
            connection.execute(
                "INSERT INTO state_log SELECT job, 2, task_id, tag, 2, message, timestamp, 2, 'e2', payload, schema_version "
                "FROM state_log"
            )
        writer.set_state(State("job", 2, "b", 3))
        assert [(state.key, state.status) for state in live(subscription, 2)] == [((1, "a"), 2), ((2, "b"), 3)]


@pytest.mark.stores(("postgresql", "redis", "firestore"))
def test_a_process_with_thousands_of_open_descriptors_can_listen(place: Place):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 3_000:
        pytest.skip(f"this machine allows {most} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 3_000), most))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1_500)]
    try:
        store = place.open()
        with store.subscribe() as subscription:
            replayed(subscription)
            store.set_state(State("job", 0, "a", 5))
            assert [state.status for state in live(subscription)] == [5]
        store.close()
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))


@pytest.mark.parametrize("place", ["sqlite", "postgresql"], indirect=True)
def test_continuing_a_long_log_reads_the_new_entries_only(place: Place):
    """Also before the database has statistics: there is one index, so it cannot choose another."""
    store = place.open()
    store.set_state(State("job", 0, "a", 1))
    database = store._backend._database  # type: ignore[attr-defined]
    columns = "job, seq, task_id, tag, status, message, timestamp, version, event_id, payload, schema_version"

    def fill(tx: Any) -> None:
        tx.execute(
            "WITH RECURSIVE numbers (n) AS (SELECT 2 UNION ALL SELECT n + 1 FROM numbers WHERE n < 20000) "
            f"INSERT INTO state_log ({columns}) SELECT 'job', n, 0, 'a', 1, '', 0.0, n, 'e', NULL, 1 FROM numbers"
        )
        tx.execute("UPDATE state_jobs SET change = 20000")

    database.run(fill)
    asked: list[tuple[str, Any]] = []
    read = database.all

    def listening_in(sql: str, parameters: Any = ()) -> Any:
        asked.append((sql, parameters))
        return read(sql, parameters)

    database.all = listening_in
    assert [row[3] for row in store._backend.read_log("job", 19_998)] == [19_999, 20_000]  # type: ignore[attr-defined]
    (sql, parameters), *_ = asked
    if place.kind == "postgresql":
        plan = "\n".join(row[0] for row in read(f"EXPLAIN (ANALYZE, TIMING OFF) {sql}", parameters))
        assert "state_log_pkey" in plan
        assert "rows=20000" not in plan
        assert "Rows Removed" not in plan.split("state_log_pkey")[1].split("\n\n")[0]
    else:
        plan = "\n".join(str(row) for row in read(f"EXPLAIN QUERY PLAN {sql}", parameters))
        assert "state_log USING PRIMARY KEY (job=? AND seq>?)" in plan


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.stores(("postgresql", "redis"))
def test_of_ten_thousand_writes_a_thousand_lose_their_answer_and_each_is_stored_once(line: Line):
    store = line.open(retry=PERSISTENT)
    store._backend.write_policy = RetryPolicy(retries=20, base=0.001, cap=0.01)
    line.proxy.drop_replies(every=10, to={"redis": b"EVALSHA", "postgresql": b"headway_states_"}[line.place.kind])
    versions = [store.set_state(State("job", 0, "a", number)).version for number in range(10_000)]
    assert versions == list(range(1, 10_001))


@pytest.mark.stores(NETWORKED)
def test_a_slow_line_makes_it_slower_and_nothing_else(line: Line):
    far, near = line.open(retry=PERSISTENT), line.direct()
    reconnects = metrics.value("headway_states_listener_reconnects", store=line.place.kind)
    with far.subscribe() as subscription:
        replayed(subscription)
        line.proxy.delay(0.2)
        for number in range(1, 4):
            near.set_state(State("job", 1, "a", number))
        assert drain(subscription, (1, "a"), 3)[-1] == 3
        assert far.set_state(State("job", 0, "a")).version == 1
        assert far.fresh
    assert metrics.value("headway_states_listener_reconnects", store=line.place.kind) == reconnects


@pytest.mark.stores(NETWORKED)
def test_a_connection_that_is_open_but_dead_is_noticed_without_an_error_from_below(
    line: Line, monkeypatch: pytest.MonkeyPatch
):
    quick = {
        "redis": {"redis.HEARTBEAT_MS": 100, "redis.SILENCE": 0.5},
        "postgresql": {"sql.HEARTBEAT": 0.1, "postgres.PING_SECONDS": 0.3},
        "firestore": {"firestore_listener.HEARTBEAT": 0.1, "firestore.PROBE_SECONDS": 0.5},
    }
    for name, value in quick[line.place.kind].items():
        monkeypatch.setattr(f"headway.states.store.{name}", value)
    store = line.open(retry=PERSISTENT)
    store.list_all_states()
    assert store.fresh
    before = metrics.value("headway_states_listener_reconnects", store=line.place.kind)
    line.proxy.black_hole()
    eventually(lambda: metrics.value("headway_states_listener_reconnects", store=line.place.kind) > before, 30)
    assert not store.fresh
    line.proxy.pass_through()
    eventually(lambda: store.fresh, 30)


def test_a_silent_listener_is_noticed_in_ten_seconds_and_a_wipe_in_five():
    """Tests shorten these limits; here are the limits as they are."""
    from headway.states.store import firestore, firestore_listener, postgres, redis, sql

    heartbeats = [redis.HEARTBEAT_MS / 1_000, sql.HEARTBEAT, firestore_listener.HEARTBEAT]
    answers = [redis.SILENCE - redis.HEARTBEAT_MS / 1_000, postgres.PING_SECONDS, firestore.PROBE_SECONDS]
    assert all(0 < heartbeat < 5 for heartbeat in heartbeats)
    assert all(heartbeat + answer <= 10 for heartbeat, answer in zip(heartbeats, answers, strict=True))


@pytest.mark.faults
@pytest.mark.stores(NETWORKED)
def test_a_dead_connection_is_given_up_within_ten_seconds(line: Line):
    """With the limits as they are: the listener itself must notice, not only the clock of its cache."""
    store = line.open(retry=PERSISTENT)
    store.list_all_states()
    before = metrics.value("headway_states_listener_reconnects", store=line.place.kind)
    line.proxy.black_hole()
    began = time.monotonic()
    eventually(lambda: metrics.value("headway_states_listener_reconnects", store=line.place.kind) > before, 60)
    assert time.monotonic() - began < 10 + 5, "10 s, and some for a busy machine"
    line.proxy.pass_through()


@pytest.mark.stores(("postgresql",))
def test_postgresql_may_be_restarted_under_a_subscriber_and_a_writer(place: Place, postgres_server: PostgresServer):
    store = place.open(retry=PERSISTENT)
    subscription = store.subscribe()
    store.set_state(State("job", 0, "a"))
    assert drain(subscription, (0, "a"), 1) == [1]
    postgres_server.restart(immediate=True)
    store.set_state(State("job", 0, "a"))
    assert drain(subscription, (0, "a"), 2) == [2]


INTERRUPTED = """
import signal, sys
sys.modules["hiredis"] = None  # its 3.5.0 crashes the interpreter when it is interrupted, with or without us
from headway import states

class Alarm(Exception):
    pass

def ring(*_):
    raise Alarm

store, _ = states.open_store(sys.argv[1], "job", 3)
subscription = store.subscribe()  # so that somebody listens, and is woken by the writes
signal.signal(signal.SIGALRM, ring)
interrupted, stored = 0, []
for number in range(300):
    tag, message = f"t{number % 3}", f"m{number}"
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002 + number % 23 * 0.0001)
        state = store.set_state(states.State("job", 0, tag, number, message))
        signal.setitimer(signal.ITIMER_REAL, 0)
    except Alarm:
        interrupted += 1
    else:
        assert (state.tag, state.message) == (tag, message), "its own answer"
        stored.append((state.tag, state.version))
assert interrupted
assert len(set(stored)) == len(stored)
print(store.set_state(states.State("job", 1, "a", 5)).version)
"""


@pytest.mark.stores(("redis", "sqlite"))
def test_writes_that_a_signal_handler_interrupts_anywhere_leave_no_connection_half_used(place: Place):
    """One that was interrupted while it introduced itself would speak to database 0, where there is no job."""
    command = [sys.executable, "-c", INTERRUPTED, place.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=untraced_environment())
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.stores(("sqlite", "redis"))
def test_raising_slow_and_cancelled_subscribers_do_not_affect_others(place: Place):
    store, writer = place.open(), place.open()
    good, slow, cancelled = store.subscribe(), store.subscribe(depth=4), store.subscribe()

    def raising() -> None:
        with store.subscribe() as subscription:
            for event in subscription:
                if event.state is not None:
                    raise ValueError("not my day")

    raised = threading.Event()
    reader = threading.Thread(target=lambda: suppressed(raising, ValueError, raised))
    reader.start()
    for number in range(300):
        writer.set_state(State("job", 1, "a", number))
        if number == 100:
            cancelled.close()
    assert drain(good, (1, "a"), 300) == list(range(1, 301))
    late = drain(slow, (1, "a"), 300)
    assert late[:4] == [1, 2, 3, 4]
    assert late[-1] == 300
    assert list(cancelled) == []
    assert raised.wait(20)
    reader.join()
    assert store.subscribers == 2


def suppressed(work: Callable[[], None], error: type[Exception], done: threading.Event) -> None:
    with pytest.raises(error):
        work()
    done.set()


@pytest.mark.faults
@pytest.mark.timeout(900)
@pytest.mark.stores(("redis",))
def test_ten_thousand_subscribers_of_one_process_all_end_at_the_last_version_on_one_connection(
    place: Place, redis_server: RedisServer
):
    store, writer = place.open(), place.open()
    with redis_server.client() as client:
        subscriptions = [store.subscribe(depth=8) for _ in range(10_000)]
        connections = len(client.client_list())
    stuck = subscriptions.pop()  # never reads
    for number in range(100):
        writer.set_state(State("job", 1, "a", number))
    for subscription in subscriptions:
        heard = drain(subscription, (1, "a"), 100)
        assert heard == sorted(set(heard))
    assert stuck.waiting <= 1 + 8 + 1
    assert connections <= 6


def test_a_redis_that_begins_to_evict_is_reported_once(
    redis_factory: Callable[..., RedisServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr("headway._redis.EvictionWatch.pace", 0.0)
    server = redis_factory(maxmemory="100mb")
    store, _ = states.open_store(server.url(1), "job", 3)
    with server.client() as client:
        client.config_set("maxmemory-policy", "allkeys-lfu")
        for number in range(3):
            store.set_state(State("job", 0, "a", number))
    store.close()
    said = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert ["allkeys-lfu" in record.getMessage() for record in said] == [True]


@pytest.mark.stores(("postgresql", "redis"))
def test_a_write_that_is_under_way_when_its_store_is_closed_is_answered(line: Line):
    """Cut off, it would have been written, and its writer would not know."""
    store, other = line.open(), line.place.open()
    store.set_state(State("job", 0, "a", 1))
    with ThreadPoolExecutor(1) as pool:
        line.proxy.delay(0.5)
        written = pool.submit(store.set_state, State("job", 0, "a", 2))
        sees(other, 0, "a", 2)  # and the answer is on its way
        store.close()
        assert written.result(60).version == 2
    line.proxy.pass_through()
    eventually(lambda: line.proxy.open_connections == 0, 60)
