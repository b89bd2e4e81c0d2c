"""Registering handlers: what is refused, and how it is said."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import pytest

from headway.errors import InvalidInput
from headway.queue.rq.source import RqSource
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.services.redis import RedisServer


async def asynchronous(task: Any, payload: Any) -> None: ...


async def asynchronous_generator(task: Any, payload: Any) -> Any:
    yield 1


def generator(task: Any, payload: Any) -> Any:
    yield 1


class AsyncCallable:
    async def __call__(self, task: Any, payload: Any) -> None: ...


@pytest.mark.parametrize(
    ("function", "options", "what"),
    [
        (asynchronous_generator, {}, "is a generator function, which workers do not run"),
        (generator, {}, "is a generator function, which workers do not run"),
        (partial(generator), {}, "is a generator function, which workers do not run"),
        (asynchronous, {"isolation": "fork"}, "is async and cannot have isolation='fork'"),
        (lambda task, payload: None, {"concurrency": 5}, "is not async, and concurrency is for async handlers"),
    ],
)
def test_a_handler_that_no_worker_can_run_is_refused(
    queue: TaskQueue, function: Any, options: dict[str, Any], what: str
):
    with pytest.raises(InvalidInput, match=f"The handler of 'later' {what}") as refused:
        queue.handler("later", **options)(function)
    assert "async def" in refused.value.hint or "asyncio.run" in refused.value.hint
    assert "later" not in queue.handlers


@pytest.mark.parametrize("concurrency", [0, -1, 10_001, 1.5, True, float("nan")])
def test_a_concurrency_that_is_not_a_count_is_refused(queue: TaskQueue, concurrency: Any):
    with pytest.raises(InvalidInput, match=r"concurrency must be an integer from 1 to 10,000"):
        queue.handler("later", concurrency=concurrency)
    assert "later" not in queue.handlers


@pytest.mark.parametrize("function", [asynchronous, partial(asynchronous), AsyncCallable()])
@pytest.mark.parametrize("isolation", [None, "none"])
def test_an_async_function_is_a_handler_for_the_event_loop(queue: TaskQueue, function: Any, isolation: Any):
    queue.handler("later", isolation=isolation)(function)
    assert queue.handlers["later"].isolation == "async"
    assert queue.handlers["later"].concurrency == 100


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


@pytest.mark.parametrize("isolation", ["fork", "none"])
def test_a_handler_may_use_the_queue_itself_and_its_worker_goes_on(
    database_url: str, redis_server: RedisServer, isolation: Literal["fork", "none"]
):
    with app.build(database_url, redis=redis_server.url()) as queue:

        def plan(task, payload):
            follow = [queue.submit("echo.none", n, id=f"{task.id}-{n}").id for n in range(3)]
            return [queue.get(id).status for id in (task.id, *follow)]

        queue.handler("plan", retries=0, isolation=isolation)(plan)
        for n in range(3):
            queue.submit("plan", id=f"plan{n}")
        drain(queue)
        rows = queue.database.all("SELECT status, count(*) FROM tasks GROUP BY status")
        assert rows == [("COMPLETED", 12)]
        results = queue.database.all("SELECT result FROM tasks WHERE kind = 'plan'")
        assert results == [('["RUNNING","QUEUED","QUEUED","QUEUED"]',)] * 3
