"""The JSON schemas of the events: one file per type in ``schemas/``, the same as in docs/reference/schemas."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from headway.errors import NotFound

#: Every type of event that headway decides. The watcher's two can be called otherwise by its settings.
TYPES = (
    "job.completed",
    "task.queued",
    "task.running",
    "task.completed",
    "task.failed",
    "task.cancelled",
    "alert.opened",
    "alert.closed",
    "digits.train.failed.v1",
    "digits.train.outcome.v1",
)


def schema(type: str) -> dict[str, Any]:
    """The JSON schema (draft 2020-12) of an event's envelope."""
    if type not in TYPES:
        raise NotFound(f"There is no event type {type!r}.", hint=f"There are: {', '.join(TYPES)}")
    text = resources.files("headway.events").joinpath("schemas", f"{type}.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
