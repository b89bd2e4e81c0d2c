"""Redis freezes, is wiped, goes back in time or is replaced: at every moment of a task's life that costs nothing."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from cryptography.fernet import Fernet

from headway._lease import Owner
from headway.queue.recovery import Sweeper
from headway.queue.rq.source import RqSource
from headway.queue.store import complete as outcomes
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES, Status, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.nursery import Nursery
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def drain(queue: TaskQueue) -> None:
    assert queue.backend.redis_url is not None
    source = RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, settings=Settings(rest=0.05)).run(burst=True)


def ran(truth: Path) -> list[str]:
    return [line.split()[0] for line in truth.read_text().splitlines()]


@pytest.mark.req("S2-04", "S2-32")
def test_a_worker_notices_a_frozen_redis_within_30_seconds_and_works_on_from_the_database(
    tmp_path: Path, redis_factory: Callable[..., RedisServer], nursery: Nursery
):
    server, url, log = redis_factory(), f"sqlite:///{tmp_path}/queue.db", tmp_path / "log"
    with app.build(url, redis=server.url()) as queue:
        worker = nursery.start("w", url=url, redis=server.url(), log=str(log))
        try:
            first = queue.submit("echo.none", 1)
            eventually(lambda: queue.get(first.id).is_final)
            server.sigstop()
            during = queue.submit("echo.none", 2)
            eventually(lambda: "Redis is unreachable; tasks are claimed from the database" in log.read_text(), 30)
            eventually(lambda: queue.get(during.id).is_final)
            server.sigcont()
            after = queue.submit("echo.none", 3)
            eventually(lambda: queue.get(after.id).is_final)
        finally:
            server.sigcont()
            worker.kill()


@pytest.mark.req("S2-04", "S2-07", "S2-32", "S2-33")
def test_what_was_accepted_while_redis_was_frozen_goes_to_rq_and_runs_in_order(
    database_url: str, tmp_path: Path, redis_factory: Callable[..., RedisServer], caplog: pytest.LogCaptureFixture
):
    server, truth = redis_factory(), tmp_path / "ran"
    with app.build(database_url, redis=server.url()) as queue:
        assert queue.hints is not None
        server.sigstop()
        try:
            ids = [
                queue.submit("log.none", {"file": str(truth)}, role="admin", priority=priority).id
                for priority in reversed(PRIORITIES)
                for _ in range(2)
            ]
            assert [record.message for record in caplog.records if "Redis is unreachable" in record.message]
            assert not queue.database.all("SELECT 1 FROM tasks WHERE hinted_at IS NOT NULL"), "the rows know it at once"
        finally:
            server.sigcont()
        sweeper, client = Sweeper(queue, hints=queue.hints), server.client()
        eventually(
            lambda: sweeper.tick() >= 0 and sum(client.llen(f"rq:queue:headway:{name}") for name in PRIORITIES) == 8
        )
        drain(queue)
        pairs = [ids[n : n + 2] for n in (6, 4, 2, 0)]
        assert ran(truth) == [id for pair in pairs for id in pair]


def flushed(server: RedisServer) -> None:
    server.client().flushall()


def restored(server: RedisServer) -> None:
    server.kill9()
    shutil.copy(server.directory / "older.rdb", server.directory / "dump.rdb")
    server.start()


def replaced(server: RedisServer) -> None:
    server.kill9()
    (server.directory / "dump.rdb").unlink()
    server.start()


@pytest.mark.req("S2-14", "S2-33")
@pytest.mark.parametrize("fault", [flushed, restored, replaced])
def test_a_redis_that_lost_or_repeats_what_it_knew_costs_no_task_at_any_moment_of_its_life(
    database_url: str, tmp_path: Path, redis_factory: Callable[..., RedisServer],
    fault: Callable[[RedisServer], None], monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    monkeypatch.setattr("headway.queue.recovery.HINT_SECONDS", 0.05)
    server, truth = redis_factory(), tmp_path / "ran"
    moments = ("completed", "cancelled", "retrying", "running", "claimed", "popped", "hinted", "hinted too")
    with app.build(database_url, redis=server.url()) as queue:
        task = {name: queue.submit("log.none", {"file": str(truth)}).id for name in moments}
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET retries = 3, retry_delay = 0.01"))
        server.client().save()
        shutil.copy(server.directory / "dump.rdb", server.directory / "older.rdb")
        who = Claimant("by hand", Owner.current(), sorted(queue.handlers), 60.0)
        source = RqSource(queue, server.url(), name="by hand")
        taken = {claim.id: claim for claim in source.claim(who, PRIORITIES, 5)}
        assert set(taken) == {task[name] for name in moments[:5]}
        settled = [queue.database.run(lambda tx: outcomes.complete(tx, taken[task["completed"]], None, 0.0))]
        queue.cancel(task["cancelled"], by="anna")
        settled.append(queue.database.run(lambda tx: outcomes.fail(tx, taken[task["cancelled"]], outcomes.LOST)))
        settled.append(queue.database.run(lambda tx: outcomes.fail(tx, taken[task["retrying"]], outcomes.LOST)))
        source.settled(settled)
        assert server.client().lpop("rq:queue:headway:normal") == task["popped"]
        fault(server)
        done = queue.database.run(lambda tx: outcomes.complete(tx, taken[task["running"]], None, 0.0))
        source.settled([done])
        queue.database.run(lambda tx: outcomes.release(tx, taken[task["claimed"]]))  # its worker was told to end
        sweeper = Sweeper(queue, hints=queue.hints)

        def over() -> bool:
            sweeper.tick()
            drain(queue)
            return all(queue.get(id).is_final for id in task.values())

        eventually(over, 60)
        late = queue.submit("echo.none", 1)
        eventually(lambda: over() and queue.get(late.id).is_final)
        assert queue.get(task["cancelled"]).status is Status.CANCELLED
        assert Counter(ran(truth)) == {
            task[name]: 1 for name in ("retrying", "claimed", "popped", "hinted", "hinted too")
        }
        ended = queue.database.all(
            "SELECT job, count(*) FROM outbox WHERE type IN ('task.completed', 'task.cancelled') GROUP BY job"
        )
        assert dict(ended) == dict.fromkeys((*task.values(), late.id), 1)
        source.close()


@pytest.mark.req("S2-20")
@pytest.mark.parametrize("redis_is", ["up", "down"])
def test_of_fifty_submissions_of_one_user_at_the_same_moment_one_is_accepted(
    database_url: str, redis_factory: Callable[..., RedisServer], redis_is: str
):
    server = redis_factory()
    with app.build(database_url, redis=server.url(), per_user=1) as queue:
        queue.submit("echo.none", 0, user_id="somebody")
        if redis_is == "down":
            server.kill9()
        start, outcomes = threading.Barrier(50), list[str]()

        def submit(n: int) -> None:
            start.wait()
            try:
                outcomes.append(queue.submit("echo.none", n, user_id="anna").status.value)
            except UserBusy:
                outcomes.append("busy")

        threads = [threading.Thread(target=submit, args=(n,)) for n in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert Counter(outcomes) == {"QUEUED": 1, "busy": 49}


# ---- what can be read in Redis and in the logs ----------------------------------------------------------------------


def everything_in(client: Any) -> bytes:
    """Every value of every key, of every type, also unpacked where RQ packs it."""
    found = [b""]
    for key in client.scan_iter():
        found.append(key)
        match client.type(key):
            case b"string":
                found.append(client.get(key))
            case b"hash":
                found += [part for pair in client.hgetall(key).items() for part in pair]
            case b"list":
                found += client.lrange(key, 0, -1)
            case b"set":
                found += client.smembers(key)
            case b"zset":
                found += client.zrange(key, 0, -1)
            case b"stream":
                found += [part for _, fields in client.xrange(key) for pair in fields.items() for part in pair]
            case kind:
                raise AssertionError(f"a key of type {kind} is not looked into")
    for value in list(found):
        try:
            found.append(zlib.decompress(value))
        except zlib.error:
            continue
    return b"\n".join(found)


@pytest.mark.req("S2-58", "S2-62")
def test_nothing_of_a_payload_a_secret_or_a_traceback_is_in_redis_its_file_the_rows_or_a_log(
    database_url: str, tmp_path: Path, redis_factory: Callable[..., RedisServer], nursery: Nursery,
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    server, log = redis_factory(), tmp_path / "log"
    key = Fernet.generate_key().decode()
    caplog.set_level("DEBUG")
    with app.build(database_url, redis=server.url(), keys=[key]) as queue:
        fine = {"file": str(tmp_path / "ran"), "text": "canary-payload"}
        waiting = queue.submit("log.none", fine, id="waiting")
        client = redis.Redis(port=server.port)
        seen = everything_in(client)
        payload = {"text": "canary-payload", "token": "canary-token"}
        failing = queue.submit("leak.fork", payload, id="failing", role="admin")
        worker = nursery.start("w", url=database_url, redis=server.url(), log=str(log), options={"keys": [key]})
        try:
            eventually(lambda: queue.get(failing.id).is_final and queue.get(waiting.id).is_final, 60)
            eventually(lambda: client.zcard("rq:failed:headway:high"))
        finally:
            worker.kill()
        client.save()
        seen += everything_in(client) + (server.directory / "dump.rdb").read_bytes()
        assert b"failing" in seen, "it was looked at after it failed"
        rows = queue.database.all("SELECT payload, fingerprint, result, error, message FROM tasks")
        rows += queue.database.all("SELECT error, detail, '', '', '' FROM task_attempts")
        rows += queue.database.all("SELECT data, '', '', '', '' FROM outbox")
        error = queue.get(failing.id).error or ""
    texts = {"redis": seen.decode("utf-8", "replace"), "log": log.read_text() + caplog.text, "rows": repr(rows)}
    for place, text in texts.items():
        for canary in ("canary-payload", "canary-token", "canary-local", key):
            assert canary not in text, place
        assert place == "rows" or "Traceback" not in text, place
    assert "failing" in texts["log"], "the failure is in the log, with the task's id"
    assert error.startswith("ValueError: token=")


def who(queue: TaskQueue, name: str = "w") -> Claimant:
    return Claimant(name, Owner.current(), sorted(queue.handlers), 60.0)


@pytest.fixture
def hinted(database_url: str, redis_server: RedisServer) -> Iterator[TaskQueue]:
    with TaskQueue(database_url, redis_server.url(), per_user=None) as made:
        made.handler("caption", isolation="none")(lambda task, payload: payload)
        yield made


def test_a_worker_that_comes_back_to_a_redis_it_could_not_leave_is_not_refused_by_rq(
    hinted: TaskQueue, redis_server: RedisServer
):
    stop = threading.Event()
    RqSource(hinted, redis_server.url(), name="w").wait(0.05, stop)  # Redis was away when it was closed
    again = RqSource(hinted, redis_server.url(), name="w")
    task = hinted.submit("caption")
    again.wait(0.05, stop)
    assert [claim.id for claim in again.claim(who(hinted), PRIORITIES, 1)] == [task.id]
    again.close()


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


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
