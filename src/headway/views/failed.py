"""Failed tasks by cause, and failed jobs of the RQ deployment that the watcher follows."""

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
    """`/api/v1/task-causes`: why tasks of the queue failed permanently, by the cause of the last attempt."""

    causes: Annotated[tuple[TaskCause, ...], "those with the most failed tasks first"]

    def as_json(self) -> Json:
        return document(self)


class RqCause(NamedTuple):
    """Jobs of one RQ queue that failed for the same reason."""

    id: Annotated[str, "id; the same cause always has the same id"]
    queue: Annotated[str, "the RQ queue"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message; what differs from job to job is replaced"]
    frame: Annotated[str, "the top frame in your code"]
    jobs: Annotated[int, "failed jobs, of those examined"]
    example: Annotated[str, "the job that failed last"]
    error: Annotated[str, "its error"]
    first_seen: Annotated[datetime, "when the first failed"]
    last_seen: Annotated[datetime, "when the last failed"]


class RqCauses(NamedTuple):
    """`/api/v1/rq-causes`: failed jobs of the RQ deployment that the watcher follows."""

    queues: Annotated[tuple[str, ...], "the queues that are followed; empty: no deployment"]
    causes: Annotated[tuple[RqCause, ...], "those with the most jobs first"]
    total: Annotated[int, "jobs in the failed registries of these queues"]
    looked_at: Annotated[int, "examined jobs, the newest of each queue"]

    def as_json(self) -> Json:
        return document(self)


def read_failed_tasks(database: Database, *, limit: int = 50) -> TaskCauses:
    """Read the causes of failed tasks."""
    return TaskCauses(read_task_causes(database, limit=limit))


def read_rq_causes(config: Config, database: Database) -> RqCauses:
    """Read the causes of failed RQ jobs. Raises `Unavailable` if Redis does not answer."""
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
