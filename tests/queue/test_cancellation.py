"""A run that ended because its task was cancelled counts as cancelled, not as a failure."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.alerts import Rules
from headway.alerts.readings import judge
from headway.alerts.store.snapshot import fetch
from headway.queue import TaskCancelled, TaskQueue
from headway.queue.handlers import Isolation
from headway.queue.recovery import Sweeper
from headway.queue.store import complete as outcomes
from headway.queue.task import Status
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.claiming import take
from tests.queue.nursery import Forked
from tests.services.waiting import eventually

RULES = Rules(limits={"failure_spike": 0.01, "new_cause": 3600.0}, failure_runs=1)
Handler = Callable[[Any, str], object]


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def assert_only_cancelled(queue: TaskQueue, id: str) -> None:
    """Compare every row that counts runs with one cancelled task."""
    task = queue.get(id)
    assert (task.status, task.attempts, task.error, task.message) == (Status.CANCELLED, 0, None, "cancelled by anna")
    assert task.ended_at is not None
    rows = queue.database.all(
        "SELECT sum(cancelled), sum(failures), sum(failed), sum(completed), sum(run_seconds) FROM task_minutes"
    )
    assert [tuple(map(float, row)) for row in rows] == [(1, 0, 0, 0, 0)]
    assert queue.database.all("SELECT count(*) FROM task_attempts") == [(0,)]
    assert queue.database.all("SELECT count(*) FROM task_causes") == [(0,)]
    assert set(queue.database.all("SELECT completed, failed FROM task_workers")) == {(0, 0)}
    readings = judge(fetch(queue.database, RULES, None), RULES)
    assert (readings["failure_spike"], readings["new_cause"]) == ([], [])


def look_until_cancelled(task: Any, payload: str) -> None:
    Path(payload).touch()
    deadline = time.monotonic() + 60
    while not task.cancelled and time.monotonic() < deadline:
        time.sleep(0.01)


def returns(task: Any, payload: str) -> str:
    look_until_cancelled(task, payload)
    return "part of the result"


def raises_task_cancelled(task: Any, payload: str) -> None:
    look_until_cancelled(task, payload)
    raise TaskCancelled


def raises_its_own_error(task: Any, payload: str) -> None:
    look_until_cancelled(task, payload)
    raise RuntimeError("stopped by the user")


def goes_on(task: Any, payload: str) -> None:
    Path(payload).touch()
    time.sleep(60)


def ignores_signals(task: Any, payload: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    goes_on(task, payload)


@pytest.mark.parametrize(
    ("isolation", "handler"),
    [
        ("fork", returns),
        ("fork", raises_task_cancelled),
        ("fork", raises_its_own_error),
        ("fork", goes_on),
        ("fork", ignores_signals),
        ("none", returns),
        ("none", raises_task_cancelled),
        ("none", raises_its_own_error),
        ("none", goes_on),
    ],
)
def test_a_cancelled_run_is_neither_a_failure_nor_an_attempt(
    queue: TaskQueue, tmp_path: Path, isolation: Isolation, handler: Handler
):
    queue.handler("long", retries=3, isolation=isolation)(handler)
    began = tmp_path / "began"
    task = queue.submit("long", str(began))
    with ThreadPoolExecutor(1) as beside:
        cancelling = beside.submit(lambda: eventually(began.exists, 30) and queue.cancel(task.id, by="anna"))
        Worker(queue, settings=Settings(cancel_grace=0.5)).run(burst=True)
        cancelling.result()
    assert_only_cancelled(queue, task.id)


def test_a_cancelled_task_whose_worker_was_killed_is_neither_a_failure_nor_an_attempt(
    queue: TaskQueue, spawn: Callable[..., Forked]
):
    child = spawn("w1")
    task = queue.submit("sleep.none", 50)
    eventually(lambda: queue.get(task.id).status is Status.RUNNING)
    queue.cancel(task.id, by="anna")
    child.kill()  # as the worker does to itself when the handler does not end within the grace period
    Sweeper(queue).tick()
    assert_only_cancelled(queue, task.id)


def test_task_cancelled_raised_without_a_cancellation_is_a_failure(queue: TaskQueue):
    @queue.handler("mistaken", retries=0, isolation="none")
    def mistaken(task: Any, payload: object) -> None:
        raise TaskCancelled

    task = queue.submit("mistaken")
    Worker(queue).run(burst=True)
    ended = queue.get(task.id)
    assert (ended.status, ended.attempts) == (Status.FAILED, 1)
    assert queue.database.all("SELECT type FROM task_causes") == [("TaskCancelled",)]


def test_a_cancelled_retry_keeps_the_attempt_that_failed_before(queue: TaskQueue, tmp_path: Path):
    @queue.handler("second", retries=1, retry_delay=0.01, isolation="none")
    def second(task: Any, payload: str) -> None:
        if not task.attempts:
            raise ValueError("the first run fails")
        look_until_cancelled(task, payload)

    began = tmp_path / "began"
    task = queue.submit("second", str(began))

    def work() -> bool:
        Sweeper(queue).tick()  # makes the retry ready
        Worker(queue).run(burst=True)
        return queue.get(task.id).is_final

    with ThreadPoolExecutor(1) as beside:
        cancelling = beside.submit(lambda: eventually(began.exists, 30) and queue.cancel(task.id, by="anna"))
        eventually(work, 30)
        cancelling.result()
    ended = queue.get(task.id)
    assert (ended.status, ended.attempts, ended.error) == (Status.CANCELLED, 1, "ValueError: the first run fails")
    assert queue.database.all("SELECT sum(failures), sum(cancelled) FROM task_minutes") == [(1, 1)]
    assert queue.database.all("SELECT outcome FROM task_attempts") == [("failed",)]


def test_a_cancelled_task_whose_worker_ends_is_not_run_again(one_per_user: TaskQueue):
    task = one_per_user.submit("caption", user_id="anna")
    [claim] = take(one_per_user)
    one_per_user.cancel(task.id, by="anna")
    one_per_user.database.run(lambda tx: outcomes.release(tx, claim))
    assert one_per_user.get(task.id).status is Status.CANCELLED
    assert one_per_user.submit("caption", user_id="anna").status is Status.QUEUED, "the user's place is free"
