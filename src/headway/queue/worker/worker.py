"""A worker claims tasks, runs them, records their outcomes and sends heartbeats.

It is single-threaded while it forks. A second thread runs only while handlers run in this process. Beside sync handlers it
renews leases, records outcomes and stops runs that take too long; async handlers run on it. If the worker dies, the sweeper
recovers its tasks, because their owner is dead or their lease expires.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from headway.core.failure import Failure
from headway.core.lifecycle import Budget, Shutdown
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, StorageError
from headway.queue.handlers import Context
from headway.queue.settings import LiveSettings
from headway.queue.store import complete, tasks
from headway.queue.task import Claim, Priority
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.claims import Claims
from headway.queue.worker.event_loop.runner import AsyncRunner
from headway.queue.worker.execution import CannotStart, Ended, Setups, rss
from headway.queue.worker.fork import ForkRunner
from headway.queue.worker.heartbeat import Settings
from headway.queue.worker.inline import InlineRunner
from headway.queue.worker.outcomes import Outcomes
from headway.queue.worker.presence import Presence
from headway.queue.worker.source import CurrentSource, DatabaseSource, Source
from headway.telemetry import Log

log = Log("queue")

_RETRY = RetryPolicy(retries=0, base=0.5, cap=15.0, jitter=0.2)


class Runner(Protocol):
    """Runs the held tasks of one isolation."""

    def run(self) -> None:
        """Run the first held task and, if they suit this runner, the ones behind it. Raises `CannotStart`."""
        ...

    def suspend(self) -> None:
        """Stop helper threads: another runner is next, or the worker is idle."""
        ...


class Worker:
    """Runs tasks; see the module. `tick` claims and runs one batch and returns how long to wait."""

    def __init__(
        self,
        queue: TaskQueue,
        *,
        source: Source | None = None,
        make_source: Callable[[], Source] | None = None,
        live: LiveSettings | None = None,
        settings: Settings | None = None,
        name: str | None = None,
        shutdown: Shutdown | None = None,
        context: Context | None = None,
        orphaned: Callable[[], bool] = lambda: False,
    ) -> None:
        """``context`` is entered around every handler, in the process that runs it. ``orphaned`` returns whether the process
        that started this worker is gone; then the worker exits as on a shutdown. ``live``: settings to follow while running.
        ``make_source``: creates the source again after the queue's Redis changed."""
        self._queue, self._live = queue, live
        self.settings = settings or Settings()
        self.name = name or f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._shutdown = shutdown or Shutdown()
        self._orphaned = orphaned
        if source is None:
            source = DatabaseSource(queue) if make_source is None else make_source()
        self._source = CurrentSource(queue, source, make_source)
        self.setups = Setups()
        self.outcomes = Outcomes(queue, self._source, self.name, later_limit=lambda: self.settings.later_limit)
        self.claims = Claims(
            queue,
            self.name,
            source=self._source,
            outcomes=self.outcomes,
            settings=lambda: self.settings,
            kinds=self.served_kinds,
        )
        self._presence = Presence(
            queue, self.name, self.claims.owner, self.outcomes, lambda: self.settings, self.served_kinds
        )
        self._inline = InlineRunner(queue, self, context)
        self._fork = ForkRunner(queue, self, context)
        self._async = AsyncRunner(queue, self, context)
        self._drain: Budget | None = None
        self.outgrown = False  # exiting because handlers left too much memory in use

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, burst: bool = False) -> None:
        """Work until a shutdown is requested; with ``burst``, until no tasks are left."""
        failures = 0
        self._presence.send("idle")
        try:
            while not self.is_stopping and not self.is_orphaned:
                try:
                    rest = self.tick(ahead=True)
                    if rest and burst and not self.claims and not self.outcomes:
                        return
                    if rest:
                        self._presence.send("idle")
                        self._source.now.wait(rest, self._shutdown.stop)
                    elif self._presence.is_due:  # short tasks leave no idle time
                        self._presence.send("busy")
                    failures = 0
                except HeadwayError as error:  # the database is unreachable: tasks and claims are safe in it
                    failures += 1
                    what = "no task can be started" if isinstance(error, CannotStart) else "the database cannot be used"
                    log.warning(f"{what}; retrying", worker=self.name, error=str(error))
                    self._shutdown.stop.wait(_RETRY.delay(failures))
        finally:
            self._suspend_runners()
            self._leave()
            self.setups.close()
            self._source.now.close()

    def tick(self, *, ahead: bool = False) -> float:
        """Claim, run and record one batch; return the seconds to wait if there was none.

        With ``ahead``, the statement that records this batch also claims the next one, if that is cheaper.
        """
        self.outcomes.record()
        if not self.claims and not self.is_stopping:
            self.follow_settings()
            claimed_at = time.monotonic()
            claimed = self._source.now.claim(self.claims.claimant(), self.settings.queues, self._batch_size())
            self.claims.hold(claimed, claimed_at)
        if not self.claims:
            return self.settings.rest
        try:
            while self.claims and not self.is_stopping:
                self._run_next()
        except CannotStart:  # another worker may be able to start them; no attempt is counted
            self.claims.release_held()
            raise
        if ahead:
            self._record_and_claim()
        else:
            self._suspend_runners()
        self.outcomes.record()
        return 0.0

    def _run_next(self) -> None:
        """Let the runner of the first held task run it. The other runners have no thread then."""
        handler = self._queue.handlers[self.claims.first.kind]
        chosen = self._runner(self.claims.first)
        if chosen is not self._async and not self.setups.is_ready(handler):
            self._async.suspend()
            self._inline.set_up(handler)
            if not self.setups.is_ready(handler):
                self.claims.release_kind(handler.kind)
            return  # the claims may have been released meanwhile
        for runner in self._runners:
            if runner is not chosen:
                runner.suspend()
        chosen.run()

    def _runner(self, claim: Claim) -> Runner:
        match self._queue.handlers[claim.kind].isolation:
            case "none":
                return self._inline
            case "async":
                return self._async
            case _:
                return self._fork

    @property
    def _runners(self) -> Sequence[Runner]:
        return self._inline, self._fork, self._async

    def served_kinds(self) -> list[str]:
        """Return the kinds of task that this worker can run now: those whose set-up did not fail."""
        return sorted(self._queue.handlers.keys() - self.setups.failed - self._async.unready)

    def _suspend_runners(self) -> None:
        for runner in self._runners:
            runner.suspend()

    def _record_and_claim(self) -> None:
        """Record this batch and claim the next one together, if that is cheaper."""
        if self.claims or self.is_stopping or not self.outcomes.all_succeeded:
            return
        self.follow_settings()
        claimed_at = time.monotonic()
        claimed = self.outcomes.record_and_claim(self.claims.claimant(), self.settings.queues, self._batch_size())
        if claimed is not None:
            self.claims.hold(claimed, claimed_at)

    def follow_settings(self) -> None:
        """Adopt the current settings for the next claim, and reconnect if the Redis URL changed."""
        if self._live is not None and self._live.refresh():
            now = self._live.in_force
            self.settings = replace(
                self.settings, batch=now.batch, memory_limit=now.memory_limit, cancel_grace=now.cancel_grace,
                drain=now.drain, timeout_limit=now.timeout, later_limit=now.later_limit,
            )  # fmt: skip
        self._source.refresh()

    def _batch_size(self) -> int:
        """Return the batch size: 1 if any handler forks, so that idle workers get the other tasks."""
        # Handlers of fleet slots do not count: `keep_only` releases the other claims before such a task starts. Async ones
        # do not count either: their runner claims as many as it can run at once.
        own = [
            handler
            for handler in self._queue.handlers.values()
            if not handler.kind.startswith("headway.") and handler.isolation != "async"
        ]
        if not own or any(handler.isolation == "fork" for handler in own):
            return 1
        # Held tasks should start soon. At the recent duration per task, this batch takes half the allowed hold time.
        most = int(self.settings.hold / 2 / max(self._inline.average_seconds, 1e-6))
        return max(1, min(self.settings.batch, most))

    @property
    def is_orphaned(self) -> bool:
        """Whether the process that started this worker is gone."""
        return self._orphaned()

    @property
    def is_stopping(self) -> bool:
        """Whether the worker is about to exit."""
        return self._shutdown.stop.is_set() or self._presence.request is not None or self.outgrown

    @property
    def must_end(self) -> bool:
        """Whether running tasks must stop now: the drain time is over, or an operator requested a stop."""
        if not self.is_stopping:
            return False
        if self._drain is None:
            self._drain = Budget(self.settings.drain)
        return self._shutdown.abandon.is_set() or self._presence.request == "stop" or self._drain.spent

    def check_memory(self) -> None:
        """Exit if handlers left more memory in use than the limit; the replacement starts fresh.

        This is checked only after a task ran in this process. Otherwise a large application would never run any task.
        """
        used, most = rss(os.getpid()), self.settings.memory_limit
        if used > most:
            self.outgrown = True
            log.warning(
                "the worker exceeds its memory limit and exits", worker=self.name,
                reason=f"{used // 2**20} MB of {most // 2**20} MB",
            )  # fmt: skip

    def _leave(self) -> None:
        """Record outcomes, release claims that were not started, and sign off."""
        try:
            self.outcomes.record()
            self.claims.release_held()
            self._presence.leave(lost=self._orphaned() and not self.is_stopping)
        except HeadwayError as error:  # the sweeper recovers the rest, because our process will be dead
            log.warning("the worker could not sign off", worker=self.name, error=str(error))

    # ---- for the task that runs --------------------------------------------------------------------------------------

    def decode(self, claim: Claim) -> str | None:
        """Decode the payload. If that fails, fail the task and return None."""
        try:
            return self._queue.backend.decode(claim.id, claim.payload)
        except StorageError as error:
            log.critical("security: a payload was refused", taskID=claim.id, error=str(error))
            self.outcomes.add(claim, Ended(failure=Failure("PayloadRefused", str(error)), retryable=False))
            self.outcomes.record()
            return None

    def show(self) -> None:
        """Show the running task in the source's own tools."""
        self._source.now.show()

    def record_outcomes(self) -> None:
        """Record outcomes; log a failure, to be retried later."""
        try:
            self.outcomes.record()
        except HeadwayError as error:
            log.warning("outcomes could not be recorded; retrying later", worker=self.name, error=str(error))

    def record_progress(self, claim: Claim, percent: float, message: str) -> bool:
        """Record progress; return whether to cancel the task. If the database is unreachable, only the progress is lost."""
        try:
            return self._queue.database.run(
                lambda tx: complete.progress(tx, claim, percent, message), operation="queue.progress"
            )
        except HeadwayError as error:
            log.warning("progress could not be recorded", taskID=claim.id, error=str(error))
            return False

    def renew(self, running: Claim | None) -> tuple[bool, bool]:
        """Renew all leases; return (whether the running task is lost, whether it is to be cancelled)."""
        lost, cancelling = self.renew_all(running, running.id if running else None)
        return bool(running and running.no in lost), bool(running and running.no in cancelling)

    def renew_all(self, running: Claim | None, shown: str | None) -> tuple[set[int], set[int]]:
        """Renew all leases; return (numbers of lost claims, numbers to cancel). ``shown``: the task in the heartbeat."""
        try:
            lost, cancelling = self.claims.renew(running)
        except HeadwayError as error:
            log.warning("the leases could not be renewed", worker=self.name, error=str(error))
            return set(), set()
        self._presence.send("busy", shown)
        return lost, cancelling

    def record_progress_of(self, reports: Sequence[tuple[Claim, float, str]]) -> None:
        """Record the progress of several tasks. If the database is unreachable, only the progress is lost."""
        try:
            self._queue.database.run(lambda tx: complete.progress_all(tx, reports), operation="queue.progress")
        except HeadwayError as error:
            log.warning("progress could not be recorded", worker=self.name, error=str(error))

    def other_kinds_wait(self, kinds: Sequence[str], queues: Sequence[Priority]) -> bool:
        """Return whether tasks of these kinds are ready; False if the database is unreachable."""
        try:
            with self._queue.database.read() as tx:
                return tasks.count_waiting(tx, queues, kinds, most=1) > 0
        except HeadwayError:
            return False

    def release_waiting(self) -> None:
        """Release claims that have waited too long to start."""
        self.claims.release_waiting()
