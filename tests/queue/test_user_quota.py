"""How many tasks one user may have at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from headway.queue.task import UserBusy
from headway.queue.task_queue import TaskQueue
from tests.services.waiting import eventually


def lowered(database_url: str, *, before: int, after: int) -> TaskQueue:
    """A queue that allowed ``before`` tasks, of which the one in the highest place is active; then it allows ``after``."""
    queue = TaskQueue(database_url, per_user=before)
    queue.handler("caption")(lambda task, payload: payload)
    tasks = [queue.submit("caption", user_id="anna") for _ in range(before)]
    for task in tasks[:-1]:
        queue.cancel(task.id)
    queue.configure(database=database_url, per_user=after)
    return queue


@pytest.mark.parametrize("many", [False, True], ids=["one", "many"])
def test_a_limit_per_user_that_is_lowered_counts_the_task_in_a_higher_place(database_url: str, many: bool):
    with lowered(database_url, before=2, after=1) as queue:
        asked: list[dict[str, Any]] = [
            {"kind": "caption", "user_id": user} for user in (["ben", "anna"] if many else ["anna"])
        ]
        with pytest.raises(UserBusy):
            queue.submit_many(asked)
        (active,) = queue.list(status="QUEUED")
        queue.cancel(active.id)
        assert len(queue.submit_many(asked)) == len(asked)


def test_a_limit_per_user_that_is_lowered_leaves_room_for_as_many_as_it_says(database_url: str):
    with lowered(database_url, before=3, after=2) as queue:
        queue.submit("caption", user_id="anna")
        with pytest.raises(UserBusy):
            queue.submit("caption", user_id="anna")


def test_a_task_is_not_tried_again_over_a_limit_that_was_lowered(database_url: str):
    with lowered(database_url, before=2, after=1) as queue:
        (old,) = queue.list(status="CANCELLED")
        with pytest.raises(UserBusy):
            queue.retry(old.id)


def test_a_retry_and_a_submission_at_the_same_moment_are_one_accepted_and_one_busy(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        cancelled = queue.cancel(queue.submit("caption", user_id="anna").id)
        with psycopg.connect(postgres_with_tables) as connection, ThreadPoolExecutor(1) as threads:
            queue.submit("caption", user_id="anna", id="first", connection=connection)
            retried = threads.submit(queue.retry, cancelled.id)  # it waits for the one that is not committed
            eventually(lambda: queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            connection.commit()
            with pytest.raises(UserBusy, match="first is QUEUED"):
                retried.result(60)
