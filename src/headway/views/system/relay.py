"""The relay: the backlog of each sink, and the events that a sink refused permanently."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, NamedTuple

from headway.errors import HeadwayError, NotFound
from headway.telemetry import redact
from headway.views.shape import Json, document

if TYPE_CHECKING:
    from headway.config import Config
    from headway.events import Backlog


class SinkBacklog(NamedTuple):
    """The backlog of one sink in one outbox."""

    sink: Annotated[str, "its name, without secrets"]
    configured: Annotated[bool, "whether the settings name it"]
    waiting: Annotated[int, "events it has not taken"]
    oldest_seconds: Annotated[float | None, "age of the oldest of them; null if none waits"]
    refused: Annotated[int, "events it refused for good, which were put aside"]
    holder: Annotated[str | None, "the relay that serves it now"]


class OutboxStatus(NamedTuple):
    """One outbox with its sinks."""

    outbox: Annotated[str, "database or redis"]
    address: Annotated[str, "where it is, without the password"]
    error: Annotated[str | None, "why it is out of reach; then nothing is known about it"]
    sinks: Annotated[tuple[SinkBacklog, ...], "its sinks"]
    never_served: Annotated[tuple[str, ...], "sinks of the settings that no relay has served yet"]


class RelayStatus(NamedTuple):
    """`headway relay --status`: the backlog of each sink."""

    outboxes: Annotated[tuple[OutboxStatus, ...], "the outboxes"]

    def as_json(self) -> Json:
        return document(self)


class RefusedEvent(NamedTuple):
    """An event that a sink refused permanently."""

    outbox: Annotated[str, "database or redis"]
    sink: Annotated[str, "who refused it"]
    event: Annotated[str, "the event's id, or the number of an entry that is not an event"]
    type: Annotated[str, "the event's type"]
    job: Annotated[str, "the job it is about"]
    reason: Annotated[str, "why it was refused"]
    at: Annotated[datetime | None, "when it was put aside"]


class RelayPoison(NamedTuple):
    """`headway relay --poison list`: the events that were put aside."""

    refused: Annotated[tuple[RefusedEvent, ...], "the events"]

    def as_json(self) -> Json:
        return document(self)


# ---------------------------------------------------------------------------------------------------------------------
# Reading


def read_relay(config: Config) -> RelayStatus:
    """Read the backlogs of the configured outboxes. An unreachable outbox has its error instead."""
    from headway.events import configured_sinks

    configured = [sink.name for sink in configured_sinks(config)]
    outboxes = [("database", config.text("database"), _sql_backlog)]
    if config.is_set("projects_redis"):
        outboxes.append(("redis", config.text("projects_redis"), _redis_backlog))
    found = []
    for name, address, read in outboxes:
        error: HeadwayError | None = None
        rows: list[Backlog] = []
        try:
            rows = read(address)
        except NotFound:
            pass  # without a database there are no events
        except HeadwayError as trouble:
            error = trouble
        found.append(_outbox(name, redact(address), rows, error, configured))
    return RelayStatus(tuple(found))


def _sql_backlog(address: str) -> list[Backlog]:
    from headway._sql import connect
    from headway.events import SqlOutbox

    with connect(address, create=False) as database:
        return SqlOutbox(database).backlog()


def _redis_backlog(address: str) -> list[Backlog]:
    from headway import _redis
    from headway.events import RedisOutbox

    with _redis.connect(address, role="state") as client:
        return RedisOutbox(client).backlog()


def _outbox(
    name: str, address: str, rows: list[Backlog], error: HeadwayError | None, configured: list[str]
) -> OutboxStatus:
    """Return the status of an outbox, without drained sinks of single jobs."""
    shown = [row for row in rows if row.waiting or row.refused or not row.sink.startswith("on_complete ")]
    sinks = tuple(
        SinkBacklog(
            sink=row.sink,
            configured=row.sink in configured,
            waiting=row.waiting,
            oldest_seconds=None if row.oldest_seconds is None else round(row.oldest_seconds, 3),
            refused=row.refused,
            holder=row.holder,
        )
        for row in shown
    )
    known = [row.sink for row in shown]
    never = tuple(one for one in configured if one not in known and error is None)
    return OutboxStatus(name, address, None if error is None else str(error), sinks, never)
