"""Handlers and workers that use more memory than they may."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from headway.core.lifecycle import Shutdown
from headway.errors import HeadwayError
from headway.queue.task import Status
from headway.queue.task_queue import TaskQueue
from headway.queue.worker import supervisor
from headway.queue.worker.execution import rss
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.worker import Worker

MB = 2**20


@pytest.mark.req("S2-48")
def test_a_task_that_uses_too_much_memory_in_its_workers_process_is_ended_with_its_cause(tmp_path: Path):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:

        @queue.handler("hog", retries=0, isolation="none")
        def hog(task: Any, payload: Any) -> None:
            taken = bytearray(b"x" * 300 * MB)
            for _ in range(600):
                time.sleep(0.05)
            del taken

        task = queue.submit("hog")
        Worker(queue, settings=Settings(rest=0.05, memory_limit=rss(os.getpid()) + 100 * MB)).tick()
        assert str(queue.get(task.id).error).startswith("MemoryLimit: the task's process used more than")
        assert queue.database.all("SELECT outcome FROM task_attempts") == [("memory",)]


@pytest.mark.req("S2-48")
def test_a_worker_whose_handlers_leave_too_much_in_its_memory_ends_and_the_next_task_waits_uncharged(tmp_path: Path):
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        # It ends at once: while a task runs, somebody else looks at the memory, and ends the task for it.
        queue.handler("leak", isolation="none")(lambda task, payload: None)
        first, second = queue.submit("leak"), queue.submit("leak")
        worker = Worker(queue, settings=Settings(rest=0.05, batch=1, memory_limit=rss(os.getpid()) // 2))
        worker.run()
        assert worker.outgrown
        assert queue.get(first.id).status is Status.COMPLETED
        assert (queue.get(second.id).status, queue.get(second.id).attempts) == (Status.QUEUED, 0)


def test_a_burst_that_ends_because_of_its_memory_says_that_it_is_not_through(tmp_path: Path):
    left: list[bytearray] = []
    with TaskQueue(f"sqlite:///{tmp_path}/queue.db") as queue:
        queue.handler("leak", isolation="none")(lambda task, payload: left.append(bytearray(b"x") * (512 * MB)))
        queue.submit("leak")  # more than the process may give back to the system meanwhile
        queue.set("memory_limit", (rss(os.getpid()) + 32 * MB) // MB)
        with pytest.raises(HeadwayError, match="exited before all tasks were done"):
            supervisor.work_off(queue, supervisor.Plan(""), shutdown=Shutdown())
