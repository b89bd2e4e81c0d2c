"""The seam: what a `Manager` asks of a store, and what our own `LiveStore` asks of a backend.

`Store` is for anybody who wants to keep states somewhere else; a `Manager` works on any. Our stores are all one class,
`headway.states.live.LiveStore` (cache, fan-out, supervision, retries), over a `Backend` that only keeps and tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar, runtime_checkable

from headway.errors import NotFound, Refused, Unavailable
from headway.retry import RetryPolicy
from headway.states.state import Key, State
from headway.states.subscription import DEPTH, Overflow, Subscription
from headway.telemetry import Log

log = Log("states")

T = TypeVar("T")


@runtime_checkable
class Store(Protocol):
    """Where the states of one job are kept."""

    @property
    def job_id(self) -> str: ...

    @property
    def num_tasks(self) -> int:
        """The number of tasks the job was made with; it never changes."""
        ...

    def set_state(self, state: State) -> State:
        """Keep ``state``; when this returns it is durable. Gives it as stored, with the store's version and time.

        Repeating it with the event id that is stored changes nothing and gives the stored state. `JobGone` when the
        job was deleted since the store was opened, also when one of the same name was made after that.
        """
        ...

    def get_state(self, task_id: int, tag: str) -> State:
        """The state of one key, or one with status 0 and version 0 if nobody reported it."""
        ...

    def list_states_for_tag(self, tag: str) -> list[State]:
        """Those that exist, in any order."""
        ...

    def list_all_states(self) -> list[State]:
        """Those that exist, in any order."""
        ...

    def subscribe(
        self,
        *,
        accepts: Callable[[State], bool] | None = None,
        depth: int = DEPTH,
        overflow: Overflow = "all",
        timeout: float | None = None,
    ) -> Subscription:
        """All that ``accepts`` lets through: what is current, then the sentinel, then every change. It ends with an
        error when the job is gone (`JobGone`) or the store went back in time (`WentBack`)."""
        ...

    def close(self) -> None:
        """End every subscription and let go of the store. Closing again does nothing."""
        ...


# ------------------------------------------------------------------------------------------------------------
# Backends


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as its store knows it. ``incarnation`` differs when the job was deleted and made again."""

    job_id: str
    num_tasks: int
    created_at: datetime | None
    incarnation: str
    deleted: bool = False
    history: bool = False

    def usable(self) -> JobRecord:
        """This record, unless the job is marked as deleted."""
        if self.deleted:
            raise marked_deleted(self.job_id)
        return self


@dataclass(frozen=True, slots=True)
class Change:
    """One key's new state, or None when it was removed."""

    key: Key
    state: State | None


#: How far a reader has followed a job, as its backend means it: enough to recognise later that what it has heard is still
#: the beginning of what the store holds, and that nothing was written since. None: nothing yet.
Mark = tuple[str | int, ...] | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that is current at one moment.

    - ``incarnation``: of the job as it is now, empty if there is none. ``deleted``: whether it bears a tombstone.
    - ``continuous``: False when the store does not hold what the reader heard before: it was put back to an earlier
      moment.
    - ``resumes``: True when the store's log still holds every change after the reader's mark. The reader goes on from
      there, and its subscribers miss nothing.
    - ``recreated``: keys that were removed and made again since the last look. Their versions began anew.
    """

    incarnation: str
    states: tuple[State, ...] = ()
    mark: Mark = None
    deleted: bool = False
    continuous: bool = True
    resumes: bool = False
    recreated: frozenset[Key] = frozenset()


class Relist(Exception):
    """The listener cannot go on from where it was: too far behind, or something happened to the job itself."""


class Listener(Protocol):
    """One connection of one process that tells what changes in one job. Only one thread uses it, except `wake`.

    It listens from the moment it was made; so whatever `snapshot` does not show, `changes` will.
    """

    @property
    def mark(self) -> Mark:
        """How far it has come."""
        ...

    def snapshot(self, since: Mark) -> Snapshot:
        """What is current, and whether it continues what was heard up to ``since``."""
        ...

    def changes(self) -> list[Change]:
        """What changed since the last call, in the store's order. Waits a heartbeat at most, so an empty answer also
        says that the store is still there and the job the same. Raises `Relist`, or `Unavailable` when the connection
        is lost."""
        ...

    def wake(self) -> None:
        """End a waiting `changes` early: we are closing."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """One database or server that keeps the states of many jobs. Every method may be called from any thread, and
    raises `Unavailable` when the server cannot be reached."""

    #: The kind of store, as metrics and logs name it.
    kind: str
    #: How often a write that found the server away is tried again (with the same event id, so once is enough).
    write_policy: RetryPolicy
    #: Whether a store listens from the moment it is opened, or from its first read or subscription.
    listens_at_once: bool

    def register(self, job_id: str, num_tasks: int, *, history: bool) -> JobRecord:
        """The job's record, made if there was none. One transaction: of many callers one makes it, all get the same."""
        ...

    def find(self, job_id: str) -> JobRecord | None: ...

    def jobs(self) -> Iterator[JobRecord]: ...

    def write(self, state: State, job: JobRecord, writer: str) -> State:
        """Store ``state`` with the next version of its key and the server's time, in one transaction; or, if its event
        id is the last one of any recent writer of the key, change nothing and give the version and time it got then.

        `JobGone` when the job is not the incarnation of ``job``, `Refused` when it is marked deleted.
        """
        ...

    def read_all(self, job: JobRecord, since: Mark) -> Snapshot:
        """As `Listener.snapshot`, without listening."""
        ...

    def read_history(self, job_id: str, task_id: int, tag: str, *, after: int, limit: int) -> list[State]:
        """Up to ``limit`` versions above ``after`` that were kept, oldest first."""
        ...

    def mark_deleted(self, job_id: str, incarnation: str | None = None) -> None:
        """Leave a tombstone. With ``incarnation`` only on that one; `JobGone` when the job is another."""
        ...

    def delete(self, job_id: str, incarnation: str | None = None, *, unless_after: Mark = None) -> bool:
        """Remove the job and its states; whether there was anything. May be repeated after a crash in the middle.
        With ``incarnation`` a job that was made again since stays (False). So does one in which anything was written
        after the look that gave the mark ``unless_after``, which is decided in the step that deletes."""
        ...

    def listen(self, job: JobRecord) -> Listener: ...

    def close(self) -> None: ...


# ------------------------------------------------------------------------------------------------------------
# What can be wrong with a job


class JobGone(NotFound):
    """The job this store was opened for is not there any more: it was deleted, or its store was wiped or replaced.
    One of the same name may have been made since; it is another job."""

    hint = "Open the store again to go on with what is there now."


class WentBack(Unavailable):
    """The store was put back to an earlier moment (restored from a copy, a failover that lost writes): what was told
    before no longer holds. Raised by subscriptions, which end with it; reads and writes go on with what the store has."""

    hint = "Subscribe again: what is current now is told from the beginning."


def no_such_job(job_id: str) -> NotFound:
    return NotFound(f"There is no job {job_id!r} in this store.", hint="See what there is: headway states jobs")


def job_gone(job_id: str, *, remade: bool = False, marked: bool = False) -> JobGone:
    if marked:
        return JobGone(f"The job {job_id!r} was marked as deleted: no more states will come.")
    if remade:
        return JobGone(f"The job {job_id!r} was deleted and made again since this store was opened.")
    return JobGone(f"There is no job {job_id!r} in this store any more: it was deleted, or the store was wiped.")


def marked_deleted(job_id: str) -> Refused:
    return Refused(
        f"The job {job_id!r} is marked as deleted and takes no more states.",
        hint=f"Remove it for good: headway states delete {job_id}; then it can be made again.",
    )


# ------------------------------------------------------------------------------------------------------------
# Who wrote a key lately. Its row has the last event; beside it stand the last events of its earlier writers, newest
# first, as "writer:event:version:time ", so that one whose answer was lost and who tries again is recognised although
# somebody else wrote in between. Within a process the writes of a key take turns, so its last event is enough.

#: Characters of those kept with a key: sixteen writers, or a few with very long event ids.
RECENT_LIMIT = 1_024


def recent_with(recent: str, writer: str, event_id: str, version: int, time: float | str, *, now: str) -> str:
    """``recent`` after the writer ``now`` has written over the event of ``writer``."""
    others = [entry for entry in recent.split() if not entry.startswith(f"{now}:")]
    kept = [f"{writer or '-'}:{event_id}:{version}:{time}", *others]
    while sum(map(len, kept)) + len(kept) > RECENT_LIMIT:
        kept.pop()
    return "".join(f"{entry} " for entry in kept)


def found_in_recent(recent: str, event_id: str) -> tuple[int, float] | None:
    """The version and time that an event got."""
    for entry in recent.split():
        parts = entry.split(":")
        if len(parts) == 4 and parts[1] == event_id:  # the last one may have been cut off
            return int(parts[2]), float(parts[3])
    return None


def readable(rows: Iterable[T], parse: Callable[[T], State], job_id: str) -> list[State]:
    """The states in ``rows``. One that somebody damaged is said in the log and left out, so it counts as not started:
    it must not take the others with it."""
    states = []
    for row in rows:
        try:
            states.append(parse(row))
        except (ValueError, TypeError, KeyError, LookupError, AttributeError) as error:
            log.error("a stored state cannot be read and is left out", jobID=job_id, error=repr(error)[:200])  # noqa: TRY400
    return states
