"""What tasks cost: connections, keys, descriptors, memory, and the time of a submission."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, context=queue.context, settings=Settings(rest=0.05)).run(burst=True)


@pytest.mark.req("S2-36", "S2-61")
def test_two_hundred_tasks_leave_no_connection_behind(postgres_url: str, tmp_path: Path):
    """Each opens a session of its own in the process that runs it; handlers fail, are killed and leave sessions open."""
    opened = tmp_path / "opened"

    @contextmanager
    def session() -> Iterator[None]:
        with psycopg.connect(postgres_url, application_name="session"):
            with opened.open("a") as file:
                file.write(f"{os.getpid()}\n")
            yield

    def leave_one_open(task, payload) -> None:
        kept.append(psycopg.connect(postgres_url, application_name="session"))

    kept: list[object] = []
    with app.build(postgres_url) as queue, psycopg.connect(postgres_url, autocommit=True) as looking:
        queue.context = session
        queue.handler("keep.fork", retries=0)(leave_one_open)

        def connections() -> dict[str, int]:
            rows = looking.execute(
                "SELECT application_name, count(*) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name <> '' GROUP BY 1"  # neither ours, nor an autovacuum's
            )
            return dict(rows.fetchall())

        def run(count: int) -> None:
            kinds = [("echo.none", 1), ("raise.none", "exit"), ("echo.none", 2), ("echo.none", 3)] * count
            forked = [("keep.fork", None), ("kill.fork", None), ("raise.fork", "boom")] * (count // 10)
            queue.submit_many([{"kind": kind, "payload": payload} for kind, payload in (*kinds, *forked)])
            drain(queue)

        run(10)
        eventually(lambda: "session" not in connections())  # the server sees some time later that a process is gone
        before = connections()
        run(40)
        eventually(lambda: connections() == before)
        [[active]] = queue.database.all("SELECT count(*) FROM tasks WHERE status IN ('QUEUED', 'RUNNING')")
    pids = opened.read_text().split()
    assert (active, len(pids)) == (0, 4 * 50 + 3 * 5)
    assert len(set(pids)) == 1 + 3 * 5, "a forked task opens its session in its own process"


@pytest.mark.req("S2-50")
@pytest.mark.parametrize("count", [150, pytest.param(5000, marks=pytest.mark.faults)])
def test_what_has_ended_leaves_no_key_no_descriptor_and_no_memory(
    database_url: str, redis_factory: Callable[..., RedisServer], count: int
):
    server = redis_factory()
    client = server.client()
    with app.build(database_url, redis=server.url(), isolations=["none"]) as queue:
        sweeper = Sweeper(queue, hints=queue.hints)

        def run(tasks: int) -> tuple[list[str], int, int]:
            for start in range(0, tasks, 500):
                page = range(start, min(start + 500, tasks))
                queue.submit_many([{"kind": "echo.none", "payload": n} for n in page])
                drain(queue)
            sweeper.tick()
            gc.collect()
            kept = sorted(key for key in client.scan_iter() if client.ttl(key) == -1)
            return kept, len(os.listdir("/proc/self/fd")), _rss()

        run(100)
        keys, descriptors, memory = run(50)
        after = run(count)
        assert after[0] == keys
        assert set(keys) <= {"rq:queues"}
        assert after[1] <= descriptors
        assert after[2] - memory < 8 * 2**20


def _rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.req("S2-47")
def test_a_submission_takes_less_than_ten_milliseconds_on_average(postgres_url: str, redis_server: RedisServer):
    """Row in PostgreSQL and hint in Redis included. A machine that is busy with something else is asked again."""
    with app.build(postgres_url, redis=redis_server.url()) as queue:
        queue.submit("echo.none", 0)

        def mean() -> float:
            began = time.perf_counter()
            for n in range(30):
                queue.submit("echo.none", n)
            return (time.perf_counter() - began) / 30

        eventually(lambda: mean() < 0.010, 150)
        assert (redis_server.client().llen("rq:queue:headway:normal"),) == queue.database.one(
            "SELECT count(*) FROM tasks"
        )
