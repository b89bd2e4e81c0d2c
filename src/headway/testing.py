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

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from headway._lease import Owner
from headway.errors import StorageError
from headway.failure import Failure
from headway.queue import claims, settling
from headway.queue.claims import Claimant
from headway.queue.execution import Ended, RunningTask, perform
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES, Claim, Status, Task

_here = threading.local()  # whether a handler runs in this thread


@contextmanager
def eager(queue: TaskQueue) -> Iterator[TaskQueue]:
    """``queue`` with its handlers, on a database in memory, without Redis. What is submitted is run before `submit`
    returns; a task that failed and has tries left is tried again at once. What a handler submits is run when the handler has
    returned, as it is beside a worker. Afterwards the queue is as it was."""

    def run(accepted: Sequence[Task]) -> None:
        if getattr(_here, "running", False):
            return  # a handler submitted it: whoever runs the handler finds it next
        run_waiting(queue)
        while any(queue.get(task.id).status is Status.RUNNING for task in accepted):
            time.sleep(0.001)  # another thread took it
            run_waiting(queue)

    with queue.moved(database="sqlite:///:memory:", on_submit=run):
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
        _here.running = True
        try:
            ended.append(_run(queue, claimed[0]))
        finally:
            _here.running = False
    return ended


def _run(queue: TaskQueue, claim: Claim) -> Task:
    def report(percent: float, message: str) -> None:
        queue.database.run(lambda tx: settling.progress(tx, claim, percent, message))

    def cancelled() -> bool:
        return queue.get(claim.id).cancelling

    began = time.monotonic()
    task = RunningTask(claim, report, cancelled)
    try:
        payload = queue.payload(claim.id, claim.payload)
    except StorageError as error:
        result = Ended(failure=Failure("PayloadRefused", str(error)), retryable=False)
    else:
        result = perform(task, queue.handlers[claim.kind].function, payload, queue.context)
    seconds = time.monotonic() - began
    if result.failure is None:
        stored = None if result.result is None else queue.sealed_result(claim.id, result.result)
        return queue.database.run(lambda tx: settling.complete(tx, claim, stored, seconds))
    failure, outcome, retryable = result.failure, result.outcome, result.retryable
    return queue.database.run(
        lambda tx: settling.fail(tx, claim, failure, outcome=outcome, retryable=retryable, seconds=seconds)
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
