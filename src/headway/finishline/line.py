"""`FinishLine`: the interface for programs. The package docstring has an overview."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Self
from weakref import WeakSet

from headway import _redis, _sql
from headway.core.lifecycle import Budget, Shutdown
from headway.core.retry import REDIS_OPERATION, RetryPolicy
from headway.errors import InvalidInput
from headway.events import RedisOutbox, Relay, Sink
from headway.finishline.checkpointer import INTERVAL, Checkpointer, CheckpointerThread
from headway.finishline.commands import CHANGE, COUNT, Commands, keys_of
from headway.finishline.creation import Creation, Deletion
from headway.finishline.progress import (
    NOT_FOUND,
    Answer,
    Outcome,
    Progress,
    Status,
    checked_project,
    checked_status,
    checked_total,
    identity,
)
from headway.finishline.rebuild import Rebuilder, read_progress
from headway.finishline.server import DRAIN_SECONDS, ServerOptions, StateServer
from headway.finishline.store.deliveries import Deliveries
from headway.finishline.store.journal import Journal, cut
from headway.finishline.store.records import LIFE, Records, no_project
from headway.telemetry import Log

log = Log("finishline")

ItemId = int | str

#: Items of one call. Redis executes nothing else while it counts them (about 20 ms).
BATCH_LIMIT = 10_000

_lines: WeakSet[FinishLine] = WeakSet()


def _begin_in_child() -> None:
    """Give a forked child its own callers, locks and sockets, before it starts any thread."""
    for line in list(_lines):
        line._begin_process()  # noqa: SLF001  # registered once for all instances of this class


os.register_at_fork(after_in_child=_begin_in_child)


class FinishLine:
    """Counts items of projects and reports, once, when all items of a project are counted.

    Safe to use from many threads, and after a fork.
    """

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
        """Open a finish line. No connection to Redis is made yet.

        ``alert`` is called once per outage of at least 5 s. ``interval`` is the time between two checkpoints in seconds.
        With ``checkpointer=False`` the program calls ``line.checkpointer.tick()`` itself.
        """
        if journal and database is None:
            raise InvalidInput("A journal needs a database.", hint="Give one: FinishLine(url, database=...)")
        options = ServerOptions(allow_eviction, durable=journal, timeout=timeout, retry=retry)
        self._server = StateServer(state_url, options, shutdown=shutdown, alert=alert)
        self._owned: _sql.Database | None = None
        if isinstance(database, str):
            database = self._owned = _sql.connect(database, stop=self._server.shutdown.stop)
        self._database = database
        self._journaled = journal
        self._records = Records(database) if database is not None else None
        self._runs_checkpointer = checkpointer
        self._interval = interval
        self._over: set[str] = set()  # projects that were logged for having more items than their total
        self._begin_process()
        _lines.add(self)

    # ---- the life of a project -----------------------------------------------------------------------------

    def create(self, project_id: str, total: int = 0) -> Progress:
        """Create a project, INITIALIZING with all counters 0. An existing one is returned unchanged.

        With a database this succeeds while Redis is away; the project is put there when it is back. Raises `Refused` if
        Redis has a project of this name that was created without this database.
        """
        project_id = checked_project(project_id)
        checked_total(total)
        with self._server.operation:
            self._accept()
            if self._records is not None and self._rebuilder is not None:
                creation = Creation(self._server, self._records, self._rebuilder, self._commands)
                return creation.run(project_id, total=total, journaled=self._journaled)
            self._commands.send("create", "finishline/create", project_id, [uuid.uuid4().hex[:12], total])
            return self._read("create", project_id) or NOT_FOUND

    def set_total(self, project_id: str, total: int) -> Answer:
        """Set the number of items. It may be raised and lowered until the project is DONE."""
        return self._change("set_total", project_id, total=checked_total(total))

    def set_status(self, project_id: str, status: Status | str) -> Answer:
        """Set the status to INITIALIZING, CRAWLING, PROCESSING or FAILED. Leaving CRAWLING may complete the project."""
        status = checked_status(status)
        crawled = False if status is Status.CRAWLING else None
        return self._change("set_status", project_id, status=status, crawled=crawled)

    def finish_crawl(self, project_id: str, total: int | None = None) -> Answer:
        """Declare that all items are known. A project without any item completes only by this call.

        Raises `InvalidInput` if items are counted and the total is 0. The project then waits for `set_total`.
        """
        total = None if total is None else checked_total(total)
        return self._change("finish_crawl", project_id, total=total, status=Status.PROCESSING, crawled=True)

    def touch(self, project_id: str) -> bool:
        """Keep an idle project for another 7 days. Return False if Redis does not have it."""
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            touch = _redis.script("finishline/touch")
            call = partial(touch, self._server.client, keys_of(project_id), [LIFE, "-", 0])
            return bool(self._server.write("touch", project_id, call)[0] == "TOUCHED")

    def delete(self, project_id: str) -> bool:
        """Delete a project and its counts. Return whether it existed. Raises `Unavailable` while Redis is away."""
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            deletion = Deletion(self._server, self._records, project_id)
            if self._rebuilder is None:
                return bool(self._server.write("delete", project_id, deletion.run))
            return self._server.write("delete", project_id, partial(deletion.run_under, self._rebuilder))

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
                # SQL first: it orders the changes, and Redis gets the result of all changes up to this one.
                row = self._records.change(project_id, total=total, status=status, crawled=crawled)
                if row is None:
                    raise no_project(project_id)
                return self._commands.send(operation, CHANGE, project_id, row.as_change())
            given = (total, status, None if crawled is None else int(crawled))
            arguments = ["", *["" if value is None else value for value in given], ""]
            return self._commands.send(operation, CHANGE, project_id, arguments)

        with self._server.operation:
            self._accept()
            return self._commands.for_one_project(project_id, work)

    # ---- counting ------------------------------------------------------------------------------------------

    def item_done(self, project_id: str, item_id: ItemId | None = None) -> Answer:
        """Count one item as done. With ``item_id`` it counts once, however often and by whichever process."""
        return self._count("item_done", project_id, () if item_id is None else (item_id,), "+")

    def item_failed(
        self, project_id: str, item_id: ItemId | None = None, error: str | BaseException | None = None
    ) -> Answer:
        """Count one item as failed. A failed item counts as done and as an error."""
        why = _described(error)
        if why is not None:
            log.info("an item failed", operation="item_failed", project_id=project_id, error=cut(why))
        return self._count("item_failed", project_id, () if item_id is None else (item_id,), "-", error=why)

    def items_done(self, project_id: str, item_ids: Iterable[ItemId]) -> Answer:
        """Count up to 10,000 items as done in one round trip: all of them, or none."""
        return self._count("items_done", project_id, _listed(item_ids), "+", many=True)

    def items_failed(
        self, project_id: str, item_ids: Iterable[ItemId], error: str | BaseException | None = None
    ) -> Answer:
        """Count up to 10,000 items as failed in one round trip: all of them, or none."""
        return self._count("items_failed", project_id, _listed(item_ids), "-", error=_described(error), many=True)

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
                signed = [sign + item for item in items or ["*1"]]
                return self._commands.send(operation, COUNT, project_id, ["", "", *signed])
            # Without an item id the call itself is the identity, under a name that only our own retries repeat.
            items = items or [f"$op:{uuid.uuid4().hex}"]
            wanted = dict.fromkeys(items, (sign == "-", cut(error)))
            work = partial(self._count_journaled, operation, project_id, wanted)
            return self._commands.for_one_project(project_id, work)

    def _count_journaled(self, operation: str, project_id: str, wanted: dict[str, tuple[bool, str | None]]) -> Answer:
        written = self._journal.write(project_id, wanted)
        signed = [("-" if failed else "+") + item for item, failed in written.verdicts.items()]
        answer = self._commands.send(operation, COUNT, project_id, [written.epoch, written.version, *signed])
        if written.fresh and not answer.counted:
            # A rebuild from the journal, between our commit and this call, has counted our items.
            outcome = Outcome.COUNTED if answer.outcome is Outcome.DUPLICATE else answer.outcome
            return replace(answer, outcome=outcome, counted=written.fresh)
        return answer

    # ---- reading -------------------------------------------------------------------------------------------

    def progress(self, project_id: str) -> Progress:
        """Return the progress by one HGETALL; NOT_FOUND for an unknown project.

        Raises `Unavailable` at once while Redis is away. A project that Redis lost is rebuilt first.
        """
        project_id = checked_project(project_id)
        with self._server.operation:
            self._accept()
            found = self._read("progress", project_id)
            if found is None:
                return self._recall(project_id)
            if 0 < found.total < found.done and project_id not in self._over and len(self._over) < 10_000:
                self._over.add(project_id)
                log.warning(
                    "more items are counted than the total",
                    operation="progress", project_id=project_id, done=found.done, total=found.total,
                )  # fmt: skip
            return found

    def _read(self, operation: str, project_id: str) -> Progress | None:
        return self._server.read(operation, project_id, partial(read_progress, self._server, project_id))

    def _recall(self, project_id: str) -> Progress:
        """Return the progress of a project that Redis does not have: from SQL if it is over, else after a rebuild."""
        row = self._records.find(project_id) if self._records is not None else None
        if row is None or self._records is None:
            return NOT_FOUND
        if self._records.is_over(row):
            return row.progress()
        self._commands.restore("progress", project_id, self._server.read)
        return self._read("progress", project_id) or row.progress()

    # ---- events, shutdown ----------------------------------------------------------------------------------

    def relay(self, sinks: Sequence[Sink], *, rest: float = 0.5) -> Relay:
        """Return a relay that delivers ``job.completed`` to ``sinks``. Run it in a thread or process (`Relay.run`)."""
        return Relay(self.outbox(), sinks, rest=rest)

    def outbox(self) -> RedisOutbox:
        """Return the outbox with ``job.completed``, for a relay that serves other outboxes too."""
        if self._database is None or self._records is None:
            return RedisOutbox(self._server.client)
        deliveries = Deliveries(self._database, self._records)
        return RedisOutbox(self._server.client, on_delivered=deliveries.settled, notes=deliveries)

    def close(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Refuse new calls, wait for running ones and close the connections. Return whether all ended in time."""
        budget = Budget(seconds)
        if self._checkpointing is not None:
            self._checkpointing.stop()
        drained = self._server.drain(budget.left)
        if self._checkpointing is not None:
            self._checkpointing.join(max(0.5, budget.left))  # before the connections close, which it uses
        self._server.close()
        if self._owned is not None:
            self._owned.close()
        return drained

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- processes -----------------------------------------------------------------------------------------

    def _begin_process(self) -> None:
        """Create what a forked child must not share with its parent: callers, locks, sockets, threads."""
        self._server.begin_process()
        self._rebuilder: Rebuilder | None = None
        self.checkpointer: Checkpointer | None = None
        self._checkpointing: CheckpointerThread | None = None
        if self._database is not None and self._records is not None:
            self._journal = Journal(self._database)  # used with journal=True only, which needs a database
            self._rebuilder = Rebuilder(self._server, self._records)
            self.checkpointer = Checkpointer(self._server, self._records, self._rebuilder, interval=self._interval)
            if self._runs_checkpointer:
                self._checkpointing = CheckpointerThread(self.checkpointer)
        self._commands = Commands(self._server, self._records, self._rebuilder)

    def _accept(self) -> None:
        self._server.accept()
        if self._checkpointing is not None:
            self._checkpointing.start()


def _listed(item_ids: Iterable[ItemId]) -> Sequence[ItemId]:
    if isinstance(item_ids, str | bytes | bytearray) or not isinstance(item_ids, Iterable):
        raise InvalidInput(
            f"A {type(item_ids).__name__} is not a collection of items.", hint="Give a list; one item: item_done."
        )
    return tuple(item_ids)


def _described(error: str | BaseException | None) -> str | None:
    """Return the type and message of an error, or only the type if its message cannot be read."""
    if error is None or isinstance(error, str):
        return error
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  # __str__ of the program's exception; its item must still be counted
        return type(error).__name__
