"""Control requests of other processes (pause, resume, scale, stop), and the wait of the job."""

from __future__ import annotations

import signal

from headway.core.text import plural
from headway.ledger.control import Control
from headway.run.pool.gate import StartGate
from headway.run.pool.runner import HeldJob, RunContext, Runner, Settings

#: Interval for polling the ledger for control requests, seconds.
POLL_SECONDS = 0.3


class ControlRequests:
    """Polls the ledger for control requests and applies each once."""

    def __init__(self, held: HeldJob, settings: Settings, context: RunContext, gate: StartGate, runner: Runner) -> None:
        self._held, self._context, self._gate, self._runner = held, context, gate, runner
        self._resume = f"headway resume {held.job.id} {settings.database_option}".rstrip()
        self._poll_at = 0.0
        self._last = Control()

    @property
    def stopped_by(self) -> str:
        """The user or program that stopped the run by a request; empty if none did."""
        return self._last.actor if self._last.stopping else ""

    def obey_wait(self) -> None:
        """Close the gate if an earlier run or another process has let the job wait."""
        self._obey(self._held.job.asked(self._held.hold.run))

    def _obey(self, asked: Control) -> None:
        if asked.wait:
            self._gate.wait(asked.wait, asked.wait_reason)

    def poll(self, now: float) -> None:
        """Apply new requests, at most every `POLL_SECONDS`."""
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_SECONDS
        before, self._last = self._last, self._held.job.asked(self._held.hold.run)
        self._obey(self._last)
        if self._last.version != before.version:
            self._apply(before, self._last)

    def _apply(self, before: Control, wanted: Control) -> None:
        display, shutdown = self._context.display, self._context.shutdown
        if wanted.stopping and not shutdown.stop.is_set():
            shutdown.request(signal.SIGTERM)
        if wanted.stopping == 2:
            shutdown.abandon.set()
        if wanted.workers is not None and wanted.workers != before.workers:
            display.say(f"{wanted.actor} changed the limit to {plural(wanted.workers, 'item')} at once.")
            self._runner.resize(wanted.workers)
        self._gate.paused = wanted.paused
        self._gate.paused_by = wanted.actor if wanted.paused else ""
        if wanted.paused and not before.paused:
            running = plural(self._runner.busy, "item")
            display.say(f"Paused by {wanted.actor}: finishing {running}. Go on:  {self._resume}")
            self._runner.recall()
        elif before.paused and not wanted.paused:
            display.say(f"Resumed by {wanted.actor}.")
