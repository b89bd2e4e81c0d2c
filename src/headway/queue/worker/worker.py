"""A worker claims tasks, runs them, records their outcomes and sends heartbeats.

It is single-threaded while it forks. A second thread runs only while handlers run in this process. That thread renews leases,
records outcomes and stops runs that take too long. If the worker dies, the sweeper recovers its tasks, because their owner is
dead or their lease expires.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headway._lease import Owner
from headway.core.failure import Failure
from headway.core.lifecycle import Budget, Shutdown
from headway.core.retry import RetryPolicy
from headway.errors import HeadwayError, StorageError
from headway.queue.handlers import Context, Handler
from headway.queue.settings import LiveSettings
from headway.queue.store import claim as claims
from headway.queue.store import complete as settling
from headway.queue.store import workers
from headway.queue.store.claim import Claimant
from headway.queue.store.workers import Sign
from headway.queue.task import Claim
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.database_source import DatabaseSource
from headway.queue.worker.execution import (
    CannotBegin,
    Ended,
    Horse,
    RunningTask,
    TaskCancelled,
    TaskStopped,
    TaskTimeout,
    TaskTooLarge,
    ended_by,
    perform,
    rss,
)
from headway.queue.worker.heartbeat import PULSE, Pulse, Renewal, Settings, Watch
from headway.queue.worker.inline import Descriptors, Interrupts, ProcessState
from headway.queue.worker.outcomes import Outcomes
from headway.queue.worker.source import Source
from headway.telemetry import Log

log = Log("queue")

#: Seconds between heartbeats of an idle worker. Each heartbeat also returns operator requests.
ALIVE_SECONDS = 3.0
_AWAY = RetryPolicy(retries=0, base=0.5, cap=15.0, jitter=0.2)


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
        self._queue = queue
        self._make_source, self._listens_to = make_source, queue.redis_url
        self._source = source or (DatabaseSource(queue) if make_source is None else make_source())
        self._live = live
        self._longest: float | None = None
        self.settings = settings or Settings()
        self.name = name or f"{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(4)}"
        self._shutdown = shutdown or Shutdown()
        self._context = context
        self._orphaned = orphaned
        self._owner = Owner.current()
        self._held: deque[Claim] = deque()  # claimed and not started
        self._outcomes = Outcomes(queue, self.name)
        self._beginning = threading.Lock()  # guards taking from `_held` and giving it back
        self._held_since = 0.0
        self._lately = 0.0  # moving average of seconds per task run in this process
        self._ours_until = 0.0  # monotonic time, no later than the leases of the held claims
        self._lost: set[int] = set()  # held claims that this worker no longer owns
        self._cancelling: set[int] = set()  # held claims to cancel
        self._interrupts: Interrupts | None = None
        self._descriptors: Descriptors | None = None
        self._process: ProcessState | None = None
        self._pulse: Pulse | None = None
        self._wanted: str | None = None
        self._said: tuple[str, str | None] | None = None
        self._said_at = 0.0
        self._failures = 0
        self._drain: Budget | None = None
        self.outgrown = False  # exiting because handlers left too much memory in use

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self, *, burst: bool = False) -> None:
        """Work until a shutdown is requested; with ``burst``, until no tasks are left."""
        self._say_alive("idle")
        try:
            while not self._stopping() and not self._orphaned():
                try:
                    rest = self.tick(ahead=True)
                    if rest and burst and not self._held and not self._outcomes:
                        return
                    if rest:
                        self._say_alive("idle")
                        self._source.wait(rest, self._shutdown.stop)
                    elif time.monotonic() - self._said_at > ALIVE_SECONDS:
                        # Short tasks leave no idle time, but the heartbeat is still due.
                        self._say_alive("busy")
                    self._failures = 0
                except HeadwayError as error:  # the store is unreachable: tasks and claims are safe in it
                    self._failures += 1
                    rest = _AWAY.delay(self._failures)
                    what = "no task can be begun" if isinstance(error, CannotBegin) else "the store cannot be used"
                    log.warning(f"{what}; it is tried again", worker=self.name, error=str(error))
                    self._shutdown.stop.wait(rest)
        finally:
            self._end_pulse()
            self._leave()
            self._source.close()

    def tick(self, *, ahead: bool = False) -> float:
        """Claim, run and record one batch; return the seconds to wait if there was none.

        With ``ahead``, the statement that records this batch also claims the next one, if that is cheaper.
        """
        self._record()
        if not self._held and not self._stopping():
            self._follow()
            asked_at = time.monotonic()
            self._hold(self._source.claim(self._claimant(), self.settings.queues, self._batch()), asked_at)
        if not self._held:
            return self.settings.rest
        try:
            while self._held and not self._stopping():
                handler = self._queue.handlers[self._held[0].kind]
                if handler.isolation != "fork":
                    self._run_here()
                elif self._may_begin(self._held[0]):
                    self._hold_alone(self._held[0])
                    self._run_forked(self._held.popleft(), handler)
        except CannotBegin:  # another worker may be able to start it; no attempt is counted
            self._ours_until = 0.0
            self._give_back(list(self._held))
            self._held.clear()
            raise
        if ahead:
            self._record_and_claim()
        else:
            self._end_pulse()
        self._record()
        return 0.0

    def _claimant(self) -> Claimant:
        return Claimant(self.name, self._owner, sorted(self._queue.handlers), self.settings.lease)

    def _hold(self, claimed: Sequence[Claim], asked_at: float) -> None:
        self._held.extend(map(self._bounded, claimed))
        self._ours_until = asked_at + self.settings.lease
        self._held_since = time.monotonic()
        self._lost.clear()
        self._cancelling.clear()

    def _follow(self) -> None:
        """Adopt the current settings for the next claim, and reconnect if the Redis URL changed."""
        if self._live is not None and self._live.refresh():
            now = self._live.in_force
            self.settings = replace(
                self.settings, batch=now.batch, memory_limit=now.memory_limit, cancel_grace=now.cancel_grace,
                drain=now.drain,
            )  # fmt: skip
            self._longest = now.timeout
        self._queue.refresh()
        if self._make_source is not None and self._queue.redis_url != self._listens_to:
            self._listens_to = self._queue.redis_url
            self._source.close()  # the sweeper finds tasks whose hint was popped but not claimed
            self._source = self._make_source()

    def _bounded(self, claim: Claim) -> Claim:
        """Limit the claim's timeout to the longest one allowed by the settings."""
        times = [seconds for seconds in (claim.timeout, self._longest) if seconds is not None]
        return claim if self._longest is None else replace(claim, timeout=min(times))

    def _batch(self) -> int:
        """Return the batch size: 1 if any handler forks, so that idle workers get the other tasks."""
        # Handlers of fleet slots do not count: `_hold_alone` gives the other claims back before such a task starts.
        own = [handler for handler in self._queue.handlers.values() if not handler.kind.startswith("headway.")]
        if not own or any(handler.isolation == "fork" for handler in own):
            return 1
        # Held tasks should start soon. At the recent duration per task, this batch takes half the allowed hold time.
        return max(1, min(self.settings.batch, int(self.settings.hold / 2 / max(self._lately, 1e-6))))

    def _may_begin(self, claim: Claim) -> bool:
        """Return whether the first held claim may start; otherwise drop it.

        A worker that was suspended, or slower than its lease, renews first: another worker may have run the task.
        """
        if time.monotonic() >= self._ours_until:
            self._renew()
        if claim.no in self._lost:
            log.warning("a task was given to another worker before its turn", taskID=claim.id, worker=self.name)
        elif claim.no in self._cancelling:
            ended = Ended(failure=Failure("TaskCancelled", "the task was cancelled before its handler began"))
            self._outcomes.add(claim, ended)
        else:
            return True
        self._held.popleft()
        return False

    def _stopping(self) -> bool:
        return self._shutdown.stop.is_set() or self._wanted is not None or self.outgrown

    def _look_at_memory(self) -> None:
        """Exit if handlers left more memory in use than the limit; the replacement starts fresh.

        This is checked only after a task ran in this process. Otherwise a large application would never run any task.
        """
        used, most = rss(os.getpid()), self.settings.memory_limit
        if used > most:
            self.outgrown = True
            log.warning(
                "the worker uses more memory than it may, and ends", worker=self.name,
                reason=f"{used // 2**20} MB of {most // 2**20} MB",
            )  # fmt: skip

    def _look_at_descriptors(self, claim: Claim) -> None:
        """Kill this process if a handler closed descriptors that it needs.

        Outcomes can no longer be recorded, and opening new connections is not safe. The supervisor replaces the worker, and
        the sweeper counts the attempt.
        """
        if self._descriptors is not None and not self._descriptors.are_intact:
            log.critical(
                "a handler closed the descriptors of its worker, which ends", taskID=claim.id, worker=self.name
            )
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def must_end(self) -> bool:
        """Whether running tasks must stop now: the drain time is over, or an operator requested a stop."""
        if not self._stopping():
            return False
        if self._drain is None:
            self._drain = Budget(self.settings.drain)
        return self._shutdown.abandon.is_set() or self._wanted == "stop" or self._drain.spent

    # ---- a process per task ------------------------------------------------------------------------------------------

    def _run_forked(self, claim: Claim, handler: Handler) -> None:
        text = self._payload(claim)
        if text is None:
            return
        self._end_pulse()
        horse = self._start(claim, handler, text)
        watch, renewal = Watch(claim, self.settings), Renewal(self.settings)
        said: tuple[float, str] | None = None
        while not horse.wait(PULSE):
            if self._is_to_end(horse):
                horse.abandon()
                if watch.reason is None and (horse.ended is None or horse.ended.failure is not None):
                    self._give_back([claim])
                    return
                break
            if horse.progress is not None and horse.progress != said:
                said = horse.progress
                watch.cancelling |= self.note_progress(claim, *said)
            if renewal.is_due:
                lost, cancelling = self.renew(claim)
                if lost:
                    horse.abandon()
                    return
                watch.cancelling |= cancelling
            self._source.show()
            if watch.cancelling:
                horse.ask_to_stop()
            step = watch.next_step(horse.seconds, horse.rss())
            if step == "kill":
                horse.abandon()
                break
            if step == "raise" and watch.reason is not None:
                horse.raise_in_handler(timed_out=watch.reason.outcome == "timeout")
        self._outcomes.add(claim, _outcome(horse, watch), horse.seconds)
        self._record()

    def _start(self, claim: Claim, handler: Handler, text: str) -> Horse:
        try:
            return Horse(claim, handler.function, text, self._queue.in_child(self._context))
        except CannotBegin:
            self._held.appendleft(claim)  # given back with the others
            raise

    def _is_to_end(self, horse: Horse) -> bool:
        """Tell the task about a shutdown, and return whether its time to finish is over."""
        if self._stopping():
            horse.say_stopping()
        return self.must_end

    # ---- in this process ---------------------------------------------------------------------------------------------

    def _run_here(self) -> None:
        """Run the held tasks that can run in this process, with a heartbeat thread for the claims."""
        with self._begun_pulse() as pulse:
            while not self._stopping() and (claim := self._take_here()) is not None:
                handler = self._queue.handlers[claim.kind]
                text = self._payload(claim)
                if text is None:
                    continue
                began = time.monotonic()
                task = RunningTask(claim, partial(pulse.report, claim), partial(pulse.is_cancelled, claim))
                pulse.begin(claim)
                try:
                    with pulse.interrupts.armed():
                        ended = perform(task, handler.function, text, self._context)
                    if os.getpid() != self._owner.pid:
                        os._exit(1)  # a process forked by the handler returned here: a second worker with our claims
                    self._look_at_descriptors(claim)
                except TaskStopped:
                    self._give_back([claim])
                    continue
                except (TaskCancelled, TaskTimeout, TaskTooLarge) as late:  # raised just after the handler returned
                    ended = ended_by(late)
                finally:
                    pulse.end()
                    if self._process is not None:
                        self._process.restore()
                if (said := pulse.last_message(claim)) is not None:
                    ended = replace(ended, message=said)
                seconds = time.monotonic() - began
                self._lately += (seconds - self._lately) * 0.2
                if claim.no not in pulse.lost:
                    self._outcomes.add(claim, ended, seconds)
                if (self._held and len(self._outcomes) >= self.settings.batch) or pulse.cancelling:
                    self._record()
        self._look_at_memory()

    def _take_here(self) -> Claim | None:
        """Take the next held claim to run in this process; None if there is none or it must be forked."""
        with self._beginning:
            while self._held and self._queue.handlers[self._held[0].kind].isolation != "fork":
                claim = self._held[0]
                if self._may_begin(claim):
                    if claim.attempts:
                        self._hold_alone(claim)
                    return self._held.popleft()
        return None

    def release_unbegun(self) -> None:
        """Give held claims back while a handler takes long, so that idle workers can run them.

        The heartbeat thread calls this. If the reply is lost, ownership is checked before any of them starts.
        """
        if not self._held or time.monotonic() - self._held_since < self.settings.hold:
            return
        with self._beginning:
            self._ours_until = 0.0
            try:
                self._give_back(list(self._held))
            except HeadwayError as error:
                log.warning("what is not begun could not be given back", worker=self.name, error=str(error))
                return
            self._held.clear()

    def _begun_pulse(self) -> Pulse:
        if self._pulse is None:
            if self._interrupts is None:
                self._interrupts, self._descriptors, self._process = Interrupts(), Descriptors(), ProcessState()
            self._pulse = Pulse(self, self._interrupts)
        return self._pulse

    def _end_pulse(self) -> None:
        """Stop the heartbeat thread: a process that forks must have only one thread."""
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _hold_alone(self, claim: Claim) -> None:
        """Give back all claims but this one. If the task kills this process, only its own attempt is counted."""
        self._record()
        others = [held for held in self._held if held is not claim]
        if others:
            self._ours_until = 0.0  # if the reply is lost, check ownership before any of them starts
            self._give_back(others)
            self._held.clear()
            self._held.append(claim)

    # ---- recording ---------------------------------------------------------------------------------------------------

    def _payload(self, claim: Claim) -> str | None:
        """Decode the payload. If it cannot be read, fail the task and return None."""
        try:
            return self._queue.payload(claim.id, claim.payload)
        except StorageError as error:
            log.critical("security: a payload was refused", taskID=claim.id, error=str(error))
            refused = Ended(failure=Failure("PayloadRefused", str(error)), retryable=False)
            self._outcomes.add(claim, refused)
            self._record()
            return None

    def _record(self) -> None:
        self._outcomes.record(self._source)

    def _record_and_claim(self) -> None:
        """Record this batch and claim the next one together, if that is cheaper."""
        if self._held or self._stopping() or not self._outcomes.all_returned:
            return
        self._follow()
        asked_at = time.monotonic()
        claimed = self._outcomes.record_and_claim(self._source, self._claimant(), self.settings.queues, self._batch())
        if claimed is not None:
            self._hold(claimed, asked_at)

    def show(self) -> None:
        """Show the running task in the source's own tools."""
        self._source.show()

    def record(self) -> None:
        """Record outcomes; log a failure, to be retried later."""
        try:
            self._record()
        except HeadwayError as error:
            log.warning("what ended could not be written down; it is tried again", worker=self.name, error=str(error))

    def note_progress(self, claim: Claim, percent: float, message: str) -> bool:
        """Record progress; return whether to cancel the task. If the store is unreachable, only the progress is lost."""
        try:
            return self._queue.database.run(
                lambda tx: settling.progress(tx, claim, percent, message), operation="queue.progress"
            )
        except HeadwayError as error:
            log.warning("progress could not be noted", taskID=claim.id, error=str(error))
            return False

    def renew(self, running: Claim | None) -> tuple[bool, bool]:
        """Renew all leases; return (whether the running task is lost, whether it is to be cancelled).

        This includes claims that are held or whose outcome is not recorded yet. `_lost` and `_cancelling` note the result.
        """
        try:
            lost, cancelling = self._renew(running)
        except HeadwayError as error:
            log.warning("the lease could not be renewed", worker=self.name, error=str(error))
            return False, False
        self._say_alive("busy", running.id if running else None)
        return bool(running and running.no in lost), bool(running and running.no in cancelling)

    def _renew(self, running: Claim | None = None) -> tuple[set[int], set[int]]:
        """Renew leases and update the state only after the commit: a failed renewal extends nothing."""
        asked_at = time.monotonic()
        held = (*list(self._held), *self._outcomes.claims, *([running] if running else ()))
        tokens = {claim.no: claim.token for claim in held}
        who = Claimant(self.name, self._owner, (), self.settings.lease)
        lost, cancelling = self._queue.database.run(lambda tx: claims.renew(tx, who, tokens), operation="queue.renew")
        self._lost |= lost
        self._cancelling |= cancelling
        self._ours_until = asked_at + self.settings.lease
        return lost, cancelling

    def _give_back(self, returned: Sequence[Claim]) -> None:
        back = self._queue.database.run(lambda tx: settling.give_back_all(tx, returned), operation="queue.give_back")
        self._source.settled(back)

    # ---- heartbeat ---------------------------------------------------------------------------------------------------

    def _say_alive(self, state: str, task: str | None = None) -> None:
        """Send a heartbeat if the state changed or one is due, so that an idle worker writes little."""
        if (state, task) == self._said and time.monotonic() - self._said_at < ALIVE_SECONDS:
            return
        self._said, self._said_at = (state, task), time.monotonic()

        sign = Sign(
            self.name, self._owner, self.settings.queues, state, task, self._outcomes.completed, self._outcomes.failed,
            rss(os.getpid()), sorted(self._queue.handlers),
        )  # fmt: skip
        try:
            said = self._queue.database.run(lambda tx: workers.say_alive(tx, sign), operation="queue.alive")
            self._wanted = said or self._wanted
        except HeadwayError as error:
            log.warning("the worker cannot say that it is alive", worker=self.name, error=str(error))

    def _leave(self) -> None:
        """Give back claims that were not started, and sign off."""
        try:
            self._record()
            self._give_back(list(self._held))
            self._held.clear()
            done = self._outcomes
            self._queue.database.run(
                lambda tx: workers.leave(tx, self.name, completed=done.completed, failed=done.failed),
                operation="queue.leave",
            )
        except HeadwayError as error:  # the sweeper recovers the rest, because our process will be dead
            log.warning("the worker could not say that it ended", worker=self.name, error=str(error))


def _outcome(horse: Horse, watch: Watch) -> Ended:
    ended = horse.ended
    assert ended is not None
    if watch.reason is not None and ended.failure is not None:
        ended = watch.reason  # the worker ended the run: record its reason, not the signal
    return ended if horse.progress is None else replace(ended, message=horse.progress[1])
