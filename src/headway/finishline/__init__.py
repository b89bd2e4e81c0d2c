"""The finish line: counters of a project in Redis that tell, once, when all of it is through.

    line = FinishLine("redis://localhost/1", database="postgresql://headway@db/headway")
    line.create("site-7")
    line.set_status("site-7", Status.CRAWLING)          # it cannot finish while items are still being discovered
    line.item_done("site-7", "page-1")                  # from any process, any number of times
    line.item_failed("site-7", "page-2", error="404")
    line.finish_crawl("site-7", total=2).completed      # True: this call was the one that finished it

Every change is one Lua script: it counts by identity, refreshes the lifetime, looks at the finish line and, where
that is crossed, appends ``job.completed`` to the outbox stream. So one call per project answers COMPLETED, also
when replies are lost and calls repeated, and the event exists exactly when the project is DONE. A `Relay` tells the
event at least once, with a fixed id.

Redis alone is as durable as that Redis is. With ``database`` the project's record is in SQL: it can be created while
Redis is away, is checkpointed every 5 s and rebuilt when Redis lost it. With ``journal=True`` each count is committed
to SQL before it is acknowledged, and what is rebuilt is exact.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

from headway import _redis, _sql
from headway.errors import InvalidInput, Refused, Unavailable
from headway.events import Event, RedisOutbox, Relay, Sink
from headway.finishline.keeper import INTERVAL, TTL, Keeper, project_keys
from headway.finishline.link import DRAIN_SECONDS, Link
from headway.finishline.progress import (
    NOT_FOUND,
    Answer,
    Outcome,
    Progress,
    Status,
    checked_status,
    checked_total,
    corrupt,
    from_hash,
    identity,
)
from headway.finishline.reader import AsyncProgress
from headway.finishline.record import Journal, Record, cut, no_project
from headway.ids import check_id
from headway.lifecycle import Budget, Shutdown
from headway.retry import REDIS_OPERATION, RetryPolicy
from headway.telemetry import Log

if TYPE_CHECKING:
    from redis import Redis

__all__ = ["Answer", "AsyncProgress", "FinishLine", "Outcome", "Progress", "Status"]

log = Log("finishline")

ItemId = int | str
T = TypeVar("T")

#: Items of one call: Redis does nothing else while it counts them (about 20 ms).
BATCH_LIMIT = 10_000
#: Seconds after which an unused connection is looked at before it is used.
_IDLE = 0.25


class _Lane:
    """One caller as the scripts know it. It makes one call at a time, numbers them, and keeps its connection."""

    __slots__ = ("calls", "connection", "name", "used")

    def __init__(self, name: str) -> None:
        self.name = name
        self.calls = 0
        self.connection: Any = None
        self.used = 0.0

    def run(self, client: Redis, script: _redis.Script, keys: Sequence[str], arguments: Sequence[str | int]) -> Any:
        connection = self.connection
        if connection is None:
            connection = self.connection = _redis.borrow(client)
        elif time.monotonic() - self.used > _IDLE:
            self._freshen()
        try:
            return script.on(connection, keys, arguments)
        except _redis.failures() as error:
            if _redis.is_transient(error):
                self.connection = None
                connection.disconnect()  # also from a master that became a replica and still answers
                client.connection_pool.release(connection)
            raise
        finally:
            self.used = time.monotonic()

    def _freshen(self) -> None:
        """A server that was restarted meanwhile has closed its end: see that before a call is risked on it."""
        try:
            stale = self.connection.can_read()
        except _redis.failures():
            stale = True
        if stale:
            self.connection.disconnect()


class FinishLine:
    """See the module. Safe to use from many threads, and after a fork."""

    def __init__(
        self,
        state_url: str,
        database: str | _sql.Database | None = None,
        journal: bool = False,
        *,
        shutdown: Shutdown | None = None,
        alert: Callable[[str], None] | None = None,
        allow_eviction: bool = False,
        timeout: float = _redis.TIMEOUT,
        retry: RetryPolicy = REDIS_OPERATION,
        keeper: bool = True,
        interval: float = INTERVAL,
    ) -> None:
        """``alert`` is called once per outage of 5 s. ``keeper=False`` leaves checkpoints and rebuilding after an
        outage to whoever calls ``line.keeper.tick()``."""
        if journal and database is None:
            raise InvalidInput("A journal needs a database.", hint="Give one: FinishLine(url, database=...)")
        self._link = Link(
            state_url,
            shutdown=shutdown,
            alert=alert,
            allow_eviction=allow_eviction,
            durable=journal,
            timeout=timeout,
            policy=retry,
        )
        self._owned: _sql.Database | None = None
        if isinstance(database, str):
            database = self._owned = _sql.connect(database, stop=self._link.shutdown.stop)
        self._database = database
        self._journaled = journal
        self._record = Record(database) if database is not None else None
        self._keeps = keeper and database is not None
        self._interval = interval
        self._over: set[str] = set()  # projects that were seen with more done than their total
        self._begin_process()

    # ---- the life of a project -----------------------------------------------------------------------------

    def create(self, project_id: str, total: int = 0) -> Progress:
        """Begin a project, INITIALIZING with all counters 0. One that exists is left alone and returned as it is.

        With a database this succeeds while Redis is away; the project is put there when it is back.
        """
        check_id(project_id, "a project id")
        checked_total(total)
        self._enter()
        try:
            if self._record is not None and self.keeper is not None:
                return self._create_recorded(self._record, self.keeper, project_id, total)
            arguments: list[str | int] = [uuid.uuid4().hex[:12], total, 0, ""]
            self._send("create", "finishline/create", project_id, arguments)
            return self._link.read("create", project_id, partial(self._look, project_id)) or NOT_FOUND
        finally:
            self._link.leave()

    def _create_recorded(self, record: Record, keeper: Keeper, project_id: str, total: int) -> Progress:
        row, new = record.create(project_id, total=total, journaled=self._journaled, live=not self._link.away)
        try:
            if new:
                self._link.read("create", project_id, partial(keeper.install, row, first=True))
            else:
                self._link.read("create", project_id, partial(keeper.restore, project_id))
            return self._link.read("create", project_id, partial(self._look, project_id)) or row.progress()
        except Unavailable:
            if new:
                record.not_live(row)
            log.warning(
                "the project is recorded; Redis gets it when it is back", operation="create", project_id=project_id
            )
            return row.progress()

    def set_total(self, project_id: str, total: int) -> Answer:
        """How many items there are. It may be raised and lowered until the project is DONE."""
        return self._change("set_total", project_id, total=checked_total(total))

    def set_status(self, project_id: str, status: Status | str) -> Answer:
        """INITIALIZING, CRAWLING, PROCESSING or FAILED. Leaving CRAWLING may finish the project."""
        status = checked_status(status)
        crawled = False if status is Status.CRAWLING else None
        return self._change("set_status", project_id, status=status, crawled=crawled)

    def finish_crawl(self, project_id: str, total: int | None = None) -> Answer:
        """All items are known. This is also how a project without any item finishes."""
        total = None if total is None else checked_total(total)
        return self._change("finish_crawl", project_id, total=total, status=Status.PROCESSING, crawled=True)

    def touch(self, project_id: str) -> bool:
        """Let a project live for another 7 days although nothing happens in it; False when it is not there."""
        check_id(project_id, "a project id")

        def work() -> bool:
            pipeline = self._link.client.pipeline(transaction=True)
            for name in project_keys(project_id)[:4]:
                pipeline.expire(name, TTL)
            return bool(pipeline.execute()[0])

        return self._guarded("touch", project_id, work)

    def delete(self, project_id: str) -> bool:
        """Forget a project and everything counted in it; whether there was one."""
        check_id(project_id, "a project id")
        recorded = self._record is not None and self._record.delete(project_id)
        names = project_keys(project_id)[:4]
        return bool(self._guarded("delete", project_id, lambda: self._link.client.delete(*names))) or recorded

    # ---- counting ------------------------------------------------------------------------------------------

    def item_done(self, project_id: str, item_id: ItemId | None = None) -> Answer:
        """One more item is through. With ``item_id`` it counts once however often it is said, by whomever."""
        return self._count("item_done", project_id, () if item_id is None else (item_id,), "+")

    def item_failed(
        self, project_id: str, item_id: ItemId | None = None, error: str | BaseException | None = None
    ) -> Answer:
        """One more item is through and failed: it counts as done and as an error."""
        why = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error
        if why is not None:
            log.info("an item failed", operation="item_failed", project_id=project_id, error=cut(why))
        return self._count("item_failed", project_id, () if item_id is None else (item_id,), "-", error=why)

    def items_done(self, project_id: str, item_ids: Iterable[ItemId]) -> Answer:
        """Many items in one round trip, one step: all of them count, or none."""
        return self._count("items_done", project_id, tuple(item_ids), "+", many=True)

    def items_failed(self, project_id: str, item_ids: Iterable[ItemId], error: str | None = None) -> Answer:
        return self._count("items_failed", project_id, tuple(item_ids), "-", error=error, many=True)

    def _count(
        self,
        operation: str,
        project_id: str,
        item_ids: Sequence[ItemId],
        sign: str,
        *,
        error: str | None = None,
        many: bool = False,
    ) -> Answer:
        check_id(project_id, "a project id")
        if many and not 1 <= len(item_ids) <= BATCH_LIMIT:
            raise InvalidInput(
                f"{len(item_ids)} items cannot be counted in one call.", hint=f"Give 1 to {BATCH_LIMIT:,} at a time."
            )
        items = [identity(item_id) for item_id in item_ids]
        self._enter()
        try:
            if not self._journaled:
                return self._send(
                    operation, "finishline/count", project_id, ["", *[sign + item for item in items or ["*1"]]]
                )
            # Without an item id the call is the identity: it is repeated by us alone, under this name.
            items = items or [f"$op:{uuid.uuid4().hex}"]
            reason = cut(error)
            verdicts, fresh = self._journal.write(project_id, dict.fromkeys(items, (sign == "-", reason)))
            signed = [("-" if failed else "+") + item for item, failed in verdicts.items()]
            answer = self._send(operation, "finishline/count", project_id, ["journal", *signed])
            if fresh and not answer.counted:
                # The project was rebuilt from the journal between our commit and this: our items counted there.
                outcome = Outcome.COUNTED if answer.outcome is Outcome.DUPLICATE else answer.outcome
                return replace(answer, outcome=outcome, counted=fresh)
            return answer
        finally:
            self._link.leave()

    # ---- asking --------------------------------------------------------------------------------------------

    def progress(self, project_id: str) -> Progress:
        """One HGETALL. NOT_FOUND for a project that is not there; `Unavailable`, at once, while Redis is away."""
        check_id(project_id, "a project id")
        self._enter()
        try:
            found = self._link.read("progress", project_id, partial(self._look, project_id))
            if found is None:
                return self._recall(project_id)
            if 0 < found.total < found.done and project_id not in self._over and len(self._over) < 10_000:
                self._over.add(project_id)
                log.warning(
                    "more items are done than the total says",
                    operation="progress", project_id=project_id, done=found.done, total=found.total,
                )  # fmt: skip
            return found
        finally:
            self._link.leave()

    def _look(self, project_id: str) -> Progress | None:
        fields: Any = self._link.client.hgetall(_redis.PROJECT(project_id=project_id))
        return from_hash(project_id, fields)

    def _recall(self, project_id: str) -> Progress:
        """Redis does not have it. A finished project is answered by SQL, one under way is brought back."""
        row = self._record.find(project_id) if self._record is not None else None
        if row is None or self.keeper is None:
            return NOT_FOUND
        if row.completed_at is not None and row.told_at is not None:
            return row.progress()
        self._link.read("progress", project_id, partial(self.keeper.restore, project_id))
        return self._link.read("progress", project_id, partial(self._look, project_id)) or row.progress()

    # ---- events, shutdown ----------------------------------------------------------------------------------

    def relay(self, sinks: Sequence[Sink], *, rest: float = 0.5) -> Relay:
        """Who tells ``job.completed`` to ``sinks``: run it in a thread or a process of its own (`Relay.run`)."""
        return Relay(self.outbox(), sinks, rest=rest)

    def outbox(self) -> RedisOutbox:
        """Where ``job.completed`` waits, for a relay that serves other outboxes too."""
        return RedisOutbox(self._link.client, on_delivered=self._delivered)

    def _delivered(self, events: Sequence[Event]) -> None:
        """Every sink took these: should Redis lose its projects, they are not announced again."""
        if self._record is not None:
            for event in events:
                if event.type != "job.completed":
                    continue
                total, succeeded, failed = (int(str(event.data[name])) for name in ("total", "succeeded", "failed"))
                state = Progress(Status.DONE, total, succeeded + failed, failed)
                self._record.completed(event.job, event.id.rpartition(":")[2], state, told=True)

    def close(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Accept nothing new, wait for what is under way, close the pools; whether all of it ended in time."""
        if self._pid != os.getpid():
            self._begin_process()
        budget = Budget(seconds)
        self._stop_keeper.set()
        drained = self._link.drain(budget.left)
        if self._keeper_thread is not None:
            self._keeper_thread.join(max(0.5, budget.left))  # it uses the same pool, which is closed after it
        self._link.close()
        if self._owned is not None:
            self._owned.close()
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within --------------------------------------------------------------------------------------------

    def _begin_process(self) -> None:
        """What a forked child must not share with its parent: names of callers, locks, threads."""
        self._pid = os.getpid()
        self._caller = uuid.uuid4().hex[:16]
        self._lanes: list[_Lane] = []
        self._lane_count = 0
        self._lane_lock = threading.Lock()
        self._stop_keeper = threading.Event()
        self._keeper_thread: threading.Thread | None = None
        self.keeper: Keeper | None = None
        if self._database is not None and self._record is not None:
            self._journal = Journal(self._database)
            self.keeper = Keeper(self._link, self._record, interval=self._interval)

    def _enter(self) -> None:
        if self._pid != os.getpid():
            self._begin_process()
        self._link.enter()
        if self._keeps and self._keeper_thread is None:
            self._start_keeper()

    def _start_keeper(self) -> None:
        with self._lane_lock:
            if self._keeper_thread is None and self.keeper is not None:
                thread = threading.Thread(
                    target=self.keeper.run, args=(self._stop_keeper,), name="headway-keeper", daemon=True
                )
                self._keeper_thread = thread
                thread.start()

    def _change(
        self,
        operation: str,
        project_id: str,
        *,
        total: int | None = None,
        status: Status | None = None,
        crawled: bool | None = None,
    ) -> Answer:
        check_id(project_id, "a project id")
        self._enter()
        try:
            version: int | str = ""
            if self._record is not None:
                # SQL first: it orders the changes, and what Redis is told is all of them up to this one.
                row = self._record.change(project_id, total=total, status=status, crawled=crawled)
                if row is None:
                    raise no_project(project_id)
                version, total, crawled = row.version, row.total, row.crawled
                status = None if row.status is Status.DONE else row.status
            arguments = [
                version,
                "" if total is None else total,
                "" if status is None else status.value,
                "" if crawled is None else int(crawled),
            ]
            return self._send(operation, "finishline/change", project_id, arguments)
        finally:
            self._link.leave()

    def _guarded(self, operation: str, project_id: str, work: Callable[[], T]) -> T:
        self._enter()
        try:
            return self._link.write(operation, project_id, work)
        finally:
            self._link.leave()

    def _send(self, operation: str, script: str, project_id: str, arguments: Sequence[str | int]) -> Answer:
        """One script under one identity: repeated by `Link.write` after a lost reply, it answers the same again."""
        lane = self._borrow()
        try:
            lane.calls += 1
            call = partial(
                lane.run,
                self._link.client,
                _redis.script(script),
                _keys(project_id),
                [TTL, lane.name, lane.calls, *arguments],
            )
            restored = None
            for _ in range(20):  # it may be lost again right after it was rebuilt
                outcome, done, counted = self._link.write(operation, project_id, call)
                if outcome != "NOT_FOUND" or self.keeper is None:
                    break
                restored = self._link.write(operation, project_id, partial(self.keeper.restore, project_id))
                if restored is None:
                    break
        finally:
            self._lanes.append(lane)
        if outcome == "NOT_FOUND":
            if restored is not None:
                raise Unavailable(f"Redis lost project {project_id!r} again each time it was rebuilt.")
            raise no_project(project_id)
        if outcome == "CORRUPT":
            raise corrupt(project_id)
        if outcome == "JOURNALED":
            raise Refused(
                f"Project {project_id!r} keeps a journal; a count beside it would be lost with Redis.",
                hint="Open the finish line with the same database and journal=True.",
            )
        if restored is Outcome.COMPLETED:
            outcome = restored  # the journal had our own item as its last one, and rebuilding crossed the line
        answer = Answer(Outcome(outcome), int(done), int(counted))
        if answer.completed and self._record is not None:
            self._note_completion(project_id)
        return answer

    def _note_completion(self, project_id: str) -> None:
        """SQL learns it at once; should that fail, the keeper's next round or the relay tells it."""
        try:
            state = self._look(project_id)
            row = self._record.find(project_id) if self._record is not None else None
            if state is not None and row is not None and self._record is not None:
                self._record.completed(project_id, row.epoch, state)
        except Exception as error:  # noqa: BLE001  # the project *is* complete: its caller must hear that
            log.warning("the completion is noted later", project_id=project_id, error=str(error))

    def _borrow(self) -> _Lane:
        """A lane nobody else uses now: there are as many as calls were ever under way at once."""
        try:
            return self._lanes.pop()
        except IndexError:
            with self._lane_lock:
                self._lane_count += 1
                return _Lane(f"{self._caller}.{self._lane_count}")


@lru_cache(maxsize=4096)
def _keys(project_id: str) -> list[str]:
    return project_keys(project_id)
