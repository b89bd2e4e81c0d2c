"""The rows of tasks: what is accepted, in which order it is handed out, what is recorded, once."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headway._lease import Owner
from headway.errors import InvalidInput, NotFound, StaleClaim
from headway.queue.payload import FernetCodec
from headway.queue.rq.source import RqSource
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES, Claim, Priority, Status, Task, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.claiming import complete, fail, take, worker
from tests.services.redis import RedisServer
from tests.services.waiting import eventually


def sweep(queue: TaskQueue) -> list[Task]:
    return queue.database.run(outcomes.lapsed)


def events(queue: TaskQueue, task_id: str) -> list[tuple[str, int]]:
    return [
        (type, version)
        for type, version in queue.database.all(
            "SELECT type, version FROM outbox WHERE job = ? ORDER BY version", (task_id,)
        )
    ]


# ---- submitting -----------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-06", "S2-07")
@pytest.mark.parametrize("limits", [0, 1], ids=["without", "with a limit"])
def test_tasks_are_handed_out_in_the_order_of_their_queues_however_they_came(crowd: TaskQueue, limits: int):
    for _ in range(limits):
        crowd.limit("kind", "caption", concurrency=100)
    for priority in reversed(PRIORITIES):
        crowd.submit("caption", role="admin", priority=priority, id=f"{priority}-1")
        crowd.submit("caption", role="admin", priority=priority, id=f"{priority}-2")
    order = [claim.id for _ in range(8) for claim in take(crowd)]
    assert order == [f"{priority}-{n}" for priority in ("urgent", "high", "normal", "low") for n in (1, 2)]


@pytest.mark.req("S2-08", "S2-09", "S2-10", "S2-11")
@pytest.mark.parametrize(
    ("options", "priority"),
    [
        ({"role": "admin"}, "high"),
        ({"role": "admin", "priority": "low"}, "low"),
        ({"role": "admin", "priority": "urgent"}, "urgent"),
        ({"role": "user"}, "normal"),
        ({"role": "user", "priority": "low"}, "low"),
        ({"role": "user", "priority": "urgent"}, "normal"),
        ({"role": "user", "priority": "high"}, "normal"),
        ({"role": "user", "maintenance": True}, "normal"),
        ({"maintenance": True}, "urgent"),
        ({"maintenance": True, "user_id": "anna"}, "urgent"),
        ({"maintenance": False}, "normal"),
        ({"priority": "urgent"}, "normal"),
        ({"role": "admin", "maintenance": True}, "urgent"),
        ({"role": "admin", "priority": "zzz"}, "normal"),
        ({"role": "user", "priority": "zzz"}, "normal"),
    ],
)
def test_a_role_decides_the_priority(crowd: TaskQueue, options, priority: str):
    assert crowd.submit("caption", **options).priority == priority


def test_a_delayed_task_is_an_active_task_of_its_user_until_it_is_cancelled(queue: TaskQueue):
    delayed = queue.submit("caption", user_id="anna", delay=3600)
    with pytest.raises(UserBusy, match=delayed.id):
        queue.submit("caption", user_id="anna")
    assert queue.submit("caption", partition="anna", delay=3600).status is Status.QUEUED
    queue.cancel(delayed.id)
    assert queue.submit("caption", user_id="anna").status is Status.QUEUED


@pytest.mark.req("S2-20", "S2-23")
def test_a_user_has_one_active_task_and_the_next_when_it_ended(queue: TaskQueue):
    first = queue.submit("caption", {"n": 1}, user_id="anna")
    with pytest.raises(UserBusy, match=first.id) as refused:
        queue.submit("caption", {"n": 2}, user_id="anna")
    assert refused.value.task_id == first.id
    assert queue.submit("caption", {"n": 2}, user_id="bert").status is Status.QUEUED
    [claim] = [claim for claim in take(queue, 2) if claim.id == first.id]
    with pytest.raises(UserBusy):
        queue.submit("caption", {"n": 2}, user_id="anna")
    complete(queue, claim)
    second = queue.submit("caption", {"n": 2}, user_id="anna")
    queue.cancel(second.id, by="anna")
    third = queue.submit("resize", {"n": 3}, user_id="anna")
    [claim] = take(queue)
    assert claim.id == third.id
    assert fail(queue, claim).status is Status.FAILED
    assert queue.submit("caption", user_id="anna").status is Status.QUEUED
    assert len(queue.list(user_id="anna")) == 4


@pytest.mark.req("S2-20")
def test_of_many_submissions_at_the_same_moment_one_is_accepted(queue: TaskQueue):
    start, outcomes = threading.Barrier(20), list[str]()

    def submit(n: int) -> None:
        start.wait()
        try:
            outcomes.append(queue.submit("caption", {"n": n}, user_id="anna").status.value)
        except UserBusy:
            outcomes.append("busy")

    threads = [threading.Thread(target=submit, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(outcomes) == {"QUEUED": 1, "busy": 19}


def test_a_user_may_have_as_many_active_tasks_as_the_queue_says(database_url: str):
    with TaskQueue(database_url, per_user=3) as queue:
        queue.handler("caption")(lambda task, payload: None)
        tasks = [queue.submit("caption", n, user_id="anna") for n in range(3)]
        with pytest.raises(UserBusy, match="3 active tasks"):
            queue.submit("caption", 3, user_id="anna")
        queue.cancel(tasks[1].id, by="anna")
        assert queue.submit("caption", 4, user_id="anna").status is Status.QUEUED
        with pytest.raises(UserBusy):
            queue.submit_many([{"kind": "caption", "user_id": "anna"}, {"kind": "caption", "user_id": "bert"}])
        assert not queue.list(user_id="bert"), "all or none"


def test_the_same_id_is_the_same_task_or_refused(queue: TaskQueue):
    first = queue.submit("caption", {"a": 1, "b": 2}, id="t-1", user_id="anna")
    assert queue.submit("caption", {"b": 2, "a": 1}, id="t-1", user_id="anna") == first
    with pytest.raises(TaskConflict, match="t-1"):
        queue.submit("caption", {"a": 2}, id="t-1", user_id="anna")
    with pytest.raises(TaskConflict):
        queue.submit("resize", {"a": 1, "b": 2}, id="t-1")
    assert len(queue.list()) == 1
    assert events(queue, "t-1") == [("task.queued", 1)]


def test_an_id_of_another_user_is_refused_and_the_error_tells_nothing_about_the_task(queue: TaskQueue):
    first = queue.submit("caption", {"a": 1}, id="inv-1", user_id="anna@example.org")
    several: list[dict[str, object]] = [
        {"kind": "caption", "id": "new"},
        {"kind": "caption", "payload": {"a": 1}, "id": "inv-1", "user_id": "zed"},
    ]
    with pytest.raises(TaskConflict, match="The id inv-1 belongs to another task") as refused:
        queue.submit("caption", {"a": 1}, id="inv-1", user_id="zed")
    assert "anna" not in f"{refused.value} {refused.value.hint}"
    with pytest.raises(TaskConflict):
        queue.submit("caption", {"a": 1}, id="inv-1")
    with pytest.raises(TaskConflict):
        queue.submit_many(several)
    assert list(queue.list()) == [first], "nothing was accepted"
    assert queue.submit("caption", {"a": 2}, id="inv-2", user_id="zed").user_id == "zed"


def test_users_take_turns_within_a_queue(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "user_id": "anna", "id": f"a{n}"} for n in range(5)])
    crowd.submit("caption", user_id="bert", id="b0")
    crowd.submit("caption", user_id="bert", id="b1")
    assert [claim.id for claim in take(crowd, 2)] == ["a0", "b0"]
    crowd.submit("caption", user_id="cora", id="c0")
    assert [claim.id for claim in take(crowd, 6)] == ["a1", "b1", "c0", "a2", "a3", "a4"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "unknown"}, "no handler for tasks of kind 'unknown'"),
        ({"kind": "caption", "payload": {1, 2}}, "not JSON"),
        ({"kind": "caption", "payload": float("nan")}, "not JSON"),
        ({"kind": "caption", "payload": "\ud800"}, "not JSON"),
        ({"kind": "caption", "payload": "a\0b"}, "U\\+0000"),
        ({"kind": "caption", "payload": "x" * 300_000}, "300,002 bytes"),
        ({"kind": "caption", "id": "../x"}, "cannot be a task id"),
        ({"kind": "caption", "user_id": "a\nb"}, "cannot be a user id"),
        ({"kind": "caption", "role": "root"}, "(got 'root')"),
        ({"kind": "caption", "delay": float("nan")}, "delay must be seconds"),
    ],
)
def test_what_cannot_be_taken_is_refused_and_changes_nothing(queue: TaskQueue, arguments, message: str):
    with pytest.raises(InvalidInput, match=message):
        queue.submit(**arguments)
    assert not queue.list()


def test_a_payload_that_contains_itself_is_refused(queue: TaskQueue):
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(InvalidInput):
        queue.submit("caption", endless)
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidInput, match="nested too deeply"):
        queue.submit("caption", deep)


# ---- claiming and settling ------------------------------------------------------------------------------------------


def test_two_workers_never_get_the_same_task(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "payload": n} for n in range(200)])
    taken: list[str] = []
    start = threading.Barrier(4)

    def work(n: int) -> None:
        start.wait()
        who = worker(f"w{n}")
        while got := take(crowd, 7, who):
            taken.extend(claim.id for claim in got)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == len(set(taken)) == 200


@pytest.mark.req("S2-29", "S2-30")
def test_a_task_is_tried_four_times_and_has_then_failed(queue: TaskQueue):
    task = queue.submit("caption", user_id="anna")
    statuses = []
    for _ in range(4):
        [claim] = eventually(lambda: take(queue))
        statuses.append(fail(queue, claim).status)
    assert statuses == ["QUEUED", "QUEUED", "QUEUED", "FAILED"]
    ended = queue.get(task.id)
    assert (ended.attempts, ended.error) == (4, "ValueError: boom")
    assert [type for type, _ in events(queue, task.id)] == ["task.queued", "task.running"] * 4 + ["task.failed"]
    assert [version for _, version in events(queue, task.id)] == list(range(1, 10)), "an event for every version"


def test_the_waits_between_tries_grow(crowd: TaskQueue):
    crowd.handler("slow", retries=5, retry_delay=10.0)(lambda task, payload: None)
    crowd.submit("slow", id="t")
    waits = []
    for _ in range(4):
        [claim] = take(crowd, who=worker(kinds=("slow",)))
        failed = fail(crowd, claim)
        waits.append((failed.run_at - failed.updated_at).total_seconds())
        assert not take(crowd, who=worker(kinds=("slow",))), "it waits"
        crowd.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = 0"))
    assert all(low <= wait <= high for wait, low, high in zip(waits, (8, 16, 32, 64), (10, 20, 40, 80), strict=True))


def test_a_clock_that_was_set_back_holds_up_no_retry(crowd: TaskQueue):
    crowd.submit("caption")
    [claim] = take(crowd)
    fail(crowd, claim)
    crowd.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = run_at + 3600"))
    assert take(crowd)


def test_a_worker_whose_lease_lapsed_records_nothing(queue: TaskQueue):
    queue.submit("caption", user_id="anna", id="t")
    [late] = take(queue, who=worker("slow", lease=0.01))
    eventually(lambda: sweep(queue))
    [claim] = eventually(lambda: take(queue, who=worker("quick")))
    assert claim.token > late.token
    with pytest.raises(StaleClaim):
        complete(queue, late)
    with pytest.raises(StaleClaim):
        fail(queue, late)
    with pytest.raises(StaleClaim):
        queue.database.run(lambda tx: outcomes.progress(tx, late, 50, "half"))
    assert queue.database.run(lambda tx: outcomes.release(tx, late)) is None
    assert complete(queue, claim).status is Status.COMPLETED
    with pytest.raises(StaleClaim):
        complete(queue, claim)


@pytest.mark.req("S2-31")
def test_the_task_of_a_dead_worker_runs_again_and_a_live_one_is_left_alone(crowd: TaskQueue):
    crowd.submit("caption", id="a")
    crowd.submit("caption", id="b")
    dead = replace(Owner.current(), pid=2**22 - 1, started="1")
    take(crowd, who=Claimant("dead", dead, ("caption",), 3600.0))
    take(crowd, who=worker("alive", lease=3600.0))
    assert [task.id for task in sweep(crowd)] == ["a"]
    lost = crowd.get("a")
    assert (lost.status, lost.attempts) == (Status.QUEUED, 1)
    assert "died" in (lost.error or "")
    assert crowd.get("b").status is Status.RUNNING


def test_renewing_keeps_a_claim_and_says_what_is_lost_or_to_be_cancelled(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "id": id} for id in "abc"])
    who = worker(lease=0.05)
    held = {claim.id: claim for claim in take(crowd, 3, who)}
    tokens = {claim.no: claim.token for claim in held.values()}
    crowd.cancel("a", by="admin")
    complete(crowd, held["b"])
    long = replace(who, lease=3600.0)
    lost, cancelling = crowd.database.run(lambda tx: claims.renew(tx, long, tokens))
    assert (lost, cancelling) == ({held["b"].no}, {held["a"].no})
    with pytest.raises(AssertionError, match="not within"):
        eventually(lambda: sweep(crowd), timeout=0.3)


def test_a_task_given_back_costs_no_attempt_and_runs_next(crowd: TaskQueue):
    crowd.submit("caption", id="a")
    crowd.submit("caption", id="b")
    [claim] = take(crowd)
    back = crowd.database.run(lambda tx: outcomes.release(tx, claim))
    assert back is not None
    assert (back.status, back.attempts) == (Status.QUEUED, 0)
    assert [claim.id for claim in take(crowd, 2)] == ["a", "b"]


# ---- cancelling, retrying, pausing ----------------------------------------------------------------------------------


def test_cancelling_ends_a_waiting_task_at_once_and_asks_a_running_one(queue: TaskQueue):
    waiting = queue.submit("caption", user_id="anna")
    assert queue.cancel(waiting.id, by="anna").status is Status.CANCELLED
    assert not take(queue)
    running = queue.submit("caption", user_id="anna")
    [claim] = take(queue)
    asked = queue.cancel(running.id, by="anna")
    assert (asked.status, asked.cancelling) == (Status.RUNNING, True)
    assert queue.database.run(lambda tx: outcomes.progress(tx, claim, 10, "")), "the handler is told"
    assert fail(queue, claim).status is Status.CANCELLED
    assert queue.cancel(running.id, by="anna").status is Status.CANCELLED, "one that has ended stays as it is"


def test_a_cancelled_task_that_fails_is_not_tried_again(queue: TaskQueue):
    task = queue.submit("caption")
    [claim] = take(queue)
    queue.cancel(task.id, by="admin")
    ended = fail(queue, claim)
    assert ended.status is Status.CANCELLED
    assert ended.ended_at is not None


def test_another_users_task_is_as_missing_as_one_that_never_was(queue: TaskQueue):
    task = queue.submit("caption", user_id="anna")
    for call in (queue.get, queue.cancel):
        with pytest.raises(NotFound) as foreign:
            call(task.id, user_id="bert")
        with pytest.raises(NotFound) as missing:
            call("0" * 32, user_id="bert")
        assert str(foreign.value).replace(task.id, "") == str(missing.value).replace("0" * 32, "")
    assert queue.get(task.id, user_id="anna").status is Status.QUEUED


def test_a_failed_task_gets_another_life_if_the_users_place_is_free(queue: TaskQueue):
    task = queue.submit("resize", user_id="anna")
    [claim] = take(queue)
    fail(queue, claim)
    other = queue.submit("caption", user_id="anna")
    with pytest.raises(UserBusy, match=other.id):
        queue.retry(task.id)
    queue.cancel(other.id, by="anna")
    again = queue.retry(task.id)
    assert (again.status, again.attempts, again.error) == (Status.QUEUED, 0, None)
    with pytest.raises(UserBusy):
        queue.submit("caption", user_id="anna")
    [claim] = take(queue)
    complete(queue, claim)
    with pytest.raises(InvalidInput, match="COMPLETED"):
        queue.retry(task.id)


def test_a_task_of_a_queue_without_a_limit_is_tried_again_without_one(crowd: TaskQueue, database_url: str):
    for id in ("a", "b"):
        crowd.submit("resize", user_id="anna", id=id)
    for claim in take(crowd, 2):
        fail(crowd, claim)
    with TaskQueue(database_url) as another:  # as the command line has it: one task per user
        assert [another.retry(id).status for id in ("a", "b")] == ["QUEUED", "QUEUED"]


@pytest.mark.req("S2-41")
def test_a_paused_queue_gives_nothing_until_it_is_resumed_or_its_time_is_over(crowd: TaskQueue):
    crowd.submit("caption", id="n")
    crowd.submit("caption", role="admin", id="h")
    crowd.pause("high", reason="maintenance", by="root")
    assert [claim.id for claim in take(crowd, 2)] == ["n"]
    info = crowd.stats()[1]
    assert (info.paused, info.paused_by, info.reason, info.waiting) == (True, "root", "maintenance", 1)
    assert crowd.resume("high")
    assert not crowd.resume("high")
    crowd.pause("high", reason="again", by="root", until=datetime.now(UTC) + timedelta(hours=1))
    assert take(crowd) == []
    crowd.database.run(lambda tx: tx.execute("UPDATE task_queues SET paused_until = ? WHERE paused = 1", (tx.now(),)))
    assert [claim.id for claim in take(crowd)] == ["h"]
    with pytest.raises(InvalidInput, match="'highest' is not a queue"):
        crowd.pause("highest", reason="", by="")


# ---- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-46")
def test_limits_bound_what_runs_at_once_and_change_live(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "user_id": f"u{n % 2}", "id": f"t{n}"} for n in range(8)])
    crowd.limit("queue", "normal", concurrency=3)
    first = take(crowd, 8)
    assert len(first) == 3
    assert not take(crowd)
    crowd.limit("queue", "normal", concurrency=5)
    crowd.limit("user", concurrency=3)
    second = take(crowd, 8)
    assert Counter(claim.user_id for claim in first + second) in ({"u0": 3, "u1": 2}, {"u0": 2, "u1": 3})
    crowd.limit("queue", "normal")
    assert len(take(crowd, 8)) == 1, "three of each user"
    complete(crowd, first[0])
    assert len(take(crowd, 8)) == 1


def test_a_limit_of_one_holds_between_workers_that_claim_at_the_same_moment(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "partition": "tenant-1"} for _ in range(10)])
    crowd.limit("partition", "tenant-1", concurrency=1)
    got: list[Claim] = []
    start = threading.Barrier(6)

    def work(n: int) -> None:
        start.wait()
        got.extend(take(crowd, 2, worker(f"w{n}")))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1


def test_a_rate_bounds_what_starts(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption"} for _ in range(10)])
    crowd.limit("kind", "caption", rate=2.0)
    assert len(take(crowd, 10)) == 2, "what a second allows"
    assert len(take(crowd, 10)) <= 1
    crowd.database.run(lambda tx: tx.execute("UPDATE task_rates SET at = at - 1"))
    assert len(take(crowd, 10)) == 2


# ---- payloads -------------------------------------------------------------------------------------------------------


@pytest.mark.req("S2-58")
def test_an_encrypted_payload_is_unreadable_in_the_store_and_bound_to_its_task():
    from cryptography.fernet import Fernet

    old, new = Fernet.generate_key(), Fernet.generate_key()
    codec = FernetCodec([old])
    stored = codec.encode("t-1", '{"secret":"canary"}')
    assert "canary" not in stored
    rotated = FernetCodec([new, old])
    assert rotated.decode("t-1", stored) == '{"secret":"canary"}'
    from headway.errors import StorageError

    for codec_, id, text in (
        (rotated, "t-2", stored),
        (FernetCodec([new]), "t-1", stored),
        (rotated, "t-1", stored[:-2]),
        (rotated, "t-1", '{"secret":"plain"}'),
    ):
        with pytest.raises(StorageError):
            codec_.decode(id, text)


def test_a_key_that_is_none_is_refused_without_being_shown():
    with pytest.raises(InvalidInput) as refused:
        FernetCodec(["canary-key"])
    assert "canary" not in str(refused.value)


def test_the_newest_tasks_are_listed_page_by_page(crowd: TaskQueue):
    crowd.submit_many([{"kind": "caption", "id": f"t{n}"} for n in range(5)])
    first = crowd.list(limit=2)
    second = crowd.list(limit=2, before=first[-1].id)
    assert [task.id for task in (*first, *second)] == ["t4", "t3", "t2", "t1"]
    assert [task.id for task in crowd.list(queue=Priority.HIGH)] == []
    with pytest.raises(InvalidInput):
        crowd.list(limit=0)


@pytest.mark.parametrize(
    "bad",
    [{"concurrency": -1}, {"concurrency": 1_000_001}, {"concurrency": True}, {"concurrency": 1.0},
     {"rate": 0}, {"rate": -1.0}, {"rate": 10**6}, {"rate": float("nan")}, {"rate": "5"}],
)  # fmt: skip
def test_a_limit_outside_its_bounds_is_refused_and_one_at_its_bound_is_kept(queue: TaskQueue, bad: dict[str, Any]):
    with pytest.raises(InvalidInput):
        queue.limit("kind", "caption", **bad)
    assert not queue.database.all("SELECT * FROM task_limits")
    queue.limit("kind", "caption", concurrency=1_000_000, rate=999_999)
    queue.limit("kind", "resize", concurrency=0, rate=0.0001)
    assert queue.database.all("SELECT key, concurrency, rate FROM task_limits ORDER BY key") == [
        ("caption", 1_000_000, 999_999),
        ("resize", 0, 0.0001),
    ]


def drain(queue: TaskQueue) -> None:
    source = None if queue.backend.redis_url is None else RqSource(queue, queue.backend.redis_url, name="drainer")
    Worker(queue, source=source, context=queue.context, settings=Settings(rest=0.05)).run(burst=True)


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
