"""Interfaces: `Store`, which a `Manager` uses, and `Backend`, which our `LiveStore` uses.

Implement `Store` to keep states in a store of your own. Our stores are all `headway.states.live.LiveStore` (cache,
fan-out, supervision, retries) on top of a `Backend`, which only stores states and delivers changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar, runtime_checkable

from headway.core.retry import RetryPolicy
from headway.errors import NotFound, Refused, Unavailable
from headway.states.buffer import Overflow
from headway.states.state import Key, State
from headway.states.subscription import DEPTH, Subscription
from headway.telemetry import Log

log = Log("states")

T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Stores the states of one job."""

    @property
    def job_id(self) -> str:
        """The job whose states the store keeps."""

    @property
    def num_tasks(self) -> int:
        """The number of tasks the job was created with. It never changes."""
        ...

    def set_state(self, state: State) -> State:
        """Store ``state`` durably and return it with the store's version and time.

        Repeating a write with the stored event id changes nothing and returns the stored state. Raises `JobGone` if the job
        was deleted since the store was opened, even if a job of the same name was created later.
        """
        ...

    def get_state(self, task_id: int, tag: str) -> State:
        """Return the state of one key. If it was never reported, its status and version are 0."""
        ...

    def list_states_for_tag(self, tag: str) -> list[State]:
        """Return the existing states of a tag, in any order."""
        ...

    def list_all_states(self) -> list[State]:
        """Return all existing states, in any order."""
        ...

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
        timeout: float | None = None,
    ) -> Subscription:
        """Subscribe to the states that ``accepts`` selects: current states, the sentinel, then every change.

        The subscription ends with `JobGone` if the job is deleted, or `WentBack` if the store was restored.
        """
        ...

    def close(self) -> None:
        """End every subscription and close the store. Closing again does nothing."""
        ...


# ------------------------------------------------------------------------------------------------------------
# Backends


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as stored. ``incarnation`` changes when a job is deleted and created again."""

    job_id: str
    num_tasks: int
    created_at: datetime | None
    incarnation: str
    deleted: bool = False
    history: bool = False

    def usable(self) -> JobRecord:
        """Return this record. Raises `Refused` if the job is marked as deleted."""
        if self.deleted:
            raise marked_deleted(self.job_id)
        return self


@dataclass(frozen=True, slots=True)
class Change:
    """A key's new state, or None if it was removed."""

    key: Key
    state: State | None


#: A backend-specific position in a job's changes; None at the start. It shows later whether the store still contains
#: the changes read so far, and whether any were written since.
Mark = tuple[str | int, ...] | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All states of a job at one moment.

    - ``incarnation``: of the job, empty if it does not exist. ``deleted``: whether it is marked as deleted.
    - ``continuous``: False if the store no longer contains the changes the reader has read: it was restored to an
      earlier moment.
    - ``resumes``: True if the log still holds every change after the reader's mark. The reader then continues from
      there, and its subscribers miss nothing.
    - ``recreated``: keys that were removed and created again since the last listing. Their versions restarted at 1.
    """

    incarnation: str
    states: tuple[State, ...] = ()
    mark: Mark = None
    deleted: bool = False
    continuous: bool = True
    resumes: bool = False
    recreated: frozenset[Key] = frozenset()


class Relist(Exception):
    """The listener cannot continue from its position: it is too far behind, or the job itself changed."""


class Listener(Protocol):
    """A connection that delivers the changes of one job. Used by one thread only, except `wake`.

    It listens from its creation on. So every change that `snapshot` does not include is returned by `changes`.
    """

    @property
    def mark(self) -> Mark:
        """The position reached so far."""
        ...

    def snapshot(self, since: Mark) -> Snapshot:
        """Return all current states, and whether they continue the changes up to ``since``."""
        ...

    def changes(self) -> list[Change]:
        """Return the changes since the last call, in the store's order.

        Waits for at most one heartbeat. An empty list means that the store answered and the job still exists. Raises
        `Relist`, or `Unavailable` when the connection is lost.
        """
        ...

    def wake(self) -> None:
        """Interrupt a waiting `changes`, in order to close."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """A database or server that stores the states of many jobs.

    All methods are thread-safe and raise `Unavailable` when the server cannot be reached.
    """

    #: The kind of store, as named in metrics and logs.
    kind: str
    #: How a write is retried while the server is unavailable. Retries keep the event id, so it is stored once.
    write_policy: RetryPolicy
    #: Whether a store starts its listener when opened, or at its first read or subscription.
    listens_at_once: bool

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        """Return the job's record, creating it if needed. Atomic: concurrent callers get the same record."""
        ...

    def find(self, job_id: str) -> JobRecord | None:
        """Return the job's record, or None."""
        ...

    def jobs(self) -> Iterator[JobRecord]:
        """Return the records of all jobs."""
        ...

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        """Store ``state`` with the key's next version and the server's time, in one transaction.

        If the event id is the last one of any recent writer of the key, change nothing and return its version and time.
        Raises `JobGone` if the job is not the incarnation of ``job``, and `Refused` if it is marked as deleted.
        """
        ...

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """Same as `Listener.snapshot`, without listening."""
        ...

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        """Return up to ``limit`` stored versions above ``after``, oldest first."""
        ...

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        """Mark the job as deleted. Raises `JobGone` if ``incarnation`` is given and differs."""
        ...

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        """Delete the job and its states. Return whether anything was deleted. May be repeated after a crash.

        Returns False if ``incarnation`` is given and the job was re-created. Also returns False if anything was written
        after the mark ``unless_after``. Both are checked atomically with the deletion.
        """
        ...

    def listen(self, job: JobRecord) -> Listener:
        """Connect a new listener."""
        ...

    def close(self) -> None:
        """Close the connections of this backend."""


# ------------------------------------------------------------------------------------------------------------
# Errors about a job


class JobGone(NotFound):
    """The job was deleted since the store was opened, or its store was wiped or replaced.

    A job created later under the same name is a different job.
    """

    hint = "Open the store again to use the current job of that name."


class WentBack(Unavailable):
    """The store was restored to an earlier moment, from a backup or by a failover that lost writes.

    States delivered before may no longer exist. Subscriptions end with this error. Reads and writes continue.
    """

    hint = "Subscribe again: the new subscription begins with the current states."


def no_such_job(job_id: str) -> NotFound:
    """Return the error for a job that does not exist."""
    return NotFound(f"There is no job {job_id!r} in this store.", hint="List the jobs: headway states jobs")


def job_gone(job_id: str, *, remade: bool = False, marked: bool = False) -> JobGone:
    """Return the error for a job that was deleted, re-created (``remade``) or ``marked`` as deleted."""
    if marked:
        return JobGone(f"The job {job_id!r} was marked as deleted. It accepts no more states.")
    if remade:
        return JobGone(f"The job {job_id!r} was deleted and re-created since this store was opened.")
    return JobGone(f"The job {job_id!r} is no longer in this store: it was deleted, or the store was wiped.")


def marked_deleted(job_id: str) -> Refused:
    """Return the error for a write to a job that is marked as deleted."""
    return Refused(
        f"The job {job_id!r} is marked as deleted and accepts no more states.",
        hint=f"To use the name again, remove the job: headway states delete {job_id}",
    )


# ------------------------------------------------------------------------------------------------------------
# Recent writers of a key. The row holds the last event. Beside it, ``recent`` holds the last events of other writers,
# newest first, as "writer:event:version:time ". So a retry after a lost reply is recognized even if another process
# wrote in between. One process serializes its writes of a key, so one event per writer is enough.

#: Maximum length of ``recent``: sixteen writers, or fewer with very long event ids.
RECENT_LIMIT = 1_024


def recent_with(recent: str, writer: str, event_id: str, version: int, time: float | str, *, now: str) -> str:
    """Return ``recent`` after the writer ``now`` has replaced the event of ``writer``."""
    others = [entry for entry in recent.split() if not entry.startswith(f"{now}:")]
    kept = [f"{writer or '-'}:{event_id}:{version}:{time}", *others]
    while sum(map(len, kept)) + len(kept) > RECENT_LIMIT:
        kept.pop()
    return "".join(f"{entry} " for entry in kept)


def found_in_recent(recent: str, event_id: str) -> tuple[int, float] | None:
    """Return the version and time of an event, or None."""
    for entry in recent.split():
        parts = entry.split(":")
        if len(parts) == 4 and parts[1] == event_id:  # the last entry may be truncated
            return int(parts[2]), float(parts[3])
    return None


def readable(rows: Iterable[T], parse: Callable[[T], State], job_id: str) -> list[State]:
    """Parse rows into states. A corrupt row is logged and skipped, so it counts as not started."""
    states = []
    for row in rows:
        try:
            states.append(parse(row))
        except (ValueError, TypeError, KeyError, LookupError, AttributeError) as error:
            log.error("a stored state is corrupt and is skipped", jobID=job_id, error=repr(error)[:200])  # noqa: TRY400
    return states
