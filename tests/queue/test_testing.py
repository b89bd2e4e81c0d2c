"""What headway gives to the tests of its users."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headway.errors import StorageError
from headway.queue.task import Status, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.testing import eager, run_waiting

pytest_plugins = ["headway.testing"]


@pytest.fixture
def queue(tmp_path: Path) -> TaskQueue:
    """As an application has it: with a database and a Redis that are not there in a test."""
    queue = TaskQueue(f"sqlite:///{tmp_path}/never.db", redis="redis://127.0.0.1:1/0")
    calls: list[int] = []

    @queue.handler("caption", retries=2)
    def caption(task, payload):
        task.progress(50, "half")
        calls.append(payload)
        if payload == 13 or (payload == 7 and calls.count(7) < 2):
            raise ValueError("no caption")
        if payload == 99:
            queue.submit("caption", 1, user_id="nested")

    return queue


def test_a_task_is_run_before_submit_returns(queue: TaskQueue, tmp_path: Path):
    with eager(queue):
        done = queue.submit("caption", 1, user_id="anna")
        assert queue.get(done.id).status is Status.COMPLETED
        retried = queue.submit("caption", 7, user_id="anna")
        assert (queue.get(retried.id).status, queue.get(retried.id).attempts) == (Status.COMPLETED, 1)
        failed = queue.submit("caption", 13, user_id="anna")
        assert (queue.get(failed.id).status, queue.get(failed.id).attempts) == (Status.FAILED, 3)
        nested = queue.submit("caption", 99)
        assert queue.get(nested.id).status is Status.COMPLETED
        assert len(queue.list()) == 5
    assert not (tmp_path / "never.db").exists()
    assert queue.backend.redis_url is not None, "as it was before"


def test_the_same_rules_hold(queue: TaskQueue):
    with queue.moved(database="sqlite:///:memory:"):
        task = queue.submit("caption", 1, user_id="anna")
        with pytest.raises(UserBusy):
            queue.submit("caption", 2, user_id="anna")
        [ended] = run_waiting(queue)
        assert (ended.id, ended.status) == (task.id, Status.COMPLETED)


def test_a_fixture_makes_a_queue_eager(queue: TaskQueue, eager_queue):
    task = eager_queue(queue).submit("caption", 5)
    assert queue.get(task.id).status is Status.COMPLETED


@pytest.fixture
def tested() -> Iterator[TaskQueue]:
    with TaskQueue(per_user=None) as made, eager(made):
        yield made


def test_a_long_chain_of_tasks_that_submit_the_next_one_is_run(tested: TaskQueue):
    @tested.handler("count")
    def count(task: Any, left: int) -> None:
        if left:
            tested.submit("count", left - 1)

    tested.submit("count", 150)
    assert [task.status for task in tested.list(limit=1000)] == [Status.COMPLETED] * 151


def test_a_handler_may_cancel_what_it_submitted_as_it_may_beside_workers(tested: TaskQueue):
    children: list[str] = []
    tested.handler("child")(lambda task, payload: payload)

    @tested.handler("parent")
    def parent(task: Any, payload: Any) -> None:
        children.append(tested.submit("child").id)
        tested.cancel(children[0])

    tested.submit("parent")
    assert tested.get(children[0]).status is Status.CANCELLED


def test_a_task_submitted_in_a_thread_has_run_when_its_submission_returns(tested: TaskQueue):
    tested.handler("quick")(lambda task, payload: payload)

    def submit(_: int) -> Status:
        return tested.get(tested.submit("quick").id).status

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(submit, range(100))) == {Status.COMPLETED}


def test_a_handler_may_wait_for_a_thread_of_its_own_that_submits(tested: TaskQueue):
    tested.handler("quick")(lambda task, payload: payload)

    @tested.handler("outer", retries=0)
    def outer(task: Any, payload: Any) -> str:
        with ThreadPoolExecutor(1) as threads:
            return tested.get(threads.submit(tested.submit, "quick").result(60).id).status.value

    assert tested.get(tested.submit("outer").id).status is Status.COMPLETED


def test_a_payload_that_is_refused_fails_its_task_in_a_test_as_beside_workers():
    class Forgetful:
        def encode(self, task_id: str, text: str) -> str:
            return text

        def decode(self, task_id: str, stored: str) -> str:
            raise StorageError("The key is gone.")

        def fingerprints(self, task_id: str, kind: str, text: str) -> list[str]:
            return [text]

    queue = TaskQueue(codec=Forgetful())
    queue.handler("caption")(lambda task, payload: payload)
    with eager(queue):
        task = queue.submit("caption")
        assert (queue.get(task.id).status, queue.get(task.id).error) == (
            Status.FAILED,
            "PayloadRefused: The key is gone.",
        )
