"""Which tasks RQ knows, what RQ shows of them, and ids that RQ or the database refuses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from headway._lease import Owner
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.store import claim as claims
from headway.queue.store.claim import LEASE, Claimant
from headway.queue.task import PRIORITIES, Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.supervisor import CurrentHints
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.claiming import worker
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def test_a_foreign_key_in_the_place_of_a_hint_costs_no_other_task_its_hint(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, redis_server.client() as client:
        queue.handler("caption")(lambda task, payload: payload)
        client.set("rq:job:second", "somebody else's")
        queue.submit_many({"kind": "caption", "id": name} for name in ("first", "second", "third"))
        assert client.lrange("rq:queue:headway:normal", 0, -1) == ["first", "second", "third"]
        assert client.hget("rq:job:second", "description") == "headway task"


def far_away() -> Owner:
    """A process of another machine, which nobody here can see."""
    return replace(Owner.current(), host="far", machine="far", space="far", claim="far")


def turn_clock(queue: TaskQueue, seconds: float) -> None:
    """As if the database's clock had been set: what was written by it is so much nearer or further."""
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE leases SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE task_workers SET seen_at = seen_at - ?", (seconds,)))


def test_a_task_that_failed_because_its_worker_died_is_in_rqs_registry_of_failed_jobs(
    database_url: str, redis_server: RedisServer
):
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, redis_server.client() as client:
        queue.handler("caption", retries=0)(lambda task, payload: payload)
        failed, cancelled = queue.submit("caption"), queue.submit("caption")
        who = Claimant("far", far_away(), ["caption"])
        assert len(queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES, limit=2))) == 2
        queue.cancel(cancelled.id)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET attempts = 1"))  # it was tried alone
        turn_clock(queue, LEASE + 1)
        Sweeper(queue, hints=CurrentHints(queue)).tick()
        assert queue.get(failed.id).status == "FAILED"
        assert client.zrange("rq:failed:headway:normal", 0, -1) == [failed.id]
        assert client.hget(f"rq:job:{failed.id}", "status") == "failed"
        assert not client.exists(f"rq:job:{cancelled.id}")


@pytest.fixture
def hinted(database_url: str, redis_server: RedisServer) -> Iterator[TaskQueue]:
    with TaskQueue(database_url, redis_server.url(), per_user=None) as made:
        made.handler("caption", isolation="none")(lambda task, payload: payload)
        yield made


def test_an_urgent_task_that_rq_cannot_know_is_not_left_behind_the_low_ones(
    hinted: TaskQueue, redis_server: RedisServer
):
    hinted.submit_many({"kind": "caption", "role": "admin", "priority": "low"} for _ in range(20))
    urgent = hinted.submit("caption", id="invoice.17", role="admin", priority="urgent")
    source = RqSource(hinted, redis_server.url(), name="w")
    first = source.claim(worker(), PRIORITIES, 1)
    assert [claim.id for claim in first] == [urgent.id]


def test_a_delayed_task_is_no_hint(hinted: TaskQueue, redis_server: RedisServer):
    hinted.submit("caption", delay=60.0)
    assert redis_server.client().llen("rq:queue:headway:normal") == 0


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


def drained(queue: TaskQueue, *ids: str) -> bool:
    drain(queue)
    return all(queue.get(id).is_final for id in ids)


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
