"""States: track the status of every task of a job per tag, and subscribe to changes.

    store, num_tasks = states.open_store("sqlite:///job.db", "nightly", num_tasks=4)
    with states.Manager("nightly", task_index, num_tasks, store) as manager:
        manager.set_started("ingest")
        ...
        manager.set_finished("ingest")
            manager.wait_for("ingest")                      # a barrier: every task has finished "ingest"
            for event in manager.subscribe(tag="export"):   # current states, one sentinel, then changes
            ...

The status of a job or tag is the lowest status of its tasks.
"""

from __future__ import annotations

from headway.states.jobs import delete_job, list_jobs, mark_job_deleted, open_store, purge
from headway.states.live import LiveStore
from headway.states.manager import Manager, Summary, TaskFailed, WaitTimeout
from headway.states.state import (
    ERROR,
    FINISHED,
    NOT_STARTED,
    REPLAY_COMPLETE,
    STARTED,
    WARNING,
    State,
    StateEvent,
    status_class,
)
from headway.states.store.contract import Backend, JobGone, JobRecord, Store, WentBack
from headway.states.subscription import Subscription, SubscriptionClosed

__all__ = [
    "ERROR",
    "FINISHED",
    "NOT_STARTED",
    "REPLAY_COMPLETE",
    "STARTED",
    "WARNING",
    "Backend",
    "JobGone",
    "JobRecord",
    "LiveStore",
    "Manager",
    "State",
    "StateEvent",
    "Store",
    "Subscription",
    "SubscriptionClosed",
    "Summary",
    "TaskFailed",
    "WaitTimeout",
    "WentBack",
    "delete_job",
    "list_jobs",
    "mark_job_deleted",
    "open_store",
    "purge",
    "status_class",
]
