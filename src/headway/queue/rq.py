"""RQ carries the ids of tasks, so that workers hear of them at once and RQ's own tools see what goes on.

A hint in RQ is a job with the task's id, a fixed description and no argument but the id; what it says is never executed and
never deserialised here. A worker that pops an id claims the *row* of that id: an id that has no row is nobody's task, is put
into RQ's registry of failed jobs and said in the log as a security event; an id whose row does not wait any more (a
second hint, a replay) is dropped. Redis may be wiped, replaced or rolled back at any moment: the sweeper gives the hints of
waiting rows again.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from headway import _redis
from headway._sql import Tx
from headway.errors import HeadwayError, InvalidInput, MissingExtra
from headway.ids import check_id
from headway.queue import claims, hinting
from headway.queue.claims import Claimant
from headway.queue.places import KEPT
from headway.queue.settling import Success
from headway.queue.taskqueue import TaskQueue
from headway.queue.values import PRIORITIES, Claim, Priority, Status, Task
from headway.retry import CircuitBreaker
from headway.telemetry import Log, metrics, redact

try:
    from rq import Queue as RqQueue
    from rq import SimpleWorker
    from rq.executions import Execution
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
#: Shares of Redis's memory at which hints stop, and at which they begin again.
OVERFLOW_FROM, OVERFLOW_UNTIL = 0.85, 0.75
#: Hints given by one script: Redis does nothing else meanwhile.
_TOGETHER = 1000
_FAILED_SECONDS = 7 * 86_400
_IDLE_LOOK = 1.0
_MEMORY_LOOK = 5.0
_PASSED_OVER = 100


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
        memory_limit: int | None = None,
        alert: Callable[[str], None] | None = None,
    ) -> None:
        """``memory_limit``: bytes Redis may use, for a server that has no maxmemory of its own."""
        self._window = window
        self._memory_limit, self._alert = memory_limit, alert
        self.overflowing = False
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
            _list_key(priority.value),
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
            for name in sorted({priority.value for _, priority in tasks}):
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
        limit = self._memory_limit or int(info.get("maxmemory", 0))
        share = int(info["used_memory"]) / limit if limit else 0.0
        metrics.gauge("headway_queue_redis_memory", share)
        self.overflowing = share > (OVERFLOW_UNTIL if self.overflowing else OVERFLOW_FROM)
        return share

    def _clean_up(self) -> None:
        """RQ's copies of what failed are for its tools; the rows have it all."""
        for priority in PRIORITIES:
            registry = FailedJobRegistry(priority.value, connection=self._client, serializer=JSONSerializer)
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
                clean_worker_registry(RqQueue(priority.value, connection=self._client))
                started = StartedJobRegistry(priority.value, connection=self._client, serializer=JSONSerializer)
                self._client.zremrangebyscore(started.key, 0, time.time() - 60)

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
                pipeline.lrem(_list_key(priority.value), 0, task_id)
                pipeline.delete(RqJob.key_for(task_id))
            pipeline.execute()
        except _redis.failures():
            return False
        return True

    def job(self, task_id: str, priority: Priority) -> RqJob:
        return _job(self._client, task_id, priority)

    def close(self) -> None:
        self._client.close()


def _job(client: Redis, task_id: str, priority: Priority) -> RqJob:
    return RqJob.create(
        FUNCTION,
        args=(task_id,),
        id=task_id,
        connection=client,
        origin=priority.value,
        description=DESCRIPTION,
        serializer=JSONSerializer,
        result_ttl=0,
        failure_ttl=_FAILED_SECONDS,
        timeout=-1,
    )


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


class RqSource:
    """Tasks by the hints of RQ; while Redis is away, and for rows without a hint, straight from the rows."""

    def __init__(
        self, queue: TaskQueue, url: str, *, name: str, queues: Sequence[Priority] = PRIORITIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._queue = queue
        # Its own client: RQ changes the pool of whoever makes a worker, and a wait in BLPOP needs a longer timeout.
        self._client = _redis.connect(url, role="queue", name="worker", timeout=5.0, decode=False)
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._name, self._queues, self._clock = name, queues, clock
        self._popped: list[tuple[str, Priority]] = []
        self._looked_at = 0.0
        self._paused: tuple[float, frozenset[Priority]] = (0.0, frozenset())
        self._seen: SimpleWorker | None = None
        self._seen_at = 0.0
        self._showing = threading.Lock()  # the thread beside handlers shows what runs
        self._unshown: dict[str, Claim] = {}
        self._executions: dict[str, tuple[RqJob, Execution]] = {}

    # ---- what a worker asks ------------------------------------------------------------------------------------------

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        claimed: list[Claim] = []
        for _ in range(_PASSED_OVER):  # hints that lead to nothing (forged, a replay) do not look like an empty queue
            hinted = self._take_hints(queues, limit)
            if hinted is None:
                return self._claim_rows(who, queues, limit)  # Redis is away: as if there were none
            if hinted:
                claimed = self._claim_hinted(who, queues, hinted)
            if claimed or not hinted:
                break
        if not claimed and self._clock() - self._looked_at > _IDLE_LOOK:
            # Rows that RQ was not told of (an overflow, a limit that is free again) are not left to the sweeper alone.
            claimed = self._claim_rows(who, queues, limit, unhinted=True)
            if not claimed:  # where there was one there may be more
                self._looked_at = self._clock()
        with self._showing:
            self._unshown = {claim.id: claim for claim in claimed}
            if claimed and self._breaker.allow():  # one that never rests is seen too
                try:
                    self._show_alive()
                except _redis.failures() as error:
                    self._failed(error)
        return claimed

    def show(self) -> None:
        """Let RQ's tools see what runs. A short task has ended before that: what it would cost is most of what it costs."""
        with self._showing:
            claimed, self._unshown = list(self._unshown.values()), {}
            if claimed:
                self._show_started(claimed)

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> None:
        """Not here: which queues have something is known by their hints."""

    def wait(self, seconds: float, stop: threading.Event) -> None:
        if stop.is_set() or not self._breaker.allow():
            stop.wait(min(seconds, 0.5))
            return
        names = [_list_key(queue.value) for queue in self._queues if queue not in self._paused_now()]
        if not names:
            stop.wait(seconds)
            return
        try:
            self._show_alive()
            found: Any = self._client.blpop(names, timeout=max(0.05, min(seconds, 1.0)))
        except _redis.failures() as error:
            self._failed(error)
            stop.wait(min(seconds, 0.5))
            return
        self._breaker.succeeded()
        if found:
            self._popped.append(_hint(found))

    def settled(self, tasks: Iterable[Task]) -> None:
        """Show RQ's tools how tasks ended. What is not shown because Redis is away, its own cleanup removes."""
        with self._showing:
            settled = [task for task in tasks if _rq_takes(task.id)]
            for task in settled:
                self._unshown.pop(task.id, None)
            if not settled or not self._breaker.allow():
                return
            try:
                self._show_settled(settled)
            except _redis.failures() as error:
                self._failed(error)

    def _show_settled(self, tasks: Sequence[Task]) -> None:
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
            job.set_status(JobStatus.FAILED, pipeline=pipeline)
            registry = FailedJobRegistry(task.priority.value, connection=self._client, serializer=JSONSerializer)
            registry.add(job, ttl=_FAILED_SECONDS, exc_string=_shown(task), pipeline=pipeline)
            Result.create_failure(job, _FAILED_SECONDS, _shown(task), worker_name=self._name, pipeline=pipeline)
        if over:
            pipeline.delete(*over)
        if shown and self._seen is not None:
            pipeline.hset(self._seen.key, "state", "idle")
            pipeline.hdel(self._seen.key, "current_job")
        pipeline.execute()

    def close(self) -> None:
        if self._seen is not None:
            with suppress(*_redis.failures()):
                self._seen.register_death()  # type: ignore[no-untyped-call]  # RQ leaves it untyped
        self._client.close()

    # ---- hints -------------------------------------------------------------------------------------------------------

    def _take_hints(self, queues: Sequence[Priority], limit: int) -> list[tuple[str, Priority]] | None:
        """Up to ``limit`` ids, the first queue's first; None while Redis is away."""
        hinted, self._popped = self._popped, []
        if hinted or not self._breaker.allow():
            return hinted or None  # what woke us is served at once; whether there is more, the next claim asks
        paused = self._paused_now()
        try:
            for queue in queues:
                if queue in paused:
                    continue
                found: Any = self._client.lpop(_list_key(queue.value), limit - len(hinted))
                hinted += [(raw.decode("utf-8", "replace"), queue) for raw in found or ()]
                if len(hinted) >= limit:
                    break
        except _redis.failures() as error:
            self._failed(error)
            return hinted or None
        self._breaker.succeeded()
        return hinted

    def _claim_hinted(
        self, who: Claimant, queues: Sequence[Priority], hinted: Sequence[tuple[str, Priority]]
    ) -> list[Claim]:
        ids = [task_id for task_id, _ in hinted if _may_be_ours(task_id)]
        # A hint says that something waits in its queue; which row is next, the rows know: users take turns.
        hints = {queue for _, queue in hinted}
        claimed: list[Claim] = []

        def look(tx: Tx, rest: Sequence[str]) -> tuple[set[str], set[str]]:
            known, waiting = hinting.known(tx, rest)
            again: set[str] = set()
            # Where a hint led to another row, that row's own hint is left for this one. Where it led to none (paused, over a
            # limit), or to one that has no hint, RQ has to be told again, by the sweeper or when a worker looks for such rows.
            left = Counter(claim.priority for claim in claimed if claim.hinted and claim.id not in ids)
            for task_id, queue in hinted:
                if task_id in waiting and left[queue] > 0:
                    left[queue] -= 1
                elif task_id in waiting:
                    again.add(task_id)
            hinting.unhint(tx, again)
            return known, waiting

        try:
            # Queues that go before the hinted ones are looked at too: RQ may not know what waits there (an overflow, an id
            # that RQ does not take).
            named = queues[: max((n for n, queue in enumerate(queues, 1) if queue in hints), default=0)]
            claimed = claims.claim_next(self._queue.database, who, queues=named, limit=len(hinted))
            taken = {claim.id for claim in claimed}
            rest = [task_id for task_id in ids if task_id not in taken]
            known, waiting = (
                self._queue.database.run(lambda tx: look(tx, rest), operation="queue.claim") if rest else (set(), set())
            )
        except HeadwayError:
            taken = {claim.id for claim in claimed}
            # The others are asked for again when the database is back.
            self._popped = [*((task_id, queue) for task_id, queue in hinted if task_id not in taken), *self._popped]
            if not claimed:
                raise
            return claimed
        for task_id, queue in hinted:
            if task_id not in taken and task_id not in known:
                self._refuse(task_id, queue)
        over = known - waiting - taken
        if over:
            self._let_expire(over)
        return claimed

    def _let_expire(self, ids: Iterable[str]) -> None:
        """A hint of a task that does not wait any more (Redis went back in time): what RQ knows of it is not kept for ever."""
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=False)
            for task_id in ids:
                pipeline.expire(RqJob.key_for(task_id), _FAILED_SECONDS)
            pipeline.execute()

    def _claim_rows(
        self, who: Claimant, queues: Sequence[Priority], limit: int, *, unhinted: bool = False
    ) -> list[Claim]:
        return claims.claim_next(self._queue.database, who, queues=queues, limit=limit, unhinted=unhinted)

    def _paused_now(self) -> frozenset[Priority]:
        """Which queues are paused, as of a second ago at the most; the claim itself looks again."""
        at, known = self._paused
        if self._clock() - at > _IDLE_LOOK:
            with self._queue.database.read() as tx:
                known = frozenset(claims.paused(tx, tx.now()))
            self._paused = (self._clock(), known)
        return known

    def _refuse(self, task_id: str, queue: Priority) -> None:
        """An id that is no task's: somebody else put it there. It is not looked into, let alone run."""
        shown = task_id if len(task_id) <= 60 else task_id[:57] + "..."
        log.critical("security: a job in RQ is no task of ours; it was not run", key=shown, queue=queue.value)
        metrics.count("headway_queue_refused")
        if not _may_be_ours(task_id):
            return  # nor an id of RQ: there is no job to show, and what somebody wrote there may be megabytes
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=True)
            pipeline.hset(RqJob.key_for(task_id), mapping={"status": JobStatus.FAILED.value})
            pipeline.expire(RqJob.key_for(task_id), _FAILED_SECONDS)
            pipeline.zadd(
                FailedJobRegistry(queue.value, connection=self._client).key, {task_id: time.time() + _FAILED_SECONDS}
            )
            pipeline.execute()

    def _failed(self, error: BaseException) -> None:
        if self._breaker.failed():
            log.warning("Redis is away: tasks are taken from the database", worker=self._name, error=redact(str(error)))

    # ---- what RQ's tools see -----------------------------------------------------------------------------------------

    def _show_alive(self) -> None:
        if self._seen is None:
            queues = [RqQueue(queue.value, connection=self._client) for queue in self._queues]
            self._seen = SimpleWorker(
                queues, name=self._name, connection=self._client, serializer=JSONSerializer, worker_ttl=60
            )
            with suppress(ValueError):  # RQ knows us: we listened to this Redis before and could not say that we left
                self._seen.register_birth()  # type: ignore[no-untyped-call]  # RQ leaves it untyped
            self._seen_at = self._clock()
        elif self._clock() - self._seen_at > 15.0:
            self._seen.heartbeat(120)
            self._seen_at = self._clock()

    def _show_started(self, claimed: Sequence[Claim]) -> None:
        if not self._breaker.allow():
            return
        try:
            self._show_alive()
            pipeline = self._client.pipeline(transaction=True)
            for claim in filter(lambda claim: _rq_takes(claim.id), claimed):
                job = self._started(claim.id, claim.priority, pipeline)
                execution = Execution.create(job, ttl=90, pipeline=pipeline)
                self._executions[claim.id] = (job, execution)
            if self._seen is not None:
                pipeline.hset(self._seen.key, mapping={"state": "busy", "current_job": claimed[0].id})
            pipeline.execute()
        except _redis.failures() as error:
            self._failed(error)

    def _started(self, task_id: str, priority: Priority, pipeline: Pipeline) -> RqJob:
        """The job as a worker of RQ leaves it when it begins."""
        job = _job(self._client, task_id, priority)
        job.prepare_for_execution(self._name, pipeline=pipeline)
        pipeline.hset(RqJob.key_for(task_id), mapping=job.to_dict(include_meta=False, include_result=False))
        return job


def _shown(task: Task) -> str:
    """What RQ's tools are told of a failure: its type. A message may quote the payload, and Redis is not given that."""
    return f"{(task.error or '').partition(':')[0][:80]} (see: headway task show {task.id})"


def _may_be_ours(task_id: str) -> bool:
    """Whether the database may be asked for it: PostgreSQL, for one, takes no U+0000."""
    try:
        check_id(task_id, "a task id")
    except InvalidInput:
        return False
    return True


def _hint(found: Sequence[bytes]) -> tuple[str, Priority]:
    key, raw = found
    return raw.decode("utf-8", "replace"), Priority(key.decode().removeprefix(RqQueue.redis_queue_namespace_prefix))
