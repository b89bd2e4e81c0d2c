"""How a worker hears of tasks through RQ, and what RQ's tools see of the worker.

A worker that pops an id claims the *row* of that id. Nothing that stands in RQ is executed or deserialised. An id without a
row is logged as a security event:

- A job of another RQ application is put back into its queue, for that application's workers.
- A hint of another Headway deployment, or of a deleted task, is dropped; that deployment's sweeper gives it again.
- An id without a job is dropped, as RQ itself does.

An id whose row no longer waits (a second hint, a replay) is dropped.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from headway import _redis
from headway._sql import Tx
from headway.core.ids import check_id
from headway.core.retry import CircuitBreaker
from headway.errors import HeadwayError, InvalidInput, MissingExtra
from headway.queue.rq import _FAILED_SECONDS, DESCRIPTION, _job, _list_key, _rq_takes, show_failed
from headway.queue.store import claim as claims
from headway.queue.store import hints as hinting
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import PRIORITIES, Claim, Priority, Status, Task
from headway.queue.task_queue import TaskQueue
from headway.telemetry import Log, metrics, redact

try:
    from rq import Queue as RqQueue
    from rq import SimpleWorker
    from rq.executions import Execution
    from rq.job import Job as RqJob
    from rq.serializers import JSONSerializer
except ImportError as error:
    raise MissingExtra("redis", "A queue with a Redis") from error

if TYPE_CHECKING:
    from redis.client import Pipeline

log = Log("queue")

_IDLE_LOOK = 1.0
#: Seconds without a pop after one that gave only jobs of others, so that nobody pops and returns them without end.
_FOREIGN_REST = 1.0
#: Ids of others' jobs that were logged and are not logged again.
_REMEMBERED = 1000


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
        self._prefix = queue.rq.prefix
        self._popped: list[tuple[str, Priority]] = []
        self._foreign: list[tuple[str, Priority]] = []  # to be put back
        self._logged: set[str] = set()
        self._rests_until = -math.inf
        self._looked_at = 0.0
        self._paused: tuple[float, frozenset[Priority]] = (0.0, frozenset())
        self._seen: SimpleWorker | None = None
        self._seen_at = 0.0
        self._showing = threading.Lock()  # the thread beside handlers shows what runs
        self._unshown: dict[str, Claim] = {}
        self._executions: dict[str, tuple[RqJob, Execution]] = {}

    # ---- what a worker asks ------------------------------------------------------------------------------------------

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        hinted = self._take_hints(queues, limit)
        if hinted is None:
            return self._claim_rows(who, queues, limit)  # Redis is away: as if there were none
        # Hints that lead to nothing (forged, a replay) do not look like an empty queue: the rows of all queues are asked.
        claimed = self._claim_hinted(who, queues, hinted) if hinted else []
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
        names = [self._list(queue) for queue in self._queues if queue not in self._paused_now()]
        if not names:
            stop.wait(seconds)
            return
        if self._clock() < self._rests_until:
            stop.wait(min(seconds, 0.2))
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
            self._popped.append(self._hint(found))

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
            show_failed(task, job, pipeline, worker=self._name)
        if over:
            pipeline.delete(*over)
        if shown and self._seen is not None:
            pipeline.hset(self._seen.key, "state", "idle")
            pipeline.hdel(self._seen.key, "current_job")
        pipeline.execute()

    def close(self) -> None:
        with suppress(*_redis.failures()):
            self._put_back()
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
        if self._clock() < self._rests_until:
            return None
        paused = self._paused_now()
        try:
            self._put_back()
            for queue in queues:
                if queue in paused:
                    continue
                found: Any = self._client.lpop(self._list(queue), limit - len(hinted))
                hinted += [(_text(raw), queue) for raw in found or ()]
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

        def look(tx: Tx, rest: Sequence[str]) -> dict[str, Status]:
            known = hinting.statuses(tx, rest)
            waiting = {task_id for task_id, status in known.items() if status is Status.QUEUED}
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
            return known

        try:
            # Queues that go before the hinted ones are looked at too: RQ may not know what waits there (an overflow, an id
            # that RQ does not take).
            named = queues[: max((n for n, queue in enumerate(queues, 1) if queue in hints), default=0)]
            claimed = claims.claim_next(self._queue.database, who, queues=named, limit=len(hinted))
            if not claimed and len(named) < len(queues):
                # What is hinted is not for us (a kind without a handler here) or nobody's: what waits behind it is not to wait.
                claimed = claims.claim_next(self._queue.database, who, queues=queues, limit=len(hinted))
            taken = {claim.id for claim in claimed}
            rest = [task_id for task_id in ids if task_id not in taken]
            known = self._queue.database.run(lambda tx: look(tx, rest), operation="queue.claim") if rest else {}
        except HeadwayError:
            taken = {claim.id for claim in claimed}
            # The others are asked for again when the database is back.
            self._popped = [*((task_id, queue) for task_id, queue in hinted if task_id not in taken), *self._popped]
            if not claimed:
                raise
            return claimed
        strangers = [(task_id, queue) for task_id, queue in hinted if task_id not in taken and task_id not in known]
        self._refuse(strangers)
        if len(strangers) == len(hinted):
            self._rests_until = self._clock() + _FOREIGN_REST
        self._forget({task_id: status for task_id, status in known.items() if task_id not in taken})
        return claimed

    def _forget(self, known: Mapping[str, Status]) -> None:
        """Delete what RQ keeps of tasks that are over: a second hint wrote it again after their end."""
        over = [RqJob.key_for(id) for id, status in known.items() if status in (Status.COMPLETED, Status.CANCELLED)]
        failed = [RqJob.key_for(id) for id, status in known.items() if status is Status.FAILED]
        if not over and not failed:
            return
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=False)
            if over:
                pipeline.delete(*over)
            for key in failed:  # shown in RQ's registry of failed jobs for as long
                pipeline.expire(key, _FAILED_SECONDS)
            pipeline.execute()

    def _list(self, queue: Priority) -> str:
        return _list_key(self._prefix + queue.value)

    def _hint(self, found: Sequence[bytes]) -> tuple[str, Priority]:
        key, raw = found
        return _text(raw), Priority(key.decode().removeprefix(_list_key(self._prefix)))

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

    def _refuse(self, strangers: Sequence[tuple[str, Priority]]) -> None:
        """Log ids that are not tasks of this database, and put the jobs of other applications back."""
        for task_id, queue in strangers:
            metrics.count("headway_queue_refused")
            try:
                description: Any = self._client.hget(_job_key(task_id), "description")
                job = description is not None or self._client.exists(_job_key(task_id))
            except _redis.failures():
                description, job = None, True  # not known: the next try puts it back
            if description == DESCRIPTION.encode():
                with suppress(*_redis.failures()):
                    self._client.expire(_job_key(task_id), _FAILED_SECONDS)
                said = "a hint in RQ is not a task of this database: give each deployment its own queue_prefix"
            elif job:
                self._foreign.append((task_id, queue))
                said = "a job of another RQ application was put back: it uses a queue of ours, see queue_prefix"
            else:
                said = "an id in RQ is neither a task nor a job: it was dropped"
            if task_id not in self._logged:
                if len(self._logged) >= _REMEMBERED:
                    self._logged.clear()
                self._logged.add(task_id)
                shown = ascii(task_id)[1:-1]
                shown = shown if len(shown) <= 60 else shown[:57] + "..."
                log.critical(f"security: {said}", key=shown, queue=self._prefix + queue.value)
        with suppress(*_redis.failures()):
            self._put_back()

    def _put_back(self) -> None:
        """Return jobs of other applications to the end of their queues. Should Redis be away, the next claim does it."""
        while self._foreign:
            task_id, queue = self._foreign[0]
            self._client.rpush(self._list(queue), _raw(task_id))
            del self._foreign[0]

    def _failed(self, error: BaseException) -> None:
        if self._breaker.failed():
            log.warning("Redis is away: tasks are taken from the database", worker=self._name, error=redact(str(error)))

    # ---- what RQ's tools see -----------------------------------------------------------------------------------------

    def _show_alive(self) -> None:
        if self._seen is None:
            queues = [RqQueue(self._prefix + queue.value, connection=self._client) for queue in self._queues]
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
        job = _job(self._client, task_id, self._prefix + priority.value)
        job.prepare_for_execution(self._name, pipeline=pipeline)
        pipeline.hset(RqJob.key_for(task_id), mapping=job.to_dict(include_meta=False, include_result=False))
        return job


def _may_be_ours(task_id: str) -> bool:
    """Whether the database may be asked for it: PostgreSQL, for one, takes no U+0000."""
    try:
        check_id(task_id, "a task id")
    except InvalidInput:
        return False
    return True


def _text(raw: bytes) -> str:
    """An id as it stands in RQ; any bytes can be written back as they were."""
    return raw.decode("utf-8", "surrogateescape")


def _raw(task_id: str) -> bytes:
    return task_id.encode("utf-8", "surrogateescape")


def _job_key(task_id: str) -> bytes:
    """The key of a job whose id may be any bytes."""
    return RqJob.redis_job_namespace_prefix.encode() + _raw(task_id)
