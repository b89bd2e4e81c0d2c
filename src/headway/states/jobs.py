"""Operations on jobs by store URL: open, list, delete and purge."""

from __future__ import annotations

import math
from contextlib import closing
from datetime import UTC, datetime, timedelta

from headway.core.retry import LISTENER, RetryPolicy
from headway.errors import InvalidInput
from headway.states.live import LiveStore
from headway.states.state import FINISHED, State, checked_id, checked_num_tasks
from headway.states.store import open_backend
from headway.states.store.contract import Backend, JobRecord, Snapshot, no_such_job
from headway.telemetry import Log

log = Log("states")


def open_store(
    url: str,
    job_id: str,
    num_tasks: int | None = None,
    *,
    history: bool = False,
    max_concurrency: int | None = None,
    retry: RetryPolicy = LISTENER,
) -> tuple[LiveStore, int]:
    """Open the store of one job. Returns it with the job's number of tasks.

    With ``num_tasks`` the job is created if it does not exist. If it exists, its stored number of tasks and its stored
    ``history`` take precedence over the arguments. Without ``num_tasks`` the job must exist (for monitors).
    ``max_concurrency`` limits the concurrent writes of this process. ``retry`` is the listener's reconnect policy.
    """
    job_id = checked_id(job_id, "a job id")
    num_tasks = None if num_tasks is None else checked_num_tasks(num_tasks)
    backend = open_backend(url, create=num_tasks is not None)
    try:
        record = _record(backend, job_id, num_tasks, history=history)
        store = LiveStore(backend, record, retry=retry, max_concurrency=max_concurrency)
    except BaseException:
        backend.close()
        raise
    return store, record.num_tasks


def _record(backend: Backend, job_id: str, num_tasks: int | None, *, history: bool) -> JobRecord:
    if num_tasks is not None:
        return backend.register(job_id, num_tasks, history=history).usable()
    found = backend.find(job_id)
    if found is None:
        raise no_such_job(job_id)
    return found


def list_jobs(url: str) -> list[JobRecord]:
    """Return every job in the store, including those marked as deleted."""
    with closing(open_backend(url, create=False)) as backend:
        return list(backend.jobs())


def mark_job_deleted(url: str, job_id: str) -> None:
    """Mark a job as deleted. It then rejects writes, and the next `purge` removes it."""
    job_id = checked_id(job_id, "a job id")
    with closing(open_backend(url, create=False)) as backend:
        backend.mark_deleted(job_id)
    log.info("job marked as deleted", jobID=job_id)


def delete_job(url: str, job_id: str) -> None:
    """Delete a job with all its states. If interrupted, call it again to finish."""
    job_id = checked_id(job_id, "a job id")
    with closing(open_backend(url, create=False)) as backend:
        if not backend.delete(job_id):
            raise no_such_job(job_id)
    log.info("job deleted", jobID=job_id)


def purge(url: str, *, older_than: float | None = None, now: datetime | None = None) -> list[str]:
    """Delete the jobs that are marked as deleted, and return the ids of the deleted jobs.

    With ``older_than``, also delete jobs whose states are all finished and were last written that many seconds ago.
    Every task must have reported. If interrupted, the next purge finishes the deletion.
    """
    if older_than is None:
        older_than = math.inf
    elif not older_than >= 0:  # also rejects NaN
        raise InvalidInput(f"older_than must be a number of seconds from 0 (got {older_than:g}).")
    try:
        before = None if older_than == math.inf else (now or datetime.now(UTC)) - timedelta(seconds=older_than)
    except OverflowError as error:
        raise InvalidInput(f"older_than={older_than:g} seconds is before the year 1.") from error
    removed = []
    with closing(open_backend(url, create=False)) as backend:
        for record in list(backend.jobs()):
            if not record.deleted and before is None:
                continue
            seen = Snapshot(record.incarnation) if record.deleted else backend.read_all(record, None)
            old = record.deleted or (before is not None and _finished_before(seen.states, record.num_tasks, before))
            # `delete` rechecks atomically: it skips a job that was re-created or written to since the read.
            if old and backend.delete(record.job_id, record.incarnation, unless_after=seen.mark):
                log.info("job purged", jobID=record.job_id, reason="marked" if record.deleted else "finished")
                removed.append(record.job_id)
    return removed


def _finished_before(states: tuple[State, ...], num_tasks: int, before: datetime) -> bool:
    # A job has no finish time of its own. Once all states are finished, its newest state's time counts.
    return (
        len({state.task_id for state in states}) == num_tasks
        and all(state.status == FINISHED for state in states)
        and all(state.timestamp is not None and state.timestamp <= before for state in states)
    )
