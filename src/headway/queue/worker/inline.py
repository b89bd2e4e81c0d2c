"""Handlers in the worker's process (``isolation="none"``), with a heartbeat thread beside them.

A task costs no fork, and a handler that ends the process takes the worker with it. After each task the process state that a
handler may have changed is restored.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from headway.queue.handlers import Context, Handler
from headway.queue.task import Claim
from headway.queue.task_queue import TaskQueue
from headway.queue.worker.execution import (
    RunningTask,
    TaskCancelled,
    TaskStopped,
    TaskTimeout,
    TaskTooLarge,
    ended_by,
    perform,
)
from headway.queue.worker.heartbeat import Pulse
from headway.queue.worker.process_state import Descriptors, Interrupts, ProcessState
from headway.telemetry import Log

if TYPE_CHECKING:
    from headway.queue.worker.worker import Worker

log = Log("queue")


class InlineRunner:
    """Runs held tasks in this process until the next one must be forked, the worker stops, or none is left."""

    def __init__(self, queue: TaskQueue, worker: Worker, context: Context | None) -> None:
        self._queue, self._worker, self._context = queue, worker, context
        self._guard: _ProcessGuard | None = None  # created in the process that runs tasks
        self._pulse: Pulse | None = None
        self.average_seconds = 0.0  # moving average of the duration of a task

    def run(self) -> None:
        """Run held tasks, then check the memory that their handlers left in use."""
        worker = self._worker
        with self._started_pulse() as pulse:
            handlers, ready = self._queue.handlers, worker.setups.is_ready
            while not worker.is_stopping and (claim := worker.claims.next_inline(handlers, ready)) is not None:
                text = worker.decode(claim)
                if text is not None:
                    self._run_task(claim, text, pulse)
                    if (worker.claims and len(worker.outcomes) >= worker.settings.batch) or pulse.cancelling:
                        worker.outcomes.record()
        worker.check_memory()

    def set_up(self, handler: Handler) -> None:
        """Enter a handler's set-up while the heartbeat thread renews the leases: it may take minutes."""
        with self._started_pulse():
            self._worker.setups.open(handler)

    def suspend(self) -> None:
        """Stop the heartbeat thread: a process that forks must have only one thread."""
        if self._pulse is not None:
            self._pulse.close()
            self._pulse = None

    def _run_task(self, claim: Claim, text: str, pulse: Pulse) -> None:
        guard = self._guard
        assert guard is not None
        began = time.monotonic()
        task = RunningTask(claim, partial(pulse.report, claim), partial(pulse.is_cancelled, claim))
        extra = self._worker.setups.arguments(claim.kind)
        pulse.begin(claim)
        try:
            with pulse.interrupts.armed():
                ended = perform(task, self._queue.handlers[claim.kind].function, text, self._context, extra)
            guard.check(claim)
        except TaskStopped:
            self._worker.claims.release([claim])
            return
        except (TaskCancelled, TaskTimeout, TaskTooLarge) as late:  # raised just after the handler returned
            ended = ended_by(late)
        finally:
            pulse.end()
            guard.state.restore()
        if (message := pulse.last_message(claim)) is not None:
            ended = replace(ended, message=message)
        seconds = time.monotonic() - began
        self.average_seconds += (seconds - self.average_seconds) * 0.2
        if claim.no not in pulse.lost:
            self._worker.outcomes.add(claim, ended, seconds)
            if ended.later is not None and ended.later.scope == "job":
                self._worker.outcomes.record()  # or the tasks released below would be claimed again
                self._worker.claims.release_kind(claim.kind)

    def _started_pulse(self) -> Pulse:
        if self._guard is None:
            self._guard = _ProcessGuard()
        if self._pulse is None:
            self._pulse = Pulse(self._worker, self._guard.interrupts)
        return self._pulse


class _ProcessGuard:
    """Protects the worker's process from its handlers."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._descriptors = Descriptors()
        self.interrupts = Interrupts()
        self.state = ProcessState()

    def check(self, claim: Claim) -> None:
        """End this process if a handler made it unusable.

        After a handler closed descriptors, outcomes can no longer be recorded, and opening new connections is not safe. The
        supervisor replaces the worker, and the sweeper counts the attempt.
        """
        if os.getpid() != self._pid:
            os._exit(1)  # a process forked by the handler returned here: a second worker with our claims
        if not self._descriptors.are_intact:
            log.critical("a handler closed the descriptors of its worker, which is killed", taskID=claim.id)
            os.kill(os.getpid(), signal.SIGKILL)
