"""Actions on many records: failed tasks of a cause, all dead letters, a cause of a plain RQ deployment.

Each action is bounded and reports what it did and what is left. Every transaction writes its own audit entry.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from headway.core.text import plural
from headway.errors import InvalidInput, NotFound
from headway.ledger.store.audit import audit
from headway.queue.settings import declared_per_user
from headway.queue.store import insert as admission
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
                    admission.retry(tx, id, per_user=per_user)
                    retried += 1
                except UserBusy:
                    full += 1  # raised before anything was written for it
                except (InvalidInput, NotFound):
                    continue  # another process changed it first
            if retried:
                facts: dict[str, object] = {"cause": cause, "count": retried, "reason": masked(reason)}
                audit(tx, tx.now(), user.name, "task.retry", "", facts)
            return retried, full

        retried, full = reader.database.run(work, operation="web.retry")
        after, moved, busy = found[-1][0], moved + retried, busy + full
    if not moved and not busy and cause is not None:
        raise NotFound("No failed task has this cause any more.", hint="Nothing was changed.")
    text = f"{plural(moved, 'task')} {'waits' if moved == 1 else 'wait'} again."
    if busy:
        text += f" {plural(busy, 'task')} of users who have an active task already stay failed."
    if moved + busy >= MOST and read_failed_ids(reader.database, cause=cause, after=after, limit=1):
        text += " There are more: do it once again."
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


def requeue_cause(reader: Reader, user: User, cause: str, *, until: float | None = None, reason: str = "") -> Acted:
    """Requeue failed RQ jobs of one cause that failed by ``until`` (Unix time).

    So never more jobs are requeued than the user had seen. RQ is a separate store and cannot share a transaction. The
    audit trail therefore gets an entry with the request before, and one with the result after.
    """
    from headway.watcher import failures

    require(user, "retry")
    deployment = failures.followed(reader.config, reader.database)
    if deployment is None:
        raise NotFound("No RQ deployment is followed.", hint="Name its queues: the setting watch_queues.")
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
    text = f"{plural(len(moved), 'job')} of {found.queue} {'is' if len(moved) == 1 else 'are'} in RQ's queue again."
    if left:
        text += f" {plural(left, 'job')} could not be: somebody was faster, or the record is damaged."
    return Acted("rq.requeue", text, len(moved))


def _note(reader: Reader, actor: str, action: str, facts: dict[str, object]) -> None:
    reader.database.run(lambda tx: audit(tx, tx.now(), actor, action, "", facts), operation="web.note")
