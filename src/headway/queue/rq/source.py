"""A worker's source of tasks with RQ: pop an id, then claim the row.

Nothing that is stored in RQ is executed or deserialised. An id without a row is logged as a security event:

- A job of another RQ application is put back into its queue, for that application's workers.
- A hint of another Headway deployment, or of a deleted task, is dropped; that deployment's sweeper sends it again.
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
from headway.queue.rq.registries import DESCRIPTION, FAILED_SECONDS, WorkerDisplay, list_key
from headway.queue.store import claim as claims
from headway.queue.store import hints as hint_marks
from headway.queue.store.administration import paused_queues
from headway.queue.store.claim import Claimant
from headway.queue.store.complete import Success
from headway.queue.task import PRIORITIES, Claim, Priority, Status, Task
from headway.queue.task_queue import TaskQueue
from headway.telemetry import Log, metrics, redact

try:
    from rq.job import Job as RqJob
except ImportError as error:
    raise MissingExtra("redis", "A queue with a Redis") from error

if TYPE_CHECKING:
    from redis import Redis

log = Log("queue")

Hint = tuple[str, Priority]  # a task id and the queue it was popped from

#: Seconds between two polls for rows without a hint, and for which the list of paused queues is remembered.
_POLL_SECONDS = 1.0
#: Seconds without a pop after one that gave only foreign jobs, so that workers do not pop and return them in a busy loop.
_FOREIGN_REST = 1.0
#: Maximum foreign ids to remember as logged.
_REMEMBERED = 1000


class RqSource:
    """Claims tasks by RQ's hints; while Redis is unreachable, and for rows without a hint, by the rows alone."""

    def __init__(
        self, queue: TaskQueue, url: str, *, name: str, queues: Sequence[Priority] = PRIORITIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._queue = queue
        # A separate client: RQ changes the pool of a worker's client, and BLPOP needs a longer timeout.
        self._client = _redis.connect(url, role="queue", name="worker", timeout=5.0, decode=False)
        self._breaker = CircuitBreaker(threshold=1, cooldown=1.0)
        self._name, self._queues, self._clock = name, queues, clock
        prefix = queue.backend.rq.prefix
        names = {queue: prefix + queue.value for queue in PRIORITIES}
        self._lists = {queue: list_key(name) for queue, name in names.items()}
        self._popped: list[Hint] = []  # and not claimed yet
        self._foreign = _ForeignJobs(self._client, names, self._lists)
        self._pops_after = -math.inf
        self._polled_at = 0.0
        self._paused: tuple[float, frozenset[Priority]] = (0.0, frozenset())
        self._display = WorkerDisplay(
            self._client, self._breaker, name, {queue: names[queue] for queue in queues}, self._note_failure, clock
        )

    # ---- the interface of a source -----------------------------------------------------------------------------------

    def claim(self, who: Claimant, queues: Sequence[Priority], limit: int) -> list[Claim]:
        hints = self._pop(queues, limit)
        if hints is None:
            return self._claim_rows(who, queues, limit)
        # Hints that lead to no claim (forged, a replay) do not mean that the queues are empty.
        claimed = self._claim_hinted(who, queues, hints) if hints else []
        if not claimed and self._clock() - self._polled_at > _POLL_SECONDS:
            # Rows without a hint (an overflow, a limit that is free again) do not wait for the sweeper.
            claimed = self._claim_rows(who, queues, limit, unhinted=True)
            if not claimed:  # after a claim, poll again at once: there may be more
                self._polled_at = self._clock()
        self._display.claimed(claimed)
        return claimed

    def show(self) -> None:
        self._display.show()

    def settle_and_claim(
        self, successes: Sequence[Success], who: Claimant, queues: Sequence[Priority], limit: int
    ) -> None:
        """Return None: hints decide which queues to claim from."""

    def wait(self, seconds: float, stop: threading.Event) -> None:
        if stop.is_set() or not self._breaker.allow():
            stop.wait(min(seconds, 0.5))
            return
        names = [self._lists[queue] for queue in self._queues if queue not in self._paused_queues()]
        if not names:
            stop.wait(seconds)
            return
        if self._clock() < self._pops_after:
            stop.wait(min(seconds, 0.2))
            return
        try:
            self._display.show_alive()
            found: Any = self._client.blpop(names, timeout=max(0.05, min(seconds, 1.0)))
        except _redis.failures() as error:
            self._note_failure(error)
            stop.wait(min(seconds, 0.5))
            return
        self._breaker.succeeded()
        if found:
            key, raw = found
            self._popped.append(
                (_text(raw), Priority(key.decode().removeprefix(list_key(self._queue.backend.rq.prefix))))
            )

    def settled(self, tasks: Iterable[Task]) -> None:
        self._display.ended(tasks)

    def close(self) -> None:
        with suppress(*_redis.failures()):
            self._foreign.put_back()
        self._display.close()
        self._client.close()

    # ---- hints -------------------------------------------------------------------------------------------------------

    def _pop(self, queues: Sequence[Priority], limit: int) -> list[Hint] | None:
        """Pop up to ``limit`` ids in order of service; None if Redis cannot be asked now."""
        hints, self._popped = self._popped, []
        if hints or not self._breaker.allow():
            return hints or None  # serve what `wait` has popped at once; the next claim pops more
        if self._clock() < self._pops_after:
            return None
        paused = self._paused_queues()
        try:
            self._foreign.put_back()
            for queue in queues:
                if queue in paused:
                    continue
                found: Any = self._client.lpop(self._lists[queue], limit - len(hints))
                hints += [(_text(raw), queue) for raw in found or ()]
                if len(hints) >= limit:
                    break
        except _redis.failures() as error:
            self._note_failure(error)
            return hints or None
        self._breaker.succeeded()
        return hints

    def _claim_hinted(self, who: Claimant, queues: Sequence[Priority], hints: Sequence[Hint]) -> list[Claim]:
        """Claim as many rows as there are hints.

        A hint says that a task waits in its queue. Which row is next, the rows decide, because users take turns.
        """
        hinted_queues = {queue for _, queue in hints}
        claimed: list[Claim] = []
        try:
            # Queues before the hinted ones are included: RQ may have no hint of their tasks (an overflow, an id with a dot).
            first = queues[: max((n for n, queue in enumerate(queues, 1) if queue in hinted_queues), default=0)]
            claimed = self._claim_rows(who, first, len(hints))
            if not claimed and len(first) < len(queues):
                # The hinted tasks are not ours, or this worker has no handler for them. Claim from the queues behind
                # instead.
                claimed = self._claim_rows(who, queues, len(hints))
            statuses = self._mark_unclaimed(hints, claimed)
        except HeadwayError:
            ids = {claim.id for claim in claimed}
            # Claim the others when the database is reachable again.
            self._popped = [*(hint for hint in hints if hint[0] not in ids), *self._popped]
            if not claimed:
                raise
            return claimed
        known = {claim.id for claim in claimed} | statuses.keys()
        strangers = [hint for hint in hints if hint[0] not in known]
        self._foreign.refuse(strangers)
        if len(strangers) == len(hints):
            self._pops_after = self._clock() + _FOREIGN_REST
        self._delete_jobs(statuses)
        return claimed

    def _mark_unclaimed(self, hints: Sequence[Hint], claimed: Sequence[Claim]) -> dict[str, Status]:
        """Mark hinted tasks that still wait as not hinted; return the status of each hinted task that was not claimed."""
        ids = {claim.id for claim in claimed}
        rest = [task_id for task_id, _ in hints if task_id not in ids and _is_valid(task_id)]
        if not rest:
            return {}

        def work(tx: Tx) -> dict[str, Status]:
            statuses = hint_marks.statuses(tx, rest)
            # Where a hint led to another row, that row's own hint remains in RQ and serves this one. Where it led to none
            # (paused, over a limit), or to a row without a hint, RQ needs a new hint, from the sweeper or a polling worker.
            hinted_ids = {task_id for task_id, _ in hints}
            spare = Counter(claim.priority for claim in claimed if claim.hinted and claim.id not in hinted_ids)
            without: set[str] = set()
            for task_id, queue in hints:
                if statuses.get(task_id) is Status.QUEUED:
                    if spare[queue] > 0:
                        spare[queue] -= 1
                    else:
                        without.add(task_id)
            hint_marks.unhint(tx, without)
            return statuses

        return self._queue.database.run(work, operation="queue.claim")

    def _delete_jobs(self, statuses: Mapping[str, Status]) -> None:
        """Delete the RQ jobs of ended tasks: a second hint wrote them again after the end."""
        over = [RqJob.key_for(id) for id, status in statuses.items() if status in (Status.COMPLETED, Status.CANCELLED)]
        failed = [RqJob.key_for(id) for id, status in statuses.items() if status is Status.FAILED]
        if not over and not failed:
            return
        with suppress(*_redis.failures()):
            pipeline = self._client.pipeline(transaction=False)
            if over:
                pipeline.delete(*over)
            for key in failed:  # they stay in RQ's registry of failed jobs for as long
                pipeline.expire(key, FAILED_SECONDS)
            pipeline.execute()

    def _claim_rows(
        self, who: Claimant, queues: Sequence[Priority], limit: int, *, unhinted: bool = False
    ) -> list[Claim]:
        return claims.claim_next(self._queue.database, who, queues=queues, limit=limit, unhinted=unhinted)

    def _paused_queues(self) -> frozenset[Priority]:
        """Return the paused queues as of at most a second ago. The claim itself checks again."""
        at, known = self._paused
        if self._clock() - at > _POLL_SECONDS:
            with self._queue.database.read() as tx:
                known = frozenset(paused_queues(tx, tx.now()))
            self._paused = (self._clock(), known)
        return known

    def _note_failure(self, error: BaseException) -> None:
        if self._breaker.failed():
            log.warning(
                "Redis is unreachable; tasks are claimed from the database", worker=self._name, error=redact(str(error))
            )


class _ForeignJobs:
    """Ids in our queues that are not tasks of this database."""

    def __init__(self, client: Redis, names: Mapping[Priority, str], lists: Mapping[Priority, str]) -> None:
        self._client, self._names, self._lists = client, names, lists
        self._waiting: list[Hint] = []  # to be put back
        self._logged: set[str] = set()

    def refuse(self, strangers: Sequence[Hint]) -> None:
        """Log the ids, and put the jobs of other applications back."""
        for task_id, queue in strangers:
            metrics.count("headway_queue_refused")
            message = self._judge(task_id, queue)
            if task_id not in self._logged:
                if len(self._logged) >= _REMEMBERED:
                    self._logged.clear()
                self._logged.add(task_id)
                shown = ascii(task_id)[1:-1]
                shown = shown if len(shown) <= 60 else shown[:57] + "..."
                log.critical(f"security: {message}", key=shown, queue=self._names[queue])
        with suppress(*_redis.failures()):
            self.put_back()

    def _judge(self, task_id: str, queue: Priority) -> str:
        """Decide what to do with an id; return the log message."""
        key = RqJob.redis_job_namespace_prefix.encode() + _raw(task_id)
        try:
            description: Any = self._client.hget(key, "description")
            exists = description is not None or self._client.exists(key)
        except _redis.failures():
            description, exists = None, True  # unknown: put it back
        if description == DESCRIPTION.encode():
            with suppress(*_redis.failures()):
                self._client.expire(key, FAILED_SECONDS)
            return "a hint in RQ is not a task of this database: give each deployment its own queue_prefix"
        if exists:
            self._waiting.append((task_id, queue))
            return "a job of another RQ application was put back: it uses a queue of ours, see queue_prefix"
        return "an id in RQ is neither a task nor a job: it was dropped"

    def put_back(self) -> None:
        """Return jobs to the end of their queues. After an error of Redis the next call continues."""
        while self._waiting:
            task_id, queue = self._waiting[0]
            self._client.rpush(self._lists[queue], _raw(task_id))
            del self._waiting[0]


def _is_valid(task_id: str) -> bool:
    """Return whether the database accepts the id in a query: PostgreSQL, for example, refuses U+0000."""
    try:
        check_id(task_id, "a task id")
    except InvalidInput:
        return False
    return True


def _text(raw: bytes) -> str:
    """Decode an id from RQ so that `_raw` restores any bytes."""
    return raw.decode("utf-8", "surrogateescape")


def _raw(task_id: str) -> bytes:
    return task_id.encode("utf-8", "surrogateescape")
