"""Odd things that happen to a queue: each costs its own task or nothing, and never the next one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

import pytest

from headway.queue import hinting
from headway.queue.rqsource import RqSource
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Priority, Status, Task
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from tests.queue import app
from tests.queue.test_tasks import take, worker
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def drain(queue: TaskQueue) -> None:
    source = None if queue.redis_url is None else RqSource(queue, queue.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


def drained(queue: TaskQueue, *ids: str) -> bool:
    drain(queue)
    return all(queue.get(id).is_final for id in ids)


@pytest.mark.parametrize("isolation", ["fork", "none"])
@pytest.mark.parametrize("text", ["a\0b", "half a pair \ud800", "x" * 100_000], ids=["nul", "surrogate", "long"])
def test_a_text_that_no_database_takes_costs_neither_its_task_nor_the_next(queue: TaskQueue, isolation: str, text: str):
    def odd(task, payload):
        task.progress(50, text)
        if payload == "raise":
            raise ValueError(text)

    queue.handler(f"odd.{isolation}", retries=0, isolation=isolation)(odd)  # type: ignore[arg-type]  # one of the two
    raised = queue.submit(f"odd.{isolation}", "raise")
    returned = queue.submit(f"odd.{isolation}", "return")
    fine = queue.submit(f"echo.{isolation}", 1)
    drain(queue)
    assert queue.get(raised.id).status is Status.FAILED
    assert (queue.get(raised.id).error or "").startswith("ValueError: ")
    assert queue.get(returned.id).status is Status.COMPLETED
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_handler_that_dies_and_leaves_a_child_holds_up_nothing(queue: TaskQueue):
    def vanish(task, payload):
        if os.fork() == 0:
            signal.pause()
        os._exit(3)

    queue.handler("vanish", retries=0, timeout=15)(vanish)
    task = queue.submit("vanish")
    fine = queue.submit("echo.fork", 1)
    drain(queue)
    assert "exited with status 3" in (queue.get(task.id).error or "")
    assert queue.get(fine.id).status is Status.COMPLETED


def test_a_child_of_a_handler_that_returns_into_our_code_says_nothing(queue: TaskQueue):
    def split(task, payload):
        child = os.fork()
        if child == 0:
            return "the child"
        os.waitpid(child, 0)
        with suppress(
            AssertionError
        ):  # if it said something, that is heard before the parent says the same thing otherwise
            eventually(lambda: queue.get(task.id).status is not Status.RUNNING, 2)
        return "the parent"

    queue.handler("split", retries=0)(split)
    queue.submit("split")
    drain(queue)
    assert queue.database.all("SELECT status, result FROM tasks") == [("COMPLETED", '"the parent"')]


@pytest.mark.req("S2-46")
def test_a_kind_that_has_used_up_its_rate_does_not_hold_up_the_others(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"} for _ in range(5)])
    crowd.submit("resize", id="other")
    crowd.limit("kind", "caption", rate=0.001)
    assert [claim.kind for claim in take(crowd)] == ["caption"]
    assert [claim.id for claim in take(crowd)] == ["other"]
    assert not take(crowd, 5, worker("w2"))


@pytest.mark.req("S2-46")
def test_a_limit_of_none_for_everybody_leaves_those_with_a_limit_of_their_own(crowd: TaskQueue):
    for user in ("anna", "bert", "cora", None):
        crowd.submit_many([{"kind": "caption", "user_id": user, "id": f"{user}-{n}"} for n in range(2)])
    crowd.limit("user", concurrency=0)
    crowd.limit("user", "cora", concurrency=1)
    assert [claim.id for claim in take(crowd, 8)] == ["cora-0", "None-0", "None-1"]
    crowd.limit("user")
    assert len(take(crowd, 8)) == 4


def test_rq_is_not_told_of_what_has_used_up_its_rate(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"} for _ in range(3)])
    crowd.submit("resize", id="other")
    crowd.limit("kind", "caption", rate=0.001)
    take(crowd)
    assert crowd.database.run(lambda tx: hinting.unhinted(tx, limit=10)) == [("other", "normal")]


@pytest.mark.req("S2-33")
def test_the_sweeper_goes_on_while_redis_is_away_and_hints_when_it_is_back(
    database_url: str, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory()
    with app.build(database_url, redis=server.url()) as queue:
        task = queue.submit("echo.none", 1)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
        server.kill9()
        sweeper = Sweeper(queue, hints=queue.hints)
        sweeper.tick()
        server.start()
        eventually(
            lambda: sweeper.tick() >= 0 and server.client().lrange("rq:queue:headway:normal", 0, -1) == [task.id]
        )


@pytest.mark.parametrize("raw", [b"a\0b", b"x" * 1_000_000, b"", "ü".encode()], ids=["nul", "long", "empty", "letter"])
def test_a_forged_id_that_no_database_takes_is_refused_and_the_next_task_runs(
    database_url: str, redis_server: RedisServer, raw: bytes
):
    with app.build(database_url, redis=redis_server.url()) as queue:
        redis_server.client().rpush("rq:queue:headway:urgent", raw)
        fine = queue.submit("echo.none", 1)
        drain(queue)
        assert queue.get(fine.id).status is Status.COMPLETED
        assert not redis_server.client().keys("rq:failed:*"), "what is no id of RQ is not shown to its tools"


@pytest.mark.parametrize("id", ["a.b", "-", "_x", "a" * 128])
def test_every_id_that_is_accepted_runs_also_where_rq_does_not_take_it(
    database_url: str, redis_server: RedisServer, id: str
):
    with app.build(database_url, redis=redis_server.url()) as queue:
        queue.submit("echo.none", 1, id=id)
        failed = queue.submit("raise.none", "boom", id=f"{id[:120]}-2")
        eventually(lambda: drained(queue, id, failed.id))
        assert (queue.get(id).status, queue.get(failed.id).status) == ("COMPLETED", "FAILED")


class Odd:
    """Hints that fail once in a way nobody knows."""

    def __init__(self) -> None:
        self.rounds = 0

    def look_at_memory(self) -> bool:
        self.rounds += 1
        if self.rounds == 1:
            raise RuntimeError("nobody knows this")
        return False

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        return [task_id for task_id, _ in tasks]

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]]:
        return list(tasks)

    def show_ended(self, tasks: Sequence[Task]) -> None:
        pass

    def forget_the_dead(self) -> None:
        pass


def test_a_sweeper_whose_round_fails_in_an_unknown_way_says_so_and_goes_on(
    queue: TaskQueue, caplog: pytest.LogCaptureFixture
):
    hints, stop = Odd(), threading.Event()
    sweeper = Sweeper(queue, hints=hints)
    thread = threading.Thread(target=sweeper.run, args=(stop,))
    thread.start()
    try:
        eventually(lambda: hints.rounds == 2)
    finally:
        stop.set()
        thread.join()
    assert "a round of the sweeper failed; it is tried again" in caplog.text


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
