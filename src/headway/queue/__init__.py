"""The queue: tasks submitted by users, run in order of priority, never lost.

    TaskQueue ── submission, handlers: which tasks may be submitted, and the functions that run them
       ├── store/: the task rows, which are the source of truth
       ├── rq: the notification in Redis that a task is waiting
       ├── worker/: claiming a task, running it, recording the outcome
       └── recovery: the sweep that returns lost tasks to the queue

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.queue.submission import Role as Role
    from headway.queue.task import Priority as Priority
    from headway.queue.task import Status as Status
    from headway.queue.task import Task as Task
    from headway.queue.task import TaskConflict as TaskConflict
    from headway.queue.task import UserBusy as UserBusy
    from headway.queue.task_queue import TaskQueue as TaskQueue
    from headway.queue.worker.execution import GiveUp as GiveUp
    from headway.queue.worker.execution import TaskCancelled as TaskCancelled
    from headway.queue.worker.execution import TaskTimeout as TaskTimeout

_PLACES = {
    "GiveUp": "worker.execution",
    "Priority": "task",
    "Role": "submission",
    "Status": "task",
    "Task": "task",
    "TaskCancelled": "worker.execution",
    "TaskConflict": "task",
    "TaskQueue": "task_queue",
    "TaskTimeout": "worker.execution",
    "UserBusy": "task",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
