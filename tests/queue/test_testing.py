"""What headway gives to the tests of its users."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status, UserBusy
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
    assert queue.redis_url is not None, "as it was before"


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
