"""The queue: tasks that users ask for, by priority, never lost.

    TaskQueue ── submission, handlers: what may be asked for, and who does it
       ├── records, admission, claims, settling, limits: the rows, which are the truth
       ├── rq, rqsource, database: how a worker hears of them
       ├── worker ── execution, watch, outcomes: running one, and what came of it
       └── sweeper, supervisor: who looks after all of it

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.queue.execution import GiveUp as GiveUp
    from headway.queue.execution import TaskCancelled as TaskCancelled
    from headway.queue.execution import TaskTimeout as TaskTimeout
    from headway.queue.submission import Role as Role
    from headway.queue.taskqueue import TaskQueue as TaskQueue
    from headway.queue.values import Priority as Priority
    from headway.queue.values import Status as Status
    from headway.queue.values import Task as Task
    from headway.queue.values import TaskConflict as TaskConflict
    from headway.queue.values import UserBusy as UserBusy

_PLACES = {
    "GiveUp": "execution",
    "Priority": "values",
    "Role": "submission",
    "Status": "values",
    "Task": "values",
    "TaskCancelled": "execution",
    "TaskConflict": "values",
    "TaskQueue": "taskqueue",
    "TaskTimeout": "execution",
    "UserBusy": "values",
}

__all__ = list(_PLACES)


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
