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


class CauseInJob(NamedTuple):
    """A cause in one job."""

    job: Annotated[str, "the job's id"]
    no: Annotated[int, "the number of the cause in this job"]
    dead: Annotated[int, "dead letters"]
    failures: Annotated[int, "failed attempts"]
    last_seen: Annotated[datetime, "when it last occurred"]
    example: Annotated[int | None, "index of one of the dead letters"]


class CauseGroup(NamedTuple):
    """The same cause in one or more jobs."""

    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message; what differs from item to item is replaced"]
    frame: Annotated[str, "the top frame in your code"]
    dead: Annotated[int, "dead letters in all jobs"]
    failures: Annotated[int, "failed attempts in all jobs"]
    first_seen: Annotated[datetime, "when it first occurred"]
    last_seen: Annotated[datetime, "when it last occurred"]
    jobs: Annotated[tuple[CauseInJob, ...], "its jobs, most dead letters first"]


class CauseGroups(NamedTuple):
    """`/api/v1/causes`: why items failed permanently, over all jobs."""

    causes: Annotated[tuple[CauseGroup, ...], "most dead letters first"]
    total: Annotated[int, "number of causes, listed or not"]
    dead: Annotated[int, "dead letters of all causes"]

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


def read_all_causes(database: Database, *, limit: int = 50) -> CauseGroups:
    """Read the causes with dead letters, grouped over all jobs that are not archived."""
    from headway.ledger.store.queries import statistics
    from headway.ledger.values import utc

    with database.read() as tx:
        rows = statistics.causes_with_dead_letters(tx)
    groups: dict[tuple[str, str, str], list[statistics.JobCause]] = {}
    for row in rows:
        groups.setdefault((row.type, row.message, row.frame), []).append(row)
    found = [
        CauseGroup(
            *key, sum(one.dead for one in group), sum(one.failures for one in group),
            utc(min(one.first_seen for one in group)), utc(max(one.last_seen for one in group)),
            tuple(CauseInJob(one.job, one.no, one.dead, one.failures, utc(one.last_seen), one.example) for one in group),
        )
        for key, group in groups.items()
    ]  # fmt: skip
    found.sort(key=lambda group: (-group.dead, group.type, group.message))
    return CauseGroups(tuple(found[:limit]), len(found), sum(group.dead for group in found))


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
