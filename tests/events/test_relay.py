"""The relay as it lives in a process: every sink at its own pace, a stop that waits for nobody, two outboxes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headway import _sql, events
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.events import CallableSink, CommandSink, Event, Relay, Sink, SqlOutbox, WebhookSink, outbox, relay
from headway.telemetry import metrics
from tests.core.databases import exit_code, forked
from tests.events.conftest import Store, redis_store, sql_store
from tests.events.scene import Ear, event, hanging, ids, numbers
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def running() -> Any:
    """`running(relay)`: it serves until the test is over."""
    stop, threads = threading.Event(), []

    def start(one: Relay) -> Relay:
        threads.append(threading.Thread(target=one.run, args=(stop,)))
        threads[-1].start()
        return one

    yield start
    stop.set()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


Running = Callable[[Relay], Relay]


def test_a_sink_that_hangs_keeps_no_other_waiting(store: Store, running: Running, gate: threading.Event):
    """The well sink hears everything while the other is still inside its first delivery: whatever the machine's load,
    nobody waited for it."""
    entered = threading.Event()
    well = Ear("well")
    store.decide(event(1))
    running(Relay(store.outbox(), [hanging("hangs", gate, entered), well], rest=0.02))
    assert entered.wait(30)
    eventually(lambda: well.heard == ["e-1"], 30)
    store.decide(*numbers(2, 3))
    eventually(lambda: well.heard == ids([1, 2, 3]), 30)
    assert not gate.is_set()  # it hangs to this moment


def test_a_receiver_that_drips_or_is_slow_keeps_no_other_waiting(
    store: Store, running: Running, receiver: Any, gate: threading.Event
):
    dripping = threading.Event()

    def drip(handler: Any) -> None:
        for _ in range(100):
            handler.wfile.write(b"H")
            handler.wfile.flush()
            dripping.set()
            if gate.wait(0.05):
                return

    receiver.answers = [drip]
    well = Ear("well")
    store.decide(*numbers(1, 2))
    running(Relay(store.outbox(), [WebhookSink(receiver.url, 60), well], rest=0.02))
    assert dripping.wait(30)
    eventually(lambda: well.heard == ids([1, 2]), 30)
    store.decide(event(3))
    eventually(lambda: well.heard == ids([1, 2, 3]), 30)
    assert len(receiver.requests) == 1  # still in its first delivery


def test_a_stop_does_not_wait_for_a_hanging_function(store: Store, gate: threading.Event):
    entered = threading.Event()
    store.decide(event(1))
    one = Relay(store.outbox(), [hanging("hangs", gate, entered)], rest=0.02).start()
    assert entered.wait(30)
    assert one.close(grace=0.05) is False
    assert not gate.is_set()


def test_a_stop_ends_a_hanging_webhook_and_a_hanging_program(
    store: Store, receiver: Any, gate: threading.Event, tmp_path
):
    """Both would go on for a minute; the stop ends them, so that it need not leave them behind."""
    receiver.answers = [lambda handler: gate.wait(60)]
    script = tmp_path / "hang"
    script.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    script.chmod(0o755)
    store.decide(event(1))
    sinks: list[Sink] = [WebhookSink(receiver.url, 60), CommandSink([str(script)], 60)]
    one = Relay(store.outbox(), sinks, rest=0.02).start()
    eventually(lambda: receiver.requests and (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip(), 30)
    one.close(grace=0.05)
    eventually(lambda: not any(thread.name.startswith("headway-relay") for thread in threading.enumerate()), 30)
    pid = int((tmp_path / "pid").read_text())
    eventually(lambda: not _alive(pid), 30)
    assert store.outbox().backlog(sinks[0].name)[0].waiting == 1


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_sink_that_fails_is_left_alone_longer_each_time(store: Store):
    now = [0.0]
    ear = Ear(trouble=Unavailable("down"))
    store.decide(event(1))
    failures = metrics.value("headway_event_failures", sink="ear")
    one = Relay(store.outbox(), [ear], clock=lambda: now[0])
    waits = []
    for _ in range(8):
        waits.append(one.tick())
        now[0] += waits[-1] - 0.01
        assert one.tick() == pytest.approx(0.01)  # it is not asked before its time
        now[0] += 0.011
    assert ear.tries == 8
    assert metrics.value("headway_event_failures", sink="ear") == failures + 8
    for number, wait in enumerate(waits):
        assert 0.8 * min(60, 2**number) <= wait <= min(60, 2**number)
    ear.trouble = None
    one.tick()
    assert ear.heard == ["e-1"]
    ear.trouble = Unavailable("down again")
    store.decide(event(2))
    assert one.tick() <= 1.0  # a success begins anew


class Odd(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_exception_of_a_sink_affects_only_its_own_delivery(tmp_path, running: Running):
    store = sql_store("sqlite", f"sqlite:///{tmp_path}/e.db")
    odds = [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), Odd(), MemoryError()]
    raised: set[int] = set()
    heard: list[int] = []

    def call(number: int, _: Event) -> None:
        if number not in raised:
            raised.add(number)
            raise odds[number]
        heard.append(number)

    well = Ear("well")
    store.decide(event(1))
    sinks = [CallableSink(f"odd {number}", partial(call, number)) for number in range(len(odds))]
    running(Relay(store.outbox(), [*sinks, well], rest=0.02))
    eventually(lambda: well.heard == ["e-1"] and sorted(heard) == [0, 1, 2, 3, 4], 30)


def test_two_sinks_of_one_name_are_refused(store: Store):
    with pytest.raises(InvalidInput, match="'s'"):
        Relay(store.outbox(), [Ear("s"), Ear("s")])


def test_draining_delivers_waiting_events_and_returns_whether_none_is_left(store: Store):
    store.decide(*numbers(*range(1, 251)))
    ear, down = Ear(), Ear("down", Unavailable("away"))
    store.outbox().subscribe("down")
    assert Relay(store.outbox(), [ear]).drain(60)
    assert ear.heard == ids(range(1, 251))
    relay = Relay(store.outbox(), [ear, down])
    assert not relay.drain(0.3)
    eventually(lambda: down.tries or relay.drain(0.3), 30)  # on a busy machine the first try comes later
    assert down.tries == 1  # a sink that is down is not tried again at once


def test_a_relay_without_sinks_has_nothing_to_do(store: Store):
    store.decide(event(1))
    assert Relay(store.outbox(), []).drain(30)
    assert Relay(store.outbox(), []).tick() > 0


def test_draining_ends_although_one_sink_hangs_and_the_others_have_everything(store: Store, gate: threading.Event):
    entered = threading.Event()
    ear = Ear()
    store.decide(event(1))
    one = Relay(store.outbox(), [hanging("hangs", gate, entered), ear]).start()
    assert entered.wait(30)
    eventually(lambda: ear.heard == ["e-1"], 30)
    assert not one.drain(0.1)
    one.close(grace=0.05)


def test_one_outbox_out_of_reach_does_not_stop_the_other(
    redis_server: RedisServer, postgres_server: PostgresServer, postgres_url: str, running: Running
):
    sql, stream = sql_store("postgresql", postgres_url), redis_store(redis_server)
    ear = Ear()
    running(Relay([sql.outbox(), stream.outbox()], [ear], rest=0.02))
    sql.decide(event(1))
    stream.decide(event(2))
    eventually(lambda: sorted(ear.heard) == ids([1, 2]), 30)
    postgres_server.stop()
    ear.trouble = Unavailable("the sink is down too")
    stream.decide(event(3))
    ear.trouble = None  # and has recovered, while the database is still away
    eventually(lambda: ear.heard[2:] == ["e-3"], 30)
    postgres_server.start()
    redis_server.stop()
    eventually(lambda: _decided(sql, event(4)), 60)
    eventually(lambda: ear.heard[3:] == ["e-4"], 90)
    redis_server.start()
    stream.decide(event(5))
    eventually(lambda: ear.heard[4:] == ["e-5"], 90)
    for close in sql.closing + stream.closing:
        close()


def _decided(store: Store, one: Event) -> bool:
    try:
        store.decide(one)
    except Unavailable:
        return False
    return True


def test_a_note_that_sql_cannot_take_leaves_the_entry_in_the_stream_and_the_sinks_served(redis_server: RedisServer):
    """What is noted once every sink has an event is kept in SQL, and SQL may be away."""
    store = redis_store(redis_server)
    away = [True]
    noted: list[str] = []

    def note(found: Any) -> None:
        if away[0]:
            raise Unavailable("SQL is away")
        noted.extend(one.id for one in found)

    client: Any = redis_server.client(1)
    box = events.RedisOutbox(client, on_delivered=note)
    ear, late = Ear(), Ear("late")
    one = Relay(box, [ear, late])
    store.decide(event(1))
    one.tick()
    one.tick()
    assert (ear.heard, late.heard) == (["e-1"], ["e-1"])
    assert client.xlen("smap:events") == 1
    store.decide(event(2))
    one.tick()
    assert ear.heard == late.heard == ids([1, 2])
    away[0] = False
    one.tick()
    assert noted == ids([1, 2])
    assert client.xlen("smap:events") == 0


def test_too_many_waiting_events_are_logged_once_and_none_is_dropped(store: Store, monkeypatch, caplog):
    monkeypatch.setattr(relay, "MANY", 3)
    monkeypatch.setattr(relay, "MEASURE", 0.0)
    ear = Ear(trouble=Unavailable("down"))
    now = [0.0]
    store.decide(*numbers(1, 2, 3, 4, 5))
    one = Relay(store.outbox(), [ear], clock=lambda: now[0])
    with caplog.at_level("CRITICAL"):
        for _ in range(3):
            one.tick()
            now[0] += 100
    assert [record.message for record in caplog.records] == [
        "🔴 too many events wait for a sink; none is dropped, so the store grows"
    ]
    assert metrics.value("headway_events_waiting", sink="ear", outbox=store.outbox().name) == 5
    ear.trouble = None
    one.tick()
    assert ear.heard == ids([1, 2, 3, 4, 5])


def test_a_relay_renews_its_lease_while_it_works_through_many_events(store: Store):
    """Each delivery takes a sixth of the lease: after six of them it would have ended."""
    now = [0.0]
    box: Any = store.outbox()
    renewed: list[float] = []
    renew = box.renew

    def watched(lease: Any) -> None:
        renewed.append(now[0])
        renew(lease)

    box.renew = watched
    store.decide(*numbers(*range(1, 13)))

    def deliver(_: Event) -> None:
        now[0] += outbox.LEASE / 6

    Relay(box, [CallableSink("s", deliver)], clock=lambda: now[0]).tick()
    gaps = [after - before for before, after in zip([0.0, *renewed], renewed, strict=False)]
    assert renewed
    assert max(gaps) <= outbox.LEASE / 2


def test_a_relay_does_not_run_in_a_forked_child(redis_server: RedisServer):
    store = redis_store(redis_server)
    ear = Ear()
    with Relay(store.outbox(), [ear], rest=0.02).start() as one:
        store.decide(event(1))
        eventually(lambda: ear.heard == ["e-1"], 30)
        assert one.running

        def child() -> None:
            assert not one.running
            for use in (one.tick, one.start, lambda: one.drain(1)):
                with pytest.raises(HeadwayError, match="forked"):
                    use()
            assert one.close()
            own = Ear("own")  # a relay of its own works, over the inherited client
            store.decide(event(2))
            assert Relay(store.outbox(), [own]).drain(20)
            assert own.heard[-1] == "e-2"

        assert exit_code(forked(child)) == 0
        assert one.running
    assert not one.running


def test_started_for_a_while_it_serves_beside_other_work(tmp_path):
    ear = Ear()
    stop = threading.Event()
    with _sql.connect(f"sqlite:///{tmp_path}/e.db") as database:
        with events.start(database=database, sinks=[ear], stop=stop, rest=0.02) as one:
            database.run(lambda tx: events.append(tx, event(1)))
            eventually(lambda: ear.heard == ["e-1"], 30)
            with pytest.raises(HeadwayError, match="running already"):
                one.start()
            stop.set()
            eventually(lambda: not one.running, 30)
        database.run(lambda tx: events.append(tx, event(2)))
        assert SqlOutbox(database).waits("ear")


def test_a_relay_outlives_its_database(postgres_server: PostgresServer, postgres_url: str, running: Running):
    ear = Ear()
    store = sql_store("postgresql", postgres_url)
    running(Relay(store.outbox(), [ear], rest=0.02))
    store.decide(event(1))
    eventually(lambda: ear.heard == ["e-1"], 30)
    postgres_server.stop()
    eventually(lambda: not postgres_server.running, 20)
    postgres_server.start()
    eventually(lambda: _decided(store, event(2)), 60)
    eventually(lambda: ear.heard == ids([1, 2]), 90)
    for close in store.closing:
        close()


def test_events_of_one_job_reach_a_sink_in_order_however_many_relays_there_are(store: Store):
    heard: list[tuple[str, int]] = []
    lock = threading.Lock()

    def hear(found: Event) -> None:
        with lock:
            heard.append((found.job, found.version))

    relays = [Relay(store.outbox(), [CallableSink("s", hear)], rest=0.001) for _ in range(4)]
    for one in relays:
        one.start()
    for number in range(1, 101):
        store.decide(event(number, f"job-{number % 3}"))
    eventually(lambda: len(heard) >= 100, 60)
    for one in relays:
        one.close()
    assert len(heard) == 100  # each once
    for job in range(3):
        versions = [version for name, version in heard if name == f"job-{job}"]
        assert versions == sorted(versions)


def test_time_is_up_means_the_whole_delivery(receiver: Any, gate: threading.Event):
    """Each byte comes well within any limit on one read; all of them never would."""

    def drip(handler: Any) -> None:
        while not gate.wait(0.01):
            handler.wfile.write(b"H")

    receiver.answers = [drip]
    sink = WebhookSink(receiver.url, 0.3)
    began = time.monotonic()
    with pytest.raises(Unavailable, match=r"within 0\.3 s"):
        sink.deliver(event())
    assert time.monotonic() - began < 30  # the receiver would have gone on for ever


class Noting(SqlOutbox):
    """Remembers how many deliveries each of its notes was about."""

    def __init__(self, database: _sql.Database) -> None:
        super().__init__(database)
        self.notes: list[int] = []

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        super().delivered(sink, handles)
        self.notes.append(len(handles))


@pytest.mark.parametrize(("count", "notes"), [(5, [1] * 5), (200, [100, 100])])
def test_deliveries_are_noted_one_by_one_unless_many_wait(tmp_path: Path, count: int, notes: list[int]):
    with _sql.connect(f"sqlite:///{tmp_path}/e.db") as database:
        events.append_all(database, numbers(*range(1, count + 1)))
        box = Noting(database)
        Relay(box, [ear := Ear()], clock=lambda: 7.0).tick()
        Relay(box, [ear], clock=lambda: 7.0).tick()
        assert ear.heard == ids(range(1, count + 1))
        assert box.notes == notes


def test_deliveries_of_a_slow_sink_are_recorded_within_a_moment(tmp_path: Path):
    moments = iter(range(1000))
    with _sql.connect(f"sqlite:///{tmp_path}/e.db") as database:
        events.append_all(database, numbers(*range(1, 101)))
        box = Noting(database)
        Relay(box, [Ear()], clock=lambda: next(moments) * 0.02).tick()  # each look at the clock is 20 ms later
        assert max(box.notes) <= 2
        assert sum(box.notes) == 100


def test_deliveries_before_a_failure_in_a_batch_are_not_repeated(tmp_path: Path):
    with _sql.connect(f"sqlite:///{tmp_path}/e.db") as database:
        events.append_all(database, numbers(*range(1, 101)))
        ear = Ear()

        def take(found: Event) -> None:
            if len(ear.heard) == 60:
                raise Unavailable("not now")
            ear.deliver(found)

        Relay(SqlOutbox(database), [CallableSink("ear", take)]).tick()
        Relay(SqlOutbox(database), [ear]).tick()
        assert ear.heard == ids(range(1, 101))
