"""`FinishLine`: what a program calls. See the package."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Self, TypeVar
from weakref import WeakSet

from headway import _redis, _sql
from headway.core.lifecycle import Budget, Flag, Shutdown, undisturbed
from headway.core.retry import REDIS_OPERATION, RetryPolicy
from headway.errors import InvalidInput, Refused, Unavailable
from headway.events import RedisOutbox, Relay, Sink
from headway.finishline.callers import Callers
from headway.finishline.checkpointer import INTERVAL, Checkpointer
from headway.finishline.progress import (
    NOT_FOUND,
    Answer,
    Outcome,
    Progress,
    Status,
    checked_project,
    checked_status,
    checked_total,
    corrupt,
    from_hash,
    identity,
)
from headway.finishline.rebuild import Deletion, Rebuilder, not_ours, project_keys
from headway.finishline.server import DRAIN_SECONDS, StateServer
from headway.finishline.store.deliveries import Deliveries
from headway.finishline.store.journal import Journal, cut
from headway.finishline.store.records import LIFE, Records, Row, no_project
from headway.telemetry import Log, metrics

log = Log("finishline")

ItemId = int | str
T = TypeVar("T")

#: Items of one call: Redis does nothing else while it counts them (about 20 ms).
BATCH_LIMIT = 10_000
#: Undelivered events beyond which somebody is alerted: nobody relays, or a sink stays away.
EVENTS_ALERT = 100_000

_CHANGE = "finishline/change"

_lines: WeakSet[FinishLine] = WeakSet()


class _Remade(Exception):
    """The project was deleted and created again between what SQL heard and what Redis heard."""


def _begin_in_child() -> None:
    """In a forked child, before any of its threads exists: no line shares callers, locks or sockets with the parent."""
    for line in list(_lines):
        line._begin_process()  # noqa: SLF001  # a function of this class, registered once for all lines


os.register_at_fork(after_in_child=_begin_in_child)


class FinishLine:
    """See the package. Safe to use from many threads, and after a fork."""

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
        checkpointer: bool = True,
        interval: float = INTERVAL,
    ) -> None:
        """``alert`` is called once per outage of 5 s. ``checkpointer=False`` leaves checkpoints and rebuilding after an
        outage to whoever calls ``line.checkpointer.tick()``."""
        if journal and database is None:
            raise InvalidInput("A journal needs a database.", hint="Give one: FinishLine(url, database=...)")
        self._server = StateServer(
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
            database = self._owned = _sql.connect(database, stop=self._server.shutdown.stop)
        self._database = database
        self._journaled = journal
        self._records = Records(database) if database is not None else None
        self._runs_checkpointer = checkpointer and database is not None
        self._interval = interval
        self._over: set[str] = set()  # projects that were seen with more done than their total
        self._begin_process()
        _lines.add(self)

    # ---- the life of a project -----------------------------------------------------------------------------

    def create(self, project_id: str, total: int = 0) -> Progress:
        """Begin a project, INITIALIZING with all counters 0. One that exists is left alone and returned as it is.

        With a database this succeeds while Redis is away; the project is put there when it is back. `Refused` if a
        project of this name that was created without a database is there.
        """
        project_id = checked_project(project_id)
        checked_total(total)
        with self._server.operation:
            self._accept()
            if self._records is not None and self._rebuilder is not None:
                return self._create_recorded(self._records, self._rebuilder, project_id, total)
            arguments: list[str | int] = [uuid.uuid4().hex[:12], total]
            self._send("create", "finishline/create", project_id, arguments)
            return self._server.read("create", project_id, partial(self._look, project_id)) or NOT_FOUND

    def _create_recorded(self, records: Records, rebuilder: Rebuilder, project_id: str, total: int) -> Progress:
        """SQL first, and both under the project's lease, so that a deletion comes before or after and never between."""
        made: list[tuple[Row, bool]] = []
        sent: list[Row] = []

        def record(*, live: bool) -> tuple[Row, bool]:
            if not made:
                made.append(records.create(project_id, total=total, journaled=self._journaled, live=live))
            return made[0]

        def install() -> Outcome:
            with rebuilder.lease(project_id) as lease:
                assert lease is not None  # it was waited for
                if not made and records.find(project_id) is None:
                    self._refuse_others(records, project_id)
                row, new = record(live=True)
                sent.append(row)
                return rebuilder.install(row, lease, first=new)

        def work() -> None:
            if rebuilder.under_a_lease(project_id, install) is Outcome.COMPLETED:
                self._completed(project_id)

        try:
            self._server.read("create", project_id, work)
            found = self._server.read("create", project_id, partial(self._look, project_id))
            return found or record(live=True)[0].progress()
        except Unavailable:
            row, new = record(live=False)  # raises once more if it is SQL that is away
            if new and not sent:  # else Redis may have it, and what others count there can be lost
                records.not_live(row)
            log.warning(
                "the project is recorded; Redis gets it when it is back", operation="create", project_id=project_id
            )
            return row.progress()

    def _refuse_others(self, records: Records, project_id: str) -> None:
        """A project that our database does not know may be in Redis: of no database, or of another one."""
        pipeline = self._server.client.pipeline(transaction=False)  # MULTI is refused by a full server
        pipeline.exists(_redis.PROJECT(project_id=project_id))
        pipeline.hget(_redis.PROJECT_META(project_id=project_id), "record")
        there, record = pipeline.execute()
        if there and record != records.database():
            raise not_ours(project_id)

    def set_total(self, project_id: str, total: int) -> Answer:
        """How many items there are. It may be raised and lowered until the project is DONE."""
        return self._change("set_total", project_id, total=checked_total(total))

    def set_status(self, project_id: str, status: Status | str) -> Answer:
        """INITIALIZING, CRAWLING, PROCESSING or FAILED. Leaving CRAWLING may finish the project."""
        status = checked_status(status)
        crawled = False if status is Status.CRAWLING else None
        return self._change("set_status", project_id, status=status, crawled=crawled)

    def finish_crawl(self, project_id: str, total: int | None = None) -> Answer:
        """All items are known. This is also how a project without any item finishes.

        `InvalidInput` when items are through and nobody said how many there are: it waits for `set_total` then.
        """
        total = None if total is None else checked_total(total)
        return self._change("finish_crawl", project_id, total=total, status=Status.PROCESSING, crawled=True)

    def touch(self, project_id: str) -> bool:
        """Let a project live for another 7 days although nothing happens in it; False when it is not there."""
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            call = partial(_redis.script("finishline/touch"), self._server.client, _keys(project_id), [LIFE, "-", 0])
            return bool(self._server.write("touch", project_id, call)[0] == "TOUCHED")

    def delete(self, project_id: str) -> bool:
        """Forget a project and everything counted in it; whether there was one. While Redis is away nothing is deleted."""
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            deletion = Deletion(self._server, self._records, project_id)
            if self._rebuilder is None:
                return bool(self._server.write("delete", project_id, deletion.work))
            return self._server.write("delete", project_id, partial(self._rebuilder.remove, project_id, deletion))

    # ---- counting ------------------------------------------------------------------------------------------

    def item_done(self, project_id: str, item_id: ItemId | None = None) -> Answer:
        """One more item is through. With ``item_id`` it counts once however often it is said, by whomever."""
        return self._count("item_done", project_id, () if item_id is None else (item_id,), "+")

    def item_failed(
        self, project_id: str, item_id: ItemId | None = None, error: str | BaseException | None = None
    ) -> Answer:
        """One more item is through and failed: it counts as done and as an error."""
        why = _described(error)
        if why is not None:
            log.info("an item failed", operation="item_failed", project_id=project_id, error=cut(why))
        return self._count("item_failed", project_id, () if item_id is None else (item_id,), "-", error=why)

    def items_done(self, project_id: str, item_ids: Iterable[ItemId]) -> Answer:
        """Many items in one round trip, one step: all of them count, or none."""
        return self._count("items_done", project_id, _many(item_ids), "+", many=True)

    def items_failed(
        self, project_id: str, item_ids: Iterable[ItemId], error: str | BaseException | None = None
    ) -> Answer:
        return self._count("items_failed", project_id, _many(item_ids), "-", error=_described(error), many=True)

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
        project_id = checked_project(project_id)
        if many and not 1 <= len(item_ids) <= BATCH_LIMIT:
            raise InvalidInput(
                f"{len(item_ids)} items cannot be counted in one call.", hint=f"Give 1 to {BATCH_LIMIT:,} at a time."
            )
        items = [identity(item_id) for item_id in item_ids]
        with self._server.operation:
            self._accept()
            if not self._journaled:
                return self._send(
                    operation, "finishline/count", project_id, ["", "", *[sign + item for item in items or ["*1"]]]
                )
            # Without an item id the call is the identity: it is repeated by us alone, under this name.
            items = items or [f"$op:{uuid.uuid4().hex}"]
            wanted = dict.fromkeys(items, (sign == "-", cut(error)))
            return self._for_one_project(project_id, partial(self._count_journaled, operation, project_id, wanted))

    def _count_journaled(self, operation: str, project_id: str, wanted: dict[str, tuple[bool, str | None]]) -> Answer:
        written = self._journal.write(project_id, wanted)
        signed = [("-" if failed else "+") + item for item, failed in written.verdicts.items()]
        answer = self._send(operation, "finishline/count", project_id, [written.epoch, written.version, *signed])
        if written.fresh and not answer.counted:
            # The project was rebuilt from the journal between our commit and this: our items counted there.
            outcome = Outcome.COUNTED if answer.outcome is Outcome.DUPLICATE else answer.outcome
            return replace(answer, outcome=outcome, counted=written.fresh)
        return answer

    # ---- asking --------------------------------------------------------------------------------------------

    def progress(self, project_id: str) -> Progress:
        """One HGETALL. NOT_FOUND for a project that is not there; `Unavailable`, at once, while Redis is away."""
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            found = self._server.read("progress", project_id, partial(self._look, project_id))
            if found is None:
                return self._recall(project_id)
            if 0 < found.total < found.done and project_id not in self._over and len(self._over) < 10_000:
                self._over.add(project_id)
                log.warning(
                    "more items are done than the total says",
                    operation="progress", project_id=project_id, done=found.done, total=found.total,
                )  # fmt: skip
            return found

    def _look(self, project_id: str) -> Progress | None:
        fields: Any = self._server.client.hgetall(_redis.PROJECT(project_id=project_id))
        return from_hash(project_id, fields)

    def _recall(self, project_id: str) -> Progress:
        """Redis does not have it. A project that is over is answered by SQL, one under way is brought back."""
        row = self._records.find(project_id) if self._records is not None else None
        if row is None or self._records is None or self._rebuilder is None:
            return NOT_FOUND
        if self._records.is_over(row):
            return row.progress()
        self._restore("progress", project_id, self._server.read)
        return self._server.read("progress", project_id, partial(self._look, project_id)) or row.progress()

    # ---- events, shutdown ----------------------------------------------------------------------------------

    def relay(self, sinks: Sequence[Sink], *, rest: float = 0.5) -> Relay:
        """Who delivers ``job.completed`` to ``sinks``: run it in a thread or a process of its own (`Relay.run`)."""
        return Relay(self.outbox(), sinks, rest=rest)

    def outbox(self) -> RedisOutbox:
        """Where ``job.completed`` waits, for a relay that serves other outboxes too."""
        if self._database is None or self._records is None:
            return RedisOutbox(self._server.client)
        deliveries = Deliveries(self._database, self._records)
        return RedisOutbox(self._server.client, on_delivered=deliveries.settled, notes=deliveries)

    def close(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Accept nothing new, wait for what is under way, close the pools; whether all of it ended in time."""
        budget = Budget(seconds)
        self._stop_checkpointer.set()
        drained = self._server.drain(budget.left)
        if self._checkpointer_thread is not None:
            self._checkpointer_thread.join(max(0.5, budget.left))  # it uses the same pool, which is closed after it
        self._server.close()
        if self._owned is not None:
            self._owned.close()
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- within --------------------------------------------------------------------------------------------

    def _begin_process(self) -> None:
        """What a forked child must not share with its parent: names of callers, locks, sockets, threads."""
        self._server.begin_process()
        self._callers = Callers()
        self._many_events = False
        self._starting = threading.Lock()
        self._stop_checkpointer = Flag()
        self._checkpointer_thread: threading.Thread | None = None
        self._rebuilder: Rebuilder | None = None
        self.checkpointer: Checkpointer | None = None
        if self._database is not None and self._records is not None:
            self._journal = Journal(self._database)
            self._rebuilder = Rebuilder(self._server, self._records)
            self.checkpointer = Checkpointer(self._server, self._records, self._rebuilder, interval=self._interval)

    def _accept(self) -> None:
        self._server.accept()
        if self._runs_checkpointer and self._checkpointer_thread is None:
            undisturbed(self._start_checkpointer)  # interrupted while it starts, a thread would never run

    def _start_checkpointer(self) -> None:
        with self._starting:
            if self._checkpointer_thread is None and self.checkpointer is not None:
                thread = threading.Thread(
                    target=self.checkpointer.run,
                    args=(self._stop_checkpointer,),
                    name="headway-checkpointer",
                    daemon=True,
                )
                self._checkpointer_thread = thread
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
        project_id = checked_project(project_id)

        def work() -> Answer:
            if self._records is not None:
                # SQL first: it orders the changes, and what Redis hears of is all of them up to this one.
                row = self._records.change(project_id, total=total, status=status, crawled=crawled)
                if row is None:
                    raise no_project(project_id)
                return self._send(operation, _CHANGE, project_id, row.as_change())
            given = (total, status, None if crawled is None else int(crawled))
            return self._send(
                operation, _CHANGE, project_id, ["", *["" if word is None else word for word in given], ""]
            )

        with self._server.operation:
            self._accept()
            return self._for_one_project(project_id, work)

    def _for_one_project(self, project_id: str, work: Callable[[], T]) -> T:
        """``work`` tells SQL, then Redis. It is done again when the project was deleted and created again in between, so
        that both hear it of the same project: what SQL said of the one before must not reach the one after."""
        for _ in range(20):
            with suppress(_Remade):
                return work()
        raise Unavailable(f"Project {project_id!r} was deleted and created again each time it was changed.")

    def _send(self, operation: str, script: str, project_id: str, arguments: Sequence[str | int]) -> Answer:
        """One script under one identity: repeated by `StateServer.write` after a lost reply, it answers the same."""
        caller = self._callers.take()
        try:
            caller.calls += 1
            by = f"{caller.name}.{caller.calls}"
            call = partial(
                caller.run,
                self._server.client,
                _redis.script(script),
                _keys(project_id),
                [LIFE, caller.name, caller.calls, *arguments],
            )
            restored, crossed = None, False
            for _ in range(20):  # it may be lost again right after it was rebuilt
                outcome, done, counted, *epoch = self._server.write(operation, project_id, call)
                if outcome == "BEHIND":
                    crossed = self._catch_up(operation, project_id) or crossed
                    continue
                if outcome != "NOT_FOUND" or self._rebuilder is None:
                    break
                restored = self._restore(operation, project_id, self._server.write, by)
                crossed = crossed or restored is Outcome.COMPLETED
                if restored is None:
                    break
        finally:
            self._callers.give_back(caller)
        if outcome == "REMADE":
            # Should it be Redis that has the older one of the two, the record replaces it.
            self._restore(operation, project_id, self._server.write)
            raise _Remade
        if outcome == "BEHIND" or (outcome == "NOT_FOUND" and restored is not None):
            raise Unavailable(f"Redis lost project {project_id!r} again each time it was rebuilt.")
        _refuse(operation, project_id, outcome, int(done))
        if crossed:
            outcome = Outcome.COMPLETED  # the journal had our own item as its last one, and rebuilding crossed the line
        elif outcome == Outcome.COMPLETED and not self._completed(project_id, by, *epoch):
            # Redis had said so before, to another call, and lost it since.
            outcome = Outcome.UPDATED if script == _CHANGE else Outcome.COUNTED if int(counted) else Outcome.DUPLICATE
        return Answer(Outcome.UPDATED if outcome == "NO_TOTAL" else Outcome(outcome), int(done), int(counted))

    def _catch_up(self, operation: str, project_id: str) -> bool:
        """Redis has an older total or status than SQL: whoever changed it is between the two, or Redis came back older.
        Whether the project was completed by this."""
        assert self._records is not None
        row = self._records.find(project_id)
        if row is None:
            raise no_project(project_id)
        if row.completed_at is not None:
            return self._restore(operation, project_id, self._server.write) is Outcome.COMPLETED
        return self._send(operation, _CHANGE, project_id, row.as_change()).completed

    def _restore(
        self, operation: str, project_id: str, how: Callable[..., Any], by: str | None = None
    ) -> Outcome | None:
        """Bring it back, by `StateServer.read` or `write`."""
        assert self._rebuilder is not None
        outcome: Outcome | None = how(operation, project_id, partial(self._rebuilder.restore, project_id))
        if outcome is Outcome.COMPLETED and not self._completed(project_id, by):
            return Outcome.COUNTED  # it is DONE, and that was answered to another call
        return outcome

    def _completed(self, project_id: str, by: str | None = None, epoch: str | None = None) -> bool:
        """A project (the one of this epoch; without it, the one there is) was completed here: SQL learns it at once, and
        somebody if nobody takes the events. Should either fail, the checkpointer's next round or the relay notes it.
        Whether the call ``by`` is the one that did it."""
        first = True
        try:
            if self._rebuilder is not None:
                first = by is None or self._rebuilder.claim_completion(project_id, epoch, by)
                self._rebuilder.completed(project_id)
            waiting = int(self._server.client.xlen(_redis.EVENTS()))
            metrics.gauge("headway_events_waiting", waiting)
            many, before = waiting >= EVENTS_ALERT, self._many_events
            self._many_events = many
            if many and not before:
                self._server.alert(
                    f"{waiting:,} events wait in Redis at {_redis.place(self._server.url)}: no relay delivers them",
                    operation="events", count=waiting,
                )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # the project *is* complete: its caller must hear that
            log.warning("the completion is noted later", project_id=project_id, error=str(error))
        return first


def _refuse(operation: str, project_id: str, outcome: str, done: int) -> None:
    """Raise what an outcome that is no answer means."""
    if outcome == "NOT_FOUND":
        raise no_project(project_id)
    if outcome == "CORRUPT":
        raise corrupt(project_id)
    if outcome == "JOURNALED":
        raise Refused(
            f"Project {project_id!r} keeps a journal; a count beside it would be lost with Redis.",
            hint="Open the finish line with the same database and journal=True.",
        )
    if outcome == "RECORDED":
        raise Refused(
            f"Project {project_id!r} has its total and status in a database; a change beside it would be lost.",
            hint="Open the finish line with the same database.",
        )
    if outcome == "NO_TOTAL" and operation == "finish_crawl":
        raise InvalidInput(
            f"{done:,} items of project {project_id!r} are through, and its total is 0: it cannot tell when it is done.",
            hint=f"Say how many items there are: finish_crawl({project_id!r}, total=...), or set_total.",
        )


def _many(item_ids: Iterable[ItemId]) -> Sequence[ItemId]:
    if isinstance(item_ids, str | bytes | bytearray) or not isinstance(item_ids, Iterable):
        raise InvalidInput(
            f"A {type(item_ids).__name__} is not a collection of items.", hint="Give a list; one item: item_done."
        )
    return tuple(item_ids)


def _described(error: str | BaseException | None) -> str | None:
    """What an error says; one that cannot say it is named by its type."""
    if error is None or isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # foreign code: its item must be counted all the same
        return type(error).__name__


@lru_cache(maxsize=4096)
def _keys(project_id: str) -> list[str]:
    return project_keys(project_id)
