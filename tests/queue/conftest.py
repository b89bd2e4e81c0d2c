"""A queue on each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.queue.task_queue import TaskQueue
from tests.queue.nursery import Forked, Nursery


@pytest.fixture(params=["file", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "file":
        return f"sqlite:///{tmp_path}/queue.db"
    return str(request.getfixturevalue("postgres_with_tables"))


@pytest.fixture
def queue(one_per_user: TaskQueue) -> TaskQueue:
    """The queue of a test; a file may replace it by one of its own."""
    return one_per_user


@pytest.fixture
def one_per_user(database_url: str) -> Iterator[TaskQueue]:
    """A queue that allows one active task per user."""
    with TaskQueue(database_url) as made:
        made.handler("caption", retries=3, retry_delay=0.01)(lambda task, payload: payload)
        made.handler("resize", retries=0)(lambda task, payload: payload)
        yield made


@pytest.fixture
def crowd(database_url: str) -> Iterator[TaskQueue]:
    """A queue without a limit per user."""
    with TaskQueue(database_url, per_user=None) as made:
        made.handler("caption", retries=3, retry_delay=0.01)(lambda task, payload: payload)
        made.handler("resize", retries=0)(lambda task, payload: payload)
        yield made


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def spawn(nursery: Nursery, queue: TaskQueue, database_url: str) -> Iterator[Callable[..., Forked]]:
    """Starts a worker process on the test's queue: with its Redis, if it has one."""
    started: list[Forked] = []

    def start(name: str, drain: float = 5.0, **more: Any) -> Forked:
        child = nursery.start(name, url=database_url, redis=queue.backend.redis_url, drain=drain, **more)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()
