"""Tells a report to the world: one event on a channel, a durable copy in a stream when one is named, and in the outbox
when sinks are configured, from where the relay takes it to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headway.events import Event, Json
from headway.events.envelope import plain
from headway.telemetry import Log, metrics
from headway.watcher.logic import Report, oldest_first, payload_fields
from headway.watcher.ports import RedisProto

log = Log("watcher")

SOURCE = "headway.watcher"

#: Events published at once that the log names one by one. Of a flood it has the number: a line costs as much as the event
#: itself, and whoever looks for one finds it in the stream.
NAMED = 10

#: Kinds that are no failure but what became of a job reported before: they have an event name of their own, so that
#: whoever counts failures by name stays right.
OUTCOMES = frozenset({"finished", "retried", "gone"})


@dataclass(frozen=True, slots=True)
class EventForm:
    """What events are called, and what they carry besides the facts."""

    failed: str = "digits.train.failed.v1"
    outcome: str = "digits.train.outcome.v1"
    #: The same in every event: an environment, a region.
    fields: Mapping[str, Json] = field(default_factory=dict)
    #: Keyword arguments of the job to repeat in the event, when the program serialises with JSON.
    payload_fields: Sequence[str] = ()


class Publisher:
    """Publishes to ``channel``, and in the same step to ``stream`` if it has a name (trimmed to about its length).

    ``append`` puts events into the outbox; it comes first, and an event that is there already is not added again.
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
        """All of them in one round trip, oldest first. Raises when the server did not take them."""
        ordered = oldest_first(reports)
        events = [self.event(queue, report) for report in ordered]
        bodies = [event.as_json() for event in events]
        self._append(events)
        self._redis.publish(self._channel, self._stream, self._stream_length, bodies)
        for kind, number in Counter(report.kind for report in ordered).items():
            metrics.count("headway_watcher_events", number, queue=queue, kind=kind)
            if len(events) > NAMED:
                log.info("reported", event=kind, queue=queue, count=number)
        if len(events) <= NAMED:
            for event, report in zip(events, ordered, strict=True):
                log.info("reported", event=report.kind, queue=queue, job=report.job_id, eventID=event.id)

    def event(self, queue: str, report: Report) -> Event:
        return Event(
            id=event_id(queue, report),
            type=self._form.outcome if report.kind in OUTCOMES else self._form.failed,
            at=report.at,
            source=SOURCE,
            job=report.job_id,
            version=1,
            data=_holdable(
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


def _holdable(data: Mapping[str, Json]) -> Mapping[str, Json]:
    """As JSON can hold it: nothing that a job contains (NaN, half a character) may keep the others from being told."""
    return {name: plain(value, lenient=True) for name, value in data.items()}


def event_id(queue: str, report: Report) -> str:
    """Fixed by the fact itself: whoever sees it twice, because the watcher died before it took note, can tell."""
    return f"{queue}:{report.job_id}:{report.identity}:{report.kind}"
