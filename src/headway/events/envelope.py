"""The envelope: the form of every event.

    {"id": ..., "type": "job.completed", "source": ..., "job": ..., "at": "2026-11-15T12:00:00Z", "version": 1, "data": {...}}

``id`` is derived from what happened, so a receiver recognises a repeated event. ``schemas/`` has the JSON schema of each
type. ``data`` is JSON that every parser reads: numbers that JSON does not have are refused when the event is decided, and a
lone surrogate becomes U+FFFD.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from headway.errors import InvalidInput

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened at ``at`` (with a time zone). ``version`` grows with the job, or is 1."""

    id: str
    type: str
    at: datetime
    source: str
    job: str
    version: int
    data: Mapping[str, Json]

    def as_json(self) -> str:
        """Return the envelope as one line of JSON. Raises `InvalidInput` for data that JSON cannot hold."""
        if self.at.tzinfo is None:
            raise InvalidInput(f"The time of event {whole(self.id)!r} has no time zone.", hint="Use datetime.now(UTC).")
        at = self.at.astimezone(UTC).isoformat().replace("+00:00", "Z")
        envelope = {
            "id": whole(self.id), "type": whole(self.type), "source": whole(self.source), "job": whole(self.job),
            "at": at, "version": int(self.version), "data": plain(self.data),
        }  # fmt: skip
        return json.dumps(envelope, ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Event:
        """Parse an envelope. Raises `InvalidInput` for any other text."""
        try:
            known = json.loads(text)
            at = datetime.fromisoformat(known["at"])
            return from_fields(known, at, known["data"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise InvalidInput(f"The text is not an event: {type(error).__name__}: {error}.") from error


def from_fields(fields: Mapping[str, object], at: datetime, data: object) -> Event:
    """Build an event from untrusted fields. Raises ValueError if they are not valid."""
    if not isinstance(data, dict):
        raise ValueError("data is not an object")  # noqa: TRY004  # callers handle all damage as ValueError
    names = {name: fields[name] for name in ("id", "type", "source", "job")}
    for name, value in names.items():
        if not isinstance(value, str):
            raise ValueError(f"{name} is not a text")  # noqa: TRY004
    if not names["id"] or not names["type"]:
        raise ValueError("an event has an id and a type")
    kind = str(names["type"])
    data = completion(data) if kind == "job.completed" else plain(data)
    assert isinstance(data, dict)
    if at.tzinfo is None:
        raise ValueError("at has no time zone")
    return Event(str(names["id"]), kind, at.astimezone(UTC), str(names["source"]), str(names["job"]),
                 int(str(fields["version"])), data)  # fmt: skip


def completion(data: Mapping[str, Json]) -> dict[str, Json]:
    """Return the data of ``job.completed`` as ``total``, ``succeeded`` and ``failed``.

    Outboxes may still hold two earlier forms: ``done`` and ``dead`` of the ledger, and ``done`` and ``errors`` of the finish
    line, where ``done`` includes the failed items.
    """
    if "succeeded" not in data and "done" in data:
        failed = data["errors"] if "errors" in data else data.get("dead")
        done = _count(data["done"]) - (_count(failed) if "errors" in data else 0)
        data = {"total": data.get("total"), "succeeded": done, "failed": failed}
    return {name: _count(data.get(name)) for name in ("total", "succeeded", "failed")}


def _count(value: Json) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("total, succeeded and failed are whole numbers from 0")
    return int(value)


def plain(value: object, *, lenient: bool = False) -> Json:
    """Return ``value`` as plain JSON types: subclasses (enums) converted, lone surrogates replaced.

    Raises `InvalidInput` for values that JSON does not have. With ``lenient`` they become null, for data of other programs.
    """
    try:
        return _plain(value, lenient)
    except RecursionError as error:
        if lenient:
            return None
        raise InvalidInput("The data of an event is nested too deeply.") from error


def _plain(value: object, lenient: bool) -> Json:
    match value:
        case None | True | False:
            return value
        case str():
            return whole(value)
        case int():
            return int(value)
        case float() if math.isfinite(value):
            return float(value)
        case Mapping():
            return {whole(str(name)): _plain(inner, lenient) for name, inner in value.items()}
        case list() | tuple():
            return [_plain(inner, lenient) for inner in value]
    if lenient:
        return None
    shown = value if isinstance(value, float) else f"a {type(value).__name__}"
    raise InvalidInput(f"The data of an event cannot hold {shown}: JSON has no such value.", hint="Use null or a text.")


def whole(text: str) -> str:
    """Return ``text`` as an exact `str` that UTF-8 can encode. A lone surrogate becomes U+FFFD."""
    try:
        text.encode()
        return str.__str__(text)
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
