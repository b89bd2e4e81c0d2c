"""What a run consists of: its settings, the job it holds, and the runner that executes items.

`headway.run.pool.loop.RunLoop` decides what runs and records it. A `Runner` executes items: in worker processes on this
machine (`headway.run.pool.local`) or in the user's executor (`headway.run.pool.executor`). Both use the same `RunParts`.
"""

from __future__ import annotations

import selectors
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headway.core.lifecycle import Shutdown
from headway.core.retry import LaterLimit, RetryPolicy
from headway.ledger import Hold, Job
from headway.run.display.display import Display
from headway.run.function import FORK, Start
from headway.run.output.files import CsvOutput, Output
from headway.run.output.results import Keep

if TYPE_CHECKING:
    from headway.run.pool.backlog import Backlog
    from headway.run.pool.counts import RunCounts
    from headway.run.pool.gate import BatchSizer, StartGate
    from headway.run.pool.outcomes import Outcomes
    from headway.run.pool.standstill import Standstills

#: An item that runs this long is noted as running in the ledger. Others can see it, and a killed run leaves a trace.
NOTE_SECONDS = 1.0
#: Minimum pause between two commits, so that outcomes accumulate.
COMMIT_PAUSE = 0.02


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run."""

    workers: int
    mode: str = "process"
    policy: RetryPolicy = field(default_factory=lambda: RetryPolicy(2, 1.0, jitter=0.5, cap=300.0))
    timeout: float | None = None
    rate: float | None = None
    max_failures: int | None = None
    last_pass: bool = True
    start: Start = FORK
    later_limit: LaterLimit = field(default_factory=LaterLimit)
    #: Minimum interval between the starts of two commits, seconds.
    commit_seconds: float = COMMIT_PAUSE
    #: The ``--database`` option for suggested commands, if the database is not the configured one.
    database_option: str = ""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a run ended."""

    outcome: str  # finished, interrupted, stopped (by max_failures)
    done: int
    kept: int
    dead: int
    died: int
    failures: int
    rescued: int
    completed: bool
    seconds: float
    #: How often items were postponed by RetryLater.
    postponed: int = 0


@dataclass(frozen=True, slots=True)
class HeldJob:
    """A job that this process may change, or a fleet slot's share of one."""

    job: Job
    hold: Hold
    #: Renews the lease and the notes on the given running items.
    renew: Callable[[Collection[int]], object]


class Feed(Protocol):
    """Items that arrive during the run, for example on stdin."""

    @property
    def ended(self) -> bool: ...

    def fileno(self) -> int: ...

    def register_arrived(self) -> int:
        """Register the items that have arrived; return how many are new."""
        ...


@dataclass(frozen=True, slots=True)
class RunContext:
    """What surrounds a run: its display, stop requests, file of results and stream of items."""

    display: Display
    shutdown: Shutdown
    output: Output | CsvOutput | None = None
    feed: Feed | None = None


@dataclass(frozen=True, slots=True)
class RunParts:
    """The parts that the loop shares with its runner."""

    held: HeldJob
    settings: Settings
    context: RunContext
    keep: Keep
    selector: selectors.BaseSelector
    backlog: Backlog
    counts: RunCounts
    gate: StartGate
    batches: BatchSizer
    outcomes: Outcomes
    standstills: Standstills


class Runner(ABC):
    """Executes items and reports their outcomes. The loop calls it from one thread."""

    @property
    @abstractmethod
    def busy(self) -> int:
        """Number of items running now."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether no item is out."""

    @abstractmethod
    def hand_out(self, now: float) -> None:
        """Give ready items and suspects to workers that have room."""

    @abstractmethod
    def handle(self, source: Any, events: int) -> None:
        """Handle an event of ``source``, as the runner registered it with the selector."""

    @abstractmethod
    def check(self, now: float) -> Iterable[tuple[int, str, float]]:
        """Handle dead workers and overdue items, ten times a second.

        Return (idx, worker, start) of every running item.
        """

    @abstractmethod
    def recall(self) -> None:
        """Ask workers to return all items they have not begun."""

    @abstractmethod
    def resize(self, size: int) -> None:
        """Change the number of items that run at once to ``size``."""

    @abstractmethod
    def abandon(self) -> None:
        """Give up the running items. They count as not begun, without an attempt."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources, however the run ended."""


class WakeUp:
    """Wakes a selector from another thread or a signal handler."""

    def __init__(self) -> None:
        self._writer, self._reader = socket.socketpair()
        for end in (self._writer, self._reader):
            end.setblocking(False)

    def fileno(self) -> int:
        return self._reader.fileno()

    def notify(self, *_: object) -> None:
        """Make the selector return."""
        with suppress(OSError):  # full: it is already awake; closed: the run is over
            self._writer.send(b"!")

    def clear(self) -> None:
        """Discard past notifications."""
        with suppress(BlockingIOError):
            self._reader.recv(4096)

    def close(self) -> None:
        self._writer.close()
        self._reader.close()
