"""Waiting tasks of a kind that no online worker runs: named everywhere an operator looks, and no reason to scale up."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway._lease import Owner
from headway.alerts.readings import judge
from headway.alerts.rules import Rules
from headway.alerts.store.snapshot import fetch
from headway.core.lifecycle import Shutdown
from headway.queue.rq.source import RqSource
from headway.queue.store import workers
from headway.queue.store.claim import Claimant
from headway.queue.store.workers import Sign
from headway.queue.task import PRIORITIES, Priority
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.supervisor import Plan, Supervisor, work_off
from headway.views.queue import read_task
from headway.views.system.health import examine
from tests.queue.test_supervisor import ROOT
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

SHOP = """
from headway.queue import TaskQueue
queue = TaskQueue({url!r}, per_user=None)
queue.handler("known")(lambda task, payload: None)
"""


@pytest.fixture
def shop(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskQueue]:
    """The queue of an application that has a handler for *known*."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "src"))))
    Path("shop.py").write_text(SHOP.format(url=database_url))
    with TaskQueue(database_url, per_user=None) as made:
        made.handler("known")(lambda task, payload: None)
        yield made


@pytest.fixture
def sender(shop: TaskQueue, database_url: str) -> Iterator[TaskQueue]:
    """A newer version of the application, which submits *unknown* tasks too."""
    with TaskQueue(database_url, per_user=None) as made:
        made.handler("known")(lambda task, payload: None)
        made.handler("unknown")(lambda task, payload: None)
        yield made


def sign_in(queue: TaskQueue, *kinds: str, queues: tuple[Priority, ...] = PRIORITIES, older: bool = False) -> None:
    """Write the heartbeat of a worker that runs these kinds."""
    sign = Sign("w1", Owner.current(), queues, "idle", None, 0, 0, 0, None if older else kinds)
    queue.database.run(lambda tx: workers.heartbeat(tx, sign))


def unserved(queue: TaskQueue) -> dict[str, tuple[str, ...]]:
    return {info.priority.value: info.unserved for info in queue.stats() if info.unserved}


def test_a_kind_without_a_handler_is_named_in_queues_task_doctor_and_alerts(sender: TaskQueue, database_url: str):
    sign_in(sender, "known", "other")
    known, unknown = sender.submit("known"), sender.submit("unknown")
    assert unserved(sender) == {"normal": ("unknown",)}
    assert (read_task(sender, known.id).unserved, read_task(sender, unknown.id).unserved) == (False, True)
    [finding] = [each for each in examine(database_url, version="1") if each.check == "tasks"]
    assert (finding.verdict, finding.text) == (
        "warn",
        "1 task of kind unknown in the queue normal: no online worker runs them",
    )
    later = sender.get(unknown.id).created_at.timestamp() + 15
    [alert] = judge(fetch(sender.database, Rules(), later), Rules())["no_handler"]
    assert (alert.subject, alert.above, alert.at_once) == ("normal unknown", True, True)
    assert "kind unknown" in alert.text
    sign_in(sender, "known", "unknown")
    assert unserved(sender) == {}
    assert judge(fetch(sender.database, Rules(), later), Rules())["no_handler"] == []


@pytest.mark.parametrize(
    ("online", "expected"),
    [
        (lambda queue: None, {"normal": ("known",)}),
        (lambda queue: sign_in(queue, older=True), {}),  # a worker of an older version does not say what it runs
        (lambda queue: sign_in(queue, "known", queues=(Priority.LOW,)), {"normal": ("known",)}),
        (lambda queue: sign_in(queue, "known", queues=(Priority.NORMAL,)), {}),
    ],
    ids=["no worker", "older worker", "other queue", "this queue"],
)
def test_a_kind_is_unserved_when_no_online_worker_runs_it_from_its_queue(
    sender: TaskQueue, online: Callable[[TaskQueue], None], expected: dict[str, tuple[str, ...]]
):
    sender.submit("known")
    online(sender)
    assert unserved(sender) == expected


def test_the_supervisor_logs_the_kind_once_and_adds_no_worker_for_it(
    shop: TaskQueue, sender: TaskQueue, caplog: pytest.LogCaptureFixture
):
    shutdown, now = Shutdown(), [0.0]
    plan = Plan("shop:queue", workers=1, most=4, drain=2.0)
    supervisor = Supervisor(shop, plan, shutdown=shutdown, clock=lambda: now[0])
    sender.submit("unknown")

    def is_logged() -> bool:
        now[0] += 1.0
        supervisor.tick()
        return any("no online worker runs" in record.getMessage() for record in caplog.records)

    try:
        with caplog.at_level(logging.WARNING):
            eventually(is_logged, 60)
            for _ in range(10):
                assert is_logged()
        [said] = [record for record in caplog.records if "no online worker runs" in record.getMessage()]
        assert vars(said)["fields"]["kind"] == "unknown"
        assert len(supervisor.workers) == 1
    finally:
        shutdown.request()
        supervisor.run()


def test_a_burst_says_which_kinds_it_leaves_waiting(
    shop: TaskQueue, sender: TaskQueue, caplog: pytest.LogCaptureFixture
):
    known, unknown = sender.submit("known"), sender.submit("unknown")
    with caplog.at_level(logging.WARNING):
        work_off(shop, Plan("shop:queue"), shutdown=Shutdown())
    assert (sender.get(known.id).is_final, sender.get(unknown.id).is_final) == (True, False)
    assert any("no handler for" in record.getMessage() for record in caplog.records)


def test_the_command_line_names_the_kind(
    sender: TaskQueue, database_url: str, headway_cli: Callable[..., subprocess.CompletedProcess[str]]
):
    sign_in(sender, "known")
    task = sender.submit("unknown")
    for words in (("queues",), ("task", "show", task.id), ("doctor",)):
        shown = headway_cli(*words, "--database", database_url)
        assert "worker runs" in shown.stdout
        assert "unknown" in shown.stdout


def test_without_an_online_worker_every_waiting_kind_is_named_with_the_cause(
    sender: TaskQueue, database_url: str, headway_cli: Callable[..., subprocess.CompletedProcess[str]]
):
    task, later = sender.submit("known"), sender.submit("unknown", delay=3600)
    shown = {
        words: headway_cli(*words, "--database", database_url).stdout
        for words in (("queues",), ("task", "show", task.id), ("task", "show", later.id), ("doctor",))
    }
    assert "no worker is online: known" in shown["queues",]
    assert "waits: no worker is online" in shown["task", "show", task.id]
    assert "waits:" not in shown["task", "show", later.id], "its time has not come"
    assert "warn  tasks     1 task of kind known in the queue normal: no worker is online" in shown["doctor",]
    queues = json.loads(headway_cli("queues", "--json", "--database", database_url).stdout)
    assert (queues["workers_online"], [each["unserved"] for each in queues["queues"]]) == (0, [[], [], ["known"], []])
    sheet = json.loads(headway_cli("task", "show", task.id, "--json", "--database", database_url).stdout)
    assert (sheet["workers_online"], sheet["unserved"]) == (0, True)


def test_without_an_online_worker_the_alert_no_handler_leaves_it_to_the_others(sender: TaskQueue):
    later = sender.submit("known").created_at.timestamp() + 400
    found = judge(fetch(sender.database, Rules(), later), Rules())
    assert found["no_handler"] == []
    assert [each.above for each in found["delay"] if each.subject == "normal"] == [True]


def test_tasks_of_a_kind_that_a_worker_does_not_know_hold_up_nothing_in_the_queues_behind(
    database_url: str, redis_server: RedisServer
):
    url = redis_server.url()
    with TaskQueue(database_url, url, per_user=None) as new, TaskQueue(database_url, url, per_user=None) as old:
        for kind in ("fresh", "known"):
            new.handler(kind)(lambda task, payload: payload)
        old.handler("known")(lambda task, payload: payload)
        new.submit_many([{"kind": "fresh"} for _ in range(300)])
        task = new.submit("known", priority="low")
        source = RqSource(old, url, name="old")
        [claim] = source.claim(Claimant("old", Owner.current(), ["known"]), PRIORITIES, 1)
        assert claim.id == task.id
        source.close()
