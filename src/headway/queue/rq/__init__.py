"""RQ as the wake-up of workers: a hint is an RQ job that carries only a task's id.

    hints        enqueue the ids of tasks, as submitters and the sweeper do
    source       pop ids and claim rows, as workers do
    registries   show running and failed tasks in RQ's own tools
    user_keys    a quick check whether a user already has an active task

Headway never executes or deserialises the content of an RQ job. Redis may be wiped, replaced or rolled back at any time: the
sweeper enqueues the hints of waiting tasks again.
"""

from __future__ import annotations

from headway.errors import HeadwayError


def not_by_this_worker(task_id: str) -> None:
    """Refuse to run: the function that a hint names, which only a worker of RQ itself would call."""
    raise HeadwayError(
        f"Task {task_id} is run by Headway's own worker.", hint="Start one: headway worker --app MODULE:QUEUE"
    )
