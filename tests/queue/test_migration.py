"""Between RQ and the database, and from somebody's own table: nothing is lost, nothing twice, and it can be asked again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headway.errors import InvalidInput
from headway.queue import migration
from headway.queue.recovery import Sweeper
from headway.queue.rq.hints import RqHints
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.worker import Worker
from tests.queue import app
from tests.queue.test_rq import drain, redis_url  # noqa: F401 - a fixture
from tests.services.redis import RedisServer
from tests.services.server import free_port


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    """In database mode: no Redis yet."""
    with app.build(database_url) as made:
        yield made


@pytest.mark.req("S2-18", "S2-19")
def test_waiting_tasks_move_to_rq_with_their_ids_and_in_order(
    queue: TaskQueue,
    redis_url: str,  # noqa: F811
    redis_server: RedisServer,
):
    ids = [queue.submit("echo.none", n, role="admin", priority=p).id for n, p in enumerate(("low", "urgent", "low"))]
    hints = RqHints(redis_url)
    assert migration.to_rq(queue, hints, dry_run=True).moved == 3
    assert not redis_server.client(0).keys()
    assert migration.to_rq(queue, hints).moved == 3
    assert migration.to_rq(queue, hints).moved == 0, "asked again: nothing is left"
    client = redis_server.client(0)
    assert client.lrange("rq:queue:headway:urgent", 0, -1) == [ids[1]]
    assert client.lrange("rq:queue:headway:low", 0, -1) == [ids[0], ids[2]]
    hints.close()


@pytest.mark.req("S2-55", "S2-56")
def test_a_rollback_to_the_database_leaves_nothing_in_redis_and_every_task_runs(
    database_url: str,
    redis_url: str,  # noqa: F811
    redis_server: RedisServer,
):
    with app.build(database_url, redis=redis_url) as queue:
        ids = [queue.submit("echo.none", n).id for n in range(5)]
        assert redis_server.client(0).llen("rq:queue:headway:normal") == 5
        assert migration.to_database(queue, dry_run=True).moved == 5
        assert migration.to_database(queue).moved == 5
        assert migration.to_database(queue).moved == 0
        assert not redis_server.client(0).keys("rq:job:*")
        assert redis_server.client(0).llen("rq:queue:headway:normal") == 0
    with app.build(database_url) as queue:
        Worker(queue).run(burst=True)
        assert all(queue.get(id).status is Status.COMPLETED for id in ids)


@pytest.mark.req("S2-18", "S2-19", "S2-22")
def test_rows_of_an_existing_table_are_taken_over_once(queue: TaskQueue):
    queue.database.run(
        lambda tx: tx.execute(
            "CREATE TABLE captions (task_id TEXT PRIMARY KEY, owner TEXT, body TEXT, state TEXT, prio TEXT)"
        )
    )
    queue.database.run(
        lambda tx: tx.executemany(
            "INSERT INTO captions VALUES (?, ?, ?, ?, ?)",
            [(f"c-{n:03}", f"user-{n}", f'{{"image": {n}}}', "QUEUED" if n % 2 else "DONE", "low") for n in range(20)],
        )
    )
    mapping = {"id": "task_id", "user_id": "owner", "payload": "body", "priority": "prio"}

    def rows():
        return migration.rows_of(queue.database, "captions", key="task_id", where={"state": "QUEUED"})

    assert migration.take_over(queue, rows(), mapping, kind="echo.none", dry_run=True).moved == 10
    assert not queue.list()
    assert migration.take_over(queue, rows(), mapping, kind="echo.none").moved == 10
    assert migration.take_over(queue, rows(), mapping, kind="echo.none").moved == 10
    tasks = queue.list(limit=100)
    assert len(tasks) == 10
    assert (tasks[0].id, tasks[0].user_id, tasks[0].priority) == ("c-019", "user-19", "low")
    Worker(queue).run(burst=True)
    [[result]] = queue.database.all("SELECT result FROM tasks WHERE id = 'c-019'")
    assert result == '{"image":19}'


def test_a_row_that_cannot_be_taken_over_is_named_and_the_others_are(database_url: str):
    with app.build(database_url, per_user=1) as queue:
        rows: list[dict[str, object]] = [
            {"id": "a", "who": "anna", "p": "1"},
            {"id": "b", "who": "anna", "p": "2"},
            {"id": "../c", "who": "cora", "p": "3"},
            {"id": "d", "who": "dora", "p": "no json"},
            {"id": "e", "who": None, "p": "5"},
        ]
        mapping = {"id": "id", "user_id": "who", "payload": "p"}
        said = migration.take_over(queue, rows, mapping, kind="echo.none", dry_run=True)
        assert not queue.list()
        moved = migration.take_over(queue, rows, mapping, kind="echo.none")
        assert moved == said == migration.Moved(2, refused=("b", "../c", "d"))


def test_a_row_whose_id_another_user_has_is_refused(queue: TaskQueue):
    mapping = {"id": "id", "user_id": "who"}
    queue.submit("echo.none", user_id="anna", id="inv-1")
    rows: list[dict[str, object]] = [{"id": "inv-1", "who": "zed"}, {"id": "inv-2", "who": "zed"}]
    assert migration.take_over(queue, rows, mapping, kind="echo.none") == migration.Moved(1, refused=("inv-1",))
    assert {task.id: task.user_id for task in queue.list()} == {"inv-1": "anna", "inv-2": "zed"}


@pytest.mark.req("S2-19")
def test_rows_keep_their_priority_whatever_the_role_of_their_user(queue: TaskQueue):
    rows = [{"id": word, "prio": word} for word in ("urgent", "high", "normal", "low")]
    migration.take_over(queue, rows, {"id": "id", "priority": "prio"}, kind="echo.none")
    assert {task.id: task.priority.value for task in queue.list()} == {row["id"]: row["prio"] for row in rows}


def test_a_table_is_named_with_its_schema_and_columns_by_any_name(queue: TaskQueue):
    schema = "public" if queue.database.engine == "postgresql" else "main"
    queue.database.run(
        lambda tx: tx.execute(f'CREATE TABLE {schema}.captions (id INTEGER, "order" TEXT, "Owner" TEXT)')
    )
    queue.database.run(lambda tx: tx.execute("INSERT INTO captions VALUES (1, 'a', 'anna'), (2, 'b', 'bert')"))
    found = migration.rows_of(queue.database, f"{schema}.captions", key="id", where={"Owner": "bert"})
    assert list(found) == [{"id": 2, "order": "b", "Owner": "bert"}]
    with pytest.raises(InvalidInput, match="colour"):
        list(migration.rows_of(queue.database, "captions", key="colour"))


@pytest.mark.parametrize("mapping", [{}, {"id": "id"}, {"id": "id", "kind": "k", "colour": "c"}])
def test_a_mapping_that_does_not_say_enough_is_refused(queue: TaskQueue, mapping: dict[str, str]):
    with pytest.raises(InvalidInput, match="mapping"):
        migration.take_over(queue, [], mapping)


def test_a_table_that_is_none_is_refused(queue: TaskQueue):
    for table in ("nowhere", "x; DROP TABLE tasks"):
        with pytest.raises(InvalidInput):
            list(migration.rows_of(queue.database, table, key="id"))


def test_a_move_of_a_queue_that_has_both_modes_runs_everything(
    database_url: str,
    redis_url: str,  # noqa: F811
):
    with app.build(database_url) as before:
        old = before.submit("echo.none", 1)
    with app.build(database_url, redis=redis_url) as queue:
        new = queue.submit("echo.none", 2)
        drain(queue)
        drain(queue)
        assert all(queue.get(task.id).status is Status.COMPLETED for task in (old, new))


def test_a_move_to_the_database_ends_also_beside_a_sweeper_that_tells_rq_again(
    database_url: str, redis_server: RedisServer
):
    redis_server.client(0).flushall()
    stop = threading.Event()
    with TaskQueue(database_url, redis_server.url(), per_user=None) as queue, ThreadPoolExecutor(2) as threads:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit_many({"kind": "caption"} for _ in range(1200))
        sweeping = threads.submit(Sweeper(queue, hints=queue.hints).run, stop)
        try:
            moved = threads.submit(migration.to_database, queue).result(30)
        finally:
            stop.set()
            sweeping.result(60)
        assert moved.moved == 1200


def test_a_move_to_the_database_while_redis_is_away_says_that_the_hints_are_still_there(
    database_url: str, redis_factory: Callable[..., RedisServer]
):
    server = redis_factory()
    with TaskQueue(database_url, server.url(), per_user=None) as queue:
        queue.handler("caption")(lambda task, payload: payload)
        queue.submit_many({"kind": "caption"} for _ in range(3))
        server.stop()
        assert migration.to_database(queue) == migration.Moved(0, left=3)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[TaskQueue]:
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", per_user=None) as made:
        yield made


def test_a_move_to_a_redis_that_is_away_says_of_how_many_tasks_it_does_not_know(small: TaskQueue, tmp_path: Path):
    small.handler("caption")(lambda task, payload: payload)
    small.submit_many([{"kind": "caption"} for _ in range(700)])
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db", f"redis://127.0.0.1:{free_port()}/0") as queue:
        assert queue.hints is not None
        assert migration.to_rq(queue, queue.hints) == migration.Moved(0, left=700)
