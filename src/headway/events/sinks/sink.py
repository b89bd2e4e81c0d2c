"""The contract of a sink, and the sinks without a connection: a function of the program, the log.

Which exception ``deliver`` raises decides what the relay does next:

    EventRefused    the content of this event is refused     put it aside at once
    ServerRefused   the sink will never take this event      put it aside after some tries
    anything else   the sink cannot take it now              try again later

Deliveries are recorded under the name of a sink, so the name must not change between restarts. Unless the address gives
one, it is made from parts that may be shown and a digest of the whole address.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.events.envelope import Event
from headway.telemetry import Log

log = Log("events")

#: Seconds that one delivery may take.
DEADLINE = 5.0


class Sink(Protocol):
    """A receiver of events.

    It may have an attribute ``types``: patterns of the event types it takes, like ``task.*``. Without one it takes all.
    """

    @property
    def name(self) -> str:
        """Name under which deliveries are recorded; the same after a restart."""
        ...

    @property
    def job(self) -> str | None:
        """The only job whose events it takes; None for all jobs."""
        ...

    def deliver(self, event: Event) -> None:
        """Deliver one event. Raises when the receiver did not take it."""
        ...

    def close(self) -> None:
        """Abort running deliveries because the process stops. Called from another thread."""
        ...


@dataclass(frozen=True, slots=True)
class CallableSink:
    """Calls a function of the program. It has no deadline, because a function cannot be aborted."""

    name: str
    call: Callable[[Event], None]
    job: str | None = None
    types: Sequence[str] | None = None

    def deliver(self, event: Event) -> None:
        """Call the function."""
        self.call(event)

    def close(self) -> None:
        """Do nothing: the function ends by itself."""


@dataclass(frozen=True, slots=True)
class LogSink:
    """Writes one line to the log."""

    name: str = "log"
    job: str | None = None
    types: Sequence[str] | None = None

    def deliver(self, event: Event) -> None:
        """Log the event."""
        log.info("event", event=event.type, eventID=event.id, job=event.job, version=event.version)

    def close(self) -> None:
        """Do nothing: logging does not wait."""


@dataclass(frozen=True, slots=True)
class ConfiguredSink:
    """A sink with the name or the event types that its address sets."""

    sink: Sink
    name: str
    types: Sequence[str] | None = None

    @property
    def job(self) -> str | None:
        """The only job whose events it takes; None for all jobs."""
        return self.sink.job

    def deliver(self, event: Event) -> None:
        """Deliver the event through the wrapped sink."""
        self.sink.deliver(event)

    def close(self) -> None:
        """Abort running deliveries."""
        self.sink.close()


def wants(sink: Sink, event: Event) -> bool:
    """Return whether the sink takes events of this type."""
    types = getattr(sink, "types", None)
    return types is None or any(fnmatch.fnmatchcase(event.type, pattern) for pattern in types)


def digest(text: str) -> str:
    """Return a short digest of an address, for the name of its sink."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
