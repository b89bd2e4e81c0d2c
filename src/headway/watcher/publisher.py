"""`Publisher`: publishes reports as events.

Each event goes to a channel, to a stream if one is configured, and to the outbox if sinks are configured. From the
outbox the relay delivers it to the sinks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.events import Event, Json
from headway.events.envelope import plain
from headway.telemetry import Log, metrics
from headway.watcher.ports import RedisProto
from headway.watcher.reports import Report, oldest_first, payload_fields

log = Log("watcher")

SOURCE = "headway.watcher"

#: Up to this many events per batch are logged one by one. Of a larger batch only the number is logged, because a log line
#: takes as long as the event itself.
LOGGED_LIMIT = 10

#: Kinds that report the outcome of a job reported before. Their events have another type, so that counting failures by
#: type stays correct.
OUTCOMES = frozenset({"finished", "retried", "gone"})


@dataclass(frozen=True, slots=True)
class EventForm:
    """The types of the events, and what they contain besides the report."""

    failed: str = "digits.train.failed.v1"
    outcome: str = "digits.train.outcome.v1"
    #: Added to every event: an environment, a region.
    fields: Mapping[str, Json] = field(default_factory=dict)
    #: Keyword arguments of the job to repeat in the event, if the program serializes with JSON.
    payload_fields: Sequence[str] = ()


class Publisher:
    """Publishes to ``channel``, and in the same transaction to ``stream`` (unless empty), trimmed to ``stream_length``.

    ``append`` writes events to the outbox first. It skips events that the outbox already has.
    """

    def __init__(
        self,
        redis: RedisProto,
        form: EventForm,
        channel: str,
        *,
        stream: str = "",
        stream_length: int = 100_000,
        append: Callable[[Sequence[Event]], None] = lambda _: None,
    ) -> None:
        self._redis = redis
        self._form = form
        self._channel = channel
        self._stream = stream
        self._stream_length = stream_length
        self._append = append

    def publish(self, queue: str, reports: Sequence[Report]) -> None:
        """Publish reports in one round trip, oldest first. Raises if the server rejects them."""
        ordered = oldest_first(reports)
        events = [self.event(queue, report) for report in ordered]
        bodies = [event.as_json() for event in events]
        self._append(events)
        self._redis.publish(self._channel, self._stream, self._stream_length, bodies)
        for kind, number in Counter(report.kind for report in ordered).items():
            metrics.count("headway_watcher_events", number, queue=queue, kind=kind)
            if len(events) > LOGGED_LIMIT:
                log.info("reported", event=kind, queue=queue, count=number)
        if len(events) <= LOGGED_LIMIT:
            for event, report in zip(events, ordered, strict=True):
                log.info("reported", event=report.kind, queue=queue, job=report.job_id, eventID=event.id)

    def event(self, queue: str, report: Report) -> Event:
        """Return the event of a report."""
        return Event(
            id=event_id(queue, report),
            type=self._form.outcome if report.kind in OUTCOMES else self._form.failed,
            at=report.at,
            source=SOURCE,
            job=report.job_id,
            version=1,
            data=_as_json(
                {
                    **self._form.fields,
                    **payload_fields(report.payload, self._form.payload_fields),
                    "queue": queue,
                    "job_id": report.job_id,
                    "kind": report.kind,
                    "error_kind": report.error_kind,
                    "message": report.message,
                    "error_type": report.error_type or None,
                    "execution_id": report.execution_id or None,
                    "worker": report.worker or None,
                    "enqueued_at": report.enqueued_at or None,
                    "started_at": report.started_at or None,
                    "ended_at": report.ended_at or None,
                    "running": report.running,
                    "follows": report.follows or None,
                }
            ),
        )


def _as_json(data: Mapping[str, Json]) -> Mapping[str, Json]:
    """Replace values that JSON cannot represent (NaN, half a surrogate pair), so that every event can be published."""
    return {name: plain(value, lenient=True) for name, value in data.items()}


def event_id(queue: str, report: Report) -> str:
    """Return the id of a report's event. It is the same if the report is published again after a crash."""
    return f"{queue}:{report.job_id}:{report.identity}:{report.kind}"
