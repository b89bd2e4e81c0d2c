"""One Redis for several applications: jobs of others stay where they are, and hints are found again after an upgrade."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest
import redis
from rq import Queue as RqQueue
from rq import SimpleWorker
from rq.registry import FailedJobRegistry

from headway.errors import InvalidInput
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.settings import RqOptions
from headway.queue.task import PRIORITIES, Status
from tests.queue import app
from tests.queue.test_rq import drain, raw_client, redis_url  # noqa: F401 - a fixture
from tests.services.redis import RedisServer

NAMES = ("urgent", "high", "normal", "low")


@pytest.fixture
def client(redis_url: str, redis_server: RedisServer) -> Iterator[redis.Redis]:  # noqa: F811
    with raw_client(redis_server) as made:
        yield made


@pytest.mark.req("S2-01")
def test_a_plain_rq_application_with_queues_of_the_same_names_keeps_its_jobs(
    database_url: str,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
):
    with app.build(database_url, redis=redis_url) as queue:
        jobs = {name: [RqQueue(name, connection=client).enqueue("os.getpid") for _ in range(5)] for name in NAMES}
        tasks = [queue.submit("echo.none", n, role="admin", priority=name) for n, name in enumerate(NAMES)]
        drain(queue)
        assert all(queue.get(task.id).status is Status.COMPLETED for task in tasks)
        for name in NAMES:
            assert RqQueue(name, connection=client).job_ids == [job.id for job in jobs[name]]
        SimpleWorker([RqQueue(name, connection=client) for name in NAMES], connection=client).work(burst=True)
        assert {job.get_status().value for name in NAMES for job in jobs[name]} == {"finished"}


@pytest.mark.parametrize("prefix", ["", "headway:"], ids=["no-prefix", "default-prefix"])
def test_foreign_jobs_in_a_queue_of_ours_are_put_back_and_reported_once(
    database_url: str,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
    prefix: str,
):
    with app.build(database_url, redis=redis_url, rq=RqOptions(prefix=prefix)) as queue:
        name = f"{prefix}high"
        theirs = RqQueue(name, connection=client)
        jobs = [theirs.enqueue("os.getpid") for _ in range(20)]
        tasks = [queue.submit("echo.none", n, role="admin") for n in range(5)]
        with caplog.at_level(logging.CRITICAL, "headway"):
            for _ in range(3):
                drain(queue)
        assert all(queue.get(task.id).status is Status.COMPLETED for task in tasks)
        assert sorted(id for id in theirs.job_ids if "-" in id) == sorted(job.id for job in jobs), (
            "ours may be there too"
        )
        assert not FailedJobRegistry(name, connection=client).get_job_ids(cleanup=False)
        reported = [record for record in caplog.records if "queue_prefix" in record.message]
        assert reported
        assert len(reported) <= 3 * len(jobs), "each worker names a job once"
        SimpleWorker([theirs], connection=client).work(burst=True)
        assert {job.get_status().value for job in jobs} == {"finished"}


def test_a_worker_that_meets_only_foreign_jobs_rests_between_two_pops(
    database_url: str,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
):
    with app.build(database_url, redis=redis_url) as queue:
        RqQueue("headway:low", connection=client).enqueue("os.getpid")
        now = 100.0
        source = RqSource(queue, redis_url, name="w", clock=lambda: now)
        who = app.claimant(queue)

        def returned() -> int:
            return int(client.info("commandstats")["cmdstat_rpush"]["calls"])

        before = returned()
        for _ in range(10):
            assert source.claim(who, PRIORITIES, 5) == []
            source.wait(0.0, threading.Event())
        assert returned() - before == 1
        now += 2.0
        source.claim(who, PRIORITIES, 5)
        assert returned() - before == 2
        source.close()


def test_two_deployments_with_their_own_prefix_do_not_see_each_other(
    tmp_path,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
):
    with (
        app.build(f"sqlite:///{tmp_path}/a.db", redis=redis_url, rq=RqOptions(prefix="a:")) as first,
        app.build(f"sqlite:///{tmp_path}/b.db", redis=redis_url, rq=RqOptions(prefix="b:")) as second,
    ):
        task = first.submit("echo.none", 1)
        drain(second)
        assert client.lrange("rq:queue:a:normal", 0, -1) == [task.id.encode()]
        assert not caplog.records
        drain(first)
        assert first.get(task.id).status is Status.COMPLETED


@pytest.mark.req("S2-33")
def test_hints_under_the_names_of_an_older_version_are_given_again(
    database_url: str,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
):
    with app.build(database_url, redis=redis_url, rq=RqOptions(prefix="")) as old:
        task = old.submit("echo.none", 1)
    with app.build(database_url, redis=redis_url) as queue:
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = hinted_at - 60"))
        Sweeper(queue, hints=queue.hints).tick()
        assert client.lrange("rq:queue:headway:normal", 0, -1) == [task.id.encode()]
        drain(queue)
        assert queue.get(task.id).status is Status.COMPLETED


@pytest.mark.req("S2-50")
def test_a_second_hint_leaves_nothing_of_a_task_that_is_over(
    database_url: str,
    redis_url: str,  # noqa: F811
    client: redis.Redis,
):
    with app.build(database_url, redis=redis_url) as queue:
        assert queue.hints is not None
        completed, failed = queue.submit("echo.none", 1), queue.submit("raise.none", "bad")
        drain(queue)
        queue.hints.push([(task.id, task.priority) for task in (completed, failed)])
        assert client.exists(f"rq:job:{completed.id}")
        drain(queue)
        assert not client.exists(f"rq:job:{completed.id}")
        assert 0 < client.ttl(f"rq:job:{failed.id}") <= 7 * 86_400


@pytest.mark.parametrize("prefix", ["a b", "x" * 41, "ü", "a\n"])
def test_a_prefix_that_rq_cannot_use_is_refused(prefix: str):
    with pytest.raises(InvalidInput, match="queue_prefix"):
        RqOptions(prefix=prefix)
