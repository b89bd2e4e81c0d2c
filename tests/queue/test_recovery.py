"""The sweeper: it recovers tasks, deletes old rows, and continues after errors and restores."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from headway._lease import Owner
from headway._sql import Tx
from headway.core.failure import Failure
from headway.errors import StaleClaim
from headway.events import Event, SqlOutbox, append
from headway.queue.recovery import Sweeper
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store import insert
from headway.queue.store.claim import LEASE, Claimant
from headway.queue.task import PRIORITIES, Priority, Status, Task
from headway.queue.task_queue import TaskQueue
from tests.queue import app
from tests.queue.claiming import take
from tests.services.waiting import eventually


def test_a_task_that_is_tried_again_while_the_sweeper_deletes_it_is_not_lost(postgres_with_tables: str):
    with TaskQueue(postgres_with_tables) as queue, ThreadPoolExecutor(1) as threads:
        queue.handler("caption")(lambda task, payload: payload)
        old = queue.cancel(queue.submit("caption").id)
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET ended_at = ended_at - 40 * 86400"))

        def try_again(tx: Tx) -> Task:
            task = insert.retry(tx, old.id, per_user=1)
            purged = threads.submit(Sweeper(queue).purge)
            eventually(lambda: purged.done() or queue.database.one("SELECT 1 FROM pg_locks WHERE NOT granted"))
            return task

        queue.database.run(try_again)
        threads.submit(lambda: None).result(60)  # the sweeper is through
        assert queue.get(old.id).status is Status.QUEUED


def far_away() -> Owner:
    """A process of another machine, which nobody here can see."""
    return replace(Owner.current(), host="far", machine="far", space="far", claim="far")


def claimed_far_away(queue: TaskQueue, lease: float = LEASE, owner: Owner | None = None) -> str:
    task = queue.submit("caption")
    who = Claimant("far", owner or far_away(), ["caption"], lease)
    assert queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES))
    return task.id


def turn_clock(queue: TaskQueue, seconds: float) -> None:
    """As if the database's clock had been set: what was written by it is so much nearer or further."""
    queue.database.run(lambda tx: tx.execute("UPDATE tasks SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE leases SET lease_until = lease_until - ?", (seconds,)))
    queue.database.run(lambda tx: tx.execute("UPDATE task_workers SET seen_at = seen_at - ?", (seconds,)))


def test_a_sweeper_goes_on_when_the_database_was_put_back_to_before_there_was_one(one_per_user: TaskQueue):
    sweeper = Sweeper(one_per_user)
    sweeper.tick()
    one_per_user.database.write("DELETE FROM leases")
    id = claimed_far_away(one_per_user)
    turn_clock(one_per_user, LEASE + 1)
    sweeper.tick()
    sweeper.tick()
    assert one_per_user.get(id).status == "QUEUED"


@pytest.mark.parametrize("ending", ["completed", "failed", "progress"])
def test_a_worker_whose_claim_was_lost_by_a_failover_records_nothing_over_the_next_one(
    one_per_user: TaskQueue, ending: str
):
    task = one_per_user.submit("caption")
    row = one_per_user.database.one("SELECT version, token FROM tasks")
    assert row is not None
    first, second = (Claimant(name, Owner.current(), ["caption"]) for name in ("first", "second"))
    [lost] = one_per_user.database.run(lambda tx: claims.claim(tx, first, queues=PRIORITIES))
    one_per_user.database.write(
        "UPDATE tasks SET status = 'QUEUED', version = ?, token = ?, holder = NULL, lease_until = NULL", row
    )
    [claim] = one_per_user.database.run(lambda tx: claims.claim(tx, second, queues=PRIORITIES))
    calls: dict[str, Callable[[Tx], object]] = {
        "completed": lambda tx: outcomes.complete(tx, lost, "1", 0.1),
        "failed": lambda tx: outcomes.fail(tx, lost, Failure("ValueError", "boom")),
        "progress": lambda tx: outcomes.progress(tx, lost, 50, "half"),
    }
    with pytest.raises(StaleClaim):
        one_per_user.database.run(calls[ending])
    one_per_user.database.run(lambda tx: outcomes.complete(tx, claim, "2", 0.1))
    assert (one_per_user.get(task.id).status, one_per_user.get(task.id).attempts) == ("COMPLETED", 0)


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


@pytest.fixture
def queue(database_url: str) -> Iterator[TaskQueue]:
    with app.build(database_url) as made:
        yield made


class Odd:
    """Hints that fail once in a way nobody knows."""

    def __init__(self) -> None:
        self.rounds = 0

    def check_memory(self) -> bool:
        self.rounds += 1
        if self.rounds == 1:
            raise RuntimeError("nobody knows this")
        return False

    def push(self, tasks: Sequence[tuple[str, Priority]]) -> list[str]:
        return [task_id for task_id, _ in tasks]

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]]:
        return list(tasks)

    def show_ended(self, tasks: Sequence[Task]) -> None:
        pass

    def remove_dead_workers(self) -> None:
        pass


def test_a_sweeper_whose_round_fails_in_an_unknown_way_says_so_and_goes_on(
    queue: TaskQueue, caplog: pytest.LogCaptureFixture
):
    hints, stop = Odd(), threading.Event()
    sweeper = Sweeper(queue, hints=hints)
    thread = threading.Thread(target=sweeper.run, args=(stop,))
    thread.start()
    try:
        eventually(lambda: hints.rounds == 2)
    finally:
        stop.set()
        thread.join()
    assert "a round of the sweeper failed; retrying" in caplog.text


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
