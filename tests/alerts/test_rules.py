"""Each rule, on work that was really done through the public API. Time is a parameter: nobody waits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime

import pytest

import headway
from headway._sql import Database, connect
from headway.alerts import RULES, Evaluator, Rules
from headway.cli.services.alerts import RULE_NAMES
from headway.config import Config
from headway.core.retry import RetryPolicy
from headway.errors import ConfigError, HeadwayError
from headway.events import Event, SqlOutbox, append
from headway.ledger import Ledger, NewItem
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.alerts.conftest import Scene, rules
from tests.queue.nursery import Forked
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

OPENED, CLOSED = "alert.opened", "alert.closed"


def fails(item: object) -> object:
    raise ValueError(f"no image in {item}")


@pytest.mark.req("S2-40")
def test_a_backlog_alert_opens_and_closes_after_a_delay(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(backlog=5))
    for number in range(5):
        queue.submit("caption", 1, id=f"t{number}")
    scene.pass_time(evaluator, 60)
    assert scene.open() == []  # seen for the first time 50 s ago
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("backlog", "normal")]
    queue.cancel("t0")
    scene.pass_time(evaluator, 200)
    assert scene.open() == [("backlog", "normal")]  # 4 is below 5, and not below 80 % of it
    queue.cancel("t1")
    scene.pass_time(evaluator, 120)
    assert scene.open() == [("backlog", "normal")]
    scene.pass_time(evaluator, 10)
    assert scene.open() == []
    assert scene.events() == [(OPENED, "backlog", "normal"), (CLOSED, "backlog", "normal")]


def test_a_fluctuating_value_opens_no_alert(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(backlog=1))
    for number in range(4):
        queue.submit("caption", 1, id=f"t{number}")
        scene.pass_time(evaluator, 50)
        queue.cancel(f"t{number}")
        scene.pass_time(evaluator, 10)
    assert scene.events() == []
    queue.submit("caption", 1, id="stays")
    scene.pass_time(evaluator, 70)
    for number in range(4):  # and once it is open, going for a moment closes nothing
        queue.cancel("stays" if number == 0 else f"more{number - 1}")
        scene.pass_time(evaluator, 100)
        queue.submit("caption", 1, id=f"more{number}")
        scene.pass_time(evaluator, 20)
    assert scene.events() == [(OPENED, "backlog", "normal")]


@pytest.mark.req("S2-40")
def test_a_long_wait_is_an_alert_unless_the_queue_is_paused(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, delay=300))
    queue.submit("caption", 1, id="slow", priority="low")
    queue.pause("low", reason="upgrade", by="anna")
    scene.now += 290
    scene.pass_time(evaluator, 20)
    assert scene.open() == []
    queue.resume("low")
    scene.pass_time(evaluator, 1)
    assert scene.open() == [("delay", "low")]
    assert "waited for 5 min" in scene.alerts()[0].text


def test_a_delayed_task_does_not_count_as_waiting(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(open_after=0, delay=60, backlog=1))
    queue.submit("caption", 1, id="later", delay=86_400.0)
    scene.pass_time(evaluator, 100)
    assert scene.open() == []


def test_many_failures_of_a_kind_of_task_are_a_spike_and_few_runs_are_none(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, failure_spike=0.2))
    for number in range(19):
        queue.submit("caption", 0 if number < 4 else 1, id=f"t{number}")
    Worker(queue).run(burst=True)
    scene.pass_time(evaluator, 1)
    assert scene.open() == []
    queue.submit("caption", 1, id="twentieth")
    Worker(queue).run(burst=True)
    scene.pass_time(evaluator, 1)
    assert scene.open() == [("failure_spike", "task caption")]
    assert "4 of 20 runs of task caption failed" in scene.alerts()[0].text
    scene.pass_time(evaluator, 400)  # the window has moved on
    assert scene.open() == []


def test_many_failures_of_a_job_are_a_spike(scene: Scene):
    evaluator = scene.evaluator(rules=rules(open_after=0, failure_spike=0.5))
    headway.map(fails, range(20), job="ads", database=scene.url, mode="thread", workers=2, retries=0)
    scene.pass_time(evaluator, 1)
    assert scene.open() == [("failure_spike", "job ads")]
    scene.pass_time(evaluator, 50)
    headway.map(str, range(100), job="fine", database=scene.url, mode="thread", workers=2)
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("failure_spike", "job ads")]


def test_a_new_cause_is_reported_once_over_all_jobs(scene: Scene, queue: TaskQueue):
    evaluator = scene.evaluator(rules=rules(new_cause=200))
    headway.map(fails, [1, 2, 3], job="monday", database=scene.url, mode="thread", workers=1, retries=0)
    scene.pass_time(evaluator, 1)
    (alert,) = scene.alerts()
    assert "ValueError: no image in" in alert.text
    scene.pass_time(evaluator, 210)
    assert scene.open() == []
    headway.map(fails, [4, 5], job="tuesday", database=scene.url, mode="thread", workers=1, retries=0)
    scene.pass_time(evaluator, 10)
    assert len(scene.alerts()) == 1
    queue.submit("caption", 0, id="t")
    Worker(queue).run(burst=True)
    scene.pass_time(evaluator, 10)
    assert [alert.text.split(" at ")[0] for alert in scene.alerts()[1:]] == [
        "New in task caption: ZeroDivisionError: division by zero"
    ]
    assert [type for type, *_ in scene.events()] == [OPENED, CLOSED, OPENED]


def test_causes_without_an_evaluator_are_reported_afterwards(scene: Scene):
    first = scene.evaluator(rules=rules(new_cause=600))
    scene.pass_time(first, 1)
    first.close()
    headway.map(fails, [1], job="night", database=scene.url, mode="thread", workers=1, retries=0)
    scene.now += 40_000
    scene.pass_time(scene.evaluator(rules=rules(new_cause=600)), 1)
    assert [type for type, *_ in scene.events()] == [OPENED]


def test_a_job_that_is_held_and_records_nothing_is_stalled_until_it_records(scene: Scene):
    evaluator = scene.evaluator(rules=rules(close_after=0, stalled_job=900))
    with headway.open_job("ads", ["a", "b"], database=scene.url) as job:
        remaining = job.remaining()
        with next(remaining):
            pass
        scene.now += 880
        scene.pass_time(evaluator, 10)
        assert scene.open() == []
        scene.pass_time(evaluator, 20)
        assert scene.open() == [("stalled_job", "ads")]
        scene.now = scene.store.now()
        with next(remaining):
            pass
    scene.pass_time(evaluator, 10)
    assert scene.open() == []


@pytest.mark.parametrize("ending", ["finished", "interrupted", "never begun"])
def test_a_finished_or_interrupted_job_is_never_stalled(scene: Scene, ending: str):
    evaluator = scene.evaluator(rules=rules(open_after=0, stalled_job=60))
    if ending == "never begun":
        headway.open_job("ads", ["a", "b"], database=scene.url).close()
    else:
        with headway.open_job("ads", ["a", "b"], database=scene.url) as job:
            for item in job.remaining():
                with item:
                    pass
                if ending == "interrupted":
                    break
    scene.pass_time(evaluator, 200)
    assert scene.alerts() == []


def test_a_paused_run_is_not_stalled(scene: Scene):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, stalled_job=60))
    with Ledger.open(scene.url) as ledger:
        job = ledger.create("ads")
        job.register([NewItem(n, "1") for n in range(3)])
        hold = ledger.hold(job, {"mode": "process"})
        try:
            job.pause(actor="ada")
            scene.pass_time(evaluator, 200)
            assert scene.open() == []
            job.resume(actor="ada")
            scene.pass_time(evaluator, 10)
            assert scene.open() == [("stalled_job", "ads")]
        finally:
            ledger.release(hold, "interrupted")


def test_a_job_whose_process_died_is_stalled_until_it_is_resumed(scene: Scene):
    evaluator = scene.evaluator(rules=rules(close_after=0, stalled_job=900))
    _hold_and_die(scene.url)
    scene.pass_time(evaluator, 60)
    assert scene.open() == []  # a supervisor gets the time to continue it
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("stalled_job", "ads")]
    assert "died while running it" in scene.alerts()[0].text
    with headway.open_job("ads", ["a", "b"], database=scene.url):
        scene.pass_time(evaluator, 10)
        assert scene.open() == []


def _hold_and_die(url: str) -> None:
    child = os.fork()
    if child == 0:
        headway.open_job("ads", ["a", "b"], database=url)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


def workers(store: Database) -> int:
    rows = store.all("SELECT name FROM task_workers WHERE ended_at IS NULL")
    return len(rows)


def start(scene: Scene, spawn: Callable[[str], Forked], name: str) -> Forked:
    """A worker that has said that it is there."""
    before = workers(scene.store)
    child = spawn(name)
    eventually(lambda: workers(scene.store) == before + 1)
    return child


def start_another(scene: Scene, spawn: Callable[[str], Forked], name: str) -> Forked:
    """Start a worker while others end, and wait for its first heartbeat."""
    child = spawn(name)
    eventually(lambda: scene.store.all("SELECT 1 FROM task_workers WHERE pid = ?", (child.pid,)))
    return child


@pytest.mark.req("S2-40")
def test_a_killed_worker_is_lost_until_another_takes_its_place(scene: Scene, spawn: Callable[[str], Forked]):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, worker_lost=30))
    killed = start(scene, spawn, "first")
    evaluator.tick()
    assert scene.open() == []
    killed.kill()
    eventually(lambda: evaluator.tick() and scene.open())
    ((rule, name),) = scene.open()
    assert (rule, name.split(".")[0]) == ("worker_lost", "first")
    start(scene, spawn, "second")
    evaluator.tick()
    assert scene.open() == []


def test_a_worker_that_says_nothing_is_lost_after_its_time_wherever_it_runs(
    scene: Scene, spawn: Callable[[str], Forked]
):
    evaluator = scene.evaluator(rules=rules(worker_lost=30))
    start(scene, spawn, "silent")
    evaluator.tick()
    assert scene.open() == []
    evaluator.tick(at=scene.store.now() + 60)
    assert [rule for rule, _ in scene.open()] == ["worker_lost"]


def test_one_new_worker_replaces_one_lost_worker_only(scene: Scene, spawn: Callable[[str], Forked]):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, worker_lost=30))
    children = [start(scene, spawn, "first"), start(scene, spawn, "second")]
    # Both are known to have lived at the same time.
    eventually(lambda: scene.store.all("SELECT min(seen_at) > max(started_at) FROM task_workers")[0][0])
    for child in children:
        child.kill()
    eventually(lambda: evaluator.tick() and len(scene.open()) == 2)
    start(scene, spawn, "third")
    evaluator.tick()
    assert [rule for rule, _ in scene.open()] == ["worker_lost"]


@pytest.mark.parametrize("how", ["terminate", "kill"])
@pytest.mark.parametrize("evaluated", ["before the new worker starts", "after the new worker started"])
def test_a_replaced_worker_stays_replaced_after_its_replacement_ended(
    scene: Scene, spawn: Callable[[str], Forked], evaluated: str, how: str
):
    start(scene, spawn, "first").kill()
    second = start_another(scene, spawn, "second")
    before = scene.evaluator(rules=rules(open_after=0, close_after=0, worker_lost=30))
    before.tick()
    assert scene.open() == []
    before.close()
    getattr(second, how)()
    second.wait()
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, worker_lost=30))
    if evaluated == "before the new worker starts":
        evaluator.tick()
        assert [name.split(".")[0] for _, name in scene.open()] == (["second"] if how == "kill" else [])
    start_another(scene, spawn, "third")
    evaluator.tick()
    assert scene.open() == []
    assert not any(alert.subject.startswith("first") for alert in scene.alerts())


def test_a_restart_of_one_machine_does_not_hide_that_another_one_died(scene: Scene, spawn: Callable[[str], Forked]):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, worker_lost=30))
    dead, restarted = start(scene, spawn, "dead"), start(scene, spawn, "restarted")
    eventually(lambda: scene.store.all("SELECT min(seen_at) > max(started_at) FROM task_workers")[0][0])
    dead.kill()
    restarted.terminate()
    restarted.wait()
    start_another(scene, spawn, "new")
    evaluator.tick()
    assert [(rule, name.split(".")[0]) for rule, name in scene.open()] == [("worker_lost", "dead")]
    start_another(scene, spawn, "newer")
    evaluator.tick()
    assert scene.open() == []


def test_a_worker_that_was_lost_after_its_first_heartbeat_does_not_replace_itself(
    scene: Scene, spawn: Callable[[str], Forked]
):
    start(scene, spawn, "first").kill()
    scene.store.run(lambda tx: tx.execute("UPDATE task_workers SET seen_at = started_at"))
    scene.evaluator(rules=rules(open_after=0, worker_lost=30)).tick()
    assert [rule for rule, _ in scene.open()] == ["worker_lost"]


def test_a_worker_that_was_asked_to_exit_is_never_lost(scene: Scene, queue: TaskQueue, spawn: Callable[[str], Forked]):
    evaluator = scene.evaluator(rules=rules(open_after=0, worker_lost=30))
    child = start(scene, spawn, "drained")
    child.kill()
    queue.drain(scene.store.all("SELECT name FROM task_workers")[0][0], by="anna")
    assert workers(scene.store) == 1  # it did not end by itself
    scene.now = scene.store.now() + 60
    scene.pass_time(evaluator, 10)
    assert scene.alerts() == []


def test_a_sink_that_takes_nothing_is_behind(scene: Scene):
    evaluator = scene.evaluator(rules=rules(open_after=0, close_after=0, event_lag=300))
    outbox = SqlOutbox(scene.store)
    outbox.subscribe("https://user:geheim@example.org/hook")
    outbox.subscribe("on_complete ads", "ads")
    happened = Event(
        "e1", "job.completed", datetime.now(UTC), "test", "ads", 1, {"total": 1, "succeeded": 1, "failed": 0}
    )
    scene.store.run(lambda tx: append(tx, happened))
    scene.pass_time(evaluator, 290)
    assert scene.open() == []
    scene.pass_time(evaluator, 20)
    ((rule, sink),) = scene.open()
    assert rule == "event_lag"
    assert "geheim" not in sink + scene.alerts()[0].text
    for handle, _ in outbox.waiting("https://user:geheim@example.org/hook", 10):
        outbox.delivered("https://user:geheim@example.org/hook", [handle])
    scene.pass_time(evaluator, 10)
    assert scene.open() == []


class Ticking:
    """A clock that moves by so much whenever it is looked at."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_database_that_takes_long_is_slow(scene: Scene):
    clock = Ticking(2.0)
    evaluator = scene.evaluator(rules=rules(close_after=0, store_slow=1.0), clock=clock)
    scene.pass_time(evaluator, 70)
    assert scene.open() == []
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("store_slow", "database")]
    clock.step = 0.001
    scene.pass_time(evaluator, 20)
    assert scene.open() == []


def test_an_outage_of_the_database_is_reported_afterwards(
    postgres_with_tables: str, tcp_proxy: Callable[[int], TcpProxy], caplog: pytest.LogCaptureFixture
):
    from urllib.parse import urlsplit

    parts = urlsplit(postgres_with_tables)
    assert parts.port is not None
    proxy = tcp_proxy(parts.port)
    url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()
    clock = Ticking(0.0)
    with connect(url) as store:
        store.retry = RetryPolicy(retries=0)
        scene = Scene(store, url)
        evaluator = scene.evaluator(rules=rules(store_away=30), clock=clock)
        scene.pass_time(evaluator, 10)
        proxy.refuse()
        proxy.cut()
        for _ in range(2):
            with pytest.raises(HeadwayError):
                evaluator.tick(at=scene.now)
            clock.now += 20
            scene.now += 20
        proxy.pass_through()
        scene.pass_time(evaluator, 10)
        scene.pass_time(evaluator, 10)
        assert scene.events() == [(OPENED, "store_away", "database"), (CLOSED, "store_away", "database")]
        (alert,) = scene.alerts()
        assert (alert.closed_at or 0) - alert.opened_at == pytest.approx(40)
        evaluator.close()


@pytest.mark.parametrize("judged", [True, False])
def test_a_successor_reports_only_the_outage_since_the_last_round(
    postgres_with_tables: str, tcp_proxy: Callable[[int], TcpProxy], judged: bool
):
    """A standby was cut off from the database. If the active one was not, then the database was not away."""
    from urllib.parse import urlsplit

    parts = urlsplit(postgres_with_tables)
    assert parts.port is not None
    proxy, clock = tcp_proxy(parts.port), Ticking(0.0)
    url = parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl()
    with connect(postgres_with_tables) as near, connect(url) as far:
        far.retry = RetryPolicy(retries=0)
        scene = Scene(near, postgres_with_tables)
        active = scene.evaluator(rules=rules(store_away=30), clock=clock)
        standby = Evaluator(far, rules(store_away=30), clock=clock)
        scene.pass_time(active, 10)
        standby.tick(at=scene.now)
        proxy.refuse()
        proxy.cut()
        for _ in range(2):
            with pytest.raises(HeadwayError):
                standby.tick(at=scene.now)
            clock.now += 20
            if judged:
                scene.pass_time(active, 20)
            else:
                scene.now += 20
        active.close()
        proxy.pass_through()
        standby.tick(at=scene.now)
        assert standby.active
        told = [(OPENED, "store_away", "database"), (CLOSED, "store_away", "database")]
        assert scene.events() == ([] if judged else told)
        standby.close()


def test_a_full_or_unreachable_redis_is_an_alert(scene: Scene, redis_server: RedisServer):
    given = Rules(limits={"redis_memory": 0.85, "store_away": 30.0}, open_after=60, close_after=0, redis_bytes=1000)
    clock = Ticking(0.0)
    evaluator = scene.evaluator(rules=replace(given, redis=redis_server.url(0)), clock=clock)
    scene.pass_time(evaluator, 80)
    assert scene.open() == [("redis_memory", "redis")]
    redis_server.kill9()
    scene.pass_time(evaluator, 10)
    clock.now += 30
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("redis_memory", "redis"), ("store_away", "redis")]
    redis_server.start()
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("redis_memory", "redis")]


def test_the_alert_about_redis_closes_when_the_settings_name_one_that_answers(
    scene: Scene, redis_server: RedisServer, redis_factory: Callable[..., RedisServer]
):
    clock = Ticking(0.0)
    current = Rules(limits={"store_away": 30.0}, open_after=0, close_after=0, redis=redis_server.url(0))
    evaluator = scene.evaluator(rules=lambda: current, clock=clock)
    redis_server.kill9()
    scene.pass_time(evaluator, 10)
    clock.now += 30
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("store_away", "redis")]
    current = replace(current, redis=redis_factory().url(0))
    scene.pass_time(evaluator, 10)
    assert scene.open() == []


def test_a_redis_without_a_limit_is_never_full(scene: Scene, redis_server: RedisServer):
    given = replace(rules(open_after=0, redis_memory=0.001), redis=redis_server.url(0))
    evaluator = scene.evaluator(rules=given)
    scene.pass_time(evaluator, 20)
    assert scene.alerts() == []


def test_a_deployment_at_rest_has_no_alert_by_the_default_rules(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    Worker(queue).run(burst=True)
    headway.map(str, range(50), job="ads", database=scene.url, mode="thread", workers=2)
    scene.pass_time(scene.evaluator(), 100)
    assert scene.alerts() == []
    limits: dict[str, float | None] = dict(scene.store.all("SELECT name, threshold FROM alert_rules"))
    assert set(limits) == {rule.name for rule in RULES}  # each was judged
    assert [name for name, limit in limits.items() if limit is None] == ["redis_memory"]  # there is none


# ---- settings -------------------------------------------------------------------------------------------------------


def test_the_rules_without_settings_are_those_of_the_settings_defaults(tmp_path):
    assert Rules.of(Config(environment={}, directory=tmp_path)) == Rules()
    assert tuple(rule.name for rule in RULES) == RULE_NAMES


def test_limits_come_from_file_and_environment_and_off_switches_a_rule_off(tmp_path):
    (tmp_path / "headway.toml").write_text('alert_backlog = 7\nalert_delay = "off"\n', encoding="utf-8")
    found = Rules.of(Config(environment={"HEADWAY_ALERT_FAILURE_SPIKE": "0.5"}, directory=tmp_path))
    assert (found.limits["backlog"], found.limits["delay"], found.limits["failure_spike"]) == (7, None, 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [("BACKLOG", "0"), ("BACKLOG", "many"), ("FAILURE_SPIKE", "1.5"), ("FAILURE_SPIKE", "nan"), ("DELAY", "-1"),
     ("DELAY", "inf"), ("CLOSE_SHARE", "0"), ("CLOSE_SHARE", "2"), ("OPEN_AFTER", "-1"), ("WORKER_LOST", "1"),
     ("FAILURE_WINDOW", "5")],
)  # fmt: skip
def test_a_limit_that_makes_no_sense_is_refused_where_it_is_read(tmp_path, name: str, value: str):
    with pytest.raises(ConfigError, match=f"HEADWAY_ALERT_{name}"):
        Config(environment={f"HEADWAY_ALERT_{name}": value}, directory=tmp_path)


def test_a_disabled_rule_closes_its_alerts(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    first = scene.evaluator(rules=rules(open_after=0, backlog=1))
    scene.pass_time(first, 10)
    first.close()
    scene.pass_time(scene.evaluator(rules=rules(close_after=0)), 10)
    assert scene.events() == [(OPENED, "backlog", "normal"), (CLOSED, "backlog", "normal")]


def test_settings_that_change_while_it_runs_count_from_the_next_round(scene: Scene, queue: TaskQueue):
    queue.submit("caption", 1, id="t")
    now = [rules(open_after=0, backlog=2)]
    evaluator: Evaluator = scene.evaluator(rules=lambda: now[0])
    scene.pass_time(evaluator, 10)
    assert scene.open() == []
    now[0] = rules(open_after=0, backlog=1)
    scene.pass_time(evaluator, 10)
    assert scene.open() == [("backlog", "normal")]
