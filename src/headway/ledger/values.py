"""What goes into the ledger and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from headway.errors import InvalidInput

if TYPE_CHECKING:
    from headway.failure import Failure

#: The largest index: what both engines' BIGINT holds.
MAX_INDEX = 2**63 - 1
#: The tables of a job that have rows of its items, in the order in which those are deleted: the item goes last.
OF_ITEMS = ("progress", "results", "printed", "dead_letters", "attempts", "input_products")

#: Names of workers that `Job.note_running` wrote begin with this; such notes end with the hold.
NOTED = "run "
#: ``attempts.detail`` of an attempt whose traceback equals that of its cause.
SAME_AS_CAUSE = "="
#: First line of a traceback that is not the attempt's own.
OF_THE_CAUSE = "... (not kept for this attempt; below: the first failure of its cause)"


def note_of(traceback: str | None) -> str:
    """Return the first line of a traceback that is not the attempt's own, else an empty text."""
    return OF_THE_CAUSE if (traceback or "").startswith(f"{OF_THE_CAUSE}\n") else ""


Status = Literal["pending", "done", "failed"]
FailedOutcome = Literal["failed", "timeout", "lost"]


# Those that are recorded pass by the hundred thousand a second: named tuples are made four times as fast as frozen
# dataclasses. Those that are read are on the path of every command that lists: a class of them is defined four times as
# fast.


class NewItem(NamedTuple):
    """An item to register. ``payload`` is JSON text."""

    idx: int
    payload: str | None = None
    key: str | None = None
    fingerprint: int | None = None


class Item(NamedTuple):
    """An item as the ledger hands it out for work."""

    idx: int
    key: str | None
    payload: str | None
    attempts: int = 0
    #: What to show to `Job.record` when the item was claimed; None for work under a hold.
    token: int | None = None

    @property
    def name(self) -> str:
        """How people call it: its key, or its index."""
        return self.key if self.key is not None else str(self.idx)


class Done(NamedTuple):
    """A run of an item that succeeded."""

    idx: int
    meta: str | None = None
    result: str | None = None
    seconds: float | None = None
    worker: str | None = None
    token: int | None = None
    #: It returned something, and that is not kept.
    unkept: bool = False
    #: What it printed, if that is to be kept.
    printed: str | None = None


class Failed(NamedTuple):
    """A run of an item that did not. Unless ``retryable``, it is dead at once."""

    idx: int
    failure: Failure
    outcome: FailedOutcome = "failed"
    meta: str | None = None
    seconds: float | None = None
    worker: str | None = None
    token: int | None = None
    #: How many failures the item had when it was handed out. It names this run of it: reported again, it counts once.
    seen: int | None = None
    retryable: bool = True
    #: What it printed, if that is to be kept.
    printed: str | None = None


Outcome = Done | Failed


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a batch of outcomes did."""

    done: int
    failed: int
    dead: int
    #: Outcomes of items that were done already: executed again after a crash, recorded once.
    repeated: int
    #: This batch finished the job.
    completed: bool
    #: When each failed item may be tried again, by the database's clock.
    due: Mapping[int, float]
    died: Sequence[int]
    #: Items of the job that failed and wait for another try, after this; for whoever holds the job, else it may be 0.
    waiting: int
    #: Its dead letters, in the same way.
    given_up: int
    #: Outcomes that were refused because their claim had lapsed and the item was given to somebody else.
    stale: Sequence[int]


class Progress(NamedTuple):
    """How far a job is. Computed from the counters, never stored."""

    status: str
    total: int
    done: int
    errors: int
    percent: float
    retrying: int
    dead: int
    running: int


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
    #: Whether the holder had its lease when this was read. One that was killed on this machine has none.
    held: bool
    #: How the last run ended; None while a run holds the job, and once the job has finished.
    last_outcome: str | None = None

    @property
    def lost(self) -> bool:
        """Whether somebody ran it, did not give it back, and is gone."""
        return self.holder is not None and not self.held

    @property
    def remaining(self) -> int:
        return self.total - self.done - self.dead

    @property
    def status(self) -> str:
        """One of: pending, processing, interrupted, needs a run, completed.

        A job needs a run when its last run finished and items were given another try since.
        """
        if self.held:
            return "processing"
        if self.finished_at is not None:
            return "completed"
        if self.last_outcome == "finished":
            return "needs a run"
        return "pending" if self.done == self.dead == self.failed == 0 else "interrupted"

    @property
    def percent(self) -> float:
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
    #: finished, interrupted, stopped, failed, lost (its process was killed, or let its lease lapse); None while it runs.
    outcome: str | None


class ItemInfo(NamedTuple):
    """An item with what became of it."""

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
    """One run of an item, as history tells it."""

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
    """Failures that are alike."""

    no: int
    type: str
    message: str
    frame: str
    #: Failed runs, and how many items are dead of it now.
    count: int
    dead: int
    first_seen: datetime
    last_seen: datetime
    example: int | None


class DeadLetter(NamedTuple):
    """An item that failed for good."""

    idx: int
    key: str | None
    error: str
    meta: str | None
    cause: int | None
    attempts: int
    created_at: datetime


def utc(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def maybe_utc(seconds: float | None) -> datetime | None:
    return None if seconds is None else utc(seconds)


def check_index(idx: object) -> int:
    """An index is a whole number from 0; True is not one."""
    if type(idx) is not int or not 0 <= idx <= MAX_INDEX:
        # A number of thousands of digits cannot even be shown: Python refuses to write it out.
        shown = "A number that large" if type(idx) is int and idx > MAX_INDEX else f"{idx!r:.60}"
        raise InvalidInput(f"{shown} is not an item's index.", hint="Use a whole number from 0 to 2**63 - 1.")
    return idx


def check_text(text: object, what: str) -> str:
    """A short text both engines can keep: a key, a worker's name."""
    if not isinstance(text, str) or not 0 < len(text) <= 512 or "\0" in text or not _is_unicode(text):
        raise InvalidInput(f"{text!r:.60} cannot be {what}.", hint="Use 1 to 512 characters without NUL.")
    return text


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half a character
        return False
    return True
