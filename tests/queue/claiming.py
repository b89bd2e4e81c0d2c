"""Claiming tasks as a worker does, and recording their outcomes, by the statements alone."""

from __future__ import annotations

from headway._lease import Owner
from headway.core.failure import Failure
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES, Claim, Task
from headway.queue.task_queue import TaskQueue

BOOM = Failure("ValueError", "boom")


def worker(name: str = "w1", *, lease: float = 60.0, kinds: tuple[str, ...] = ("caption", "resize")) -> Claimant:
    return Claimant(name, Owner.current(), kinds, lease)


def take(queue: TaskQueue, limit: int = 1, who: Claimant | None = None, **options) -> list[Claim]:
    who = who or worker()
    options.setdefault("queues", PRIORITIES)
    return queue.database.run(lambda tx: claims.claim(tx, who, limit=limit, **options))


def complete(queue: TaskQueue, claim: Claim, result: str | None = None) -> Task:
    return queue.database.run(lambda tx: outcomes.complete(tx, claim, result, 0.1))


def fail(queue: TaskQueue, claim: Claim, failure: Failure = BOOM, **options) -> Task:
    return queue.database.run(lambda tx: outcomes.fail(tx, claim, failure, **options))
