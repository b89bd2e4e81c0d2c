"""The checkpointer: rounds that keep Redis and the SQL record consistent.

Redis may lose everything (a crash without append-only file, FLUSHALL, expiry) or come back with an older state. A missing
project is staged and then installed in one step. A project behind its journal gets the journal counted again: counting is
by identity, so only missing items are added. No counter is ever lowered.
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
from headway.core.lifecycle import Flag, undisturbed
from headway.errors import HeadwayError, Held, StaleClaim, StoreCorrupt
from headway.finishline.progress import Progress, Status, corrupt, from_hash
from headway.finishline.rebuild import Rebuilder, project_keys
from headway.finishline.server import StateServer
from headway.finishline.store.records import LIFE, Records, Row
from headway.telemetry import Log, redact

log = Log("finishline")

#: Seconds between two checkpoints.
INTERVAL = 5.0
#: Seconds between two checks of projects whose event is delivered. They change only if Redis comes back older.
THOROUGH = 60.0


class Checkpointer:
    """Runs rounds (`tick`). Any number of processes may run it: a lease in Redis lets one of them work.

    A fork need not wait for a round: `FinishLine` gives a forked child a new checkpointer with its own locks and sockets.
    """

    def __init__(
        self, server: StateServer, records: Records, rebuilder: Rebuilder, *, interval: float = INTERVAL
    ) -> None:
        self._server = server
        self._records = records
        self._rebuilder = rebuilder
        self._interval = interval
        self._leases = RedisLeases(server.client)
        self._token = 0  # of the last lease; a lower one means that Redis came back older
        self._run: str | None = None  # run id of the server; a restart changes it
        self._thorough_at: float | None = None
        self._name = f"checkpointer.{uuid.uuid4().hex[:12]}"
        self._calls = 0
        self._round_lock = threading.Lock()
        self._lagging: dict[str, int] = {}  # project -> its count in the round that found it behind

    def tick(self) -> float:
        """Rebuild lost projects and write checkpoints of the others. Return the seconds until the next round."""
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
        """Run rounds until ``stop`` is set."""
        delay = 0.0
        while not stop.wait(delay):
            try:
                delay = self.tick()
            except Exception as error:  # noqa: BLE001  # an error must not stop later rounds
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
            self._check_page(page, returned=returned or went_back)
            if lease is not None:
                with suppress(StaleClaim):  # a second round at the same time is harmless
                    self._leases.renew(lease)
        if thorough:
            self._thorough_at = time.monotonic()

    def _restarted(self) -> bool:
        """Return whether the server restarted since the last round. It may have loaded an older dump."""
        info: Any = self._server.client.info("server")
        before, self._run = self._run, str(info.get("run_id"))
        return before not in (None, self._run)

    def _acquire(self) -> Lease | None:
        """Acquire the lease of a round. It is not released: it expires shortly before our next round."""
        try:
            return self._leases.acquire(_redis.CHECKPOINTER(), Owner.current(), self._interval * 0.9)
        except Held:
            return None

    # ---- one page of projects ------------------------------------------------------------------------------

    def _check_page(self, rows: Sequence[Row], *, returned: bool) -> None:
        ahead: list[tuple[Row, Progress]] = []
        for row, state, epoch, version in self._states(rows):
            try:
                if state is not None and epoch not in (None, row.epoch):
                    # Another project of this name: created after the row was read, or from an older dump.
                    self._rebuilder.restore(row.id, wait=False)
                elif state is None:
                    if row.delivered_at is None:  # otherwise it is over, and SQL answers for it
                        self._rebuilder.restore(row.id, wait=False)
                elif row.completed_at is not None:
                    self._compare_completed(row, state, returned=returned)
                elif state.status is not Status.DONE:
                    if state.done >= row.done and not row.journaled:
                        ahead.append((row, state))
                    self._compare(row, state, version, returned=returned)
                else:
                    self._records.completed(row.id, row.epoch, state)
            except HeadwayError as error:  # of this project only
                log.warning("a project cannot be checked", operation="checkpoint", project_id=row.id, error=str(error))
        changed = [(row, state) for row, state in ahead if (state.done, state.errors) != (row.done, row.errors)]
        if changed:
            self._records.checkpoint(changed)

    def _compare(self, row: Row, state: Progress, version: int, *, returned: bool) -> None:
        if version < row.version:  # counts of the newer version are refused until then
            self._change(row)  # before the count, which must not complete by an older total
        if state.done < row.done:
            self._raise(row, state, returned=returned)

    def _compare_completed(self, row: Row, state: Progress, *, returned: bool) -> None:
        """Restore a project that is DONE in SQL and behind in Redis.

        While its event waits, late items may be in SQL only for a moment. They do not cause a rebuild.
        """
        if state.status is not Status.DONE or (row.delivered_at is not None and state.done < row.done):
            self._log_older(row, state)
            self._rebuilder.restore(row.id, wait=False)
        elif row.journaled and state.done < row.done:
            self._raise(row, state, returned=returned)

    def _states(self, rows: Sequence[Row]) -> Iterator[tuple[Row, Progress | None, str | None, int]]:
        """Read state, epoch and version of each project in one round trip. Damaged projects are logged and skipped."""
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
        """Raise the count in Redis to that of SQL.

        A running call causes the same difference for a moment. It is a loss if it lasts for two rounds, or if the server has
        just come back.
        """
        if not returned and self._lagging.get(row.id) != state.done:
            self._lagging[row.id] = state.done
            return
        self._lagging.pop(row.id, None)
        self._log_older(row, state)
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

    def _log_older(self, row: Row, state: Progress) -> None:
        log.warning(
            "Redis came back with an older state; the project is raised to its record",
            operation="raise", project_id=row.id, old=state.done, new=row.done,
        )  # fmt: skip

    def _change(self, row: Row) -> None:
        """Send total and status of SQL to Redis, which ignores them if its version is not older."""
        self._calls += 1
        _redis.script("finishline/change")(
            self._server.client, project_keys(row.id), [LIFE, self._name, self._calls, *row.as_change()]
        )


class CheckpointerThread:
    """The thread of a checkpointer, started by the first operation of a process."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self.thread: threading.Thread | None = None
        self._checkpointer = checkpointer
        self._starting = threading.Lock()
        self._stop = Flag()

    def start(self) -> None:
        """Start the thread unless it runs."""
        if self.thread is None:
            undisturbed(self._start)  # a thread whose start is interrupted by a signal handler never runs

    def _start(self) -> None:
        with self._starting:
            if self.thread is None:
                thread = threading.Thread(
                    target=self._checkpointer.run, args=(self._stop,), name="headway-checkpointer", daemon=True
                )
                self.thread = thread
                thread.start()

    def stop(self) -> None:
        """Ask the thread to end."""
        self._stop.set()

    def join(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the end of the thread."""
        if self.thread is not None:
            self.thread.join(seconds)
