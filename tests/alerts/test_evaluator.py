"""The evaluator: one of many judges, a change is told once whatever dies, and what is unknown is not well."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import pytest

import headway.alerts
from headway._lease import Owner, SqlLeases, write_owner
from headway._sql import Database, connect
from headway.alerts import Change, Evaluator, Rules
from headway.alerts.evaluator import LEASE, LEASE_NAME
from headway.alerts.judgement import GAP, OPENINGS
from headway.alerts.store.alerts import closed_alerts, open_alerts
from headway.errors import StaleClaim
from headway.events import CallableSink, Event, Relay, SqlOutbox, schema
from headway.ledger import Ledger, NewItem
from headway.queue.task_queue import TaskQueue
from tests.alerts.conftest import Scene, rules
from tests.events.validator import problems

OPENED, CLOSED = "alert.opened", "alert.closed"
NOW = rules(open_after=0, close_after=0, backlog=1)


def test_two_evaluators_tell_once_and_the_other_takes_over_when_the_first_gives_up(scene: Scene, queue: TaskQueue):
    first, second = scene.evaluator(rules=NOW), scene.evaluator(rules=NOW)
    queue.submit("caption", 1, id="t")
    for _ in range(3):
        scene.pass_time(first, 10)
        scene.pass_time(second, 10)
    assert (first.active, second.active) == (True, False)
    first.close()
    queue.cancel("t")
    scene.pass_time(second, 10)
    assert second.active
    assert scene.events() == [(OPENED, "backlog", "normal"), (CLOSED, "backlog", "normal")]


def test_many_evaluators_at_the_same_moment_tell_once(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    evaluators = [scene.evaluator(rules=NOW) for _ in range(6)]
    together = threading.Barrier(len(evaluators))

    def work(evaluator: Evaluator) -> None:
        together.wait(60)
        for _ in range(3):
            evaluator.tick()

    threads = [threading.Thread(target=work, args=(evaluator,)) for evaluator in evaluators]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [evaluator.active for evaluator in evaluators].count(True) == 1
    assert scene.events() == [(OPENED, "backlog", "normal")]


def test_an_evaluator_replaced_while_suspended_writes_nothing(scene: Scene, queue: TaskQueue):
    sleeper, other = scene.evaluator(rules=NOW), scene.evaluator(rules=NOW)
    sleeper.tick()
    # Its lease ends as it would have by the clock; the other takes it.
    scene.store.run(lambda tx: tx.execute("UPDATE leases SET holder = NULL, lease_until = NULL WHERE name = 'alerts'"))
    other.tick()
    queue.submit("caption", 1, id="t")
    sleeper.tick()
    assert not sleeper.active
    assert scene.events() == []
    other.tick()
    assert scene.events() == [(OPENED, "backlog", "normal")]


def test_it_continues_after_a_restore_to_before_the_first_round(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    evaluator.tick()
    scene.store.write("DELETE FROM leases")
    queue.submit("caption", 1, id="t")
    evaluator.tick()
    evaluator.tick()
    assert scene.events() == [(OPENED, "backlog", "normal")]


def test_a_clock_that_was_set_back_delays_the_successor_of_an_evaluator_on_a_dead_machine_by_a_lease(scene: Scene):
    far = replace(Owner.current(), host="far", machine="far", space="far")
    scene.store.run(lambda tx: SqlLeases().acquire(tx, LEASE_NAME, far, LEASE))
    evaluator = scene.evaluator(rules=NOW)
    for step, active in ((-3600.0, False), (LEASE - 2, False), (3.0, True)):
        scene.store.write("UPDATE leases SET lease_until = lease_until - ?", (step,))
        evaluator.tick()
        assert evaluator.active is active


def test_a_job_whose_machine_died_is_found_in_time_although_the_clock_was_set_back(scene: Scene):
    ledger = Ledger(scene.store)
    job = ledger.create("ads")
    job.register([NewItem(0)])
    ledger.hold(job, {}, lease=25.0)
    far = replace(Owner.current(), host="far", machine="far", space="far")
    scene.store.write("UPDATE jobs SET holder = ?", (write_owner(far, 25.0),))
    evaluator = scene.evaluator(rules=rules(open_after=0.0, stalled_job=3600.0))
    for step, found in ((-7200.0, []), (24.0, []), (2.0, [("stalled_job", "ads")])):
        scene.store.write("UPDATE jobs SET lease_until = lease_until - ?", (step,))
        evaluator.tick()
        assert scene.open() == found


def test_timers_outlive_the_evaluator_that_began_them(scene: Scene, queue: TaskQueue):
    given = rules(backlog=1)
    queue.submit("caption", 1, id="t")
    for _ in range(7):
        evaluator = scene.evaluator(rules=given)
        scene.pass_time(evaluator, 10)
        evaluator.close()
    assert scene.open() == [("backlog", "normal")]


def test_a_value_without_readings_in_between_restarts_its_timer(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(backlog=1))
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 10)
    scene.now += GAP + 1
    evaluator.tick(at=scene.now)
    assert scene.open() == []
    scene.pass_time(evaluator, 60)
    assert scene.open() == [("backlog", "normal")]


@pytest.mark.parametrize("step", [-3600.0, -30.0])
def test_a_clock_that_is_set_back_opens_and_closes_nothing_early(scene: Scene, queue: TaskQueue, step: float):
    evaluator = scene.evaluator(rules=rules(backlog=1))
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 50)
    scene.now += step
    evaluator.tick(at=scene.now)
    assert scene.open() == []
    scene.pass_time(evaluator, 60)
    assert scene.open() == [("backlog", "normal")]
    queue.cancel("t")
    scene.now += step
    scene.pass_time(evaluator, 130)
    (alert,) = scene.alerts()
    assert alert.closed_at is not None
    assert alert.closed_at >= alert.opened_at


def test_the_events_are_as_their_schemas_say_and_reach_a_sink_once(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 10)
    queue.cancel("t")
    scene.pass_time(evaluator, 30)
    heard: list[Event] = []
    with Relay([SqlOutbox(scene.store)], [CallableSink("test", heard.append)]).start() as relay:
        assert relay.drain(60)
    found = [event for event in heard if event.source == "headway.alerts"]
    assert [event.type for event in found] == [OPENED, CLOSED]
    for event in found:
        assert list(problems(json.loads(event.as_json()), schema(event.type))) == []
    assert found[1].data["seconds"] == pytest.approx(10.0)
    assert len({event.id for event in found}) == 2


def test_a_round_takes_few_statements_however_much_there_is(
    scene: Scene, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    evaluator = scene.evaluator()
    counts = []
    for more in (2, 40):
        for number in range(more):
            queue.submit("caption", 1, id=f"t{more}-{number}")
        evaluator.tick()
        with Counting(scene.store) as counting:
            evaluator.tick()
        counts.append(len(counting.statements))
    assert counts[0] == counts[1]
    assert counts[0] <= 19, counting.statements


class Counting:
    """The statements that this thread's code sends, by what Python calls."""

    def __init__(self, store: Database) -> None:
        self.statements: list[str] = []

    def __enter__(self) -> Self:
        sys.setprofile(self._look)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        sends = code.co_name in ("execute", "executemany", "insert", "one", "all")
        if event == "call" and sends and code.co_filename.endswith("_sql/tx.py"):
            self.statements.append(str(frame.f_locals.get("sql"))[:60])


def test_many_alerts_open_over_several_rounds_and_none_is_lost(scene: Scene):
    count = OPENINGS + 20

    def storm(tx: Any) -> None:
        for number in range(count):
            tx.execute(
                "INSERT INTO task_causes (kind, type, message, frame, count, first_seen, last_seen) "
                "VALUES ('caption', 'ValueError', ?, '', 1, ?, ?)",
                (f"cause {number}", scene.now - 1000, scene.now - 1000),
            )

    scene.store.run(storm)
    evaluator = scene.evaluator(rules=rules(new_cause=3600))
    scene.pass_time(evaluator, 10)
    assert len(scene.events()) == OPENINGS
    scene.now += 10_000  # and the rest waits however long it takes
    scene.pass_time(evaluator, 10)
    opened = [subject for type, _, subject in scene.events() if type == OPENED]
    assert len(opened) == len(set(opened)) == count


@pytest.mark.parametrize("database_url", ["file"], indirect=True)  # PostgreSQL keeps no text in a column of numbers
def test_a_rule_that_meets_an_odd_row_is_unknown_and_the_others_are_judged(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    scene.store.run(
        lambda tx: tx.execute(
            "INSERT INTO task_workers (name, owner, host, pid, queues, version, state, started_at, seen_at) "
            "VALUES ('w', '{', 'h', 1, 'low', '1', 'idle', 0, 'yesterday')"
        )
    )
    scene.pass_time(scene.evaluator(rules=rules(open_after=0, backlog=1, worker_lost=30)), 10)
    assert scene.open() == [("backlog", "normal")]
    judged = {name for (name,) in scene.store.all("SELECT name FROM alert_rules")}
    assert "backlog" in judged
    assert "worker_lost" not in judged


def test_closed_alerts_are_deleted_when_they_are_old(scene: Scene, queue: TaskQueue):
    given = Rules(limits={"backlog": 1}, open_after=0, close_after=0, kept=86_400.0)
    evaluator = scene.evaluator(rules=given)
    queue.submit("caption", 1, id="t")
    scene.pass_time(evaluator, 10)
    queue.cancel("t")
    scene.pass_time(evaluator, 10)
    evaluator.close()
    scene.now += 86_500
    scene.pass_time(scene.evaluator(rules=given), 10)
    assert scene.alerts() == []


def test_run_judges_until_it_is_stopped_and_gives_its_lease_back(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    stop, heard = threading.Event(), []

    def hear(change: Change) -> None:
        heard.append((change.change, change.alert.rule))
        stop.set()

    scene.evaluator(rules=NOW, on_change=hear).run(stop)
    assert heard == [("opened", "backlog")]
    assert scene.store.all("SELECT holder FROM leases WHERE name = 'alerts'") == [(None,)]


def test_run_continues_after_a_failed_round(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/a.db") as store:
        stop = threading.Event()
        failing = iter([True])

        def given() -> Rules:
            if next(failing, False):
                raise StaleClaim("a round that fails")
            stop.set()
            return NOW

        evaluator = Evaluator(store, given)
        evaluator.run(stop)
        assert store.one("SELECT count(*) FROM alert_rules") != (0,)


def test_an_on_change_callback_that_raises_is_ignored(scene: Scene, queue: TaskQueue):
    def fall(_: Change) -> None:
        raise RuntimeError("no terminal")

    queue.submit("caption", 1, id="t")
    scene.evaluator(rules=NOW, on_change=fall).tick()
    assert scene.events() == [(OPENED, "backlog", "normal")]


@pytest.mark.parametrize("database_url", ["file"], indirect=True)
def test_a_forked_child_neither_uses_nor_gives_back_its_parents_lease(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=NOW)
    evaluator.tick()
    child = os.fork()
    if child == 0:
        evaluator.tick()
        judges = evaluator.active
        evaluator.close()
        os._exit(3 if judges else 0)
    assert os.waitpid(child, 0)[1] == 0
    queue.submit("caption", 1, id="t")
    evaluator.tick()
    assert evaluator.active
    assert scene.events() == [(OPENED, "backlog", "normal")]


# ---- killed ---------------------------------------------------------------------------------------------------------

_HERE = str(Path(headway.alerts.__file__).parent)


def _die_at(line: int) -> None:
    """Kill this process when it comes to the so-many-th line of the package."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(_HERE):
            return None
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def _rounds(url: str, at: float, *, die_at: int | None) -> bool:
    """One evaluator in a process of its own, killed at a line; whether it lived to its end."""
    child = os.fork()
    if child == 0:
        try:
            with connect(url) as store:
                evaluator = Evaluator(store, NOW)
                if die_at is not None:
                    _die_at(die_at)
                evaluator.tick(at=at)
        finally:
            sys.settrace(None)
            os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def _killed_everywhere(tmp_path: Path, step: int) -> int:
    """Opening and closing, each killed at every so-many-th line, each finished by somebody else."""
    line, kills = 1, 0
    over = [False, False]
    while not all(over):
        url = f"sqlite:///{tmp_path}/kill{line}.db"
        with connect(url) as store, TaskQueue(store, per_user=None) as queue:
            queue.handler("caption", isolation="none")(lambda task, payload: payload)
            queue.submit("caption", 1, id="t")
            at = store.now() + 1
        over[0] = _rounds(url, at, die_at=line)
        assert _rounds(url, at + 10, die_at=None)
        with connect(url) as store, TaskQueue(store, per_user=None) as queue:
            queue.cancel("t")
        over[1] = _rounds(url, at + 20, die_at=line)
        assert _rounds(url, at + 30, die_at=None)
        with connect(url) as store:
            told = store.all("SELECT type FROM outbox WHERE type LIKE 'alert.%' ORDER BY seq")
            with store.read() as tx:
                assert (len(open_alerts(tx)), len(closed_alerts(tx, 10))) == (0, 1), line
        assert told == [(OPENED,), (CLOSED,)], line
        kills += over.count(False)
        line += step
    return kills


def test_killed_between_any_two_lines_nothing_is_lost_or_repeated(tmp_path: Path):
    assert _killed_everywhere(tmp_path, step=67) >= 6


@pytest.mark.faults
@pytest.mark.timeout(1200)  # hundreds of databases and processes, on a machine that may be busy
def test_killed_at_many_more_lines_nothing_is_lost_or_repeated(tmp_path: Path):
    assert _killed_everywhere(tmp_path, step=5) >= 100
