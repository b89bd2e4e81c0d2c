"""The relay: how far each sink is behind, and what a sink refused for good."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, NamedTuple

from headway.views.shape import Json, document


class SinkBacklog(NamedTuple):
    """How far one sink is behind in one outbox."""

    sink: Annotated[str, "its name, without secrets"]
    configured: Annotated[bool, "whether the settings name it"]
    waiting: Annotated[int, "events it has not taken"]
    oldest_seconds: Annotated[float | None, "age of the oldest of them; null if none waits"]
    refused: Annotated[int, "events it refused for good, which were put aside"]
    holder: Annotated[str | None, "the relay that serves it now"]


class OutboxStatus(NamedTuple):
    """One outbox with the sinks it knows."""

    outbox: Annotated[str, "database or redis"]
    address: Annotated[str, "where it is, without the password"]
    error: Annotated[str | None, "why it is out of reach; then nothing is known about it"]
    sinks: Annotated[tuple[SinkBacklog, ...], "its sinks"]
    never_served: Annotated[tuple[str, ...], "sinks of the settings that no relay has served yet"]


class RelayStatus(NamedTuple):
    """`headway relay --status`: how far each sink is behind."""

    outboxes: Annotated[tuple[OutboxStatus, ...], "the outboxes"]

    def as_json(self) -> Json:
        return document(self)


class RefusedEvent(NamedTuple):
    """An event that a sink refused for good."""

    outbox: Annotated[str, "database or redis"]
    sink: Annotated[str, "who refused it"]
    event: Annotated[str, "the event's id, or the place of an entry that is no event"]
    type: Annotated[str, "the event's type"]
    job: Annotated[str, "the job it is about"]
    reason: Annotated[str, "why it was refused"]
    at: Annotated[datetime | None, "when it was put aside"]


class RelayPoison(NamedTuple):
    """`headway relay --poison list`: what was put aside."""

    refused: Annotated[tuple[RefusedEvent, ...], "the events"]

    def as_json(self) -> Json:
        return document(self)
