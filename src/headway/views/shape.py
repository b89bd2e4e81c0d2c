"""Views and their JSON: a view is a named tuple whose fields are the keys of its JSON object.

Defining a named tuple takes a third of the time of a frozen dataclass, and commands must start at once. Each field is
annotated with its type and a description, for `headway.views.schemas`.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from math import isfinite
from typing import Any, Final, Protocol

Json = dict[str, Any]


class Absent:
    """The value of a key that is left out of the JSON."""

    def __repr__(self) -> str:
        return "ABSENT"


ABSENT: Final = Absent()


#: Class name of each document -> the schema its JSON begins with.
SCHEMAS = {
    "Jobs": "headway.jobs/1",
    "JobSheet": "headway.job/1",
    "Runs": "headway.runs/1",
    "Items": "headway.items/1",
    "ItemSheet": "headway.item/1",
    "JobLog": "headway.log/1",
    "JobMap": "headway.item-map/1",
    "Dead": "headway.dead/1",
    "DeadItems": "headway.dead-items/1",
    "DeadLetters": "headway.dead-letters/1",
    "TaskCauses": "headway.task-causes/1",
    "RqCauses": "headway.rq-causes/1",
    "CauseGroups": "headway.causes/1",
    "FailuresByHost": "headway.failures-by-host/1",
    "Found": "headway.search/1",
    "Marks": "headway.marks/1",
    "ProjectProgress": "headway.progress/1",
    "Projects": "headway.projects/1",
    "States": "headway.states/1",
    "StateEvent": "headway.state-event/1",
    "StatesJobs": "headway.states-jobs/1",
    "Queues": "headway.queues/1",
    "Tasks": "headway.tasks/1",
    "TaskSheet": "headway.task/1",
    "Workers": "headway.workers/1",
    "QueueSettings": "headway.queue-settings/1",
    "Performances": "headway.performance/1",
    "RelayStatus": "headway.relay/1",
    "RelayPoison": "headway.relay-poison/1",
    "Alerts": "headway.alerts/1",
    "Health": "headway.doctor/1",
    "Audit": "headway.audit/1",
    "Activity": "headway.activity/1",
    "Acted": "headway.acted/1",
    "Tokens": "headway.tokens/1",
    "Settings": "headway.config/1",
}


class Document(Protocol):
    """A view whose JSON begins with its schema."""

    def as_json(self) -> Json: ...


def iso(at: datetime | None) -> str | None:
    """Format a time as ISO 8601 in UTC, to the millisecond, with a Z."""
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def plain(value: Any) -> Any:
    """Convert a view, or a value inside one, to JSON types."""
    if hasattr(value, "_fields"):
        pairs = ((name, plain(part)) for name, part in zip(value._fields, value, strict=True))
        return {name: part for name, part in pairs if part is not ABSENT}
    if isinstance(value, datetime):
        return iso(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, float) and not isfinite(value):
        return None  # JSON has no NaN and no infinity
    return value


def schema_of(kind: type) -> str:
    """Return the schema of a document's class."""
    return SCHEMAS[kind.__name__]


def document(view: Any) -> Json:
    """Return a document's JSON: its schema, then its fields."""
    return {"schema": schema_of(type(view)), **plain(view)}
