"""Actions that change something. The API's POST routes and the page forms call the same functions.

An action and its audit entry share one transaction, so every change names its actor. An action returns one sentence
that says what it did.

A form posts to ``/actions/NAME`` and is redirected to its page (`Referer`, or the field ``next``), which shows that sentence:

    retry   job [cause] [item ...] [reason]      make dead letters pending; with selected, at least one item is required
    retry   task [reason]                        requeue a failed or cancelled task
    retry   tasks [reason]                       requeue the failed tasks of a cause (its number), or all of them (all)
    retry   jobs=all [reason]                    make the dead letters of every job pending
    requeue cause until [reason]                 requeue failed jobs of a plain RQ deployment
    forget  job [reason]                         delete a job and its records
    pause   job [reason]                         let the run finish its current items and start no more
    resume  job [reason]                         resume the run
    continue  job [reason]                       continue the interrupted run of a fleet
    stop    job [now] [reason]                   end the run after its current items; now: abandon them
    scale   job workers [reason]                 set how many items the run processes at once
    pause   queue [reason] [minutes]             stop workers from claiming tasks of the queue
    resume  queue
    cancel  task [reason]
    drain   worker [reason]                      let the worker finish its tasks and exit
    stop    worker [reason]                      let the worker return its tasks and exit
    remove  worker [reason]                      remove a lost or ended worker from the list
    acknowledge  alert [reason]                  take charge of an alert
    acknowledge  alerts [reason]                 take charge of several alerts (their numbers, separated by spaces)
    mute    rule [subject] [minutes] [reason]    suppress notifications of a rule for a while
    unmute  rule [subject] [reason]
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal
from urllib.parse import urlsplit

from starlette.responses import RedirectResponse, Response

from headway import alerts
from headway.core.ids import check_id
from headway.core.text import duration, plural
from headway.errors import HeadwayError, InvalidInput, NotFound
from headway.ledger.store.audit import audit
from headway.queue.settings import declared_per_user
from headway.queue.store import administration, insert, workers
from headway.queue.store import tasks as records
from headway.queue.task import Priority
from headway.telemetry import redact
from headway.views.jobs.dead import find_cause, retried
from headway.views.jobs.listing import find_job
from headway.views.shape import ABSENT
from headway.views.system.access import Acted
from headway.web.api.problems import Forbidden
from headway.web.auth import login
from headway.web.site import User

if TYPE_CHECKING:
    from starlette.requests import Request

    from headway._sql import Tx
    from headway.queue.task import Task
    from headway.views.reading import Reader
    from headway.views.shape import Absent
    from headway.web.auth.identity import Access
    from headway.web.site import Site

#: Maximum length of a stored reason, in characters.
REASON: Final = 500
#: Longest pause, in seconds (366 days).
LONGEST: Final = 366 * 86_400


def require(user: User, right: str) -> None:
    """Raise `Forbidden` unless the user has the right."""
    if not user.may(right):
        raise Forbidden(
            f"The role {user.role} does not have the right {right}.", hint="Use a token of a role that has it."
        )


# ---------------------------------------------------------------------------------------------------------------------
# Jobs


def retry_dead(
    reader: Reader, user: User, job: str, *, cause: int | None = None, items: Sequence[str | int] = (), reason: str = ""
) -> Acted:
    """Make dead letters of a job pending: of one cause, the given items, or all."""
    require(user, "retry")
    if cause is not None and items:
        raise InvalidInput("A cause and items cannot be combined.", hint="Name the cause, or the items.")
    found = find_job(reader.ledger, job)
    if cause is not None:
        find_cause(found, cause)
    indices = [_dead_index(found, name) for name in items] if items else None
    moved = found.retry_dead(cause=cause, indices=indices, actor=user.name, reason=masked(reason))
    text, command = retried(found) if moved else ("", ABSENT)
    return Acted("retry", f"{plural(moved, 'dead letter')} of job {job} pending again. {text}".rstrip(), moved, command)


def _dead_index(job: Any, name: str | int) -> int:
    info = job.item(name)
    if info.status != "dead":
        raise InvalidInput(
            f"Item {name} of job {job.id} is not dead, it is {info.status}.", hint="Nothing was changed."
        )
    return int(info.idx)


def forget(reader: Reader, user: User, job: str, *, reason: str = "") -> Acted:
    """Delete a job and its records."""
    require(user, "forget")
    find_job(reader.ledger, job)
    total = reader.ledger.forget(job, actor=user.name, reason=masked(reason))
    return Acted("forget", f"Deleted job {job} with {plural(total, 'item')}.", total)


# A run polls its control row several times a second and may end before it obeys. The answers therefore state the request,
# not its outcome.


def pause_run(reader: Reader, user: User, job: str, *, reason: str = "") -> Acted:
    """Ask the run of a job to finish its current items and start no more."""
    require(user, "run")
    find_job(reader.ledger, job).pause(actor=user.name, reason=masked(reason))
    return Acted("pause", f"Asked the run of {job} to finish its current items and start no more.", 1)


def resume_run(reader: Reader, user: User, job: str, *, reason: str = "") -> Acted:
    """Ask a paused run to continue."""
    require(user, "run")
    find_job(reader.ledger, job).resume(actor=user.name, reason=masked(reason))
    return Acted("resume", f"Asked the run of {job} to resume.", 1)


def continue_run(reader: Reader, user: User, job: str, *, reason: str = "") -> Acted:
    """Continue the interrupted run of a fleet. Its workers start within seconds."""
    from headway.run.fleet.start import rejoin

    require(user, "run")
    found = find_job(reader.ledger, job)
    found.continue_run(actor=user.name, reason=masked(reason))
    with suppress(HeadwayError):  # the sweeper of any worker submits the slots otherwise
        rejoin(reader.ledger, found, reader.config)
    text, command = needs_worker(reader)
    return Acted("continue", f"The fleet continues {job}.{text}", 1, command)


def stop_run(reader: Reader, user: User, job: str, *, now: bool = False, reason: str = "") -> Acted:
    """Ask the run of a job to end; with ``now`` it abandons its current items."""
    require(user, "run")
    find_job(reader.ledger, job).stop(now=now, actor=user.name, reason=masked(reason))
    how = "abandon its current items and exit" if now else "finish its current items and exit"
    return Acted("stop", f"Asked the run of {job} to {how}.", 1)


def scale_run(reader: Reader, user: User, job: str, workers: int, *, reason: str = "") -> Acted:
    """Ask the run of a job to process ``workers`` items at once."""
    require(user, "run")
    find_job(reader.ledger, job).scale(workers, actor=user.name, reason=masked(reason))
    return Acted("scale", f"Asked the run of {job} to process {plural(workers, 'item')} at once.", 1)


# ---------------------------------------------------------------------------------------------------------------------
# The queue


def pause(reader: Reader, user: User, queue: str, *, reason: str = "", seconds: float | None = None) -> Acted:
    """Pause a queue, for ``seconds`` or until it is resumed."""
    require(user, "pause")
    chosen, said = _queue(queue), masked(reason)
    if seconds is not None and not 1 <= seconds <= LONGEST:
        raise InvalidInput(
            f"seconds must be 1 to {LONGEST:,} (got {seconds:g}).", hint="Omit it to pause until somebody resumes."
        )

    def work(tx: Tx) -> datetime | None:
        until = None if seconds is None else datetime.fromtimestamp(tx.now(), UTC) + timedelta(seconds=seconds)
        administration.pause(tx, chosen, reason=said, by=user.name, until=until)
        return until

    until = reader.database.run(work, operation="web.pause")
    when = "" if until is None else f" until {until:%Y-%m-%d %H:%M} UTC"
    return Acted("queue.pause", f"The queue {queue} is paused{when}.", 1)


def resume(reader: Reader, user: User, queue: str, *, reason: str = "") -> Acted:
    """Resume a paused queue."""
    require(user, "resume")
    chosen, said = _queue(queue), masked(reason)
    was = reader.database.run(
        lambda tx: administration.resume(tx, chosen, by=user.name, reason=said), operation="web.resume"
    )
    text = f"The queue {queue} is resumed." if was else f"The queue {queue} was not paused."
    return Acted("queue.resume", text, int(was))


def cancel_task(reader: Reader, user: User, task: str, *, reason: str = "") -> Acted:
    """Cancel a task. To an application's user the tasks of other users do not exist."""
    require(user, "cancel")
    check_id(task, "a task id")

    def work(tx: Tx) -> tuple[Task, bool]:
        before = records.get(tx, task, user_id=user.owner)
        if before.is_final:
            return before, False
        after = records.cancel(tx, task, by=user.name, user_id=user.owner)
        facts: dict[str, object] = {
            "task": task,
            "kind": before.kind,
            "was": before.status.value,
            "reason": masked(reason),
        }
        audit(tx, tx.now(), user.name, "task.cancel", "", facts)
        return after, True

    found, changed = reader.database.run(work, operation="web.cancel")
    if not changed:
        return Acted("task.cancel", f"Task {task} is {found.status.value}; nothing was changed.", 0)
    text = (
        f"Task {task} is {found.status.value}." if found.is_final else f"Asked the worker of task {task} to cancel it."
    )
    return Acted("task.cancel", text, 1)


def retry_task(reader: Reader, user: User, task: str, *, reason: str = "") -> Acted:
    """Requeue a failed or cancelled task."""
    require(user, "retry")
    check_id(task, "a task id")

    per_user = declared_per_user(reader.database)

    def work(tx: Tx) -> Task:
        found = insert.retry(tx, task, per_user=per_user)
        audit(tx, tx.now(), user.name, "task.retry", "", {"task": task, "kind": found.kind, "reason": masked(reason)})
        return found

    found = reader.database.run(work, operation="web.retry")
    text, command = needs_worker(reader)
    return Acted("task.retry", f"Task {task} requeued in {found.priority.value}.{text}", 1, command)


def needs_worker(reader: Reader) -> tuple[str, str | Absent]:
    """Return a sentence and a command for waiting tasks if no worker is online."""
    if any(worker.state in ("idle", "busy") for worker in reader.workers().workers):
        return "", ABSENT
    return " No worker is online. Start one:  headway worker", "headway worker"


def end_worker(reader: Reader, user: User, worker: str, how: Literal["drain", "stop"], *, reason: str = "") -> Acted:
    """Ask a worker to exit: after its current tasks (drain), or after returning them (stop).

    The worker learns of it with its next heartbeat.
    """
    require(user, "worker")
    said = masked(reason)
    asked = reader.database.run(
        lambda tx: workers.end_worker(tx, worker, how, by=user.name, reason=said), operation="web.worker"
    )
    done = "finish its current tasks and exit" if asked == "drain" else "return its current tasks and exit"
    return Acted(f"worker.{asked}", f"Asked worker {worker} to {done}.", 1)


def remove_worker(reader: Reader, user: User, worker: str, *, reason: str = "") -> Acted:
    """Remove a lost or ended worker from the list."""
    require(user, "worker")
    said = masked(reason)
    reader.database.run(lambda tx: workers.remove_worker(tx, worker, by=user.name, reason=said), operation="web.worker")
    return Acted("worker.remove", f"Removed worker {worker} from the list.", 1)


# ---------------------------------------------------------------------------------------------------------------------
# Alerts


def acknowledge(reader: Reader, user: User, no: int, *, reason: str = "") -> Acted:
    """Record that the user takes charge of an alert."""
    require(user, "alert")
    alert = alerts.acknowledge(reader.database, no, by=user.name, reason=masked(reason))
    return Acted("alert.acknowledge", f"Alert {no} ({alert.rule}) is acknowledged by {alert.acknowledged_by}.", 1)


def mute(reader: Reader, user: User, rule: str, *, seconds: float, subject: str = "", reason: str = "") -> Acted:
    """Suppress notifications of a rule, or of one subject, for ``seconds``."""
    require(user, "alert")
    alerts.mute(reader.database, rule, seconds=seconds, by=user.name, subject=subject, reason=masked(reason))
    about = f"{rule} of {subject}" if subject else rule
    return Acted("alert.mute", f"No notifications of {about} for {duration(seconds)}.", 1)


def unmute(reader: Reader, user: User, rule: str, *, subject: str = "", reason: str = "") -> Acted:
    """End a mute early."""
    require(user, "alert")
    stood = alerts.unmute(reader.database, rule, by=user.name, subject=subject, reason=masked(reason))
    return Acted("alert.unmute", f"{rule} is no longer muted." if stood else f"{rule} was not muted.", int(stood))


def _queue(name: str) -> Priority:
    try:
        return Priority(name)
    except ValueError:
        raise NotFound(
            f"There is no queue {name[:40]!r}.", hint=f"Queues are {', '.join(one.value for one in Priority)}."
        ) from None


def masked(reason: str) -> str:
    """Reduce a reason to one line of at most `REASON` characters and mask secrets."""
    return redact(" ".join(reason.split())[:REASON])


# ---------------------------------------------------------------------------------------------------------------------
# Forms

Fields = Mapping[str, str]


def _retry(reader: Reader, user: User, fields: Fields, items: Sequence[str]) -> Acted:
    if fields.get("task"):
        return retry_task(reader, user, fields["task"], reason=fields.get("reason", ""))
    require(user, "retry")
    if fields.get("tasks") or fields.get("jobs") == "all":
        from headway.web.api import bulk

        reason = fields.get("reason", "")
        if not fields.get("tasks"):
            return bulk.retry_jobs(reader, user, reason=reason)
        number = None if fields["tasks"] == "all" else _whole(fields["tasks"], "cause")
        return bulk.retry_tasks(reader, user, cause=number, reason=reason)
    if fields.get("selected") and not items:
        raise InvalidInput("No item is selected.", hint="Nothing was changed.")
    cause = _whole(fields.get("cause", ""), "cause")
    # As integers, because a key may also consist of digits.
    indices = [_whole(index, "index", digits=18) or 0 for index in items]
    return retry_dead(reader, user, _named(fields, "job"), cause=cause, items=indices, reason=fields.get("reason", ""))


def _requeue(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    from headway.web.api import bulk

    require(user, "retry")
    until = _whole(_named(fields, "until"), "time", digits=13) or 0  # milliseconds
    return bulk.requeue_cause(
        reader, user, _named(fields, "cause"), until=until / 1000, reason=fields.get("reason", "")
    )


def _pause(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    if fields.get("job"):
        return pause_run(reader, user, fields["job"], reason=fields.get("reason", ""))
    minutes = _whole(fields.get("minutes", ""), "minutes")
    seconds = None if minutes is None else minutes * 60.0
    return pause(reader, user, _named(fields, "queue"), reason=fields.get("reason", ""), seconds=seconds)


def _acknowledge(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    require(user, "alert")
    if fields.get("alerts"):
        from headway.web.api import bulk

        numbers = [_whole(text, "alerts") or 0 for text in fields["alerts"].split()[: bulk.MOST]]
        return bulk.acknowledge_all(reader, user, numbers, reason=fields.get("reason", ""))
    number = _whole(_named(fields, "alert"), "alert") or 0
    return acknowledge(reader, user, number, reason=fields.get("reason", ""))


def _unmute(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    require(user, "alert")
    reason = fields.get("reason", "")
    return unmute(reader, user, _named(fields, "rule"), subject=fields.get("subject", ""), reason=reason)


def _mute(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    require(user, "alert")
    minutes = _whole(fields.get("minutes", ""), "minutes") or 60
    return mute(
        reader, user, _named(fields, "rule"), seconds=minutes * 60.0, subject=fields.get("subject", ""),
        reason=fields.get("reason", ""),
    )  # fmt: skip


def _resume(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    if fields.get("job"):
        return resume_run(reader, user, fields["job"], reason=fields.get("reason", ""))
    return resume(reader, user, _named(fields, "queue"), reason=fields.get("reason", ""))


def _stop(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    if fields.get("job"):
        return stop_run(reader, user, fields["job"], now=bool(fields.get("now")), reason=fields.get("reason", ""))
    return end_worker(reader, user, _named(fields, "worker"), "stop", reason=fields.get("reason", ""))


def _scale(reader: Reader, user: User, fields: Fields, _: Sequence[str]) -> Acted:
    require(user, "run")
    workers = _whole(_named(fields, "workers"), "number of workers")
    return scale_run(reader, user, _named(fields, "job"), workers or 0, reason=fields.get("reason", ""))


FORMS: Final[dict[str, Callable[[Any, User, Fields, Sequence[str]], Acted]]] = {
    "retry": _retry,
    "requeue": _requeue,
    "forget": lambda reader, user, fields, _: forget(
        reader, user, _named(fields, "job"), reason=fields.get("reason", "")
    ),
    "pause": _pause,
    "resume": _resume,
    "continue": lambda reader, user, fields, _: continue_run(
        reader, user, _named(fields, "job"), reason=fields.get("reason", "")
    ),
    "scale": _scale,
    "cancel": lambda reader, user, fields, _: cancel_task(
        reader, user, _named(fields, "task"), reason=fields.get("reason", "")
    ),
    "drain": lambda reader, user, fields, _: end_worker(
        reader, user, _named(fields, "worker"), "drain", reason=fields.get("reason", "")
    ),
    "remove": lambda reader, user, fields, _: remove_worker(
        reader, user, _named(fields, "worker"), reason=fields.get("reason", "")
    ),
    "acknowledge": _acknowledge,
    "mute": _mute,
    "unmute": _unmute,
    "stop": _stop,
}


def handler(site: Site, access: Access) -> Callable[[Request], Awaitable[Response]]:
    """Return the endpoint of ``POST /actions/NAME``."""

    async def post(request: Request) -> Response:
        name, user = request.path_params["name"], site.user(request)
        act = FORMS.get(name)
        if act is None:
            raise NotFound(f"There is no action {name[:40]!r}.", hint=f"Actions are {', '.join(FORMS)}.")
        fields = await login.form(request)
        access.check_form(request, fields.get("csrf", ""))
        items = [value for field, value in await login.form_pairs(request) if field == "item"]
        try:
            acted = await site.change(act, site.reader, user, fields, items)
            kind, text = "done", acted.text
        except HeadwayError as error:
            if isinstance(error, Forbidden):
                raise
            kind, text = "failed", redact(f"{error} {error.hint}".strip())
        root = site.url(request, "")
        response = RedirectResponse(login.local_path(fields.get("next", "") or _origin(request) or f"{root}/"), 303)
        access.set_cookie(response, request.scope, "flash", access.flash(kind, text), 60)
        return response

    return post


def _origin(request: Request) -> str:
    """Return the path of the page that contains the form; empty if the browser does not tell it."""
    page = urlsplit(request.headers.get("referer", ""))
    return f"{page.path}?{page.query}" if page.query else page.path


def _named(fields: Fields, name: str) -> str:
    value = fields.get(name, "")
    if not value:
        raise InvalidInput(f"The form field {name} is missing.")
    return value


def _whole(text: str, name: str, *, digits: int = 9) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > digits:
        raise InvalidInput(f"{name} must be a whole number (got {text[:40]!r}).")
    return int(text)
