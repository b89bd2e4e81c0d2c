"""A database that stops answering: no task is taken from a worker that is alive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Self

import pytest

from headway._lease import Owner
from headway._sql import Tx
from headway.queue.recovery import SILENCE, Sweeper
from headway.queue.store import claim as claims
from headway.queue.store.claim import LEASE, Claimant
from headway.queue.task import PRIORITIES
from headway.queue.task_queue import TaskQueue


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


def test_a_database_that_answered_nobody_for_long_takes_nothing_from_those_who_live(
    database_url: str, queue: TaskQueue
):
    """Nobody could renew anything; that the sweeper is answered first says nothing of the others, here or elsewhere."""
    ids = [claimed_far_away(queue, 1.0, owner) for owner in (far_away(), Owner.current())]
    sweeper, busy = Sweeper(queue), threading.Event()
    sweeper.tick()

    def be_busy(tx: Tx) -> None:
        tx.execute("UPDATE leases SET token = token")  # on SQLite this is the whole database
        busy.set()
        time.sleep(SILENCE + 0.5)

    with TaskQueue(database_url) as other, ThreadPoolExecutor(1) as pool:
        blocking = pool.submit(other.database.run, be_busy)
        assert busy.wait(10.0)
        sweeper.tick()
        blocking.result()
    assert [queue.get(id).status for id in ids] == ["RUNNING", "RUNNING"]
    turn_clock(queue, LEASE + 1)  # they said nothing since
    sweeper.tick()
    assert [queue.get(id).status for id in ids] == ["QUEUED", "QUEUED"]


class FallingSilent:
    """Hints of which nothing is needed but the moment at which a round has looked for dead workers and goes on."""

    def __init__(self, then: Callable[[], object]) -> None:
        self._then = then

    def show_ended(self, tasks: object) -> None:
        self._then()

    def push(self, tasks: object) -> list[str]:
        return []

    def missing(self, tasks: object) -> None:
        return None

    def check_memory(self) -> bool:
        return True

    def remove_dead_workers(self) -> None:
        pass


class Silence:
    """A database that answers nobody for some seconds from the moment on at which this is called first."""

    def __init__(self, database_url: str, seconds: float) -> None:
        self._other, self._seconds = TaskQueue(database_url), seconds
        self._pool, self._fell, self._over = ThreadPoolExecutor(1), threading.Event(), Future[None]()

    def __call__(self) -> None:
        if not self._fell.is_set():
            self._over = self._pool.submit(self._other.database.run, self._last)
            assert self._fell.wait(10.0)

    def _last(self, tx: Tx) -> None:
        if tx.engine == "postgresql":
            tx.execute("LOCK TABLE tasks")
        tx.execute("UPDATE tasks SET lease_until = lease_until - 60")  # nobody renewed it for so long
        self._fell.set()
        time.sleep(self._seconds)

    def wait(self) -> None:
        self._over.result(60)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._other.close()


def test_a_database_that_falls_silent_in_the_middle_of_a_round_takes_nothing_from_those_who_live(
    database_url: str, queue: TaskQueue
):
    with Silence(database_url, SILENCE + 0.5) as silence:
        sweeper = Sweeper(queue, hints=FallingSilent(silence))
        id = claimed_far_away(queue)
        sweeper.tick()
        silence.wait()
        sweeper.tick()
        assert queue.get(id).status == "RUNNING"
        turn_clock(queue, LEASE + 1)  # it said nothing since
        sweeper.tick()
        assert queue.get(id).status == "QUEUED"


@pytest.mark.parametrize("doing", ["deletes", "counts"])  # SQLite goes on counting while somebody writes
def test_a_database_that_falls_silent_while_the_sweeper_deletes_or_counts_takes_nothing_from_those_who_live(
    doing: str, database_url: str, queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("headway.queue.recovery.SILENCE", 0.2)
    ahead = 0.0
    with Silence(database_url, 2.0) as silence:
        sweeper = Sweeper(queue, chores=[silence], clock=lambda: time.monotonic() + ahead)
        if doing == "deletes":
            ahead = 61.0  # it does once a minute
        id = claimed_far_away(queue)
        sweeper.tick()
        if doing == "deletes" or queue.database.engine == "postgresql":
            silence.wait()
        sweeper.tick()
        silence.wait()
        assert queue.get(id).status == "RUNNING"
