"""Looking after what runs: when its lease is renewed, and when it must end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from headway.core.failure import Failure
from headway.queue.store.claim import LEASE
from headway.queue.task import PRIORITIES, Claim, Priority
from headway.queue.worker.execution import (
    CannotBegin,
    Ended,
    TaskCancelled,
    TaskStopped,
    TaskTimeout,
    TaskTooLarge,
    no_result_within,
    rss,
)
from headway.queue.worker.inline import Interrupts
from headway.telemetry import Log

log = Log("queue")

#: Bytes of memory the process of a task may use.
MEMORY_LIMIT = 500 * 2**20
#: Seconds a handler that is asked to stop gets before it is ended.
CANCEL_GRACE = 5.0
#: How often a running task is looked after.
PULSE = 0.5


@dataclass(frozen=True, slots=True)
class Settings:
    """How a worker works; read anew before each claim, so that it may change while the worker runs."""

    queues: Sequence[Priority] = PRIORITIES
    batch: int = 10
    lease: float = LEASE
    memory_limit: int = MEMORY_LIMIT
    cancel_grace: float = CANCEL_GRACE
    drain: float = 30.0
    rest: float = 1.0
    hold: float = 1.0  # seconds a task may be held that is not begun; then it is given back, somebody else may be idle


class Keeping(Protocol):
    """What a worker does for a claim that runs."""

    @property
    def settings(self) -> Settings: ...

    @property
    def must_end(self) -> bool:
        """A shutdown was asked for and its time is over."""
        ...

    def note_progress(self, claim: Claim, percent: float, message: str) -> bool: ...

    def record(self) -> None:
        """Write down what has ended. A store that is away is asked again later."""
        ...

    def show(self) -> None:
        """Let others see what runs."""
        ...

    def renew(self, running: Claim | None) -> tuple[bool, bool]: ...

    def release_unbegun(self) -> None:
        """Give back what was held too long without being begun."""
        ...


class Renewal:
    """When the leases of a worker are to be renewed: often enough for them, and to hear soon of a cancellation."""

    def __init__(self, settings: Settings) -> None:
        self._interval = min(settings.lease / 3, 1.5)
        # The first one soon: it also tells who the worker is busy with.
        self._at = time.monotonic() + min(self._interval, 1.0)

    @property
    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._at:
            return False
        self._at = now + self._interval
        return True


#: What is raised in a handler that must end, by what its run is charged as.
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
        passed = time.monotonic() - self._since
        if self._raised == 0 or (self._raised == 1 and self._grace / 2 < passed <= self._grace):
            self._raised += 1
            return "raise"
        return "kill" if passed > self._grace else "wait"


class Watch:
    """When a run must end."""

    def __init__(self, claim: Claim, settings: Settings) -> None:
        self._claim, self._settings = claim, settings
        self._cancelling_since: float | None = None
        self._ending: Ending | None = None
        self.reason: Ended | None = None  # why the worker ends the run, from the first step on

    @property
    def cancelling(self) -> bool:
        return self._cancelling_since is not None

    @cancelling.setter
    def cancelling(self, wanted: bool) -> None:
        if wanted and self._cancelling_since is None:
            self._cancelling_since = time.monotonic()

    def verdict(self, seconds: float, rss: int) -> Ended | None:
        """Why the run must end now; None while it may go on."""
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
        """What to do now to a run in a process of its own. One that uses too much memory is killed without a grace."""
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
    """The thread beside handlers that run in the worker's process.

    It looks after the whole batch: what runs, what waits its turn, and what has ended and is not written down yet. Each
    of them is the worker's only as long as its lease is renewed. It is entered for each batch; between two of them its
    thread does nothing, and waits for the next: to start one takes longer than a short batch does.
    """

    def __init__(self, worker: Keeping, interrupts: Interrupts) -> None:
        self._worker, self.interrupts = worker, interrupts
        self._over = threading.Event()
        self._looking = threading.Lock()  # held during each look
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._begin_batch(at_work=False)

    def _begin_batch(self, *, at_work: bool) -> None:
        self._at_work = at_work
        self._current: tuple[Claim, Watch, float] | None = None
        self._renewal = Renewal(self._worker.settings)
        self._progress: tuple[int, float, str] | None = None  # (the claim's number, percent, message)
        self._noted: tuple[int, float, str] | None = None
        self.cancelling = False
        self.lost: set[int] = set()
        self._ending: tuple[int, Ending] | None = None  # (the claim's number, how it is ended)

    def __enter__(self) -> Self:
        with self._looking:
            self._begin_batch(at_work=True)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="headway-pulse", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # no thread is left
                self._thread = None
                raise CannotBegin(f"No task can be looked after: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        with self._looking:  # what it looks at just now it finishes
            self._at_work = False

    def close(self) -> None:
        """End its thread."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def begin(self, claim: Claim) -> None:
        with self._lock:
            self._current = (claim, Watch(claim, self._worker.settings), time.monotonic())
            self.cancelling, self._progress, self._noted = False, None, None

    def end(self) -> None:
        with self._lock:
            self._current = None

    def last_message(self, claim: Claim) -> str | None:
        """What the handler said last, if it said anything."""
        said = self._progress
        return said[2] if said is not None and said[0] == claim.no else None

    def report(self, claim: Claim, percent: float, message: str) -> None:
        # With whose it is, and without a lock, in which the handler might be interrupted: a thread that a handler left behind
        # speaks of its own task, whatever runs by then.
        self._progress = (claim.no, percent, message)

    def is_cancelled(self, claim: Claim) -> bool:
        """A task that has ended may be taken for cancelled: what is left of its handler is to end."""
        return self.cancelling or not self._is_current(claim)

    def _is_current(self, claim: Claim) -> bool:
        return self._current is not None and self._current[0].no == claim.no

    def _run(self) -> None:
        while not self._over.wait(min(PULSE, self._worker.settings.lease / 4)):
            with self._looking:
                if self._at_work:
                    self._look()

    def _look(self) -> None:
        with self._lock:
            current = self._current
        if current is not None:
            self._look_after(*current)
        elif self._renewal.is_due:
            self._worker.renew(None)
        self._worker.record()
        self._worker.show()
        self._worker.release_unbegun()

    def _look_after(self, claim: Claim, watch: Watch, began: float) -> None:
        worker = self._worker
        if worker.must_end:
            self._end(claim, TaskStopped())
            return
        said = self._progress
        if said is not None and said is not self._noted and said[0] == claim.no:
            self._noted = said
            watch.cancelling |= worker.note_progress(claim, *said[1:])
        if self._renewal.is_due:
            lost, cancelling = worker.renew(claim)
            watch.cancelling |= cancelling
            if lost:
                self.lost.add(claim.no)
                self._end(claim, TaskCancelled("the lease lapsed"))
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
                # The handler swallows the exception, or hangs where no signal reaches it. Its lease would be renewed for
                # ever. The process ends, the supervisor replaces it, and the sweeper charges the task.
                log.critical("a handler cannot be ended: its worker is", taskID=claim.id, reason=type(error).__name__)
                os.kill(os.getpid(), signal.SIGKILL)
            if step == "raise":
                self.interrupts.raise_in_handler(error)
