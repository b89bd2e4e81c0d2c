"""What a deployment costs and needs: connections, keys, memory, passwords, ids, a start that says what it found."""

from __future__ import annotations

import gc
import logging
import os
import re
import secrets
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from headway.errors import InvalidInput
from headway.queue.rqsource import RqSource
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status, UserBusy
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from tests.queue import app
from tests.queue.test_tasks import complete, fail, take
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]


def drain(queue: TaskQueue) -> None:
    source = None if queue.redis_url is None else RqSource(queue, queue.redis_url, name="drainer")
    Worker(queue, source=source, context=queue.context, settings=Settings(rest=0.05)).run(burst=True)


def command(home: Path, url: str, redis_url: str | None = None) -> list[str]:
    """`headway worker` on an application in ``home``."""
    text = f"from tests.queue.app import build\nqueue = build({url!r}, redis={redis_url!r})\n"
    # Each text in a module of its own: of a file that was written twice within a second Python may take the compiled first.
    module = f"shop_{zlib.crc32(text.encode())}"
    (home / f"{module}.py").write_text(text)
    return [sys.executable, "-m", "headway", "worker", "--app", f"{module}:queue"]


def surroundings(home: Path) -> dict[str, Any]:
    return {
        "cwd": home,
        "env": {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "HEADWAY_LOG_LEVEL": "info"},
    }


def burst(home: Path, url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(home, url), "--burst"], **surroundings(home), capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.req("S2-03", "S2-04")
@pytest.mark.parametrize(
    ("redis_is", "said"),
    [("up", "INFO queue: Redis is connected"), ("down", "WARNING queue: 🟡 Redis is away at the start")],
)
def test_a_worker_says_at_its_start_whether_redis_can_be_reached(
    tmp_path: Path, redis_factory: Callable[..., RedisServer], redis_is: str, said: str
):
    server, url, log = redis_factory(), f"sqlite:///{tmp_path}/queue.db", tmp_path / "log"
    if redis_is == "down":
        server.kill9()
    with app.build(url) as queue, log.open("w") as stderr:
        task = queue.submit("echo.none", 1)
        with subprocess.Popen(command(tmp_path, url, server.url()), **surroundings(tmp_path), stderr=stderr) as worker:
            eventually(lambda: said in log.read_text(), 60)
            eventually(lambda: queue.get(task.id).status is Status.COMPLETED, 60)
            eventually(lambda: queue.database.all("SELECT 1 FROM alert_rules"), 60)  # it judges the alerts too
            worker.terminate()
            assert worker.wait(60) == 0


@pytest.mark.req("S2-61")
def test_a_worker_with_a_wrong_password_runs_nothing_and_does_not_show_it(
    tmp_path: Path, postgres_factory: Callable[..., PostgresServer]
):
    server = postgres_factory()
    with psycopg.connect(server.url(), autocommit=True) as admin:
        admin.execute("CREATE ROLE clerk LOGIN PASSWORD 'right-canary'")
        admin.execute("CREATE DATABASE shop OWNER clerk")
        rules = server.directory / "data" / "pg_hba.conf"
        rules.write_text("host all clerk 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        admin.execute("SELECT pg_reload_conf()")
    place = f"127.0.0.1:{server.port}/shop"
    right, wrong = f"postgresql://clerk:right-canary@{place}", f"postgresql://clerk:wrong-canary@{place}"
    with app.build(right) as queue:
        task = queue.submit("echo.fork", 1)
        refused = burst(tmp_path, wrong)
        assert refused.returncode != 0
        assert "password authentication failed" in refused.stderr
        assert "canary" not in refused.stderr + refused.stdout
        assert queue.get(task.id).status is Status.QUEUED
        assert burst(tmp_path, right).returncode == 0
        assert queue.get(task.id).status is Status.COMPLETED


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


def test_a_payload_that_was_moved_to_another_task_is_refused_and_said(
    database_url: str, caplog: pytest.LogCaptureFixture
):
    from cryptography.fernet import Fernet

    with app.build(database_url, keys=[Fernet.generate_key()]) as queue:
        for id in ("one", "two", "fine"):
            queue.submit("echo.none", id, id=id)
        queue.database.run(
            lambda tx: tx.execute(
                "UPDATE tasks SET payload = (SELECT payload FROM tasks AS other WHERE other.id = 'two') WHERE id = 'one'"
            )
        )
        with caplog.at_level(logging.CRITICAL, "headway"):
            drain(queue)
        assert queue.get("one").error == "PayloadRefused: The payload of task one belongs to another task."
        assert (queue.get("one").attempts, queue.get("one").status) == (1, Status.FAILED)
        assert queue.get("two").status is queue.get("fine").status is Status.COMPLETED
        assert [record.message for record in caplog.records] == ["🔴 security: a payload was refused"]


@pytest.mark.req("S2-52", "S2-54")
def test_a_task_is_answered_in_the_same_form_with_redis_and_without(tmp_path: Path, redis_server: RedisServer):
    answers = []
    for mode, redis_url in (("database", None), ("rq", redis_server.url())):
        with app.build(f"sqlite:///{tmp_path}/{mode}.db", redis=redis_url, mode=mode, per_user=1) as queue:
            waiting = queue.submit("raise.none", "boom", user_id="anna", id="t-1").as_json()
            with pytest.raises(UserBusy) as busy:
                queue.submit("raise.none", user_id="anna")
            drain(queue)
            answers.append(([waiting, queue.get("t-1").as_json()], str(busy.value)))
    changing = {"created_at", "updated_at", "run_at", "started_at", "ended_at", "worker"}
    forms = [[{**task, **dict.fromkeys(changing)} for task in tasks] for tasks, _ in answers]
    assert forms[0] == forms[1]
    assert answers[0][1] == answers[1][1] == "User anna has an active task already: t-1 is QUEUED."
    assert {name: type(value).__name__ for name, value in answers[1][0][1].items()} == {
        "id": "str", "kind": "str", "queue": "str", "status": "str", "version": "int", "user_id": "str", "role": "str",
        "attempts": "int", "retries": "int", "percent": "float", "message": "str", "error": "str", "worker": "str",
        "created_at": "str", "updated_at": "str", "run_at": "str", "started_at": "str", "ended_at": "str",
        "cancelling": "bool",
    }  # fmt: skip
