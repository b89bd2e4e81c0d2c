"""Async handlers: many tasks at once on the event loop of one worker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headway.queue import GiveUp
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import rss
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from headway.testing import eager
from tests.queue import app
from tests.queue.nursery import Forked
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

LEASE = 1.5


class Meter:
    """How many runs there were, how many at once, and how they ended."""

    def __init__(self) -> None:
        self.runs: Counter[str] = Counter()
        self.now = self.most = 0
        self.cancelled: list[str] = []
        self.door = threading.Event()

    async def hold(self, key: str, seconds: float) -> None:
        self.runs[key] += 1
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and not self.door.is_set():  # noqa: ASYNC110 - a thread opens the door
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.cancelled.append(key)
            raise
        finally:
            self.now -= 1


@pytest.fixture
def meter() -> Meter:
    return Meter()


@pytest.fixture
def beside() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture  # one handler for each thing a coroutine may do
def queue(database_url: str, meter: Meter) -> Iterator[TaskQueue]:  # noqa: C901 - see above
    with TaskQueue(database_url, per_user=None) as made:

        @made.handler("wait", retries=3, retry_delay=0.01)
        async def wait(task, payload):
            await meter.hold(task.id, payload)
            return {"waited": payload}

        @made.handler("few", concurrency=3)
        async def few(task, payload):
            await meter.hold(task.id, payload)

        @made.handler("short", retries=1, retry_delay=0.01, timeout=0.3)
        async def short(task, payload):
            await meter.hold(task.id, payload)

        @made.handler("deaf", retries=0, timeout=0.2)
        async def deaf(task, payload):
            for _ in range(200):
                try:
                    await asyncio.sleep(0.05)
                except asyncio.CancelledError:
                    meter.cancelled.append(task.id)

        @made.handler("told")
        async def told(task, payload):
            for percent in range(0, 100, 10):
                task.progress(percent, f"step {percent}")
                await asyncio.sleep(payload)
            await asyncio.to_thread(task.progress, 99, "last step")

        @made.handler("odd", retries=1, retry_delay=0.01)
        async def odd(task, payload):
            match payload:
                case "give-up":
                    raise GiveUp("never")
                case "exit":
                    raise SystemExit(3)
                case "cancelled":
                    raise asyncio.CancelledError
                case "result":
                    return {1, 2}
            raise ValueError(payload)

        @made.handler("block", timeout=60.0)
        async def block(task, payload):
            time.sleep(payload)  # noqa: ASYNC251 - it blocks the event loop on purpose

        @made.handler("plain", isolation="none")
        def plain(task, payload):
            meter.runs[task.id] += 1

        yield made


def drain(queue: TaskQueue, **settings: Any) -> None:
    Worker(queue, settings=Settings(rest=0.05, **settings)).run(burst=True)


def statuses(queue: TaskQueue) -> dict[str, int]:
    return dict(queue.database.all("SELECT status, count(*) FROM tasks GROUP BY status"))


def test_async_tasks_of_one_worker_run_at_once_and_keep_their_results(queue: TaskQueue, meter: Meter):
    tasks = queue.submit_many([{"kind": "wait", "payload": 0.5}] * 60)
    drain(queue)
    assert meter.most == 60
    assert set(meter.runs.values()) == {1}
    assert [queue.result(task.id) for task in tasks] == [{"waited": 0.5}] * 60


def test_no_more_tasks_of_a_kind_run_at_once_than_its_concurrency(queue: TaskQueue, meter: Meter):
    queue.submit_many([{"kind": "few", "payload": 0.02}] * 20)
    drain(queue)
    assert meter.most == 3
    assert statuses(queue) == {"COMPLETED": 20}


def test_no_more_tasks_run_at_once_than_the_worker_allows(queue: TaskQueue, meter: Meter):
    queue.submit_many([{"kind": kind, "payload": 0.02} for kind in ("wait", "few") for _ in range(15)])
    drain(queue, concurrency=5)
    assert 3 < meter.most <= 5
    assert statuses(queue) == {"COMPLETED": 30}


def test_limits_of_users_and_kinds_hold_for_async_tasks(queue: TaskQueue, meter: Meter):
    queue.limit("user", "*", concurrency=2)
    queue.limit("kind", "wait", concurrency=5)
    for number in range(20):
        queue.submit("wait", 0.05, user_id=f"user-{number % 4}")
    drain(queue)
    assert 2 < meter.most <= 5
    assert statuses(queue) == {"COMPLETED": 20}


def test_an_async_task_past_its_timeout_is_cancelled_and_retried(queue: TaskQueue, meter: Meter):
    slow, other = queue.submit("short", 30), queue.submit("wait", 1.0)
    drain(queue)
    assert meter.cancelled == [slow.id, slow.id]
    found = queue.get(slow.id)
    assert (found.status, found.attempts, found.error) == (Status.FAILED, 2, "TimedOut: no result within 0.3 s")
    assert queue.get(other.id).status is Status.COMPLETED


def test_a_cancelled_async_task_gets_a_cancelled_error(queue: TaskQueue, meter: Meter, beside: Executor):
    task = queue.submit("wait", 30)

    def cancel() -> None:
        eventually(lambda: meter.now == 1)
        queue.cancel(task.id, by="ada")

    cancelling = beside.submit(cancel)
    drain(queue)
    cancelling.result()
    assert meter.cancelled == [task.id]
    assert (queue.get(task.id).status, queue.get(task.id).attempts) == (Status.CANCELLED, 0)


def test_a_coroutine_that_ignores_its_cancellation_is_abandoned_and_reported(
    queue: TaskQueue, meter: Meter, caplog: pytest.LogCaptureFixture
):
    deaf, other = queue.submit("deaf"), queue.submit("wait", 0.5)
    drain(queue, cancel_grace=0.4)
    assert queue.get(deaf.id).error == "TimedOut: no result within 0.2 s"
    assert queue.get(other.id).status is Status.COMPLETED
    assert len(meter.cancelled) >= 2  # once more after half of the grace
    assert "a handler ignores its cancellation and is abandoned" in caplog.text


@pytest.mark.parametrize(
    ("payload", "error", "attempts"),
    [
        ("give-up", "GiveUp: never", 1),
        ("exit", "SystemExit: 3", 2),
        ("cancelled", "CancelledError", 2),
        ("result", "ResultRefused: the handler returned set, which is not JSON", 1),
        ("else", "ValueError: else", 2),
    ],
)
def test_an_async_handler_that_raises_fails_its_own_task_only(
    queue: TaskQueue, payload: str, error: str, attempts: int
):
    task, other = queue.submit("odd", payload), queue.submit("wait", 0.1)
    drain(queue)
    found = queue.get(task.id)
    assert (found.status, found.error, found.attempts) == (Status.FAILED, error, attempts)
    assert queue.get(other.id).status is Status.COMPLETED


def test_progress_of_async_tasks_is_recorded_while_they_run(queue: TaskQueue, beside: Executor):
    tasks = queue.submit_many([{"kind": "told", "payload": 0.15}] * 5)
    seen = beside.submit(
        lambda: eventually(lambda: all(0 < queue.get(task.id).percent < 100 for task in tasks), message="progress")
    )
    drain(queue)
    seen.result()
    assert {queue.get(task.id).message for task in tasks} == {"last step"}


def test_leases_of_all_async_tasks_are_renewed_also_while_one_blocks_the_loop(queue: TaskQueue, meter: Meter):
    queue.submit_many([{"kind": "wait", "payload": 2 * LEASE}] * 20)
    queue.submit("block", 1.5 * LEASE)
    stop = threading.Event()
    sweeper = Sweeper(queue)

    def sweep() -> None:
        while not stop.wait(0.05):
            sweeper.tick()

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        drain(queue, lease=LEASE)
    finally:
        stop.set()
        sweeping.join()
    assert set(meter.runs.values()) == {1}
    assert statuses(queue) == {"COMPLETED": 21}
    assert queue.database.all("SELECT count(*) FROM task_attempts") == [(0,)]


def test_a_handler_that_blocks_the_loop_is_named_once(queue: TaskQueue, caplog: pytest.LogCaptureFixture):
    queue.submit_many([{"kind": "block", "payload": 0.8}] * 2)
    drain(queue)
    [record] = [record for record in caplog.records if "blocks the event loop" in record.getMessage()]
    assert vars(record)["fields"]["kind"] == "block"
    assert statuses(queue) == {"COMPLETED": 2}


def test_a_handler_that_blocks_the_loop_past_its_timeout_costs_the_others_no_attempt(
    database_url: str, spawn: Callable[..., Forked], tmp_path: Path
):
    with app.build(database_url, isolations=["async"]) as queue:
        truth = tmp_path / "ran"
        others = queue.submit_many(
            [{"kind": "log.async", "payload": {"file": str(truth), "seconds": 1.0}}] * 5
            + [{"kind": "brief.async"}] * 2  # their time is over while the loop is blocked
        )
        eager_to_block = queue.submit("block.async", priority="low")
        worker = spawn("blocked", isolations=["async"])
        assert worker.wait() != 0
        assert queue.get(eager_to_block.id).error == "TimedOut: no result within 0.5 s"
        assert {(queue.get(task.id).status, queue.get(task.id).attempts) for task in others} <= {
            (Status.QUEUED, 0),
            (Status.COMPLETED, 0),
        }


def test_other_kinds_get_their_turn_beside_an_unending_flow_of_async_tasks(
    queue: TaskQueue, meter: Meter, beside: Executor
):
    def feed() -> None:
        plain = None
        for number in range(400):
            queue.submit("wait", 0.2)
            if number == 5:
                plain = queue.submit("plain")
            if plain is not None and queue.get(plain.id).status is Status.COMPLETED:
                return
            meter.door.wait(0.02)
        raise AssertionError("the plain task did not run beside async ones")

    feeding = beside.submit(feed)
    eventually(lambda: statuses(queue))
    drain(queue)
    feeding.result()


def test_a_worker_told_to_end_finishes_running_async_tasks_and_returns_the_others(
    database_url: str, spawn: Callable[..., Forked], tmp_path: Path
):
    with app.build(database_url, isolations=["async"]) as queue:
        truth = tmp_path / "ran"
        queue.submit_many([{"kind": "one.async", "payload": {"file": str(truth), "seconds": 1.0}}] * 6)
        worker = spawn("drained", isolations=["async"])
        eventually(lambda: truth.exists() and truth.read_text())
        worker.terminate()
        assert worker.wait() == 0
        assert statuses(queue) == {"COMPLETED": 1, "QUEUED": 5}
        assert queue.database.all("SELECT max(attempts) FROM tasks") == [(0,)]


def test_async_tasks_that_outlast_the_drain_return_to_their_queue_uncharged(
    database_url: str, spawn: Callable[..., Forked], tmp_path: Path
):
    with app.build(database_url, isolations=["async"]) as queue:
        truth = tmp_path / "ran"
        queue.submit_many([{"kind": "log.async", "payload": {"file": str(truth), "seconds": 120}}] * 30)
        worker = spawn("drained", isolations=["async"], drain=0.2)
        eventually(lambda: truth.exists() and len(truth.read_text().splitlines()) == 30)
        worker.terminate()
        assert worker.wait() == 0
        assert statuses(queue) == {"QUEUED": 30}
        assert queue.database.all("SELECT max(attempts) FROM tasks") == [(0,)]


def test_kill_9_with_500_async_tasks_in_flight_loses_none_and_records_none_twice(
    database_url: str, spawn: Callable[..., Forked], tmp_path: Path
):
    with app.build(database_url, isolations=["async"]) as queue:
        first, again = tmp_path / "first", tmp_path / "again"
        tasks = queue.submit_many(
            [{"kind": "log.async", "payload": {"file": str(first), "seconds": 60}} for _ in range(500)]
        )
        worker = spawn("victim", isolations=["async"])
        eventually(lambda: first.exists() and len(first.read_text().splitlines()) == 500, 60)
        worker.kill()
        ready = json.dumps({"file": str(again), "seconds": 0.1})
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET payload = ?", (ready,)))
        sweeper = Sweeper(queue)
        spawn("heir", isolations=["async"])
        eventually(lambda: sweeper.tick() >= 0 and statuses(queue) == {"COMPLETED": 500}, 90)
        runs = Counter(line.split()[0] for line in again.read_text().splitlines())
        assert runs == {task.id: 1 for task in tasks}
        completions = queue.database.all("SELECT job, count(*) FROM outbox WHERE type = 'task.completed' GROUP BY job")
        assert sorted(completions) == sorted((task.id, 1) for task in tasks)


def test_a_worker_stopped_past_its_lease_starts_nothing_that_another_one_has(
    database_url: str, spawn: Callable[..., Forked], tmp_path: Path
):
    with app.build(database_url, isolations=["async"]) as queue:
        truth = tmp_path / "ran"
        queue.submit_many([{"kind": "one.async", "payload": {"file": str(truth), "seconds": 1.0}}] * 4)
        worker = spawn("stopped", isolations=["async"])
        eventually(lambda: truth.exists() and truth.read_text())
        os.kill(worker.pid, signal.SIGSTOP)
        # As if the leases had lapsed and another worker had completed the tasks.
        queue.database.run(
            lambda tx: tx.execute(
                "UPDATE tasks SET status = 'COMPLETED', token = token + 1, holder = NULL, lease_until = NULL, "
                "message = 'by another', ended_at = updated_at"
            )
        )
        lines = len(truth.read_text().splitlines())
        assert lines == 1
        os.kill(worker.pid, signal.SIGCONT)
        last = queue.submit("log.async", {"file": str(truth)})
        eventually(lambda: queue.get(last.id).status is Status.COMPLETED)
        worker.terminate()
        worker.wait()
        assert statuses(queue) == {"COMPLETED": 5}
        assert queue.database.all("SELECT count(*) FROM tasks WHERE message = 'by another'") == [(4,)]


def test_async_tasks_arrive_through_redis_as_well(database_url: str, redis_server: RedisServer, tmp_path: Path):
    with app.build(database_url, redis=redis_server.url(), isolations=["async"]) as queue:
        truth = tmp_path / "ran"
        queue.submit_many([{"kind": "log.async", "payload": {"file": str(truth), "seconds": 0.05}}] * 300)
        source = RqSource(queue, redis_server.url(), name="redis")
        Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)
        assert statuses(queue) == {"COMPLETED": 300}
        assert len(truth.read_text().splitlines()) == 300


def test_1000_waiting_handlers_cost_little_memory(queue: TaskQueue, meter: Meter, beside: Executor):
    queue.handlers["wait"] = replace(queue.handlers["wait"], concurrency=1000)
    before = rss(os.getpid())

    def measure() -> int:
        eventually(lambda: meter.now == 1000, 60)
        used = rss(os.getpid()) - before
        meter.door.set()
        return used

    queue.submit_many([{"kind": "wait", "payload": 60}] * 1000)
    used = beside.submit(measure)
    drain(queue)
    assert used.result() < 40 * 2**20
    assert statuses(queue) == {"COMPLETED": 1000}


def test_an_eager_queue_runs_async_handlers_also_inside_an_event_loop(queue: TaskQueue):
    with eager(queue) as under_test:
        assert under_test.result(under_test.submit("wait", 0.0).id) == {"waited": 0.0}

        async def submit() -> str:
            return under_test.submit("wait", 0.0).id

        assert under_test.get(asyncio.run(submit())).status is Status.COMPLETED
