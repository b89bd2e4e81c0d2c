"""What is particular to the outbox in Redis."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from headway.errors import StoreFull
from headway.events import CallableSink, Event, RedisOutbox, Relay
from tests.events.conftest import redis_store
from tests.events.scene import Ear, event, ids, numbers
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

WELL = {"id": "1", "type": "t", "source": "s", "job": "j", "version": "1", "at": "1", "data": "{}"}


@pytest.mark.parametrize(
    "garbage",
    [
        {"x": "y"},
        WELL | {"at": "never"},
        WELL | {"at": "1e400"},
        WELL | {"at": "nan"},
        WELL | {"data": "[1]"},
        WELL | {"data": "{"},
        WELL | {"data": '{"a": NaN}'},
        WELL | {"data": "[" * 100_000},
        WELL | {"version": "x"},
        WELL | {"id": ""},
        WELL | {"id": b"\xff\xfe"},
        WELL | {b"\xff": "a field"},
        WELL | {"type": "job.completed", "data": '{"total": null, "done": 1, "errors": 0}'},
        WELL | {"type": "job.completed", "data": '{"total": 1}'},
        WELL | {"type": "job.completed", "data": '{"total": 1, "done": 1, "errors": 5}'},
    ],
)
def test_an_invalid_entry_is_put_aside_and_the_others_are_delivered(garbage: dict[Any, Any], redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    noted: list[str] = []
    box = RedisOutbox(state, on_delivered=lambda found: noted.extend(one.id for one in found))
    state.xadd("smap:events", garbage)
    store.decide(event(1))
    ear = Ear()
    relay = Relay(box, [ear])
    relay.tick()
    relay.tick()
    assert ear.heard == noted == ["e-1"]
    assert len(box.refused("ear")) == 1
    assert state.xlen("smap:events") == 0
    [again] = box.refused()
    box.retry(again)  # it is no event now either
    relay.tick()
    assert len(box.refused("ear")) == 1
    box.discard(box.refused()[0])
    assert box.refused() == []


def test_many_invalid_entries_are_put_aside_batch_by_batch(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    count = 250
    pipeline = state.pipeline(transaction=False)
    for _ in range(count):
        pipeline.xadd("smap:events", {"x": "y"})
    pipeline.execute()
    store.decide(event(1))
    ear = Ear()
    relay = Relay(store.outbox(), [ear])
    allowed = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + count)  # so that a call inside a call for each one finds no room
    try:
        relay.tick(limit=1)  # one at a time
    finally:
        sys.setrecursionlimit(allowed)
    assert ear.heard == ["e-1"]
    assert len(store.outbox().refused()) == count


def test_entries_read_by_a_relay_of_an_earlier_headway_are_adopted(redis_server: RedisServer):
    """Its consumers had names of their own."""
    store, state = redis_store(redis_server), redis_server.client(1)
    store.decide(*numbers(1, 2, 3))
    state.xgroup_create("smap:events", "ear", id="0")
    state.xreadgroup("ear", "relay-0a1b2c", {"smap:events": ">"}, count=2)
    ear = Ear()
    assert Relay(store.outbox(), [ear]).drain(20)
    assert sorted(ear.heard) == ids([1, 2, 3])


def test_after_a_wipe_the_relay_subscribes_again_and_goes_on(redis_server: RedisServer):
    store = redis_store(redis_server)
    ear = Ear()
    relay = Relay(store.outbox(), [ear])
    store.decide(event(1))
    relay.tick()
    redis_server.client().flushall()
    relay.tick()
    store.decide(event(2))
    relay.tick()
    assert ear.heard == ids([1, 2])


def test_after_a_wipe_nothing_leaves_the_stream_before_a_sink_that_was_down_has_it(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    quick, down, now = Ear("quick"), Ear("down"), 0.0
    relay = Relay(store.outbox(), [quick, down], clock=lambda: now)
    relay.tick()
    down.trouble = ConnectionError("it is restarted just now")
    store.decide(event(1))
    relay.tick()
    state.flushall()
    store.decide(event(2))
    for _ in range(3):
        relay.tick()  # the one that is down is left alone meanwhile
    down.trouble, now = None, 100.0
    relay.tick()
    assert (quick.heard, down.heard) == (ids([1, 2]), ids([2]))
    state.delete("smap:events:hold")  # its time is up
    relay.tick()
    assert state.xlen("smap:events") == 0


def test_after_a_wipe_nothing_leaves_the_stream_before_other_relays_have_seen_it(redis_server: RedisServer):
    """They may serve other sinks, and look whether the server still knows them every 30 s."""
    store, state = redis_store(redis_server), redis_server.client(1)
    one, other, now = Ear("one"), Ear("other"), 0.0
    first, second = Relay(store.outbox(), [one]), Relay(store.outbox(), [other], clock=lambda: now)
    first.tick()
    second.tick()
    state.flushall()
    store.decide(event(1))
    for _ in range(3):
        first.tick()
    assert one.heard == ids([1])
    now = 31.0
    for _ in range(3):
        second.tick()
    assert other.heard == ids([1])
    assert 60 < state.ttl("smap:events:hold") <= 120
    state.delete("smap:events:hold")  # its time is up
    first.tick()
    assert (one.heard, state.xlen("smap:events")) == (ids([1]), 0)


def test_a_new_sink_receives_waiting_events_of_a_server_at_its_maxmemory(redis_factory: Callable[..., RedisServer]):
    """Otherwise nothing would leave the stream, and the server would stay full."""
    server = redis_factory(maxmemory_policy="noeviction")
    store, state = redis_store(server), server.client(1)
    store.decide(*numbers(1, 2))
    state.config_set("maxmemory", 1)
    with pytest.raises(OutOfMemoryError):
        store.decide(event(3))
    ear = Ear()
    assert Relay(store.outbox(), [ear]).drain(20)
    assert ear.heard == ids([1, 2])
    assert state.xlen("smap:events") == 0
    assert Relay(store.outbox(), [ear]).drain(20)  # subscribed already


def test_a_refused_event_waits_while_the_server_is_at_its_maxmemory(
    redis_factory: Callable[..., RedisServer],
):
    server = redis_factory(maxmemory_policy="noeviction")
    store, state = redis_store(server), server.client(1)
    store.decide(*numbers(1, 2))
    box, ear = store.outbox(), Ear()
    box.subscribe("ear")
    [(first, _), _] = box.waiting("ear", 10)
    state.config_set("maxmemory", 1)
    with pytest.raises(StoreFull):
        box.put_aside("ear", first, "it will never take this")
    state.config_set("maxmemory", 0)
    assert box.refused() == []
    assert box.waiting("ear", 10)[0][0] == first
    box.put_aside("ear", first, "it will never take this")
    assert Relay(box, [ear]).drain(20)
    assert (ear.heard, [one.id for one in box.refused()]) == (["e-2"], ["e-1"])


def test_an_entry_deleted_under_the_relay_is_passed_over(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    store.decide(*numbers(1, 2))
    box = store.outbox()
    box.subscribe("ear")
    box.waiting("ear", 10)
    first: Any = state.xrange("smap:events", count=1)
    state.xdel("smap:events", first[0][0])
    ear = Ear()
    assert Relay(box, [ear]).drain(20)
    assert ear.heard == ["e-2"]
    assert state.xpending("smap:events", "ear")["pending"] == 0


def test_an_entry_is_kept_until_every_sink_has_it_and_then_noted_and_removed(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    noted: list[Event] = []
    box = RedisOutbox(state, on_delivered=noted.extend)
    slow = Ear("slow", RuntimeError("down"))
    now = [0.0]
    relay = Relay(box, [slow, CallableSink("quick", lambda _: None)], clock=lambda: now[0])
    store.decide(event(1))
    for _ in range(3):
        relay.tick()
    assert (state.xlen("smap:events"), noted) == (1, [])
    slow.trouble = None
    now[0] += 100
    relay.tick()
    relay.tick()
    assert (state.xlen("smap:events"), [one.id for one in noted]) == (0, ["e-1"])


def test_delivery_continues_while_notes_of_deliveries_wait(redis_server: RedisServer):
    """It is noted in a database, which may be silent for as long as it likes."""
    store, state = redis_store(redis_server), redis_server.client(1)
    silent, asked = threading.Event(), threading.Event()
    noted: list[str] = []

    def note(found: Sequence[Event]) -> None:
        asked.set()
        silent.wait(60)
        noted.extend(one.id for one in found)

    ears = [Ear("one"), Ear("two")]
    relay = Relay(RedisOutbox(state, on_delivered=note), ears, rest=0.01)
    try:
        with relay.start():
            store.decide(event(1))
            assert asked.wait(30)
            for number in (2, 3):
                store.decide(event(number))
                eventually(lambda: [ear.heard for ear in ears] == [ids(range(1, number + 1))] * 2)  # noqa: B023 - at once
            assert (noted, state.xlen("smap:events")) == ([], 3)
            silent.set()
            eventually(lambda: state.xlen("smap:events") == 0)
            assert noted == ids([1, 2, 3])
    finally:
        silent.set()


def test_a_sink_that_subscribes_while_notes_wait_loses_no_event(
    redis_server: RedisServer,
):
    store, state = redis_store(redis_server), redis_server.client(1)
    silent, asked, noted = threading.Event(), threading.Event(), threading.Event()

    def note(_: Sequence[Event]) -> None:
        asked.set()
        silent.wait(60)

    box = RedisOutbox(state, on_delivered=note)
    relay = Relay(box, [Ear("early")])
    now = 0.0
    late = Ear("late", ConnectionError("it is restarted just now"))
    other = Relay(RedisOutbox(state, on_delivered=lambda _: noted.set()), [late], clock=lambda: now)
    try:
        store.decide(event(1))
        relay.tick()
        relay.tick()
        assert asked.is_set()
        other.tick()
        assert late.tries == 1
    finally:
        silent.set()
    eventually(lambda: not [one for one in threading.enumerate() if one.name == "headway-events-note"])
    late.trouble, now = None, 100.0
    other.tick()
    assert late.heard == ids([1])
    other.tick()
    assert noted.wait(30)
    eventually(lambda: state.xlen("smap:events") == 0)


def test_settled_entries_leave_a_stream_that_is_never_empty(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    noted: list[str] = []
    ear = Ear()
    relay = Relay(RedisOutbox(state, on_delivered=lambda found: noted.extend(one.id for one in found)), [ear])
    for number in range(1, 201):
        store.decide(event(number))
        if number % 20 == 0:
            relay.tick()
    assert ear.heard == ids(range(1, 201))
    eventually(lambda: noted[:100] == ids(range(1, 101)))
    eventually(lambda: state.xlen("smap:events") <= 100)


def test_a_round_that_finds_nothing_waits_also_for_a_note_that_the_round_before_began(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """So that a relay that ends after a whole batch has noted it."""
    monkeypatch.setattr("headway.events.store.redis.NOTING", 60.0)
    store, state = redis_store(redis_server), redis_server.client(1)
    noted: list[str] = []

    def note(found: Sequence[Event]) -> None:
        threading.Event().wait(0.3)  # a database takes its time for a hundred
        noted.extend(one.id for one in found)

    relay = Relay(RedisOutbox(state, on_delivered=note), [Ear()])
    store.decide(*numbers(*range(1, 101)))
    relay.tick()
    relay.tick()
    assert noted == ids(range(1, 101))
    assert state.xlen("smap:events") == 0


def test_many_waiting_entries_are_counted_without_reading_them_all(redis_server: RedisServer):
    store, state = redis_store(redis_server), redis_server.client(1)
    store.outbox().subscribe("ear")
    store.decide(event(1))  # the one that is read below
    pipeline = state.pipeline(transaction=False)
    for _ in range(2_499):
        pipeline.xadd("smap:events", {"x": "y"})
    pipeline.execute()
    [behind] = store.outbox().backlog()
    assert behind.waiting == 2_500
    store.outbox().waiting("nobody", 1)
    [behind] = store.outbox().backlog("ear")
    assert behind.waiting == 2_500
