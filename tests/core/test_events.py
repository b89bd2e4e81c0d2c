"""Events: decided with the transaction, told at least once, each sink for itself."""

import http.server
import json
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from headway import events
from headway._sql import Tx, connect
from headway.errors import InvalidInput, Unavailable
from headway.events import CallableSink, Event, LogSink, Relay, SqlOutbox, WebhookSink, append
from headway.telemetry import metrics
from tests.core.databases import everywhere, python, shared, sqlite_url
from tests.services.postgres import PostgresServer
from tests.services.waiting import eventually


def event(number: int = 1, **data: events.Json) -> Event:
    at = datetime(2026, 11, 15, 12, 0, number, tzinfo=UTC)
    return Event(f"e-{number}", "job.completed", at, "tests", "ads", number, data or {"total": number})


def decide(tx: Tx, *numbers: int) -> None:
    for number in numbers:
        append(tx, event(number))


@everywhere
def test_an_event_is_rolled_back_with_the_transaction_that_decided_it(url: str):
    with connect(url) as database:
        outbox = SqlOutbox(database)
        outbox.subscribe("s")

        def fails(tx: Tx) -> None:
            decide(tx, 1)
            raise ValueError("after all not")

        with pytest.raises(ValueError, match="after all"):
            database.run(fails)
        assert outbox.waiting("s", 10) == []
        database.run(lambda tx: decide(tx, 1))
        assert [found.id for _, found in outbox.waiting("s", 10)] == ["e-1"]


@everywhere
def test_an_event_comes_out_as_it_went_in_and_deciding_it_again_changes_nothing(url: str):
    hostile = event(3, text="'; DROP TABLE outbox; -- \n\u2028 é 🎈", list=[1, None, {"a": True}])
    with connect(url) as database:
        outbox = SqlOutbox(database)
        outbox.subscribe("s")
        for _ in range(2):
            database.run(lambda tx: append(tx, hostile))
        ((_, found),) = outbox.waiting("s", 10)
        assert found == hostile
        assert json.loads(found.as_json())["time"] == "2026-11-15T12:00:03Z"


@everywhere
def test_a_sink_is_told_what_is_decided_after_it_subscribed_and_keeps_its_place(url: str):
    with connect(url) as database:
        outbox = SqlOutbox(database)
        database.run(lambda tx: decide(tx, 1))
        outbox.subscribe("late")
        database.run(lambda tx: decide(tx, 2))
        outbox.subscribe("late")
        assert [found.id for _, found in outbox.waiting("late", 10)] == ["e-2"]


def test_subscribing_waits_for_an_open_transaction_whose_event_has_the_lower_number(postgres_url: str):
    appended, finish = threading.Event(), threading.Event()
    with connect(postgres_url) as database:

        def slow(tx: Tx) -> None:
            decide(tx, 1)
            appended.set()
            assert finish.wait(30)

        writer = threading.Thread(target=lambda: database.run(slow))
        writer.start()
        assert appended.wait(30)
        database.run(lambda tx: decide(tx, 2))  # a higher number, committed first
        subscriber = threading.Thread(target=SqlOutbox(database).subscribe, args=("s",))
        subscriber.start()
        eventually(
            lambda: database.one("SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'outbox'::regclass"), 30
        )
        finish.set()
        writer.join(30)
        subscriber.join(30)
        # Both were decided before it subscribed: neither is skipped by accident of numbering.
        database.run(lambda tx: decide(tx, 3))
        assert [found.id for _, found in SqlOutbox(database).waiting("s", 10)] == ["e-3"]
        assert database.one("SELECT since FROM sinks WHERE name = 's'") == (2,)


@everywhere
def test_every_sink_gets_every_event_once_and_in_order(url: str):
    heard: dict[str, list[str]] = {"a": [], "b": []}
    sinks = [CallableSink(name, partial(lambda name, found: heard[name].append(found.id), name)) for name in heard]
    with connect(url) as database:
        relay = Relay(SqlOutbox(database), sinks)
        database.run(lambda tx: decide(tx, 1, 2, 3))
        assert relay.tick(limit=2) == 0.0  # more may wait
        assert relay.tick(limit=2) > 0.0
        assert relay.tick() > 0.0
        assert heard == {"a": ["e-1", "e-2", "e-3"], "b": ["e-1", "e-2", "e-3"]}
        assert Relay(SqlOutbox(database), sinks).drain(1.0)
        assert len(heard["a"]) == 3


@everywhere
def test_a_sink_that_is_down_waits_longer_each_time_and_does_not_hold_up_the_others(url: str):
    now, down, heard = [0.0], [True], []

    def fragile(found: Event) -> None:
        if down[0]:
            raise RuntimeError("down, password=hunter2")
        heard.append(found.id)

    told: list[str] = []
    failures = metrics.value("headway_event_failures", sink="fragile")
    with connect(url) as database:
        sinks = [CallableSink("fragile", fragile), CallableSink("well", lambda found: told.append(found.id))]
        relay = Relay(SqlOutbox(database), sinks, clock=lambda: now[0])
        database.run(lambda tx: decide(tx, 1))
        waits = []
        for _ in range(8):
            waits.append(relay.tick())
            now[0] += 61
        assert told == ["e-1"]
        assert metrics.value("headway_event_failures", sink="fragile") == failures + 8
        assert all(0.8 <= wait <= 1.0 for wait in waits)  # the well one wants to look again after its rest
        relay.tick()
        database.run(lambda tx: decide(tx, 2))
        now[0] += 0.01
        relay.tick()
        assert told == ["e-1", "e-2"]
        assert metrics.value("headway_event_failures", sink="fragile") == failures + 9  # left alone for 48 to 60 s
        down[0] = False
        now[0] += 61
        relay.tick()
        assert heard == ["e-1", "e-2"]


def test_two_sinks_of_one_name_are_refused(tmp_path: Path):
    with connect(sqlite_url(tmp_path / "a.db")) as database:
        sinks = [CallableSink("s", print), CallableSink("s", print)]
        with pytest.raises(InvalidInput, match="'s'"):
            Relay(SqlOutbox(database), sinks)


DELIVER = """
import os, signal, sys
from headway._sql import connect
from headway.events import CallableSink, Relay, SqlOutbox

def deliver(event):
    print(event.id, event.as_json(), flush=True)
    if sys.argv[2] == "die":
        os.kill(os.getpid(), signal.SIGKILL)

with connect(sys.argv[1]) as database:
    Relay(SqlOutbox(database), [CallableSink("s", deliver)]).tick()
"""


@shared
def test_a_relay_killed_between_telling_and_noting_tells_it_again_with_the_same_id(url: str):
    with connect(url) as database:
        SqlOutbox(database).subscribe("s")
        database.run(lambda tx: decide(tx, 1))
    heard = []
    for how, code in [("die", -signal.SIGKILL), ("die", -signal.SIGKILL), ("live", 0), ("live", 0)]:
        process = python(DELIVER, url, how)
        output, _ = process.communicate(timeout=60)
        assert process.returncode == code
        heard.append(output)
    assert heard[0] == heard[1] == heard[2]
    assert heard[0].startswith("e-1 ")
    assert heard[3] == ""


def test_a_relay_outlives_its_database(postgres_server: PostgresServer, postgres_url: str):
    heard: list[str] = []
    stop = threading.Event()
    with connect(postgres_url, stop=stop) as database:
        relay = Relay(SqlOutbox(database), [CallableSink("s", lambda found: heard.append(found.id))], rest=0.05)
        thread = threading.Thread(target=relay.run, args=(stop,))
        thread.start()
        try:
            database.run(lambda tx: decide(tx, 1))
            eventually(lambda: heard == ["e-1"], 20)
            postgres_server.stop()
            eventually(lambda: not postgres_server.running, 20)
            postgres_server.start()
            database.run(lambda tx: decide(tx, 2))
            eventually(lambda: heard == ["e-1", "e-2"], 60)
            assert thread.is_alive()
        finally:
            stop.set()
            thread.join(30)


# ---------------------------------------------------------------------------------------------------------------------
# Webhooks


class Receiver(http.server.BaseHTTPRequestHandler):
    """Answers as its server's script says: a status, or a function of the handler."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requests.append((self.path, dict(self.headers), body))  # type: ignore[attr-defined]
        answers = self.server.answers  # type: ignore[attr-defined]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if callable(answer):
            answer(self)
            return
        self.send_response(answer)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.requests.append(("GET", {}, b""))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[http.server.ThreadingHTTPServer]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.requests, server.answers = [], [204]  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def hook(server: http.server.ThreadingHTTPServer, timeout: float = 5.0) -> WebhookSink:
    return WebhookSink(f"http://127.0.0.1:{server.server_port}/hook?token=hunter2", timeout)


@pytest.mark.parametrize("status", [200, 201, 202, 204])
def test_a_webhook_gets_the_envelope_and_its_id(receiver, status: int):
    receiver.answers = [status]
    hook(receiver).deliver(event(7))
    ((path, headers, body),) = receiver.requests
    assert path == "/hook?token=hunter2"
    assert headers["Headway-Event-Id"] == "e-7"
    assert headers["Content-Type"] == "application/json"
    assert json.loads(body) == json.loads(event(7).as_json())


def _hang_up(handler: Receiver) -> None:
    handler.wfile.write(b"nonsense\r\n\r\n")
    handler.close_connection = True


@pytest.mark.parametrize("answer", [301, 302, 307, 400, 404, 500, 503, _hang_up])
def test_any_other_answer_is_not_taken_and_no_secret_is_said(receiver, answer: int | Callable[[Receiver], None]):
    receiver.answers = [answer]
    with pytest.raises(Unavailable) as caught:
        hook(receiver).deliver(event())
    assert "hunter2" not in str(caught.value)
    assert [request[0] for request in receiver.requests] == ["/hook?token=hunter2"]  # no redirect was followed


def test_a_receiver_that_does_not_answer_costs_the_timeout_and_no_more(receiver):
    release = threading.Event()
    receiver.answers = [lambda handler: release.wait(30)]
    try:
        with pytest.raises(Unavailable, match="timed out"):
            hook(receiver, timeout=0.2).deliver(event())
    finally:
        release.set()


def test_nobody_listening_is_unavailable():
    with pytest.raises(Unavailable, match="refused"):
        WebhookSink("http://127.0.0.1:9/x").deliver(event())


@pytest.mark.parametrize("url", ["", "ftp://h/x", "file:///etc/passwd", "example.org", "javascript:alert(1)"])
def test_what_is_no_web_address_is_refused(url: str):
    with pytest.raises(InvalidInput):
        WebhookSink(url)


def test_a_webhook_that_fails_twice_gets_the_event_at_the_third_try(receiver, tmp_path: Path):
    receiver.answers = [500, 503, 200]
    now = [0.0]
    with connect(sqlite_url(tmp_path / "a.db")) as database:
        relay = Relay(SqlOutbox(database), [hook(receiver), LogSink()], clock=lambda: now[0])
        database.run(lambda tx: decide(tx, 1))
        for _ in range(5):
            relay.tick()
            now[0] += 100
        assert [request[1]["Headway-Event-Id"] for request in receiver.requests] == ["e-1"] * 3
        assert "hunter2" not in str(database.all("SELECT name FROM sinks"))
