"""What stands failed in queues, by cause: tasks of ours, and jobs of the RQ deployment that the watcher follows."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.views.overview import TaskCause, read_task_causes
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database
    from headway.config import Config
    from headway.watcher.failures import FailedCause


class TaskCauses(NamedTuple):
    """`/api/v1/task-causes`: why tasks of the queue failed for good, by the cause of each one's last run."""

    causes: Annotated[tuple[TaskCause, ...], "those with most failed tasks first"]

    def as_json(self) -> Json:
        return document(self)


class RqCause(NamedTuple):
    """Jobs of one RQ queue that failed alike."""

    id: Annotated[str, "the same for the same cause at every look"]
    queue: Annotated[str, "RQ's queue"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message without what differs from job to job"]
    frame: Annotated[str, "the place in your code"]
    jobs: Annotated[int, "jobs that failed by it, of those looked at"]
    example: Annotated[str, "the job that failed last by it"]
    error: Annotated[str, "what that one said"]
    first_seen: Annotated[datetime, "when the first of them failed"]
    last_seen: Annotated[datetime, "when the last of them failed"]


class RqCauses(NamedTuple):
    """`/api/v1/rq-causes`: what stands failed in the RQ deployment that the watcher follows."""

    queues: Annotated[tuple[str, ...], "the queues that are followed; none: no deployment is"]
    causes: Annotated[tuple[RqCause, ...], "those with most jobs first"]
    total: Annotated[int, "jobs in the failed registries of these queues"]
    looked_at: Annotated[int, "those of them that were looked at, the newest of each queue"]

    def as_json(self) -> Json:
        return document(self)


def read_failed_tasks(database: Database, *, limit: int = 50) -> TaskCauses:
    return TaskCauses(read_task_causes(database, limit=limit))


def read_rq_causes(config: Config, database: Database) -> RqCauses:
    """A Redis that does not answer is `Unavailable`."""
    from headway.watcher.failures import followed, read_failures

    deployment = followed(config, database)
    if deployment is None:
        return RqCauses((), (), 0, 0)
    found = read_failures(deployment)
    return RqCauses(deployment.queues, tuple(map(_rq_cause, found.causes)), found.total, found.looked_at)


def _rq_cause(cause: FailedCause) -> RqCause:
    return RqCause(
        cause.id, cause.queue, cause.type, cause.message, cause.frame, len(cause.jobs), cause.jobs[0].id,
        cause.error, cause.first_seen, cause.last_seen,
    )  # fmt: skip
