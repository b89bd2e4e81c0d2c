"""The values of the queue: tasks, claims, statuses, priorities, and the checks of arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeVar

from headway.core.ids import UserId, user_text
from headway.errors import InvalidInput, Refused

#: Maximum characters of a name or a reason.
TEXT_LIMIT = 1000


class Priority(StrEnum):
    """The queues in order of service. A queue is served only while the queues before it are empty."""

    URGENT = "urgent"  # maintenance, and on request
    HIGH = "high"  # the default of administrators
    NORMAL = "normal"  # the default of users
    LOW = "low"  # only on request

    @property
    def place(self) -> int:
        """The position in the order of service, from 0."""
        return _PLACES[self]


PRIORITIES: tuple[Priority, ...] = tuple(Priority)
_PLACES = {priority: place for place, priority in enumerate(PRIORITIES)}


class Status(StrEnum):
    """The states of a task, and what sets each of them."""

    QUEUED = "QUEUED"  # submit; a worker or the sweeper after a failed run, if a retry is left
    RUNNING = "RUNNING"  # the worker that claimed it
    COMPLETED = "COMPLETED"  # the worker whose handler returned
    FAILED = "FAILED"  # a worker or the sweeper after a failed run, if no retry is left
    CANCELLED = "CANCELLED"  # cancel, if the task waited; the worker, if it ran

    @property
    def is_final(self) -> bool:
        """Whether the task has ended."""
        return self in FINAL


FINAL = (Status.COMPLETED, Status.FAILED, Status.CANCELLED)
_E = TypeVar("_E", Status, Priority)


class UserBusy(Refused):
    """The user has the most active tasks allowed. ``task_id`` is one of them."""

    hint = "Wait until it has ended, or cancel it."

    def __init__(self, message: str, *, task_id: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.task_id = task_id


class TaskConflict(Refused):
    """A task with this id exists, and its user, kind or payload differ."""

    hint = "Use another id, or the same user, kind and payload. An id is never reused."


@dataclass(frozen=True, slots=True)
class Task:
    """A task at the moment it was read. ``version`` grows with every change."""

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
        """Whether the task has ended."""
        return self.status.is_final

    def as_json(self) -> dict[str, Any]:
        """Return the fields with JSON types."""
        return as_json(self)


def as_json(value: Task | QueueInfo) -> dict[str, Any]:
    """Return the fields with JSON types. `headway.views.queue` has the same keys and documents them."""
    return {JSON_NAMES.get(field.name, field.name): _plain(getattr(value, field.name)) for field in fields(value)}


#: Field -> JSON key, where they differ: a task's priority is the queue it is in.
JSON_NAMES = {"priority": "queue"}


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    if isinstance(value, tuple):
        return list(value)
    return value.value if isinstance(value, StrEnum) else value


def is_number(value: object) -> bool:
    """Return whether an argument is a number: untyped callers may pass anything."""
    return isinstance(value, int | float)


def is_text(value: object) -> bool:
    """Return whether an argument is a string: untyped callers may pass anything."""
    return isinstance(value, str)


def check_text(value: object, what: str) -> str:
    """Return ``value`` if it is a text that every database can store. Raises `InvalidInput`; ``what`` names it there."""
    if not isinstance(value, str) or len(value) > TEXT_LIMIT or "\0" in value or not is_whole(value):
        shown = f"A {type(value).__name__}" if not isinstance(value, str) else f"{value[:40]!r}"
        raise InvalidInput(f"{shown} cannot be {what}.", hint=f"Use a text of at most {TEXT_LIMIT} characters.")
    return value


def check_actor(by: object, reason: object = "") -> None:
    """Validate the actor and the reason of an operation."""
    check_text(by, "who does it")
    check_text(reason, "a reason")


def check_asked(**texts: str | None) -> None:
    """Validate the texts that are given; their names appear in the error."""
    for name, text in texts.items():
        if text is not None:
            check_text(text, name)


def user_filter(user_id: UserId | None) -> str | None:
    """Return the text by which tasks of a user are looked up."""
    return None if user_id is None else check_text(user_text(user_id), "a user id")


def member_of(kind: type[_E], value: _E | str, what: str) -> _E:
    """Return the member of an enum. Raises `InvalidInput`; ``what`` names it there."""
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(member.value for member in kind)
        raise InvalidInput(f"{str(value)[:40]!r} is not {what}.", hint=f"Use one of {known}.") from None


def is_whole(text: str) -> bool:
    """Return whether a text can be encoded as UTF-8: it has no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def moment(seconds: float) -> datetime:
    """Convert a timestamp to a datetime in UTC."""
    return datetime.fromtimestamp(seconds, UTC)


@dataclass(frozen=True, slots=True)
class NewTask:
    """A validated task to submit. ``payload`` is encoded by the codec."""

    id: str
    kind: str
    priority: Priority
    payload: str
    fingerprints: Sequence[str]  # the first is stored; an existing task with any of them is equal
    user_id: str | None = None
    role: str = "user"
    partition: str | None = None
    retries: int = 3
    retry_delay: float = 2.0
    timeout: float | None = None
    delay: float = 0.0

    @property
    def party(self) -> str:
        """The group that takes turns with other groups: the partition, else the user."""
        return self.partition if self.partition is not None else self.user_id or ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A task that a worker may run. ``token`` fences: after the lease expired and another worker has it, it is refused."""

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
    hinted: bool = False  # whether RQ has a hint of it


@dataclass(frozen=True, slots=True)
class QueueInfo:
    """One queue: the number of tasks by state, and whether and why it is paused."""

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
    workers: int = 0  # online workers that serve it

    def as_json(self) -> dict[str, Any]:
        """Return the fields with JSON types."""
        return as_json(self)
