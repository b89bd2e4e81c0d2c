"""Value types that go into the ledger and come out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headway.core.retry import LaterLimit
from headway.errors import InvalidInput

if TYPE_CHECKING:
    from headway.core.failure import Failure

#: The largest index: the maximum of both engines' BIGINT.
MAX_INDEX = 2**63 - 1

#: Prefix of the worker names that `Job.note_running` writes. Such notes expire with the hold.
NOTED = "run "
#: ``attempts.detail`` of an attempt whose traceback equals that of its cause.
SAME_AS_CAUSE = "="
#: First line of a traceback that belongs to the cause, not to the attempt.
OF_THE_CAUSE = "... (not kept for this attempt; below: the first failure of its cause)"


def note_of(traceback: str | None) -> str:
    """Return `OF_THE_CAUSE` if the traceback begins with it, otherwise an empty string."""
    return OF_THE_CAUSE if (traceback or "").startswith(f"{OF_THE_CAUSE}\n") else ""


Status = Literal["pending", "done", "failed"]
FailedOutcome = Literal["failed", "timeout", "lost"]


# Recorded types pass by the hundred thousand a second, and a named tuple is created four times as fast as a frozen
# dataclass. The types that queries return are imported by every listing command, and a named tuple is defined four
# times as fast.


class NewItem(NamedTuple):
    """An item to register. ``payload`` is JSON text."""

    idx: int
    payload: str | None = None
    key: str | None = None
    fingerprint: int | None = None


class Item(NamedTuple):
    """An item to work on."""

    idx: int
    key: str | None
    payload: str | None
    attempts: int = 0
    #: Fencing token of the claim, to pass to `Job.record`. None for work under a hold.
    token: int | None = None

    @property
    def name(self) -> str:
        """Return the key, or the index if there is no key."""
        return self.key if self.key is not None else str(self.idx)


class Done(NamedTuple):
    """A successful run of an item."""

    idx: int
    meta: str | None = None
    result: str | None = None
    seconds: float | None = None
    worker: str | None = None
    token: int | None = None
    #: The item returned a result that was not kept.
    unkept: bool = False
    #: Captured output, if it is to be kept.
    printed: str | None = None


class Failed(NamedTuple):
    """A failed run of an item. Unless ``retryable``, the item becomes a dead letter at once."""

    idx: int
    failure: Failure
    outcome: FailedOutcome = "failed"
    meta: str | None = None
    seconds: float | None = None
    worker: str | None = None
    token: int | None = None
    #: The item's number of failures when it was issued. It identifies this run, so a repeated report counts once.
    seen: int | None = None
    retryable: bool = True
    #: Captured output, if it is to be kept.
    printed: str | None = None


class Later(NamedTuple):
    """A run of an item that ended with `headway.errors.RetryLater`. No attempt is counted."""

    idx: int
    #: Seconds from the recording to the next run.
    delay: float
    reason: str
    #: A random number that identifies this run, so a repeated report counts once.
    report: int
    #: Whether the whole job waits.
    whole_job: bool = False
    seconds: float | None = None
    worker: str | None = None
    token: int | None = None
    #: Beyond it, the item is recorded as failed.
    limit: LaterLimit = LaterLimit()


Outcome = Done | Failed | Later


@dataclass(frozen=True, slots=True)
class Recorded:
    """The effect of recording a batch of outcomes."""

    done: int
    failed: int
    dead: int
    #: Outcomes of items that were already done: executed again after a crash, recorded once.
    repeated: int
    #: Whether this batch finished the job.
    completed: bool
    #: When each failed or postponed item may run again, by the database's clock.
    due: Mapping[int, float]
    died: Sequence[int]
    #: The job's items that wait for a retry after this batch. It may be 0 unless the caller holds the job.
    waiting: int
    #: The job's dead letters after this batch, with the same exception.
    given_up: int
    #: Items whose outcome was refused because their claim expired and another claimant has them.
    stale: Sequence[int]
    #: Items that were postponed.
    postponed: int = 0


NOTHING_RECORDED = Recorded(
    done=0, failed=0, dead=0, repeated=0, completed=False, due={}, died=(), waiting=0, given_up=0, stale=()
)


class Progress(NamedTuple):
    """A job's progress. Computed from the counters, never stored."""

    status: str
    total: int
    done: int
    errors: int
    percent: float
    retrying: int
    dead: int
    running: int


class Control(NamedTuple):
    """The current requests to a run."""

    #: Grows with every request.
    version: int = 0
    paused: bool = False
    #: 1: finish the current items. 2: abandon them.
    stopping: int = 0
    #: How many items to run at once. None: as at the start.
    workers: int | None = None
    #: The user or program that made the last request.
    actor: str = ""
    #: Seconds until the job may start items again, and why it waits (`headway.errors.RetryLater`).
    wait: float = 0.0
    wait_reason: str = ""


class JobInfo(NamedTuple):
    """A job's row."""

    no: int
    id: str
    function: str
    source: str
    command: str
    keyed_by: str | None
    digest: str | None
    sealed: bool
    archived: bool
    generation: int
    version: int
    max_retries: int
    total: int
    done: int
    failed: int
    dead: int
    failures: int
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    holder: Mapping[str, Any] | None
    lease_until: datetime | None
    #: Whether the holder's lease was valid at the time of reading. A holder killed on this machine has none.
    held: bool
    #: How the last run ended. None while a run holds the job, and once the job has finished.
    last_outcome: str | None = None
    #: Whether the current run has been asked to pause.
    paused: bool = False
    #: Until when nothing of the job starts, and why. None if nothing keeps it from starting items.
    wait_until: datetime | None = None
    wait_reason: str = ""

    @property
    def lost(self) -> bool:
        """Return whether a run died without releasing the job."""
        return self.holder is not None and not self.held

    @property
    def remaining(self) -> int:
        """Number of items that are neither done nor dead."""
        return self.total - self.done - self.dead

    @property
    def status(self) -> str:
        """Return one of: pending, processing, paused, interrupted, needs a run, completed.

        A job needs a run if its last run finished and items were set to retry since.
        """
        if self.held:
            return "paused" if self.paused else "processing"
        if self.finished_at is not None:
            return "completed"
        if self.last_outcome == "finished":
            return "needs a run"
        return "pending" if self.done == self.dead == self.failed == 0 else "interrupted"

    @property
    def percent(self) -> float:
        """Percentage of the items that are done."""
        return min(100.0, 100.0 * self.done / self.total) if self.total else 0.0


class Run(NamedTuple):
    """One execution of a job: a start or a resume."""

    no: int
    host: str
    pid: int
    settings: Mapping[str, Any]
    kept: int
    started_at: datetime
    ended_at: datetime | None
    #: finished, interrupted, stopped, failed or lost (its process was killed or its lease expired). None while it runs.
    outcome: str | None


class ItemInfo(NamedTuple):
    """An item with its state and last outcome."""

    idx: int
    key: str | None
    status: Literal["pending", "processing", "retrying", "done", "dead"]
    attempts: int
    updated_at: datetime | None
    seconds: float | None
    worker: str | None
    meta: str | None
    error: str | None
    cause: int | None
    next_attempt_at: datetime | None
    payload: str | None = None


class Attempt(NamedTuple):
    """One run of an item, from its history."""

    no: int
    outcome: Literal["done", "failed", "timeout", "lost"]
    at: datetime
    seconds: float | None
    worker: str | None
    error: str | None
    detail: str | None
    cause: int | None
    printed: str | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """A group of similar failures."""

    no: int
    type: str
    message: str
    frame: str
    #: Failed runs, and items that are dead letters now.
    count: int
    dead: int
    first_seen: datetime
    last_seen: datetime
    example: int | None


class Postponed(NamedTuple):
    """The items of a job that wait because their function asked for it."""

    items: int
    #: When the first of them runs again, and its reason.
    until: datetime
    reason: str


class DeadLetter(NamedTuple):
    """An item that has no retries left."""

    idx: int
    key: str | None
    error: str
    meta: str | None
    cause: int | None
    attempts: int
    created_at: datetime


def utc(seconds: float) -> datetime:
    """Convert Unix seconds to an aware UTC datetime."""
    return datetime.fromtimestamp(seconds, UTC)


def maybe_utc(seconds: float | None) -> datetime | None:
    """Convert Unix seconds to an aware UTC datetime, and None to None."""
    return None if seconds is None else utc(seconds)


def check_index(idx: object) -> int:
    """Validate an item's index: an int from 0 to 2**63 - 1, but not a bool."""
    if type(idx) is not int or not 0 <= idx <= MAX_INDEX:
        # Python refuses to print a number of thousands of digits.
        shown = "A number that large" if type(idx) is int and idx > MAX_INDEX else f"{idx!r:.60}"
        raise InvalidInput(f"{shown} is not an item's index.", hint="Use a whole number from 0 to 2**63 - 1.")
    return idx


def check_text(text: object, what: str) -> str:
    """Validate a short text that both engines can store, such as a key or a worker's name."""
    if not isinstance(text, str) or not 0 < len(text) <= 512 or "\0" in text or not _is_unicode(text):
        raise InvalidInput(f"{text!r:.60} cannot be {what}.", hint="Use 1 to 512 characters without NUL.")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True
