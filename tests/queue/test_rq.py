"""RQ carries ids only: wiped, forged, replayed or away, it can neither lose a task nor have anything executed."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import zlib
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue as RqQueue
from rq import Worker as RqWorker
from rq.job import Job as RqJob
from rq.registry import FailedJobRegistry, StartedJobRegistry
from rq.results import Result
from rq.serializers import JSONSerializer

from headway.queue.recovery import Sweeper
from headway.queue.rq.hints import RqHints
from headway.queue.rq.source import RqSource
from headway.queue.task import Status, Task, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.nursery import Forked
from tests.queue.test_worker import ended
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return f"redis://127.0.0.1:{redis_server.port}/0"


@pytest.fixture
def queue(database_url: str, redis_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url, redis=redis_url) as made:
        yield made


def raw_client(server: RedisServer) -> Any:
    """RQ's classes want bytes."""
    return redis.Redis(port=server.port)


def drain(queue: TaskQueue) -> None:
    assert queue.backend.redis_url is not None
    source = RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


def drained(queue: TaskQueue, id: str) -> Task | None:
    drain(queue)
    return ended(queue, id)


@pytest.mark.req("S2-01", "S2-02", "S2-06")
def test_a_task_is_hinted_in_the_queue_of_its_priority_without_its_payload(queue: TaskQueue, redis_server: RedisServer):
    tasks = {
        priority: queue.submit("echo.none", {"secret": "canary"}, role="admin", priority=priority)
        for priority in ("urgent", "high", "normal", "low")
    }
    client = redis_server.client(0)
    assert client.smembers("rq:queues") == {f"rq:queue:headway:{priority}" for priority in tasks}
    for priority, task in tasks.items():
        assert client.lrange(f"rq:queue:headway:{priority}", 0, -1) == [task.id]
        assert client.hget(f"rq:job:{task.id}", "description") == "headway task"
    raw = raw_client(redis_server)
    dump = b"".join(raw.dump(key) or b"" for key in raw.scan_iter())
    unpacked = b"".join(zlib.decompress(raw.hget(f"rq:job:{task.id}", "data") or b"") for task in tasks.values())
    assert b"canary" not in dump + unpacked


@pytest.mark.req("S2-05", "S2-07")
def test_a_worker_serves_the_queues_in_order_and_rqs_tools_see_it(
    queue: TaskQueue, redis_server: RedisServer, spawn: Callable[..., Forked], tmp_path: Path
):
    truth = tmp_path / "ran"
    ids = [
        queue.submit("log.fork", {"file": str(truth)}, role="admin", priority=priority).id
        for priority in ("low", "normal", "high", "urgent")
    ]
    spawn("w-1")
    eventually(lambda: all(ended(queue, id) for id in ids), 30)
    assert [line.split()[0] for line in truth.read_text().splitlines()] == ids[::-1]
    client = raw_client(redis_server)
    [seen] = RqWorker.all(connection=client)
    assert (seen.name, seen.queue_names()) == (
        "w-1",
        [f"headway:{name}" for name in ("urgent", "high", "normal", "low")],
    )
    eventually(lambda: not client.keys("rq:job:*"))  # what is over leaves nothing; Redis hears of it after the rows
    assert not client.keys("rq:execution*")


def test_rq_reads_a_hint_as_a_job_of_its_own(queue: TaskQueue, redis_server: RedisServer):
    tasks = queue.submit_many({"kind": "echo.none", "id": f"t-{n}_{n}"} for n in range(3))
    client = raw_client(redis_server)
    jobs = RqQueue("headway:normal", connection=client, serializer=JSONSerializer).jobs
    assert [(job.id, job.args, job.get_status().value) for job in jobs] == [
        (task.id, [task.id], "queued") for task in tasks
    ]
    assert {job.func_name for job in jobs} == {"headway.queue.rq.not_by_this_worker"}


def test_a_task_that_ends_at_once_is_never_shown_to_rq_as_started(queue: TaskQueue, redis_server: RedisServer):
    tasks = queue.submit_many({"kind": "echo.none"} for _ in range(20))
    client = raw_client(redis_server)
    with client.monitor() as monitor:
        heard = (command["command"] for command in monitor.listen())
        drain(queue)
        client.echo("over")
        said = list(takewhile(lambda command: command != "ECHO over", heard))
    assert any(command.startswith("DEL rq:job:") for command in said)
    assert not [command for command in said if "rq:execution" in command or "rq:wip:" in command]
    assert not client.exists(*(f"rq:job:{task.id}" for task in tasks))


@pytest.mark.parametrize("kind", ["patient.fork", "patient.none"])
def test_a_running_task_is_in_rqs_registry_of_started_jobs(
    queue: TaskQueue, redis_server: RedisServer, spawn: Callable[..., Forked], tmp_path: Path, kind: str
):
    spawn("w-1")
    task = queue.submit(kind, str(tmp_path / "began"))
    eventually((tmp_path / "began").exists, 30)
    registry = StartedJobRegistry("headway:normal", connection=raw_client(redis_server))
    assert eventually(lambda: registry.get_job_ids(cleanup=False)) == [task.id]
    queue.cancel(task.id, by="anna")
    eventually(lambda: ended(queue, task.id), 30)
    eventually(lambda: not registry.get_job_ids(cleanup=False))


def test_a_task_that_failed_for_good_is_in_rqs_registry_of_failed_jobs_sanitised(
    queue: TaskQueue, redis_server: RedisServer
):
    task = queue.submit("raise.none", "password=canary")
    drain(queue)
    client = raw_client(redis_server)
    registry = FailedJobRegistry("headway:normal", connection=client)
    assert registry.get_job_ids(cleanup=False) == [task.id]
    [result] = Result.all(RqJob.fetch(task.id, connection=client, serializer=JSONSerializer))
    assert result.exc_string == f"ValueError (see: headway task show {task.id})"
    assert "canary" not in str(client.hgetall(f"rq:job:{task.id}")) + str(result.exc_string)


@pytest.mark.parametrize("forgery", ["pickle", "shell", "swapped", "callback", "replay", "garbage"])
def test_a_forged_job_is_never_executed(
    queue: TaskQueue, redis_server: RedisServer, forgery: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    canary = tmp_path / "canary"
    client = raw_client(redis_server)
    rq_queue = RqQueue("headway:normal", connection=client)

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    mine = queue.submit("echo.none", 1)
    match forgery:
        case "pickle":
            job = RqJob.create("os.getpid", connection=client, id="forged", origin="headway:normal")
            client.hset(job.key, mapping={**job.to_dict(), "data": zlib.compress(pickle.dumps(Bomb()))})
            client.rpush("rq:queue:headway:normal", "forged")
        case "shell":
            rq_queue.enqueue("os.system", f"touch {canary}", job_id="forged")
        case "swapped":
            client.hset(f"rq:job:{mine.id}", "data", zlib.compress(pickle.dumps(Bomb())))
        case "callback":
            client.hset(f"rq:job:{mine.id}", "success_callback_name", "os.system")
        case "replay":
            drain(queue)
            client.rpush("rq:queue:headway:normal", mine.id)
        case "garbage":
            client.rpush("rq:queue:headway:normal", b"\xff\xfe" * 1000)
    fine = queue.submit("echo.none", 2)
    with caplog.at_level(logging.CRITICAL, "headway"):
        eventually(lambda: drained(queue, fine.id))
    assert not canary.exists()
    assert queue.get(mine.id).status is Status.COMPLETED
    [[completions]] = queue.database.all(
        "SELECT count(*) FROM outbox WHERE job = ? AND type = 'task.completed'", (mine.id,)
    )
    assert completions == 1
    refused = [record for record in caplog.records if "security" in record.message]
    assert bool(refused) == (forgery in ("pickle", "shell", "garbage"))


@pytest.mark.req("S2-33")
def test_a_wiped_redis_costs_no_task(queue: TaskQueue, redis_server: RedisServer):
    ids = [queue.submit("echo.none", n).id for n in range(5)]
    redis_server.client(0).flushall()
    sweeper = Sweeper(queue, hints=queue.hints)
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
    sweeper.tick()
    assert redis_server.client(0).lrange("rq:queue:headway:normal", 0, -1) == ids, "told again, in order"
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
    sweeper.tick()
    assert redis_server.client(0).llen("rq:queue:headway:normal") == 5, "a hint that stands is not doubled"
    drain(queue)
    assert all(queue.get(id).status is Status.COMPLETED for id in ids)


@pytest.mark.req("S2-04", "S2-20", "S2-32", "S2-33")
def test_while_redis_is_away_tasks_are_accepted_and_run_from_the_database(
    database_url: str, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory()
    with app.build(database_url, redis=f"redis://127.0.0.1:{server.port}/0", per_user=1) as queue:
        queue.submit("echo.none", 1, user_id="anna")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(UserBusy):
                queue.submit("echo.none", 2, user_id="anna")
            away = [queue.submit("echo.none", n, user_id=f"u{n}") for n in range(3)]
            drain(queue)
            assert all(ended(queue, task.id) for task in away)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        back = queue.submit("echo.none", 4, user_id="bert")
        sweeper = Sweeper(queue, hints=queue.hints)
        eventually(lambda: sweeper.tick() >= 0 and drained(queue, back.id), 30)


@pytest.mark.req("S2-35", "S2-59")
def test_near_the_memory_limit_tasks_wait_in_the_database_and_somebody_is_told(
    database_url: str, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory(maxmemory="40mb", maxmemory_policy="noeviction")
    alerts: list[str] = []
    url = f"redis://127.0.0.1:{server.port}/0"
    with app.build(database_url, redis=url) as queue:
        failed = queue.submit("raise.none", "boom")
        drain(queue)
        client = server.client(0)
        assert client.zcard("rq:failed:headway:normal") == 1
        hints = RqHints(url, alert=alerts.append)
        sweeper = Sweeper(queue, hints=hints)
        for n in range(200):  # in small steps: what is on its way counts too
            if client.info("memory")["used_memory"] < 0.88 * 40 * 2**20:
                client.set(f"ballast:{n}", "x" * 2**18)
        waiting = queue.submit("echo.none", 1)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = NULL"))
        client.delete("rq:queue:headway:normal")
        sweeper.tick()
        sweeper.tick()
        assert hints.overflowing
        assert len(alerts) == 1
        assert client.llen("rq:queue:headway:normal") == 0
        assert client.zcard("rq:failed:headway:normal") == 0, "cleaned up"
        assert not client.exists(f"rq:job:{failed.id}")
        client.delete(*client.keys("ballast:*"))
        eventually(lambda: sweeper.tick() >= 0 and client.llen("rq:queue:headway:normal") == 1)
        assert len(alerts) == 2
        drain(queue)
        assert queue.get(waiting.id).status is Status.COMPLETED
        hints.close()


@pytest.mark.req("S2-31", "S2-50")
def test_what_a_killed_worker_left_in_rq_is_cleaned_up(
    queue: TaskQueue, redis_server: RedisServer, spawn: Callable[..., Forked]
):
    client: Any = redis_server.client(0)
    task = queue.submit("sleep.fork", 50)
    worker = spawn("w-1")
    eventually(lambda: queue.get(task.id).status is Status.RUNNING and client.zcard("rq:wip:headway:normal"))
    worker.kill()
    assert client.smembers("rq:workers") == {"rq:worker:w-1"}
    client.delete("rq:worker:w-1")  # as it does by itself, two minutes later
    [[entry, at]] = client.zrange("rq:wip:headway:normal", 0, -1, withscores=True)
    client.zadd("rq:wip:headway:normal", {entry: at - 600})
    now = [0.0]
    sweeper = Sweeper(queue, hints=queue.hints, clock=lambda: now[0])
    now[0] += 61
    sweeper.tick()
    assert not client.exists("rq:workers", "rq:workers:headway:normal", "rq:wip:headway:normal")
    assert queue.get(task.id).status is Status.QUEUED
    assert not client.exists("rq:failed:headway:normal")


def test_users_take_turns_also_where_workers_hear_of_tasks_through_rq(queue: TaskQueue, tmp_path: Path):
    truth = tmp_path / "ran"
    for user, count in (("anna", 4), ("bert", 2), ("cora", 1)):
        queue.submit_many(
            [
                {"kind": "log.none", "payload": {"file": str(truth)}, "user_id": user, "id": f"{user}-{n}"}
                for n in range(count)
            ]
        )
    for _ in range(3):
        Sweeper(queue, hints=queue.hints).tick()
        drain(queue)
    order = [line.split()[0] for line in truth.read_text().splitlines()]
    assert order == ["anna-0", "bert-0", "cora-0", "anna-1", "bert-1", "anna-2", "anna-3"]


@pytest.mark.req("S2-41")
def test_a_paused_queue_keeps_its_tasks_and_gives_them_in_order_when_it_is_resumed(
    queue: TaskQueue, redis_server: RedisServer
):
    ids = [queue.submit("echo.none", n).id for n in range(4)]
    queue.pause("normal", reason="upgrade", by="root")
    urgent = queue.submit("echo.none", role="admin")
    drain(queue)
    assert queue.get(urgent.id).status is Status.COMPLETED
    assert all(queue.get(id).status is Status.QUEUED for id in ids)
    queue.resume("normal")
    Sweeper(queue, hints=queue.hints).tick()
    drain(queue)
    order = [id for (id,) in queue.database.all("SELECT id FROM tasks WHERE queue = 'normal' ORDER BY started_at")]
    assert order == ids
