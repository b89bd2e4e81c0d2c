"""The worker processes of this machine: items are handed to them in batches, and the item that kills one is found."""

from __future__ import annotations

import selectors
import time
from contextlib import suppress
from typing import Any

from headway.errors import HeadwayError
from headway.ledger import Failure, Hold, Item, Job, Ledger
from headway.lifecycle import Shutdown
from headway.run.backlog import Backlog, MakeBacklog
from headway.run.console import Console
from headway.run.crew import CannotStart, Crew, WorkerHandle
from headway.run.display import Display
from headway.run.output import CsvOutput, Output
from headway.run.pool import BATCH_BYTES, NOTE_SECONDS, Feed, Pool, Settings, items_of
from headway.run.program import TERM_SECONDS as PROGRAM_TERM_SECONDS
from headway.run.program import TIMED_OUT, Program, Work
from headway.run.results import Keep
from headway.telemetry import Log, metrics

log = Log("run")

#: A worker that is busy with one item for this long gives the others it holds back.
RECALL_SECONDS = 0.5
#: Workers that die one after the other without having begun an item.
STILLBORN_MOST = 5
#: When the machine lets no other worker start, that is tried again after so long; if nobody is left to work, for so long.
START_SECONDS = 1.0
START_SECONDS_MOST = 15.0


class LocalPool(Pool):
    def __init__(
        self,
        ledger: Ledger,
        job: Job,
        hold: Hold,
        function: Work,
        settings: Settings,
        *,
        display: Display,
        shutdown: Shutdown,
        output: Output | CsvOutput | None = None,
        keep: Keep,
        feed: Feed | None = None,
        backlog: MakeBacklog = Backlog,
    ) -> None:
        super().__init__(
            ledger, job, hold, settings,
            display=display, shutdown=shutdown, output=output, keep=keep, feed=feed, backlog=backlog,
        )  # fmt: skip
        self._console = Console() if display.live and Console.is_needed() else None
        self._crew = Crew(
            self._selector, function,
            start=settings.start.how, mode=settings.mode, size=settings.workers, mark=hold.mark, timeout=settings.timeout,
            keep=keep, console=self._console,
        )  # fmt: skip
        # Who sees to the time of each item itself is ended from here only if it does not come to that.
        self._slack = 2.0 if settings.mode == "async" else 0.0
        if isinstance(function, Program):
            self._slack = PROGRAM_TERM_SECONDS + 5.0
        self._stillborn = 0
        #: No worker is started before, and since when none could be.
        self._start_at = 0.0
        self._short_since: float | None = None
        #: Since when programs could not be started while none ran, and whether that was said.
        self._programs_short_since: float | None = None
        self._said_short = False
        #: The slot suspect that began last, and when.
        self._examined: tuple[int, float] = (-1, 0.0)

    @property
    def _busy(self) -> int:
        return self._crew.busy

    @property
    def _idle(self) -> bool:
        return self._crew.idle

    def _recall(self) -> None:
        for worker in self._crew:
            self._crew.recall(worker)

    def _resize(self, size: int) -> None:
        self._crew.resize(size)

    def _cannot_start(self, error: HeadwayError) -> None:
        """What somebody asks for from elsewhere ends no run: one that cannot grow goes on as it was started."""
        if self._crew.size <= self._settings.workers:
            raise error
        self._stillborn = 0
        self._display.say(f"{error} Going on with {items_of(self._settings.workers)} at once, as at the start.")
        self._resize(self._settings.workers)

    def _cannot_replace(self, error: CannotStart, now: float) -> None:
        """All that were asked for could be started once, so this may pass: those that live go on without."""
        if self._short_since is None:
            self._short_since = now
            self._display.say(f"{error} It is tried again.")
        if not len(self._crew) and now - self._short_since > START_SECONDS_MOST:
            raise error
        self._start_at = now + START_SECONDS

    def _abandon(self) -> None:
        """Kill what still runs."""
        for worker in self._crew:
            worker.kill()
            for frame in worker.last_frames():
                self._take(worker, frame)

    def _close(self) -> None:
        self._crew.close()

    # ---- handing out -----------------------------------------------------------------------------------------------

    def _hand_out(self, now: float) -> None:
        try:
            self._hand_to_crew(now)
        except CannotStart as error:
            if self._crew.started >= self._crew.processes and self._crew.size <= self._settings.workers:
                self._cannot_replace(error, now)
            else:
                self._cannot_start(error)

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
        batch = self._batch_size()
        # Those with least to do first, so that the last items of a job are spread over all of them.
        for worker in sorted(self._common(now), key=lambda each: len(each.out)):
            if worker.stopping or worker.wire.pending:
                continue
            slots = worker.slots.count
            room = slots * (2 * batch if batch > 1 else 1) - len(worker.out)
            if room >= slots * batch / 2:
                fair = -(-len(backlog.ready) // self._crew.processes)
                count = self._allowed(min(room, slots * batch, max(slots, fair), len(backlog.ready)), now)
                self._give(worker, count)
            if not backlog.ready:
                return

    def _common(self, now: float) -> list[WorkerHandle]:
        """Those that take any item: as many as there are items, if they may be started now."""
        if now < self._start_at:
            return self._crew.common(0)
        found = self._crew.common(len(self._backlog.held))
        self._short_since = None
        return found

    def _is_examining(self, now: float) -> bool:
        """Whether a slot suspect runs that may still kill this process at its beginning. What runs for longer has a claim of
        its own, like everything else that does."""
        idx, began = self._examined
        return now - began < NOTE_SECONDS and any(idx in worker.out for worker in self._crew)

    def _examine(self, now: float) -> None:
        """Let one slot suspect run: written down before it begins, and beside nothing that is not. So if this process is
        killed, nobody but that one is charged for it."""
        if any(idx not in self._noted for worker in self._crew for idx in worker.out):
            return
        free = [each for each in self._common(now) if len(each.out) < each.slots.count and not each.wire.pending]
        if free and self._allowed(1, now):
            item = self._backlog.slot_suspects.popleft()
            self._note([(item.idx, free[0].name)])
            self._examined = (item.idx, time.monotonic())
            self._crew.give(free[0], [item], may_fail=self._may_fail(free[0]))

    def _give(self, worker: WorkerHandle, count: int) -> None:
        """Send up to ``count`` items, fewer if they are large."""
        items: list[Item] = []
        size = 0
        while len(items) < count and size < BATCH_BYTES:
            items.append(self._backlog.ready.popleft())
            size += len(items[-1].payload or "")
        if items:
            self._crew.give(worker, items, may_fail=self._may_fail(worker))

    def _may_fail(self, worker: WorkerHandle) -> int | None:
        """This worker's share of what may still fail: after that it gives back what it has not begun. Shares never add
        up to more than is left, except that each worker may always run one item per slot."""
        left = self._failures_left()
        if left is None:
            return None
        others = [each for each in self._crew if each is not worker]
        idle = sum(1 for each in others if not each.out)
        return max(1, (left - sum(each.may_fail for each in others)) // (idle + 1))

    # ---- what workers say ------------------------------------------------------------------------------------------

    def _attend(self, source: Any, events: int) -> None:
        worker: WorkerHandle = source
        if events & selectors.EVENT_WRITE:
            with suppress(OSError):  # the end of its stream says the rest
                worker.wire.push()
            self._crew.watch(worker)
        if events & selectors.EVENT_READ:
            alive = worker.wire.receive()
            for frame in worker.wire.frames():
                self._take(worker, frame)
            if not alive:
                self._worker_ended(worker)

    def _take(self, worker: WorkerHandle, frame: Any) -> None:
        if "back" in frame:
            worker.recalled = False
            self._backlog.put_back(worker.out.pop(idx) for idx in frame["back"] if idx in worker.out)
            if self._stop_reason is not None:
                self._backlog.release()
            return
        if "short" in frame:
            self._programs_are_short(frame["short"])
            return
        if "alone" in frame:
            self._backlog.suspects.extend(worker.out.pop(idx) for idx in frame["alone"] if idx in worker.out)
            if self._stop_reason is not None:
                self._backlog.release()
            return
        worker.reported, self._stillborn, self._programs_short_since = True, 0, None
        worker.failures += len(frame["failed"])
        worker.printed.update(frame["printed"])
        self._take_outcomes(worker.out, frame, worker.name, worker.printed)

    def _programs_are_short(self, reason: str) -> None:
        """A worker could not start a program. Its items wait for those that run; without any, for a while."""
        now = time.monotonic()
        if not self._said_short:
            self._said_short = True
            self._display.say(
                f"No more programs can be started at once: {reason}. The others wait; no attempt is counted."
            )
        if self._busy or self._programs_short_since is None:
            self._programs_short_since = now
        elif now - self._programs_short_since > START_SECONDS_MOST:
            raise CannotStart(f"No program could be started for {START_SECONDS_MOST:g} s: {reason}.")

    def _worker_ended(self, worker: WorkerHandle) -> None:
        """A worker has ended: find out why, charge the item that killed it and nobody else."""
        how, cut_off = self._crew.remove(worker)
        running, begun = dict(worker.running()), worker.begun()
        worker.slots.close()
        if begun or not worker.stopping:
            log.warning("a worker died", worker=worker.name, reason=how, count=len(running))
            metrics.count("headway_worker_deaths")
        # What ran when it was cut off, or when it ended by itself between two items, need not be what did that.
        suspects = list(running) if running and not cut_off else begun
        if len(suspects) == 1:
            (idx,) = suspects
            item = worker.out.pop(idx)
            why = " (did the function close file descriptors that are not its own?)" if cut_off else ""
            failure = Failure("WorkerDied", f"the worker process {how} while it ran this item{why}")
            seconds = time.monotonic() - running[idx] if idx in running else None
            self._fail(idx, item.attempts, failure, "failed", seconds, worker.name)
        elif suspects:
            # One of several items is to blame: each runs again, alone, at no cost to the others.
            self._backlog.suspects.extend(worker.out.pop(idx) for idx in suspects)
        elif not worker.reported and not worker.stopping:
            self._stillborn += 1
            if self._stillborn >= STILLBORN_MOST:
                self._cannot_start(
                    HeadwayError(
                        f"{self._stillborn} workers in a row {how} before they began an item.",
                        hint="Run the function once by hand in a fresh process to see why.",
                    )
                )
        self._backlog.put_back(worker.out.values())

    # ---- chores, ten times a second --------------------------------------------------------------------------------

    def _look_after(self, now: float) -> list[tuple[int, str, float]]:
        for worker in self._crew.dead():
            for frame in worker.last_frames():
                self._take(worker, frame)
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

    def _slept_since(self, began: float) -> float:
        """For how long this process stood still while an item ran. The item may have stood still with it: that is not the
        time it takes, and nobody is charged for it."""
        known = (*self._standstills, self._gap)
        return sum(min(seconds, woke_at - began) for woke_at, seconds in known if woke_at > began)

    def _end_overdue(self, worker: WorkerHandle, running: list[tuple[int, float]], now: float) -> None:
        limit = self._settings.timeout
        if limit is None:
            return
        limit += self._slack
        overdue = [(idx, began) for idx, began in running if now - began - self._slept_since(began) > limit]
        if not overdue:
            return
        worker.kill()
        worker.stopping = True
        for frame in worker.last_frames():
            self._take(worker, frame)
        if self._settings.mode == "async" and len(running) > 1:
            # Its loop is blocked, by which item nobody can tell: each runs again, alone, at no cost to the others.
            self._backlog.suspects.extend(worker.out.pop(idx) for idx, _ in running if idx in worker.out)
            overdue = []
        for idx, began in overdue:
            item = worker.out.pop(idx, None)
            if item is not None:  # it did not report in the last moment
                failure = Failure(TIMED_OUT, f"no result within {self._settings.timeout:g} s")
                self._fail(idx, item.attempts, failure, "timeout", now - began, worker.name)
        # What else ran in that process did nothing wrong: it runs again and is charged nothing.
        self._backlog.put_back(worker.out.values())
        worker.out.clear()
