"""What a stranger who wanted the queue to fail found: each of these once did."""

from __future__ import annotations

import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography.fernet import Fernet
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session

from headway.config import Config
from headway.errors import HeadwayError, InvalidInput, StorageError
from headway.events import Event, SqlOutbox, append
from headway.lifecycle import Shutdown
from headway.queue import settling
from headway.queue.supervisor import Plan, Supervisor
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import Status
from headway.queue.worker import Worker
from headway.testing import eager
from tests.queue import app
from tests.queue.nursery import Nursery
from tests.queue.test_found import take
from tests.services.postgres import PostgresServer
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

# ---------------------------------------------------------------------------------------------------------------------
# What is said


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


def test_a_text_that_only_spells_the_character_zero_is_a_payload_and_a_result(queue: TaskQueue):
    queue.handler("echo", retries=0, isolation="none")(lambda task, payload: payload)
    task = queue.submit("echo", {"pattern": "\\u0000", "path": "C:\\\\u0000"})
    Worker(queue, shutdown=Shutdown()).run(burst=True)
    assert queue.get(task.id).status is Status.COMPLETED
    with pytest.raises(InvalidInput, match=r"U\+0000"):
        queue.submit("echo", "C:\\\0")


# ---------------------------------------------------------------------------------------------------------------------
# Many


def test_more_users_who_used_up_their_rate_than_a_statement_takes_parameters_hold_up_nobody(crowd: TaskQueue):
    crowd.limit("user", rate=0.00001)
    crowd.database.run(
        lambda tx: tx.execute(
            "WITH RECURSIVE numbers (n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n < 66000) "
            "INSERT INTO task_rates (scope, key, allowance, at) SELECT 'user', 'user-' || n, 0.0, ? FROM numbers",
            (tx.now(),),
        )
    )
    crowd.submit("caption", user_id="user-7")
    free = crowd.submit("caption", user_id="anna")
    assert [claim.id for claim in take(crowd, 2)] == [free.id]


def test_a_supervisor_counts_no_more_waiting_tasks_than_it_may_have_workers(crowd: TaskQueue):
    """It looks twice a second, whether ten wait or a million."""
    crowd.submit_many({"kind": "caption"} for _ in range(10))
    supervisor = Supervisor(crowd, Plan("none:none", workers=1, most=4), shutdown=Shutdown())
    assert supervisor.waiting() == 4
    crowd.pause("normal", reason="upgrade", by="anna")
    assert supervisor.waiting() == 0


# ---------------------------------------------------------------------------------------------------------------------
# No process, no thread left


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(n for n in range(4096) if n not in used), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_task_for_which_no_process_can_be_started_waits_and_is_not_charged(queue: TaskQueue):
    task = queue.submit("resize")  # no retries
    worker = Worker(queue, shutdown=Shutdown())
    queue.stats()
    with no_descriptor_left(), pytest.raises(HeadwayError, match="Too many open files"):
        worker.tick()
    waiting = queue.get(task.id)
    assert (waiting.status, waiting.attempts) == (Status.QUEUED, 0)
    worker.tick()
    assert queue.get(task.id).status is Status.COMPLETED


def test_tasks_that_no_thread_can_look_after_wait_and_are_not_charged(
    crowd: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    crowd.handler("echo", retries=0, isolation="none")(lambda task, payload: payload)
    crowd.handlers = {"echo": crowd.handlers["echo"]}
    crowd.submit_many({"kind": "echo"} for _ in range(3))

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    worker = Worker(crowd, shutdown=Shutdown())
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(HeadwayError, match="can't start new thread"):
            worker.tick()
    assert {(task.status, task.attempts) for task in crowd.list()} == {(Status.QUEUED, 0)}
    worker.tick()
    assert {task.status for task in crowd.list()} == {Status.COMPLETED}


# ---------------------------------------------------------------------------------------------------------------------
# Keys that change while tasks wait


def test_a_task_written_with_a_key_that_the_worker_is_about_to_read_is_run(tmp_path: Path):
    """A web process may have read the file two seconds before the worker does."""
    old, new = Fernet.generate_key().decode(), Fernet.generate_key().decode()
    file = tmp_path / "headway.toml"

    def use(*keys: str) -> None:
        file.write_text(f'database = "sqlite:///{tmp_path}/tasks.db"\nqueue_keys = "{" ".join(keys)}"\n')

    use(old)
    with TaskQueue.from_settings(Config(directory=tmp_path, environment={})) as mine:
        mine.handler("echo", isolation="none")(lambda task, payload: payload)
        worker = Worker(mine, shutdown=Shutdown())
        worker.tick()  # it looked just now
        use(new, old)
        with TaskQueue.from_settings(Config(directory=tmp_path, environment={})) as theirs:
            theirs.handler("echo", isolation="none")(lambda task, payload: payload)
            task = theirs.submit("echo", "secret")
        worker.tick()
        assert mine.get(task.id).status is Status.COMPLETED


# ---------------------------------------------------------------------------------------------------------------------
# Redis


def test_a_submitter_too_leaves_a_redis_alone_that_is_nearly_full(
    tmp_path: Path, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory(maxmemory="40mb", maxmemory_policy="noeviction")
    client = server.client(0)
    for n in range(200):
        if client.info("memory")["used_memory"] < 0.9 * 40 * 2**20:
            client.set(f"ballast:{n}", "x" * 2**18)
    with TaskQueue(f"sqlite:///{tmp_path}/tasks.db", f"redis://127.0.0.1:{server.port}/0", per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit("caption")
        assert client.llen("rq:queue:headway:normal") == 0
        assert queue.database.one("SELECT count(*) FROM tasks WHERE hinted_at IS NULL") == (1,)


# ---------------------------------------------------------------------------------------------------------------------
# Transactions of callers


def test_a_callers_temporary_table_of_the_same_name_is_not_taken_for_ours(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, psycopg.connect(postgres_with_tables) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        connection.execute("CREATE TEMPORARY TABLE tasks (id text)")
        connection.execute("CREATE TEMPORARY TABLE outbox (id text)")
        task = queue.submit("caption", connection=connection)
        connection.commit()
        assert queue.get(task.id).status is Status.QUEUED


def test_a_task_may_be_part_of_a_transaction_in_two_phases(postgres_factory: Callable[..., PostgresServer]):
    server = postgres_factory(max_prepared_transactions="5")
    url = server.url(server.create_database(with_tables=True))
    with TaskQueue(url) as queue, psycopg.connect(url) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        connection.tpc_begin(connection.xid(1, "order", "tasks"))
        first = queue.submit("caption", connection=connection)
        connection.tpc_prepare()
        connection.tpc_commit()
        assert queue.get(first.id).status is Status.QUEUED
        engine = create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with Session(engine, twophase=True) as session:
            session.execute(text("SELECT 1"))
            second = queue.submit("caption", connection=session)
            session.commit()
        engine.dispose()
        assert queue.get(second.id).status is Status.QUEUED


# ---------------------------------------------------------------------------------------------------------------------
# In tests of others


@pytest.fixture
def tested() -> Iterator[TaskQueue]:
    with TaskQueue(per_user=None) as made, eager(made):
        yield made


def test_a_long_chain_of_tasks_that_submit_the_next_one_is_run(tested: TaskQueue):
    @tested.handler("count")
    def count(task: Any, left: int) -> None:
        if left:
            tested.submit("count", left - 1)

    tested.submit("count", 150)
    assert [task.status for task in tested.list(limit=1000)] == [Status.COMPLETED] * 151


def test_a_handler_may_cancel_what_it_submitted_as_it_may_beside_workers(tested: TaskQueue):
    children: list[str] = []
    tested.handler("child")(lambda task, payload: payload)

    @tested.handler("parent")
    def parent(task: Any, payload: Any) -> None:
        children.append(tested.submit("child").id)
        tested.cancel(children[0])

    tested.submit("parent")
    assert tested.get(children[0]).status is Status.CANCELLED


def test_a_task_submitted_in_a_thread_has_run_when_its_submission_returns(tested: TaskQueue):
    tested.handler("quick")(lambda task, payload: payload)

    def submit(_: int) -> Status:
        return tested.get(tested.submit("quick").id).status

    with ThreadPoolExecutor(8) as threads:
        assert set(threads.map(submit, range(100))) == {Status.COMPLETED}


def test_a_handler_may_wait_for_a_thread_of_its_own_that_submits(tested: TaskQueue):
    tested.handler("quick")(lambda task, payload: payload)

    @tested.handler("outer", retries=0)
    def outer(task: Any, payload: Any) -> str:
        with ThreadPoolExecutor(1) as threads:
            return tested.get(threads.submit(tested.submit, "quick").result(60).id).status.value

    assert tested.get(tested.submit("outer").id).status is Status.COMPLETED


def test_a_payload_that_is_refused_fails_its_task_in_a_test_as_beside_workers():
    class Forgetful:
        def encode(self, task_id: str, text: str) -> str:
            return text

        def decode(self, task_id: str, stored: str) -> str:
            raise StorageError("The key is gone.")

        def fingerprints(self, task_id: str, kind: str, text: str) -> list[str]:
            return [text]

    queue = TaskQueue(codec=Forgetful())
    queue.handler("caption")(lambda task, payload: payload)
    with eager(queue):
        task = queue.submit("caption")
        assert (queue.get(task.id).status, queue.get(task.id).error) == (
            Status.FAILED,
            "PayloadRefused: The key is gone.",
        )


# ---------------------------------------------------------------------------------------------------------------------
# What a worker holds


def test_tasks_behind_a_slow_one_in_a_workers_hands_are_run_by_an_idle_worker(
    database_url: str, tmp_path: Path, nursery: Nursery
):
    truth = tmp_path / "ran"
    with app.build(database_url) as queue:
        slow = queue.submit("patient.none", str(tmp_path / "began"))
        others = [queue.submit("log.none", {"file": str(truth)}).id for _ in range(5)]
        first = nursery.start("first", url=database_url, isolations=["none"])
        eventually((tmp_path / "began").exists)
        second = nursery.start("second", url=database_url, isolations=["none"])
        try:
            eventually(lambda: all(queue.get(id).is_final for id in others))
            assert queue.get(slow.id).status is Status.RUNNING
        finally:
            first.kill()
            second.kill()
        assert {(queue.get(id).status, queue.get(id).attempts) for id in others} == {(Status.COMPLETED, 0)}
    assert len(truth.read_text().splitlines()) == 5, "once each"


def test_a_worker_whose_tasks_take_long_claims_few_of_them(crowd: TaskQueue):
    begun: list[int] = []

    def slow(task: Any, payload: Any) -> None:
        begun.append(sum(one.status is Status.RUNNING for one in crowd.list()))
        while time.monotonic() < payload:  # as long as it takes: its duration is what is measured
            pass

    crowd.handlers = {}
    crowd.handler("slow", isolation="none")(slow)
    worker = Worker(crowd, shutdown=Shutdown())
    crowd.submit("slow", time.monotonic() + 1.2)
    worker.tick()
    crowd.submit_many({"kind": "slow", "payload": 0} for _ in range(9))
    worker.tick()
    assert begun[1] < 5


def test_a_users_tasks_that_are_given_back_together_stand_one_behind_the_other(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(10))
    held = take(crowd, 10)
    crowd.database.run(lambda tx: settling.give_back_all(tx, held))
    crowd.submit("caption", user_id="ben")
    assert "ben" in [claim.user_id for claim in take(crowd, 2)]


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_the_sweeper_deletes_old_events_of_tasks_that_every_sink_has(crowd: TaskQueue):
    outbox = SqlOutbox(crowd.database)
    outbox.subscribe("audit")
    tasks = [crowd.submit("caption").id for _ in range(3)]
    crowd.database.run(
        lambda tx: append(
            tx, Event(id="j-1", type="job.started", at=datetime.now(UTC), source="headway", job="j", version=1, data={})
        )
    )
    crowd.database.run(lambda tx: tx.execute("UPDATE outbox SET at = at - 40 * 86400"))
    recent = crowd.submit("caption").id
    for handle, event in outbox.waiting("audit", 10):
        if event.job in (tasks[0], tasks[2], recent, "j"):
            outbox.delivered("audit", [handle])
    Sweeper(crowd).purge(pages=1)
    assert [job for (job,) in crowd.database.all("SELECT job FROM outbox ORDER BY seq")] == [tasks[1], "j", recent]


def test_the_sweeper_deletes_so_much_at_a_time_that_it_finds_the_dead_in_between(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption"} for _ in range(1100))
    crowd.database.run(
        lambda tx: tx.execute("UPDATE tasks SET status = 'COMPLETED', ended_at = ?", (tx.now() - 40 * 86_400,))
    )
    crowd.database.run(lambda tx: tx.execute("UPDATE outbox SET at = at - 40 * 86400"))
    sweeper = Sweeper(crowd)
    left = []
    for _ in range(3):
        sweeper.purge(pages=1)
        left.append(
            (
                crowd.database.one("SELECT count(*) FROM tasks"),
                crowd.database.one("SELECT count(*) FROM outbox"),
            )
        )
    assert left == [((600,), (600,)), ((100,), (100,)), ((0,), (0,))]
