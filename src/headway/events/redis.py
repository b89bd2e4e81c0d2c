"""The outbox in Redis: the stream ``smap:events``, to which scripts append in the step that decides.

Each sink is a consumer group with one consumer, ``relay``: the lease of the sink says which process that is just now.
What a relay had read and not acknowledged when it died is what its successor reads first. An entry leaves the stream
when every group has settled it; ``on_delivered`` hears of it just before. While some sinks have an event and others do
not, ``notes`` keeps which: an event that is announced again after a loss of Redis has the field ``again``, and sinks that
took it before are skipped. What a sink refused, and entries that are no events, go to ``smap:events:quarantine`` in the
step that acknowledges them.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol

from headway._lease import Lease, Owner, RedisLeases, read_owner
from headway._redis import (
    EVENTS,
    EVENTS_HOLD,
    EVENTS_LEASE,
    EVENTS_QUARANTINE,
    EVENTS_REFUSALS,
    failures,
    script,
    translate,
)
from headway.errors import HeadwayError, InvalidInput
from headway.events.envelope import Event, from_fields, whole
from headway.events.outbox import LEASE, Backlog, Refused
from headway.telemetry import Log, metrics, redact

if TYPE_CHECKING:
    from redis import Redis

log = Log("events")

CONSUMER = "relay"

#: Entries looked at, at most, to say how many wait for a sink.
LOOK = 1_000

#: Entries removed at a time.
TRIM = 1_000

#: Seconds for which nothing leaves a stream that was lost. Other relays, which may serve other sinks, see within less that they
#: have to subscribe again: they look every 30 s, and leave a server that was away alone for up to 72 s.
HOLD = 120

#: Seconds that a sink waits for the note of what was delivered, so that a relay that ends has noted it. Whatever takes
#: longer, as a database that is silent, goes on without the sink.
NOTING = 0.5

#: A name put into the stream again for one sink alone is under this field.
_TO = b"to"

#: This field marks an event that may have been in the stream before Redis lost it.
_AGAIN = b"again"

#: What reading an entry that is no event may raise.
_DAMAGE = (KeyError, ValueError, TypeError, OverflowError, OSError, RecursionError, InvalidInput)

Entry = tuple[str, Mapping[bytes, bytes]]


class SinkNotes(Protocol):
    """Which sink took which event, recorded outside Redis."""

    def note(self, sink: str, events: Sequence[Event]) -> None:
        """Record that the sink took these events."""
        ...

    def taken(self, sink: str, events: Sequence[Event]) -> set[str]:
        """Return the ids of those events that the sink took before."""
        ...


class RedisOutbox:
    """See the module. Safe to use from many threads and many processes."""

    name = "redis"

    def __init__(
        self,
        client: Redis,
        *,
        on_delivered: Callable[[Sequence[Event]], None] | None = None,
        notes: SinkNotes | None = None,
        lease: float = LEASE,
    ) -> None:
        self._client: Any = client  # redis-py types every reply as possibly awaitable
        self._leases = RedisLeases(client)
        self._on_delivered, self._notes, self._lease = on_delivered, notes, lease
        self._noted: dict[str, str] = {}  # sink -> the last entry that `notes` has of it
        self._jobs: dict[str, str | None] = {}
        self._lock = threading.Lock()
        self._noting: threading.Thread | None = None
        self._noting_since = 0.0
        self._key, self._quarantine = EVENTS(), EVENTS_QUARANTINE()

    def subscribe(self, sink: str, job: str | None = None) -> None:
        again = sink in self._jobs
        self._jobs[sink] = job
        with self._translate_errors():
            self._subscribe(sink, again=again)

    def waits(self, sink: str) -> bool:
        with self._translate_errors():
            return bool(self._client.xlen(self._key))

    def acquire(self, sink: str) -> Lease:
        with self._translate_errors():
            return self._leases.acquire(_lease_key(sink), Owner.current(), self._lease)

    def renew(self, lease: Lease) -> None:
        with self._translate_errors():
            self._leases.renew(lease)

    def release(self, lease: Lease) -> None:
        with self._translate_errors():
            self._leases.release(lease)

    def waiting(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        with self._translate_errors():
            try:
                return self._take(sink, limit)
            except failures() as error:
                if "NOGROUP" not in str(error):
                    raise
                # The server lost the stream; what is announced again waits from its start.
                self._subscribe(sink, again=True)
                return self._take(sink, limit)

    def delivered(self, sink: str, handles: Sequence[str]) -> None:
        with self._translate_errors():
            self._client.xack(self._key, sink, *handles)

    def count_refusal(self, sink: str, handle: str, *, seen: int, apart: float) -> int:
        """Read and written in two steps: whoever delivers has the lease of the sink."""
        with self._translate_errors():
            key, (seconds, microseconds) = _refusals_key(sink), self._client.time()
            refusing, times, at = str(self._client.get(key) or "- 0 0").split()
            now = seconds + microseconds / 1e6
            count = int(times) if refusing == handle else 0
            if count in (0, seen) or not 0 <= now - float(at) < apart:
                count += 1
                self._client.set(key, f"{handle} {count} {now:.3f}", ex=86_400)
            return count

    def put_aside(self, sink: str, handle: str, reason: str) -> None:
        with self._translate_errors():
            found = self._range(handle, handle, 1)
            self._put_aside(sink, handle, found[0][1] if found else {}, reason)

    def refused(self, sink: str | None = None) -> list[Refused]:
        with self._translate_errors():
            entries = self._raw("XRANGE", self._quarantine, "-", "+")
        found = []
        for handle, fields in entries:
            name = _text(fields.get(b"sink"))
            if sink is None or name == sink:
                at = datetime.fromtimestamp(int(handle.partition(b"-")[0]) / 1000, UTC)
                said = [_text(fields.get(field)) for field in (b"event.id", b"event.type", b"event.job", b"reason")]
                found.append(Refused(name, handle.decode(), said[0], said[1], said[2], said[3], at))
        return found

    def retry(self, found: Refused) -> None:
        """Appended anew, for this sink alone: groups cannot take back an acknowledgement. The id stays the same."""
        with self._translate_errors():
            for handle, fields in self._raw("XRANGE", self._quarantine, found.handle, found.handle):
                again: list[bytes] = [_TO, found.sink.encode()]
                for name, value in fields.items():
                    if name.startswith(b"event."):
                        again += [name.removeprefix(b"event."), value]
                pipeline = self._client.pipeline(transaction=True)
                pipeline.execute_command("XADD", self._key, "*", *again)
                pipeline.execute_command("XDEL", self._quarantine, handle)
                pipeline.execute()

    def discard(self, found: Refused) -> None:
        with self._translate_errors():
            self._client.xdel(self._quarantine, found.handle)

    def backlog(self, sink: str | None = None) -> list[Backlog]:
        with self._translate_errors():
            if not self._client.exists(self._key):
                return []
            groups = [group for group in self._client.xinfo_groups(self._key) if sink in (None, group["name"])]
            refused: dict[str, int] = {}
            for _, fields in self._raw("XRANGE", self._quarantine, "-", "+"):
                name = _text(fields.get(b"sink"))
                refused[name] = refused.get(name, 0) + 1
            return [self._behind(group, refused) for group in groups]

    def _behind(self, group: Mapping[str, Any], refused: Mapping[str, int]) -> Backlog:
        name, read_up_to = str(group["name"]), str(group["last-delivered-id"])
        pending = self._client.xpending(self._key, name)
        fresh = self._range(f"({read_up_to}", "+", LOOK)
        unread = len(fresh) if len(fresh) < LOOK else max(LOOK, self._client.xlen(self._key) - pending["pending"])
        first = pending["min"] if pending["pending"] else fresh[0][0] if fresh else None
        now = self._client.time()
        age = None if first is None else max(0.0, now[0] + now[1] / 1e6 - _place(first)[0] / 1000)
        owner = read_owner(str(self._client.get(_lease_key(name)) or "").partition(" ")[2])
        serves = str(owner.owner) if owner and not owner.owner.is_dead else None
        return Backlog(name, pending["pending"] + unread, age, refused.get(name, 0), serves)

    def forget(self, sink: str) -> bool:
        with self._translate_errors():
            return bool(self._client.exists(self._key)) and bool(self._client.xgroup_destroy(self._key, sink))

    def tidy(self, sink: str) -> None:
        """What is settled leaves the stream when nothing waits; where something always does, it leaves here, and a sink
        that has more to take does not wait for the note."""
        with self._translate_errors():
            self._trim(0.0)

    # ---- within ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except failures() as error:
            place = self._client.connection_pool.connection_kwargs
            raise translate(error, f"{place.get('host', place.get('path'))}:{place.get('port', '')}") from error

    def _subscribe(self, sink: str, *, again: bool) -> None:
        self._noted.pop(sink, None)
        script("events/subscribe")(self._client, [self._key, EVENTS_HOLD()], [sink, HOLD if again else 0])

    def _raw(self, *words: object) -> Any:
        """A reply as it is in the server: anybody can have appended bytes that are no UTF-8."""
        return self._client.execute_command(*words, NEVER_DECODE=True)

    def _range(self, first: str, last: str, count: int) -> list[Entry]:
        reply = self._raw("XRANGE", self._key, first, last, "COUNT", count)
        return [(handle.decode(), fields or {}) for handle, fields in reply]

    def _take(self, sink: str, limit: int) -> list[tuple[str, Event]]:
        while True:
            # First what was read before and not acknowledged, then what is new: a sink is told in order.
            entries = self._read(sink, "0", limit)
            if len(entries) < limit:
                entries += self._read(sink, ">", limit - len(entries))
            found = [(handle, event) for handle, fields in entries if (event := self._wanted(sink, handle, fields))]
            again = {handle for handle, fields in entries if _AGAIN in fields}
            if again:
                found = self._skip_taken(sink, found, again)
            if found:
                return found
            if not entries and not self._adopt(sink, limit):
                self._trim(NOTING)
                return []

    def _wanted(self, sink: str, handle: str, fields: Mapping[bytes, bytes]) -> Event | None:
        """The event of an entry, if the sink is to hear it; what it is not to hear is settled here."""
        event = None
        if fields.get(_TO, sink.encode()) == sink.encode():
            try:
                event = _event(fields)
            except _DAMAGE as error:
                self._say_damaged(sink, handle, fields, error)
                return None
        job = self._jobs.get(sink)
        if event is None or (job is not None and event.job != job):
            self._client.xack(self._key, sink, handle)
            return None
        return event

    def _skip_taken(self, sink: str, found: list[tuple[str, Event]], again: set[str]) -> list[tuple[str, Event]]:
        """Leave out the events in ``again`` that the sink took before Redis lost the stream.

        While the database does not answer, the sink gets them once more: events behind them must not wait for it.
        """
        asked = [event for handle, event in found if handle in again]
        if self._notes is None or not asked:
            return found
        try:
            taken = self._notes.taken(sink, asked)
        except HeadwayError as error:
            log.warning("delivering without knowing earlier deliveries", sink=sink, error=str(error))
            return found
        settled = [handle for handle, event in found if handle in again and event.id in taken]
        if settled:
            self._client.xack(self._key, sink, *settled)
        return [(handle, event) for handle, event in found if handle not in settled]

    def _say_damaged(self, sink: str, handle: str, fields: Mapping[bytes, bytes], error: Exception) -> None:
        why = f"{type(error).__name__}: {error}"
        log.error(
            "an entry of the stream is no event; it is put aside", key=self._key, reason=handle, sink=sink, error=why
        )
        metrics.count("headway_events_refused", sink=sink)
        self._put_aside(sink, handle, fields, f"no event: {why}")

    def _adopt(self, sink: str, limit: int) -> bool:
        """Make ours what a consumer of another name has read: whoever it was, we have the lease now."""
        if self._client.xpending(self._key, sink)["pending"] == 0:
            return False
        self._raw("XAUTOCLAIM", self._key, sink, CONSUMER, 0, "0", "COUNT", limit)
        return True

    def _read(self, sink: str, since: str, limit: int) -> list[Entry]:
        reply = self._raw("XREADGROUP", "GROUP", sink, CONSUMER, "COUNT", limit, "STREAMS", self._key, since)
        return [(handle.decode(), fields or {}) for _, entries in reply or [] for handle, fields in entries]

    def _put_aside(self, sink: str, handle: str, fields: Mapping[bytes, bytes], reason: str) -> None:
        words: list[object] = ["sink", sink, "reason", whole(redact(reason))[:500]]
        for name, value in fields.items():
            if name not in (_TO, _AGAIN):  # a retry is delivered whatever `notes` says
                words += [b"event." + name, value]
        pipeline = self._client.pipeline(transaction=True)
        if fields:  # none: the entry itself is gone
            pipeline.execute_command("XADD", self._quarantine, "*", *words)
        pipeline.execute_command("XACK", self._key, sink, handle)
        pipeline.execute()

    def _trim(self, patience: float) -> None:
        """Remove what every sink has settled: what no group still has pending and all groups have read past."""
        with self._lock:
            noting = self._noting
            if noting is None or not noting.is_alive():
                settled = self._settled()
                if self._on_delivered is None:
                    if settled:
                        self._remove(settled[-1][0])
                    return
                taken = self._taken(settled[-1][0] if settled else "0-0")
                if not settled and not taken:
                    return
                noting = threading.Thread(
                    target=self._note, args=(settled, taken), name="headway-events-note", daemon=True
                )
                noting.start()
                self._noting, self._noting_since = noting, time.monotonic()
            # It may wait for a database, and no sink does: a note is waited for once, whoever began it.
            left = self._noting_since + patience - time.monotonic()
        noting.join(max(0.0, left))

    def _settled(self) -> list[Entry]:
        if not self._client.xlen(self._key):  # asked first: there may be no stream
            return []
        groups = self._client.xinfo_groups(self._key)
        if not groups:
            return []
        missing = self._jobs.keys() - {str(group["name"]) for group in groups}
        if missing:
            # The server lost the stream, and these were not served since: what is in it now waits for them too.
            for sink in missing:
                self._subscribe(sink, again=True)
            return []
        if self._client.exists(EVENTS_HOLD()):
            return []  # sinks of another relay may not be known again yet
        bounds = [self._unsettled(group) for group in groups]
        return self._range("-", f"({min(bounds, key=_place)}", TRIM)

    def _unsettled(self, group: Mapping[str, Any]) -> str:
        """Return the first id that the group may not have settled."""
        pending = self._client.xpending(self._key, group["name"])
        return str(pending["min"] if pending["pending"] else _after(group["last-delivered-id"]))

    def _taken(self, after: str) -> dict[str, list[Entry]]:
        """Return the entries behind ``after`` that single sinks have settled and `notes` does not have yet."""
        if self._notes is None or not self._client.xlen(self._key):
            return {}
        found = {}
        for group in self._client.xinfo_groups(self._key):
            sink = str(group["name"])
            if sink in self._jobs:
                first = max(after, self._noted.get(sink, after), key=_place)
                found[sink] = self._range(f"({first}", f"({self._unsettled(group)}", TRIM)
        return {sink: entries for sink, entries in found.items() if entries}

    def _note(self, settled: Sequence[Entry], taken: Mapping[str, Sequence[Entry]]) -> None:
        """In a thread of its own: what notes it may be a database that does not answer."""
        assert self._on_delivered is not None
        try:
            for sink, entries in taken.items():
                assert self._notes is not None
                self._notes.note(sink, list(_readable(entries)))
                self._noted[sink] = entries[-1][0]
            if not settled:
                return
            self._on_delivered(list(_readable(settled)))
            still = self._settled()  # that may have taken long: a sink that came meanwhile waits for what it found
            if still:
                self._remove(min(settled[-1][0], still[-1][0], key=_place))
        except Exception as error:  # noqa: BLE001  # its store may be away: the entries wait for it here
            log.warning("delivered events stay in the stream until that is noted", key=self._key, error=str(error))

    def _remove(self, last: str) -> None:
        self._client.xtrim(self._key, minid=_after(last), approximate=False)


def _readable(entries: Sequence[Entry]) -> Iterator[Event]:
    for _, fields in entries:
        try:
            yield _event(fields)
        except _DAMAGE:
            continue  # it was put aside and said


def _event(fields: Mapping[bytes, bytes]) -> Event:
    known = {name.decode(): value.decode() for name, value in fields.items()}
    return from_fields(known, datetime.fromtimestamp(float(known["at"]), UTC), json.loads(known["data"]))


def _text(value: bytes | None) -> str:
    return "" if value is None else value.decode("utf-8", "backslashreplace")


def _lease_key(sink: str) -> str:
    return EVENTS_LEASE(sink=_digest(sink))


def _refusals_key(sink: str) -> str:
    return EVENTS_REFUSALS(sink=_digest(sink))


def _digest(sink: str) -> str:
    return hashlib.sha256(sink.encode()).hexdigest()[:16]


def _place(entry: str) -> tuple[int, int]:
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _after(entry: str) -> str:
    milliseconds, number = _place(entry)
    return f"{milliseconds}-{number + 1}"
