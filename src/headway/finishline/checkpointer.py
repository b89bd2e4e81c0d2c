"""What keeps Redis and the SQL record together: checkpoints, and rebuilding what Redis lost.

Redis may lose everything (a crash without append-only file, FLUSHALL, expiry) or come back with an older state.
A project that is missing is rebuilt aside and put in place in one step; one that lags behind its journal is raised
by counting the journal again, which counts by identity and so adds only what is missing. Nothing is ever lowered.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence

from headway import _redis
from headway.errors import StoreCorrupt
from headway.finishline.progress import Outcome, Progress, Status, corrupt, from_hash
from headway.finishline.records import CHUNK, Record, Row
from headway.finishline.server import StateServer
from headway.retry import pause
from headway.telemetry import Log, metrics, redact

log = Log("finishline")

#: Seconds a project lives in Redis after its last write.
TTL = 604_800
#: Seconds between two checkpoints.
INTERVAL = 5.0

_STAGE_SECONDS = 600
_LOCK_SECONDS = 30


def project_keys(project_id: str) -> list[str]:
    """The keys every script of the finish line gets, in their order."""
    families = (_redis.PROJECT, _redis.PROJECT_META, _redis.PROJECT_BITS, _redis.PROJECT_SEEN)
    return [*(family(project_id=project_id) for family in families), _redis.EVENTS()]


#: Held during a round. A fork waits for it: a child must not inherit locks its parent's checkpointer holds just then.
_at_work = threading.Lock()
os.register_at_fork(before=_at_work.acquire, after_in_parent=_at_work.release, after_in_child=_at_work.release)


class Checkpointer:
    """One round is `tick`. Every process of a fleet may run it: a short lock in Redis lets one of them do it."""

    def __init__(self, server: StateServer, record: Record, *, interval: float = INTERVAL) -> None:
        self._server = server
        self._record = record
        self._interval = interval
        self._name = f"checkpointer.{uuid.uuid4().hex[:12]}"
        self._calls = 0
        self._restoring = threading.Lock()
        self._lagging: dict[str, int] = {}  # project -> the count it lagged at

    def tick(self) -> float:
        """Rebuild what Redis lost, note how far the rest is; seconds until the next round."""
        was_away = self._server.away
        if not self._server.probe():
            return 1.0
        try:
            self._round(returned=was_away)
        except _redis.failures() as error:
            raise _redis.translate(error, self._server.url) from error
        return self._interval

    def _round(self, *, returned: bool) -> None:
        lock = int(self._interval * 900)  # milliseconds; it has ended when the holder comes back
        if not returned and not self._server.client.set(_redis.CHECKPOINTER(), self._name, nx=True, px=lock):
            return
        page: list[Row] = []
        for row in self._record.open():
            page.append(row)
            if len(page) == CHUNK:
                self._look_after(page, returned=returned)
                page = []
        self._look_after(page, returned=returned)

    def run(self, stop: threading.Event) -> None:
        delay = 0.0
        while not stop.wait(delay):
            try:
                with _at_work:
                    delay = self.tick()
            except Exception as error:  # noqa: BLE001  # whatever stopped this round must not stop the rounds to come
                log.warning("a round of the checkpointer failed", operation="checkpointer", error=redact(str(error)))
                delay = self._interval

    def restore(self, project_id: str) -> Outcome | None:
        """Bring a project back that Redis does not have; see `install`. None when SQL does not have it either."""
        row = self._record.find(project_id)
        if row is None:
            return None
        with self._restoring:
            lock = _redis.PROJECT_RESTORE(project_id=project_id)
            client = self._server.client
            deadline = time.monotonic() + _LOCK_SECONDS
            while not client.set(lock, self._name, nx=True, px=_LOCK_SECONDS * 1000):
                # Another process is at it. Should it die, its lock ends, and rebuilding twice does no harm.
                if client.exists(_redis.PROJECT(project_id=project_id)) or time.monotonic() > deadline:
                    return Outcome.EXISTS
                pause(0.02, self._server.halt)
            try:
                return self.install(row)
            finally:
                client.delete(lock)

    def install(self, row: Row, *, first: bool = False) -> Outcome:
        """Put a project in place as SQL knows it, unless it EXISTS. ``first``: it never was there.

        COMPLETED when the journal held its last item and its event had not been delivered: CREATED otherwise.
        """
        lossy = not first and not row.journaled and row.live_at is not None and row.completed_at is None
        seen = row.checkpoint_at or row.live_at
        outcome = "AGAIN"
        while outcome == "AGAIN":  # what was put aside was lost before it was in place
            token = uuid.uuid4().hex[:12]
            staged = [
                _redis.STAGED_BITS(project_id=row.id, token=token),
                _redis.STAGED_SEEN(project_id=row.id, token=token),
            ]
            done, errors = self._stage(row, staged) if row.journaled else (row.done, row.errors)
            self._calls += 1
            outcome, _, _ = _redis.script("finishline/install")(
                self._server.client,
                [*project_keys(row.id), *staged],
                [
                    TTL, self._name, self._calls, _current(row), row.total, done, errors, row.epoch, row.version,
                    "crawled" if row.crawled else "", "journal" if row.journaled else "",
                    "delivered" if row.delivered_at is not None else "", f"{seen:.3f}" if lossy and seen else "",
                ],
            )  # fmt: skip
        if outcome == Outcome.EXISTS:
            return Outcome.EXISTS
        if row.live_at is None:
            self._record.live(row)
        if not first:
            self._say_restored(row, done, seen if lossy else None)
        if outcome == Outcome.COMPLETED:
            state = Progress(Status.DONE, row.total, done, errors)
            self._record.completed(row.id, row.epoch, state)
            return Outcome.COMPLETED if row.completed_at is None else Outcome.CREATED
        return Outcome.CREATED

    def _say_restored(self, row: Row, done: int, checkpoint: float | None) -> None:
        metrics.count("headway_projects_restored", exact=str(checkpoint is None).lower())
        facts: dict[str, str | int] = {"operation": "restore", "project_id": row.id, "done": done, "total": row.total}
        if checkpoint is None:
            log.info("a project was rebuilt", **facts)
        else:
            age = round(time.time() - checkpoint, 1)
            log.warning(
                "a project was rebuilt from its last checkpoint: what was counted after it is missing, and an item "
                "counted before it counts again when it is reported again", seconds=age, **facts,
            )  # fmt: skip

    # ---- one page of projects ------------------------------------------------------------------------------

    def _look_after(self, rows: Sequence[Row], *, returned: bool) -> None:
        ahead: list[tuple[Row, Progress]] = []
        for row, state in self._states(rows):
            if state is None:
                self.restore(row.id)
            elif state.status is Status.DONE:
                if row.completed_at is None:
                    self._record.completed(row.id, row.epoch, state)
            else:
                if state.done < row.done:
                    self._raise(row, state, returned=returned)
                elif not row.journaled and (state.done, state.errors) != (row.done, row.errors):
                    ahead.append((row, state))
                if (state.total, state.status) != (row.total, _current(row)):
                    self._change(row)
        if ahead:
            self._record.checkpoint(ahead)

    def _states(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Progress | None]]:
        """What Redis has of each, in one round trip. A damaged one is left out: the others go on."""
        pipeline = self._server.client.pipeline(transaction=False)
        for row in rows:
            pipeline.hgetall(_redis.PROJECT(project_id=row.id))
        replies = pipeline.execute(raise_on_error=False) if rows else []
        for row, fields in zip(rows, replies, strict=True):
            try:
                if isinstance(fields, Exception):
                    raise corrupt(row.id) from fields
                yield row, from_hash(row.id, fields)
            except StoreCorrupt as error:
                log.warning("a project cannot be read", operation="checkpointer", project_id=row.id, error=str(error))

    def _raise(self, row: Row, state: Progress, *, returned: bool) -> None:
        """Redis counts less than SQL. That is so for a moment whenever a call is between the two, and a loss when
        it stays so over two rounds or the server has just come back."""
        if not returned and self._lagging.get(row.id) != state.done:
            self._lagging[row.id] = state.done
            return
        self._lagging.pop(row.id, None)
        log.warning(
            "Redis came back with an older state; it is raised to the record",
            operation="raise", project_id=row.id, old=state.done, new=row.done,
        )  # fmt: skip
        if not row.journaled:
            self.install(row)
            return
        for page in self._record.counts(row):
            self._calls += 1
            items = [("-" if failed else "+") + item for item, failed in page]
            _redis.script("finishline/count")(
                self._server.client, project_keys(row.id), [TTL, self._name, self._calls, "journal", *items]
            )

    def _change(self, row: Row) -> None:
        """Total and status as SQL has them. Redis ignores it if it knows of this change or a later one."""
        self._calls += 1
        _redis.script("finishline/change")(
            self._server.client,
            project_keys(row.id),
            [TTL, self._name, self._calls, row.version, row.total, _current(row), int(row.crawled)],
        )

    def _stage(self, row: Row, staged: list[str]) -> tuple[int, int]:
        done = errors = 0
        for page in self._record.counts(row):
            _redis.script("finishline/stage")(
                self._server.client, staged, [_STAGE_SECONDS, *(item for item, _ in page)]
            )
            done += len(page)
            errors += sum(failed for _, failed in page)
        return done, errors


def _current(row: Row) -> Status:
    """The status to put into Redis. A completed project is decided again there, and announced again unless every
    sink took its event: the stream may be lost too."""
    return Status.PROCESSING if row.completed_at is not None else row.status
