"""What the fourth attack on the queue found: each of these once failed."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.errors import InvalidInput, NotFound
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import UserBusy
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from headway.run.slot import seal_id
from tests.queue.test_third import pipes
from tests.services.redis import RedisServer

# ---------------------------------------------------------------------------------------------------------------------
# Limits that change while tasks are active


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


# ---------------------------------------------------------------------------------------------------------------------
# Redis and keys


def test_a_foreign_key_in_the_place_of_a_hint_costs_no_other_task_its_hint(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, redis_server.client() as client:
        queue.handler("caption")(lambda task, payload: payload)
        client.set("rq:job:second", "somebody else's")
        queue.submit_many({"kind": "caption", "id": name} for name in ("first", "second", "third"))
        assert client.lrange("rq:queue:headway:normal", 0, -1) == ["first", "second", "third"]
        assert client.hget("rq:job:second", "description") == "headway task"


def test_no_task_can_have_the_id_that_the_order_of_a_fleet_is_bound_to(queue: TaskQueue):
    with pytest.raises(InvalidInput):
        queue.submit("caption", id=seal_id(1, 2))


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def odd_user(odd: Any) -> Any:
    """Return something that is not a user id: numbers and UUIDs are."""
    return odd if isinstance(odd, str) and odd else [5]


FIVE: Any = 5
ODD: dict[str, Any] = {
    "none": None, "a number": 5, "bytes": b"x", "a list": [], "half a pair": "\ud800", "zero": "\0", "long": "x" * 100_000,
}  # fmt: skip
CALLS: list[Callable[[TaskQueue, Any], object]] = [
    lambda queue, odd: queue.pause("low", reason=odd, by="anna"),
    lambda queue, odd: queue.pause("low", reason="upgrade", by=odd),
    lambda queue, odd: queue.resume("normal", by=odd),
    lambda queue, odd: queue.limit("user", odd_user(odd), concurrency=1),
    lambda queue, odd: queue.limit("user", "anna", concurrency=1, by=odd),
    lambda queue, odd: queue.set("batch", 5, by=odd),
    lambda queue, odd: queue.set(odd, 5),
    lambda queue, odd: queue.unset(odd),
    lambda queue, odd: queue.drain(odd, by="anna"),
    lambda queue, odd: queue.drain("worker", by=odd),
    lambda queue, odd: queue.stop(odd, by="anna"),
    lambda queue, odd: queue.cancel("known", by=odd or FIVE),
    lambda queue, odd: queue.cancel("known", user_id=odd_user(odd)),
    lambda queue, odd: queue.get("known", user_id=odd_user(odd)),
    lambda queue, odd: queue.list(kind=odd or FIVE),
    lambda queue, odd: queue.list(user_id=odd_user(odd)),
    lambda queue, odd: queue.list(before=odd or FIVE),
    lambda queue, odd: queue.submit_many(odd or FIVE),
    lambda queue, odd: queue.handler("made")(odd),
    lambda queue, odd: TaskQueue(FIVE if isinstance(odd, str) else odd),
]


@pytest.mark.parametrize("odd", ODD)
def test_a_name_or_a_reason_that_no_database_keeps_is_one_clear_error(queue: TaskQueue, odd: str):
    queue.submit("caption", id="known")
    queue.pause("normal", reason="", by="anna")
    for call in CALLS:
        with pytest.raises(InvalidInput) as refused:
            call(queue, ODD[odd])
        assert len(str(refused.value)) < 300
    assert not queue.get("known").is_final
    assert [info.paused_by for info in queue.stats()] == [None, None, "anna", None]
    assert queue.database.all("SELECT actor, action FROM audit") == [("anna", "queue.pause")]
    assert queue.database.all("SELECT key FROM task_limits") == []


def test_a_page_behind_a_task_that_was_deleted_meanwhile_is_not_called_empty(queue: TaskQueue):
    tasks = [queue.submit("caption", user_id=user) for user in ("anna", "ben", "carl")]
    queue.cancel(tasks[1].id)
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 40 * 86400"))
    assert [task.id for task in queue.list(before=tasks[1].id)] == [tasks[0].id]
    assert Sweeper(queue).purge() == 1
    with pytest.raises(NotFound):
        queue.list(before=tasks[1].id)
    with pytest.raises(NotFound):  # somebody else's is as missing
        queue.list(before=tasks[2].id, user_id="anna")


# ---------------------------------------------------------------------------------------------------------------------
# Handlers


def test_a_handler_that_writes_without_end_into_the_pipe_to_its_worker_is_ended_at_its_timeout(tmp_path: Path):
    foreign = pipes()
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("flood", timeout=0.5, retries=0)
        def flood(task: Any, payload: Any) -> None:
            nothing = (struct.pack(">I", 2) + b"{}") * 10_000  # takes longer to read than to write
            ends = time.monotonic() + 20
            while time.monotonic() < ends:
                for pipe in pipes() - foreign:
                    os.write(pipe, nothing)

        task = queue.submit("flood")
        Worker(queue, settings=Settings(rest=0.05)).run(burst=True)
        assert (queue.get(task.id).error or "").startswith("TimedOut")
