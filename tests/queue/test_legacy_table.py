"""Migration from an application's own task table: rows follow their tasks, users keep one limit, rollback works."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from headway._sql import Database
from headway.errors import InvalidInput, StorageError
from headway.queue import migration
from headway.queue.migration import LegacyTable
from headway.queue.store import claim as claims
from headway.queue.task import PRIORITIES, Status, TaskConflict, UserBusy
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.test_rq import drain, redis_url  # noqa: F401 - a fixture
from tests.services.redis import RedisServer
from tests.services.waiting import eventually

CAPTIONS = LegacyTable(
    "captions",
    id="task_id",
    status="state",
    user_id="owner",
    payload="settings",
    kind_column="work",
    priority="prio",
    error="why",
    percent="done",
)


@contextmanager
def legacy_queue(database_url: str, **options: Any) -> Iterator[TaskQueue]:
    """A queue beside a table with numeric ids and users, which PostgreSQL compares strictly."""
    with app.build(database_url, **{"per_user": 1, **options}) as queue:
        kind, schema = "TEXT", ""
        if queue.database.engine == "postgresql":
            run(queue, "CREATE TYPE public.state AS ENUM ('QUEUED', 'RUNNING', 'COMPLETED', 'FAILED', 'CANCELLED')")
            kind, schema = "state", "public."
        run(
            queue,
            f"CREATE TABLE {schema}captions (task_id INTEGER PRIMARY KEY, owner INTEGER, work TEXT NOT NULL, settings TEXT, "
            f"state {kind} NOT NULL, prio TEXT, why TEXT, done DOUBLE PRECISION)",
        )
        yield queue


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with legacy_queue(database_url) as made:
        yield made


def run(queue: TaskQueue, sql: str, values: tuple[Any, ...] = ()) -> int:
    return queue.database.run(lambda tx: tx.execute(sql, values))


def add(
    queue: TaskQueue, id: int, owner: int | None, state: str = "QUEUED", *, prio: str = "normal", **more: str
) -> None:
    run(
        queue,
        "INSERT INTO captions VALUES (?, ?, ?, ?, ?, ?, NULL, NULL)",
        (id, owner, more.get("work", "echo.none"), more.get("settings", f'{{"image": {id}}}'), state, prio),
    )


def states(database: Database) -> dict[int, str]:
    return {id: str(state) for id, state in database.all("SELECT task_id, state FROM captions ORDER BY task_id")}


def old_worker_takes(queue: TaskQueue) -> list[int]:
    """Poll the table as the old worker does: take every waiting row."""
    sql = "UPDATE captions SET state = 'RUNNING' WHERE state = 'QUEUED' RETURNING task_id"
    return sorted(id for (id,) in queue.database.run(lambda tx: tx.all(sql)))


@pytest.mark.req("S2-18", "S2-21")
def test_a_row_is_claimed_when_its_task_is_submitted_and_follows_it_to_its_end(queue: TaskQueue):
    add(queue, 1, 7)
    add(queue, 2, 8, work="raise.none", settings='"bad"')
    add(queue, 3, 9)
    migration.follow(queue, CAPTIONS)
    assert migration.adopt(queue, CAPTIONS) == migration.Moved(3)
    assert states(queue.database) == {1: "RUNNING", 2: "RUNNING", 3: "RUNNING"}
    assert old_worker_takes(queue) == [], "an old worker finds nothing to run again"
    queue.cancel("3")
    Worker(queue).run(burst=True)
    assert states(queue.database) == {1: "COMPLETED", 2: "FAILED", 3: "CANCELLED"}
    assert queue.database.one("SELECT why, done FROM captions WHERE task_id = 2") == ("ValueError: bad", 0)
    assert queue.database.one("SELECT why, done FROM captions WHERE task_id = 1") == (None, 100)
    assert old_worker_takes(queue) == []


@pytest.mark.req("S2-21")
def test_the_row_says_each_status_by_its_own_word(database_url: str):
    words = {"QUEUED": "handed", "RUNNING": "working", "COMPLETED": "ok", "FAILED": "error", "CANCELLED": "gone"}
    legacy = LegacyTable("errands", id="id", status="state", kind="look", queued="new", words=words)
    with app.build(database_url) as queue:
        seen: list[str] = []

        def look(task: Any, payload: Any) -> None:
            seen.append(state())
            if len(seen) == 1:
                raise ValueError("the first run fails")

        queue.handler("look", isolation="none", retries=1, retry_delay=1000.0)(look)
        run(queue, "CREATE TABLE errands (id TEXT PRIMARY KEY, state VARCHAR(10))")
        run(queue, "INSERT INTO errands VALUES ('a', 'new')")
        migration.follow(queue, legacy)

        def state() -> str:
            row = queue.database.one("SELECT state FROM errands")
            assert row is not None
            return str(row[0])

        migration.adopt(queue, legacy)
        assert state() == "handed"
        Worker(queue).run(burst=True)
        assert (seen, state()) == (["working"], "handed"), "between two runs it waits here, not in the table"
        run(queue, "UPDATE tasks SET run_at = 0")
        Worker(queue).run(burst=True)
        assert (seen, state()) == (["working", "working"], "ok")


@pytest.mark.req("S2-19")
def test_priorities_users_payloads_and_ids_are_kept_whatever_the_role(queue: TaskQueue):
    for id, word in enumerate(("urgent", "HIGH", "normal", "low", "whenever")):
        add(queue, id, id, prio=word)
    migration.follow(queue, CAPTIONS)
    assert migration.adopt(queue, CAPTIONS).moved == 5
    tasks = {task.id: task for task in queue.list()}
    assert [tasks[str(id)].priority.value for id in range(5)] == ["urgent", "high", "normal", "low", "normal"]
    assert [tasks[str(id)].user_id for id in range(5)] == ["0", "1", "2", "3", "4"]
    Worker(queue).run(burst=True)
    assert [queue.result(str(id)) for id in range(5)] == [{"image": id} for id in range(5)]


@pytest.mark.req("S2-19")
def test_words_for_priorities_and_several_columns_of_settings(database_url: str):
    legacy = LegacyTable(
        "errands", id="id", status="state", kind="echo.none", priority="level", payload=("width", "name"),
        priorities={"1": "urgent", "9": "low"},
    )  # fmt: skip
    with app.build(database_url) as queue:
        run(queue, "CREATE TABLE errands (id TEXT PRIMARY KEY, state TEXT, level INTEGER, width INTEGER, name TEXT)")
        run(queue, "INSERT INTO errands VALUES ('a', 'QUEUED', 1, 5, 'x'), ('b', 'QUEUED', 9, 6, NULL)")
        migration.follow(queue, legacy)
        assert migration.adopt(queue, legacy).moved == 2
        assert [queue.get(id).priority.value for id in "ab"] == ["urgent", "low"]
        Worker(queue).run(burst=True)
        assert [queue.result(id) for id in "ab"] == [{"width": 5, "name": "x"}, {"width": 6, "name": None}]


@pytest.mark.req("S2-18")
def test_the_dry_run_says_exactly_what_the_real_run_does_and_changes_nothing(queue: TaskQueue):
    add(queue, 1, 7)
    add(queue, 2, 7)  # the same user waits twice
    add(queue, 3, 8, "RUNNING")
    add(queue, 4, 8)  # its user has a running row
    add(queue, 5, 9, settings="no json")
    add(queue, 6, 10, work="nobody")
    add(queue, 7, None)
    migration.follow(queue, CAPTIONS)
    before = states(queue.database)
    said = migration.adopt(queue, CAPTIONS, dry_run=True)
    assert said == migration.Moved(2, refused=("2", "4", "5", "6"))
    assert states(queue.database) == before
    assert not queue.list()
    assert queue.database.one("SELECT count(*) FROM outbox") == (0,)
    assert migration.adopt(queue, CAPTIONS) == said
    assert {task.id for task in queue.list()} == {"1", "7"}
    assert migration.adopt(queue, CAPTIONS) == migration.Moved(0, refused=said.refused), "asked again: nothing is twice"


@pytest.mark.req("S2-22")
def test_a_user_with_an_active_row_cannot_submit_and_one_with_a_task_cannot_add_a_row(queue: TaskQueue):
    migration.follow(queue, CAPTIONS)
    add(queue, 1, 7, "RUNNING")
    add(queue, 2, 8, "QUEUED")
    for user in ("7", "8"):
        with pytest.raises(UserBusy, match="captions"):
            queue.submit("echo.none", 1, user_id=user)
    with pytest.raises(UserBusy):
        queue.submit_many([{"kind": "echo.none", "user_id": "9"}, {"kind": "echo.none", "user_id": "7"}])
    assert not queue.list()
    task = queue.submit("echo.none", 1, user_id="9")
    queue.submit("echo.none", 1, user_id="anna")  # not even a number
    with pytest.raises(StorageError, match="the user has a task in Headway"):
        add(queue, 3, 9)
    run(queue, "UPDATE captions SET state = 'COMPLETED'")
    queue.cancel(task.id)
    queue.submit("echo.none", 2, user_id="7")
    add(queue, 4, 9)


@pytest.mark.req("S2-22")
@pytest.mark.parametrize("allowed", [2, None])
def test_rows_and_tasks_count_together_up_to_the_limit_of_the_application(database_url: str, allowed: int | None):
    with legacy_queue(database_url, per_user=allowed) as queue:
        migration.follow(queue, CAPTIONS)
        add(queue, 1, 7, "RUNNING")
        queue.submit("echo.none", 1, user_id="7")
        if allowed is None:
            queue.submit("echo.none", 2, user_id="7")
        else:
            with pytest.raises(UserBusy, match="2 active tasks"):
                queue.submit("echo.none", 2, user_id="7")


@pytest.mark.req("S2-22")
def test_a_retry_needs_the_place_that_a_row_holds(queue: TaskQueue):
    migration.follow(queue, CAPTIONS)
    task = queue.submit("raise.none", "bad", user_id="7")
    Worker(queue).run(burst=True)
    add(queue, 1, 7, "RUNNING")
    with pytest.raises(UserBusy, match="captions"):
        queue.retry(task.id)
    run(queue, "UPDATE captions SET state = 'COMPLETED'")
    assert queue.retry(task.id).status is Status.QUEUED


@pytest.mark.req("S2-21")
def test_a_row_that_the_application_adds_is_claimed_by_a_submission_under_its_id(queue: TaskQueue):
    """During the transition an application may keep writing its row, so that old pages go on showing it."""
    migration.follow(queue, CAPTIONS)
    add(queue, 5, 7)
    queue.submit("echo.none", 1, user_id="7", id="5")
    assert states(queue.database) == {5: "RUNNING"}
    Worker(queue).run(burst=True)
    assert states(queue.database) == {5: "COMPLETED"}


@pytest.mark.req("S2-22")
def test_a_row_that_an_old_worker_has_taken_is_not_submitted(queue: TaskQueue):
    migration.follow(queue, CAPTIONS)
    add(queue, 5, 7, "RUNNING")
    with pytest.raises(TaskConflict, match="old worker"):
        queue.submit("echo.none", 1, user_id="7", id="5")
    assert not queue.list()


def test_a_returned_row_that_has_another_user_by_now_does_not_revive_the_task_of_the_first(queue: TaskQueue):
    add(queue, 5, 7)
    migration.follow(queue, CAPTIONS)
    migration.adopt(queue, CAPTIONS)
    migration.release(queue, CAPTIONS)
    run(queue, "UPDATE captions SET owner = 8")
    assert migration.adopt(queue, CAPTIONS) == migration.Moved(0, refused=("5",))
    assert (queue.get("5").status, states(queue.database)) == ("CANCELLED", {5: "QUEUED"})


@pytest.mark.req("S2-56")
def test_a_rollback_returns_what_has_not_run_and_the_same_rows_can_be_adopted_again(queue: TaskQueue):
    for id in range(1, 4):
        add(queue, id, id)
    migration.follow(queue, CAPTIONS)
    migration.adopt(queue, CAPTIONS)
    claimed = claims.claim_next(queue.database, app.claimant(queue), queues=PRIORITIES, limit=1)
    assert [claim.id for claim in claimed] == ["1"]
    assert migration.release(queue, CAPTIONS, dry_run=True) == migration.Moved(2, left=1)
    assert migration.release(queue, CAPTIONS) == migration.Moved(2, left=1)
    assert states(queue.database) == {1: "RUNNING", 2: "QUEUED", 3: "QUEUED"}
    with pytest.raises(InvalidInput, match="still active"):
        migration.unfollow(queue, CAPTIONS)
    assert migration.adopt(queue, CAPTIONS).moved == 2
    assert migration.release(queue, CAPTIONS).moved == 2
    assert old_worker_takes(queue) == [2, 3]
    with pytest.raises(TaskConflict):
        queue.retry("2")  # an old worker has it


@pytest.mark.req("S2-56")
def test_a_rollback_gives_a_row_to_each_task_that_never_had_one(database_url: str):
    legacy = LegacyTable(
        "errands", id="id", status="state", kind="echo.none", user_id="owner", payload="body", priority="level",
        priorities={"1": "urgent"},
    )  # fmt: skip
    with app.build(database_url, per_user=1) as queue:
        run(queue, "CREATE TABLE errands (id TEXT PRIMARY KEY, state TEXT, owner TEXT, body TEXT, level TEXT)")
        migration.follow(queue, legacy)
        task = queue.submit("echo.none", {"image": 1}, user_id="anna", role="admin", priority="urgent")
        other = queue.submit("raise.none", "bad")
        said = migration.release(queue, legacy, dry_run=True)
        assert queue.database.all("SELECT * FROM errands") == []
        assert migration.release(queue, legacy) == said == migration.Moved(1, left=1, refused=(other.id,))
        assert queue.database.all("SELECT * FROM errands") == [(task.id, "QUEUED", "anna", '{"image":1}', "1")]
        assert queue.get(other.id).status is Status.QUEUED, "a kind that the table does not hold stays here"


@pytest.mark.req("S2-55", "S2-56")
def test_adopted_rows_reach_rq_in_their_queues_and_a_rollback_takes_the_hints_back(
    database_url: str,
    redis_url: str,  # noqa: F811
    redis_server: RedisServer,
):
    with legacy_queue(database_url, redis=redis_url) as queue:
        assert queue.hints is not None
        add(queue, 1, 7, prio="urgent")
        add(queue, 2, 8)
        migration.follow(queue, CAPTIONS)
        migration.adopt(queue, CAPTIONS)
        client = redis_server.client(0)
        keys = {priority: f"rq:queue:headway:{priority}" for priority in ("urgent", "normal")}
        assert [client.lrange(keys[name], 0, -1) for name in ("urgent", "normal")] == [["1"], ["2"]]
        migration.release(queue, CAPTIONS)
        assert [client.llen(key) for key in keys.values()] == [0, 0]
        migration.adopt(queue, CAPTIONS)
        drain(queue)
        assert states(queue.database) == {1: "COMPLETED", 2: "COMPLETED"}
        migration.unfollow(queue, CAPTIONS)
        run(queue, "DROP TABLE captions")
        queue.submit("echo.none", 1)
        drain(queue)


def test_a_submission_in_the_applications_own_transaction_is_refused_and_leaves_it_usable(postgres_with_tables: str):
    with legacy_queue(postgres_with_tables) as queue:
        migration.follow(queue, CAPTIONS)
        add(queue, 1, 7, "RUNNING")
        with psycopg.connect(postgres_with_tables) as connection:
            with pytest.raises(UserBusy, match="captions"):
                queue.submit("echo.none", 1, user_id="7", connection=connection)
            queue.submit("echo.none", 1, user_id="8", connection=connection)
        assert len(queue.list()) == 1


@pytest.mark.req("S2-22")
def test_a_row_and_a_task_of_one_user_at_the_same_moment_are_one(postgres_with_tables: str):
    with (
        legacy_queue(postgres_with_tables) as queue,
        psycopg.connect(postgres_with_tables) as old_application,
        ThreadPoolExecutor(1) as threads,
    ):
        migration.follow(queue, CAPTIONS)
        old_application.execute("INSERT INTO public.captions VALUES (1, 7, 'echo.none', '1', 'QUEUED')")
        submitted = threads.submit(queue.submit, "echo.none", 1, user_id="7")
        eventually(lambda: queue.database.one("SELECT count(*) FROM pg_locks WHERE NOT granted") == (1,))
        old_application.commit()
        with pytest.raises(UserBusy):
            submitted.result(30)
        assert not queue.list()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"words": {"QUEUED": "QUEUED"}}, "old workers"),
        ({"words": {"BROKEN": "x"}}, "BROKEN"),
        ({"kind": "echo.none"}, "kind"),
        ({"kind_column": None}, "kind"),
        ({"priorities": {"1": "first"}}, "first"),
        ({"status": "nowhere"}, "nowhere"),
        ({"table": "nowhere"}, "nowhere"),
        ({"table": "x; DROP TABLE tasks"}, "name of a table"),
    ],
)
def test_a_mapping_that_cannot_work_is_refused_and_installs_nothing(queue: TaskQueue, changes: Any, match: str):
    wrong = replace(CAPTIONS, **changes)
    for ask in (migration.follow, migration.adopt, migration.release):
        with pytest.raises(InvalidInput, match=match):
            ask(queue, wrong)
    add(queue, 1, 7, "RUNNING")
    queue.submit("echo.none", 1, user_id="7")


def test_a_table_that_is_not_followed_cannot_be_adopted(queue: TaskQueue):
    for ask in (migration.adopt, migration.release):
        with pytest.raises(InvalidInput, match="follow"):
            ask(queue, CAPTIONS)


@pytest.mark.req("S2-16")
def test_an_old_worker_that_holds_a_row_keeps_it(postgres_with_tables: str):
    with legacy_queue(postgres_with_tables) as queue, psycopg.connect(postgres_with_tables) as old_worker:
        add(queue, 1, 7)
        add(queue, 2, 8)
        migration.follow(queue, CAPTIONS)
        old_worker.execute("SELECT 1 FROM public.captions WHERE task_id = 1 FOR UPDATE SKIP LOCKED")
        assert migration.adopt(queue, CAPTIONS) == migration.Moved(1)
        old_worker.execute("UPDATE public.captions SET state = 'RUNNING' WHERE task_id = 1 AND state = 'QUEUED'")
        old_worker.commit()
        assert migration.adopt(queue, CAPTIONS) == migration.Moved(0)
        assert [task.id for task in queue.list()] == ["2"]
