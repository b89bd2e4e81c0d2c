"""States: where each task of a job is with each of its tags, and a way to follow it.

    store, num_tasks = states.open_store("sqlite:///job.db", "nightly", num_tasks=4)
    with states.Manager("nightly", task_index, num_tasks, store) as manager:
        manager.set_started("ingest")
        ...
        manager.set_finished("ingest")
        manager.wait_for("ingest")                      # everybody has ingested
        for event in manager.subscribe(tag="export"):   # what is current, a sentinel, then what happens
            ...

The status of a whole is its lowest: a job is as far as the task that is least far.
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
from headway.states.store import Backend, JobGone, JobRecord, Store, WentBack
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
