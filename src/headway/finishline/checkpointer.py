"""The checkpointer: rounds that keep Redis and the SQL record together.

Redis may lose everything (a crash without append-only file, FLUSHALL, expiry) or come back with an older state.
A project that is missing is rebuilt aside and put in place in one step; one that lags behind its journal is raised
by counting the journal again, which counts by identity and so adds only what is missing. Nothing is ever lowered.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from headway import _redis
from headway._lease import Lease, Owner, RedisLeases
from headway.errors import HeadwayError, Held, StaleClaim, StoreCorrupt
from headway.finishline.progress import Progress, Status, corrupt, from_hash
from headway.finishline.rebuild import Rebuilder, project_keys
from headway.finishline.server import StateServer
from headway.finishline.store.records import LIFE, Records, Row
from headway.telemetry import Log, redact

log = Log("finishline")

#: Seconds between two checkpoints.
INTERVAL = 5.0
#: Seconds between two looks at projects whose event was delivered: they change only if Redis comes back older.
THOROUGH = 60.0


class Checkpointer:
    """One round is `tick`. Every process of a fleet may run it: a lease in Redis lets one of them do it.

    A fork does not wait for a round: `FinishLine` gives a child new locks, sockets and a new checkpointer, and the
    pools of the SQL databases do the same.
    """

    def __init__(
        self, server: StateServer, records: Records, rebuilder: Rebuilder, *, interval: float = INTERVAL
    ) -> None:
        self._server = server
        self._records = records
        self._rebuilder = rebuilder
        self._interval = interval
        self._leases = RedisLeases(server.client)
        self._token = 0  # of the last lease that was seen: a lower one means that Redis went back
        self._run: str | None = None  # of the server, as it calls itself since it was started
        self._thorough_at: float | None = None
        self._name = f"checkpointer.{uuid.uuid4().hex[:12]}"
        self._calls = 0
        self._round_lock = threading.Lock()
        self._lagging: dict[str, int] = {}  # project -> the count it lagged at

    def tick(self) -> float:
        """Rebuild what Redis lost, note how far the rest is; seconds until the next round."""
        was_away = self._server.away
        if not self._server.probe():
            return 1.0
        try:
            with self._round_lock:
                self._round(returned=was_away)
        except _redis.failures() as error:
            raise _redis.translate(error, self._server.url) from error
        return self._interval

    def run(self, stop: threading.Event) -> None:
        delay = 0.0
        while not stop.wait(delay):
            try:
                delay = self.tick()
            except Exception as error:  # noqa: BLE001  # whatever stopped this round must not stop the rounds to come
                log.warning("a round of the checkpointer failed", operation="checkpoint", error=redact(str(error)))
                delay = self._interval

    def _round(self, *, returned: bool) -> None:
        lease = self._acquire()
        if lease is None and not returned:
            return
        went_back = self._restarted() or (lease is not None and lease.token <= self._token)
        self._token = lease.token if lease is not None else 0
        due = self._thorough_at is None or time.monotonic() - self._thorough_at >= THOROUGH
        thorough = returned or went_back or due
        for page in self._records.recent(delivered=thorough):
            self._look_after(page, returned=returned or went_back)
            if lease is not None:
                with suppress(StaleClaim):  # a long round; a second one beside it does no harm
                    self._leases.renew(lease)
        if thorough:
            self._thorough_at = time.monotonic()

    def _restarted(self) -> bool:
        """Whether another server answers than in the last round: it may have been restored from an older dump."""
        info: Any = self._server.client.info("server")
        before, self._run = self._run, str(info.get("run_id"))
        return before not in (None, self._run)

    def _acquire(self) -> Lease | None:
        """It is not released: it ends shortly before we come back, and until then nobody else needs to look."""
        try:
            return self._leases.acquire(_redis.CHECKPOINTER(), Owner.current(), self._interval * 0.9)
        except Held:
            return None

    # ---- one page of projects ------------------------------------------------------------------------------

    def _look_after(self, rows: Sequence[Row], *, returned: bool) -> None:
        ahead: list[tuple[Row, Progress]] = []
        for row, state, epoch, version in self._states(rows):
            try:
                if state is not None and epoch not in (None, row.epoch):
                    # Another project of this name: created since the row was read, or brought back by an older dump.
                    self._rebuilder.restore(row.id, wait=False)
                elif state is None:
                    if row.delivered_at is None:  # SQL answers for one that was told and that Redis let go
                        self._rebuilder.restore(row.id, wait=False)
                elif row.completed_at is not None:
                    self._compare_completed(row, state, returned=returned)
                elif state.status is not Status.DONE:
                    if state.done >= row.done and not row.journaled:
                        ahead.append((row, state))
                    self._compare(row, state, version, returned=returned)
                else:
                    self._records.completed(row.id, row.epoch, state)
            except HeadwayError as error:  # this one project's trouble; the others go on
                log.warning(
                    "a project cannot be looked after", operation="checkpoint", project_id=row.id, error=str(error)
                )
        changed = [(row, state) for row, state in ahead if (state.done, state.errors) != (row.done, row.errors)]
        if changed:
            self._records.checkpoint(changed)

    def _compare(self, row: Row, state: Progress, version: int, *, returned: bool) -> None:
        if version < row.version:  # also where all it says was said before: a count that knows it is refused until then
            self._change(row)  # before the count: it must not finish by an older total
        if state.done < row.done:
            self._raise(row, state, returned=returned)

    def _compare_completed(self, row: Row, state: Progress, *, returned: bool) -> None:
        """One that SQL knows to be DONE must not say less than SQL. While its event waits, late items may still be between
        the two; they are no reason to put it in place anew, and those that stay there are counted by identity."""
        if state.status is not Status.DONE or (row.delivered_at is not None and state.done < row.done):
            self._say_older(row, state)
            self._rebuilder.restore(row.id, wait=False)
        elif row.journaled and state.done < row.done:
            self._raise(row, state, returned=returned)

    def _states(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Progress | None, str | None, int]]:
        """What Redis has of each, its epoch and its version, in one round trip. A damaged one is left out: the others go
        on."""
        pipeline = self._server.client.pipeline(transaction=False)
        for row in rows:
            pipeline.hgetall(_redis.PROJECT(project_id=row.id))
            pipeline.hmget(_redis.PROJECT_META(project_id=row.id), ["epoch", "version"])
        replies = pipeline.execute(raise_on_error=False) if rows else []
        for row, fields, notes in zip(rows, replies[::2], replies[1::2], strict=True):
            try:
                if isinstance(fields, Exception):
                    raise corrupt(row.id) from fields
                epoch, version = (None, None) if isinstance(notes, Exception) else notes
                yield row, from_hash(row.id, fields), epoch, int(version) if version and version.isdecimal() else 0
            except StoreCorrupt as error:
                log.warning("a project cannot be read", operation="checkpoint", project_id=row.id, error=str(error))

    def _raise(self, row: Row, state: Progress, *, returned: bool) -> None:
        """Redis counts less than SQL. That is so for a moment whenever a call is between the two, and a loss when
        it stays so over two rounds or the server has just come back."""
        if not returned and self._lagging.get(row.id) != state.done:
            self._lagging[row.id] = state.done
            return
        self._lagging.pop(row.id, None)
        self._say_older(row, state)
        if not row.journaled:
            self._rebuilder.restore(row.id, wait=False)
            return
        for page in self._records.counts(row):
            self._calls += 1
            items = [("-" if failed else "+") + item for item, failed in page]
            _redis.script("finishline/count")(
                self._server.client,
                project_keys(row.id),
                [LIFE, self._name, self._calls, row.epoch, row.version, *items],
            )

    def _say_older(self, row: Row, state: Progress) -> None:
        log.warning(
            "Redis came back with an older state; it is raised to the record",
            operation="raise", project_id=row.id, old=state.done, new=row.done,
        )  # fmt: skip

    def _change(self, row: Row) -> None:
        """Total and status as SQL has them. Redis ignores it if it knows of this change or a later one."""
        self._calls += 1
        _redis.script("finishline/change")(
            self._server.client, project_keys(row.id), [LIFE, self._name, self._calls, *row.as_change()]
        )
