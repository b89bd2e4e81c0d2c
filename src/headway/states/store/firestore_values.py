"""Convert states to and from Firestore documents, using the field names of spec 001."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from headway.states.state import Key, State


def fields(state: State, version: int, recent: str = "") -> dict[str, Any]:
    """Return the fields of a state document. The service sets its time. ``recent`` lists other writers' events."""
    document: dict[str, Any] = {
        "taskID": state.task_id,
        "tag": state.tag,
        "status": state.status,
        "message": state.message,
        "version": version,
        "eventID": state.event_id,
        "schemaVersion": state.schema_version,
    }
    if state.payload is not None:
        document["payload"] = state.payload
    if recent:
        document["recent"] = recent
    return document


def recent(document: Any) -> str:
    """Return the recent events of the key's other writers."""
    found = document.fields.get("recent")
    return "" if found is None else str(found.string_value)


def state(job_id: str, document: Any) -> State:
    """Parse a state document. Unknown fields are ignored, because a newer version may have added them."""
    found = plain(document.fields)
    for name, kind in (("taskID", int), ("tag", str), ("status", int), ("message", str), ("version", int)):
        if type(found[name]) is not kind:
            raise ValueError(f"{name} of {document.name} is {type(found[name]).__name__}")
    if key(document.name) != (found["taskID"], found["tag"]) and "/states/" in document.name:
        raise ValueError(f"{document.name} has another task or tag")
    return State(
        job_id,
        found["taskID"],
        found["tag"],
        found["status"],
        found["message"],
        found.get("timestamp"),
        found["version"],
        found.get("eventID", ""),
        found.get("payload"),
        found.get("schemaVersion", 1),
    )


def stamped(state: State, committed: Any) -> State:
    """Return ``state`` with its commit time. A repeated write already has its time."""
    if state.timestamp is not None:
        return state
    return replace(state, timestamp=_moment(committed.write_results[0].transform_results[0].timestamp_value))


def key(name: str) -> Key:
    """Parse the key from a state document's name: ``.../0-ingest``."""
    task_id, _, tag = name.rsplit("/", 1)[1].partition("-")
    return (int(task_id), tag)


def mark(documents: Iterable[Any]) -> tuple[str] | None:
    """Return the newest timestamp, by the service's clock. Later writes get a later timestamp."""
    times = [_plain(document.fields["timestamp"]) for document in documents if "timestamp" in document.fields]
    newest = max((time for time in times if isinstance(time, datetime)), default=None)
    return None if newest is None else (newest.isoformat(),)


def created(document: Any) -> str:
    """Return the creation time of a document, in ISO 8601."""
    return _moment(document.create_time).isoformat()


def write(
    name: str, fields: Mapping[str, Any], *, server_time: str | None = None, only: Iterable[str] = ()
) -> dict[str, Any]:
    """Build a write of a document, or of ``only`` some fields. ``server_time`` names the field for the commit time."""
    made: dict[str, Any] = {"update": {"name": name, **_map(fields)}}
    if only:
        made["update_mask"] = {"field_paths": list(only)}
    if server_time is not None:
        made["update_transforms"] = [{"field_path": server_time, "set_to_server_value": "REQUEST_TIME"}]
    return made


def _map(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"fields": {name: _value(value) for name, value in fields.items()}}


def _value(value: Any) -> dict[str, Any]:
    if value is None:
        return {"null_value": 0}
    if isinstance(value, bool):
        return {"boolean_value": value}
    if isinstance(value, int):
        return {"integer_value": value}
    if isinstance(value, float):
        return {"double_value": value}
    if isinstance(value, str):
        return {"string_value": value}
    if isinstance(value, Mapping):
        return {"map_value": _map(value)}
    assert isinstance(value, Sequence), "the edge lets only JSON through"
    return {"array_value": {"values": [_value(inner) for inner in value]}}


def plain(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the API's field values to Python values."""
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    kind = type(value).pb(value).WhichOneof("value_type")
    match kind:
        case "map_value":
            return plain(value.map_value.fields)
        case "array_value":
            return [_plain(inner) for inner in value.array_value.values]
        case "timestamp_value":
            return _moment(value.timestamp_value)
        case None | "null_value":
            return None
        case _:
            return getattr(value, kind)


def _moment(value: Any) -> datetime:
    """Convert an API timestamp to a datetime. Nanoseconds are cut to microseconds."""
    return datetime.fromtimestamp(value.timestamp(), UTC)
