"""Async handlers: many tasks at once on one event loop, supervised by the worker's main thread.

The event loop has a thread of its own. The main thread claims tasks for it, records their outcomes, renews all leases, and
ends runs that are cancelled or take too long. A handler that blocks the event loop therefore delays other handlers, and no
lease expires.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.core.failure import Failure
from headway.core.retry import RetryPolicy
from headway.core.setup import Opened
from headway.errors import HeadwayError, SetupFailed
from headway.queue.handlers import Context
from headway.queue.task import PRIORITIES, Claim
from headway.queue.task_queue import TaskQueue
from headway.queue.worker import execution
from headway.queue.worker.event_loop.loop import Blocker, EventLoop, Run
from headway.queue.worker.execution import Ended, RunningTask, no_result_within, perform_async
from headway.queue.worker.heartbeat import PULSE, Ending, Renewal
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.queue.worker.worker import Worker

log = Log("queue")

#: Least seconds between two rounds of claiming and recording: each is a transaction.
_ROUND = 0.02
#: Seconds between two checks of the running tasks.
_CHECK = 0.1
#: Seconds until an empty queue is claimed from again.
_POLL = 0.1
#: Tasks that end within this many seconds are claimed ahead, so that a free place is filled at once.
_AHEAD = 0.25
#: Seconds between two checks whether tasks of other kinds wait.
_TURN = 1.0
#: Seconds between two warnings about handlers of one kind that block the event loop.
_WARN = 60.0
#: Most progress reports recorded at once; the others follow with the next pulse.
_REPORTS = 200

_STOPPED = Ended(failure=Failure("TaskStopped", "the worker exits"), outcome="stopped")
_LOST = Ended(failure=Failure("TaskCancelled", "the lease expired"))
_CANCELLED = Ended(failure=Failure("TaskCancelled", "the handler was ended because the task was cancelled"))
_RETRY = RetryPolicy(retries=0, base=0.5, cap=5.0)


class AsyncRunner:
    """Runs claimed tasks of async handlers until none is left, the worker stops, or other kinds must have their turn."""

    def __init__(self, queue: TaskQueue, worker: Worker, context: Context | None) -> None:
        self._queue, self._worker, self._context = queue, worker, context
        self._loop: EventLoop | None = None
        self._runs: dict[int, Run] = {}  # by number of the task
        self._count: Counter[str] = Counter()  # of `_runs` by kind
        self._releasing: list[Claim] = []
        self._ended_now: Counter[str] = Counter()
        self._ended_before: Counter[str] = Counter()
        self._warned: dict[str, float] = {}
        self._failures = 0
        self._set_up_at: dict[str, float] = {}  # when to try a set-up again that failed
        self._begin()

    def _begin(self) -> None:
        now = time.monotonic()
        self._renewal = Renewal(self._worker.settings)
        self._check_at = self._pulse_at = self._window_at = self._retry_at = self._claim_at = 0.0
        self._turn_at = now + _TURN
        self._others_waited = self._is_yielding = False
        self._lowest = PRIORITIES[-1]

    def run(self) -> None:
        """Run the held async tasks and, while there are more, those too."""
        worker = self._worker
        loop = self._started_loop()
        self._begin()
        self._start(worker.claims.move_to_loop(self._queue.handlers))
        while True:
            round_at = time.monotonic()
            self._finish_ended()
            self._supervise()
            self._record()
            self._refill()
            if not self._runs and (not self._releasing or worker.must_end) and not self._waits_for_setup():
                break
            loop.wait(_CHECK)
            rest = round_at + _ROUND - time.monotonic()
            if rest > 0:
                time.sleep(rest)

    def suspend(self) -> None:
        """Close the event loop: a process that forks must have only one thread."""
        if self._loop is not None:
            self._loop.close()
            self._loop = None

    @property
    def unready(self) -> set[str]:
        """The kinds whose set-up is being entered, or failed a short time ago."""
        self._note_set_ups()
        now = time.monotonic()
        failed = {kind for kind, at in self._set_up_at.items() if now < at}
        if self._loop is None:
            return failed
        return failed | {kind for kind, opened in list(self._loop.set_ups.items()) if opened is None}

    def _waits_for_setup(self) -> bool:
        """Return whether to stay until a set-up has been entered, whose kind has tasks."""
        assert self._loop is not None
        may_stay = not (self._worker.is_stopping or self._worker.is_orphaned or self._is_yielding)
        return may_stay and any(opened is None for opened in list(self._loop.set_ups.values()))

    def _note_set_ups(self) -> None:
        """Log set-ups that failed, and release their tasks."""
        if self._loop is None:
            return
        for kind, opened in list(self._loop.set_ups.items()):
            if isinstance(opened, SetupFailed):
                self._set_up_at[kind] = time.monotonic() + execution.SETUP_RETRY_SECONDS
                execution.log_failed_setup(kind, opened)
                self._release_kind(kind)
                del self._loop.set_ups[kind]

    # ---- starting ----------------------------------------------------------------------------------------------------

    def _started_loop(self) -> EventLoop:
        if self._loop is None:
            claims, handlers = self._worker.claims, self._queue.handlers
            loop = EventLoop(
                self._perform, concurrency=lambda kind: handlers[kind].concurrency,
                most=lambda: self._worker.settings.concurrency, leased_until=lambda: claims.loop_leased_until,
            )  # fmt: skip
            loop.start()
            self._loop = loop
        return self._loop

    def _start(self, claimed: Sequence[Claim]) -> None:
        assert self._loop is not None
        runs = []
        for kind in {claim.kind for claim in claimed} - self._loop.set_ups.keys():
            setup = self._queue.handlers[kind].setup
            if setup is not None:
                self._loop.set_up(kind, setup)
        for claim in claimed:
            text = self._worker.decode(claim)
            if text is None:
                self._worker.claims.leave_loop(claim)
                continue
            run = Run(replace(claim, payload=""), text)
            self._runs[claim.no] = run
            self._count[claim.kind] += 1
            runs.append(run)
        if runs:
            self._loop.add(runs)

    async def _perform(self, run: Run) -> Ended:
        def report(percent: float, message: str) -> None:
            run.progress = (percent, message)

        text, run.text = run.text, ""
        task = RunningTask(run.claim, report, lambda: run.cancelling, lambda: self._worker.is_stopping)
        assert self._loop is not None
        opened = self._loop.set_ups.get(run.claim.kind)
        extra = (opened.value,) if isinstance(opened, Opened) else ()
        return await perform_async(task, self._queue.handlers[run.claim.kind].function, text, self._context, extra)

    # ---- claiming ----------------------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Claim tasks for the free places, and some ahead, if the worker may."""
        worker, now = self._worker, time.monotonic()
        if worker.is_stopping or worker.is_orphaned or self._is_yielding or now < max(self._claim_at, self._retry_at):
            return
        try:
            worker.follow_settings()
            least = 1
            while rooms := {kind: room for kind in self._kinds() if (room := self._room(kind)) >= least}:
                limit = min(rooms.values())
                claimed = worker.claims.claim_for_loop(sorted(rooms), limit)
                self._start(claimed)
                if claimed:
                    self._lowest = claimed[-1].priority
                if len(claimed) < limit:
                    self._claim_at = now + _POLL
                    return
                least *= 2  # leave out kinds with little room, or each claim would be as small as theirs
        except HeadwayError as error:
            self._note_failure("no task can be claimed", error)

    def _kinds(self) -> list[str]:
        unready = self.unready
        return [
            handler.kind
            for handler in self._queue.handlers.values()
            if handler.isolation == "async" and handler.kind not in unready
        ]

    def _room(self, kind: str) -> int:
        """Return how many more tasks of a kind may be claimed."""
        ahead = max(self._ended_now[kind], self._ended_before[kind])
        of_all = max(self._ended_now.total(), self._ended_before.total())
        most = self._worker.settings.concurrency
        return min(
            self._queue.handlers[kind].concurrency + ahead - self._count[kind],
            most + min(of_all, most) - len(self._runs),
        )

    def _check_turn(self) -> None:
        """Stop claiming if tasks of other kinds, which are not behind ours, have waited for two checks in a row.

        This worker runs them when its async tasks have ended. Another one may do it first.
        """
        served = self._worker.served_kinds()
        others = [kind for kind in served if self._queue.handlers[kind].isolation != "async"]
        if not others:
            return
        queues = [queue for queue in self._worker.settings.queues if queue.place <= self._lowest.place]
        wait = self._worker.other_kinds_wait(others, queues)
        self._is_yielding |= wait and self._others_waited
        self._others_waited = wait

    # ---- supervising -------------------------------------------------------------------------------------------------

    def _supervise(self) -> None:
        """Renew, report and end what is due. Each part has its own interval."""
        now, worker = time.monotonic(), self._worker
        if now >= self._window_at:
            self._window_at = now + _AHEAD
            self._ended_before, self._ended_now = self._ended_now, Counter()
        if self._renewal.is_due:
            self._renew()
        if now >= self._check_at:
            self._check_at = now + _CHECK
            self._note_set_ups()
            self._check_runs()
        if now >= self._pulse_at:
            self._pulse_at = now + PULSE
            self._record_progress()
            self._release_waiting(now)
            worker.show()
            if not worker.outgrown:
                worker.check_memory()
        if now >= self._turn_at:
            self._turn_at = now + _TURN
            self._check_turn()

    def _renew(self) -> None:
        assert self._loop is not None
        shown = next((run.claim.id for run in self._runs.values()), None)
        lost, cancelling = self._worker.renew_all(None, shown)
        for run in self._loop.withdraw(lambda run: run.claim.no in lost or run.claim.no in cancelling):
            run.is_lost = run.claim.no in lost
            before = "the task was cancelled before its handler began"
            self._finish(run, Ended(failure=Failure("TaskCancelled", before)))
        for no in lost & self._runs.keys():
            self._runs[no].is_lost = True
            self._runs[no].reason = _LOST
        for no in cancelling & self._runs.keys():
            self._runs[no].cancelling = True
        self._loop.add(())  # start what has waited for the renewal

    def _check_runs(self) -> None:
        assert self._loop is not None
        worker, blocker = self._worker, self._loop.blocker()
        if blocker is not None:
            self._warn(blocker)
        if worker.is_stopping:
            self._release_waiting(None)
        must_end = worker.must_end
        now = time.monotonic()
        for run in list(self._runs.values()):
            if run.began is None:
                continue
            if run.reason is None:
                run.reason = _reason_to_end(run, now, must_end=must_end)
            if run.reason is not None and self._end(run, blocker):
                return

    def _end(self, run: Run, blocker: Blocker | None) -> bool:
        """Take the next step to end a run; return whether this ended all of them."""
        assert self._loop is not None
        if blocker is not None and blocker.run is not run:
            return False  # the cancellation does not reach the run yet, which is not to blame
        if run.ending is None:
            run.ending = Ending(self._worker.settings.cancel_grace)
        step = run.ending.next_step()
        if step == "raise":
            self._loop.cancel(run)
        elif step == "kill":
            assert run.reason is not None
            if blocker is not None:
                self._end_all(run)
                return True
            log.warning(
                "a handler ignores its cancellation and is abandoned; it may go on beside its next run",
                taskID=run.claim.id, kind=run.claim.kind, reason=run.reason.outcome,
            )  # fmt: skip
            self._loop.abandon(run)
            self._finish(run, run.reason)
        return False

    def _end_all(self, guilty: Run) -> None:
        """End a blocked event loop: charge the run that blocks it, and release the others.

        No signal ends a thread, so the process is killed, and its supervisor starts another one.
        """
        assert self._loop is not None
        assert guilty.reason is not None
        self._finish(guilty, guilty.reason)
        self._loop.withdraw(lambda _: True)
        self._finish_ended()
        for run in list(self._runs.values()):
            run.reason = _STOPPED
            self._finish(run, _STOPPED)
        self._record()
        if not self._worker.is_stopping:
            log.critical(
                "a handler blocks the event loop and cannot be ended; its worker is killed",
                taskID=guilty.claim.id, kind=guilty.claim.kind,
            )  # fmt: skip
            os.kill(os.getpid(), signal.SIGKILL)

    def _warn(self, blocker: Blocker) -> None:
        kind = blocker.run.claim.kind if blocker.run is not None else ""
        now = time.monotonic()
        if now < self._warned.get(kind, 0.0):
            return
        self._warned[kind] = now + _WARN
        log.warning(
            "a handler blocks the event loop, and the worker's other async tasks wait; await instead, or use "
            "asyncio.to_thread",
            worker=self._worker.name, kind=kind or None, taskID=blocker.run.claim.id if blocker.run else None,
            reason=f"{blocker.name} has not awaited for {blocker.seconds:.1f} s",
        )  # fmt: skip

    def _release_waiting(self, now: float | None) -> None:
        """Release runs that have waited too long to begin; all of them if ``now`` is None."""
        assert self._loop is not None
        oldest = None if now is None else now - self._worker.settings.hold
        for run in self._loop.withdraw(lambda run: oldest is None or run.added_at < oldest):
            run.reason = _STOPPED
            self._finish(run, _STOPPED)

    # ---- recording ---------------------------------------------------------------------------------------------------

    def _finish_ended(self) -> None:
        assert self._loop is not None
        for run in self._loop.pop_ended():
            if self._runs.get(run.claim.no) is run:
                assert run.ended is not None
                self._ended_now[run.claim.kind] += 1
                self._finish(run, run.ended)

    def _finish(self, run: Run, ended: Ended) -> None:
        """Drop a run, and buffer its outcome if the worker still owns the task and did not interrupt it to exit."""
        claims, claim = self._worker.claims, run.claim
        del self._runs[claim.no]
        self._count[claim.kind] -= 1
        if run.is_lost:
            log.warning("a task was given to another worker while it ran", taskID=claim.id, worker=self._worker.name)
            claims.leave_loop(claim)
        elif run.reason is _STOPPED and ended.failure is not None:
            self._releasing.append(claim)
        else:
            if run.reason is not None and ended.failure is not None:
                ended = run.reason  # the worker ended the run: record its reason, not the exception
            if run.progress is not None:
                ended = replace(ended, message=run.progress[1])
            self._worker.outcomes.add(claim, ended, run.seconds)
            claims.leave_loop(claim)
            if ended.later is not None and ended.later.scope == "job":
                self._release_kind(claim.kind)

    def _release_kind(self, kind: str) -> None:
        """Release the runs of a kind that have not begun, once its hold is recorded."""
        assert self._loop is not None
        for run in self._loop.withdraw(lambda run: run.claim.kind == kind):
            run.reason = _STOPPED
            self._finish(run, _STOPPED)
        self._loop.resume(kind)

    def _record(self) -> None:
        """Record outcomes and release tasks. If the database is unreachable, both are tried again later."""
        worker = self._worker
        if time.monotonic() < self._retry_at or not (worker.outcomes or self._releasing):
            return
        try:
            worker.outcomes.record()
            if self._releasing:
                worker.claims.release(self._releasing)
                for claim in self._releasing:
                    worker.claims.leave_loop(claim)
                self._releasing = []
            self._failures = 0
        except HeadwayError as error:
            self._note_failure("outcomes could not be recorded", error)

    def _record_progress(self) -> None:
        changed = [run for run in self._runs.values() if run.progress is not run.recorded][:_REPORTS]
        reports = []
        for run in changed:
            run.recorded = run.progress
            if run.progress is not None:
                reports.append((run.claim, *run.progress))
        if reports:
            self._worker.record_progress_of(reports)

    def _note_failure(self, what: str, error: HeadwayError) -> None:
        self._failures += 1
        self._retry_at = time.monotonic() + _RETRY.delay(self._failures)
        log.warning(f"{what}; retrying", worker=self._worker.name, error=str(error))


def _reason_to_end(run: Run, now: float, *, must_end: bool) -> Ended | None:
    """Return why a run must end now; None while it may continue."""
    if must_end:
        return _STOPPED
    limit = run.claim.timeout
    if limit is not None and run.began is not None and now - run.began > limit:
        return Ended(failure=Failure("TimedOut", no_result_within(limit)), outcome="timeout")
    return _CANCELLED if run.cancelling else None
