"""The JSON schemas of the events: one file per type in ``schemas/``, the same as in docs/reference/schemas."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from headway.errors import NotFound

#: Every type of event. The settings of the watcher can rename its two (digits.train...).
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
    """Return the JSON schema (draft 2020-12) of the envelope of one type. Raises `NotFound` for an unknown type."""
    if type not in TYPES:
        raise NotFound(f"There is no event type {type!r}.", hint=f"Use one of {', '.join(TYPES)}")
    text = resources.files("headway.events").joinpath("schemas", f"{type}.json").read_text("utf-8")
    found: dict[str, Any] = json.loads(text)
    return found
