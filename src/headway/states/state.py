"""The values: a `State`, the `StateEvent` that carries it, and the one rule for what may be stored.

`checked` is the edge: whatever passes it can be kept by every store, whatever does not is refused before anything
is written, with the same words whichever store is behind.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal, TypeGuard
from uuid import uuid4

from headway.errors import InvalidInput
from headway.events import Json
from headway.ids import check_id

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

_INT32 = range(-(2**31), 2**31)
_INT64 = range(-(2**63), 2**63)


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
    then every change (neither)."""

    state: State | None
    replay: bool = False

    @property
    def replay_complete(self) -> bool:
        """Whether this is the one event between what stood and what happens."""
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
# The edge


def checked(state: State, num_tasks: int) -> State:
    """``state`` as it may be stored, its event id made if it has none; `InvalidInput` says what is wrong with it."""
    check_id(state.job_id, "a job id")
    check_task(state.task_id, num_tasks)
    check_id(state.tag, "a tag")
    check_status(state.status)
    _check_text(state.message, "The message")
    if len(state.message) > MESSAGE_LIMIT:
        raise InvalidInput(f"The message has {len(state.message):,} characters; at most {MESSAGE_LIMIT:,} are kept.")
    if not _is_int(state.schema_version) or not 1 <= state.schema_version < 2**31:
        raise InvalidInput(f"{state.schema_version!r} cannot be a schema version: it is a whole number from 1.")
    if state.event_id:
        check_id(state.event_id, "an event id")
    return replace(state, event_id=state.event_id or uuid4().hex, payload=checked_payload(state.payload))


def check_task(task_id: object, num_tasks: int) -> None:
    if not _is_int(task_id) or not 0 <= task_id < num_tasks:
        raise InvalidInput(f"There is no task {task_id!r}: this job has the tasks 0 to {num_tasks - 1}.")


def check_num_tasks(num_tasks: object) -> None:
    if not _is_int(num_tasks) or not 1 <= num_tasks <= TASKS_LIMIT:
        raise InvalidInput(
            f"{num_tasks!r} cannot be a number of tasks: it is a whole number from 1 to {TASKS_LIMIT:,}."
        )


def check_status(status: object) -> None:
    if not _is_int(status) or status not in _INT32:
        raise InvalidInput(f"{status!r} cannot be a status: it is a whole number of 32 bits.")


def checked_payload(payload: object) -> dict[str, Json] | None:
    """A copy of ``payload`` that its writer cannot change any more; refused if a store could not give it back."""
    if payload is None:
        return None
    if not isinstance(payload, Mapping):
        raise InvalidInput(f"A payload is a JSON object, not {type(payload).__name__}.")
    _check_json(payload, 1)
    text = encoded(payload)
    if len(text) > PAYLOAD_LIMIT:
        raise InvalidInput(
            f"The payload has {len(text):,} bytes of JSON; at most {PAYLOAD_LIMIT:,} are kept.",
            hint="Store it elsewhere and put its address into the payload.",
        )
    return decoded(text)


def _check_json(value: Any, depth: int) -> None:
    if depth > DEPTH_LIMIT:
        raise InvalidInput(f"The payload is nested deeper than {DEPTH_LIMIT} levels.")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, str):
        _check_text(value, "A text in the payload")
    elif isinstance(value, int | float):
        _check_number(value)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _check_name(name)
            _check_json(inner, depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            if isinstance(inner, list | tuple):
                raise InvalidInput(
                    "A list directly inside a list cannot be kept by every store.",
                    hint="Put the inner one into an object.",
                )
            _check_json(inner, depth + 1)
    else:
        raise InvalidInput(f"A {type(value).__name__} in the payload is not JSON.")


def _check_number(value: float) -> None:
    if isinstance(value, int):
        if value not in _INT64:
            raise InvalidInput("A number in the payload has more than 64 bits.", hint="Write it as text.")
    elif not math.isfinite(value):
        raise InvalidInput(f"{value} is not a number of JSON.", hint="Use null or a text for it.")


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or (name.startswith("__") and name.endswith("__")):
        raise InvalidInput(f"{name!r} cannot be a name in a payload: it is a text, not empty and not '__x__'.")
    _check_text(name, "A name in the payload")


def _check_text(text: object, what: str) -> None:
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


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def storable(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """``text`` made to pass the edge. For what comes from an exception: a report of an error must not fail itself."""
    whole = text.replace("\0", "�").encode("utf-8", "replace").decode()
    return whole if len(whole) <= limit else whole[: limit - 1] + "…"


# ------------------------------------------------------------------------------------------------------------
# As JSON text, which SQL and Redis keep


def encoded(payload: Mapping[str, Json]) -> str:
    return json.dumps(payload, ensure_ascii=True, separators=(",", ":"), default=dict)


def decoded(text: str | None) -> dict[str, Json] | None:
    return None if text is None else json.loads(text)


def moment(seconds: float) -> datetime:
    """The store's own time, as stored: seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC)
