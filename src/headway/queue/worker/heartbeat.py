"""Supervise running tasks: renew their leases, and end a run that is cancelled, too long or too large."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

from headway.core.failure import Failure
from headway.core.retry import LaterLimit
from headway.queue.store.claim import LEASE
from headway.queue.task import PRIORITIES, Claim, Priority
from headway.queue.worker.execution import (
    CannotStart,
    Ended,
    TaskCancelled,
    TaskStopped,
    TaskTimeout,
    TaskTooLarge,
    no_result_within,
    rss,
)
from headway.queue.worker.process_state import Interrupts
from headway.telemetry import Log

log = Log("queue")

#: Maximum bytes of memory for the process of a task.
MEMORY_LIMIT = 500 * 2**20
#: Seconds for a handler to stop by itself before it is killed.
CANCEL_GRACE = 5.0
#: Seconds between two checks of a running task.
PULSE = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a worker. They may change before each claim. Times are in seconds."""

    queues: Sequence[Priority] = PRIORITIES
    batch: int = 10
    lease: float = LEASE
    memory_limit: int = MEMORY_LIMIT  # bytes
    cancel_grace: float = CANCEL_GRACE
    drain: float = 30.0  # for running tasks to finish when the worker must exit
    rest: float = 1.0  # between two claims of an idle worker
    concurrency: int = 1000  # most async tasks at once, of all kinds
    hold: float = 1.0  # for a claimed task to start; then it is released, because another worker may be idle
    later_limit: LaterLimit = field(default_factory=LaterLimit)  # of the postponements of one task
    timeout_limit: float | None = None  # longest timeout of a run, whatever its handler allows


class RunSupport(Protocol):
    """What a worker does for the task that runs. The heartbeat thread calls it, so it handles errors of the database."""

    @property
    def settings(self) -> Settings: ...

    @property
    def must_end(self) -> bool:
        """Whether the time of running tasks is over, because the worker must exit."""
        ...

    def record_progress(self, claim: Claim, percent: float, message: str) -> bool:
        """Record progress; return whether to cancel the task."""
        ...

    def record_outcomes(self) -> None:
        """Record the outcomes of ended runs; after an error the next call tries again."""
        ...

    def show(self) -> None:
        """Show the running task in the source's own tools."""
        ...

    def renew(self, running: Claim | None) -> tuple[bool, bool]:
        """Renew all leases; return (whether the running task is lost, whether it is to be cancelled)."""
        ...

    def release_waiting(self) -> None:
        """Release claims that have waited too long to start."""
        ...


class Renewal:
    """When to renew leases: often enough for them, and to learn of a cancellation soon."""

    def __init__(self, settings: Settings) -> None:
        self._interval = min(settings.lease / 3, 1.5)
        # The first one is soon, because it also reports the task that the worker runs.
        self._at = time.monotonic() + min(self._interval, 1.0)

    @property
    def is_due(self) -> bool:
        """Whether to renew now. If so, the next renewal is one interval later."""
        now = time.monotonic()
        if now < self._at:
            return False
        self._at = now + self._interval
        return True


#: The exception that ends a handler, by the outcome of its run; `TaskCancelled` for any other.
_RAISED: Mapping[str, type[BaseException]] = {"timeout": TaskTimeout, "memory": TaskTooLarge}


Step = Literal["raise", "wait", "kill"]


class Ending:
    """The steps that end a handler: raise an exception in it, once more after half of the grace, then kill.

    Once more, because Python drops an exception that is raised in a destructor or in a callback of C code. Not more often:
    it would interrupt the handler's ``finally`` blocks.
    """

    def __init__(self, grace: float) -> None:
        self._grace, self._since, self._raised = grace, time.monotonic(), 0

    def next_step(self) -> Step:
        """Return what to do now."""
        passed = time.monotonic() - self._since
        if self._raised == 0 or (self._raised == 1 and self._grace / 2 < passed <= self._grace):
            self._raised += 1
            return "raise"
        return "kill" if passed > self._grace else "wait"


class Watch:
    """Decides when a run must end."""

    def __init__(self, claim: Claim, settings: Settings) -> None:
        self._claim, self._settings = claim, settings
        self._cancelling_since: float | None = None
        self._ending: Ending | None = None
        self.reason: Ended | None = None  # why the worker ends the run, from the first step on

    @property
    def cancelling(self) -> bool:
        """Whether the task is to be cancelled. It stays true."""
        return self._cancelling_since is not None

    @cancelling.setter
    def cancelling(self, wanted: bool) -> None:
        if wanted and self._cancelling_since is None:
            self._cancelling_since = time.monotonic()

    def verdict(self, seconds: float, rss: int) -> Ended | None:
        """Return the outcome with which the run must end now; None while it may continue."""
        limit, settings = self._claim.timeout, self._settings
        if rss > settings.memory_limit:
            most = settings.memory_limit // 2**20
            failure = Failure("MemoryLimit", f"the task's process used more than {most} MB")
            return Ended(failure=failure, outcome="memory")
        if limit is not None and seconds > limit:
            return Ended(failure=Failure("TimedOut", no_result_within(limit)), outcome="timeout")
        if self._cancelling_since is not None and time.monotonic() - self._cancelling_since > settings.cancel_grace:
            return Ended(failure=Failure("TaskCancelled", "the task was cancelled and its handler did not end"))
        return None

    def next_step(self, seconds: float, rss: int) -> Step:
        """Return what to do with a forked run. One that uses too much memory is killed without a grace period."""
        found = self.verdict(seconds, rss)
        if found is None:
            return "wait"
        if found.outcome == "memory":
            self.reason = found
            return "kill"
        if self._ending is None:
            self.reason, self._ending = found, Ending(self._settings.cancel_grace)
        return self._ending.next_step()


class Pulse:
    """The heartbeat thread beside handlers that run in the worker's process.

    It supervises the whole batch: the running task, claims that wait to start, and outcomes that are not recorded yet. Each
    belongs to the worker only while its lease is renewed. It is entered for each batch. Between two batches the thread
    is idle: starting a thread takes longer than a short batch.
    """

    def __init__(self, worker: RunSupport, interrupts: Interrupts) -> None:
        self._worker, self.interrupts = worker, interrupts
        self._closed = threading.Event()
        self._checking = threading.Lock()  # held during each check
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._begin_batch(is_active=False)

    def _begin_batch(self, *, is_active: bool) -> None:
        self._is_active = is_active
        self._current: tuple[Claim, Watch, float] | None = None
        self._renewal = Renewal(self._worker.settings)
        self._progress: tuple[int, float, str] | None = None  # (the claim's number, percent, message)
        self._recorded: tuple[int, float, str] | None = None  # the progress that was recorded last
        self.cancelling = False
        self.lost: set[int] = set()
        self._ending: tuple[int, Ending] | None = None  # (the claim's number, its steps)

    def __enter__(self) -> Self:
        with self._checking:
            self._begin_batch(is_active=True)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="headway-pulse", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # the system refuses another thread
                self._thread = None
                raise CannotStart(f"No heartbeat thread can be started: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with self._checking:  # wait for a check that is under way
            self._is_active = False

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, claim: Claim) -> None:
        """Supervise a task that starts."""
        with self._lock:
            self._current = (claim, Watch(claim, self._worker.settings), time.monotonic())
            self.cancelling, self._progress, self._recorded = False, None, None

    def end(self) -> None:
        """Stop supervising the task: its handler has returned."""
        with self._lock:
            self._current = None

    def last_message(self, claim: Claim) -> str | None:
        """Return the task's last progress message, if there is any."""
        progress = self._progress
        return progress[2] if progress is not None and progress[0] == claim.no else None

    def report(self, claim: Claim, percent: float, message: str) -> None:
        """Store the progress of a task, to be recorded by the thread.

        It has the task's number, because a thread that a handler left behind reports for its own task, whatever runs now.
        No lock is taken: the handler might be interrupted while holding it.
        """
        self._progress = (claim.no, percent, message)

    def is_cancelled(self, claim: Claim) -> bool:
        """Return whether to cancel the task. It is true for an ended task too, so that threads of its handler end."""
        return self.cancelling or not self._is_current(claim)

    def _is_current(self, claim: Claim) -> bool:
        return self._current is not None and self._current[0].no == claim.no

    def _run(self) -> None:
        while not self._closed.wait(min(PULSE, self._worker.settings.lease / 4)):
            with self._checking:
                if self._is_active:
                    self._check()

    def _check(self) -> None:
        with self._lock:
            current = self._current
        if current is not None:
            self._check_run(*current)
        elif self._renewal.is_due:
            self._worker.renew(None)
        self._worker.record_outcomes()
        self._worker.show()
        self._worker.release_waiting()

    def _check_run(self, claim: Claim, watch: Watch, began: float) -> None:
        worker = self._worker
        if worker.must_end:
            self._end(claim, TaskStopped())
            return
        progress = self._progress
        if progress is not None and progress is not self._recorded and progress[0] == claim.no:
            self._recorded = progress
            watch.cancelling |= worker.record_progress(claim, *progress[1:])
        if self._renewal.is_due:
            lost, cancelling = worker.renew(claim)
            watch.cancelling |= cancelling
            if lost:
                self.lost.add(claim.no)
                self._end(claim, TaskCancelled("the lease expired"))
                return
        if watch.cancelling:
            self.cancelling = True
        verdict = watch.verdict(time.monotonic() - began, rss(os.getpid()))
        if verdict is not None and verdict.failure is not None:
            self._end(claim, _RAISED.get(verdict.outcome, TaskCancelled)(verdict.failure.message))

    def _end(self, claim: Claim, error: BaseException) -> None:
        with self._lock:
            if not self._is_current(claim):
                return
            if self._ending is None or self._ending[0] != claim.no:
                self._ending = (claim.no, Ending(self._worker.settings.cancel_grace))
            step = self._ending[1].next_step()
            if step == "kill":
                # The handler ignores the exception, or hangs where no signal reaches it. Its lease would be renewed for
                # ever. Without this process the supervisor starts another worker, and the sweeper counts the attempt.
                log.critical(
                    "a handler cannot be ended; its worker is killed", taskID=claim.id, reason=type(error).__name__
                )
                os.kill(os.getpid(), signal.SIGKILL)
            if step == "raise":
                self.interrupts.raise_in_handler(error)
