"""Search over everything, causes over all jobs, failures by host, counts by state, and marks for charts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from headway._sql import Database, Tx, connect
from headway.core.failure import Failure
from headway.errors import InvalidInput
from headway.ledger import Done, Failed, Job, Ledger, NewItem
from headway.queue.task_queue import TaskQueue
from headway.views.failed import read_all_causes
from headway.views.history import read_marks
from headway.views.overview import count_jobs, read_causes
from headway.views.queue import read_oldest
from headway.views.search import read_failures_by_host, read_search

TIMEOUT = Failure("UpstreamTimeout", "GET {url} timed out", "docjobs.py:16 in fetch")
CORRUPT = Failure("DocumentCorrupt", "xref table not found", "docjobs.py:30 in parse")


@pytest.fixture(params=["file", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    on_file = request.param == "file"
    url = f"sqlite:///{tmp_path}/search.db" if on_file else str(request.getfixturevalue("postgres_url"))
    with connect(url) as opened:
        yield opened


def a_job(database: Database, id: str, *, prefix: str, failures: tuple[Failure, ...] = ()) -> Job:
    """Create a job with ten items. The first ones fail, all others succeed."""
    job = Ledger(database).create(id, max_retries=0, function="docjobs:extract")
    job.register([NewItem(idx, "{}", f"{prefix}-{idx:05d}") for idx in range(10)])
    job.seal()
    ledger = Ledger(database)
    hold = ledger.hold(job, settings={"workers": 1, "mode": "process"})
    job.record(
        [Failed(idx, failure, worker=f"run {hold.run} worker 1") for idx, failure in enumerate(failures)], hold=hold
    )
    job.record([Done(idx) for idx in range(len(failures), 10)], hold=hold)
    ledger.release(hold, "finished")
    return job


@pytest.fixture
def scene(database: Database) -> Database:
    a_job(database, "invoices", prefix="inv", failures=(TIMEOUT, TIMEOUT, CORRUPT))
    a_job(database, "receipts", prefix="inv-r", failures=(TIMEOUT,))
    Ledger(database).create("pictures")
    with TaskQueue(database) as queue:
        queue.handler("caption")(lambda task, payload: None)
        for user in ("anna", "ben"):
            queue.submit("caption", 1, user_id=user, priority="low")
    return database


def test_one_text_finds_jobs_items_tasks_users_and_errors(scene: Database):
    found = read_search(scene, "inv-0000")
    assert [(item.job, item.key) for item in found.items][:2] == [("invoices", "inv-00000"), ("invoices", "inv-00001")]
    assert read_search(scene, "inv-r-00003").items[0].job == "receipts"
    assert [job.id for job in read_search(scene, "VOIC").jobs] == ["invoices"]
    assert {job.id for job in read_search(scene, "docjobs:ex").jobs} == {"invoices", "receipts"}
    anna = read_search(scene, "ann")
    assert [(user.user_id, user.tasks) for user in anna.users] == [("anna", 1)]
    assert [task.user_id for task in anna.tasks] == ["anna"]
    assert [task.id for task in read_search(scene, anna.tasks[0].id).tasks] == [anna.tasks[0].id]
    assert {(cause.job, cause.type, cause.dead) for cause in read_search(scene, "timed OUT").causes} == {
        ("invoices", "UpstreamTimeout", 2), ("receipts", "UpstreamTimeout", 1),
    }  # fmt: skip
    nothing = read_search(scene, "100%_")
    assert not any((nothing.jobs, nothing.items, nothing.tasks, nothing.users, nothing.workers, nothing.causes))
    for bad in ("", "x" * 201):
        with pytest.raises(InvalidInput, match="1 to 200 characters"):
            read_search(scene, bad)


def _fill(tx: Tx, *, no: int) -> None:
    """Register 250,000 items by one statement."""
    tx.execute(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 249999) "
        "INSERT INTO input_products (job, idx, key) SELECT ?, i, printf('k-%d-%07d', ?, i) FROM n",
        (no, no),
    )


def test_a_key_is_found_among_a_million_items_in_less_than_a_second(tmp_path: Path):
    with connect(f"sqlite:///{tmp_path}/many.db") as database:
        for number in range(4):
            last = Ledger(database).create(f"job-{number}").no
            database.run(partial(_fill, no=last))
        began = time.monotonic()
        found = read_search(database, f"k-{last}-024999")
        took = time.monotonic() - began
        assert [item.idx for item in found.items] == list(range(249_990, 250_000))
        assert took < 1.0


def test_a_cause_of_several_jobs_is_one_group_that_lists_them(scene: Database):
    found = read_all_causes(scene)
    assert (found.total, found.dead) == (2, 4)
    first, second = found.causes
    assert (first.type, first.dead) == ("UpstreamTimeout", 3)
    assert [(one.job, one.dead) for one in first.jobs] == [("invoices", 2), ("receipts", 1)]
    assert (second.type, second.dead) == ("DocumentCorrupt", 1)
    assert sum(cause.dead for cause in read_causes(scene)) == found.dead
    short = read_all_causes(scene, limit=1)
    assert (len(short.causes), short.total, short.dead) == (1, 2, 4)


def test_failed_attempts_are_counted_by_the_machine_of_their_run(scene: Database):
    row = scene.one("SELECT host FROM runs LIMIT 1")
    assert row is not None
    [found] = read_failures_by_host(scene).hosts
    assert (found.host, found.items, found.tasks) == (row[0], 4, 0)
    scene.run(lambda tx: tx.execute("UPDATE attempts SET at = at - 7200"))
    assert read_failures_by_host(scene).hosts == ()


def test_jobs_are_counted_by_state(scene: Database):
    assert count_jobs(scene) == {"completed": 2, "pending": 1}
    Ledger(scene).job("invoices").retry_dead()
    assert count_jobs(scene) == {"completed": 1, "needs a run": 1, "pending": 1}
    Ledger(scene).hold(Ledger(scene).job("pictures"), settings={"workers": 1, "mode": "process"})
    assert count_jobs(scene) == {"completed": 1, "needs a run": 1, "processing": 1}


def test_the_task_that_waits_longest_comes_first(scene: Database):
    with TaskQueue(scene) as queue:
        assert [task.user_id for task in read_oldest(queue, "low").tasks] == ["anna", "ben"]
        scene.run(lambda tx: tx.execute("UPDATE tasks SET created_at = created_at - 60 WHERE user_id = 'ben'"))
        assert [task.user_id for task in read_oldest(queue, "low", limit=1).tasks] == ["ben"]
        assert read_oldest(queue, "high").tasks == ()


def test_marks_have_event_time_and_actor(scene: Database):
    start = scene.now() - 60
    job = Ledger(scene).job("pictures")
    job.register([NewItem(0, "{}")])
    Ledger(scene).hold(job, settings={"workers": 1, "mode": "process"})
    job.pause(actor="ana", reason="backup")
    with TaskQueue(scene) as queue:
        queue.pause("low", by="tomas", reason="disk full")
    found = read_marks(scene, start).marks
    told = {(mark.kind, mark.job, mark.actor): mark.text for mark in found}
    assert told["paused", "pictures", "ana"] == "paused: backup"
    assert told["paused", None, "tomas"] == "queue low paused: disk full"
    assert told["started", "pictures", None].startswith("run 1 started on ")
    assert told["ended", "invoices", None] == "run 1 finished"
    assert [mark.at for mark in found] == sorted(mark.at for mark in found)
    assert {mark.job for mark in read_marks(scene, start, job="pictures").marks} == {"pictures"}
    assert read_marks(scene, start - 60, start).marks == ()
