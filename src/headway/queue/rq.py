"""Enqueue task ids in RQ, so that workers start tasks at once and RQ's own tools show the queues.

A hint is an RQ job that carries only the task's id. Headway never executes or deserialises its content;
`headway.queue.worker.rq_source` consumes it. Redis may be wiped, replaced or rolled back at any time: the sweeper
enqueues the hints of waiting tasks again.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headway import _redis
from headway.core.retry import CircuitBreaker
from headway.errors import HeadwayError, MissingExtra
from headway.queue.settings import RqOptions
from headway.queue.store.user_quota import KEPT
from headway.queue.task import PRIORITIES, Priority, Status, Task
from headway.telemetry import Log, metrics, redact

try:
    from rq import Queue as RqQueue
    from rq.job import Job as RqJob
    from rq.job import JobStatus
    from rq.registry import FailedJobRegistry, StartedJobRegistry
    from rq.results import Result
    from rq.serializers import JSONSerializer
    from rq.worker_registration import clean_worker_registry
except ImportError as error:
    raise MissingExtra("redis", "A queue with a Redis") from error

if TYPE_CHECKING:
    from redis import Redis
    from redis.client import Pipeline

log = Log("queue")

#: What RQ's tools show for a task: nothing of its payload.
DESCRIPTION = "headway task"
#: The function a hint names. Only a worker that is not ours would call it.
FUNCTION = "headway.queue.rq.not_by_this_worker"
#: Seconds a submission waits for Redis; then the sweeper gives the hint.
SUBMIT_TIMEOUT = 0.25
#: Hints that wait in one queue at the most; more tasks wait in SQL alone.
WINDOW = 10_000
#: Hints given by one script: Redis does nothing else meanwhile.
_TOGETHER = 1000
_FAILED_SECONDS = 7 * 86_400
_MEMORY_LOOK = 5.0


def not_by_this_worker(task_id: str) -> None:
    """What a hint calls. A worker of RQ itself must not run it: it knows nothing of the row."""
    raise HeadwayError(
        f"Task {task_id} is run by headway's own worker.", hint="Start one: headway worker --app MODULE:QUEUE"
    )


class RqHints:
    """Tells RQ of tasks. While Redis is away it says so at once, and the rows wait in SQL."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float = SUBMIT_TIMEOUT,
        window: int = WINDOW,
        options: RqOptions | None = None,
        alert: Callable[[str], None] | None = None,
    ) -> None:
        self._window, self._alert = window, alert
        self._options = options or RqOptions()
        self.overflowing = self._warned = False
        self._looked_at = -math.inf
        self._client = _redis.connect(
            url, role="queue", name="hints", timeout=timeout, connect_timeout=timeout, decode=False
        )
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._template: dict[Priority, list[Any]] = {}

    def push(self, tasks: Sequence[tuple[str, Priority]], *, places: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Put ids into their queues, in this order; those that RQ has now. The others wait for the sweeper.

        ``places``: keys of users, each with the task in its place; they go with the ids in the same round trip.
        """
        if not tasks or not self._breaker.allow():
            return []
        if time.monotonic() - self._looked_at > _MEMORY_LOOK:
            self._measure_memory()  # each process for itself: a submitter has no sweeper to do it
        if self.overflowing:
            return []
        done: list[str] = []
        try:
            for priority in dict.fromkeys(priority for _, priority in tasks):
                ids = [task_id for task_id, each in tasks if each is priority and _rq_takes(task_id)]
                for start in range(0, len(ids), _TOGETHER):
                    page = ids[start : start + _TOGETHER]
                    done += page[: self._push(page, priority, places)]
                    places = ()
        except _redis.failures() as error:
            if self._breaker.failed():
                log.warning("Redis is away: tasks wait in the database", error=redact(str(error)))
            metrics.gauge("headway_queue_redis_away", 1)
            return done
        if self._breaker.succeeded():
            log.warning("Redis is back: tasks go to RQ again")
            metrics.gauge("headway_queue_redis_away", 0)
        return done

    def _push(self, ids: Sequence[str], priority: Priority, places: Sequence[tuple[str, str]]) -> int:
        """By a script: it looks for room, and what it puts in is there at once, with its job. A thousand commands would take
        redis-py longer than PostgreSQL takes for the rows."""
        keys = [
            RqQueue.redis_queues_keys,
            _list_key(self._name(priority)),
            *map(RqJob.key_for, ids),
            *(key for key, _ in places),
        ]
        common = [*self._fields(priority), *_at(datetime.now(UTC))]
        jobs = [part for task_id in ids for part in (task_id, _data(task_id))]
        arguments = [self._window, len(ids), KEPT, len(common), *common, *jobs, *(task_id for _, task_id in places)]
        return int(_redis.script("queue/hint")(self._client, keys, arguments))

    def _fields(self, priority: Priority) -> list[Any]:
        """What RQ keeps of a job, as `RqJob.save` writes it, without what differs from job to job."""
        if priority not in self._template:
            job = self.job("any", priority)
            known = job.to_dict(include_meta=False, include_result=False) | {"status": JobStatus.QUEUED.value}
            kept = {name: value for name, value in known.items() if value != "" and name not in ("data", "created_at")}
            self._template[priority] = [part for item in kept.items() for part in item]
        return self._template[priority]

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        """Those of ``tasks`` that stand in no queue of RQ: their hint was popped and came to nothing, or was lost. None
        while Redis is away."""
        present: set[str] = set()
        try:
            for name in sorted({self._name(priority) for _, priority in tasks}):
                found: Any = self._client.lrange(_list_key(name), 0, -1)
                present.update(raw.decode("utf-8", "replace") for raw in found)
        except _redis.failures():
            return None
        return [(task_id, priority) for task_id, priority in tasks if task_id not in present]

    def look_at_memory(self) -> bool:
        """Whether Redis is so full that new tasks wait in SQL alone. Said once when it begins and once when it is over;
        meanwhile what RQ keeps of failed tasks is cleaned up."""
        before, share = self.overflowing, self._measure_memory()
        if self.overflowing and not before:
            self._say(f"Redis uses {share:.0%} of its memory: new tasks wait in the database alone")
        elif before and not self.overflowing:
            self._say(f"Redis uses {share:.0%} of its memory again: tasks go to RQ")
        warned, self._warned = self._warned, share > self._options.warn
        if self._warned and not warned and not self.overflowing:
            log.warning(
                f"Redis uses {share:.0%} of its memory: above {self._options.critical:.0%} tasks wait in the database alone"
            )
        if self.overflowing:
            with suppress(*_redis.failures()):
                self._clean_up()
        return self.overflowing

    def _measure_memory(self) -> float:
        """The share of its memory that Redis uses; between the two limits it is as it was."""
        self._looked_at = time.monotonic()
        try:
            info: Any = self._client.info("memory")
        except _redis.failures():
            return 0.0  # not known: as before
        limit = self._options.memory or int(info.get("maxmemory", 0))
        share = int(info["used_memory"]) / limit if limit else 0.0
        metrics.gauge("headway_queue_redis_memory", share)
        self.overflowing = share > (self._options.warn if self.overflowing else self._options.critical)
        return share

    def _clean_up(self) -> None:
        """RQ's copies of what failed are for its tools; the rows have it all."""
        for priority in PRIORITIES:
            registry = FailedJobRegistry(self._name(priority), connection=self._client, serializer=JSONSerializer)
            ids: Any = self._client.zrange(registry.key, 0, 999)
            if ids:
                names = [raw.decode("utf-8", "replace") for raw in ids]
                pipeline = self._client.pipeline(transaction=True)
                pipeline.zrem(registry.key, *ids)
                pipeline.delete(*(key for name in names for key in (RqJob.key_for(name), f"rq:results:{name}")))
                pipeline.execute()

    def forget_the_dead(self) -> None:
        """Take out of RQ's lists what killed workers left there. RQ's own cleaning would call a run that is over lost, and
        put its task into the registry of failed jobs."""
        with suppress(*_redis.failures()):
            for priority in PRIORITIES:
                name = self._name(priority)
                clean_worker_registry(RqQueue(name, connection=self._client))
                started = StartedJobRegistry(name, connection=self._client, serializer=JSONSerializer)
                self._client.zremrangebyscore(started.key, 0, time.time() - 60)

    def show_ended(self, tasks: Sequence[Task]) -> None:
        """Show RQ's tools what has ended without a worker to show it. What is not shown, Redis being away, is in the rows."""
        ended = [task for task in tasks if task.is_final and _rq_takes(task.id)]
        if not ended or not self._breaker.allow():
            return
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=True)
            for task in ended:
                if task.status is not Status.FAILED:
                    pipeline.delete(RqJob.key_for(task.id))
                    continue
                job = self.job(task.id, task.priority)
                pipeline.hset(RqJob.key_for(task.id), mapping=job.to_dict(include_meta=False, include_result=False))
                show_failed(task, job, pipeline, worker=task.worker or "")
            pipeline.execute()

    def _say(self, message: str) -> None:
        log.critical(message)
        if self._alert is not None:
            try:
                self._alert(message)
            except Exception as error:  # noqa: BLE001 - foreign code: the queue goes on whatever it raises
                log.warning("the alert could not be given", error=redact(str(error)))

    def withdraw(self, tasks: Sequence[tuple[str, Priority]]) -> bool:
        """Take hints back; False while Redis is away. Then they stay: one that leads to no waiting row does no harm."""
        try:
            pipeline = self._client.pipeline(transaction=True)
            for task_id, priority in tasks:
                pipeline.lrem(_list_key(self._name(priority)), 0, task_id)
                pipeline.delete(RqJob.key_for(task_id))
            pipeline.execute()
        except _redis.failures():
            return False
        return True

    def job(self, task_id: str, priority: Priority) -> RqJob:
        return _job(self._client, task_id, self._name(priority))

    def _name(self, priority: Priority) -> str:
        return self._options.prefix + priority.value

    def close(self) -> None:
        self._client.close()


def _job(client: Redis, task_id: str, name: str) -> RqJob:
    """``name``: the queue's in RQ."""
    return RqJob.create(
        FUNCTION,
        args=(task_id,),
        id=task_id,
        connection=client,
        origin=name,
        description=DESCRIPTION,
        serializer=JSONSerializer,
        result_ttl=0,
        failure_ttl=_FAILED_SECONDS,
        timeout=-1,
    )


def show_failed(task: Task, job: RqJob, pipeline: Pipeline, *, worker: str) -> None:
    """Put a task that failed for good into RQ's registry of failed jobs. Of its error RQ's tools are told the type: a message
    may quote the payload, and Redis is not given that."""
    shown = f"{(task.error or '').partition(':')[0][:80]} (see: headway task show {task.id})"
    job.set_status(JobStatus.FAILED, pipeline=pipeline)
    registry = FailedJobRegistry(str(job.origin), connection=job.connection, serializer=JSONSerializer)
    registry.add(job, ttl=_FAILED_SECONDS, exc_string=shown, pipeline=pipeline)
    Result.create_failure(job, _FAILED_SECONDS, shown, worker_name=worker, pipeline=pipeline)


def _data(task_id: str) -> bytes:
    """What RQ calls with what, as its JSON serializer writes it. An id needs no escape: see `check_id`."""
    return zlib.compress(f'["{FUNCTION}", null, ["{task_id}"], {{}}]'.encode(), 0)


def _rq_takes(task_id: str) -> bool:
    """RQ knows no id with a dot, and fails on one that it meets. Such a task is served from its row alone."""
    return "." not in task_id


def _at(moment: datetime) -> tuple[str, str]:
    return "created_at", moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _list_key(name: str) -> str:
    return RqQueue.redis_queue_namespace_prefix + name
