"""The seam: where events wait until every sink has taken them.

An event is written where its decision is made: `headway.events.append` in the transaction that decides, XADD in the
script that does. A relay that wants to serve a sink takes the *lease* of that sink first (`acquire`), so that of any
number of relays in any number of processes one delivers to it: each event once, in the order of the outbox. The lease
of a relay that died is free at once on the same machine and after `LEASE` seconds elsewhere; what the dead one had
delivered and not noted is delivered again, with the same id.

`delivered` and `put_aside` need no fence: they state what happened at the sink, which stays true when meanwhile
somebody else has the lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

from headway._lease import Lease
from headway.errors import ServerRefused
from headway.events.envelope import Event

#: Seconds a relay may serve a sink without a sign of life.
LEASE = 30.0

#: A new sink is told what was decided in this many seconds before it was first seen.
HISTORY = 30 * 86_400.0

#: More waiting events than this are said as an error. Nothing is dropped for it.
MANY = 100_000


class EventRefused(ServerRefused):
    """The sink works and refuses the content of this event (HTTP 400 or 422, exit code 65): it is put aside at once."""


@dataclass(frozen=True, slots=True)
class Backlog:
    """How far one sink is behind one outbox."""

    sink: str
    waiting: int
    oldest_seconds: float | None  # how long the first of them has waited
    refused: int  # put aside
    holder: str | None  # who serves the sink just now


@dataclass(frozen=True, slots=True)
class Refused:
    """An event that was put aside for one sink, or an entry that is no event at all."""

    sink: str
    handle: str
    id: str  # of the event; what could be read of it
    type: str
    job: str
    reason: str
    at: datetime | None  # when it was put aside


class Outbox(Protocol):
    """Few verbs. `Unavailable` and `StorageError` mean that the store is out of reach or ill; the events are safe."""

    @property
    def name(self) -> str:
        """How it is called in status and metrics."""
        ...

    def subscribe(self, sink: str, job: str | None = None) -> None:
        """Keep what is decided for ``sink``, of one job or of all; a sink known already keeps its place."""
        ...

    def waits(self, sink: str) -> bool:
        """Whether something may wait for the sink: a cheap look, without the lease."""
        ...

    def acquire(self, sink: str) -> Lease:
        """The right to serve the sink alone; `Held` when another relay has it."""
        ...

    def renew(self, lease: Lease) -> None:
        """Prolong it, or `StaleClaim`."""
        ...

    def release(self, lease: Lease) -> None: ...

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        """The first events the sink has not taken, in order, each with a handle. An entry that is no event is put
        aside on the way, and said."""
        ...

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        """The sink took these. Said again, nothing changes."""
        ...

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
        """The sink refused this event once more; how often by now, counted for the sink over all relays.

        It counts when nobody counted since this relay saw ``seen`` of them, or not for ``apart`` seconds: several relays
        are no reason to give an event up sooner, and short-lived ones none to try it for ever.
        """
        ...

    def put_aside(self, sink: str, handle: str, reason: str) -> None:
        """The sink refuses this event for good: go on with the next one."""
        ...

    def refused(self, sink: str | None = None) -> Sequence[Refused]:
        """What was put aside, the oldest first."""
        ...

    def retry(self, found: Refused) -> None:
        """Let the sink be told this one after all."""
        ...

    def discard(self, found: Refused) -> None:
        """Forget one that was put aside."""
        ...

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        """How far each sink that the outbox knows is behind, or one of them."""
        ...

    def forget(self, sink: str) -> bool:
        """The sink is gone for good: keep nothing for it any longer; False when it was not known."""
        ...

    def tidy(self, sink: str) -> None:
        """Make the next looks cheap again after many deliveries. It may be called at any time, or never."""
        ...
