"""Submitting tasks: ids, and arguments that are refused."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from typing import Any

import pytest

from headway.errors import InvalidInput
from headway.queue.task_queue import TaskQueue
from headway.run.fleet.slot import seal_id
from tests.queue.claiming import complete, fail, take
from tests.services.waiting import eventually


def test_no_task_can_have_the_id_that_the_order_of_a_fleet_is_bound_to(queue: TaskQueue):
    with pytest.raises(InvalidInput):
        queue.submit("caption", id=seal_id(1, 2))


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


@pytest.mark.parametrize(
    "call",
    [
        lambda queue: queue.submit(["caption"]),
        lambda queue: queue.submit("caption", role=["admin"]),
        lambda queue: queue.submit("caption", delay="5"),
        lambda queue: queue.submit("caption", delay=None),
        lambda queue: queue.limit("user", rate="5"),
        lambda queue: queue.submit_many([{"payload": 1}]),
        lambda queue: queue.submit_many(["caption"]),
        lambda queue: queue.submit_many({"kind": "caption"}),
        lambda queue: queue.set(7, 1),
        lambda queue: queue.handler("slow", timeout="5"),
        lambda queue: queue.handler("slow", retry_delay=None),
    ],
)
def test_an_argument_of_another_type_is_one_clear_error(crowd: TaskQueue, call: Callable[[TaskQueue], object]):
    with pytest.raises(InvalidInput):
        call(crowd)
    assert crowd.list() == []


@pytest.mark.req("S2-21", "S2-57")
def test_one_record_goes_through_the_whole_life_under_the_id_its_maker_gave(database_url: str):
    ids = iter(["secure-1", "not an id", ".."])
    with TaskQueue(database_url, new_id=lambda: next(ids)) as queue:
        queue.handler("caption", retries=1, retry_delay=0.01)(lambda task, payload: None)
        seen = [queue.submit("caption", {"n": 1}, user_id="anna")]
        [claim] = take(queue)
        seen.append(queue.get("secure-1"))
        seen.append(fail(queue, claim))
        [claim] = eventually(lambda: take(queue))
        seen.append(complete(queue, claim))
        assert [task.status for task in seen] == ["QUEUED", "RUNNING", "QUEUED", "COMPLETED"]
        assert {task.id for task in seen} == {"secure-1"}
        assert queue.database.all("SELECT count(*), max(version) FROM tasks") == [(1, 5)]
        for _ in range(2):
            with pytest.raises(InvalidInput, match="cannot be a task id"):
                queue.submit("caption")
        assert len(queue.list()) == 1


@pytest.mark.req("S2-57")
def test_ids_are_made_of_128_bits_of_the_systems_own_randomness(monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []
    real = secrets.token_bytes

    def counted(count: int | None = None) -> bytes:
        asked.append(count or 32)
        return real(count)

    monkeypatch.setattr("secrets.token_bytes", counted)
    with TaskQueue("sqlite:///:memory:", per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        ids = {queue.submit("caption").id for _ in range(20)}
    assert len(ids) == 20
    assert all(re.fullmatch("[0-9a-f]{32}", id) for id in ids)
    assert asked.count(16) >= 20
