"""``/api/v1``: the reads and actions of the command line, with the documents of its ``--json``.

Each route declares the right it needs. The OpenAPI document contains it (``x-headway-right``), so that the tests can
try every route with every role. An application's user (role ``user``) has the right ``own``: they see their own tasks,
and get status 404 for any other id.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from fastapi import FastAPI, Path, Query
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from headway.errors import InvalidInput, NotFound
from headway.ledger.control import MOST_WORKERS
from headway.views import failed, projects, queue, states
from headway.views.jobs import dead, items, job
from headway.views.jobs import listing as jobs
from headway.views.jobs.map import JobMap
from headway.views.system import access, alerts, health, performance, records, relay
from headway.web.api import actions, bulk, search
from headway.web.api.problems import Forbidden
from headway.web.api.routes import Api, encoded, tagged
from headway.web.site import NAME, Site

if TYPE_CHECKING:
    from headway.finishline import AsyncProgress
    from headway.views.reading import Reader

#: Maximum rows in one response.
LARGEST: Final = 1000
#: Largest integer that both database engines can store.
MOST: Final = 2**63 - 1

JobId = Annotated[str, Path(description="the job's id", max_length=128)]
TaskId = Annotated[str, Path(description="the task's id", max_length=128)]
Limit = Annotated[int, Query(ge=1, le=LARGEST, description="maximum rows")]
After = Annotated[int, Query(ge=-1, le=MOST, description="only rows after this index")]
CauseNo = Annotated[int | None, Query(ge=1, le=MOST, description="only this cause")]
ItemStatus = Literal["pending", "processing", "retrying", "done", "dead"]
TaskStatus = Literal["queued", "running", "completed", "failed", "cancelled"]
QueueName = Literal["urgent", "high", "normal", "low"]
RuleName = Annotated[str, Path(description="the rule's name", max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field("", max_length=2000, description="why; recorded in the activity log")


class Retry(_Body):
    """The dead letters to retry: of one cause, the given items, or all of the job."""

    cause: int | None = Field(None, ge=1, le=MOST)
    items: list[str | int] = Field(
        default_factory=list, max_length=LARGEST, description="keys (strings) or indices (numbers)"
    )


class RetryTasks(_Body):
    """The failed tasks to retry: of one cause, or all."""

    cause: int | None = Field(None, ge=1, le=MOST)


class Requeue(_Body):
    """The jobs of the cause to requeue: those that failed by a time, or all."""

    until: Annotated[AwareDatetime, Field(strict=False)] | None = Field(
        None, description="last_seen of the cause; jobs that failed later stay failed"
    )


class Pause(_Body):
    """The duration of the pause; without it, until the queue is resumed."""

    seconds: float | None = Field(None, ge=1, le=actions.LONGEST)


class Mute(_Body):
    """The duration, and the subject to mute; without a subject, all of the rule."""

    seconds: float = Field(3600.0, ge=1, le=actions.LONGEST)
    subject: str = Field("", max_length=256)


class Unmute(_Body):
    """The subject that was muted."""

    subject: str = Field("", max_length=256)


class Stop(_Body):
    """How to stop the run."""

    now: bool = Field(False, description="abandon the current items; no attempt is counted")


class Scale(_Body):
    """The number of items to process at once."""

    workers: int = Field(ge=1, le=MOST_WORKERS)


class Reason(_Body):
    """Only the reason."""


def mount(app: FastAPI, site: Site, progress: Callable[[], AsyncProgress | None]) -> None:
    """Register every route of the API.

    ``progress`` returns the reader of project counts in Redis, or None without a Redis.
    """
    api = Api(app.router, site)
    _projects(api, progress)  # first: routes are matched in order, and this one is requested most
    _jobs(api)
    _items(api)
    _runs(api)
    _dead(api)
    _causes(api)
    _queues(api)
    _alerts(api)
    _tasks(api)
    _others(api)
    search.mount(api)


def _jobs(api: Api) -> None:
    reader = api.site.reader

    @api.get("/jobs", jobs.Jobs)
    async def list_jobs(
        request: Request,
        archived: bool = False,
        before: Annotated[
            str | None, Query(max_length=128, description="`next` of the page before, or a job's id")
        ] = None,
        limit: Limit = LARGEST,
    ) -> Response:
        """List the jobs, newest first. A job that changes between two pages is neither skipped nor repeated."""
        return await api.answer(request, reader.jobs, archived=archived, before=before, limit=limit)

    @api.get("/jobs/{id}", job.JobSheet)
    async def show_job(request: Request, id: JobId) -> Response:
        """Return one job: counts, runs, causes, speed."""
        return await api.answer(request, reader.job, id)

    @api.get("/jobs/{id}/runs", job.Runs)
    async def list_runs(request: Request, id: JobId) -> Response:
        """List every start and resume of a job."""
        return await api.answer(request, reader.runs, id)

    @api.post("/jobs/{id}/forget", right="forget")
    async def forget_job(request: Request, id: JobId, body: Reason) -> Response:
        """Delete a job with all its records."""
        return await api.act(request, actions.forget, id, reason=body.reason)


def _items(api: Api) -> None:
    reader = api.site.reader

    @api.get("/jobs/{id}/items", items.Items)
    async def list_items(
        request: Request,
        id: JobId,
        status: ItemStatus | None = None,
        cause: CauseNo = None,
        after: After = -1,
        limit: Limit = 50,
    ) -> Response:
        """List a job's items by index."""
        return await api.answer(request, reader.items, id, status=status, cause=cause, after=after, limit=limit)

    @api.get("/jobs/{id}/items/{item:path}", items.ItemSheet)  # a key may contain slashes
    async def show_item(
        request: Request, id: JobId, item: Annotated[str, Path(max_length=1024)], payload: bool = False
    ) -> Response:
        """Return one item by key or index, with every attempt. The masked payload needs the right ``payload``."""
        if payload:
            actions.require(api.site.user(request), "payload")
        return await api.answer(request, reader.item, id, item, payload=payload)

    @api.get("/jobs/{id}/map", JobMap)
    async def show_item_map(request: Request, id: JobId) -> Response:
        """Return the state of a job's items in order, as at most 1,200 cells, with durations and workers."""
        return await api.answer(request, reader.item_map, id)

    @api.get("/jobs/{id}/log", items.JobLog)
    async def read_log(request: Request, id: JobId, after: After = -1, limit: Limit = LARGEST) -> Response:
        """List every ended attempt in item order. A page never splits the attempts of an item."""
        return await api.answer(request, reader.log_page, id, after=after, limit=limit)


def _dead(api: Api) -> None:
    reader = api.site.reader

    @api.get("/jobs/{id}/dead", dead.DeadItems)
    async def show_dead(
        request: Request, id: JobId, cause: CauseNo = None, limit: Annotated[int, Query(ge=1, le=LARGEST)] = 10
    ) -> Response:
        """List a job's causes of dead letters, each with some items."""
        return await api.answer(request, reader.dead_items, id, cause=cause, limit=limit)

    @api.get("/jobs/{id}/dead/letters", dead.DeadLetters)
    async def list_dead_letters(
        request: Request, id: JobId, cause: CauseNo = None, after: After = -1, limit: Limit = 50, payload: bool = False
    ) -> Response:
        """List dead letters. Their unmasked payloads need the right ``export``."""
        if payload:
            actions.require(api.site.user(request), "export")
        return await api.answer(
            request, reader.dead_letters, id, cause=cause, payload=payload, after=after, limit=limit
        )

    @api.get("/dead", dead.Dead)
    async def list_dead(request: Request, job: Annotated[str | None, Query(max_length=128)] = None) -> Response:
        """List the causes of dead letters, of all jobs or one."""
        return await api.answer(request, reader.dead, job)

    @api.post("/jobs/{id}/retry", right="retry")
    async def retry_dead(request: Request, id: JobId, body: Retry) -> Response:
        """Make dead letters pending again, with zero failures."""
        return await api.act(
            request, actions.retry_dead, id, cause=body.cause, items=tuple(body.items), reason=body.reason
        )

    # Not /jobs/retry: some proxies merge slashes, and a client's empty id (/jobs//retry) would retry everything.
    @api.post("/dead/retry", right="retry")
    async def retry_all_dead(request: Request, body: Reason) -> Response:
        """Make every dead letter of every job pending again."""
        return await api.act(request, bulk.retry_jobs, reason=body.reason)


def _causes(api: Api) -> None:
    reader = api.site.reader

    @api.get("/task-causes", failed.TaskCauses)
    async def list_task_causes(request: Request, limit: Limit = 50) -> Response:
        """List the causes of permanently failed tasks."""
        return await api.answer(request, reader.task_causes, limit=limit)

    @api.get("/rq-causes", failed.RqCauses)
    async def list_rq_causes(request: Request) -> Response:
        """List the causes of failed jobs in the RQ deployment that the watcher follows."""
        return await api.answer(request, reader.rq_causes)

    @api.post("/task-causes/retry", right="retry")
    async def retry_tasks(request: Request, body: RetryTasks) -> Response:
        """Requeue failed tasks of a cause, or all; at most 5,000 per request."""
        return await api.act(request, bulk.retry_tasks, cause=body.cause, reason=body.reason)

    @api.post("/rq-causes/{id}/requeue", right="retry")
    async def requeue_rq_cause(request: Request, id: Annotated[str, Path(max_length=64)], body: Requeue) -> Response:
        """Requeue the failed RQ jobs of a cause."""
        until = None if body.until is None else body.until.timestamp()
        return await api.act(request, bulk.requeue_cause, id, until=until, reason=body.reason)


def _runs(api: Api) -> None:
    @api.post("/jobs/{id}/pause", right="run")
    async def pause_run(request: Request, id: JobId, body: Reason) -> Response:
        """Ask the run of a job to finish its current items and start no more."""
        return await api.act(request, actions.pause_run, id, reason=body.reason)

    @api.post("/jobs/{id}/resume", right="run")
    async def resume_run(request: Request, id: JobId, body: Reason) -> Response:
        """Ask a paused run to continue."""
        return await api.act(request, actions.resume_run, id, reason=body.reason)

    @api.post("/jobs/{id}/continue", right="run")
    async def continue_run(request: Request, id: JobId, body: Reason) -> Response:
        """Continue the interrupted run of a fleet."""
        return await api.act(request, actions.continue_run, id, reason=body.reason)

    @api.post("/jobs/{id}/stop", right="run")
    async def stop_run(request: Request, id: JobId, body: Stop) -> Response:
        """Ask the run of a job to end, as Ctrl-C does; the same command continues it."""
        return await api.act(request, actions.stop_run, id, now=body.now, reason=body.reason)

    @api.post("/jobs/{id}/scale", right="run")
    async def scale_run(request: Request, id: JobId, body: Scale) -> Response:
        """Ask the run of a job to process another number of items at once."""
        return await api.act(request, actions.scale_run, id, body.workers, reason=body.reason)


def _queues(api: Api) -> None:
    reader = api.site.reader

    @api.get("/queues", queue.Queues)
    async def list_queues(request: Request) -> Response:
        """List the four queues in priority order."""
        return await api.answer(request, reader.queues)

    @api.get("/queue-settings", queue.QueueSettings)
    async def list_queue_settings(request: Request) -> Response:
        """List the settings of workers and supervisors, as this server's host sees them."""
        return await api.answer(request, reader.queue_settings)

    @api.post("/queues/{name}/pause", right="pause")
    async def pause_queue(request: Request, name: QueueName, body: Pause) -> Response:
        """Pause a queue; running tasks continue."""
        return await api.act(request, actions.pause, name, reason=body.reason, seconds=body.seconds)

    @api.post("/queues/{name}/resume", right="resume")
    async def resume_queue(request: Request, name: QueueName, body: Reason) -> Response:
        """Resume a paused queue."""
        return await api.act(request, actions.resume, name, reason=body.reason)

    @api.get("/workers", queue.Workers)
    async def list_workers(request: Request) -> Response:
        """List the workers, including those that ended in the last 24 hours."""
        return await api.answer(request, reader.workers)

    @api.post("/workers/{name}/drain", right="worker")
    async def drain_worker(request: Request, name: Annotated[str, Path(max_length=256)], body: Reason) -> Response:
        """Ask a worker to finish its current tasks and exit."""
        return await api.act(request, actions.end_worker, name, "drain", reason=body.reason)

    @api.post("/workers/{name}/stop", right="worker")
    async def stop_worker(request: Request, name: Annotated[str, Path(max_length=256)], body: Reason) -> Response:
        """Ask a worker to return its current tasks and exit."""
        return await api.act(request, actions.end_worker, name, "stop", reason=body.reason)

    @api.post("/workers/{name}/remove", right="worker")
    async def remove_worker(request: Request, name: Annotated[str, Path(max_length=256)], body: Reason) -> Response:
        """Remove a lost or ended worker from the list."""
        return await api.act(request, actions.remove_worker, name, reason=body.reason)


def _alerts(api: Api) -> None:
    reader = api.site.reader

    @api.get("/alerts", alerts.Alerts)
    async def list_alerts(request: Request, history: Annotated[int, Query(ge=0, le=1000)] = 50) -> Response:
        """List open and past alerts, and the current value of each rule."""
        return await api.answer(request, reader.alerts, history=history)

    @api.post("/alerts/{no}/acknowledge", right="alert")
    async def acknowledge_alert(request: Request, no: Annotated[int, Path(ge=1, le=MOST)], body: Reason) -> Response:
        """Acknowledge an alert."""
        return await api.act(request, actions.acknowledge, no, reason=body.reason)

    @api.post("/alert-rules/{rule}/mute", right="alert")
    async def mute_rule(request: Request, rule: RuleName, body: Mute) -> Response:
        """Suppress notifications of a rule's alerts for a while."""
        return await api.act(
            request, actions.mute, rule, seconds=body.seconds, subject=body.subject, reason=body.reason
        )

    @api.post("/alert-rules/{rule}/unmute", right="alert")
    async def unmute_rule(request: Request, rule: RuleName, body: Unmute) -> Response:
        """End a mute early."""
        return await api.act(request, actions.unmute, rule, subject=body.subject, reason=body.reason)


def _tasks(api: Api) -> None:
    site, reader = api.site, api.site.reader

    @api.get("/tasks", queue.Tasks, right="own")
    async def list_tasks(
        request: Request,
        status: TaskStatus | None = None,
        queue: QueueName | None = None,
        kind: Annotated[str | None, Query(max_length=128)] = None,
        user: Annotated[str | None, Query(max_length=NAME)] = None,
        before: Annotated[str | None, Query(max_length=128, description="the last task of the page before")] = None,
        limit: Limit = 50,
    ) -> Response:
        """List the newest tasks that match. The role ``user`` sees only its own tasks."""
        owner = site.user(request).owner
        if owner is not None and user not in (None, owner):
            raise Forbidden("These tasks belong to another user.")
        if before is not None:
            await site.read(reader.task, before, user_id=owner)  # raises if the user may not see it
        return await api.answer(
            request, reader.tasks, status=status and status.upper(), queue=queue, kind=kind,
            user_id=user if owner is None else owner, before=before, limit=limit,
        )  # fmt: skip

    @api.get("/tasks/{id}", queue.TaskSheet, right="own")
    async def show_task(request: Request, id: TaskId) -> Response:
        """Return one task with its failed attempts."""
        return await api.answer(request, reader.task, id, user_id=site.user(request).owner)

    @api.post("/tasks/{id}/cancel", right="cancel")
    async def cancel_task(request: Request, id: TaskId, body: Reason) -> Response:
        """Cancel a task: immediately if it is queued, else by its worker."""
        return await api.act(request, actions.cancel_task, id, reason=body.reason)

    @api.post("/tasks/{id}/retry", right="retry")
    async def retry_task(request: Request, id: TaskId, body: Reason) -> Response:
        """Requeue a failed or cancelled task."""
        return await api.act(request, actions.retry_task, id, reason=body.reason)


def _projects(api: Api, progress: Callable[[], AsyncProgress | None]) -> None:
    reader = api.site.reader

    @api.get("/projects", projects.Projects)
    async def list_projects(
        request: Request, after: Annotated[str, Query(max_length=128)] = "", limit: Limit = 50
    ) -> Response:
        """List the projects recorded in the database by id, as of their last checkpoint."""
        return await api.answer(request, reader.projects, after=after, limit=limit)

    @api.get("/projects/{id}", projects.ProjectProgress)
    async def show_project(request: Request, id: Annotated[str, Path(max_length=128)]) -> Response:
        """Return the progress of a project. Concurrent requests share one round trip to Redis."""
        counts = progress()
        if counts is None:
            found = await api.site.read(reader.recorded_project, id)
        else:
            found = projects.project_view(id, await counts.progress(id))
        if found.status == "NOT_FOUND":
            raise NotFound(f"There is no project {id[:60]!r}.", hint="List them: GET /api/v1/projects")
        return tagged(request, *encoded(lambda: found))

    @api.get("/states", states.StatesJobs)
    async def list_states(request: Request) -> Response:
        """List the jobs that have states."""
        return await api.answer(request, reader.states_jobs)

    @api.get("/states/{job}", states.States)
    async def show_states(
        request: Request,
        job: JobId,
        task: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
        tag: Annotated[str | None, Query(max_length=256)] = None,
        after: Annotated[str | None, Query(max_length=300, description="`next_after` of the page before")] = None,
        limit: Limit = LARGEST,
    ) -> Response:
        """List the states of a job by task and tag. A page ends at ``limit`` states or about 1 MB.

        Payloads need the right ``payload``; unmasked payloads and messages need ``export``.
        """
        user = api.site.user(request)
        rights = {"payload": user.may("payload"), "unmasked": user.may("export")}
        page = {"task": task, "tag": tag, "after": after, "limit": limit}
        return await api.answer(request, _states_of, reader, job, page, **rights)


def _states_of(reader: Reader, job: str, page: dict[str, Any], *, payload: bool, unmasked: bool) -> states.States:
    found = reader.states(job, **page)
    return found if unmasked else states.masked_states(found, payload=payload)


def _others(api: Api) -> None:
    reader = api.site.reader

    @api.get("/performance", performance.Performances)
    async def show_performance(request: Request, range: Literal["1h", "24h", "7d"] = "24h") -> Response:
        """Return counts, success rates, wait times and run times by function and kind of task."""
        return await api.answer(request, reader.performance, range=range)

    @api.get("/relay", relay.RelayStatus)
    async def show_relay(request: Request) -> Response:
        """Return the event backlog of each sink."""
        return await api.answer(request, reader.relay)

    @api.get("/health", health.Health)
    async def show_health(request: Request) -> Response:
        """Return the checks of ``headway doctor``, run on the server."""
        return await api.answer(request, reader.health)

    @api.get("/activity", access.Activity)
    async def list_activity(
        request: Request,
        job: Annotated[str | None, Query(max_length=128)] = None,
        actor: Annotated[str | None, Query(max_length=256)] = None,
        before: Annotated[int | None, Query(ge=1, le=MOST)] = None,
        limit: Limit = 50,
    ) -> Response:
        """List who did what, newest first; secrets are masked."""
        if job == "":
            raise InvalidInput("job must not be empty.", hint="Omit it to list the activity of all jobs.")
        return await api.answer(request, reader.activity, job=job, actor=actor, before=before, limit=limit)

    @api.get("/settings", records.Settings)
    async def show_settings(request: Request) -> Response:
        """Return the settings of the server; secrets are masked."""
        return await api.answer(request, reader.settings)
