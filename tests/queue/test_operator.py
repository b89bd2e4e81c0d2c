"""Workers that an operator asks to end; the quick check of users' places; what recognises a task."""

from __future__ import annotations

import hashlib
import json
import logging
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet

from headway.errors import InvalidInput, NotFound
from headway.queue.recovery import Sweeper
from headway.queue.task import Status, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from headway.views.queue import read_queues, read_workers, task_view
from headway.views.shape import plain
from tests.queue import app
from tests.queue.nursery import Forked, Nursery
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[[str], Forked]
Cli = Callable[..., subprocess.CompletedProcess[str]]


# ---- workers ---------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["database", "rq"])
def redis_url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("redis_server").url(0) if request.param == "rq" else ""


@pytest.fixture
def queue(postgres_url: str, redis_url: str) -> Iterator[TaskQueue]:
    with app.build(postgres_url, redis=redis_url or None) as made:
        yield made


@pytest.fixture
def start(nursery: Nursery, queue: TaskQueue, postgres_url: str) -> Iterator[Start]:
    started: list[Forked] = []

    def begin(name: str) -> Forked:
        started.append(nursery.start(name, url=postgres_url, redis=queue.backend.redis_url, drain=60.0))
        eventually(lambda: queue.database.all("SELECT 1 FROM task_workers WHERE name = ?", (name,)), 60)
        return started[-1]

    yield begin
    for child in started:
        child.kill()


@pytest.mark.req("S2-41")
def test_a_drained_worker_finishes_what_it_runs_and_a_stopped_one_gives_it_back(
    queue: TaskQueue, start: Start, headway_cli: Cli, postgres_url: str
):
    drained = start("w-drained")
    task = queue.submit("sleep.fork", 5.0)
    eventually(lambda: queue.get(task.id).status is Status.RUNNING, 60)
    answer = headway_cli("workers", "drain", "w-drained", "-d", postgres_url)
    assert answer.returncode == 0, answer.stderr
    assert drained.wait(60) == 0
    assert (queue.get(task.id).status, queue.get(task.id).worker) == (Status.COMPLETED, "w-drained")

    stopped = start("w-stopped")
    task = queue.submit("sleep.fork", 600.0, id="long")
    eventually(lambda: queue.get("long").status is Status.RUNNING, 60)
    answer = headway_cli("workers", "stop", "w-stopped", "--yes", "-d", postgres_url)
    assert answer.returncode == 0, answer.stderr
    assert stopped.wait(60) == 0
    assert (queue.get("long").status, queue.get("long").attempts) == (Status.QUEUED, 0)

    shown = json.loads(headway_cli("workers", "--json", "-d", postgres_url).stdout)["workers"]
    assert {one["name"]: one["wanted"] for one in shown} == {"w-drained": "drain", "w-stopped": "stop"}
    assert all(one["wanted_by"] and one["wanted_at"] for one in shown)
    trail = queue.database.all("SELECT action, detail FROM audit ORDER BY seq")
    assert [(action, json.loads(detail)["worker"]) for action, detail in trail] == [
        ("worker.drain", "w-drained"),
        ("worker.stop", "w-stopped"),
    ]


@pytest.mark.req("S2-41")
def test_a_worker_that_never_rests_hears_it_too_and_a_drain_can_become_a_stop(queue: TaskQueue, start: Start):
    busy = start("w-busy")
    queue.submit_many([{"kind": "sleep.none", "payload": 0.05}] * 2000)
    eventually(lambda: queue.list(status=Status.COMPLETED), 60)
    queue.drain("w-busy", by="root")
    assert busy.wait(60) == 0
    assert queue.list(status=Status.QUEUED), "it left the rest"
    assert not queue.list(status=Status.RUNNING)
    queue.database.write("DELETE FROM tasks")

    slow = start("w-slow")
    queue.submit("sleep.fork", 600.0, id="long")
    eventually(lambda: queue.get("long").status is Status.RUNNING, 60)
    assert queue.drain("w-slow", by="root") == "drain"
    eventually(lambda: read_workers(queue).workers[0].wanted, 60)
    assert queue.stop("w-slow", by="anna") == "stop"
    assert queue.drain("w-slow", by="root") == "stop", "it is not taken back"
    assert slow.wait(60) == 0
    assert queue.get("long").status is Status.QUEUED


@pytest.mark.parametrize("redis_url", ["database"], indirect=True)
def test_a_worker_that_is_not_there_or_has_ended_cannot_be_asked(queue: TaskQueue):
    Worker(queue, name="w-ended").run(burst=True)
    for ask in (queue.drain, queue.stop):
        with pytest.raises(NotFound, match="no worker w-nobody"):
            ask("w-nobody", by="root")
        with pytest.raises(InvalidInput, match="w-ended is ended"):
            ask("w-ended", by="root")
    assert queue.database.all("SELECT 1 FROM audit") == []


@pytest.mark.parametrize("redis_url", ["database"], indirect=True)
def test_a_worker_that_was_taken_for_lost_and_is_not_is_shown_alive(queue: TaskQueue, start: Start):
    start("w-back")
    queue.database.write("UPDATE task_workers SET state = 'lost', ended_at = seen_at")
    eventually(lambda: [one.state for one in read_workers(queue).workers] == ["idle"], 60)
    assert queue.database.all("SELECT 1 FROM task_workers WHERE ended_at IS NULL")
    queue.drain("w-back", by="root")


@pytest.mark.parametrize("redis_url", ["database"], indirect=True)
def test_a_worker_that_has_ended_is_taken_off_the_list_and_one_that_works_is_not(queue: TaskQueue, start: Start):
    Worker(queue, name="w-ended").run(burst=True)
    start("w-works")
    with pytest.raises(InvalidInput, match="w-works is idle: it has not ended"):
        queue.remove_worker("w-works", by="root")
    queue.remove_worker("w-ended", by="root")
    assert [one.name for one in read_workers(queue).workers] == ["w-works"]
    assert queue.database.all("SELECT actor, action FROM audit") == [("root", "worker.remove")]
    with pytest.raises(NotFound, match="no worker w-ended"):
        queue.remove_worker("w-ended", by="root")
    queue.drain("w-works", by="root")


# ---- the user's place in Redis ---------------------------------------------------------------------------------------


@pytest.fixture
def shop(postgres_url: str, redis_server: RedisServer) -> Iterator[TaskQueue]:
    with TaskQueue(postgres_url, redis=redis_server.url(0)) as made:
        made.handler("caption", isolation="none")(lambda task, payload: payload)
        yield made


def places(redis: RedisServer) -> dict[str, str]:
    client = redis.client()
    return {str(key): str(client.get(key)) for key in client.scan_iter("*headway:queue:user:*")}


@pytest.mark.req("S2-20")
def test_a_user_who_is_busy_is_refused_without_a_transaction(
    shop: TaskQueue, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
):
    task = shop.submit("caption", 1, user_id="anna.example")
    [(key, value)] = places(redis_server).items()
    assert task.id in value
    assert "anna" not in key
    caplog.set_level(logging.DEBUG, "headway.sql")
    for _ in range(4):
        with pytest.raises(UserBusy, match=task.id) as refused:
            shop.submit("caption", 2, user_id="anna.example")
        assert refused.value.task_id == task.id
    begun = [record for record in caplog.records if record.getMessage() == "transaction begun"]
    assert len(begun) == 1, "none from the second time on"
    Worker(shop).run(burst=True)
    assert places(redis_server) == {}, "nothing is left behind"
    second = shop.submit("caption", 2, user_id="anna.example")
    shop.cancel(second.id)
    assert places(redis_server) == {}


@pytest.mark.req("S2-20", "S2-23")
@pytest.mark.parametrize("trouble", ["wiped", "stale", "nonsense", "another user's", "of another type", "away"])
def test_whatever_happens_to_the_key_sql_decides(
    shop: TaskQueue, redis_factory: Callable[..., RedisServer], postgres_url: str, trouble: str
):
    redis = redis_factory()
    with TaskQueue(postgres_url, redis=redis.url(0)) as queue:
        queue.handler("caption", isolation="none")(lambda task, payload: payload)
        old = queue.submit("caption", 1, user_id="anna")
        for _ in range(2):
            with pytest.raises(UserBusy):
                queue.submit("caption", 2, user_id="anna")
        [key] = redis.client().scan_iter("headway:queue:user:*")
        Worker(queue).run(burst=True)
        other = queue.submit("caption", 1, user_id="bert")

        def spoil() -> None:
            match trouble:
                case "wiped":
                    redis.client().flushall()
                case "stale":
                    redis.client().set(key, old.id)
                case "nonsense":
                    redis.client().set(key, b"\xff\xfe no id")
                case "another user's":
                    redis.client().set(key, other.id)
                case "of another type":
                    redis.client().delete(key)
                    redis.client().rpush(key, "x")
                case "away" if redis.running:
                    redis.kill9()

        spoil()
        new = queue.submit("caption", 2, user_id="anna")
        for _ in range(3):
            spoil()
            with pytest.raises(UserBusy, match=new.id):
                queue.submit("caption", 3, user_id="anna")
        with pytest.raises(UserBusy):
            queue.submit("caption", 3, user_id="bert")


@pytest.mark.req("S2-20")
def test_of_fifty_submissions_at_the_same_moment_one_is_accepted(shop: TaskQueue):
    outcomes, start = list[str](), threading.Barrier(50)

    def submit(n: int) -> None:
        start.wait()
        try:
            outcomes.append(shop.submit("caption", n, user_id="anna").status.value)
        except UserBusy as refused:
            outcomes.append("busy" if refused.task_id else "busy with nothing")

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(outcomes) == {"QUEUED": 1, "busy": 49}


def test_an_id_that_exists_gives_its_task_although_the_user_is_busy(shop: TaskQueue):
    shop.submit("caption", 1, user_id="anna", id="first")
    Worker(shop).run(burst=True)
    shop.submit("caption", 2, user_id="anna", id="second")
    assert shop.submit("caption", 1, user_id="anna", id="first").status is Status.COMPLETED
    assert shop.submit("caption", 2, user_id="anna", id="second").status is Status.QUEUED
    with pytest.raises(UserBusy):
        shop.submit("caption", 3, user_id="anna", id="third")


# ---- what recognises a task ------------------------------------------------------------------------------------------


@pytest.mark.req("S2-58")
def test_the_fingerprint_of_an_encrypted_payload_tells_nothing_and_survives_a_rotation(tmp_path: Path):
    url = f"sqlite:///{tmp_path}/queue.db"
    old, new = Fernet.generate_key(), Fernet.generate_key()

    def with_keys(*keys: bytes) -> TaskQueue:
        queue = TaskQueue(url, keys=keys, per_user=None)
        queue.handler("caption")(lambda task, payload: payload)
        return queue

    with with_keys() as queue:
        queue.submit("caption", {"pin": 1234}, id="before")
    with with_keys(old) as queue:
        for id in ("before", "a", "b"):
            queue.submit("caption", {"pin": 1234}, id=id)
        found: dict[str, str] = dict(queue.database.all("SELECT id, fingerprint FROM tasks"))
        guess = hashlib.sha256(b'caption\n{"pin":1234}').hexdigest()[:32]
        assert found["before"] == guess, "it was written in clear, as its payload was"
        assert found["a"] != found["b"], "nobody sees that two tasks are alike"
        assert guess[:16] not in found["a"] + found["b"]
        with pytest.raises(TaskConflict):
            queue.submit("caption", {"pin": 1235}, id="a")
    with with_keys(new, old) as queue:
        for id in ("before", "a", "b"):
            assert queue.submit("caption", {"pin": 1234}, id=id).version == 1
        with pytest.raises(TaskConflict):
            queue.submit("caption", {"pin": 1235}, id="a")
        queue.submit("caption", {"pin": 1234}, id="c")
    with with_keys(new) as queue:
        assert queue.submit("caption", {"pin": 1234}, id="c").version == 1
        with pytest.raises(TaskConflict):
            queue.submit("caption", {"pin": 1234}, id="a")


# ---- one shape -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-54")
def test_a_task_and_a_queue_have_one_shape_wherever_they_are_shown(shop: TaskQueue):
    task = shop.submit("caption", 1, user_id="anna")
    Worker(shop).run(burst=True)
    for one in (task, shop.get(task.id)):
        assert plain(task_view(one)) == one.as_json()
        assert json.loads(json.dumps(one.as_json())) == one.as_json()
    shop.pause("low", reason="upgrade", by="root")
    assert plain(read_queues(shop))["queues"] == [info.as_json() for info in shop.stats()]


def test_a_submission_that_says_something_unknown_is_refused(shop: TaskQueue):
    with pytest.raises(InvalidInput, match="no 'priorty'"):
        shop.submit_many([{"kind": "caption", "priorty": "low"}])
    assert shop.list() == []


def test_a_page_behind_a_task_that_was_deleted_meanwhile_is_not_called_empty(one_per_user: TaskQueue):
    tasks = [one_per_user.submit("caption", user_id=user) for user in ("anna", "ben", "carl")]
    one_per_user.cancel(tasks[1].id)
    one_per_user.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 40 * 86400"))
    assert [task.id for task in one_per_user.list(before=tasks[1].id)] == [tasks[0].id]
    assert Sweeper(one_per_user).purge() == 1
    with pytest.raises(NotFound):
        one_per_user.list(before=tasks[1].id)
    with pytest.raises(NotFound):  # somebody else's is as missing
        one_per_user.list(before=tasks[2].id, user_id="anna")


@pytest.mark.parametrize(
    "until",
    [
        datetime.now(UTC) - timedelta(hours=1),
        datetime(2999, 1, 1),  # noqa: DTZ001 - it is what is refused
        "tomorrow",
        datetime.max.replace(tzinfo=UTC),
    ],
)
def test_a_pause_that_would_not_begin_or_whose_end_is_a_guess_is_refused(crowd: TaskQueue, until: Any):
    with pytest.raises(InvalidInput, match="until"):
        crowd.pause("low", reason="upgrade", by="anna", until=until)
    assert not any(info.paused for info in crowd.stats())
