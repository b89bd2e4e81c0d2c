"""Test helpers: run the tasks of a queue at once, in the test process.

    from headway.testing import eager

    def test_captions(app):
        with eager(queue) as queue_under_test:
            task = queue_under_test.submit("caption", {"image": 7}, user_id="anna")
            assert queue_under_test.get(task.id).status == "COMPLETED"

Quotas, order, retries and records use the same code as in production; only the worker processes are missing.
``pytest_plugins = ["headway.testing"]`` provides the fixture ``eager_queue``, a function that takes the queue.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any

from headway._lease import Owner
from headway._sql import Tx
from headway.core.failure import Failure
from headway.core.retry import LaterLimit
from headway.core.setup import enter, enter_async
from headway.errors import StorageError
from headway.queue.store import claim as claims
from headway.queue.store import complete as outcomes
from headway.queue.store.claim import Claimant
from headway.queue.task import PRIORITIES, Claim, Status, Task
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import Ended, RunningTask, perform, perform_async
from headway.queue.worker.outcomes import record_failure

_here = threading.local()  # `running`: a handler runs in this thread


@contextmanager
def eager(queue: TaskQueue) -> Iterator[TaskQueue]:
    """Move ``queue`` to an in-memory database, without Redis, while the block runs.

    `submit` runs the task before it returns and retries failures without a delay. Tasks that a handler submits run after
    the handler has returned, as with a worker. Afterwards the queue uses its own database again.
    """

    def run(accepted: Sequence[Task]) -> None:
        if getattr(_here, "running", False):
            return  # submitted by a handler: the loop that runs the handler claims it next
        run_waiting(queue)
        while any(queue.get(task.id).status is Status.RUNNING for task in accepted):
            time.sleep(0.001)  # another thread claimed it
            run_waiting(queue)

    with queue.moved(database="sqlite:///:memory:", on_submit=run):
        yield queue


def run_waiting(queue: TaskQueue, *, limit: int = 1000) -> list[Task]:
    """Run the waiting tasks in the order of a worker. Return the task after each run, at most ``limit``."""
    ended: list[Task] = []
    who = Claimant("eager", Owner.current(), sorted(queue.handlers), 3600.0)
    while len(ended) < limit:
        queue.database.run(_make_due)
        claimed = queue.database.run(lambda tx: claims.claim(tx, who, queues=PRIORITIES, limit=1))
        if not claimed:
            break
        _here.running = True
        try:
            ended.append(_run(queue, claimed[0]))
        finally:
            _here.running = False
    return ended


def _make_due(tx: Tx) -> None:
    """End every delay: a test does not wait for a retry or for `RetryLater`."""
    tx.execute("UPDATE tasks SET run_at = 0 WHERE status = 'QUEUED' AND ready = 0")
    tx.execute("DELETE FROM task_holds")


def _run(queue: TaskQueue, claim: Claim) -> Task:
    def report(percent: float, message: str) -> None:
        queue.database.run(lambda tx: outcomes.progress(tx, claim, percent, message))

    def cancelled() -> bool:
        return queue.get(claim.id).cancelling

    began = time.monotonic()
    task = RunningTask(claim, report, cancelled)
    try:
        payload = queue.backend.decode(claim.id, claim.payload)
    except StorageError as error:
        result = Ended(failure=Failure("PayloadRefused", str(error)), retryable=False)
    else:
        result = _perform(queue, task, payload)
    seconds = time.monotonic() - began
    if result.failure is None:
        stored = None if result.result is None else queue.backend.encode_result(claim.id, result.result)
        return queue.database.run(lambda tx: outcomes.complete(tx, claim, stored, seconds))
    return queue.database.run(lambda tx: record_failure(tx, claim, result, seconds, LaterLimit()))


def _perform(queue: TaskQueue, task: RunningTask, payload: str) -> Ended:
    handler = queue.handlers[task.kind]
    if handler.isolation != "async":
        if handler.setup is None:
            return perform(task, handler.function, payload, queue.context)
        opened = enter(handler.setup)
        try:
            return perform(task, handler.function, payload, queue.context, (opened.value,))
        finally:
            opened.close()

    async def entered() -> Ended:
        if handler.setup is None:
            return await perform_async(task, handler.function, payload, queue.context)
        opened = await enter_async(handler.setup)
        try:
            return await perform_async(task, handler.function, payload, queue.context, (opened.value,))
        finally:
            await opened.aclose()

    def run() -> Ended:
        return asyncio.run(entered())

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with ThreadPoolExecutor(1) as thread:  # the test is async itself, and its event loop cannot run another one
        return thread.submit(copy_context().run, run).result()


def __getattr__(name: str) -> Any:
    """Create the pytest fixture on first use, so that this module does not require pytest."""
    if name != "eager_queue":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    @pytest.fixture
    def eager_queue() -> Iterator[Callable[[TaskQueue], TaskQueue]]:
        """Return a function that makes a queue eager until the test ends."""
        from contextlib import ExitStack

        with ExitStack() as stack:
            yield lambda queue: stack.enter_context(eager(queue))

    globals()[name] = eager_queue
    return eager_queue


def __dir__() -> list[str]:
    return ["eager", "eager_queue", "run_waiting"]  # pytest finds fixtures with dir()
