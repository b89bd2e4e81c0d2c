"""``setup=``: what a worker opens once for a handler, and closes at its end."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from headway.errors import InvalidInput
from headway.queue.recovery import Sweeper
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from headway.testing import eager

WAYS = ("fork", "none", "async")


class Opening:
    """Set-ups of both kinds that note what becomes of them."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.error: Exception | None = None
        self.seconds = 0.0

    def plain(self) -> Iterator[dict[str, int]]:
        self.notes.append("entered")
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        yield {"pid": os.getpid()}
        self.notes.append("closed")

    async def awaited(self) -> AsyncIterator[dict[str, int]]:
        self.notes.append("entered")
        await asyncio.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        yield {"pid": os.getpid()}
        await asyncio.sleep(0)
        self.notes.append("closed")


@pytest.fixture
def opening() -> Opening:
    return Opening()


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with TaskQueue(database_url, per_user=None) as made:
        made.handler("other", isolation="none")(lambda task, payload: None)
        yield made


def register(queue: TaskQueue, way: str, opening: Opening) -> None:
    if way == "async":

        @queue.handler("model", retries=0, setup=opening.awaited)
        async def awaited(task: Any, payload: Any, model: Any) -> Any:
            return model

    else:
        isolation: Any = way

        @queue.handler("model", retries=0, isolation=isolation, setup=opening.plain)
        def called(task: Any, payload: Any, model: Any) -> Any:
            return model


def drain(queue: TaskQueue, **settings: Any) -> None:
    Worker(queue, settings=Settings(rest=0.05, **settings)).run(burst=True)


@pytest.mark.parametrize("way", WAYS)
def test_a_setup_is_entered_once_and_passed_to_every_task_and_closed(queue: TaskQueue, way: str, opening: Opening):
    register(queue, way, opening)
    tasks = queue.submit_many([{"kind": "model"}] * 5)
    drain(queue)
    assert opening.notes == ["entered", "closed"]
    assert [queue.result(task.id) for task in tasks] == [{"pid": os.getpid()}] * 5


@pytest.mark.parametrize("way", WAYS)
def test_a_setup_that_fails_costs_no_attempt_and_other_kinds_run(
    queue: TaskQueue, way: str, opening: Opening, caplog: pytest.LogCaptureFixture
):
    register(queue, way, opening)
    opening.error = ConnectionError("no model server, token=geheim123")
    tasks = queue.submit_many([{"kind": "model"}] * 5)
    other = queue.submit("other", priority="low")
    drain(queue)
    assert {(queue.get(task.id).status, queue.get(task.id).attempts) for task in tasks} == {(Status.QUEUED, 0)}
    assert queue.get(other.id).status is Status.COMPLETED
    [record] = [record for record in caplog.records if "the set-up of a handler failed" in record.getMessage()]
    assert vars(record)["fields"]["kind"] == "model"
    assert opening.notes == ["entered"]
    opening.error = None
    drain(queue)  # a worker that was started again
    assert {queue.get(task.id).status for task in tasks} == {Status.COMPLETED}


@pytest.mark.parametrize("way", WAYS)
def test_leases_are_renewed_while_a_setup_takes_long(queue: TaskQueue, way: str, opening: Opening):
    register(queue, way, opening)
    opening.seconds = 3.0
    queue.submit_many([{"kind": "model"}] * 3)
    stop = threading.Event()

    def sweep() -> None:
        sweeper = Sweeper(queue)
        while not stop.wait(0.05):
            sweeper.tick()

    sweeping = threading.Thread(target=sweep)
    sweeping.start()
    try:
        worker = Worker(queue, settings=Settings(rest=0.05, lease=1.5))
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and any(not task.is_final for task in queue.list()):
            worker.tick(ahead=True)
    finally:
        stop.set()
        sweeping.join()
    assert queue.database.all("SELECT count(*) FROM task_attempts") == [(0,)]
    assert queue.database.all("SELECT DISTINCT status FROM tasks") == [("COMPLETED",)]
    assert opening.notes[0] == "entered"
    assert opening.notes.count("entered") == 1


@pytest.mark.parametrize(
    ("setup", "is_async", "message"),
    [
        (7, False, "setup= must be a function that returns a context manager"),
        (lambda needed: needed, False, "setup= must not need arguments"),
        (Opening().awaited, False, "setup= is async, and the function is not"),
        (threading.Lock(), True, "setup= is a context manager, and each worker needs one of its own"),
    ],
)
def test_what_cannot_be_a_setup_is_refused_before_anything_runs(
    queue: TaskQueue, setup: Any, is_async: bool, message: str
):
    async def awaited(task: Any, payload: Any, model: Any) -> None: ...

    with pytest.raises(InvalidInput, match=message):
        queue.handler("model", setup=setup)(awaited if is_async else lambda task, payload, model: None)
    assert "model" not in queue.handlers


@pytest.mark.parametrize("way", WAYS)
def test_an_eager_queue_enters_setups(queue: TaskQueue, way: str, opening: Opening):
    register(queue, way, opening)
    with eager(queue) as under_test:
        assert under_test.result(under_test.submit("model").id) == {"pid": os.getpid()}
    assert opening.notes == ["entered", "closed"]
