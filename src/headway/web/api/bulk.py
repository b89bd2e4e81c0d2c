"""Actions on many records: failed tasks of a cause, all dead letters, a cause in RQ, several alerts.

Each action is bounded and reports what it did and what is left. Every transaction writes its own audit entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from headway import alerts
from headway.core.text import plural
from headway.errors import InvalidInput, NotFound
from headway.ledger.store.audit import audit
from headway.queue.settings import declared_per_user
from headway.queue.store import insert
from headway.queue.task import UserBusy
from headway.telemetry import redact
from headway.views.jobs.dead import retried
from headway.views.overview import read_failed_ids
from headway.views.shape import ABSENT, Absent
from headway.views.system.access import Acted
from headway.web.api.actions import masked, needs_worker, require

if TYPE_CHECKING:
    from headway._sql import Tx
    from headway.ledger import Job
    from headway.views.reading import Reader
    from headway.web.site import User

#: Maximum tasks that one action requeues, and per transaction.
MOST: Final = 5000
_TOGETHER: Final = 200
#: Maximum job names in an answer.
NAMED: Final = 5


def retry_tasks(reader: Reader, user: User, *, cause: int | None = None, reason: str = "") -> Acted:
    """Requeue the failed tasks of one cause, or all of them, oldest first.

    A task whose user has no free quota stays failed.
    """
    require(user, "retry")
    per_user = declared_per_user(reader.database)
    after, moved, busy = 0, 0, 0
    while moved + busy < MOST:
        found = read_failed_ids(reader.database, cause=cause, after=after, limit=min(_TOGETHER, MOST - moved - busy))
        if not found:
            break

        def work(tx: Tx, ids: tuple[str, ...] = tuple(id for _, id in found)) -> tuple[int, int]:
            retried = full = 0
            for id in ids:
                try:
                    insert.retry(tx, id, per_user=per_user)
                    retried += 1
                except UserBusy:
                    full += 1  # raised before anything was written for it
                except (InvalidInput, NotFound):
                    continue  # changed by another process since
            if retried:
                facts: dict[str, object] = {"cause": cause, "count": retried, "reason": masked(reason)}
                audit(tx, tx.now(), user.name, "task.retry", "", facts)
            return retried, full

        retried, full = reader.database.run(work, operation="web.retry")
        after, moved, busy = found[-1][0], moved + retried, busy + full
    if not moved and not busy and cause is not None:
        raise NotFound("No failed task has this cause any more.", hint="Nothing was changed.")
    text = f"{plural(moved, 'task')} requeued."
    if busy:
        text += f" Still failed: {plural(busy, 'task')} of users who already have an active task."
    if moved + busy >= MOST and read_failed_ids(reader.database, cause=cause, after=after, limit=1):
        text += " More remain: retry again."
    start, command = needs_worker(reader) if moved else ("", ABSENT)
    return Acted("task.retry", text + start, moved, command)


def retry_jobs(reader: Reader, user: User, *, reason: str = "") -> Acted:
    """Make every dead letter of every job pending.

    Each job is one transaction with its own audit entry.
    """
    require(user, "retry")
    touched, jobs = 0, 0
    idle: list[Job] = []
    for info in [one for one in reader.ledger.jobs() if one.dead]:
        job = reader.ledger.job(info.id)
        moved = job.retry_dead(actor=user.name, reason=masked(reason))
        touched, jobs = touched + moved, jobs + bool(moved)
        if moved and not job.info().held:
            idle.append(job)
    text = f"{plural(touched, 'dead letter')} of {plural(jobs, 'job')} pending again."
    command: str | Absent = ABSENT
    if len(idle) == 1:
        what, command = retried(idle[0])
        text += f" {what}"
    elif idle:
        names = ", ".join(job.id for job in idle[:NAMED]) + (
            f" and {len(idle) - NAMED:,} more" if len(idle) > NAMED else ""
        )
        text += f" {len(idle):,} jobs need a run: {names}. The page of each shows its command, as does headway show."
    return Acted("retry", text, touched, command)


def acknowledge_all(reader: Reader, user: User, numbers: Sequence[int], *, reason: str = "") -> Acted:
    """Acknowledge several alerts, one transaction each. Alerts that closed since the page was shown are skipped."""
    require(user, "alert")
    done = 0
    for no in numbers:
        with suppress(InvalidInput, NotFound):
            done += (
                alerts.acknowledge(reader.database, no, by=user.name, reason=masked(reason)).acknowledged_by
                == user.name
            )
    text = f"{plural(done, 'alert')} acknowledged."
    if left := len(numbers) - done:
        text += f" {plural(left, 'alert')} skipped: already closed, or acknowledged by another user."
    return Acted("alert.acknowledge", text, done)


def requeue_cause(reader: Reader, user: User, cause: str, *, until: float | None = None, reason: str = "") -> Acted:
    """Requeue failed RQ jobs of one cause that failed by ``until`` (Unix time).

    ``until`` is the time of the page, so no jobs are requeued that the user had not seen. RQ is a separate store and
    cannot share a transaction. The activity log therefore gets an entry for the request and one for the result.
    """
    from headway.watcher import failures

    require(user, "retry")
    deployment = failures.followed(reader.config, reader.database)
    if deployment is None:
        raise NotFound("No RQ deployment is configured.", hint="Name its queues in the setting watch_queues.")
    found = failures.cause_of(failures.read_failures(deployment), cause)
    chosen = [job for job in found.jobs if until is None or job.at <= until]
    facts: dict[str, object] = {
        "queue": found.queue,
        "cause": redact(f"{found.type}: {found.message}"),
        "reason": masked(reason),
    }
    _note(reader, user.name, "rq.requeue", {**facts, "jobs": len(chosen)})
    moved = failures.requeue(deployment, found, chosen)
    _note(reader, user.name, "rq.requeued", {**facts, "jobs": len(moved)})
    left = len(chosen) - len(moved)
    text = f"{plural(len(moved), 'job')} of {found.queue} requeued in RQ."
    if left:
        text += f" {plural(left, 'job')} not requeued: changed by another process, or the record is damaged."
    return Acted("rq.requeue", text, len(moved))


def _note(reader: Reader, actor: str, action: str, facts: dict[str, object]) -> None:
    reader.database.run(lambda tx: audit(tx, tx.now(), actor, action, "", facts), operation="web.note")
