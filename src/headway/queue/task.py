"""What goes into the queue and what comes out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from headway.core.ids import UserId, user_text
from headway.errors import InvalidInput, Refused

#: Characters of a text that somebody gives: a name, a reason.
TEXT_LIMIT = 1000


class Priority(StrEnum):
    """The queues, in the order in which they are served: strictly, the next one only while those before it are empty."""

    URGENT = "urgent"  # maintenance, and whoever may ask for it
    HIGH = "high"  # what an administrator submits unless they say otherwise
    NORMAL = "normal"  # what a user submits
    LOW = "low"  # whoever asks for it

    @property
    def place(self) -> int:
        return _PLACES[self]


PRIORITIES: tuple[Priority, ...] = tuple(Priority)
_PLACES = {priority: place for place, priority in enumerate(PRIORITIES)}


class Status(StrEnum):
    """Where a task is."""

    QUEUED = "QUEUED"  # by submit; by a worker or the sweeper when a run did not succeed and a try is left
    RUNNING = "RUNNING"  # by the worker that claimed it
    COMPLETED = "COMPLETED"  # by the worker whose handler returned
    FAILED = "FAILED"  # by the worker or the sweeper, when no try is left
    CANCELLED = "CANCELLED"  # by cancel for one that waited, by the worker for one that ran

    @property
    def is_final(self) -> bool:
        return self in FINAL


FINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
_E = TypeVar("_E", Status, Priority)


class UserBusy(Refused):
    """The user has as many active tasks as one user may have. ``task_id`` is one of them."""

    hint = "Wait until it has ended, or cancel it."

    def __init__(self, message: str, *, task_id: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.task_id = task_id


class TaskConflict(Refused):
    """A task with this id exists, and its user, kind or payload differ."""

    hint = "An id names one task for ever: use another id, or the same user, kind and payload."


@dataclass(frozen=True, slots=True)
class Task:
    """A task as it was when it was read. ``version`` grows with every change of it."""

    id: str
    kind: str
    priority: Priority
    status: Status
    version: int
    user_id: str | None
    role: str
    attempts: int
    retries: int
    percent: float
    message: str
    error: str | None
    worker: str | None
    created_at: datetime
    updated_at: datetime
    run_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    cancelling: bool

    @property
    def is_final(self) -> bool:
        return self.status.is_final

    def as_json(self) -> dict[str, Any]:
        return as_json(self)


def as_json(value: Task | QueueInfo) -> dict[str, Any]:
    """Its fields in JSON's types. `headway.views.queue` has the same keys, and says what each of them is."""
    return {JSON_NAMES.get(field.name, field.name): _plain(getattr(value, field.name)) for field in fields(value)}


#: Fields whose key has another name: which queue a task is in is its priority.
JSON_NAMES = {"priority": "queue"}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, StrEnum) else value


def is_number(value: object) -> bool:
    """For arguments: whoever calls may give anything, whatever their types promise."""
    return isinstance(value, int | float)


def is_text(value: object) -> bool:
    return isinstance(value, str)


def check_text(value: object, what: str) -> str:
    """``value`` if it is a text that every database can keep: who did something, why, a name to look for."""
    if not isinstance(value, str) or len(value) > TEXT_LIMIT or "\0" in value or not is_whole(value):
        shown = f"A {type(value).__name__}" if not isinstance(value, str) else f"{value[:40]!r}"
        raise InvalidInput(f"{shown} cannot be {what}.", hint=f"Use a text of at most {TEXT_LIMIT} characters.")
    return value


def check_asked(**texts: str | None) -> None:
    for name, text in texts.items():
        if text is not None:
            check_text(text, name)


def asked_user(user_id: UserId | None) -> str | None:
    """Return the text by which tasks of a user are looked up."""
    return None if user_id is None else check_text(user_text(user_id), "a user id")


def member_of(kind: type[_E], value: _E | str, what: str) -> _E:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise InvalidInput(f"{str(value)[:40]!r} is not {what}.", hint=f"Use one of {known}.") from None


def is_whole(text: str) -> bool:
    """Whether no character of it is half a pair: UTF-8 has none for it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True, slots=True)
class NewTask:
    """A task to submit, checked; ``payload`` as the codec wrote it."""

    id: str
    kind: str
    priority: Priority
    payload: str
    fingerprints: Sequence[str]  # the first is written; a task that has any of them is the same one
    user_id: str | None = None
    role: str = "user"
    partition: str | None = None
    retries: int = 3
    retry_delay: float = 2.0
    timeout: float | None = None
    delay: float = 0.0

    @property
    def party(self) -> str:
        """Who it takes turns with: tasks of one partition, or of one user, wait for each other; others do not."""
        return self.partition if self.partition is not None else self.user_id or ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A task that a worker may run. ``token`` fences: once the lease lapsed and another has it, this one is refused."""

    no: int
    id: str
    kind: str
    priority: Priority
    token: int
    version: int
    payload: str
    attempts: int
    retries: int
    retry_delay: float
    timeout: float | None
    user_id: str | None
    role: str
    waited: float
    hinted: bool = False  # whether RQ was told of it


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue: what waits, what runs, whether it is paused and why."""

    priority: Priority
    waiting: int
    delayed: int
    running: int
    oldest_wait: float | None
    paused: bool
    paused_by: str | None
    paused_until: datetime | None
    reason: str
    completed: int
    failed: int
    cancelled: int
    unserved: tuple[str, ...] = ()  # kinds of waiting tasks that no online worker runs
    completed_total: int = 0
    failed_total: int = 0

    def as_json(self) -> dict[str, Any]:
        return as_json(self)
