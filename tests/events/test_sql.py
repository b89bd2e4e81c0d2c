"""What is particular to the outbox in SQL."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import headway
from headway import events
from headway._sql import Database, Tx, connect
from headway.errors import ServerRefused
from headway.events import Event, Relay, SqlOutbox, append, outbox, purge
from headway.events.relay import MEASURE
from headway.ledger import ProgressManager
from tests.core.databases import everywhere
from tests.events.scene import Ear, event, ids, numbers
from tests.services.waiting import eventually


def decide(database: Database, *which: int) -> None:
    database.run(lambda tx: [append(tx, one) for one in numbers(*which)])  # type: ignore[func-returns-value]  # for its effect


@everywhere
def test_an_event_is_rolled_back_with_the_transaction_that_decided_it(url: str):
    with connect(url) as database:
        box = SqlOutbox(database)
        box.subscribe("s")

        def fails(tx: Tx) -> None:
            append(tx, event(1))
            raise ValueError("after all not")

        with pytest.raises(ValueError, match="after all"):
            database.run(fails)
        assert box.waiting("s", 10) == []
        decide(database, 1, 1)  # deciding it again changes nothing
        assert [found.id for _, found in box.waiting("s", 10)] == ["e-1"]


def open_transaction(database: Database, number: int) -> tuple[threading.Thread, threading.Event]:
    """A transaction that has decided an event and is not committed until the gate opens."""
    appended, finish = threading.Event(), threading.Event()

    def slow(tx: Tx) -> None:
        append(tx, event(number))
        appended.set()
        assert finish.wait(60)

    writer = threading.Thread(target=lambda: database.run(slow))
    writer.start()
    assert appended.wait(30)
    return writer, finish


def test_an_event_with_a_lower_number_that_is_committed_later_is_delivered(postgres_url: str):
    ear = Ear()
    with connect(postgres_url) as database:
        relay = Relay(SqlOutbox(database), [ear])
        relay.tick()
        writer, finish = open_transaction(database, 1)
        decide(database, 2)  # a higher number, committed first
        relay.tick()
        assert ear.heard == ["e-2"]
        SqlOutbox(database).tidy("ear")  # it must not pass what may yet be committed
        finish.set()
        writer.join(30)
        relay.tick()
        assert ear.heard == ["e-2", "e-1"]


def test_a_sink_that_subscribes_while_a_lower_number_is_not_committed_hears_of_it(postgres_url: str):
    ear = Ear()
    with connect(postgres_url) as database:
        long_ago = dataclasses.replace(event(9), at=datetime.now(UTC) - timedelta(days=90))
        writer, finish = open_transaction(database, 1)
        database.run(lambda tx: append(tx, long_ago))
        subscriber = threading.Thread(target=SqlOutbox(database).subscribe, args=("ear",))
        subscriber.start()
        eventually(lambda: database.one("SELECT 1 FROM pg_locks WHERE NOT granted AND locktype = 'advisory'"), 30)
        finish.set()
        writer.join(30)
        subscriber.join(30)
        Relay(SqlOutbox(database), [ear]).tick()
        assert "e-1" in ear.heard


@everywhere
def test_a_new_sink_receives_the_events_of_the_last_thirty_days(url: str):
    ear = Ear()
    ages = {1: 31, 2: 29, 3: 400, 4: 0}  # days; the third happened long ago and was decided after the second
    with connect(url) as database:
        for number, days in ages.items():
            at = datetime.now(UTC) - timedelta(days=days)
            one = dataclasses.replace(event(number), at=at)
            database.run(lambda tx, one=one: append(tx, one))  # type: ignore[misc]  # a loop variable
        Relay(SqlOutbox(database), [ear]).tick()
    assert ear.heard == ids([2, 3, 4])
    assert outbox.HISTORY == 30 * 86_400


@everywhere
def test_tidying_removes_settled_deliveries_and_loses_nothing(url: str):
    ear = Ear()
    ear.refuses = {"e-3"}
    now = [0.0]
    with connect(url) as database:
        relay = Relay(SqlOutbox(database), [ear], clock=lambda: now[0])
        decide(database, 1, 2, 3, 4)
        for _ in range(6):
            relay.tick()
            now[0] += 100
        assert ear.heard == ids([1, 2, 4])
        SqlOutbox(database).tidy("ear")
        assert database.all("SELECT seq FROM deliveries ORDER BY seq") == [(3,), (4,)]
        decide(database, 5)
        ear.refuses = set()
        [found] = SqlOutbox(database).refused("ear")
        SqlOutbox(database).retry(found)
        relay.tick()
        assert ear.heard == ids([1, 2, 4, 3, 5])
        SqlOutbox(database).tidy("ear")
        assert database.all("SELECT seq FROM deliveries") == []
        relay.tick()
        assert len(ear.heard) == 5


def test_a_relay_tidies_by_itself_after_many_deliveries(tmp_path: Path):
    ear = Ear()
    with connect(f"sqlite:///{tmp_path}/e.db") as database:
        decide(database, *range(1, 151))
        Relay(SqlOutbox(database), [ear]).tick()
        assert len(ear.heard) == 100, "and 50 wait: it does not put that off until it has caught up"
        assert database.one("SELECT count(*) FROM deliveries") == (0,)


@everywhere
def test_purging_keeps_events_that_wait_for_a_sink(url: str):
    long_ago = datetime.now(UTC) - timedelta(days=20)
    with connect(url) as database:
        box = SqlOutbox(database)
        box.subscribe("down")
        box.subscribe("of one job", "mine")
        for number, job in ((1, "other"), (2, "mine"), (3, "other")):
            one = dataclasses.replace(event(number, job), at=long_ago)
            database.run(lambda tx, one=one: append(tx, one))  # type: ignore[misc]  # a loop variable
        limit = long_ago.timestamp() + 60

        def left() -> list[str]:
            return [id for (id,) in database.all("SELECT id FROM outbox ORDER BY seq")]

        database.run(lambda tx: purge(tx, limit))
        assert left() == ids([1, 2, 3])
        box.delivered("down", ["e-1"])
        box.put_aside("down", "e-2", "never")
        database.run(lambda tx: purge(tx, limit))
        assert left() == ids([2, 3])  # the sink of another job does not hold the first one back
        box.delivered("of one job", ["e-2"])
        database.run(lambda tx: purge(tx, limit))
        assert left() == ["e-3"]
        assert [one.sink for one in box.backlog()] == ["down", "of one job"]
        database.run(lambda tx: purge(tx, datetime.now(UTC).timestamp() + 60))
        assert [one.sink for one in box.backlog()] == ["down"]  # its job has no event left


def test_an_event_of_an_outsider_that_no_database_can_hold_costs_only_itself(postgres_url: str, caplog):
    """PostgreSQL has no NUL in a text."""
    bad = dataclasses.replace(event(2), job="j\0")
    ear = Ear()
    with connect(postgres_url) as database:
        with caplog.at_level("ERROR"):
            events.append_all(database, [event(1), bad, event(3)])
        Relay(SqlOutbox(database), [ear]).tick()
    assert ear.heard == ids([1, 3])
    assert len(caplog.records) == 1


# ---- who decides ------------------------------------------------------------------------------------------------------


def test_on_complete_receives_events_of_its_own_job_only(tmp_path: Path):
    database = f"sqlite:///{tmp_path}/headway.db"
    with ProgressManager(tmp_path / "headway.db") as progress:
        progress.register([0])
        progress.mark_done(0)
    heard: dict[str, list[Event]] = {"a": [], "b": []}
    for job, told in heard.items():
        headway.map(abs, [1], job=job, database=database, progress="none", on_complete=told.append)
    assert {job: [found.job for found in told] for job, told in heard.items()} == {"a": ["a"], "b": ["b"]}


def test_on_complete_hears_of_a_completion_that_was_decided_before_anybody_asked(tmp_path: Path):
    """By an earlier process that died before it told anybody, or that had nobody to tell."""
    database = f"sqlite:///{tmp_path}/headway.db"
    with headway.open_job("ads", [1], database=database) as job:
        for item in job.remaining():
            with item:
                pass
    heard: list[Event] = []
    for _ in range(2):
        headway.map(abs, [1], job="ads", database=database, progress="none", on_complete=heard.append)
    assert [(found.job, found.data) for found in heard] == [("ads", {"total": 1, "succeeded": 1, "failed": 0})]


def test_the_completion_of_an_open_job_reaches_the_configured_sinks(
    tmp_path: Path, receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_SINKS", receiver.url)
    with ProgressManager(tmp_path / "headway.db") as progress:
        progress.register([0])
        progress.mark_done(0)
    with headway.open_job("opened", [1], database=f"sqlite:///{tmp_path}/headway.db") as job:
        assert receiver.requests == []
        for item in job.remaining():
            with item:
                pass
    jobs = [Event.from_json(body).job for _, _, body in receiver.requests]
    assert jobs == ["progress", "opened"]  # and that of the progress manager, which tells nobody by itself


def test_a_sink_of_the_settings_that_cannot_be_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HEADWAY_SINKS", "smtp://host")
    with pytest.raises(headway.HeadwayError, match="not the address of a sink"):
        headway.map(abs, [1], job="ads", database=f"sqlite:///{tmp_path}/headway.db", progress="none")
    assert not (tmp_path / "headway.db").exists()


def test_on_complete_is_called_in_the_thread_of_its_program_and_keeps_no_sink_waiting(
    tmp_path: Path, receiver, monkeypatch: pytest.MonkeyPatch
):
    """A database connection, an event loop, a window: what it uses may belong to that thread."""
    monkeypatch.setenv("HEADWAY_SINKS", receiver.url)
    threads: list[threading.Thread] = []

    def note(_: Event) -> None:
        threads.append(threading.current_thread())
        eventually(lambda: len(receiver.requests) == 1, 60)  # the webhook is told meanwhile

    headway.map(abs, [1], job="ads", database=f"sqlite:///{tmp_path}/h.db", progress="none", on_complete=note)
    assert threads == [threading.current_thread()]


def test_an_on_complete_that_fails_is_called_again_in_a_moment_and_at_the_next_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from headway.run import session as performing

    monkeypatch.setattr(performing, "DELIVERY_SECONDS", 0.1)
    calls: list[str] = []

    def fail(found: Event) -> None:
        calls.append(found.id)
        raise RuntimeError("not today")

    heard: list[str] = []
    for call in (fail, lambda found: heard.append(found.id), lambda found: heard.append(found.id)):
        result = headway.map(
            abs, [1], job="ads", database=f"sqlite:///{tmp_path}/h.db", progress="none", on_complete=call
        )  # fmt: skip
        assert result.done == 1
    assert heard == calls[:1]


def put_back(database: Database, last: int) -> None:
    """Leave the events up to number ``last``, and the numbers that follow it free: as a restored backup does."""

    def work(tx: Tx) -> None:
        tx.execute("DELETE FROM outbox WHERE seq > ?", (last,))
        if tx.engine == "sqlite":
            tx.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'outbox'", (last,))
        else:
            tx.execute("SELECT setval(pg_get_serial_sequence('outbox', 'seq'), ?, false)", (last + 1,))

    database.run(work)


@everywhere
@pytest.mark.parametrize("refuses", [False, True])
def test_an_event_that_got_the_number_of_a_delivered_one_after_a_restore_is_delivered(url: str, refuses: bool):
    ear = Ear()

    def tell(found: Event) -> None:
        if found.id == "e-2" and ear.heard == ids([1]):
            ear.heard.append(found.id)
            put_back(
                database, 1
            )  # while the sink took it: what is noted afterwards is not about the event of that number
            decide(database, 3)
            if refuses:
                raise ServerRefused("never")
            return
        ear.deliver(found)

    with connect(url) as database:
        decide(database, 1, 2)
        relay = Relay(SqlOutbox(database), [events.CallableSink("ear", tell)], clock=lambda: now)
        for now in (0.0, 100.0, 200.0):  # noqa: B007  # the clock's
            relay.tick()
        assert ear.heard == ids([1, 2, 3])


@everywhere
def test_a_relay_continues_after_a_restore_to_before_its_sink_was_known(url: str):
    ear, now = Ear(), 0.0
    with connect(url) as database:
        relay = Relay(SqlOutbox(database), [ear], clock=lambda: now)
        decide(database, 1)
        relay.tick()
        assert ear.heard == ids([1])
        database.run(lambda tx: tx.execute("DELETE FROM sinks"))
        put_back(database, 0)
        decide(database, 2)
        now += MEASURE
        relay.tick()
        relay.tick()
        assert ear.heard == ids([1, 2])
