"""`RetryLater` in a handler: the task, or its whole kind, waits and no attempt is counted."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from headway.config import Config
from headway.core.retry import LaterLimit
from headway.errors import RetryLater
from headway.queue.handlers import Isolation
from headway.queue.settings import LiveSettings
from headway.queue.store import complete as outcomes
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from headway.testing import eager
from headway.views.queue import read_queues, read_task
from tests.queue.claiming import take, worker
from tests.services.waiting import eventually

WAYS = ("fork", "none", "async")


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with TaskQueue(database_url, per_user=None) as made:
        yield made


def register(queue: TaskQueue, way: str, function: Callable[[Any, Any], Any], kind: str = "call") -> None:
    options: dict[str, Any] = {"retries": 1, "retry_delay": 0.01}
    if way == "async":

        async def awaited(task: Any, payload: Any) -> Any:
            return function(task, payload)

        queue.handler(kind, **options)(awaited)
    else:
        isolation: Isolation = "fork" if way == "fork" else "none"
        queue.handler(kind, isolation=isolation, **options)(function)


def drain(queue: TaskQueue) -> None:
    Worker(queue, settings=Settings(rest=0.05)).run(burst=True)


def make_due(queue: TaskQueue) -> None:
    """As if the time of every delay and hold were over."""

    def work(tx: Any) -> None:
        tx.execute("UPDATE tasks SET run_at = run_at - 100000 WHERE status = 'QUEUED' AND ready = 0")
        tx.execute("UPDATE task_holds SET until = until - 100000")

    queue.database.run(work)


def later(task: Any, payload: Any) -> None:
    raise RetryLater(payload["seconds"], payload.get("reason", ""), payload.get("scope", "item"))


@pytest.mark.parametrize("way", WAYS)
def test_a_postponed_task_waits_and_runs_again_with_no_attempt_counted(queue: TaskQueue, way: str):
    register(queue, way, later)
    task = queue.submit("call", {"seconds": 3600, "reason": "429, token=geheim123"})
    drain(queue)
    found = queue.get(task.id)
    assert (found.status, found.attempts) == (Status.QUEUED, 0)
    assert 3500 < (found.run_at - found.updated_at).total_seconds() <= 3600
    assert queue.database.all("SELECT count(*) FROM task_attempts") == [(0,)]
    assert queue.database.all("SELECT count(*) FROM task_causes") == [(0,)]
    assert queue.database.all("SELECT max(failed) FROM task_workers") == [(0,)]
    sheet = read_task(queue, task.id)
    assert (sheet.postponed, sheet.waits_until) == (1, found.run_at)
    assert sheet.waits_reason.startswith("429")
    assert "geheim123" not in sheet.waits_reason
    drain(queue)  # another worker: the delay is a row
    assert queue.get(task.id).version == found.version
    make_due(queue)
    drain(queue)
    assert read_task(queue, task.id).postponed == 2


def test_a_retried_task_that_is_postponed_for_long_is_not_taken_for_one_of_a_clock_set_back(queue: TaskQueue):
    register(queue, "none", later)
    task = queue.submit("call", {"seconds": 3600})
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET attempts = 1"))
    drain(queue)
    drain(queue)
    assert read_task(queue, task.id).postponed == 1
    assert queue.get(task.id).attempts == 1


@pytest.mark.parametrize("way", WAYS)
def test_a_held_kind_starts_nothing_anywhere_until_then_and_others_go_on(queue: TaskQueue, way: str, tmp_path: Any):
    truth = tmp_path / "ran"

    def first_is_limited(task: Any, payload: Any) -> int:
        with truth.open("a") as file:
            file.write(f"{task.id}\n")
        if len(truth.read_text().splitlines()) == 1:
            time.sleep(0.2)  # others of its batch wait meanwhile
            raise RetryLater(3600, "quota", scope="job")
        return 1

    register(queue, way, first_is_limited)
    if way == "async":
        queue.handlers["call"] = replace(queue.handlers["call"], concurrency=1)
    register(queue, "none", lambda task, payload: None, kind="other")
    tasks = queue.submit_many([{"kind": "call"}] * 5)
    other = queue.submit("other", priority="low")
    drain(queue)
    assert len(truth.read_text().splitlines()) == 1
    assert queue.get(other.id).status is Status.COMPLETED
    assert queue.database.all("SELECT max(attempts) FROM tasks") == [(0,)]
    [hold] = read_queues(queue).holds
    assert (hold.kind, hold.reason) == ("call", "quota")
    waiting = [read_task(queue, task.id) for task in tasks]
    assert {(each.waits_until, each.waits_reason) for each in waiting} == {(hold.until, "quota")}
    make_due(queue)
    drain(queue)
    runs = Counter(truth.read_text().split())
    assert sorted(runs.values()) == [1, 1, 1, 1, 2]
    assert {queue.get(task.id).status for task in tasks} == {Status.COMPLETED}
    assert read_queues(queue).holds == ()


def test_a_waiting_worker_starts_a_held_kind_by_itself_when_its_time_is_over(queue: TaskQueue):
    runs: list[str] = []

    def once(task: Any, payload: Any) -> None:
        runs.append(task.id)
        if len(runs) == 1:
            raise RetryLater(0.5, scope="job")

    register(queue, "none", once)
    queue.submit_many([{"kind": "call"}] * 3)
    running = Worker(queue, settings=Settings(rest=0.05))
    eventually(lambda: running.tick() >= 0 and len(runs) == 4)
    running.tick()
    assert queue.database.all("SELECT count(*) FROM task_holds") == [(0,)]


@pytest.mark.parametrize("way", WAYS)
def test_a_task_postponed_too_often_fails_with_the_reason(queue: TaskQueue, way: str):
    register(queue, way, later)
    task = queue.submit("call", {"seconds": 0, "reason": "still busy"})
    live = LiveSettings(lambda: queue.database, Config(cli={"later_limit": "2/24h"}))
    for _ in range(4):
        Worker(queue, live=live, settings=Settings(rest=0.02)).run(burst=True)
    found = queue.get(task.id)
    assert found.status is Status.FAILED
    assert found.error == "RetryLater: postponed beyond 2/24h: still busy"
    assert [run.outcome for run in read_task(queue, task.id).runs] == ["failed"]
    queue.retry(task.id)
    assert read_task(queue, task.id).postponed == 0


def test_a_task_postponed_for_too_long_fails(queue: TaskQueue):
    register(queue, "none", later)
    task = queue.submit("call", {"seconds": 0})
    drain(queue)
    queue.database.run(lambda tx: tx.execute("UPDATE task_delays SET since = since - 90000"))
    drain(queue)
    assert queue.get(task.id).error == "RetryLater: postponed beyond 100/24h"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("wrong", [{"seconds": -1}, {"seconds": float("nan")}, {"seconds": 1e9}, {"seconds": "soon"}])
def test_an_absurd_delay_fails_the_run_with_one_clear_error(queue: TaskQueue, way: str, wrong: dict[str, Any]):
    register(queue, way, lambda task, payload: later(task, wrong))
    task = queue.submit("call")
    drain(queue)
    error = queue.get(task.id).error
    assert error is not None
    assert error.startswith("InvalidInput: The delay of RetryLater must be from 0 to 2,592,000 seconds")


def test_a_task_cancelled_while_it_asks_for_later_is_cancelled(queue: TaskQueue):
    register(queue, "none", later)
    task = queue.submit("call", {"seconds": 1})
    [claim] = take(queue, who=worker(kinds=("call",)))
    queue.cancel(task.id, by="ada")
    queue.database.run(
        lambda tx: outcomes.postpone(tx, claim, RetryLater(5, scope="job"), limit=LaterLimit(), seconds=0.1)
    )
    assert queue.get(task.id).status is Status.CANCELLED
    assert queue.database.all("SELECT count(*) FROM task_holds") == [(0,)]


def test_why_and_until_when_is_shown_by_the_command_line(queue: TaskQueue, database_url: str):
    register(queue, "none", later)
    task = queue.submit("call", {"seconds": 3600, "reason": "quota", "scope": "job"})
    drain(queue)
    shown = command("task", "show", task.id, "--database", database_url)
    assert "waits until" in shown
    assert ": quota (postponed 1 time)" in shown
    assert "Tasks of kind call wait until" in command("queues", "--database", database_url)
    found = json.loads(command("queues", "--json", "--database", database_url))
    assert [(hold["kind"], hold["reason"]) for hold in found["holds"]] == [("call", "quota")]


def command(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "headway", *arguments], check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_an_eager_queue_does_not_wait_for_a_delay(queue: TaskQueue):
    runs: list[str] = []

    def thrice(task: Any, payload: Any) -> int:
        runs.append(task.id)
        if len(runs) < 3:
            raise RetryLater(3600, scope="job")
        return len(runs)

    register(queue, "fork", thrice)
    with eager(queue) as under_test:
        task = under_test.submit("call")
        assert under_test.result(task.id) == 3
        assert under_test.get(task.id).attempts == 0
