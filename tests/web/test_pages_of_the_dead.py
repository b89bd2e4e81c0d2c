"""What failed for good and what is done about it: tasks by cause, exports, and a plain RQ deployment that is watched."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from rq import Queue, SimpleWorker
from rq.job import Job
from rq.registry import FailedJobRegistry
from starlette.testclient import TestClient

from headway.errors import InvalidInput, NotFound
from headway.ledger import Ledger
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.views.overview import read_task_causes
from headway.views.reading import Reader
from headway.watcher import failures
from headway.web.api import actions, bulk
from headway.web.api.problems import Forbidden
from headway.web.site import User
from tests.services.redis import RedisServer
from tests.services.server import free_port
from tests.watcher import work
from tests.web.stage import Stage

OPERATOR, VIEWER = User("olga", "operator"), User("vera", "viewer")


@pytest.fixture
def stage(tmp_path: Path, redis_server: RedisServer) -> Iterator[Stage]:
    """An installation whose watcher follows the RQ queue digits."""
    stage = made(tmp_path, redis_server.url(0), "digits")
    yield stage
    stage.site.close()


def made(place: Path, redis: str, *queues: str) -> Stage:
    """A stage over a new database."""
    stage = Stage(f"sqlite:///{place}/headway.db", given={"watch_redis": redis, "watch_queues": queues})
    Ledger.open(stage.url).close()
    return stage


@pytest.fixture
def client(stage: Stage) -> Iterator[TestClient]:
    with TestClient(stage.app()) as client:
        yield client


def form(reader: Reader, name: str, user: User = OPERATOR, **fields: str) -> str:
    return actions.FORMS[name](reader, user, fields, ()).text


def activity(reader: Reader) -> list[tuple[str, str, dict[str, Any]]]:
    return [(one.actor, one.action, dict(one.detail)) for one in reader.activity().activity]


# ---------------------------------------------------------------------------------------------------------------------
# RQ


def fail(redis: Redis, *messages: str) -> list[str]:
    """Jobs of RQ that fail with these messages."""
    queue = Queue("digits", connection=redis)
    jobs = [queue.enqueue(work.fail, message, job_id=f"job-{message.split()[0]}") for message in messages]
    SimpleWorker([queue], connection=redis).work(burst=True, logging_level="ERROR")
    return [job.id for job in jobs]


def failed(redis: Redis) -> set[str]:
    return set(FailedJobRegistry("digits", connection=redis).get_job_ids())


def test_failed_jobs_of_rq_are_shown_by_cause_and_one_cause_is_requeued(
    stage: Stage, client: TestClient, redis_server: RedisServer
):
    redis, reader = Redis.from_url(redis_server.url(0)), stage.site.reader
    alike = fail(redis, "img-01 has no digits", "img-02 has no digits", "img-03 has no digits")
    [other] = fail(redis, "disk is full")
    page = client.get("/dead").text
    assert "4 jobs in RQ failed permanently, with 2 causes" in page
    assert "{id} has no digits" in page
    assert "Requeue 3 jobs of digits that failed with Boom" in page

    found = failures.read_failures(failures.followed(reader.config, reader.database))  # type: ignore[arg-type]  # it is
    assert [(len(cause.jobs), cause.type, cause.frame) for cause in found.causes] == [
        (3, "Boom", "work.py:fail"), (1, "Boom", "work.py:fail"),
    ]  # fmt: skip
    shown = found.causes[0]
    [later] = fail(redis, "img-04 has no digits")
    until = str(round(shown.jobs[0].at * 1000))
    said = form(reader, "requeue", cause=shown.id, until=until, reason="the scanner is repaired")
    assert said == "3 jobs of digits requeued in RQ."
    assert failed(redis) == {other, later}
    assert sorted(Queue("digits", connection=redis).get_job_ids()) == sorted(alike)
    told = activity(reader)[:2]
    assert [(actor, action, facts["jobs"]) for actor, action, facts in told] == [
        ("olga", "rq.requeued", 3), ("olga", "rq.requeue", 3),
    ]  # fmt: skip
    assert told[0][2]["reason"] == "the scanner is repaired"
    SimpleWorker([Queue("digits", connection=redis)], connection=redis).work(burst=True, logging_level="ERROR")
    assert failed(redis) == {other, later, *alike}, "they were run again, and failed again"


def test_what_a_job_of_rq_contains_is_never_unpickled_and_goes_back_as_it_was(
    stage: Stage, redis_server: RedisServer, tmp_path: Path
):
    class Trap:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return Path.touch, (tmp_path / "opened",)

    redis, reader = Redis.from_url(redis_server.url(0)), stage.site.reader
    [job] = fail(redis, "img-01 has no digits")
    before = redis.hgetall(Job.key_for(job))
    redis.hset(Job.key_for(job), "meta", pickle.dumps(Trap()))
    [cause] = failures.read_failures(failures.followed(reader.config, reader.database)).causes  # type: ignore[arg-type]
    bulk.requeue_cause(reader, OPERATOR, cause.id, until=cause.jobs[0].at)
    after = redis.hgetall(Job.key_for(job))
    assert not (tmp_path / "opened").exists()
    assert pickle.dumps(Trap()) == after[b"meta"]
    assert (after[b"data"], after[b"origin"], after[b"status"]) == (before[b"data"], b"digits", b"queued")


def test_a_job_of_rq_that_is_damaged_or_gone_stays_where_it_is_and_costs_no_other(
    stage: Stage, redis_server: RedisServer
):
    redis, reader = Redis.from_url(redis_server.url(0)), stage.site.reader
    jobs = fail(redis, "img-01 has no digits", "img-02 has no digits", "img-03 has no digits")
    redis.hset(Job.key_for(jobs[0]), "status", "\udcff".encode("utf-8", "surrogateescape"))
    redis.hdel(Job.key_for(jobs[1]), "data")
    [cause] = failures.read_failures(failures.followed(reader.config, reader.database)).causes  # type: ignore[arg-type]
    acted = bulk.requeue_cause(reader, OPERATOR, cause.id, until=cause.jobs[0].at)
    assert acted.touched == 1
    assert "2 jobs not requeued" in acted.text
    assert failed(redis) == {jobs[0], jobs[1]}
    with pytest.raises(NotFound, match="has this cause now"):
        bulk.requeue_cause(reader, OPERATOR, "0" * 12, until=cause.jobs[0].at)


def test_the_page_is_whole_without_rqs_redis_and_says_what_is_not_known(tmp_path: Path):
    stage = made(tmp_path, f"redis://127.0.0.1:{free_port()}/0", "digits")
    with TestClient(stage.app()) as client:
        page = client.get("/dead")
    stage.site.close()
    assert page.status_code == 200
    assert "Unknown" in page.text
    assert "No job stands failed" not in page.text


def test_queues_that_a_watcher_noted_are_followed_and_nobody_else_is_asked(tmp_path: Path, redis_server: RedisServer):
    stage = made(tmp_path, redis_server.url(3))
    reader = stage.site.reader
    assert failures.followed(reader.config, reader.database) is None
    for name in ("digits@3", "mails@3", "digits@0", "odd@name@3"):
        reader.database.run(lambda tx, name=name: tx.execute("INSERT INTO watchers VALUES (?, 1.0)", (name,)))  # type: ignore[misc]
    found = failures.followed(reader.config, reader.database)
    assert found is not None
    assert found.queues == ("digits", "mails", "odd@name")
    stage.site.close()


def test_who_may_not_retry_requeues_nothing(stage: Stage):
    for name, fields in (
        ("requeue", {"cause": "x", "until": "1"}),
        ("retry", {"tasks": "all"}),
        ("retry", {"jobs": "all"}),
    ):
        with pytest.raises(Forbidden):
            form(stage.site.reader, name, VIEWER, **fields)


# ---------------------------------------------------------------------------------------------------------------------
# Tasks


@pytest.fixture
def tasks(stage: Stage) -> TaskQueue:
    """Five failed tasks of two causes; zoe, who has one of them, has an active task as well."""
    with TaskQueue(stage.url) as queue:
        queue.handler("divide", retries=0, isolation="none")(lambda task, payload: 1 / payload)
        queue.handler("look", retries=0, isolation="none")(lambda task, payload: {}[payload])
        for n in range(3):
            queue.submit("divide", 0, id=f"div-{n}", user_id="zoe" if n == 0 else f"user-{n}")
        for n in range(2):
            queue.submit("look", "x", id=f"look-{n}", user_id=f"other-{n}")
        Worker(queue).run(burst=True)
        queue.submit("divide", 1, id="active", user_id="zoe")
        return queue


def test_failed_tasks_of_one_cause_wait_again_and_one_whose_user_is_busy_stays(stage: Stage, tasks: TaskQueue):
    reader = stage.site.reader
    numbers = {cause.type: cause.no for cause in read_task_causes(reader.database)}
    said = form(reader, "retry", tasks=str(numbers["ZeroDivisionError"]), reason="new data")
    assert said.startswith("2 tasks requeued. Still failed: 1 task of users who already have an active task.")
    assert {task.id: task.status for task in reader.tasks().tasks} == {
        "active": "QUEUED", "div-0": "FAILED", "div-1": "QUEUED", "div-2": "QUEUED", "look-0": "FAILED", "look-1": "FAILED",
    }  # fmt: skip
    actor, action, facts = activity(reader)[0]
    assert (actor, action, facts["count"], facts["reason"]) == ("olga", "task.retry", 2, "new data")
    assert form(reader, "retry", tasks="all").startswith("2 tasks requeued.")
    with pytest.raises(NotFound):
        form(reader, "retry", tasks=str(numbers["KeyError"]))


def test_no_more_tasks_are_retried_at_once_than_is_said_and_the_rest_is_said(
    stage: Stage, tasks: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bulk, "MOST", 2)
    assert form(stage.site.reader, "retry", tasks="all").count("More remain: retry again.") == 1


def test_a_selection_of_nothing_retries_nothing(stage: Stage):
    with pytest.raises(InvalidInput, match="No item is selected"):
        form(stage.site.reader, "retry", job="any", selected="1")


def test_failed_tasks_and_dead_letters_are_exported_as_lines_and_payloads_only_to_admins(
    stage: Stage, client: TestClient, tasks: TaskQueue
):
    answer = client.get("/dead/export?tasks=1")
    assert answer.headers["content-disposition"] == 'attachment; filename="failed-tasks.jsonl"'
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert sorted(line["task"]["id"] for line in lines) == ["div-0", "div-1", "div-2", "look-0", "look-1"]
    [cause] = [one for one in read_task_causes(stage.site.reader.database) if one.type == "KeyError"]
    lines = client.get(f"/dead/export?tasks=1&cause={cause.no}").text.splitlines()
    assert sorted(json.loads(line)["task"]["id"] for line in lines) == ["look-0", "look-1"]
    assert client.get("/dead/export").text == ""
    assert client.get("/dead/export?payload=1").status_code == 403
    assert client.get("/dead/export?job=nope").status_code == 404
    assert client.get("/dead/export?tasks=1&cause=x").status_code == 400
    stage.role = "user"
    assert client.get("/dead/export?tasks=1").status_code == 404
