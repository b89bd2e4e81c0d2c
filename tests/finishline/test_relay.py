"""The outbox stream and its relay: every sink is told at least once, with one id, whatever fails in between."""

from __future__ import annotations

import http.server
import json
import multiprocessing
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from headway.errors import Unavailable
from headway.events import (
    CallableSink,
    Event,
    EventRefused,
    LogSink,
    RedisChannelSink,
    RedisOutbox,
    Relay,
    Sink,
    WebhookSink,
)
from headway.finishline import FinishLine
from tests.finishline.conftest import OpenLine, events
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

fork = multiprocessing.get_context("fork")


def complete(line: FinishLine, *names: str) -> None:
    for name in names:
        line.create(name, total=1)
        assert line.item_done(name, 1).completed


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]], list[int]]]:
    """(address, bodies received, codes to answer with before answering 204)"""
    received: list[dict[str, Any]] = []
    codes: list[int] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            assert self.headers["Headway-Event-Id"] == body["id"]
            code = codes.pop(0) if codes else 204
            if code == 204:
                received.append(body)
            self.send_response(code)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/hook", received, codes
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.req("S0-15")
def test_a_completion_reaches_every_kind_of_sink(
    open_line: OpenLine, redis_server: RedisServer, webhook: tuple[str, list[dict[str, Any]], list[int]],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    address, received, _ = webhook
    line = open_line()
    client = redis_server.client(1)  # kept: redis-py closes the connections of a client that is collected
    listener = client.pubsub(ignore_subscribe_messages=True)
    listener.subscribe("job.completed")
    assert eventually(lambda: redis_server.client(1).pubsub_numsub("job.completed")[0][1])
    heard: list[Event] = []
    sinks: list[Sink] = [CallableSink("call", heard.append), LogSink(), WebhookSink(address),
             RedisChannelSink(line._server.client)]  # fmt: skip
    relay = line.relay(sinks)
    with caplog.at_level("INFO"):
        complete(line, "p")
        relay.tick()
    [event] = heard
    assert (event.type, event.job, event.data) == ("job.completed", "p", {"total": 1, "succeeded": 1, "failed": 0})
    assert received == [json.loads(event.as_json())]
    message: Any = eventually(lambda: listener.get_message(timeout=1))
    assert json.loads(message["data"]) == received[0]
    logged = [record.__dict__["fields"].get("eventID") for record in caplog.records]
    assert logged.count(event.id) == 1
    relay.tick()
    assert events(redis_server) == []  # told to all, so removed
    assert len(heard) == 1
    listener.close()


def test_a_relay_that_starts_late_delivers_earlier_events(open_line: OpenLine):
    line = open_line()
    complete(line, "a", "b")
    heard: list[Event] = []
    line.relay([CallableSink("late", heard.append)]).tick()
    assert [event.job for event in heard] == ["a", "b"]


def test_an_unavailable_sink_delays_no_other_sink(
    open_line: OpenLine, redis_server: RedisServer, webhook: tuple[str, list[dict[str, Any]], list[int]]
):
    address, received, codes = webhook
    codes += [500, 503]
    now = [0.0]
    line = open_line()
    heard: list[Event] = []
    outbox = RedisOutbox(line._server.client)
    relay = Relay(outbox, [WebhookSink(address), CallableSink("call", heard.append)], clock=lambda: now[0])
    complete(line, "a", "b")
    relay.tick()
    assert [event.job for event in heard] == ["a", "b"]
    assert received == []
    for _ in range(3):
        now[0] += 100
        relay.tick()
    assert [body["job"] for body in received] == ["a", "b"]
    assert len(heard) == 2
    now[0] += 100
    relay.tick()
    assert events(redis_server) == []


def test_an_event_is_kept_until_every_sink_has_it(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()

    def refuse(event: Event) -> None:
        raise Unavailable("not now")

    complete(line, "p")
    heard: list[Event] = []
    relay = line.relay([CallableSink("down", refuse), CallableSink("up", heard.append)])
    for _ in range(3):
        relay.tick()
    assert len(heard) == 1
    assert len(events(redis_server)) == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("odd", [{"job": "a\0b"}, {"id": "job.completed:p:\0"}])
def test_an_event_of_a_project_that_no_database_can_name_keeps_no_other_from_being_noted(
    odd: dict[str, str], kind: str, open_line: OpenLine, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    line = open_line(kind)
    entry = {"id": "1", "type": "job.completed", "source": "somebody", "job": "j", "version": "1", "at": "1"}
    data = {"data": '{"total": 1, "succeeded": 1, "failed": 0}'}
    client: Any = redis_server.client(1)
    client.xadd("smap:events", entry | data | odd)
    complete(line, "p")
    heard: list[str] = []
    relay = line.relay([CallableSink("listener", lambda event: heard.append(event.job))])
    relay.tick()
    assert heard[-1] == "p"
    eventually(lambda: relay.tick() and events(redis_server) == [])
    client.flushall()
    assert line.progress("p").live is False  # SQL knows that it was told
    assert "belongs to no project in SQL" in caplog.text


def test_after_a_wipe_the_relay_subscribes_again_and_goes_on(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    heard: list[str] = []
    relay = line.relay([CallableSink("listener", lambda event: heard.append(event.job))])
    complete(line, "a")
    relay.tick()
    redis_server.client().flushall()
    complete(line, "b")
    relay.tick()
    assert heard == ["a", "b"]


def test_the_relay_as_a_loop_tells_soon_and_stops_when_asked(open_line: OpenLine):
    line = open_line()
    heard: list[Event] = []
    relay = line.relay([CallableSink("listener", heard.append)], rest=0.02)
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop,))
    thread.start()
    complete(line, "p")
    eventually(lambda: heard)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()


def test_a_relay_started_while_redis_is_away_tells_when_it_is_back(open_line: OpenLine, redis_server: RedisServer):
    line = open_line()
    heard: list[Event] = []
    redis_server.stop()
    relay = line.relay([CallableSink("listener", heard.append)], rest=0.02)
    with pytest.raises(Unavailable):
        relay.tick()
    stop = threading.Event()
    thread = threading.Thread(target=relay.run, args=(stop,))
    thread.start()
    redis_server.start()
    complete(line, "p")
    eventually(lambda: heard)
    stop.set()
    thread.join(5)
    assert [event.job for event in heard] == ["p"]


@pytest.mark.parametrize("kind", ["sqlite-journal", "postgres-journal", "sqlite"])
def test_a_sink_that_is_down_makes_no_wipe_deliver_again_to_the_others(
    kind: str, open_line: OpenLine, redis_server: RedisServer
):
    line = open_line(kind)
    assert line.checkpointer is not None
    now, down = [0.0], True
    heard: dict[str, list[str]] = {"first": [], "second": [], "down": []}

    def refuse_while_down(event: Event) -> None:
        if down:
            raise Unavailable("not now")
        heard["down"].append(event.job)

    first = CallableSink("first", lambda event: heard["first"].append(event.job))
    second = CallableSink("second", lambda event: heard["second"].append(event.job))
    relay = Relay(line.outbox(), [first, second, CallableSink("down", refuse_while_down)], clock=lambda: now[0])
    projects = [f"p{number}" for number in range(6)]
    for project in projects:
        complete(line, project)
        for _ in range(2):  # the second round notes what the first one delivered
            now[0] += 100
            relay.tick()
        redis_server.client().flushall()
        line.checkpointer.tick()
    for _ in range(2):
        now[0] += 100
        relay.tick()
    assert heard == {"first": projects, "second": projects, "down": []}
    down = False
    now[0] += 100
    relay.tick()
    assert sorted(heard["down"]) == projects


def test_an_event_is_repeated_while_the_database_cannot_tell_of_its_delivery(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("postgres-journal")
    assert line.checkpointer is not None
    heard: list[str] = []

    def refuse(event: Event) -> None:
        raise Unavailable("not now")

    up, down = CallableSink("up", lambda event: heard.append(event.job)), CallableSink("down", refuse)
    relay = line.relay([up, down])
    complete(line, "p")
    relay.tick()
    relay.tick()
    redis_server.client().flushall()
    line.checkpointer.tick()
    database = line._database
    assert database is not None
    database.close()  # every query fails from here on
    relay.tick()
    assert heard == ["p", "p"]


def test_an_event_that_was_announced_again_and_refused_can_be_retried(open_line: OpenLine, redis_server: RedisServer):
    line = open_line("sqlite-journal")
    assert line.checkpointer is not None
    heard: list[str] = []
    refusing = True

    def refuse(event: Event) -> None:
        if refusing:
            raise EventRefused("not this kind")
        heard.append(event.job)

    def fail(event: Event) -> None:
        raise Unavailable("not now")

    box = line.outbox()
    relay = Relay(box, [CallableSink("refusing", refuse), CallableSink("down", fail)])
    line.create("p", total=1)
    line.item_done("p", 1)
    redis_server.client().flushall()
    line.checkpointer.tick()
    relay.tick()
    relay.tick()
    [refused] = box.refused("refusing")
    refusing = False
    box.retry(refused)
    relay.tick()
    assert heard == ["p"]


def test_deliveries_to_single_sinks_are_forgotten_once_every_sink_has_the_event(
    open_line: OpenLine, redis_server: RedisServer
):
    line = open_line("sqlite-journal")
    database = line._database
    assert database is not None
    now, down = [0.0], True

    def refuse_while_down(event: Event) -> None:
        if down:
            raise Unavailable("not now")

    up = CallableSink("up", lambda event: None)
    relay = Relay(line.outbox(), [up, CallableSink("down", refuse_while_down)], clock=lambda: now[0])
    complete(line, "p")
    relay.tick()
    eventually(lambda: relay.tick() and database.all("SELECT sink FROM project_deliveries") == [("up",)])
    down = False
    now[0] += 100
    eventually(lambda: relay.tick() and events(redis_server) == [])
    assert database.all("SELECT sink FROM project_deliveries") == []
