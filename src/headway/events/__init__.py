"""Events: decided once, told at least once.

An event is written where the decision is made (`append` in the same SQL transaction; other outboxes do it in one
Lua script). A `Relay` hands waiting events to the sinks and notes each delivery *after* it succeeded: a crash in
between repeats the delivery with the same event id, by which a receiver recognises it. Sinks are independent: one
that is down waits for its next try while the others go on.
"""

from __future__ import annotations

import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from headway._redis import EVENTS, EVENTS_QUARANTINE, failures, translate
from headway._sql import Database, Tx
from headway.errors import HeadwayError, InvalidInput, Unavailable
from headway.retry import RetryPolicy
from headway.telemetry import Log, metrics, redact

if TYPE_CHECKING:
    from redis import Redis

log = Log("events")

Json = str | int | float | bool | None | Sequence["Json"] | Mapping[str, "Json"]

#: How long a sink that failed is left alone.
BACKOFF = RetryPolicy(retries=0, base=1.0, cap=60.0, jitter=0.2)


@dataclass(frozen=True, slots=True)
class Event:
    """The envelope. ``id`` is fixed by what happened, not by when it is told."""

    id: str
    type: str
    at: datetime
    source: str
    job: str
    version: int
    data: Mapping[str, Json]

    def as_json(self) -> str:
        return json.dumps(
            {
                "id": self.id,
                "type": self.type,
                "time": self.at.isoformat().replace("+00:00", "Z"),
                "source": self.source,
                "job": self.job,
                "version": self.version,
                "data": self.data,
            },
            ensure_ascii=False,
        )


class Sink(Protocol):
    """Somebody who wants to be told. ``deliver`` returns when the event was taken and raises when it was not."""

    @property
    def name(self) -> str:
        """What deliveries are noted under; stable over restarts."""
        ...

    def deliver(self, event: Event) -> None: ...


@dataclass(frozen=True, slots=True)
class CallableSink:
    """A function of the program."""

    name: str
    call: Callable[[Event], None]

    def deliver(self, event: Event) -> None:
        self.call(event)


@dataclass(frozen=True, slots=True)
class LogSink:
    """One line in the log."""

    name: str = "log"

    def deliver(self, event: Event) -> None:
        log.info("event", event=event.type, eventID=event.id, job=event.job, version=event.version)


@dataclass(frozen=True, slots=True)
class WebhookSink:
    """POST of the envelope as JSON; any 2xx answer means taken. The event id is also in ``Headway-Event-Id``."""

    url: str
    timeout: float = 5.0

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise InvalidInput(f"{redact(self.url)!r} is not a web address.", hint="Use http://... or https://...")

    @property
    def name(self) -> str:
        return f"webhook {redact(self.url)}"

    def deliver(self, event: Event) -> None:
        from http.client import HTTPException
        from urllib import error, request

        class NoRedirect(request.HTTPRedirectHandler):
            """A redirected POST would go on as a GET without the event, and a login page's 200 count as taken."""

            def redirect_request(self, *_: object) -> None:
                return None

        headers = {"Content-Type": "application/json", "Headway-Event-Id": event.id, "User-Agent": "headway"}
        body = event.as_json().encode()
        call = request.Request(self.url, data=body, headers=headers, method="POST")  # noqa: S310 - http(s), checked
        try:
            request.build_opener(NoRedirect).open(call, timeout=self.timeout).close()  # raises for anything but 2xx
        except (error.URLError, HTTPException, TimeoutError, OSError) as trouble:
            said = redact(str(trouble))
            if isinstance(trouble, error.HTTPError):
                trouble.close()
            raise Unavailable(f"The webhook {redact(self.url)} did not take the event: {said}") from trouble


@dataclass(frozen=True, slots=True)
class RedisChannelSink:
    """PUBLISH of the envelope as JSON. A channel keeps nothing: it reaches whoever listens at that moment."""

    client: Redis
    channel: str = "job.completed"

    @property
    def name(self) -> str:
        return f"channel {self.channel}"

    def deliver(self, event: Event) -> None:
        self.client.publish(self.channel, event.as_json())


class Outbox(Protocol):
    """Where events wait. `waiting` gives each undelivered one with a handle for `delivered`."""

    def subscribe(self, sink: str) -> None:
        """Make sure that ``sink`` is told what is decided from now on; a sink known already keeps its place."""
        ...

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]: ...

    def delivered(self, sink: str, handle: str) -> None: ...


def append(tx: Tx, event: Event) -> None:
    """Decide that ``event`` happened, in the transaction that makes it true. Deciding it again changes nothing."""
    tx.execute(
        "INSERT INTO outbox (id, type, at, source, job, version, data) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (id) DO NOTHING",
        (event.id, event.type, event.at.timestamp(), event.source, event.job, event.version, json.dumps(event.data)),
    )


class SqlOutbox:
    """The ``outbox`` table."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def subscribe(self, sink: str) -> None:
        def work(tx: Tx) -> None:
            if tx.one("SELECT 1 FROM sinks WHERE name = ?", (sink,)) is not None:
                return
            if tx.engine == "postgresql":
                # An event of a transaction still open may have a lower seq than one that is committed: wait for it.
                tx.execute("LOCK TABLE outbox IN SHARE MODE")
            tx.execute(
                "INSERT INTO sinks (name, since) SELECT ?, coalesce(max(seq), 0) FROM outbox WHERE true "
                "ON CONFLICT (name) DO NOTHING",
                (sink,),
            )

        self._database.run(work, operation="subscribe")

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        rows = self._database.all(
            "SELECT o.seq, o.id, o.type, o.at, o.source, o.job, o.version, o.data FROM outbox o "
            "JOIN sinks s ON s.name = ? AND o.seq > s.since "
            "WHERE NOT EXISTS (SELECT 1 FROM deliveries d WHERE d.sink = s.name AND d.seq = o.seq) "
            "ORDER BY o.seq LIMIT ?",
            (sink, limit),
        )
        return [
            (str(seq), Event(id, type, datetime.fromtimestamp(at, UTC), source, job, version, json.loads(data)))
            for seq, id, type, at, source, job, version, data in rows
        ]

    def delivered(self, sink: str, handle: str) -> None:
        self._database.run(
            lambda tx: tx.execute(
                "INSERT INTO deliveries (sink, seq) VALUES (?, ?) ON CONFLICT DO NOTHING", (sink, int(handle))
            ),
            operation="delivered",
        )


class RedisOutbox:
    """The stream ``smap:events``, to which scripts append in the step that decides. Each sink is a consumer group.

    A sink that is new is told whatever the stream still holds. An entry is removed when every group has
    acknowledged it; ``on_told`` hears of it just before. Several relays may serve one sink: what a relay took and
    did not acknowledge for ``idle`` seconds is taken over by another.
    """

    def __init__(
        self,
        client: Redis,
        *,
        on_told: Callable[[Sequence[Event]], None] | None = None,
        consumer: str | None = None,
        idle: float = 30.0,
    ) -> None:
        self._client: Any = client  # redis-py types every reply as possibly awaitable
        self._on_told = on_told
        self._consumer = consumer or f"relay-{uuid.uuid4().hex[:12]}"
        self._idle = int(idle * 1000)
        self._key = EVENTS()

    def subscribe(self, sink: str) -> None:
        try:
            with self._translated():
                self._subscribe(sink)
        except Unavailable as error:
            # `waiting` does it when the server is back; until then nothing can be decided there either.
            log.warning("the sink is subscribed when Redis is back", sink=sink, error=str(error))

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        from redis.exceptions import ResponseError

        with self._translated():
            try:
                return self._take(sink, limit)
            except ResponseError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                self._subscribe(sink)  # the server lost the stream; what is announced again waits from its start
                return self._take(sink, limit)

    def delivered(self, sink: str, handle: str) -> None:
        with self._translated():
            self._client.xack(self._key, sink, handle)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            place = self._client.connection_pool.connection_kwargs
            raise translate(error, f"{place.get('host', place.get('path'))}:{place.get('port', '')}") from error

    def _subscribe(self, sink: str) -> None:
        from redis.exceptions import ResponseError

        try:
            self._client.xgroup_create(self._key, sink, id="0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def _take(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        self._client.xautoclaim(self._key, sink, self._consumer, self._idle, count=limit)
        # First what was taken before and not acknowledged, then what is new: a sink is told in order.
        entries = self._read(sink, "0", limit)
        if len(entries) < limit:
            entries += self._read(sink, ">", limit - len(entries))
        if not entries:
            self._trim()
        found = []
        for handle, fields in entries:
            event = _from_entry(fields)
            if event is None:
                self._quarantine(sink, handle, fields)
            else:
                found.append((handle, event))
        return found

    def _read(self, sink: str, since: str, limit: int) -> list[tuple[str, Mapping[str, str]]]:
        reply = self._client.xreadgroup(sink, self._consumer, {self._key: since}, count=limit)
        return [(handle, fields or {}) for _, entries in reply or [] for handle, fields in entries]

    def _quarantine(self, sink: str, handle: str, fields: Mapping[str, str]) -> None:
        log.error("an entry of the stream is no event; it is put aside", key=self._key, reason=handle, sink=sink)
        if fields:
            self._client.xadd(EVENTS_QUARANTINE(), dict(fields), maxlen=1000, approximate=True)
        self._client.xack(self._key, sink, handle)

    def _trim(self) -> None:
        """Remove what every sink has taken. An entry is one of those as long as no group still has it pending and
        all groups have read past it."""
        if not self._client.xlen(self._key):
            return
        bounds = []
        for group in self._client.xinfo_groups(self._key):
            pending = self._client.xpending(self._key, group["name"])
            bounds.append(pending["min"] if pending["pending"] else _after(group["last-delivered-id"]))
        oldest_wanted = min(bounds, key=_place)
        told = self._client.xrange(self._key, max=f"({oldest_wanted}", count=1000)
        if told and self._on_told is not None:
            self._on_told([event for _, fields in told if (event := _from_entry(fields)) is not None])
        if told:
            self._client.xtrim(self._key, minid=_after(told[-1][0]), approximate=False)


def _place(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _after(entry: str) -> str:
    milliseconds, number = _place(entry)
    return f"{milliseconds}-{number + 1}"


def _from_entry(fields: Mapping[str, str]) -> Event | None:
    """The event of a stream entry, or None if it is none: anybody with access can append anything."""
    try:
        at = datetime.fromtimestamp(float(fields["at"]), UTC)
        data = json.loads(fields["data"])
        version = int(fields["version"])
        known = Event(fields["id"], fields["type"], at, fields["source"], fields["job"], version, data)
    except (KeyError, ValueError, OverflowError, OSError):
        return None
    return known if isinstance(data, dict) else None


class Relay:
    """Hands waiting events to every sink. One round is `tick`, which returns how long to rest."""

    def __init__(
        self,
        outbox: Outbox,
        sinks: Sequence[Sink],
        *,
        rest: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._outbox = outbox
        self._sinks = list(sinks)
        self._rest = rest
        self._clock = clock
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        names = [sink.name for sink in self._sinks]
        for name in names:
            if names.count(name) > 1:
                raise InvalidInput(f"Two sinks are called {name!r}.", hint="Deliveries are noted by name: use two.")
            outbox.subscribe(name)

    def tick(self, *, limit: int = 100) -> float:
        delays = [self._serve(sink, limit) for sink in self._sinks]
        return min(delays, default=self._rest)

    def run(self, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            try:
                delay, failures = self.tick(), 0
            except (
                HeadwayError
            ) as error:  # the outbox itself is out of reach: that passes, and the events are safe in it
                failures += 1
                delay = BACKOFF.delay(failures)
                log.warning("waiting events cannot be read; it is tried again", attempt=failures, error=str(error))
            stop.wait(delay)

    def drain(self, seconds: float) -> bool:
        """Deliver all that waits, trying for at most ``seconds``; whether nothing is left."""
        deadline = self._clock() + seconds
        while True:
            self.tick()
            if not any(self._outbox.waiting(sink.name, 1) for sink in self._sinks):
                return True
            left = deadline - self._clock()
            if left <= 0:
                return False
            threading.Event().wait(min(left, 0.2))

    def _serve(self, sink: Sink, limit: int) -> float:
        """Deliver what waits for one sink, in order, up to the first that it does not take."""
        wait = self._not_before.get(sink.name, 0.0) - self._clock()
        if wait > 0:
            return wait
        waiting = self._outbox.waiting(sink.name, limit)
        for handle, event in waiting:
            try:
                sink.deliver(event)
            except Exception as error:  # noqa: BLE001 - a sink is foreign code: the others go on whatever it raises
                failures = self._failures[sink.name] = self._failures.get(sink.name, 0) + 1
                delay = BACKOFF.delay(failures)
                self._not_before[sink.name] = self._clock() + delay
                metrics.count("headway_event_failures", sink=sink.name)
                log.warning(
                    "a sink did not take an event; it is tried again",
                    sink=sink.name, eventID=event.id, attempt=failures, seconds=round(delay, 1), error=str(error),
                )  # fmt: skip
                return delay
            self._failures.pop(sink.name, None)
            self._outbox.delivered(sink.name, handle)
            metrics.count("headway_events", sink=sink.name)
        return 0.0 if len(waiting) == limit else self._rest
