"""Every number that the dashboard and `headway queues` show equals what the rows say, also while tasks run and fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headway.queue.recovery import Sweeper
from headway.queue.store import claim as claims
from headway.queue.task import PRIORITIES
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.views.queue import WorkerView, read_queues, read_task, read_workers
from headway.views.system.performance import read_performance
from tests.queue import app
from tests.queue.nursery import Forked
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def rows(queue: TaskQueue, status: str) -> dict[str, int]:
    sql = "SELECT queue, count(*) FROM tasks WHERE status = ? GROUP BY queue"
    counted = {name: int(count) for name, count in queue.database.all(sql, (status,))}
    return {priority.value: counted.get(priority.value, 0) for priority in PRIORITIES}


@pytest.mark.req("S2-37")
def test_waiting_running_completed_failed_and_cancelled_are_those_of_the_rows(queue: TaskQueue):
    def submit(kind: str, payload: object, count: int, priority: str) -> list[str]:
        return [queue.submit(kind, payload, role="admin", priority=priority).id for _ in range(count)]

    submit("echo.none", 1, 3, "high")
    submit("raise.none", "bad", 2, "high")
    submit("echo.none", 1, 4, "low")
    Worker(queue).run(burst=True)
    for id in submit("echo.none", 1, 2, "normal"):
        queue.cancel(id)
    submit("echo.none", 1, 5, "urgent")
    submit("echo.none", 1, 3, "low")
    taken = claims.claim_next(queue.database, app.claimant(queue), queues=PRIORITIES, limit=2)
    assert len(taken) == 2
    queue.submit("echo.none", 1, delay=1000)

    found = {view.queue: view for view in read_queues(queue).queues}
    for field, status in (
        ("running", "RUNNING"), ("completed", "COMPLETED"), ("failed", "FAILED"), ("cancelled", "CANCELLED"),
    ):  # fmt: skip
        assert {name: getattr(view, field) for name, view in found.items()} == rows(queue, status), field
    assert {name: view.waiting + view.delayed for name, view in found.items()} == rows(queue, "QUEUED")
    assert (found["urgent"].running, found["urgent"].waiting) == (2, 3)
    assert (found["high"].completed, found["high"].failed, found["low"].completed) == (3, 2, 4)
    assert (found["normal"].cancelled, found["normal"].delayed) == (2, 1)
    for field, status in (("completed_total", "COMPLETED"), ("failed_total", "FAILED")):
        assert {name: getattr(view, field) for name, view in found.items()} == rows(queue, status), field


@pytest.mark.req("S2-37")
def test_totals_count_each_task_once_while_minutes_are_added_up_and_purged(queue: TaskQueue):
    def totals() -> tuple[int, int]:
        normal = next(view for view in read_queues(queue).queues if view.queue == "normal")
        return normal.completed_total, normal.failed_total

    def run(kind: str, count: int) -> None:
        for number in range(count):
            queue.submit(kind, number)
        Worker(queue).run(burst=True)

    def change(sql: str) -> None:
        queue.database.run(lambda tx: tx.execute(sql))

    run("echo.none", 3)
    change("UPDATE task_minutes SET minute = minute - 180")
    run("raise.none", 2)
    assert totals() == (3, 2)
    sweeper = Sweeper(queue)
    for _ in range(2):
        sweeper.purge()
        assert totals() == (3, 2)
    change("UPDATE task_minutes SET minute = minute - 60000 WHERE completed > 0")
    sweeper.purge()
    assert queue.database.one("SELECT sum(completed), sum(failed) FROM task_minutes") == (0, 2)
    assert totals() == (3, 2)


@pytest.mark.req("S2-39")
def test_a_task_says_whether_rq_knows_it(redis_server: RedisServer, database_url: str):
    in_rq = redis_server.client(0)
    with app.build(database_url, redis=f"redis://127.0.0.1:{redis_server.port}/0") as queue:
        known = queue.submit("echo.none", 1)
        assert in_rq.lrange("rq:queue:headway:normal", 0, -1) == [known.id]
        assert read_task(queue, known.id).hinted_at is not None
    with app.build(database_url) as queue:
        alone = queue.submit("echo.none", 2)
        assert in_rq.lrange("rq:queue:headway:normal", 0, -1) == [known.id]
        assert read_task(queue, alone.id).hinted_at is None


@pytest.mark.req("S2-38")
def test_the_success_rate_is_the_share_of_runs_that_succeeded(queue: TaskQueue):
    for payload in (1, 2, 3):
        queue.submit("echo.none", payload)
    for _ in range(2):
        queue.submit("raise.none", "bad")
    queue.handler("half", isolation="none", retries=3, retry_delay=0.001)(_fails_once)
    _fails_once.seen.clear()
    queue.submit("half", None)

    def drained() -> bool:
        Worker(queue).run(burst=True)
        return not any(rows(queue, "QUEUED").values())

    eventually(drained)
    found = {one.name: one for one in read_performance(queue.database, "1h")}
    assert {name: (one.done, one.failed, one.success) for name, one in found.items()} == {
        "echo.none": (3, 0, 100.0),
        "raise.none": (0, 2, 0.0),
        "half": (1, 1, 50.0),
    }


class _FailsOnce:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, task: object, payload: object) -> None:
        self.seen.append(1)
        if len(self.seen) == 1:
            raise ValueError("the first run fails")


_fails_once = _FailsOnce()


@pytest.mark.req("S2-38")
def test_a_worker_is_idle_then_busy_with_its_task_then_idle_again_then_ended(
    queue: TaskQueue, spawn: Callable[..., Forked], tmp_path: Path
):
    def worker() -> WorkerView | None:
        return next((one for one in read_workers(queue).workers if one.name == "w-1"), None)

    def state() -> str | None:
        found = worker()
        return None if found is None else found.state

    child = spawn("w-1")
    eventually(lambda: state() == "idle", 30)
    task = queue.submit("patient.fork", str(tmp_path / "began"))
    eventually((tmp_path / "began").exists, 30)
    eventually(lambda: (found := worker()) is not None and (found.state, found.task) == ("busy", task.id), 30)
    queue.cancel(task.id)
    eventually(lambda: (found := worker()) is not None and (found.state, found.task) == ("idle", None), 30)
    child.kill()
    eventually(lambda: state() == "lost", 30)
