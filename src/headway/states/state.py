"""`State` and `StateEvent`, and the validation of states.

Every store can keep and return what `checked` accepts. What it rejects is rejected before any write, with the same
message for every store.
"""

from __future__ import annotations

import json
import math
import os
import random
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Literal

from headway.core.ids import check_id
from headway.errors import InvalidInput
from headway.events import Json

#: The status of a task that has not reported.
NOT_STARTED = 0
#: Set by `Manager.set_started`. Programs may use the other positive numbers below `FINISHED` for progress.
STARTED = 1
#: Set by `Manager.set_finished`. It is the highest status, so it is a job's lowest one only if every task has it.
FINISHED = 2**31 - 1
#: Set by `Manager.set_error`, unless the exception has a ``status_code``.
ERROR = -1
#: Set by `Manager.set_warning`. It is lower than `ERROR`, so `Summary.worst_error` shows errors separately.
WARNING = -2

RED, GREEN, YELLOW, BLACK = "\U0001f534", "\U0001f7e2", "\U0001f7e1", "⚫"

#: Maximum length of a message, in characters.
MESSAGE_LIMIT = 4_096
#: Maximum size of a payload, in bytes of JSON.
PAYLOAD_LIMIT = 262_144
#: Maximum nesting of a payload. Firestore allows 20 levels in a document, including the payload itself.
DEPTH_LIMIT = 18
#: Maximum number of tasks of a job.
TASKS_LIMIT = 1_000_000

#: Identifies a state within its job: (task_id, tag).
Key = tuple[int, str]
StatusClass = Literal["not_started", "running", "finished", "warning", "error"]


@dataclass(frozen=True, slots=True)
class State:
    """The status of one task of a job for one tag.

    The store sets ``timestamp`` and ``version`` and ignores the writer's values. ``event_id`` identifies the write:
    repeating a write with the stored event id changes nothing and returns the stored state.
    """

    job_id: str
    task_id: int
    tag: str
    status: int = NOT_STARTED
    message: str = ""
    timestamp: datetime | None = None
    version: int = 0
    event_id: str = ""
    payload: Mapping[str, Json] | None = None
    schema_version: int = 1

    @property
    def key(self) -> Key:
        """Task and tag."""
        return (self.task_id, self.tag)

    def as_dict(self) -> dict[str, Json]:
        """Return all fields as JSON values. The names are stable."""
        return {
            "job_id": self.job_id,
            "task_id": self.task_id,
            "tag": self.tag,
            "status": self.status,
            "message": self.message,
            "timestamp": None if self.timestamp is None else self.timestamp.isoformat().replace("+00:00", "Z"),
            "version": self.version,
            "event_id": self.event_id,
            "payload": self.payload,
            "schema_version": self.schema_version,
        }


@dataclass(frozen=True, slots=True)
class StateEvent:
    """An event of a subscription.

    - ``replay``: a state that was current when the subscription began.
    - ``state`` is None: the sentinel between the replay and the changes.
    - otherwise a change. ``skipped`` counts the earlier changes of the key that it replaces, because the reader was too
      slow.
    """

    state: State | None
    replay: bool = False
    skipped: int = 0

    @property
    def replay_complete(self) -> bool:
        """Whether this is the sentinel between the replay and the changes."""
        return self.state is None


#: The sentinel: all current states have been replayed.
REPLAY_COMPLETE = StateEvent(None)


def replay_order(state: State) -> tuple[datetime, int, str, int]:
    """Sort key of a replay: oldest first. States of one commit have equal times; task, tag and version order them."""
    return (state.timestamp or datetime.min.replace(tzinfo=UTC), state.task_id, state.tag, state.version)


def status_class(status: int) -> StatusClass:
    """Return the class of a status."""
    if status == NOT_STARTED:
        return "not_started"
    if status == FINISHED:
        return "finished"
    if status == WARNING:
        return "warning"
    return "running" if status > 0 else "error"


# ------------------------------------------------------------------------------------------------------------
# Validation. It returns exact `int` and `str` objects. A member of an enumeration has another hash, so it would be a
# second key in a dictionary, and a store might keep its name instead of its value.


def checked(state: State, num_tasks: int) -> State:
    """Return ``state`` ready to be stored, with an event id. Raises `InvalidInput` for a value no store could keep."""
    message = _checked_text(state.message, "The message")
    if len(message) > MESSAGE_LIMIT:
        raise InvalidInput(f"The message must have at most {MESSAGE_LIMIT:,} characters (got {len(message):,}).")
    schema_version = _exact_int(state.schema_version)
    if schema_version is None or not 1 <= schema_version < 2**31:
        raise InvalidInput(f"schema_version must be a whole number from 1 (got {_shown(state.schema_version)}).")
    return State(
        checked_id(state.job_id, "a job id"),
        checked_task(state.task_id, num_tasks),
        checked_id(state.tag, "a tag"),
        checked_status(state.status),
        message,
        state.timestamp,
        state.version,
        checked_id(state.event_id, "an event id") if state.event_id != "" else new_event_id(),
        checked_payload(state.payload),
        schema_version,
    )


# A generator of our own: programs that call `random.seed(1)` in two processes would get the same ids. It is seeded by
# the operating system once, because `os.urandom` per id would take longer than the rest of the validation.
_ids = random.Random()
os.register_at_fork(after_in_child=_ids.seed)


def new_event_id() -> str:
    """Return a random id of 128 bits, in hexadecimal."""
    return f"{_ids.getrandbits(128):032x}"


def checked_id(value: object, what: str) -> str:
    """Return ``value`` if it is a valid id. ``what`` names it in the error."""
    return _known_id(value, what) if type(value) is str else str.__str__(check_id(value, what))


@lru_cache(maxsize=4_096)
def _known_id(value: str, what: str) -> str:
    """Cache the check: a program writes the same few tags again and again."""
    return check_id(value, what)


def checked_task(task_id: object, num_tasks: int) -> int:
    """Return ``task_id`` if the job has that task."""
    if type(task_id) is int and 0 <= task_id < num_tasks:  # the usual case, first for speed
        return task_id
    number = _exact_int(task_id)
    if number is None or not 0 <= number < num_tasks:
        raise InvalidInput(f"There is no task {_shown(task_id)}: this job has the tasks 0 to {num_tasks - 1}.")
    return number


def checked_num_tasks(num_tasks: object) -> int:
    """Return ``num_tasks`` if it is a valid number of tasks."""
    number = _exact_int(num_tasks)
    if number is None or not 1 <= number <= TASKS_LIMIT:
        raise InvalidInput(
            f"The number of tasks must be a whole number from 1 to {TASKS_LIMIT:,} (got {_shown(num_tasks)})."
        )
    return number


def checked_status(status: object) -> int:
    """Return ``status`` if it is a whole number of 32 bits."""
    number = _exact_int(status)
    if number is None or not -(2**31) <= number < 2**31:
        raise InvalidInput(f"status must be a whole number of 32 bits (got {_shown(status)}).")
    return number


def checked_seconds(seconds: float | None, what: str) -> float | None:
    """Return a timeout that a lock accepts. None means no limit. ``what`` names it in the error."""
    if seconds is None:
        return None
    if not seconds >= 0:  # also rejects NaN
        raise InvalidInput(f"{what} must be a number of seconds from 0 (got {_shown(seconds)}).")
    return float(min(seconds, threading.TIMEOUT_MAX))


def checked_payload(payload: object) -> dict[str, Json] | None:
    """Return a deep copy of ``payload``. Raises `InvalidInput` if a store could not return it unchanged."""
    if payload is None:
        return None
    if not isinstance(payload, Mapping):
        raise InvalidInput(f"A payload is a JSON object, not {type(payload).__name__}.")
    copy, most = _copied(payload, 1)
    if most > PAYLOAD_LIMIT and (length := len(encoded(copy))) > PAYLOAD_LIMIT:
        raise InvalidInput(
            f"The payload must have at most {PAYLOAD_LIMIT:,} bytes of JSON (got {length:,}).",
            hint="Store it elsewhere and put its address into the payload.",
        )
    found: dict[str, Json] = copy
    return found


def _copied(value: Any, depth: int) -> tuple[Any, int]:
    """Return a copy in exact types and an upper bound of its size as JSON. Small payloads need no exact size."""
    if depth > DEPTH_LIMIT:
        raise InvalidInput(f"The payload is nested deeper than {DEPTH_LIMIT} levels.")
    if value is None or isinstance(value, bool):
        return value, 5
    if isinstance(value, str):
        return _checked_text(value, "A text in the payload"), 12 * len(value) + 2
    if isinstance(value, int | float):
        return _checked_number(value), 25
    if isinstance(value, Mapping):
        made: dict[str, Any] = {}
        most = 2
        for name, inner in value.items():
            plain = _checked_name(name)
            made[plain], size = _copied(inner, depth + 1)
            most += 12 * len(plain) + 4 + size
        return made, most
    if isinstance(value, list | tuple):
        if any(isinstance(inner, list | tuple) for inner in value):
            raise InvalidInput(
                "The payload has a list directly inside a list. Firestore cannot store that.",
                hint="Put the inner list into an object.",
            )
        copies = [_copied(inner, depth + 1) for inner in value]
        return [copy for copy, _ in copies], 2 + sum(size + 1 for _, size in copies)
    raise InvalidInput(f"A {type(value).__name__} in the payload is not JSON.")


def _checked_number(value: float) -> float:
    if isinstance(value, int):
        number = int.__int__(value)
        if not -(2**63) <= number < 2**63:
            raise InvalidInput("A number in the payload has more than 64 bits.", hint="Write it as text.")
        return number
    if not math.isfinite(value):
        raise InvalidInput(
            f"The payload contains {float.__repr__(value)}. JSON has no such number.",
            hint="Use null or a text instead.",
        )
    return float.__float__(value)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name or (name.startswith("__") and name.endswith("__")):
        raise InvalidInput(f"A name in a payload must be a text, not empty and not '__x__' (got {_shown(name)}).")
    return _checked_text(name, "A name in the payload")


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be text, not {type(text).__name__}.")
    if "\0" in text:
        raise InvalidInput(f"{what} contains a NUL character. PostgreSQL cannot store it.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{what} contains half a surrogate pair at character {error.start}. It is not valid Unicode."
        ) from error
    return str.__str__(text)


def _exact_int(value: object) -> int | None:
    return int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    """Return ``value`` for an error message, at most 60 characters. Does not call the repr of an unknown object."""
    if isinstance(value, str):
        return repr(str.__str__(value)[:60])
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(int.__int__(value)) < 2**64):
        return repr(value)[:60]
    return "a number of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"


def storable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Return ``text`` with characters no store can keep replaced, and cut to ``limit``. For texts of exceptions."""
    whole = text.replace("\0", "�").encode("utf-8", "replace").decode()
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


# ------------------------------------------------------------------------------------------------------------
# JSON text for SQL and Redis


_encoder = json.JSONEncoder(separators=(",", ":"), default=dict)  # reused: `json.dumps` would build one per call


def encoded(payload: Mapping[str, Json]) -> str:
    """Return a payload as compact JSON."""
    return _encoder.encode(payload)


def decoded(text: str | None) -> dict[str, Json] | None:
    """Parse a payload, or return None for none."""
    return None if text is None else json.loads(text)


def moment(seconds: float) -> datetime:
    """Return a stored time (seconds since 1970) as an aware datetime."""
    return datetime.fromtimestamp(seconds, UTC)
