"""The loop of a run: it owns the ledger, hands out items and commits outcomes in groups.

It is single-threaded, so it needs no locks and can safely fork a replacement worker. If the whole run is killed, the
ledger alone determines what is left to do.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable

from headway.core.lifecycle import Budget
from headway.core.text import plural
from headway.errors import HeadwayError, SetupFailed
from headway.run.display.display import RunSnapshot, describe_wait
from headway.run.output.results import Keep
from headway.run.pool.backlog import Backlog, MakeBacklog
from headway.run.pool.control import ControlRequests
from headway.run.pool.counts import RunCounts
from headway.run.pool.gate import BatchSizer, StartGate
from headway.run.pool.outcomes import Outcomes
from headway.run.pool.runner import COMMIT_PAUSE, Ending, HeldJob, RunContext, Runner, RunParts, Settings, WakeUp
from headway.run.pool.standstill import Standstills

#: Interval of chores: dead workers, overdue items, control requests and the display, seconds.
CHORES_SECONDS = 0.1
#: Seconds that running items get after SIGTERM (not Ctrl-C) before they are abandoned.
TERM_SECONDS = 4.0


class RunLoop:
    """Runs a held job to its end."""

    def __init__(
        self,
        held: HeldJob,
        settings: Settings,
        context: RunContext,
        keep: Keep,
        make_runner: Callable[[RunParts], Runner],
        make_backlog: MakeBacklog = Backlog,
    ) -> None:
        self._held, self._settings, self._context = held, settings, context
        self._selector = selectors.DefaultSelector()
        self._counts = RunCounts(held.job.info())
        self._gate = StartGate(self._counts, rate=settings.rate, max_failures=settings.max_failures)
        self._backlog = make_backlog(held.job, self._counts.add_damaged)
        batches = BatchSizer()
        self._outcomes = Outcomes(held, settings, keep, self._backlog, self._gate, self._counts, batches)
        self._standstills = Standstills(time.monotonic())
        self._runner = make_runner(
            RunParts(
                held, settings, context, keep, self._selector, self._backlog, self._counts, self._gate, batches,
                self._outcomes, self._standstills,
            )
        )  # fmt: skip
        self._control = ControlRequests(held, settings, context, self._gate, self._runner)
        self._stop_reason: str | None = None
        self._completed = False

    def run(self) -> Ending:
        """Run the job to its end and return how it ended."""
        began = time.monotonic()
        feed, display = self._context.feed, self._context.display
        wake = WakeUp()
        self._context.shutdown.on_request(wake.notify)
        self._selector.register(wake, selectors.EVENT_READ, wake)
        if feed is not None and not feed.ended:
            self._selector.register(feed.fileno(), selectors.EVENT_READ, feed)
        try:
            self._control.obey_wait()  # before anything starts
            while self._run_once():
                pass
        except SetupFailed:
            self._outcomes.end()  # no running item is to blame
            raise
        finally:
            self._runner.close()
            self._selector.close()
            wake.close()
            display.end(self._snapshot())
        if unkept := self._counts.unkept:
            display.say(
                f"The results of {plural(unkept, 'item')} were not kept: they are not JSON, or longer than a megabyte."
            )
        seconds = time.monotonic() - began
        return self._counts.ending(self._stop_reason or "finished", completed=self._completed, seconds=seconds)

    def _run_once(self) -> bool:
        """Run until no item is left or the run must stop. Return whether new items to run were found after that."""
        self._loop()
        self._outcomes.end()
        if self._context.output is not None:
            self._context.output.write()
        if self._stop_reason is not None:
            self._reconcile()
            return False
        self._completed = self._held.job.finish(self._held.hold)
        # Dead letters retried after `finish` belong to the next run. `find_more` may give up a damaged item that was
        # the last open one; then `finish` must run again.
        failures = self._counts.failures
        more = self._backlog.find_more(time.monotonic())
        self._reconcile()
        self._counts.in_last_pass = False
        return more or self._counts.failures != failures

    def _loop(self) -> None:
        chores_at = commit_at = time.monotonic()
        renew_at = chores_at + self._held.hold.lease / 3
        grace: Budget | None = None
        shutdown, outcomes = self._context.shutdown, self._outcomes
        while True:
            now = time.monotonic()
            if shutdown.stop.is_set() and grace is None:
                grace = self._begin_stop()
            if grace is not None and (shutdown.abandon.is_set() or grace.spent):
                self._runner.abandon()
                return
            if outcomes and (now >= commit_at or outcomes.are_urgent):
                outcomes.commit()
                commit_at = max(time.monotonic() + COMMIT_PAUSE, now + self._settings.commit_seconds)
            if self._gate.must_recall:
                self._begin_wait()
            if self._has_ended(now):
                return
            if now >= chores_at:
                chores_at = now + CHORES_SECONDS
                self._do_chores(now)
            if now >= renew_at:
                renew_at = now + self._held.hold.lease / 3
                self._held.renew(outcomes.noted)
            self._listen(self._patience(now, commit_at if outcomes else None))

    def _has_ended(self, now: float) -> bool:
        """Start what may start. Return whether nothing is left to do."""
        self._stop_if_failed_too_often()
        if self._stop_reason is None:
            self._backlog.refill(now)
            self._stop_if_failed_too_often()  # `refill` gives up damaged items
        if self._stop_reason is not None:
            return self._runner.idle
        backlog = self._backlog
        if (backlog.ready or backlog.suspects or backlog.slot_suspects) and self._gate.is_open:
            self._runner.hand_out(now)
        return self._is_through()

    def _is_through(self) -> bool:
        """Return whether nothing is left to do, including the final pass over dead letters."""
        if not self._backlog.empty or self._outcomes or self._feed_is_open():
            return False
        if not self._settings.last_pass:
            return True
        self._counts.in_last_pass = True  # set first: items found damaged in this pass were dead already
        return not self._backlog.fetch_last_pass()

    def _feed_is_open(self) -> bool:
        return self._context.feed is not None and not self._context.feed.ended

    # ---- waiting ---------------------------------------------------------------------------------------------------

    def _patience(self, now: float, commit_at: float | None) -> float:
        """Return how many seconds the loop may wait for events."""
        until = now + CHORES_SECONDS
        if commit_at is not None:
            until = min(until, commit_at)
        if self._backlog.next_due is not None and not self._backlog.ready:
            until = min(until, self._backlog.next_due)
        if wait := self._gate.wait_left:
            until = min(until, now + wait)
        elif self._gate.interval is not None and self._backlog.ready:
            until = min(until, now + self._gate.interval)
        return max(0.0, until - now)

    def _listen(self, patience: float) -> None:
        began = time.monotonic()
        events = self._selector.select(patience)
        now = time.monotonic()
        self._standstills.note_wait(now - began - patience, now)
        for key, mask in events:
            source = key.data
            if isinstance(source, WakeUp):
                source.clear()
            elif source is self._context.feed:
                self._read_feed()
            else:
                self._runner.handle(source, mask)

    def _read_feed(self) -> None:
        feed = self._context.feed
        assert feed is not None
        self._counts.total += feed.register_arrived()
        self._backlog.more_arrived()
        if feed.ended:
            self._selector.unregister(feed.fileno())

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def _do_chores(self, now: float) -> None:
        was_suspended = self._standstills.note_chores(now)
        self._control.poll(now)
        self._outcomes.note_long(self._runner.check(now), now)
        if self._context.output is not None:
            self._context.output.write_sometimes()
        self._context.display.show(self._snapshot(stopped=was_suspended))

    def _snapshot(self, *, stopped: bool = False) -> RunSnapshot:
        return self._counts.snapshot(
            running=self._runner.busy,
            has_total=not self._feed_is_open(),
            paused_by=self._gate.paused_by,
            wait=(self._gate.wait_left, self._gate.wait_reason),
            stopped=stopped,
        )

    def _reconcile(self) -> None:
        """Adopt the counts of the ledger at the end. It may have lost records if the database was restored meanwhile."""
        info = self._backlog.info()
        if info is None:
            return
        if lost := self._counts.reconcile(info):
            self._context.display.say(
                f"The ledger no longer has the records of {plural(lost, 'item')}: the database was restored to an "
                "earlier moment." + (" Running them again." if self._stop_reason is None else "")
            )
        if self._stop_reason is None and (info.total < self._counts.total or not info.sealed):
            raise HeadwayError(
                f"The database was restored to a moment at which only {plural(info.total, 'item')} of job "
                f"{self._held.job.id} were registered.",
                hint="Run the same command again: it registers the missing items and runs them.",
            )

    def _begin_wait(self) -> None:
        """Take back what workers have not begun, because the job waits."""
        self._gate.must_recall = False
        if self._stop_reason is None:
            self._runner.recall()
            self._context.display.say(describe_wait(self._gate.wait_left, self._gate.wait_reason))

    # ---- stopping --------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> Budget:
        busy = plural(self._runner.busy, "item")
        self._stop("interrupted")
        say = self._context.display.say
        if self._control.stopped_by:
            say(f"Stopping, as {self._control.stopped_by} asked: finishing {busy} ...")
            return Budget(10**9)
        if self._context.shutdown.signum == signal.SIGINT:
            say(f"Stopping: finishing {busy} (Ctrl-C again to abandon them) ...")
            return Budget(10**9)
        say(f"Stopping: finishing {busy} for up to {TERM_SECONDS:g} s ...")
        return Budget(TERM_SECONDS)

    def _stop_if_failed_too_often(self) -> None:
        if self._stop_reason is None and self._gate.failed_too_often:
            self._stop("stopped")

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        self._backlog.close()
        self._runner.recall()
