"""`ProcessedStore`: what the watcher has reported. It survives restarts, so a restarted watcher repeats nothing.

A `Seen` row says how far a member of a registry was reported. A `Follow` row names an execution whose outcome is
awaited. Rows are written after their events were published. A crash in between publishes the events again, with the same
event ids.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, Literal, Protocol

Registry = Literal["failed", "canceled", "started"]

#: Members per statement or command.
BATCH: Final = 5_000


@dataclass(frozen=True, slots=True)
class Seen:
    """How far a member was reported: its score, and the identity of the last report."""

    member: str
    score: float
    seen: str
    #: When the job was read, by Redis's clock.
    at: float


@dataclass(frozen=True, slots=True)
class Follow:
    """An execution (``job_id:execution_id``) whose outcome is awaited, and the event that reported it."""

    member: str
    kind: str
    event: str
    #: Since when, by Redis's clock.
    since: float


class ProcessedStore(Protocol):
    """The reports of one queue.

    Each write is durable when it returns and may be repeated. Every method accepts any number of members, including
    none, with any content.
    """

    def baseline(self, now: float) -> float:
        """Return when this queue was first watched. The first call stores ``now``."""
        ...

    def look(self, registry: Registry, members: Sequence[str]) -> dict[str, Seen]:
        """Return the rows of the members that have one."""
        ...

    def newest(self, registry: Registry) -> float:
        """Return the latest ``at`` of a registry, or 0."""
        ...

    def mark(self, registry: Registry, rows: Sequence[Seen], follow: Sequence[Follow], unfollow: Sequence[str]) -> None:
        """Record published reports, and which outcomes are awaited from now on or no longer. Atomic."""
        ...

    def follows(self) -> list[Follow]:
        """Return all awaited outcomes."""
        ...

    def found(self, registry: Registry, members: Sequence[str], now: float) -> None:
        """Record that these members are still in the registry."""
        ...

    def stale(self, registry: Registry, before: float, count: int) -> list[str]:
        """Return up to ``count`` members that were last found before ``before``."""
        ...

    def forget(self, registry: Registry, members: Sequence[str]) -> None:
        """Delete the rows of these members."""
        ...


def batches(members: Sequence[str]) -> Iterator[Sequence[str]]:
    """Split members into batches. An empty list gives no batch."""
    for start in range(0, len(members), BATCH):
        yield members[start : start + BATCH]


def stored_name(member: str) -> str:
    """Return the name under which a member is stored. A long or invalid text is replaced by its hash."""
    raw = member.encode("utf-8", "surrogatepass")
    if len(raw) <= 512 and "\0" not in member and raw.decode("utf-8", "ignore") == member:
        return member
    return f"sha256 {sha256(raw).hexdigest()}"
