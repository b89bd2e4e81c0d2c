"""Tables that were just filled, on PostgreSQL: it has no statistics yet, and still nothing reads a whole job for a page.

Every statement that is sent is asked for the rows that it really reads (EXPLAIN ANALYZE), those it compares in vain included.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from headway._lease import Owner
from headway._sql import Database, Tx
from headway.core.failure import Failure
from headway.ledger import Done, Failed, Job, Ledger
from headway.ledger.store.items import MOST
from headway.ledger.store.queries.statistics import durations_of_function
from headway.queue.recovery import Sweeper
from headway.queue.store import tasks as records
from headway.queue.store.claim import Claimant, claim_next
from headway.queue.store.hints import doubtful
from headway.queue.task import PRIORITIES, Status
from headway.queue.task_queue import TaskQueue
from headway.views.jobs.durations import read_durations
from headway.views.jobs.map import read_map

#: Items of the job, and those that were tried: the first ones, each 500th of them failed and each 1,000th dead.
ITEMS, TRIED = 60_000, 30_000
PAGE = 500
#: What a page may read: a few rows of each of a few tables for each of its own. A job of a million has the same limit.
FEW = 10 * PAGE

_FILLED = f"""
INSERT INTO input_products (job, idx, key, payload)
    SELECT 1, n, 'key-' || n, '{{}}' FROM generate_series(0, {ITEMS - 1}) n;
INSERT INTO progress (job, idx, status, attempts, updated_at, seconds, next_attempt_at)
    SELECT 1, n, CASE WHEN n % 500 = 0 THEN 'failed' ELSE 'done' END, 0, 1.8e9, n * 1e-5,
    CASE WHEN n % 1000 = 500 THEN 1.8e9 END FROM generate_series(0, {TRIED - 1}) n;
INSERT INTO attempts (job, idx, no, outcome, error, cause, at)
    SELECT job, idx, 1, 'failed', 'no', 1, 1.8e9 FROM progress WHERE status = 'failed';
INSERT INTO dead_letters (job, idx, error, created_at, cause)
    SELECT job, idx, 'no', 1.8e9, 1 FROM progress WHERE idx % 1000 = 0;
INSERT INTO results (job, idx, result)
    SELECT job, idx, '1' FROM progress WHERE status = 'done' AND idx % 2 = 1;
INSERT INTO causes (job, no, type, message, frame, first_seen, last_seen) VALUES (1, 1, 'E', 'no', '', 1.8e9, 1.8e9);
UPDATE jobs SET total = {ITEMS}, done = {TRIED - TRIED // 500}, dead = {TRIED // 1000}, failed = {TRIED // 1000},
    sealed = 1, frontier = {TRIED}, function = 'work'
"""


@pytest.fixture
def database(postgres_with_tables: str) -> Iterator[Database]:
    with Ledger.open(postgres_with_tables) as ledger:
        tables = ("input_products", "progress", "attempts", "dead_letters", "results", "tasks", "outbox")
        # Nor does anybody make some while the test runs.
        ledger.database.run(
            lambda tx: [tx.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)") for table in tables]
        )
        yield ledger.database


@pytest.fixture
def job(database: Database) -> Job:
    made = Ledger(database).create("big")
    assert made.no == 1
    database.run(lambda tx: tx.execute(_FILLED))
    return made


def rows_read(database: Database, sql: str, parameters: Any) -> int:
    """Rows that a statement reads or compares. It is run, and what it changed is undone."""
    found: list[Any] = []

    def work(tx: Tx) -> None:
        found.append(tx.all(f"EXPLAIN (ANALYZE, TIMING OFF, FORMAT JSON) {sql}", parameters)[0][0][0]["Plan"])
        raise LookupError

    with pytest.raises(LookupError):
        database.run(work)

    def count(node: dict[str, Any]) -> int:
        own = sum(value for name, value in node.items() if name.startswith("Rows Removed by"))
        if "Index Name" in node or "Relation Name" in node:
            own += node["Actual Rows"]
        return int(own * node["Actual Loops"]) + sum(map(count, node.get("Plans", [])))

    return count(found[0])


Reading = Callable[[Callable[[], object]], int]


@pytest.fixture
def read_by(database: Database, monkeypatch: pytest.MonkeyPatch) -> Reading:
    """How many rows the most greedy statement of a call reads."""

    def ask(call: Callable[[], object]) -> int:
        sent: list[tuple[str, Any]] = []
        with monkeypatch.context() as patch:
            for kind, name in ((Tx, "execute"), (Tx, "one"), (Tx, "all"), (Database, "write")):
                original = getattr(kind, name)

                def spy(self: Any, sql: str, parameters: Any = (), original: Any = original, **options: Any) -> Any:
                    sent.append((sql, parameters))
                    return original(self, sql, parameters, **options)

                patch.setattr(kind, name, spy)
            call()
        words = ("SELECT", "WITH", "UPDATE", "DELETE", "INSERT")
        found = [(rows_read(database, sql, values), sql) for sql, values in sent if sql.lstrip().startswith(words)]
        return max(found)[0]

    return ask


@pytest.mark.req("S3-36")
@pytest.mark.timeout(180)
def test_a_page_of_a_job_that_was_just_loaded_reads_the_rows_of_that_page(job: Job, read_by: Reading):
    pages: dict[str, Callable[[], object]] = {
        "progress": job.progress,
        "item": lambda: job.item(ITEMS // 2),
        "times": lambda: read_durations(job, ITEMS),
        "map": lambda: read_map(job, since=None),
        "fingerprints": lambda: next(iter(job.fingerprints())),
        "results": lambda: job.results_by_index(1000, PAGE),
        "log": lambda: next(iter(job.log(TRIED // 2))),
        "log of the rest": lambda: list(job.log(TRIED - 10)),
        "worked on": lambda: job.worked_on(range(0, ITEMS, ITEMS // 50)),
        "spread": lambda: _read(job.database, lambda tx: durations_of_function(tx, "work", 0.0, 1000)),
    }
    for status in (None, "pending", "processing", "retrying", "done", "dead"):
        for after in (-1, TRIED // 2, TRIED - 10, ITEMS - 100):
            pages[f"items {status} {after}"] = partial(job.items, status=status, after=after, limit=51)
    read = {name: read_by(call) for name, call in pages.items()}
    # Which walks one page of the index, however long that is.
    assert read.pop("fingerprints") <= 5000
    assert {name: rows for name, rows in read.items() if rows > FEW} == {}


def _read(database: Database, question: Callable[[Tx], object]) -> None:
    with database.read() as tx:
        question(tx)


@pytest.mark.req("S3-36")
@pytest.mark.timeout(180)
def test_reading_items_of_a_new_job_does_not_scan_the_others(job: Job, read_by: Reading):
    for limit in (1, PAGE):
        assert read_by(partial(job.untouched, TRIED - 1, limit)) <= FEW
        assert read_by(partial(job.due, limit)) <= FEW
        assert read_by(partial(job.last_pass, limit)) <= FEW
        assert read_by(partial(job.claim, "w", limit=limit)) <= FEW


@pytest.mark.req("S3-36")
@pytest.mark.parametrize("limit", [3, 200])
def test_a_resumed_run_reads_done_items_once_and_without_a_nested_loop(job: Job, read_by: Reading, limit: int):
    """The planner takes a stretch of thousands for three rows: a loop over all pairs of them ran into the time limit."""
    found: list[int] = []
    assert read_by(lambda: found.extend(item.idx for item in job.untouched(-1, limit))) <= 5 * MOST
    assert found == list(range(TRIED, TRIED + limit))


@pytest.mark.req("S3-36")
def test_recording_items_does_not_scan_the_others(job: Job, read_by: Reading):
    new = range(TRIED, TRIED + PAGE)
    mixed = [
        Failed(idx, Failure("E", "no")) if idx % 50 == 0 else Done(idx) for idx in range(TRIED - 100, TRIED + PAGE)
    ]
    assert read_by(lambda: job.record(mixed)) <= FEW
    assert read_by(lambda: job.record([Done(idx + 2 * PAGE) for idx in new])) <= FEW


_TASKS = """
INSERT INTO tasks (id, kind, queue, place, turn, party, status, user_id, role, payload, fingerprint, retries, retry_delay,
    run_at, created_at, updated_at, hinted_at, started_at, ended_at)
    SELECT 't-' || n, 'k' || n % 3, 'low', 3, n, '', '{status}', NULL, 'user', '[]', '', 0, 1.0, {now}, {now}, {now}, {now},
    {now}, {ended} FROM generate_series(1, 60000) n
"""


@pytest.mark.req("S3-36")
@pytest.mark.parametrize("status", ["QUEUED", "COMPLETED"])
def test_listing_and_sweeping_a_new_queue_does_not_scan_it(database: Database, read_by: Reading, status: str):
    now = time.time()
    ended = "NULL" if status == "QUEUED" else str(now)
    database.run(lambda tx: tx.execute(_TASKS.format(status=status, now=now, ended=ended)))
    database.run(
        lambda tx: tx.execute(
            "INSERT INTO outbox (id, type, at, source, job, version, data) SELECT id, 'task.queued', created_at, "
            "'headway.queue', id, 1, '{}' FROM tasks"
        )
    )
    queue = TaskQueue(database)
    for before in (None, "t-30000"):
        for kind in (None, "k1"):
            for wanted in (Status(status), None):
                assert (
                    read_by(partial(queue.list, status=wanted, kind=kind, before=before, limit=50))
                    <= 2 * records.NEWEST  # by a bitmap each is read twice
                )
    assert len(queue.list(status=status, limit=50)) == 50
    assert read_by(lambda: database.run(lambda tx: doubtful(tx, older_than=-60.0, limit=PAGE))) <= FEW
    assert read_by(lambda: Sweeper(queue).purge(pages=1)) <= FEW


@pytest.mark.req("S3-36")
@pytest.mark.parametrize("why", ["paused", "the queue is full", "the kinds are full"])
def test_a_backlog_of_blocked_tasks_does_not_slow_claims(database: Database, read_by: Reading, why: str):
    now = time.time()
    database.run(
        lambda tx: tx.execute(_TASKS.format(status="QUEUED", now=now, ended="NULL").replace("'low', 3", "'high', 1"))
    )
    queue = TaskQueue(database)
    if why == "paused":
        queue.pause("high", reason="too much", by="ann")
    elif why == "the queue is full":
        queue.limit("queue", "high", concurrency=0)
    else:
        for kind in ("k0", "k1", "k2"):
            queue.limit("kind", kind, concurrency=0)
    who = Claimant("w-1", Owner.current(), ("k0", "k1", "k2"))

    def claim() -> list[str]:
        return [found.id for found in claim_next(database, who, queues=PRIORITIES, limit=5)]

    assert claim() == []
    assert read_by(claim) <= PAGE
    if why != "the kinds are full":
        database.run(lambda tx: tx.execute("UPDATE tasks SET queue = 'low', place = 3 WHERE id = 't-60000'"))
        assert read_by(claim) <= PAGE
        assert queue.get("t-60000").status == Status.RUNNING
