"""The seam: what a `Manager` asks of a store, and what our own `LiveStore` asks of a backend.

`Store` is for anybody who wants to keep states somewhere else; a `Manager` works on any. Our stores are all one class,
`headway.states.live.LiveStore` (cache, fan-out, supervision, retries), over a `Backend` that only keeps and tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, runtime_checkable

from headway.errors import NotFound, Refused
from headway.retry import RetryPolicy
from headway.states.state import Key, State
from headway.states.subscription import DEPTH, Overflow, Subscription


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

        Repeating it with the event id that is stored changes nothing and gives the stored state.
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
        overflow: Overflow = "latest",
        timeout: float | None = None,
    ) -> Subscription:
        """All that ``accepts`` lets through: what stands, then the sentinel, then every change."""
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


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that stood at one moment. ``recreated`` are keys that were removed and made again since the last look:
    their versions began anew and must not be compared with the earlier ones."""

    incarnation: str
    states: tuple[State, ...]
    recreated: frozenset[Key] = frozenset()


class Relist(Exception):
    """The listener cannot go on from where it was: too far behind, or the job was deleted or made again."""


class Listener(Protocol):
    """One connection of one process that tells what changes in one job. Only one thread uses it, except `wake`.

    It listens from the moment it was made; so whatever `snapshot` does not show, `changes` will.
    """

    def snapshot(self) -> Snapshot: ...

    def changes(self) -> list[Change]:
        """What changed since the last call, in the store's order. Waits a heartbeat at most, so an empty answer also
        says that the store is still there. Raises `Relist`, or `Unavailable` when the connection is lost."""
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

    def write(self, state: State) -> State:
        """Store ``state`` with the next version of its key and the server's time, in one transaction; or, if its event
        id is the stored one, give what is stored. `NotFound` without the job, `Refused` when it is marked deleted."""
        ...

    def read_all(self, job_id: str) -> Snapshot: ...

    def read_history(self, job_id: str, task_id: int, tag: str) -> list[State]:
        """Every version that was kept, oldest first."""
        ...

    def mark_deleted(self, job_id: str) -> None: ...

    def delete(self, job_id: str) -> bool:
        """Remove the job and its states; whether there was anything. May be repeated after a crash in the middle."""
        ...

    def listen(self, job_id: str) -> Listener: ...

    def close(self) -> None: ...


def no_such_job(job_id: str) -> NotFound:
    return NotFound(f"There is no job {job_id!r} in this store.", hint="See what there is: headway states jobs")


def marked_deleted(job_id: str) -> Refused:
    return Refused(
        f"The job {job_id!r} is marked as deleted and takes no more states.",
        hint=f"Remove it for good: headway states delete {job_id}; then it can be made again.",
    )
