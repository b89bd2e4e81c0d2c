"""A batch that a worker runs in its own process: what waits and what has ended stays its own while one of them takes long."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor

import pytest

from headway.queue.recovery import Sweeper
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.services.waiting import eventually

LEASE = 1.5


class Runs:
    """How often each payload was handled, and doors that hold handlers up."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.door = threading.Event()


@pytest.fixture
def runs() -> Runs:
    return Runs()


@pytest.fixture
def beside() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as threads:
        yield threads


@pytest.fixture
def queue(database_url: str, runs: Runs) -> Iterator[TaskQueue]:
    with TaskQueue(database_url, per_user=None) as made:

        @made.handler("quick", isolation="none", retries=3, retry_delay=0.01)
        def quick(task, payload):
            runs.count[payload] += 1

        @made.handler("short", isolation="none", retries=3, retry_delay=0.01)
        def short(task, payload):
            runs.count[payload] += 1
            time.sleep(0.3)  # shorter than a renewal's interval: many of them together are longer than the lease

        @made.handler("held", isolation="none", retries=3, retry_delay=0.01)
        def held(task, payload):
            runs.count[payload] += 1
            assert runs.door.wait(60)

        yield made


def others(queue: TaskQueue, stop: threading.Event) -> threading.Thread:
    """Somebody else who takes over whatever lapses."""

    def sweep() -> None:
        sweeper = Sweeper(queue)
        while not stop.wait(0.05):
            sweeper.tick()

    thread = threading.Thread(target=sweep)
    thread.start()
    return thread


def test_what_ended_is_recorded_while_a_later_task_of_the_batch_still_runs(
    queue: TaskQueue, runs: Runs, beside: Executor
):
    first = queue.submit("quick", "first")
    slow = queue.submit("held", "slow")

    def look() -> None:
        try:
            assert eventually(lambda: queue.get(first.id).status is Status.COMPLETED)
            assert queue.get(slow.id).status is Status.RUNNING
        finally:
            runs.door.set()

    looking = beside.submit(look)
    Worker(queue, settings=Settings(batch=10)).run(burst=True)
    looking.result()
    assert queue.get(slow.id).status is Status.COMPLETED


@pytest.mark.req("S2-34")
def test_a_batch_that_takes_longer_than_the_lease_is_run_by_nobody_else(queue: TaskQueue, runs: Runs):
    for number in range(10):
        queue.submit("short", f"task {number}")
    stop = threading.Event()
    sweeping = others(queue, stop)
    try:
        Worker(queue, settings=Settings(batch=10, lease=LEASE, hold=60.0)).run(burst=True)
    finally:
        stop.set()
        sweeping.join()
    assert runs.count == {f"task {number}": 1 for number in range(10)}
    assert queue.database.all("SELECT count(*) FROM task_attempts") == [(0,)]


def test_a_task_of_the_batch_that_was_cancelled_before_its_turn_is_not_run(
    queue: TaskQueue, runs: Runs, beside: Executor
):
    slow = queue.submit("held", "slow")
    waiting = queue.submit("quick", "waiting")

    def cancel() -> None:
        try:
            assert eventually(lambda: queue.get(waiting.id).status is Status.RUNNING)
            queue.cancel(waiting.id, by="ada")
            # The worker hears of it with the next renewal of its leases.
            for _ in range(2):  # one of them may have been under way
                before = lease(queue, waiting.id)
                while lease(queue, waiting.id) == before:
                    assert not runs.door.wait(0.01)
        finally:
            runs.door.set()

    cancelling = beside.submit(cancel)
    Worker(queue, settings=Settings(batch=10, hold=60.0)).run(burst=True)
    cancelling.result()
    assert queue.get(waiting.id).status is Status.CANCELLED
    assert queue.get(slow.id).status is Status.COMPLETED
    assert runs.count["waiting"] == 0


def test_a_claim_that_somebody_else_took_over_meanwhile_is_not_begun(queue: TaskQueue, runs: Runs, beside: Executor):
    slow = queue.submit("held", "slow")
    waiting = queue.submit("quick", "waiting")

    def take_over() -> None:
        try:
            assert eventually(lambda: queue.get(waiting.id).status is Status.RUNNING)
            # As if this worker had been stopped for longer than its lease, and another one had done the task.
            queue.database.run(
                lambda tx: tx.execute(
                    "UPDATE tasks SET token = token + 1, worker = 'another' WHERE id = ?", (waiting.id,)
                ),
                operation="test",
            )
            before = lease(queue, slow.id)
            while lease(queue, slow.id) == before:
                assert not runs.door.wait(0.01)
        finally:
            runs.door.set()

    taking = beside.submit(take_over)
    Worker(queue, settings=Settings(batch=10, hold=60.0)).run(burst=True)
    taking.result()
    assert runs.count == {"slow": 1}


def lease(queue: TaskQueue, id: str) -> float:
    [[until]] = queue.database.all("SELECT lease_until FROM tasks WHERE id = ?", (id,))
    return float(until)
