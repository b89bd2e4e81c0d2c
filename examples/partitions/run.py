"""A job in four processes and three steps, one of them killed in the middle and started again.

    python examples/partitions/run.py [STORE]

STORE is any address open_store takes (default: a SQLite file in a new directory):
sqlite:///job.db, postgresql://user@host/name, redis://host:6379/1, firestore://PROJECT
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from uuid import uuid4

from headway import states

TASKS = 4
STEPS = ("ingest", "process", "export")
ROWS = 40


def work(url: str, job: str, task: int) -> None:
    """One process: it does its share of each step, and begins the next one when everybody has finished the last."""
    store, num_tasks = states.open_store(url, job, TASKS)
    with states.Manager(job, task, num_tasks, store) as manager:
        for step in STEPS:
            begin = manager.get_state(task_id=task, tag=step).status
            if begin != states.FINISHED:  # a newcomer finds what its predecessor reported
                if begin == 0:
                    manager.set_started(step)
                for row in range(max(begin, 1), ROWS):
                    time.sleep(0.01)  # the work
                    manager.set_state(step, status=row + 1, payload={"rows": row + 1})
                manager.set_finished(step)
            manager.wait_for(step, timeout=120)


def main() -> None:
    scratch = tempfile.TemporaryDirectory()
    url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{scratch.name}/job.db"
    job = f"partitions-{uuid4().hex[:8]}"
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=work, args=(url, job, task)) for task in range(TASKS)]
    for worker in workers:
        worker.start()
    store, num_tasks = states.open_store(url, job, TASKS)
    monitor = states.Manager(job, 0, num_tasks, store, expected_tags=STEPS)
    print(f"Follow it from another terminal:  headway states {job} --follow --store {url}")
    killed, progress = False, {}
    for event in monitor.subscribe(timeout=120):
        state = event.state
        if state is None:
            continue
        assert state.version > progress.get(state.key, 0), "a version is never heard twice"
        progress[state.key] = state.version
        if state.status in (1, states.FINISHED):
            print(f"  task {state.task_id}  {state.tag:8} {state.message}")
        if not killed and (state.task_id, state.tag) == (2, "process") and state.status >= ROWS // 2:
            os.kill(workers[2].pid or 0, signal.SIGKILL)
            workers[2].join()
            print("  task 2  was killed with SIGKILL in the middle of 'process'; starting it again")
            workers[2] = context.Process(target=work, args=(url, job, 2))
            workers[2].start()
            killed = True
        if monitor.get_state().status == states.FINISHED:
            break
    for worker in workers:
        worker.join(60)
    summary = monitor.summary()
    print(f"Everything is finished: {summary.counts['finished']} of {TASKS * len(STEPS)} states, killed once: {killed}")
    monitor.delete_job()
    monitor.close()
    scratch.cleanup()
    sys.exit(0 if summary.finished and killed else 1)


if __name__ == "__main__":
    main()
