"""For tests of programs that use headway: a queue that runs its tasks at once, in the test's own process.

    from headway.testing import eager

    def test_captions(app):
        with eager(queue) as queue_under_test:
            task = queue_under_test.submit("caption", {"image": 7}, user_id="anna")
            assert queue_under_test.get(task.id).status == "COMPLETED"

The same code decides who may submit what, in which order tasks run, how failures are retried and what is recorded; only
the processes are missing. As pytest fixtures: ``pytest_plugins = ["headway.testing"]`` gives ``eager_queue``, a function.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headway._lease import Owner
from headway.queue import claims
from headway.queue.claims import Claimant
from headway.queue.execution import RunningTask, perform
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES, Claim, Task


@contextmanager
def eager(queue: TaskQueue) -> Iterator[TaskQueue]:
    """``queue`` with its handlers, on a database in memory, without Redis. What is submitted is run before `submit`
    returns; a task that failed and has tries left is tried again at once. Afterwards the queue is as it was."""
    with queue.moved(database="sqlite:///:memory:", on_submit=lambda: run_waiting(queue)):
        yield queue


def run_waiting(queue: TaskQueue, *, limit: int = 1000) -> list[Task]:
    """Run what waits, in the order a worker would, until nothing is left (at most ``limit`` runs); what each run came to."""
    ended: list[Task] = []
    who = Claimant("eager", Owner.current(), sorted(queue.handlers), 3600.0)
    while len(ended) < limit:
        # A retry waits for its time; in a test nobody has that time.
        queue.database.run(lambda tx: tx.execute("UPDATE tasks SET run_at = 0 WHERE status = 'QUEUED' AND ready = 0"))
        claimed = queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES, limit=1))
        if not claimed:
            break
        ended.append(_run(queue, claimed[0]))
    return ended


def _run(queue: TaskQueue, claim: Claim) -> Task:
    def report(percent: float, message: str) -> None:
        queue.database.run(lambda tx: claims.progress(tx, claim, percent, message))

    def cancelled() -> bool:
        return queue.get(claim.id).cancelling

    began = time.monotonic()
    task = RunningTask(claim, report, cancelled)
    result = perform(task, queue.handlers[claim.kind].function, queue.payload(claim.id, claim.payload), queue.context)
    seconds = time.monotonic() - began
    if result.failure is None:
        return queue.database.run(lambda tx: claims.complete(tx, claim, result.result, seconds))
    failure, outcome, retryable = result.failure, result.outcome, result.retryable
    return queue.database.run(
        lambda tx: claims.fail(tx, claim, failure, outcome=outcome, retryable=retryable, seconds=seconds)
    )


def __getattr__(name: str) -> Any:
    """The pytest fixture, made when pytest asks for it: nobody else needs pytest."""
    if name != "eager_queue":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    @pytest.fixture
    def eager_queue() -> Iterator[Callable[[TaskQueue], TaskQueue]]:
        """Give it your queue: it is eager until the test ends."""
        from contextlib import ExitStack

        with ExitStack() as stack:
            yield lambda queue: stack.enter_context(eager(queue))

    globals()[name] = eager_queue
    return eager_queue


def __dir__() -> list[str]:
    return ["eager", "eager_queue", "run_waiting"]  # pytest looks for fixtures by the names a module says it has
