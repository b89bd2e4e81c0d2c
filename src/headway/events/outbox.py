"""The contract of an outbox: where events wait until every sink has taken them.

An event is appended where it is decided: by `headway.events.append` in the deciding transaction, or by XADD in the deciding
script. Before a relay delivers to a sink it acquires the *lease* of that sink, so only one relay at a time delivers to it,
each event once and in the order of the outbox. The lease of a dead relay is free at once on the same machine, and after
`LEASE` seconds elsewhere. Events that the dead relay delivered and did not record are delivered again, with the same id.

`delivered` and `put_aside` are not fenced. They record what happened at the sink, which stays true after the lease is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from headway._lease import Lease
from headway.errors import ServerRefused
from headway.events.envelope import Event

#: Seconds that the lease of a sink lasts without renewal.
LEASE = 30.0

#: Seconds before its subscription from which a new sink still receives events.
HISTORY = 30 * 86_400.0

#: Waiting events above which a critical message is logged. No event is ever dropped.
MANY = 100_000


class EventRefused(ServerRefused):
    """The sink works and refuses the content of this event (HTTP 400 or 422, exit code 65)."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """How far one sink is behind one outbox."""

    sink: str
    waiting: int
    oldest_seconds: float | None  # age of the first waiting event
    refused: int  # events put aside
    holder: str | None  # the process that has the lease of the sink


@dataclass(frozen=True, slots=True)
class Refused:
    """An event that was put aside for one sink, or an entry that cannot be read as an event."""

    sink: str
    handle: str
    id: str  # of the event, as far as it could be read; so are type and job
    type: str
    job: str
    reason: str
    at: datetime | None  # when it was put aside


class Outbox(Protocol):
    """Waiting events of one store. Every verb may be repeated after a lost reply.

    Verbs raise `Unavailable` or `StorageError` when the store cannot be reached or is damaged. The events are safe then.
    """

    @property
    def name(self) -> str:
        """Name in the relay's status and in metrics."""
        ...

    def subscribe(self, sink: str, job: str | None = None) -> None:
        """Keep events of one job, or of all jobs, for ``sink``. A known sink keeps its position."""
        ...

    def waits(self, sink: str) -> bool:
        """Return whether an event may wait for the sink. Cheap, and needs no lease."""
        ...

    def acquire(self, sink: str) -> Lease:
        """Acquire the lease of the sink. Raises `Held` while another relay has it."""
        ...

    def renew(self, lease: Lease) -> None:
        """Renew the lease. Raises `StaleClaim` when another relay has it."""
        ...

    def release(self, lease: Lease) -> None:
        """Release the lease, so that another relay can acquire it at once."""
        ...

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        """Return the first events the sink has not taken, in order, each with a handle.

        Entries that cannot be read as events are put aside and logged.
        """
        ...

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        """Record that the sink took these events."""
        ...

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
        """Count one more refusal of this event and return the count over all relays.

        It is counted only if the count is still ``seen``, or the last refusal is at least ``apart`` seconds old. So several
        relays do not use up the tries of an event faster, and short-lived relays still use them up.
        """
        ...

    def put_aside(self, sink: str, handle: str, reason: str) -> None:
        """Stop delivering this event to the sink and continue with the next one."""
        ...

    def refused(self, sink: str | None = None) -> Sequence[Refused]:
        """Return the events that were put aside, oldest first."""
        ...

    def retry(self, found: Refused) -> None:
        """Deliver an event that was put aside once more."""
        ...

    def discard(self, found: Refused) -> None:
        """Delete an event that was put aside."""
        ...

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        """Return how far each known sink, or one of them, is behind."""
        ...

    def forget(self, sink: str) -> bool:
        """Delete the sink and what waits for it. Return whether it was known."""
        ...

    def tidy(self, sink: str) -> None:
        """Remove delivered events, so that `waits` stays cheap. Calling it is always optional."""
        ...
