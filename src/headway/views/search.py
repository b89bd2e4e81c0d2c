"""Search over everything: jobs, items, tasks, users, workers and errors; and failures by host."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.errors import InvalidInput
from headway.telemetry import redact
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway._sql import Database

#: Results of each kind.
LIMIT = 10
#: Longest text to search for.
LONGEST = 200


class FoundJob(NamedTuple):
    """A job whose id or function contains the text."""

    id: Annotated[str, "the job's id"]
    status: Annotated[str, "state of the job"]
    function: Annotated[str, "its function"]


class FoundItem(NamedTuple):
    """An item whose key begins with the text."""

    job: Annotated[str, "the job's id"]
    key: Annotated[str, "the item's key"]
    idx: Annotated[int, "the item's index"]


class FoundTask(NamedTuple):
    """A task whose id begins with the text, or whose user's id does."""

    id: Annotated[str, "the task's id"]
    kind: Annotated[str, "its kind"]
    status: Annotated[str, "QUEUED, RUNNING, COMPLETED, FAILED or CANCELLED"]
    user_id: Annotated[str | None, "its user"]


class FoundUser(NamedTuple):
    """A user whose id begins with the text."""

    user_id: Annotated[str, "the user's id"]
    tasks: Annotated[int, "their tasks, up to 1,000 counted in all"]


class FoundWorker(NamedTuple):
    """A worker whose name or host contains the text."""

    name: Annotated[str, "the worker's name"]
    host: Annotated[str, "its machine"]
    state: Annotated[str, "idle, busy, draining, ended or lost"]


class FoundCause(NamedTuple):
    """A cause whose type, message or frame contains the text."""

    job: Annotated[str | None, "the job's id; null for a cause of tasks"]
    no: Annotated[int, "its number"]
    type: Annotated[str, "the exception's class"]
    message: Annotated[str, "its message"]
    dead: Annotated[int, "dead letters or failed tasks of it"]


class Found(NamedTuple):
    """`/api/v1/search`: what a text finds, up to ten results of each kind."""

    text: Annotated[str, "the text"]
    jobs: Annotated[tuple[FoundJob, ...], "most recently changed first"]
    items: Annotated[tuple[FoundItem, ...], "exact keys first, then by the job that changed last"]
    tasks: Annotated[tuple[FoundTask, ...], "newest first"]
    users: Annotated[tuple[FoundUser, ...], "by id"]
    workers: Annotated[tuple[FoundWorker, ...], "online workers first"]
    causes: Annotated[tuple[FoundCause, ...], "causes of items, then of tasks; the latest first"]

    def as_json(self) -> Json:
        return document(self)


def read_search(database: Database, text: str, *, limit: int = LIMIT) -> Found:
    """Search for ``text``. Every part follows an index or examines a bounded number of rows."""
    from headway.ledger.store.queries import search as jobs
    from headway.queue.store import statistics as tasks

    text = text.strip()
    if not 0 < len(text) <= LONGEST:
        raise InvalidInput(f"A search text must have 1 to {LONGEST} characters (got {len(text):,}).")
    matching, _ = jobs.list_jobs(database, jobs.JobFilter(text=text), limit=limit)
    with database.read() as tx:
        items = jobs.items_by_key(tx, text, limit)
        causes = [(job, *rest) for job, *rest in jobs.causes_by_text(tx, text, limit)]
        found = tasks.tasks_by_prefix(tx, text, limit)
        users = tasks.users_by_prefix(tx, text, limit)
        wanted = text.lower()
        workers = [row for row in tasks.listed_workers(tx) if wanted in f"{row[0]} {row[1]}".lower()][:limit]
        causes += [(None, *rest) for rest in tasks.causes_by_text(tx, jobs.containing(text), limit)]
    return Found(
        text=redact(text),
        jobs=tuple(FoundJob(info.id, info.status, info.function) for info in matching),
        items=tuple(FoundItem(*item) for item in items),
        tasks=tuple(FoundTask(*row) for row in found),
        users=tuple(FoundUser(user, count) for user, count in users),
        workers=tuple(FoundWorker(row[0], row[1], row[3]) for row in workers),
        causes=tuple(FoundCause(job, no, type, message, int(dead)) for job, no, type, message, dead in causes),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Failures by host


class HostFailures(NamedTuple):
    """Failed attempts on one machine."""

    host: Annotated[str, "the machine; empty: unknown"]
    items: Annotated[int, "failed attempts at items"]
    tasks: Annotated[int, "failed attempts at tasks"]


class FailuresByHost(NamedTuple):
    """`/api/v1/failures-by-host`: failed attempts of a period by machine."""

    since: Annotated[datetime, "start of the period, which lasts until now"]
    hosts: Annotated[tuple[HostFailures, ...], "machines with the most failures first"]

    def as_json(self) -> Json:
        return document(self)


def read_failures_by_host(database: Database, *, seconds: float = 3600.0) -> FailuresByHost:
    """Count failed attempts of the last ``seconds`` by machine."""
    from headway.ledger.store.queries import search as jobs
    from headway.ledger.values import utc
    from headway.queue.store import statistics as tasks

    with database.read() as tx:
        since = tx.now() - seconds
        items = jobs.failures_by_worker(tx, since)
        failed = tasks.failures_by_worker(tx, since)
        hosts = {row[0]: row[1] for row in tasks.listed_workers(tx)}
    of_items = _by_host((host or hosts.get(worker, ""), count) for worker, host, count in items)
    of_tasks = _by_host((hosts.get(worker, ""), count) for worker, count in failed)
    found = [HostFailures(host, of_items.get(host, 0), of_tasks.get(host, 0)) for host in {**of_items, **of_tasks}]
    return FailuresByHost(utc(since), tuple(sorted(found, key=lambda one: (-one.items - one.tasks, one.host))))


def _by_host(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for host, count in counts:
        found[host] = found.get(host, 0) + int(count)
    return found
