"""Batches: what is claimed, settled or submitted together costs as many statements as one, and each task stays its own."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway._lease import Owner
from headway._sql import Tx, Value, connect
from headway._sql.tx import Cursor
from headway.core.failure import Failure
from headway.core.lifecycle import Shutdown
from headway.queue.recovery import Sweeper
from headway.queue.rq.hints import RqHints
from headway.queue.rq.source import RqSource
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store import hints as hinting
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import PRIORITIES, Priority, Status, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.nursery import Nursery
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


@pytest.fixture
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url(4)


def worker(name: str = "w1", *, lease: float = 60.0) -> Claimant:
    return Claimant(name, Owner.current(), ("caption", "resize"), lease)


def take(queue: TaskQueue, limit: int, who: Claimant | None = None, **options):
    return claims.claim_next(queue.database, who or worker(), limit=limit, **{"queues": PRIORITIES, **options})


def complete(queue: TaskQueue, taken, **options):
    done = [Success(claim, json.dumps(claim.id), 0.5, **options) for claim in taken]
    return queue.database.run(lambda tx: outcomes.complete_all(tx, done))


def events(queue: TaskQueue) -> list[tuple[str, str, int, dict[str, object]]]:
    rows = queue.database.all("SELECT job, type, version, data FROM outbox ORDER BY job, version")
    return [(job, type, version, json.loads(data)) for job, type, version, data in rows]


def statements(tx: Tx, seen: list[str]) -> Tx:
    """The same transaction, with its statements written down."""

    def execute(sql: str, values: Sequence[Value]) -> Cursor:
        seen.append(sql)
        return tx._execute(sql, values)

    return Tx(tx.engine, execute, tx._executemany)


# ---- as many statements for a hundred as for one ---------------------------------------------------------------------


@pytest.mark.req("S2-47")
def test_a_hundred_are_claimed_and_settled_by_as_many_statements_as_one(crowd: TaskQueue):
    found = []
    for many in (1, 100):
        crowd.submit_many({"kind": "caption", "payload": n} for n in range(many))
        seen: list[str] = []

        def work(tx: Tx, many: int = many, seen: list[str] = seen) -> int:
            tx = statements(tx, seen)
            taken = claims.claim(tx, worker(), queues=PRIORITIES, limit=many)
            return len(outcomes.complete_all(tx, [Success(claim, None, 0.1) for claim in taken]))

        assert crowd.database.run(work) == many
        found.append(len(seen))
    assert found[0] == found[1] <= 6


def test_on_postgresql_one_task_is_submitted_and_claimed_without_a_transaction_around_it(
    postgres_url: str, caplog: pytest.LogCaptureFixture
):
    with TaskQueue(postgres_url) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.cancel(queue.submit("caption", user_id="anna").id)  # the first one writes down the application's rule
        with caplog.at_level(logging.DEBUG, logger="headway"):
            queue.submit("caption", user_id="anna")
            assert len(take(queue, 1)) == 1
            assert "transaction begun" not in caplog.text
            assert take(queue, 1, worker("w2")) == []  # nothing was found: looked at thoroughly
            assert "transaction begun" in caplog.text


# ---- each its own ----------------------------------------------------------------------------------------------------


def test_every_change_of_a_batch_has_its_event_with_the_tasks_version(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}", "user_id": f"u{n}"} for n in range(3))
    complete(crowd, take(crowd, 3))
    told = events(crowd)
    assert [(job, type, version) for job, type, version, _ in told] == [
        (f"t{n}", f"task.{name}", version)
        for n in range(3)
        for version, name in enumerate(("queued", "running", "completed"), 1)
    ]
    assert told[0][3] == {
        "kind": "caption", "status": "QUEUED", "queue": "normal", "user_id": "u0", "attempts": 0, "error": None,
    }  # fmt: skip
    assert [data["status"] for *_, data in told[:3]] == ["QUEUED", "RUNNING", "COMPLETED"]


def test_of_a_batch_only_what_is_still_the_workers_own_is_completed(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(3))
    taken = take(crowd, 3, worker("old", lease=-1.0))
    again = crowd.database.run(outcomes.lapsed)
    assert {task.id for task in again} == {"t0", "t1", "t2"}
    [back] = [claim for claim in eventually(lambda: take(crowd, 1, worker("new"))) if claim.id]
    assert complete(crowd, taken) == {}
    assert crowd.get(back.id).status is Status.RUNNING
    assert list(complete(crowd, [back])) == [back.id]
    assert crowd.get(back.id).version == max(version for job, _, version, _ in events(crowd) if job == back.id)


def test_a_batch_of_two_kinds_is_counted_for_each(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"}, {"kind": "caption"}, {"kind": "resize", "role": "admin"}])
    complete(crowd, take(crowd, 3))
    rows = crowd.database.all(
        "SELECT kind, queue, sum(submitted), sum(completed), sum(run_seconds) FROM task_minutes GROUP BY kind, queue "
        "ORDER BY kind"
    )
    assert [tuple(row) for row in rows] == [("caption", "normal", 2, 2, 1.0), ("resize", "high", 1, 1, 0.5)]


def test_a_batch_goes_by_queues_and_by_turns(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"a{n}", "user_id": "anna"} for n in range(3))
    crowd.submit_many({"kind": "caption", "id": f"b{n}", "user_id": "bert"} for n in range(2))
    crowd.submit("caption", id="first", role="admin", priority="urgent")
    assert [claim.id for claim in take(crowd, 10)] == ["first", "a0", "b0", "a1", "b1", "a2"]


def test_what_waits_for_its_time_goes_before_what_comes_after_it_in_service(crowd: TaskQueue):
    crowd.submit("caption", id="retry", role="admin", priority="urgent", delay=0.05)
    crowd.submit("caption", id="later")
    eventually(lambda: crowd.database.now() > crowd.get("retry").run_at.timestamp())
    assert [claim.id for claim in take(crowd, 1)] == ["retry"]


def test_a_paused_queue_gives_nothing_and_a_limit_holds_in_a_batch(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"n{n}"} for n in range(4))
    crowd.pause("normal", reason="r", by="me")
    assert take(crowd, 4) == []
    crowd.resume("normal")
    crowd.limit("kind", "caption", concurrency=2)
    assert [claim.id for claim in take(crowd, 4)] == ["n0", "n1"]


def test_two_workers_that_claim_at_once_share_the_tasks(database_url: str):
    with TaskQueue(database_url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.submit_many({"kind": "caption"} for _ in range(60))
        start, got = threading.Barrier(3), dict[str, list[str]]()

        def claiming(name: str) -> None:
            start.wait()
            while True:
                taken = take(queue, 7, worker(name))
                if not taken:
                    return
                got.setdefault(name, []).extend(claim.id for claim in taken)
                complete(queue, taken)

        threads = [threading.Thread(target=claiming, args=(f"w{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        ran = [id for ids in got.values() for id in ids]
        assert len(ran) == len(set(ran)) == 60


# ---- an answer that was lost -----------------------------------------------------------------------------------------


def test_a_worker_that_did_not_hear_of_its_claim_is_given_the_same_tasks(postgres_url: str):
    with TaskQueue(postgres_url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.submit_many({"kind": "caption"} for _ in range(4))
        who = worker()
        unheard = take(queue, 2, who)
        again = take(queue, 2, who)
        assert again == unheard
        # Neither another worker nor a process that has its name is given them.
        assert {claim.id for claim in take(queue, 1, worker("w2"))}.isdisjoint(claim.id for claim in unheard)
        assert {claim.id for claim in take(queue, 1, worker())}.isdisjoint(claim.id for claim in unheard)
        # One whose lease is half over may be somebody else's in a moment.
        queue.database.write("UPDATE tasks SET lease_until = lease_until - 40 WHERE worker = 'w1'")
        assert take(queue, 2, who) == []


def test_a_batch_whose_record_was_sent_twice_is_completed_once(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption"} for _ in range(3))
    done = [Success(claim, None, 0.5) for claim in take(crowd, 3)]
    first = outcomes.complete_alone(crowd.database, done)
    again = outcomes.complete_alone(crowd.database, done)
    assert len(first) == 3
    assert again == (first if crowd.database.engine == "postgresql" else {})  # SQLite's answer is never lost
    assert len(events(crowd)) == 9
    assert crowd.database.one("SELECT sum(completed), sum(run_seconds) FROM task_minutes") == (3, 1.5)


def test_a_record_that_claims_the_next_batch_may_be_sent_twice(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(5))
    who = worker()
    done = [Success(claim, None, 0.5) for claim in take(crowd, 2, who)]

    def record_and_claim():
        return outcomes.complete_and_claim(crowd.database, done, who, queues=PRIORITIES, limit=2)

    recorded, claimed = record_and_claim()
    assert recorded == {"t0", "t1"}
    assert [claim.id for claim in claimed] == ["t2", "t3"]
    if crowd.database.engine == "postgresql":  # SQLite's answer is never lost
        assert record_and_claim() == (recorded, claimed)
    assert {task.id: task.status.value for task in crowd.list()} == {
        "t0": "COMPLETED", "t1": "COMPLETED", "t2": "RUNNING", "t3": "RUNNING", "t4": "QUEUED",
    }  # fmt: skip
    assert len(events(crowd)) == 5 + 2 + 2 + 2
    assert crowd.database.one("SELECT sum(completed), sum(run_seconds) FROM task_minutes") == (2, 1.0)


def test_what_is_somebody_elses_by_now_is_not_recorded_when_the_next_batch_is_claimed(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(3))
    kept, lost = take(crowd, 2)
    crowd.database.write("UPDATE tasks SET token = token + 1, worker = 'w2' WHERE id = ?", (lost.id,))
    done = [Success(claim, None, 0.5) for claim in (kept, lost)]
    recorded, claimed = outcomes.complete_and_claim(crowd.database, done, worker(), queues=PRIORITIES, limit=5)
    assert recorded == {kept.id}
    assert [claim.id for claim in claimed] == ["t2"]
    assert crowd.get(lost.id).status is Status.RUNNING


def test_neither_a_pause_nor_a_limit_is_passed_over_when_the_next_batch_is_claimed(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(4))
    first, second = take(crowd, 2)
    crowd.pause("normal", reason="r", by="me")
    done = [Success(first, None, 0.5)]
    assert outcomes.complete_and_claim(crowd.database, done, worker(), queues=PRIORITIES, limit=9) == ({first.id}, [])
    crowd.resume("normal")
    crowd.limit("kind", "caption", concurrency=0)
    done = [Success(second, None, 0.5)]
    assert outcomes.complete_and_claim(crowd.database, done, worker(), queues=PRIORITIES, limit=9) == ({second.id}, [])


ODD = ['"', "\\", "{}", "NULL", "a,b", "\n\t", "\u00e4\u2028", '\\"', " ", "'; DROP TABLE tasks; --", "%s ? %%"]


def test_odd_texts_of_a_batch_come_back_as_they_were(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "payload": odd, "partition": f"p{n % 2}"} for n, odd in enumerate(ODD))
    crowd.submit("caption", ODD)
    taken = take(crowd, 100)
    assert sorted(json.loads(claim.payload) for claim in taken if claim.payload[0] != "[") == sorted(ODD)
    assert [json.loads(claim.payload) for claim in taken if claim.payload[0] == "["] == [ODD]
    odd = {claim.id: text for claim, text in zip(taken, [*ODD, "last"], strict=True)}
    done = [Success(claim, json.dumps(odd[claim.id]), 0.1, odd[claim.id]) for claim in taken]
    assert len(outcomes.complete_alone(crowd.database, done)) == len(taken)
    rows = crowd.database.all("SELECT id, result, message FROM tasks")
    assert {id: (json.loads(result), message) for id, result, message in rows} == {
        id: (text, text) for id, text in odd.items()
    }


def test_a_batch_is_recorded_and_the_next_claimed_without_reading_the_table_from_end_to_end(postgres_url: str):
    """However large the table was when PostgreSQL made its plan. The server counts; a session that ended has told it all."""

    def read_through() -> int:
        with connect(postgres_url) as other:
            row = other.one("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 'tasks'")
        assert row is not None
        return int(row[0])

    def sessions() -> int:
        with connect(postgres_url) as other:
            row = other.one("SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()")
        assert row is not None
        return int(row[0])

    with TaskQueue(postgres_url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        for _ in range(3):
            queue.submit_many({"kind": "caption"} for _ in range(1000))
    eventually(lambda: sessions() == 1)
    before = read_through()
    with TaskQueue(postgres_url, per_user=None) as queue:
        taken = take(queue, 100)
        for _ in range(12):  # psycopg prepares what is sent five times, PostgreSQL keeps the plan after five more
            done = [Success(claim, None, 0.1) for claim in taken]
            recorded, taken = outcomes.complete_and_claim(queue.database, done, worker(), queues=PRIORITIES, limit=100)
            assert len(recorded) == len(taken) == 100
        assert len(outcomes.complete_alone(queue.database, [Success(claim, None, 0.1) for claim in taken])) == 100
    eventually(lambda: sessions() == 1)
    assert read_through() == before


def test_a_submission_that_was_sent_twice_is_one_task(postgres_url: str):
    with TaskQueue(postgres_url) as queue:
        queue.handler("caption")(lambda task, payload: None)
        first = queue.submit("caption", {"n": 1}, user_id="anna", id="one")
        assert queue.submit("caption", {"n": 1}, user_id="anna", id="one") == first
        assert len(events(queue)) == 1
        with pytest.raises(TaskConflict):
            queue.submit("caption", {"n": 2}, user_id="anna", id="one")
        with pytest.raises(UserBusy):
            queue.submit("caption", {"n": 2}, user_id="anna")


def test_of_many_all_are_submitted_or_none(queue: TaskQueue):
    queue.submit("caption", user_id="anna", id="there")
    with pytest.raises(UserBusy):
        queue.submit_many({"kind": "caption", "user_id": user} for user in ("bert", "anna", "carl"))
    assert [task.id for task in queue.list()] == ["there"]
    assert len(events(queue)) == 1
    same = [{"kind": "caption", "user_id": "anna", "id": "there"}, {"kind": "caption", "user_id": "bert", "id": "new"}]
    assert [task.id for task in queue.submit_many(same)] == ["there", "new"]
    assert [job for job, *_ in events(queue)] == ["new", "there"]


# ---- hints -----------------------------------------------------------------------------------------------------------


def test_a_task_whose_id_rq_does_not_take_runs_and_is_in_nobodys_way(database_url: str, redis_url: str):
    with TaskQueue(database_url, redis=redis_url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.submit("caption", id="with.dot")
        queue.submit("caption", id="without")
        source = RqSource(queue, redis_url, name="w1")
        try:
            ran: list[str] = []
            while len(ran) < 2:
                taken = eventually(lambda: source.claim(worker(), PRIORITIES, 10))
                ran += [claim.id for claim in taken]
                source.show()
                source.settled(list(complete(queue, taken).values()))
            assert sorted(ran) == ["with.dot", "without"]
            assert queue.database.run(lambda tx: hinting.unhinted(tx, limit=10)) == []
        finally:
            source.close()


def test_hints_beyond_the_window_wait_in_the_database(redis_url: str):
    hints = RqHints(redis_url, window=3)
    try:
        assert hints.push([(f"t{n}", Priority.NORMAL) for n in range(5)]) == ["t0", "t1", "t2"]
        assert hints.push([("t9", Priority.NORMAL), ("u1", Priority.URGENT)]) == ["u1"]
    finally:
        hints.close()


def test_a_failure_among_successes_costs_its_own_attempt_only(crowd: TaskQueue):
    crowd.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(3))
    first, second, third = take(crowd, 3)
    complete(crowd, [first, third])
    crowd.database.run(lambda tx: outcomes.fail(tx, second, Failure("ValueError", "boom")))
    found = {task.id: (task.status, task.attempts) for task in crowd.list()}
    assert found == {
        "t0": (Status.COMPLETED, 0), "t1": (Status.QUEUED, 1), "t2": (Status.COMPLETED, 0),
    }  # fmt: skip


def test_a_database_that_is_opened_again_has_the_batch(database_url: str):
    with TaskQueue(database_url, per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: None)
        queue.submit_many({"kind": "caption", "id": f"t{n}"} for n in range(5))
        complete(queue, take(queue, 5), message="said last")
    with connect(database_url) as again:
        rows = again.all("SELECT id, status, result, message FROM tasks ORDER BY no")
    assert [tuple(row) for row in rows] == [(f"t{n}", "COMPLETED", f'"t{n}"', "said last") for n in range(5)]


def test_what_no_database_can_keep_in_a_message_costs_no_neighbour_its_record(database_url: str):
    with TaskQueue(database_url, per_user=None) as queue:
        odd = "a\0b\ud800c"
        queue.handler("caption", isolation="none")(lambda task, payload: task.progress(50, odd if payload else "plain"))
        queue.submit_many({"kind": "caption", "payload": n % 2, "id": f"t{n}"} for n in range(4))
        Worker(queue).run(burst=True)
        assert {task.id: (task.status, task.message) for task in queue.list()} == {
            f"t{n}": (Status.COMPLETED, "a b c" if n % 2 else "plain") for n in range(4)
        }


def wait_is_over(queue: TaskQueue) -> None:
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = 0 WHERE ready = 0"))


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
