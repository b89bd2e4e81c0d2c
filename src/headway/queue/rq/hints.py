"""Enqueue task ids in RQ, so that workers start tasks at once and RQ's own tools show the queues."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from headway import _redis
from headway.core.retry import CircuitBreaker
from headway.errors import MissingExtra
from headway.queue.rq.registries import FUNCTION, accepts, list_key, make_job, show_failed, write_job
from headway.queue.rq.user_keys import EXPIRE_SECONDS
from headway.queue.settings import RqOptions
from headway.queue.task import PRIORITIES, Priority, Status, Task
from headway.telemetry import Log, metrics, redact

try:
    from rq import Queue as RqQueue
    from rq.job import Job as RqJob
    from rq.job import JobStatus
    from rq.registry import FailedJobRegistry, StartedJobRegistry
    from rq.serializers import JSONSerializer
    from rq.worker_registration import clean_worker_registry
except ImportError as error:
    raise MissingExtra("redis", "A queue with a Redis") from error

log = Log("queue")

#: Seconds a submission waits for Redis; after that the sweeper sends the hint.
SUBMIT_TIMEOUT = 0.25
#: Maximum hints in one queue of RQ; further tasks wait in SQL alone.
WINDOW = 10_000
#: Hints enqueued by one script, which blocks Redis meanwhile.
_BATCH = 1000
#: Seconds between two checks of Redis's memory by a process that submits.
_MEMORY_SECONDS = 5.0


class RqHints:
    """Enqueues hints. While Redis is unreachable every call returns at once, and tasks wait in SQL."""

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
        self._measured_at = -math.inf
        self._client = _redis.connect(
            url, role="queue", name="hints", timeout=timeout, connect_timeout=timeout, decode=False
        )
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._template: dict[Priority, list[Any]] = {}

    def push(self, tasks: Sequence[tuple[str, Priority]], *, user_keys: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Enqueue ids in this order; return those that RQ has now. The sweeper sends the others later.

        ``user_keys``: (key, task id) of users, written in the same round trip; see `headway.queue.rq.user_keys`.
        """
        if not tasks or not self._breaker.allow():
            return []
        if time.monotonic() - self._measured_at > _MEMORY_SECONDS:
            self._measure_memory()  # a process that only submits has no sweeper that does it
        if self.overflowing:
            return []
        done: list[str] = []
        try:
            for priority in dict.fromkeys(priority for _, priority in tasks):
                ids = [task_id for task_id, each in tasks if each is priority and accepts(task_id)]
                for start in range(0, len(ids), _BATCH):
                    page = ids[start : start + _BATCH]
                    done += page[: self._push(page, priority, user_keys)]
                    user_keys = ()
        except _redis.failures() as error:
            if self._breaker.failed():
                log.warning("Redis is unreachable; new tasks wait in the database", error=redact(str(error)))
            metrics.gauge("headway_queue_redis_away", 1)
            return done
        if self._breaker.succeeded():
            log.warning("Redis is reachable again; tasks are enqueued in RQ")
            metrics.gauge("headway_queue_redis_away", 0)
        return done

    def _push(self, ids: Sequence[str], priority: Priority, user_keys: Sequence[tuple[str, str]]) -> int:
        """Enqueue a page with one script; return how many ids fit into the window.

        The script writes an id and its job together. A thousand commands would take redis-py longer than PostgreSQL takes
        for the rows.
        """
        keys = [
            RqQueue.redis_queues_keys,
            list_key(self._name(priority)),
            *map(RqJob.key_for, ids),
            *(key for key, _ in user_keys),
        ]
        common = [*self._fields(priority), *_at(datetime.now(UTC))]
        jobs = [part for task_id in ids for part in (task_id, _data(task_id))]
        values = [self._window, len(ids), EXPIRE_SECONDS, len(common), *common, *jobs, *(id for _, id in user_keys)]
        return int(_redis.script("queue/hint")(self._client, keys, values))

    def _fields(self, priority: Priority) -> list[Any]:
        """Return the fields of a job, as `RqJob.save` writes them, that are equal for all jobs of a queue."""
        if priority not in self._template:
            job = make_job(self._client, "any", self._name(priority))
            fields = job.to_dict(include_meta=False, include_result=False) | {"status": JobStatus.QUEUED.value}
            equal = {
                name: value for name, value in fields.items() if value != "" and name not in ("data", "created_at")
            }
            self._template[priority] = [part for item in equal.items() for part in item]
        return self._template[priority]

    def missing(self, tasks: Sequence[tuple[str, Priority]]) -> list[tuple[str, Priority]] | None:
        """Return the tasks whose id is in no queue of RQ: their hint was lost, or was popped without a claim.

        Returns None while Redis is unreachable.
        """
        present: set[str] = set()
        try:
            for name in sorted({self._name(priority) for _, priority in tasks}):
                found: Any = self._client.lrange(list_key(name), 0, -1)
                present.update(raw.decode("utf-8", "replace") for raw in found)
        except _redis.failures():
            return None
        return [(task_id, priority) for task_id, priority in tasks if task_id not in present]

    def check_memory(self) -> bool:
        """Return whether Redis is so full that new tasks wait in SQL alone.

        The begin and the end are logged and reported by ``alert``. Meanwhile RQ's copies of failed tasks are deleted.
        """
        before, share = self.overflowing, self._measure_memory()
        if self.overflowing and not before:
            self._report(f"Redis uses {share:.0%} of its memory: new tasks wait in the database alone")
        elif before and not self.overflowing:
            self._report(f"Redis uses {share:.0%} of its memory again: tasks go to RQ")
        warned, self._warned = self._warned, share > self._options.warn
        if self._warned and not warned and not self.overflowing:
            log.warning(
                f"Redis uses {share:.0%} of its memory: above {self._options.critical:.0%} tasks wait in the database alone"
            )
        if self.overflowing:
            with suppress(*_redis.failures()):
                self._delete_failed_jobs()
        return self.overflowing

    def _measure_memory(self) -> float:
        """Return the share of its memory that Redis uses. Between the two thresholds ``overflowing`` does not change."""
        self._measured_at = time.monotonic()
        try:
            info: Any = self._client.info("memory")
        except _redis.failures():
            return 0.0  # Redis is unreachable: keep the previous state
        limit = self._options.memory or int(info.get("maxmemory", 0))
        share = int(info["used_memory"]) / limit if limit else 0.0
        metrics.gauge("headway_queue_redis_memory", share)
        self.overflowing = share > (self._options.warn if self.overflowing else self._options.critical)
        return share

    def _delete_failed_jobs(self) -> None:
        """Delete RQ's copies of failed tasks. They are only for its tools; the rows have all of it."""
        for priority in PRIORITIES:
            registry = FailedJobRegistry(self._name(priority), connection=self._client, serializer=JSONSerializer)
            ids: Any = self._client.zrange(registry.key, 0, 999)
            if ids:
                names = [raw.decode("utf-8", "replace") for raw in ids]
                pipeline = self._client.pipeline(transaction=True)
                pipeline.zrem(registry.key, *ids)
                pipeline.delete(*(key for name in names for key in (RqJob.key_for(name), f"rq:results:{name}")))
                pipeline.execute()

    def remove_dead_workers(self) -> None:
        """Remove killed workers and their runs from RQ's lists.

        RQ's own cleanup would take such a run for abandoned and put its task into the registry of failed jobs.
        """
        with suppress(*_redis.failures()):
            for priority in PRIORITIES:
                name = self._name(priority)
                clean_worker_registry(RqQueue(name, connection=self._client))
                started = StartedJobRegistry(name, connection=self._client, serializer=JSONSerializer)
                self._client.zremrangebyscore(started.key, 0, time.time() - 60)

    def show_ended(self, tasks: Sequence[Task]) -> None:
        """Show tasks that ended without a worker reporting it. While Redis is unreachable nothing is shown."""
        ended = [task for task in tasks if task.is_final and accepts(task.id)]
        if not ended or not self._breaker.allow():
            return
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=True)
            for task in ended:
                if task.status is not Status.FAILED:
                    pipeline.delete(RqJob.key_for(task.id))
                    continue
                job = make_job(self._client, task.id, self._name(task.priority))
                write_job(job, pipeline)
                show_failed(task, job, pipeline, worker=task.worker or "")
            pipeline.execute()

    def _report(self, message: str) -> None:
        log.critical(message)
        if self._alert is not None:
            try:
                self._alert(message)
            except Exception as error:  # noqa: BLE001 - the application's function may raise anything
                log.warning("the alert function failed", error=redact(str(error)))

    def withdraw(self, tasks: Sequence[tuple[str, Priority]]) -> bool:
        """Remove hints; return False while Redis is unreachable. A hint that remains does no harm."""
        try:
            pipeline = self._client.pipeline(transaction=True)
            for task_id, priority in tasks:
                pipeline.lrem(list_key(self._name(priority)), 0, task_id)
                pipeline.delete(RqJob.key_for(task_id))
            pipeline.execute()
        except _redis.failures():
            return False
        return True

    def _name(self, priority: Priority) -> str:
        return self._options.prefix + priority.value

    def close(self) -> None:
        """Close the connection to Redis."""
        self._client.close()


def _data(task_id: str) -> bytes:
    """Return the job's call, as RQ's JSON serializer writes it. An id needs no escape: see `check_id`."""
    return zlib.compress(f'["{FUNCTION}", null, ["{task_id}"], {{}}]'.encode(), 0)


def _at(moment: datetime) -> tuple[str, str]:
    return "created_at", moment.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
