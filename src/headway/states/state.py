"""The values: a `State`, the `StateEvent` that carries it, and the one rule for what may be stored.

`checked` is the edge: whatever passes it can be kept by every store, whatever does not is refused before anything
is written, with the same words whichever store is behind.
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

#: Nobody has reported yet; what a missing state counts as.
NOT_STARTED = 0
#: Set by `Manager.set_started`; every other positive number below `FINISHED` is the program's own progress.
STARTED = 1
#: Set by `Manager.set_finished`; the highest status there is, so it wins only when everybody has it.
FINISHED = 2**31 - 1
#: Set by `Manager.set_error`, unless the exception brings a ``status_code`` of its own.
ERROR = -1
#: Set by `Manager.set_warning`. It is lower than `ERROR`: see `Summary.worst_error` for what it must not hide.
WARNING = -2

RED, GREEN, YELLOW, BLACK = "\U0001f534", "\U0001f7e2", "\U0001f7e1", "⚫"

#: Longest message, in characters.
MESSAGE_LIMIT = 4_096
#: Largest payload, in bytes of JSON.
PAYLOAD_LIMIT = 262_144
#: Deepest payload. Firestore keeps 20 levels of a document, and the payload is one of them.
DEPTH_LIMIT = 18
#: Most tasks one job may have.
TASKS_LIMIT = 1_000_000

#: What a state is about within its job: (task_id, tag).
Key = tuple[int, str]
StatusClass = Literal["not_started", "running", "finished", "warning", "error"]


@dataclass(frozen=True, slots=True)
class State:
    """Where one task of a job is with one tag.

    ``timestamp`` and ``version`` are the store's: what a writer puts there is ignored. ``event_id`` names the write;
    writing again with the id that is stored already changes nothing and gives the stored state.
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
        return (self.task_id, self.tag)

    def as_dict(self) -> dict[str, Json]:
        """Everything, in JSON's types and with stable names."""
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
    """What a subscription gives: a state that stood when it began (``replay``), the end of those (no ``state``),
    then every change (neither). ``skipped`` is how many earlier changes of the same key this one stands for, because
    the reader was too far behind to be given each."""

    state: State | None
    replay: bool = False
    skipped: int = 0

    @property
    def replay_complete(self) -> bool:
        """Whether this is the one event between what was current and what happens."""
        return self.state is None


#: The sentinel: all that stood was told, from here on it is news.
REPLAY_COMPLETE = StateEvent(None)


def replay_order(state: State) -> tuple[datetime, int, str, int]:
    """Oldest first; states of one commit have equal times and go by task, tag and version."""
    return (state.timestamp or datetime.min.replace(tzinfo=UTC), state.task_id, state.tag, state.version)


def status_class(status: int) -> StatusClass:
    if status == NOT_STARTED:
        return "not_started"
    if status == FINISHED:
        return "finished"
    if status == WARNING:
        return "warning"
    return "running" if status > 0 else "error"


# ------------------------------------------------------------------------------------------------------------
# The edge. What passes is an exact `int` or `str`: an enumeration's member has a hash of its own, so it would be another
# key of a dictionary, and a store would keep its name or its number as it pleases.


def checked(state: State, num_tasks: int) -> State:
    """``state`` as it may be stored, its event id made if it has none; `InvalidInput` says what is wrong with it."""
    message = _checked_text(state.message, "The message")
    if len(message) > MESSAGE_LIMIT:
        raise InvalidInput(f"The message has {len(message):,} characters; at most {MESSAGE_LIMIT:,} are kept.")
    schema_version = _exact_int(state.schema_version)
    if schema_version is None or not 1 <= schema_version < 2**31:
        raise InvalidInput(f"{_shown(state.schema_version)} cannot be a schema version: it is a whole number from 1.")
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


# Seeded by the operating system, whose own numbers cost more than the rest of the check. Not the generator programs
# seed themselves (`random.seed(1)` in two processes would give both the same ids), and seeded anew in a forked child.
_ids = random.Random()
os.register_at_fork(after_in_child=_ids.seed)


def new_event_id() -> str:
    return f"{_ids.getrandbits(128):032x}"


def checked_id(value: object, what: str) -> str:
    return _known_id(value, what) if type(value) is str else str.__str__(check_id(value, what))


@lru_cache(maxsize=4_096)
def _known_id(value: str, what: str) -> str:
    """The same few tags are written again and again."""
    return check_id(value, what)


def checked_task(task_id: object, num_tasks: int) -> int:
    if type(task_id) is int and 0 <= task_id < num_tasks:  # nearly always: a read takes a few microseconds in all
        return task_id
    number = _exact_int(task_id)
    if number is None or not 0 <= number < num_tasks:
        raise InvalidInput(f"There is no task {_shown(task_id)}: this job has the tasks 0 to {num_tasks - 1}.")
    return number


def checked_num_tasks(num_tasks: object) -> int:
    number = _exact_int(num_tasks)
    if number is None or not 1 <= number <= TASKS_LIMIT:
        raise InvalidInput(
            f"{_shown(num_tasks)} cannot be a number of tasks: it is a whole number from 1 to {TASKS_LIMIT:,}."
        )
    return number


def checked_status(status: object) -> int:
    number = _exact_int(status)
    if number is None or not -(2**31) <= number < 2**31:
        raise InvalidInput(f"{_shown(status)} cannot be a status: it is a whole number of 32 bits.")
    return number


def checked_seconds(seconds: float | None, what: str) -> float | None:
    """A time limit as a lock can wait for it; None is no limit."""
    if seconds is None:
        return None
    if not seconds >= 0:  # NaN is neither
        raise InvalidInput(f"{what} cannot be {_shown(seconds)}: it is a number of seconds from 0.")
    return float(min(seconds, threading.TIMEOUT_MAX))


def checked_payload(payload: object) -> dict[str, Json] | None:
    """A copy of ``payload`` that its writer cannot change any more; refused if a store could not give it back."""
    if payload is None:
        return None
    if not isinstance(payload, Mapping):
        raise InvalidInput(f"A payload is a JSON object, not {type(payload).__name__}.")
    copy, most = _copied(payload, 1)
    if most > PAYLOAD_LIMIT and (length := len(encoded(copy))) > PAYLOAD_LIMIT:
        raise InvalidInput(
            f"The payload has {length:,} bytes of JSON; at most {PAYLOAD_LIMIT:,} are kept.",
            hint="Store it elsewhere and put its address into the payload.",
        )
    found: dict[str, Json] = copy
    return found


def _copied(value: Any, depth: int) -> tuple[Any, int]:
    """A copy in exact types, and the most bytes it can have as JSON, which spares writing out what is small."""
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
                "A list directly inside a list cannot be kept by every store.", hint="Put the inner one into an object."
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
        raise InvalidInput(f"{float.__repr__(value)} is not a number of JSON.", hint="Use null or a text for it.")
    return float.__float__(value)


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not name or (name.startswith("__") and name.endswith("__")):
        raise InvalidInput(f"{_shown(name)} cannot be a name in a payload: it is a text, not empty and not '__x__'.")
    return _checked_text(name, "A name in the payload")


def _checked_text(text: object, what: str) -> str:
    if not isinstance(text, str):
        raise InvalidInput(f"{what} is {type(text).__name__}, not text.")
    if "\0" in text:
        raise InvalidInput(f"{what} holds a NUL character, which not every store can keep.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(
            f"{what} holds half a surrogate pair at character {error.start}: it is not Unicode."
        ) from error
    return str.__str__(text)


def _exact_int(value: object) -> int | None:
    return int.__int__(value) if isinstance(value, int) and not isinstance(value, bool) else None


def _shown(value: object) -> str:
    """``value`` for an error's text. Another object's repr may be endless, or fail (an int of 5000 digits)."""
    if isinstance(value, str):
        return repr(str.__str__(value)[:60])
    if value is None or isinstance(value, bool | float) or (isinstance(value, int) and abs(int.__int__(value)) < 2**64):
        return repr(value)[:60]
    return "a number of more than 64 bits" if isinstance(value, int) else f"a {type(value).__name__}"


def storable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """``text`` made to pass the edge. For what comes from an exception: a report of an error must not fail itself."""
    whole = text.replace("\0", "�").encode("utf-8", "replace").decode()
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


# ------------------------------------------------------------------------------------------------------------
# As JSON text, which SQL and Redis keep


_encoder = json.JSONEncoder(separators=(",", ":"), default=dict)  # made once: `json.dumps` would make one for each call


def encoded(payload: Mapping[str, Json]) -> str:
    return _encoder.encode(payload)


def decoded(text: str | None) -> dict[str, Json] | None:
    return None if text is None else json.loads(text)


def moment(seconds: float) -> datetime:
    """The store's own time, as stored: seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
