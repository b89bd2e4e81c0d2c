"""What trying to break the queue found: each of these once failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest
from flask import Flask

from headway._lease import Owner
from headway.errors import HeadwayError, InvalidInput
from headway.events.sql import SqlOutbox
from headway.lifecycle import Shutdown
from headway.queue import claims, hinting, settling
from headway.queue.claims import Claimant
from headway.queue.flask import Headway
from headway.queue.rqsource import RqSource
from headway.queue.sweeper import Sweeper
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES, Claim, Status, Task, UserBusy
from headway.queue.watch import Settings
from headway.queue.worker import Worker
from headway.retry import RetryPolicy
from tests.queue import app
from tests.queue.nursery import Nursery
from tests.services.proxy import TcpProxy
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def who(queue: TaskQueue, name: str = "w") -> Claimant:
    return Claimant(name, Owner.current(), sorted(queue.handlers), 60.0)


def take(queue: TaskQueue, limit: int = 1, name: str = "w") -> list[Claim]:
    return queue.database.run(lambda tx: claims.claim(tx, who(queue, name), queues=PRIORITIES, limit=limit))


def complete(queue: TaskQueue, claim: Claim) -> Task:
    return queue.database.run(lambda tx: settling.complete(tx, claim, None, 0.0))


def fail(queue: TaskQueue, claim: Claim) -> Task:
    return queue.database.run(lambda tx: settling.fail(tx, claim, settling.LOST))


def served(queue: TaskQueue, count: int) -> list[str | None]:
    """Whose tasks are handed out next, one after the other."""
    return [claim.user_id for n in range(count) for claim in take(queue, name=f"w{n}")]


def wait_is_over(queue: TaskQueue) -> None:
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = 0 WHERE ready = 0"))


# ---------------------------------------------------------------------------------------------------------------------
# Turns


def test_a_user_whose_many_tasks_are_for_tomorrow_gets_their_turn_today(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna", "delay": 86_400.0} for _ in range(20))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(10))
    crowd.submit("caption", user_id="anna")
    assert served(crowd, 3).count("anna") == 1


def test_delayed_tasks_that_become_ready_take_turns_with_those_that_came_meanwhile(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(30))
    for claim in take(crowd, 29):
        complete(crowd, claim)
    crowd.submit("caption", user_id="cleo", delay=60.0)  # its turn would be the 30th
    take(crowd)
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(20))
    wait_is_over(crowd)
    assert "cleo" in served(crowd, 3)


def test_many_tasks_that_become_ready_together_do_not_go_before_another_users_first(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna", "delay": 60.0} for _ in range(10))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(3))
    wait_is_over(crowd)
    assert served(crowd, 6).count("ben") == 3


def test_a_retry_that_is_due_lets_nobody_in_before_those_who_wait(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "user_id": "anna"} for _ in range(30))
    first, *others = take(crowd, 20)
    for claim in others:
        complete(crowd, claim)
    fail(crowd, first)
    wait_is_over(crowd)
    crowd.database.run(lambda tx: claims.promote(tx, tx.now()))
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(15))
    assert served(crowd, 7).count("anna") >= 3


def test_tasks_that_an_operator_tries_again_take_their_turn(crowd: TaskQueue):
    crowd.submit_many({"kind": "resize", "user_id": "anna"} for _ in range(10))
    failed = take(crowd, 10)
    for claim in failed:
        fail(crowd, claim)
    crowd.submit_many({"kind": "caption", "user_id": "cleo"} for _ in range(30))
    take(crowd, 20)
    crowd.submit_many({"kind": "caption", "user_id": "ben"} for _ in range(3))
    for claim in failed:
        crowd.retry(claim.id)
    assert served(crowd, 9).count("ben") == 3


# ---------------------------------------------------------------------------------------------------------------------
# Cancelling


def test_a_cancelled_task_whose_worker_ends_is_not_run_again(queue: TaskQueue):
    task = queue.submit("caption", user_id="anna")
    [claim] = take(queue)
    queue.cancel(task.id, by="anna")
    queue.database.run(lambda tx: settling.give_back(tx, claim))
    assert queue.get(task.id).status is Status.CANCELLED
    assert queue.submit("caption", user_id="anna").status is Status.QUEUED, "the user's place is free"


# ---------------------------------------------------------------------------------------------------------------------
# Handlers


def test_a_process_that_a_handler_forks_in_the_worker_does_not_become_a_second_worker(
    database_url: str, tmp_path: Path, nursery: Nursery
):
    truth = tmp_path / "ran"
    with app.build(database_url) as queue:
        first = queue.submit("twice.none", str(tmp_path / "came back"))
        queue.submit_many({"kind": "log.none", "payload": {"file": str(truth)}} for _ in range(5))
        worker = nursery.start("w", url=database_url, isolations=["none"])
        try:
            eventually(lambda: queue.stats()[2].completed == 6)
        finally:
            worker.kill()
        assert queue.get(first.id).status is Status.COMPLETED
    assert (tmp_path / "came back").read_text() == "1", "its status"
    assert len(truth.read_text().splitlines()) == 5


@pytest.mark.parametrize("kind", ["die.none", "close.none"])
def test_a_task_that_kills_its_worker_costs_no_task_of_the_same_batch_its_life(
    database_url: str, tmp_path: Path, nursery: Nursery, kind: str
):
    truth = tmp_path / "ran"
    with app.build(database_url) as queue:
        before = queue.submit("log.none", {"file": str(truth)})
        deadly = queue.submit(kind)
        after = [queue.submit("log.none", {"file": str(truth)}).id for _ in range(4)]
        sweeper = Sweeper(queue)
        for n in range(2):  # its two tries
            wait_is_over(queue)
            nursery.start(f"w{n}", url=database_url, isolations=["none"]).wait()
            sweeper.tick()
        wait_is_over(queue)
        worker = nursery.start("w", url=database_url, isolations=["none"])
        try:
            eventually(lambda: all(queue.get(id).is_final for id in (before.id, deadly.id, *after)))
        finally:
            worker.kill()
        assert queue.get(deadly.id).status is Status.FAILED
        assert {queue.get(id).status for id in (before.id, *after)} == {Status.COMPLETED}


# ---------------------------------------------------------------------------------------------------------------------
# The clock


def test_a_clock_that_was_set_back_does_not_hold_up_what_has_a_rate(crowd: TaskQueue):
    crowd.limit("kind", "caption", rate=1.0)
    crowd.submit_many({"kind": "caption"} for _ in range(2))
    assert len(take(crowd)) == 1
    crowd.database.run(lambda tx: tx.execute("UPDATE task_rates SET at = at + 3600"))
    assert len(take(crowd)) == 1


def test_a_hint_from_before_the_clock_was_set_back_is_looked_for(crowd: TaskQueue):
    task = crowd.submit("caption")
    crowd.database.run(lambda tx: tx.execute("UPDATE tasks SET hinted_at = ?", (tx.now() + 3600.0,)))
    found = crowd.database.run(lambda tx: hinting.doubtful(tx, older_than=10.0, limit=10))
    assert [id for id, _ in found] == [task.id]


# ---------------------------------------------------------------------------------------------------------------------
# RQ


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
    first = source.claim(who(hinted), PRIORITIES, 1)
    assert [claim.id for claim in first] == [urgent.id]


def test_a_delayed_task_is_no_hint(hinted: TaskQueue, redis_server: RedisServer):
    hinted.submit("caption", delay=60.0)
    assert redis_server.client().llen("rq:queue:headway:normal") == 0


def test_a_worker_that_rests_outlives_a_database_that_is_away(
    redis_server: RedisServer, postgres_with_tables: str, tcp_proxy: Callable[[int], TcpProxy],
    caplog: pytest.LogCaptureFixture,
):  # fmt: skip
    port = urlsplit(postgres_with_tables).port
    assert port is not None
    proxy, ticks, shutdown = tcp_proxy(port), count(step=10.0), Shutdown()
    with TaskQueue(postgres_with_tables.replace(f":{port}", f":{proxy.port}"), redis_server.url()) as queue:
        queue.handler("caption")(lambda task, payload: payload)

        class CutWhenItRests(RqSource):
            def wait(self, seconds: float, stop: threading.Event) -> None:
                if not said():
                    proxy.refuse()
                    proxy.cut()
                super().wait(seconds, stop)

        def said() -> bool:
            return any("the store cannot be used" in record.message for record in caplog.records)

        source = CutWhenItRests(queue, redis_server.url(), name="w", clock=lambda: float(next(ticks)))
        queue.database.patience = 0.0
        worker = Worker(queue, source=source, shutdown=shutdown, settings=Settings(rest=0.05))
        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(worker.run)
            eventually(said)
            proxy.pass_through()
            eventually(lambda: worker.name in dict(queue.database.all("SELECT name, pid FROM task_workers")))
            assert not running.done()
            shutdown.stop.set()
            running.result(60)


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


# ---------------------------------------------------------------------------------------------------------------------
# Transactions


def test_a_retry_and_a_submission_at_the_same_moment_are_one_accepted_and_one_busy(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        cancelled = queue.cancel(queue.submit("caption", user_id="anna").id)
        with psycopg.connect(postgres_with_tables) as connection, ThreadPoolExecutor(1) as threads:
            queue.submit("caption", user_id="anna", id="first", connection=connection)
            retried = threads.submit(queue.retry, cancelled.id)  # it waits for the one that is not committed
            eventually(lambda: queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            connection.commit()
            with pytest.raises(UserBusy, match="first is QUEUED"):
                retried.result(60)


def test_nobody_waits_for_a_new_sink_that_waits_for_a_callers_transaction(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit("caption")
        with psycopg.connect(postgres_with_tables) as connection, ThreadPoolExecutor(1) as threads:
            queue.submit("caption", connection=connection)
            subscribed = threads.submit(SqlOutbox(queue.database).subscribe, "audit")
            eventually(lambda: queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            queue.database.retry = RetryPolicy(retries=0, base=0.1, cap=0.1, jitter=0.0)
            began = time.monotonic()
            queue.submit("caption")
            assert time.monotonic() - began < 10, "a statement that waited for the caller would take 20 s and fail"
            connection.rollback()
            with suppress(HeadwayError):
                subscribed.result(60)


def test_a_connection_in_pipeline_mode_is_refused_with_what_to_do(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, psycopg.connect(postgres_with_tables) as connection:
        queue.handler("caption")(lambda task, payload: payload)
        with connection.pipeline():
            connection.execute("CREATE TABLE mine (n integer)")
            with pytest.raises(InvalidInput, match="pipeline"):
                queue.submit("caption", connection=connection)
        assert queue.submit("caption", connection=connection).status is Status.QUEUED


def test_an_application_factory_may_be_called_again_while_the_queue_is_in_use(tmp_path: Path):
    with Headway() as queue:
        queue.handler("caption")(lambda task, payload: payload)

        def create_app(name: str) -> Flask:
            app = Flask(__name__)
            app.config["HEADWAY_DATABASE"] = f"sqlite:///{tmp_path}/{name}.db"
            queue.init_app(app)
            return app

        create_app("tasks")
        task = queue.submit("caption")
        create_app("tasks")
        assert queue.get(task.id).id == task.id
        with pytest.raises(InvalidInput, match="cannot be moved"):
            create_app("others")


# ---------------------------------------------------------------------------------------------------------------------
# What is kept


def test_counts_and_allowances_are_not_kept_for_ever(crowd: TaskQueue):
    days = 40
    crowd.limit("user", rate=2.0)
    crowd.submit("caption", user_id="anna")
    take(crowd)
    crowd.database.run(lambda tx: tx.execute("UPDATE task_rates SET at = at - ?", (days * 86_400.0,)))
    crowd.database.run(lambda tx: tx.execute("UPDATE task_minutes SET minute = minute - ?", (days * 1440,)))
    crowd.submit("caption", user_id="ben")
    take(crowd)
    Sweeper(crowd).purge()
    assert crowd.database.all("SELECT key FROM task_rates") == [("ben",)]
    assert crowd.database.one("SELECT sum(submitted) FROM task_minutes") == (1,)
