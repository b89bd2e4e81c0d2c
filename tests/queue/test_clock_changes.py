"""A clock set back or forward: leases, rates and hints."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from headway._lease import Lease, Owner, SqlLeases
from headway.queue.recovery import Sweeper
from headway.queue.store import claim as claims
from headway.queue.store import hints as hinting
from headway.queue.store import workers
from headway.queue.store.claim import LEASE, Claimant
from headway.queue.task import PRIORITIES
from headway.queue.task_queue import TaskQueue
from tests.queue.claiming import take


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


def test_a_clock_that_was_set_back_delays_the_takeover_of_a_dead_workers_task_by_a_lease_at_the_most(queue: TaskQueue):
    id = claimed_far_away(queue)
    sweeper = Sweeper(queue)
    turn_clock(queue, -3600)
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"  # it may live, and renew its lease
    turn_clock(queue, LEASE + 1)
    sweeper.tick()
    assert (queue.get(id).status, queue.get(id).attempts) == ("QUEUED", 1)


@pytest.mark.parametrize("stood_by", [False, True], ids=["active", "stood-by"])
def test_a_clock_that_was_set_forward_takes_nothing_from_those_who_live(queue: TaskQueue, stood_by: bool):
    """One that stood by takes the lease of the sweepers from the active one, of another machine, before that one looks."""
    if stood_by:
        queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", far_away(), 8.0))
    id = claimed_far_away(queue)
    forward = 0.0
    sweeper = Sweeper(queue, clock=lambda: time.monotonic() - forward)
    sign = workers.Sign("far", far_away(), PRIORITIES, "busy", id, 0, 0, 0)
    queue.database.run(lambda tx: workers.heartbeat(tx, sign))
    sweeper.tick()
    forward = 3600.0
    turn_clock(queue, forward)
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"
    assert queue.database.all("SELECT state FROM task_workers") == [("busy",)]
    turn_clock(queue, LEASE + 1)  # it said nothing since
    sweeper.tick()
    assert queue.get(id).status == "QUEUED"


def test_a_sweeper_that_stood_by_when_the_clock_was_set_forward_remembers_it_for_a_lease(queue: TaskQueue):
    """Whoever was active then may have died before it could do anything about it."""
    active = far_away()
    lease = queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", active, 8.0))
    assert isinstance(lease, Lease)
    id = claimed_far_away(queue)
    forward = 0.0
    sweeper = Sweeper(queue, clock=lambda: time.monotonic() - forward)
    sweeper.tick()
    forward = 3600.0
    turn_clock(queue, forward)
    queue.database.run(lambda tx: SqlLeases().renew(tx, lease))
    sweeper.tick()
    queue.database.run(lambda tx: SqlLeases().release(tx, lease))
    sweeper.tick()
    assert queue.get(id).status == "RUNNING"


def test_a_clock_that_was_set_back_keeps_neither_a_dead_sweeper_nor_a_dead_worker_for_alive(queue: TaskQueue):
    queue.database.run(lambda tx: SqlLeases().acquire(tx, "queue.sweeper", far_away(), 8.0))
    sign = workers.Sign("far", far_away(), PRIORITIES, "idle", None, 0, 0, 0)
    queue.database.run(lambda tx: workers.heartbeat(tx, sign))
    turn_clock(queue, -3600)
    id = claimed_far_away(queue)
    sweeper = Sweeper(queue)
    sweeper.tick()
    turn_clock(queue, 30)
    sweeper.tick()
    assert queue.get(id).status == "QUEUED"
    turn_clock(queue, workers.WORKER_SECONDS + 1)
    sweeper.tick()
    assert queue.database.all("SELECT state FROM task_workers") == [("lost",)]


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
