"""What every outbox does, on SQLite, on PostgreSQL and in Redis."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from headway import _lease, events
from headway.errors import Held, ServerRefused
from headway.events import CallableSink, Event, EventRefused, Relay, SqlOutbox, outbox, relay
from headway.telemetry import metrics
from tests.core.databases import exit_code, forked
from tests.events.conftest import Store
from tests.events.scene import TODAY, Ear, event, ids, numbers
from tests.services.waiting import eventually


def test_an_event_comes_out_as_it_went_in(store: Store):
    hostile = event(3, text="'; DROP TABLE outbox; -- \n\u2028 é 🎈", list=[1, None, {"a": True}], big=2**60, part=0.25)
    store.decide(hostile)
    heard: list[Event] = []
    Relay(store.outbox(), [CallableSink("s", heard.append)]).tick()
    assert heard == [hostile]


def test_every_sink_gets_every_event_once_and_in_order(store: Store):
    sinks = [Ear("a"), Ear("b")]
    store.decide(*numbers(*range(1, 8)))
    relay = Relay(store.outbox(), sinks)
    assert relay.tick(limit=3) == 0.0  # more may wait
    while relay.tick(limit=3) == 0.0:
        pass
    assert [sink.heard for sink in sinks] == [ids(range(1, 8))] * 2
    assert Relay(store.outbox(), sinks).drain(30)
    assert [sink.tries for sink in sinks] == [7, 7]


def test_a_new_sink_receives_events_from_before_the_first_relay(store: Store):
    store.decide(*numbers(1, 2))
    early, late = Ear("early"), Ear("late")
    store.outbox().subscribe("keeps the entries of a stream")
    Relay(store.outbox(), [early]).tick()
    Relay(store.outbox(), [late]).tick()
    assert late.heard == early.heard == ids([1, 2])


def test_a_subscribed_sink_receives_later_events_even_about_old_facts(store: Store):
    ear = Ear()
    relay = Relay(store.outbox(), [ear])
    relay.subscribe()
    store.decide(replace(event(1), at=TODAY - timedelta(days=400)))  # as the watcher finds it at its first look
    relay.tick()
    assert ear.heard == ids([1])


def test_a_sink_of_one_job_hears_of_no_other(store: Store):
    mine: list[str] = []
    store.decide(event(1, "mine"), event(2, "other"), event(3, "mine"))
    relay = Relay(store.outbox(), [CallableSink("s", lambda found: mine.append(found.id), job="mine")])
    relay.tick()
    assert mine == ids([1, 3])
    relay.tick()
    [behind] = store.outbox().backlog("s")
    assert behind.waiting == 0  # the other job's event does not wait for it


def test_of_two_relays_one_serves_a_sink(store: Store):
    first, second = store.outbox(), store.outbox()
    store.decide(*numbers(1, 2))
    ear = Ear()
    first.subscribe("ear")
    lease = first.acquire("ear")
    with pytest.raises(Held):
        second.acquire("ear")
    Relay(second, [ear]).tick()
    assert ear.heard == []
    first.release(lease)
    Relay(second, [ear]).tick()
    assert ear.heard == ids([1, 2])


def test_a_relay_that_lost_its_lease_while_it_was_paused_stops_delivering(store: Store):
    """It was paused between two deliveries for longer than the lease, and another relay took over."""
    now = [0.0]
    heard: dict[str, list[str]] = {"paused": [], "other": []}
    other = Relay(store.outbox(), [CallableSink("s", lambda found: heard["other"].append(found.id))])

    def deliver(found: Event) -> None:
        heard["paused"].append(found.id)
        if len(heard["paused"]) == 1:
            now[0] += outbox.LEASE  # as long as it takes
            steal(store, "s")
            other.tick()

    store.decide(*numbers(1, 2, 3))
    Relay(store.outbox(), [CallableSink("s", deliver)], clock=lambda: now[0]).tick()
    assert heard == {"paused": ["e-1"], "other": ids([1, 2, 3])}


def steal(store: Store, sink: str) -> None:
    """End the lease of a sink as if its time were up."""
    box: Any = store.outbox()
    if store.kind == "redis":
        for key in box._client.scan_iter("smap:events:lease:*"):
            box._client.delete(key)
    else:
        box._database.run(lambda tx: tx.execute("UPDATE sinks SET holder = NULL WHERE name = ?", (sink,)))


@pytest.mark.parametrize("store", ["postgresql", "redis"], indirect=True)  # SQLite: test_processes
@pytest.mark.parametrize("point", ["after the lease", "after delivering", "after noting"])
def test_a_relay_killed_between_any_two_steps_is_followed_at_once_by_one_that_leaves_nothing_out(
    store: Store, point: str
):
    """On the same machine the successor sees that the holder of the lease is dead, and does not wait for its end."""
    store.decide(*numbers(1, 2))
    reads, writes = os.pipe()

    def doomed() -> None:
        box = store.outbox()
        box.subscribe("s")
        box.acquire("s")
        for handle, found in box.waiting("s", 10):
            if point == "after the lease":
                os._exit(9)
            os.write(writes, found.id.encode() + b"\n")
            if point == "after delivering":
                os._exit(9)
            box.delivered("s", [handle])
            os._exit(9)

    assert exit_code(forked(doomed)) == 9
    os.close(writes)
    with os.fdopen(reads) as pipe:
        before = pipe.read().split()
    ear = Ear("s")
    assert Relay(store.outbox(), [ear]).drain(20)
    assert (
        before + ear.heard
        == {
            "after the lease": ids([1, 2]),
            "after delivering": ids([1, 1, 2]),
            "after noting": ids([1, 2]),
        }[point]
    )


def test_a_lease_of_another_machine_is_waited_for_and_not_for_longer_when_the_stores_clock_is_set_back(store: Store):
    """Nobody can see from here whether that process lives."""
    box: Any = store.outbox()
    box.subscribe("s")
    store.decide(event(1))
    far = _lease.Owner("elsewhere", "other boot", "other space", 1, "1", "claim")
    if store.kind == "redis":
        _lease.RedisLeases(box._client).acquire(events.store.redis._lease_key("s"), far, 60)
    else:
        box._database.run(lambda tx: _lease.SqlLeases("sinks", "name").acquire(tx, "s", far, 60))
    ear = Ear("s")
    Relay(store.outbox(), [ear]).tick()
    assert ear.heard == []
    assert box.backlog("s")[0].holder == "process 1 on elsewhere"
    set_clock(box, -3600)  # the store's, and the relay there is dead
    for seconds in (0, 58):
        set_clock(box, seconds)
        Relay(store.outbox(), [ear]).tick()
        assert ear.heard == []
    set_clock(box, 3)
    Relay(store.outbox(), [ear]).tick()
    assert ear.heard == ["e-1"]


def set_clock(box: Any, seconds: float) -> None:
    """What the lease of the sink looks like after the store's clock was set forward, or back if negative."""
    if isinstance(box, SqlOutbox):
        box._database.write("UPDATE sinks SET lease_until = lease_until - ?", (seconds,))
    else:
        key = events.store.redis._lease_key("s")
        box._client.pexpire(key, box._client.pttl(key) - int(seconds * 1000))


def test_a_delivery_that_could_not_be_noted_is_noted_later_and_not_repeated(store: Store, monkeypatch):
    box = store.outbox()
    noted = box.delivered
    calls: list[str] = []

    def fails_once(sink: str, handle: str) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise events_unavailable()
        noted(sink, handle)

    monkeypatch.setattr(box, "delivered", fails_once)
    store.decide(*numbers(1, 2))
    ear = Ear()
    relay = Relay(box, [ear])
    with pytest.raises(type(events_unavailable())):
        relay.tick()
    relay.tick()
    relay.tick()
    assert ear.heard == ids([1, 2])
    assert calls[0] == calls[1]
    assert box.backlog("ear")[0].waiting == 0


def events_unavailable() -> Exception:
    from headway.errors import Unavailable

    return Unavailable("the store is away just now")


def test_an_invalid_event_is_put_aside_and_logged_and_the_others_are_delivered(store: Store, caplog):
    store.decide(event(1))
    store.damage()
    store.decide(event(2))
    before = metrics.value("headway_events_refused", sink="ear")
    ear = Ear()
    relay = Relay(store.outbox(), [ear])
    with caplog.at_level("ERROR"):
        relay.tick()
        relay.tick()
    assert ear.heard == ids([1, 2])
    assert [one.id for one in store.outbox().refused("ear")] == ["bad"]
    assert "invalid event" in store.outbox().refused()[0].reason
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert metrics.value("headway_events_refused", sink="ear") == before + 1


def test_a_page_of_damaged_events_does_not_end_the_delivery(store: Store):
    ear = Ear()
    relay = Relay(store.outbox(), [ear])
    relay.tick()  # it subscribes
    store.damage()
    store.decide(event(1))
    relay.tick(limit=1)
    assert ear.heard == ids([1])


def refuse_for_good(store: Store, ear: Ear, now: list[float]) -> None:
    ear.refuses = {"e-1"}
    runner = Relay(store.outbox(), [ear], clock=lambda: now[0])
    for _ in range(relay.REFUSALS):
        runner.tick()
        now[0] += 100
    ear.refuses = set()
    runner.tick()


def test_a_permanently_refused_event_is_put_aside_after_some_tries(store: Store, caplog):
    now = [0.0]
    store.decide(*numbers(1, 2))
    ear, other = Ear(), Ear("other")
    store.outbox().subscribe("other")
    with caplog.at_level("ERROR"):
        refuse_for_good(store, ear, now)
    assert ear.heard == ["e-2"]
    assert ear.tries == relay.REFUSALS + 1
    [found] = store.outbox().refused()
    assert (found.sink, found.id, found.type, found.job) == ("ear", "e-1", "test.happened", "ads")
    assert found.reason == "it will never take this"
    assert len(caplog.records) == 1
    [behind] = store.outbox().backlog("ear")
    assert (behind.waiting, behind.refused) == (0, 1)
    Relay(store.outbox(), [other]).tick()
    assert other.heard == ids([1, 2])  # it is put aside for one sink


def test_events_whose_content_is_refused_are_put_aside_at_once_and_the_sink_does_not_fall_behind(store: Store):
    heard: list[str] = []

    def receive(found: Event) -> None:
        if int(found.id[2:]) % 3 == 0:
            raise EventRefused("400")
        heard.append(found.id)

    store.decide(*numbers(*range(30)))
    Relay(store.outbox(), [CallableSink("picky", receive)], clock=lambda: 0.0).tick()  # one round, and no back-off
    assert heard == [f"e-{number}" for number in range(30) if number % 3]
    assert [one.id for one in store.outbox().refused("picky")] == ids(range(0, 30, 3))


def test_a_sink_that_refuses_everything_is_left_alone_after_some_events(store: Store):
    def receive(_: Event) -> None:
        raise EventRefused("400")

    store.decide(*numbers(*range(30)))
    runner = Relay(store.outbox(), [CallableSink("broken", receive)], clock=lambda: 0.0)
    for _ in range(3):
        runner.tick()
    assert len(store.outbox().refused("broken")) == relay.ASIDE_IN_A_ROW


def test_a_sink_for_some_types_of_event_hears_no_other_and_keeps_none_waiting(store: Store):
    ear = Ear()
    ear.types = ("task.*", "alert.opened")  # type: ignore[attr-defined]
    kinds = ["task.failed", "job.completed", "alert.opened", "alert.closed", "task.queued"]
    store.decide(
        *(
            replace(event(number), type=kind, data={"total": 1, "succeeded": 1, "failed": 0})
            for number, kind in enumerate(kinds)
        )
    )
    Relay(store.outbox(), [ear]).tick()
    assert ear.heard == ids([0, 2, 4])
    assert store.outbox().backlog("ear") == [] or store.outbox().backlog("ear")[0].waiting == 0


def test_an_event_that_was_put_aside_can_be_delivered_to_its_sink_alone(store: Store):
    now = [0.0]
    ear, other = Ear(), Ear("other")
    Relay(store.outbox(), [other]).tick()
    store.decide(event(1))
    refuse_for_good(store, ear, now)
    Relay(store.outbox(), [other]).tick()
    assert (ear.heard, other.heard) == ([], ["e-1"])
    [found] = store.outbox().refused()
    store.outbox().retry(found)
    again = Relay(store.outbox(), [ear, other])
    again.tick()
    again.tick()
    assert (ear.heard, other.heard) == (["e-1"], ["e-1"])
    assert store.outbox().refused() == []


def test_an_event_that_was_put_aside_can_be_discarded(store: Store):
    now = [0.0]
    store.decide(event(1))
    ear = Ear()
    refuse_for_good(store, ear, now)
    [found] = store.outbox().refused()
    store.outbox().discard(found)
    Relay(store.outbox(), [ear]).tick()
    assert ear.heard == []
    assert store.outbox().refused() == []


def test_a_temporary_refusal_is_tried_for_ever_and_puts_nothing_aside(store: Store):
    now = [0.0]
    store.decide(*numbers(1, 2))
    ear = Ear(trouble=RuntimeError("down, password=hunter2"))
    runner = Relay(store.outbox(), [ear], clock=lambda: now[0])
    for _ in range(3 * relay.REFUSALS):
        runner.tick()
        now[0] += 100
    ear.trouble = None
    runner.tick()
    assert ear.heard == ids([1, 2])
    assert store.outbox().refused() == []


def test_refusals_are_counted_for_the_sink_whichever_relay_meets_them(store: Store, monkeypatch: pytest.MonkeyPatch):
    """As ``headway relay --once`` in a timetable: each of them tries once and ends."""
    monkeypatch.setattr(relay, "APART", 0.0)
    store.decide(*numbers(1, 2))
    ear = Ear()
    ear.refuses = {"e-1"}
    for tries in range(1, relay.REFUSALS):
        Relay(store.outbox(), [ear]).tick()
        assert (ear.tries, store.outbox().refused()) == (tries, [])
    Relay(store.outbox(), [ear]).tick()
    assert [found.id for found in store.outbox().refused()] == ["e-1"]
    assert ear.heard == ["e-2"]
    # Taken up again, it has all its tries anew.
    store.outbox().retry(store.outbox().refused()[0])
    Relay(store.outbox(), [ear]).tick()
    assert store.outbox().refused() == []


def test_many_relays_that_are_refused_at_one_moment_count_as_one_try(store: Store):
    """A receiver that is deployed wrongly for a moment loses nothing, however many relays there are."""
    now = [0.0]
    store.decide(*numbers(1, 2))
    ear = Ear()
    ear.refuses = {"e-1"}
    relays = [Relay(store.outbox(), [ear], clock=lambda: now[0]) for _ in range(3)]
    for round in range(1, relay.REFUSALS):
        for one in relays:
            one.tick()
        assert ear.tries == 3 * round
        now[0] += 100
    assert store.outbox().refused() == []
    relays[0].tick()
    assert [found.id for found in store.outbox().refused()] == ["e-1"]


def test_a_refusal_that_cannot_be_noted_is_counted_by_the_relay_alone(store: Store, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object, **__: object) -> int:
        raise events_unavailable()

    now = [0.0]
    store.decide(*numbers(1, 2))
    ear, box = Ear(), store.outbox()
    ear.refuses = {"e-1"}
    monkeypatch.setattr(box, "count_refusal", fails)
    one = Relay(box, [ear], clock=lambda: now[0])
    for _ in range(relay.REFUSALS - 1):
        one.tick()
        now[0] += 100
    assert store.outbox().refused() == []
    one.tick()
    assert [found.id for found in store.outbox().refused()] == ["e-1"]


def test_a_function_that_takes_longer_than_its_lease_keeps_it_and_is_called_by_no_other_relay(store: Store):
    """Its lease, taken for 3 s, is moved while the function runs, each time before it ends."""
    calls: list[str] = []
    other = Relay(store.outbox(), [CallableSink("s", lambda _: calls.append("other"))])

    def deliver(_: Event) -> None:
        calls.append("slow")
        end = lease_end(store, "s")
        eventually(lambda: lease_end(store, "s") > end + 0.5)
        other.tick()

    store.decide(event(1))
    Relay(store.outbox(lease=3.0), [CallableSink("s", deliver)]).tick()
    other.tick()
    assert calls == ["slow"]


def lease_end(store: Store, sink: str) -> float:
    """When the lease of a sink ends, by the store's clock."""
    box: Any = store.outbox()
    if store.kind == "redis":
        seconds, microseconds = box._client.time()
        return float(seconds + microseconds / 1e6 + box._client.pttl(events.store.redis._lease_key(sink)) / 1000)
    return float(box._database.one("SELECT lease_until FROM sinks WHERE name = ?", (sink,))[0])


def test_refusals_count_for_one_event_in_a_row(store: Store):
    """Four refusals of the first and four of the second put neither aside."""
    now = [0.0]
    store.decide(*numbers(1, 2))
    ear = Ear()
    runner = Relay(store.outbox(), [ear], clock=lambda: now[0])
    for expected in (["e-1"], ids([1, 2])):
        ear.trouble = ServerRefused("not this one")
        for _ in range(relay.REFUSALS - 1):
            runner.tick(limit=1)
            now[0] += 100
        ear.trouble = None
        runner.tick(limit=1)
        assert ear.heard == expected
    assert store.outbox().refused() == []


def test_the_backlog_says_how_many_wait_and_for_how_long(store: Store):
    box = store.outbox()
    box.subscribe("ear")
    assert [(one.sink, one.waiting, one.oldest_seconds) for one in box.backlog()] == [("ear", 0, None)]
    store.decide(*numbers(1, 2, 3))
    [behind] = box.backlog()
    assert (behind.waiting, behind.refused, behind.holder) == (3, 0, None)
    assert behind.oldest_seconds is not None
    assert behind.oldest_seconds >= (0 if store.kind == "redis" else 60)  # the stream knows when it was appended
    ear = Ear()
    Relay(box, [ear]).tick()
    eventually(lambda: metrics.value("headway_events_waiting", sink="ear", outbox=box.name) == 3)
    [behind] = box.backlog()
    assert behind.waiting == 0


def test_a_sink_that_is_gone_can_be_forgotten(store: Store):
    box = store.outbox()
    box.subscribe("gone")
    store.decide(event(1))
    assert box.forget("gone")
    assert not box.forget("gone")
    assert box.backlog() == []
    Relay(store.outbox(), [Ear()]).tick()


def test_subscribing_again_keeps_the_place(store: Store):
    ear = Ear()
    store.decide(event(1))
    Relay(store.outbox(), [ear]).tick()
    store.outbox().subscribe("ear")
    Relay(store.outbox(), [ear]).tick()
    assert ear.heard == ["e-1"]


def test_the_one_shape_of_a_completion_comes_out_of_every_earlier_one(store: Store):
    import dataclasses

    shapes: list[dict[str, events.Json]] = [
        {"total": 10, "succeeded": 9, "failed": 1},
        {"total": 10, "done": 9, "dead": 1, "failures": 4},
        {"project_id": "p", "status": "DONE", "total": 10, "done": 10, "errors": 1},
    ]
    for number, data in enumerate(shapes, 1):
        store.decide(dataclasses.replace(event(number), type="job.completed", data=data))
    heard: list[Event] = []
    Relay(store.outbox(), [CallableSink("s", heard.append)]).tick()
    assert [found.data for found in heard] == [shapes[0]] * 3
    assert json.loads(heard[0].as_json())["data"] == shapes[0]
