"""Items run in worker processes on this machine, with detection of items that kill their worker."""

from __future__ import annotations

import selectors
import time
from contextlib import suppress
from typing import Any

from headway.core.setup import Setup
from headway.core.text import plural
from headway.errors import HeadwayError, SetupFailed
from headway.ledger import Failure
from headway.run.output.console import Console
from headway.run.pool.processes import CannotStart, Crew, WorkerHandle
from headway.run.pool.runner import NOTE_SECONDS, Runner, RunParts
from headway.run.program import TERM_SECONDS as PROGRAM_TERM_SECONDS
from headway.run.program import TIMED_OUT, Program, Work
from headway.run.worker.worker import WorkerOrder
from headway.telemetry import Log, metrics

log = Log("run")

#: A worker busy with one item for this many seconds must return its other items.
RECALL_SECONDS = 0.5
#: Give up after this many consecutive workers died before they began an item.
STILLBORN_MOST = 5
#: Seconds until a failed worker start is retried, and for how long while no worker is left.
START_SECONDS = 1.0
START_SECONDS_MOST = 15.0


class LocalRunner(Runner):
    """Runs items in worker processes on this machine."""

    def __init__(self, parts: RunParts, work: Work, setup: Setup | None = None) -> None:
        self._parts, self._settings = parts, parts.settings
        self._backlog, self._gate, self._outcomes = parts.backlog, parts.gate, parts.outcomes
        self._say = parts.context.display.say
        #: Captures output on the terminal of the bar.
        self._console = Console() if parts.context.display.live and Console.is_needed() else None
        if self._console is not None:
            parts.selector.register(self._console, selectors.EVENT_READ, self._console)
        order = WorkerOrder(work, parts.settings.mode, parts.settings.timeout, parts.keep, setup)
        self._has_setup = setup is not None
        self._crew = Crew(parts.selector, order, parts.settings, parts.held.hold.mark, self._console)
        # Async workers and programs enforce the timeout themselves. The parent kills them only after this extra time.
        self._slack = 2.0 if parts.settings.mode == "async" else 0.0
        if isinstance(work, Program):
            self._slack = PROGRAM_TERM_SECONDS + 5.0
        self._stillborn = 0
        #: Earliest time of the next worker start, and since when starts have failed.
        self._start_at = 0.0
        self._short_since: float | None = None
        #: Since when no program could be started while none ran, and whether a shortage was reported.
        self._programs_short_since: float | None = None
        self._reported_shortage = False
        #: Index and start time of the last slot suspect.
        self._examined: tuple[int, float] = (-1, 0.0)

    @property
    def busy(self) -> int:
        return self._crew.busy

    @property
    def idle(self) -> bool:
        return self._crew.idle

    def recall(self) -> None:
        for worker in self._crew:
            self._crew.recall(worker)

    def resize(self, size: int) -> None:
        self._crew.resize(size)

    def abandon(self) -> None:
        """Kill the running items and take the last reports."""
        for worker in self._crew:
            worker.kill()
            for frame in worker.last_frames():
                self._handle_frame(worker, frame)

    def close(self) -> None:
        self._crew.close()
        if self._console is not None:
            for line in self._console.close():
                self._say(line)

    # ---- handing out -----------------------------------------------------------------------------------------------

    def hand_out(self, now: float) -> None:
        try:
            self._hand_to_crew(now)
        except CannotStart as error:
            if self._crew.started >= self._crew.processes and self._crew.size <= self._settings.workers:
                self._cannot_replace(error, now)
            else:
                self._cannot_start(error)

    def _cannot_start(self, error: HeadwayError) -> None:
        """Raise ``error``, unless the run was enlarged on request.

        A failed request must not end the run, so it returns to its initial size.
        """
        if self._crew.size <= self._settings.workers:
            raise error
        self._stillborn = 0
        self._say(f"{error} Continuing with {plural(self._settings.workers, 'item')} at once, as at the start.")
        self.resize(self._settings.workers)

    def _cannot_replace(self, error: CannotStart, now: float) -> None:
        """Go on with the living workers and retry later.

        All workers could be started once, so the shortage may pass.
        """
        if self._short_since is None:
            self._short_since = now
            self._say(f"{error} Retrying.")
        if not len(self._crew) and now - self._short_since > START_SECONDS_MOST:
            raise error
        self._start_at = now + START_SECONDS

    def _hand_to_crew(self, now: float) -> None:
        backlog = self._backlog
        if self._is_examining(now):
            return
        if backlog.slot_suspects and not backlog.ready:
            self._examine(now)
            return
        if backlog.suspects and now >= self._start_at:
            examiner = self._crew.examiner()
            if not examiner.out:
                self._crew.give(examiner, [backlog.suspects.popleft()])
        if not backlog.ready:
            return
        batch = self._parts.batches.size
        # The least busy first, so that the last items of a job are spread over all workers.
        for worker in sorted(self._common(now), key=lambda each: len(each.out)):
            if worker.stopping or worker.wire.pending:
                continue
            slots = worker.slots.count
            room = slots * (2 * batch if batch > 1 else 1) - len(worker.out)
            if room >= slots * batch / 2:
                fair = -(-len(backlog.ready) // self._crew.processes)
                count = self._gate.allow(min(room, slots * batch, max(slots, fair), len(backlog.ready)), now)
                if items := backlog.next_batch(count):
                    self._crew.give(worker, items, may_fail=self._may_fail(worker))
            if not backlog.ready:
                return

    def _common(self, now: float) -> list[WorkerHandle]:
        """Return the workers that take any item; start one per item if allowed now."""
        if now < self._start_at:
            return self._crew.common(0)
        found = self._crew.common(len(self._backlog.held))
        self._short_since = None
        return found

    def _is_examining(self, now: float) -> bool:
        """Return whether a slot suspect runs that may still kill this process.

        An item that runs longer than `NOTE_SECONDS` has its own claim, like every long item.
        """
        idx, began = self._examined
        return now - began < NOTE_SECONDS and any(idx in worker.out for worker in self._crew)

    def _examine(self, now: float) -> None:
        """Run one item that may kill a whole slot, while every other running item is noted in the ledger.

        The item is noted before it begins. If this process is killed, only noted items are charged an attempt.
        """
        if any(idx not in self._outcomes.noted for worker in self._crew for idx in worker.out):
            return
        free = [each for each in self._common(now) if len(each.out) < each.slots.count and not each.wire.pending]
        if free and self._gate.allow(1, now):
            item = self._backlog.slot_suspects.popleft()
            self._outcomes.note([(item.idx, free[0].name)])
            self._examined = (item.idx, time.monotonic())
            self._crew.give(free[0], [item], may_fail=self._may_fail(free[0]))

    def _may_fail(self, worker: WorkerHandle) -> int | None:
        """Return this worker's share of the failures that are left."""
        others = [each for each in self._crew if each is not worker]
        idle = sum(1 for each in others if not each.out)
        return self._gate.share_of_failures(sum(each.may_fail for each in others), idle + 1)

    # ---- reports of workers ----------------------------------------------------------------------------------------

    def handle(self, source: Any, events: int) -> None:
        if isinstance(source, Console):
            for line in source.lines():
                self._say(line)
        else:
            self._handle_worker(source, events)

    def _handle_worker(self, worker: WorkerHandle, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            with suppress(OSError):  # a dead worker is handled when its stream ends
                worker.wire.push()
            self._crew.watch(worker)
        if events & selectors.EVENT_READ:
            alive = worker.wire.receive()
            for frame in worker.wire.frames():
                self._handle_frame(worker, frame)
            if not alive:
                self._worker_ended(worker)

    def _handle_frame(self, worker: WorkerHandle, frame: Any) -> None:
        if "back" in frame:
            worker.recalled = False
            self._backlog.put_back(worker.out.pop(idx) for idx in frame["back"] if idx in worker.out)
            return
        if "setup" in frame:
            raise SetupFailed(frame["setup"])
        if "short" in frame:
            self._programs_are_short(frame["short"])
            return
        if "alone" in frame:
            self._backlog.suspect(worker.out.pop(idx) for idx in frame["alone"] if idx in worker.out)
            return
        worker.reported, self._stillborn, self._programs_short_since = True, 0, None
        worker.failures += len(frame["failed"])
        worker.printed.update(frame["printed"])
        self._outcomes.add_report(worker.out, frame, worker.name, worker.printed)

    def _programs_are_short(self, reason: str) -> None:
        """Handle a worker that could not start a program.

        Its items wait for running programs to end; if none run, only for a while.
        """
        now = time.monotonic()
        if not self._reported_shortage:
            self._reported_shortage = True
            self._say(f"No more programs can be started at once: {reason}. The rest waits; no attempt is counted.")
        if self.busy or self._programs_short_since is None:
            self._programs_short_since = now
        elif now - self._programs_short_since > START_SECONDS_MOST:
            raise CannotStart(f"No program could be started for {START_SECONDS_MOST:g} s: {reason}.")

    def _worker_ended(self, worker: WorkerHandle) -> None:
        """Handle a dead worker and charge only the item that killed it."""
        how, cut_off = self._crew.remove(worker)
        running, begun = dict(worker.running()), worker.begun()
        worker.slots.close()
        if begun or not worker.stopping:
            log.warning("a worker died", worker=worker.name, reason=how, count=len(running))
            metrics.count("headway_worker_deaths")
        # If it was cut off or died between two items, the running items are not necessarily to blame.
        suspects = list(running) if running and not cut_off else begun
        if len(suspects) == 1:
            (idx,) = suspects
            item = worker.out.pop(idx)
            why = " (did the function close file descriptors that are not its own?)" if cut_off else ""
            failure = Failure("WorkerDied", f"the worker process {how} while it ran this item{why}")
            seconds = time.monotonic() - running[idx] if idx in running else None
            self._outcomes.fail(item, failure, worker.name, seconds)
        elif suspects:
            # One of several items is to blame: rerun each alone, without counting an attempt.
            self._backlog.suspect(worker.out.pop(idx) for idx in suspects)
        elif not worker.reported and not worker.stopping:
            self._stillborn += 1
            if self._stillborn >= STILLBORN_MOST:
                self._cannot_start(
                    HeadwayError(
                        f"{self._stillborn} workers in a row {how} before they started an item.",
                        hint=f"Call the {'set-up' if self._has_setup else 'function'} once in a new process to see why.",
                    )
                )
        self._backlog.put_back(worker.out.values())

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def check(self, now: float) -> list[tuple[int, str, float]]:
        for worker in self._crew.dead():
            for frame in worker.last_frames():
                self._handle_frame(worker, frame)
            self._worker_ended(worker)
        all_running: list[tuple[int, str, float]] = []
        for worker in self._crew:
            running = worker.running()
            longest = max((now - began for _, began in running), default=0.0)
            if longest > RECALL_SECONDS and len(worker.out) > len(running):
                self._crew.recall(worker)
            self._end_overdue(worker, running, now)
            all_running += [(idx, worker.name, began) for idx, began in running]
            if worker.alone and not worker.out and not self._backlog.suspects:
                self._crew.dismiss(worker)
        return all_running

    def _end_overdue(self, worker: WorkerHandle, running: list[tuple[int, float]], now: float) -> None:
        limit = self._settings.timeout
        if limit is None:
            return
        limit += self._slack
        overdue = [(idx, began) for idx, began in running if now - began - self._parts.standstills.since(began) > limit]
        if not overdue:
            return
        worker.kill()
        worker.stopping = True
        for frame in worker.last_frames():
            self._handle_frame(worker, frame)
        if self._settings.mode == "async" and len(running) > 1:
            # Its loop is blocked by an unknown item: rerun each alone, without counting an attempt.
            self._backlog.suspect(worker.out.pop(idx) for idx, _ in running if idx in worker.out)
            overdue = []
        for idx, began in overdue:
            item = worker.out.pop(idx, None)
            if item is not None:  # it was not among the last reports
                failure = Failure(TIMED_OUT, f"no result within {self._settings.timeout:g} s")
                self._outcomes.fail(item, failure, worker.name, now - began, outcome="timeout")
        # Other items of that process are not to blame: rerun them without counting an attempt.
        self._backlog.put_back(worker.out.values())
        worker.out.clear()
