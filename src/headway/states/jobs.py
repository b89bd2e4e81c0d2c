"""Jobs by address: opening the store of one, listing them, deleting them, letting finished ones go."""

from __future__ import annotations

import math
from contextlib import closing
from datetime import UTC, datetime, timedelta
from urllib.parse import urlsplit

from headway.errors import InvalidInput
from headway.retry import LISTENER, RetryPolicy
from headway.states.live import LiveStore
from headway.states.state import FINISHED, State, checked_id, checked_num_tasks
from headway.states.store import Backend, JobRecord, Snapshot, no_such_job
from headway.telemetry import Log, redact

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
    """The store of one job, and the number of tasks the job really has.

    The job is made if it is new; if it exists, its own number of tasks wins over ``num_tasks``, and its own choice over
    ``history``. Without ``num_tasks`` it must exist (for monitors). ``max_concurrency`` bounds how many writes of this
    process are under way at once; ``retry`` is how the listener comes back.
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


def open_backend(url: str, *, create: bool = True) -> Backend:
    """What keeps the states at an address. Each kind is imported when it is asked for."""
    scheme = urlsplit(url).scheme
    if scheme in ("sqlite", "postgresql", "postgres"):
        from headway.states.sql import SqlStates

        return SqlStates(url, create=create)
    if scheme in ("redis", "rediss", "unix"):
        from headway.states.redis import RedisStates

        return RedisStates(url)
    if scheme == "firestore":
        from headway.states.firestore import FirestoreStates

        return FirestoreStates(url)
    raise InvalidInput(
        f"{redact(url)!r} is not the address of a store.",
        hint="Use sqlite:///file.db, postgresql://user@host/name, redis://host:6379/1 or firestore://PROJECT",
    )


def list_jobs(url: str) -> list[JobRecord]:
    """Every job there is, marked as deleted or not."""
    with closing(open_backend(url, create=False)) as backend:
        return list(backend.jobs())


def mark_job_deleted(url: str, job_id: str) -> None:
    """Leave a tombstone: no more states are taken, and the next `purge` removes the job."""
    job_id = checked_id(job_id, "a job id")
    with closing(open_backend(url, create=False)) as backend:
        backend.mark_deleted(job_id)
    log.info("job marked as deleted", jobID=job_id)


def delete_job(url: str, job_id: str) -> None:
    """Remove a job with all its states. Interrupted, it is finished by calling it again."""
    job_id = checked_id(job_id, "a job id")
    with closing(open_backend(url, create=False)) as backend:
        if not backend.delete(job_id):
            raise no_such_job(job_id)
    log.info("job deleted", jobID=job_id)


def purge(url: str, *, older_than: float | None = None, now: datetime | None = None) -> list[str]:
    """Remove the jobs that are marked as deleted, and return the ids of all removed jobs.

    With ``older_than`` also those in which every task has finished everything it reported and nothing was written for
    that many seconds. An interrupted purge is finished by the next one.
    """
    if older_than is None:
        older_than = math.inf
    elif not older_than >= 0:  # NaN is neither
        raise InvalidInput(f"older_than={older_than:g} is no time that has passed.", hint="Use a number from 0.")
    try:
        before = None if older_than == math.inf else (now or datetime.now(UTC)) - timedelta(seconds=older_than)
    except OverflowError as error:
        raise InvalidInput(f"older_than={older_than:g} is before any time there is.") from error
    removed = []
    with closing(open_backend(url, create=False)) as backend:
        for record in list(backend.jobs()):
            if not record.deleted and before is None:
                continue
            seen = Snapshot(record.incarnation) if record.deleted else backend.read_all(record, None)
            old = record.deleted or (before is not None and _finished_before(seen.states, record.num_tasks, before))
            # Not one that was made again meanwhile, nor one that goes on after all: the step that deletes decides.
            if old and backend.delete(record.job_id, record.incarnation, unless_after=seen.mark):
                log.info("job purged", jobID=record.job_id, reason="marked" if record.deleted else "finished")
                removed.append(record.job_id)
    return removed


def _finished_before(states: tuple[State, ...], num_tasks: int, before: datetime) -> bool:
    # The job has no finish time of its own: it is the time of its newest state, once all of them are finished.
    return (
        len({state.task_id for state in states}) == num_tasks
        and all(state.status == FINISHED for state in states)
        and all(state.timestamp is not None and state.timestamp <= before for state in states)
    )
