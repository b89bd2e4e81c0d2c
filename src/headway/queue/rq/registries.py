"""What RQ's own tools see of tasks and workers. It is for people only: the rows are authoritative."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headway import _redis
from headway.core.retry import CircuitBreaker
from headway.errors import MissingExtra
from headway.queue.task import Claim, Priority, Status, Task

try:
    from rq import Queue as RqQueue
    from rq import SimpleWorker
    from rq.executions import Execution
    from rq.job import Job as RqJob
    from rq.job import JobStatus
    from rq.registry import FailedJobRegistry
    from rq.results import Result
    from rq.serializers import JSONSerializer
except ImportError as error:
    raise MissingExtra("redis", "A queue with a Redis") from error

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

#: The description of every job: nothing of the payload.
DESCRIPTION = "headway task"
#: The function that a hint names.
FUNCTION = "headway.queue.rq.not_by_this_worker"
#: Seconds for which RQ keeps a failed job.
FAILED_SECONDS = 7 * 86_400


def make_job(client: Redis, task_id: str, queue_name: str) -> RqJob:
    """Return the RQ job of a task. ``queue_name``: the name of its queue in RQ."""
    return RqJob.create(
        FUNCTION, args=(task_id,), id=task_id, connection=client, origin=queue_name, description=DESCRIPTION,
        serializer=JSONSerializer, result_ttl=0, failure_ttl=FAILED_SECONDS, timeout=-1,
    )  # fmt: skip


def write_job(job: RqJob, pipeline: Pipeline) -> None:
    """Store the job without its metadata and result."""
    pipeline.hset(RqJob.key_for(job.id), mapping=job.to_dict(include_meta=False, include_result=False))


def show_failed(task: Task, job: RqJob, pipeline: Pipeline, *, worker: str) -> None:
    """Put a FAILED task into RQ's registry of failed jobs.

    It shows only the error's type: a message may quote the payload, which Redis does not get.
    """
    shown = f"{(task.error or '').partition(':')[0][:80]} (see: headway task show {task.id})"
    job.set_status(JobStatus.FAILED, pipeline=pipeline)
    registry = FailedJobRegistry(str(job.origin), connection=job.connection, serializer=JSONSerializer)
    registry.add(job, ttl=FAILED_SECONDS, exc_string=shown, pipeline=pipeline)
    Result.create_failure(job, FAILED_SECONDS, shown, worker_name=worker, pipeline=pipeline)


def list_key(queue_name: str) -> str:
    """Return the key of the list that RQ pops a queue's ids from."""
    return RqQueue.redis_queue_namespace_prefix + queue_name


def accepts(task_id: str) -> bool:
    """Return whether RQ can have a job of this id. It fails on a dot; such a task is served from its row alone."""
    return "." not in task_id


class WorkerDisplay:
    """Shows a worker and the tasks it runs in RQ's tools. Any thread may call it.

    A claimed task is shown when it runs for a while (`show`): for a short one the display would cost more than the task.
    Entries that remain because Redis is unreachable are removed by RQ's own cleanup.
    """

    def __init__(
        self, client: Redis, breaker: CircuitBreaker, name: str, queue_names: Mapping[Priority, str],
        on_failure: Callable[[BaseException], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """``queue_names``: the names of the worker's queues in RQ. ``on_failure`` gets errors of Redis."""
        self._client, self._breaker, self._name, self._queue_names = client, breaker, name, queue_names
        self._on_failure, self._clock = on_failure, clock
        self._lock = threading.Lock()
        self._worker: SimpleWorker | None = None
        self._seen_at = 0.0
        self._claimed: dict[str, Claim] = {}  # and not shown yet
        self._executions: dict[str, tuple[RqJob, Execution]] = {}

    def claimed(self, claims: Sequence[Claim]) -> None:
        """Note the claimed tasks. A worker that is never idle is shown as alive here."""
        with self._lock:
            self._claimed = {claim.id: claim for claim in claims}
            if claims and self._breaker.allow():
                try:
                    self.show_alive()
                except _redis.failures() as error:
                    self._on_failure(error)

    def show(self) -> None:
        """Show the claimed tasks as running."""
        with self._lock:
            claims, self._claimed = [claim for claim in self._claimed.values() if accepts(claim.id)], {}
            if not claims or not self._breaker.allow():
                return
            try:
                self.show_alive()
                pipeline = self._client.pipeline(transaction=True)
                for claim in claims:
                    job = self._started(claim.id, claim.priority, pipeline)
                    self._executions[claim.id] = (job, Execution.create(job, ttl=90, pipeline=pipeline))
                if self._worker is not None:
                    pipeline.hset(self._worker.key, mapping={"state": "busy", "current_job": claims[0].id})
                pipeline.execute()
            except _redis.failures() as error:
                self._on_failure(error)

    def ended(self, tasks: Iterable[Task]) -> None:
        """Show how tasks ended."""
        with self._lock:
            shown = [task for task in tasks if accepts(task.id)]
            for task in shown:
                self._claimed.pop(task.id, None)
            if shown and self._breaker.allow():
                try:
                    self._show_ended(shown)
                except _redis.failures() as error:
                    self._on_failure(error)

    def _show_ended(self, tasks: Sequence[Task]) -> None:
        over = [RqJob.key_for(task.id) for task in tasks if task.status not in (Status.QUEUED, Status.FAILED)]
        shown = {task.id: self._executions.pop(task.id) for task in tasks if task.id in self._executions}
        failed = [task for task in tasks if task.status is Status.FAILED]
        if not shown and not failed:
            if over:
                self._client.delete(*over)
            return
        pipeline = self._client.pipeline(transaction=True)
        for job, execution in shown.values():
            execution.delete(job=job, pipeline=pipeline)
        for task in failed:
            job = shown[task.id][0] if task.id in shown else self._started(task.id, task.priority, pipeline)
            show_failed(task, job, pipeline, worker=self._name)
        if over:
            pipeline.delete(*over)
        if shown and self._worker is not None:
            pipeline.hset(self._worker.key, "state", "idle")
            pipeline.hdel(self._worker.key, "current_job")
        pipeline.execute()

    def show_alive(self) -> None:
        """Register the worker in RQ, or send its heartbeat every 15 s. Raises errors of Redis."""
        if self._worker is None:
            queues = [RqQueue(name, connection=self._client) for name in self._queue_names.values()]
            self._worker = SimpleWorker(
                queues, name=self._name, connection=self._client, serializer=JSONSerializer, worker_ttl=60
            )
            with suppress(ValueError):  # already registered: the connection to this Redis was lost before
                self._worker.register_birth()  # type: ignore[no-untyped-call]  # RQ leaves it untyped
            self._seen_at = self._clock()
        elif self._clock() - self._seen_at > 15.0:
            self._worker.heartbeat(120)
            self._seen_at = self._clock()

    def close(self) -> None:
        """Remove the worker from RQ's list."""
        if self._worker is not None:
            with suppress(*_redis.failures()):
                self._worker.register_death()  # type: ignore[no-untyped-call]  # RQ leaves it untyped

    def _started(self, task_id: str, priority: Priority, pipeline: Pipeline) -> RqJob:
        """Return the job in the state in which an RQ worker leaves it when it starts."""
        job = make_job(self._client, task_id, self._queue_names[priority])
        job.prepare_for_execution(self._name, pipeline=pipeline)
        write_job(job, pipeline)
        return job
